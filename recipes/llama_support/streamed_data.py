"""Streamed data of a run: its steps, its validation rows, and whether its shards are still the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .config import Config
from .encode import Document, EncodingReport
from .errors import BadInput
from .packing import pack_documents
from .shards import ShardedRows
from .streaming import Source, StreamedSteps

SHARDS_FILE = "data.json"
"""In the run folder: what the shards were when the run began, to name the one that is not the same."""

_ALL_DIGESTS = 2**64
_FIRST_ROWS = 1024
ShardList = list[tuple[str, int, int, str]]


def open_rows(data: str, rank: int) -> ShardedRows:
    """Index and open the shards of a folder or pattern; rank 0 tells how far it is. Raises BadInput."""
    return ShardedRows(data, rank=rank, say=(lambda line: print(line, flush=True)) if rank == 0 else None)


def stream(
    config: Config, tokenizer: Any, vocabulary: int, rank: int, world_size: int
) -> tuple[StreamedSteps, ShardedRows, Source]:
    """The training steps of a folder or pattern, its rows, and the source that knows which of them are for training.

    Raises BadInput; no collective inside.
    """
    rows = open_rows(config.data, rank)
    threshold = 0
    if config.validation_data is None:
        threshold = max(int(config.validation_fraction * _ALL_DIGESTS), rows.smallest_digest + 1)
        if rows.count_below(threshold) == len(rows):
            raise BadInput(
                f"the data ({len(rows)} rows) leaves none to train on once validation rows are set aside;"
                " give more rows, or --validation-data FILE.jsonl"
            )
    source = Source(rows, tokenizer, config.sequence_length, config.long_rows, config.seed, threshold, vocabulary)
    steps = StreamedSteps(
        source,
        fingerprint=_fingerprint(source),
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        rank=rank,
        world_size=world_size,
        workers=config.data_workers,
    )
    return steps, rows, source


def validation_documents(source: Source, threshold: int, sequences: int) -> tuple[list[Document], EncodingReport]:
    """Encoded rows with a digest below `threshold`, those with the smallest first: enough for so many packed sequences.

    A digest is as good as random, so these are a fair sample whatever the order of the shards. `sequences` 0: all rows.
    Raises BadInput where none can be used.
    """
    wanted = _FIRST_ROWS
    while True:
        part = threshold if sequences == 0 else min(threshold, wanted * _ALL_DIGESTS // len(source.rows))
        report = EncodingReport()
        numbers = source.rows.smallest(part)
        documents = [
            document
            for start in range(0, len(numbers), _FIRST_ROWS)
            for document in source.encode(numbers[start : start + _FIRST_ROWS], report)
            if document is not None
        ]
        if part == threshold or len(pack_documents(documents, source.context)) >= sequences:
            break
        wanted *= 4
    if not documents:
        raise BadInput(
            f"none of the {len(numbers)} validation rows can be used ({report}); raise --sequence-length (now"
            f" {source.context}), or give --validation-data FILE.jsonl"
        )
    return documents, report


def check_shards_unchanged(config: Config, rows: ShardedRows, rank: int) -> None:
    """Raise BadInput, naming the shard, where a run that has checkpoints began with other shards; else note them.

    No collective inside; rank 0 writes.
    """
    path = config.run_folder / SHARDS_FILE
    now: ShardList = [shard.description for shard in rows.shards]
    if any((config.run_folder / "checkpoints").glob("step-*")):
        if path.is_file():
            before = [tuple(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["shards"]]
            difference = first_difference(before, now)
            if difference:
                raise BadInput(
                    f"--data {config.data}: {difference} since the run in {config.run_folder} began; give the files as"
                    " they were, or another --output"
                )
    elif rank == 0:
        path.write_text(json.dumps({"data": config.data, "shards": now}) + "\n", encoding="utf-8")


def first_difference(before: ShardList, now: ShardList) -> str:
    """How the first shard that differs differs, for a message; empty where all are the same."""
    old, new = ({entry[0]: entry[1:] for entry in entries} for entries in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"shard {name} is gone"
        if name not in old:
            return f"shard {name} has come"
        if old[name] != new[name]:
            return (
                f"shard {name} has changed ({old[name][1]:,} rows in {old[name][0]:,} bytes, now {new[name][1]:,} in"
                f" {new[name][0]:,})"
            )
    return ""


def _fingerprint(source: Source) -> str:
    tokenizer = source.tokenizer
    digest = hashlib.sha256()
    for part in (
        "streamed 1",
        [shard.description for shard in source.rows.shards],
        tokenizer.backend_tokenizer.to_str(),
        getattr(tokenizer, "chat_template", None),
        [tokenizer.eos_token_id, tokenizer.bos_token_id],
        [source.context, source.long_rows, source.seed, source.threshold],
    ):
        digest.update(hashlib.sha256(json.dumps(part).encode()).digest())
    return digest.hexdigest()[:16]
