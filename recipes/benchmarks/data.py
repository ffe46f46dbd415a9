"""How fast streamed data is, and how long a start and a resume take, against the size of the files.

    python recipes/benchmarks/data.py --output OUT
    python recipes/benchmarks/data.py --output OUT --vocabulary 128256              # a tokenizer as large as Llama 3's
    python recipes/benchmarks/data.py --output OUT --model DIR --megabytes 1000     # another tokenizer, more data

Rows are made of the standard library's functions. All times are CPU seconds of one process, which other programs on the
machine change little: tokens per second are those of one worker, or of a rank without workers.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core, as a worker has it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
import tyro
from llama_support.config import Config
from llama_support.model import load_tokenizer, model_folder
from llama_support.rows import read_rows
from llama_support.streamed_data import stream
from llama_support.streaming import StreamedSteps
from llama_support.train_debug_tokenizer import LLAMA3_WORDS, train
from llama_support.world import World

NEEDS = {"8B": 7_000, "1B": 60_000}
"""Tokens per second that one GPU trains on, of an 8B model measured, of a 1B model estimated."""
_ALONE = World(0, 1, torch.device("cpu"), None)
_WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure streamed data: indexing, start, resume, tokens per second."""

    output: Path
    """Folder for the generated rows and the table."""
    model: str = "debug"
    """Whose tokenizer and chat template."""
    vocabulary: int | None = None
    """Instead of the model's: a tokenizer of so many entries that cuts words as Llama 3's does, trained on the Python
    files of this environment (a few minutes, and kept in the output folder)."""
    megabytes: int = 100
    """Size of the generated data of each form; a start and a resume are timed at a quarter, a half and all of it."""
    shards: int = 8
    """Files that it is in."""
    sequence_length: int = 4096
    """Tokens per packed sequence."""
    steps: int = 60
    """Steps of four sequences that are timed."""


def rows_of(form: str) -> Iterator[dict[str, Any]]:
    """Endless rows of one form, about 1 KB each; a number in each makes them different."""
    functions = [(row.prompt or "", row.completion or "") for row in read_rows("stdlib")]
    draw = random.Random(0)
    while True:
        (code, text), (other, more) = draw.sample(functions, 2)
        mark = f"# {draw.getrandbits(64):x}\n"
        if form == "text":
            yield {"text": f"{mark}{code}{text}"}
        elif form == "prompt and completion":
            yield {"prompt": mark + code, "completion": text}
        else:
            turns = [("user", mark + code), ("assistant", text), ("user", other[:300]), ("assistant", more[:300])]
            yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_shards(folder: Path, form: str, size: int, count: int) -> None:
    """Write about `size` bytes of rows into `count` files, unless they are there."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    rows = rows_of(form)
    for number in range(count):
        written = 0
        with (folder / f"part-{number:03}.jsonl").open("w", encoding="utf-8") as file:
            while written < size / count:
                written += file.write(json.dumps(next(rows)) + "\n")


def large_tokenizer(folder: Path, vocabulary: int) -> Any:
    """The tokenizer of `folder`; trained first if there is none, on the Python files of this environment.

    Ends the program where these have too few words for so many entries.
    """
    if not folder.is_dir():
        places = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
        files = sorted({path for place in places for path in place.rglob("*.py")})
        sizes = sum(path.stat().st_size for path in files)
        print(f"training a tokenizer on {len(files):,} files, {sizes / 1e6:.0f} MB", flush=True)
        tokenizer = train(
            (path.read_text(encoding="utf-8", errors="replace") for path in files), vocabulary, LLAMA3_WORDS
        )
        if len(tokenizer) < vocabulary:
            sys.exit(f"these files have only {len(tokenizer):,} entries; give a smaller --vocabulary")
        tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def open_steps(options: Options, folder: Path, tokenizer: Any) -> StreamedSteps:
    """The steps of a rank with four sequences per step and no workers."""
    config = Config(
        data=str(folder), sequence_length=options.sequence_length, global_batch=4, micro_batch=4, data_workers=0
    )
    return stream(config, tokenizer, 2**31, 0, 1)[0]


def measure(options: Options, folder: Path, tokenizer: Any) -> dict[str, float]:
    """Figures of one folder: seconds to index, to start with an index, to resume; tokens per second."""
    for index in folder.glob(".row_index/*"):
        index.unlink()
    indexing, _ = timed(lambda: open_steps(options, folder, tokenizer))
    start, steps = timed(lambda: open_steps(options, folder, tokenizer))
    batches = steps.steps(_ALONE)
    for _ in range(_WARM_STEPS):
        next(batches)
    seconds, taken = timed(lambda: [next(batches) for _ in range(options.steps)])
    filled = sum(
        int((batch["input_ids"] != 0).sum()) for step in taken for batch in step.micro_batches
    )  # token 0 begins or pads a document: left out, so the figure is a little low
    state = steps.state_dict()

    def resume() -> None:
        again = open_steps(options, folder, tokenizer)
        again.load_state_dict(state)
        next(again.steps(_ALONE))

    resuming, _ = timed(resume)
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    return {
        "MB": size / 1e6,
        "rows": float(len(steps._source.rows)),
        "index_s": indexing,
        "start_s": start,
        "resume_s": resuming,
        "tokens_per_s": filled / seconds,
        "filled": filled / (options.steps * 4 * options.sequence_length),
    }


def main() -> None:
    """Generate, measure, print and write the table."""
    options = tyro.cli(Options)
    if options.vocabulary is None:
        tokenizer = load_tokenizer(model_folder(options.model))
    else:
        tokenizer = large_tokenizer(options.output / f"tokenizer-{options.vocabulary}", options.vocabulary)
    lines = [
        "| rows | MB | rows | index s | index MB/s | start s | resume s | tokens/s | sequences filled | 8B | 1B |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for form in ("text", "prompt and completion", "messages"):
        for part in (4, 2, 1):
            folder = options.output / f"{form.replace(' ', '-')}-{options.megabytes // part}"
            write_shards(folder, form, options.megabytes * 10**6 // part, options.shards)
            found = measure(options, folder, tokenizer)
            rate = found["tokens_per_s"]
            cells = [
                *(form, f"{found['MB']:.0f}", f"{found['rows']:,.0f}"),
                *(f"{found['index_s']:.2f}", f"{found['MB'] / found['index_s']:.0f}"),
                *(f"{found['start_s']:.3f}", f"{found['resume_s']:.3f}"),
                *(f"{rate:,.0f}", f"{found['filled']:.1%}"),
                *(f"{rate / NEEDS['8B']:.0f} x", f"{rate / NEEDS['1B']:.1f} x"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    table = "\n".join(lines)
    (options.output / "table.md").write_text(f"{table}\n\n{versions}, {time.strftime('%Y-%m-%d')}\n", encoding="utf-8")
    print(f"{table}\n{versions}")


if __name__ == "__main__":
    main()
