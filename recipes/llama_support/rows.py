"""Rows of training text: read from JSONL, or made from the standard library, and split in two."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadInput
from .stdlib_corpus import stdlib_functions


@dataclass(frozen=True)
class Row:
    """One document. Exactly one of the three forms is set.

    Attributes:
        origin: "FILE, line N", for messages about this row.
        messages: a conversation, each entry with a role and a content.
        prompt, completion: plain text, trained on the completion.
        text: plain text, trained on all of it.
    """

    origin: str
    messages: tuple[dict[str, str], ...] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None

    @property
    def digest(self) -> int:
        """64 bits of the SHA-256 of the content: the same row has the same digest on every machine and day."""
        content = json.dumps([self.messages, self.prompt, self.completion, self.text], sort_keys=True)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def read_rows(data: str) -> list[Row]:
    """The rows of `--data`: the standard library's functions for "stdlib", else those of a .jsonl file."""
    if data == "stdlib":
        rows = [Row("stdlib", prompt=prompt, completion=docstring) for prompt, docstring in stdlib_functions()]
        if not rows:
            raise BadInput("--data stdlib found no sources in this Python's standard library; give --data FILE.jsonl")
        return rows
    return read_jsonl(Path(data))


def read_jsonl(path: Path) -> list[Row]:
    """The rows of a JSONL file, blank lines skipped. BadInput names the file and the line that cannot be used."""
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise BadInput(f"data file {path} {problem}; give --data FILE.jsonl, or --data stdlib")
    with path.open("rb") as file:
        rows = [parse_row(line, f"{path}, line {number}") for number, _, line in numbered_lines(file)]
    if not rows:
        raise BadInput(f"data file {path} holds no rows; give a .jsonl file with one JSON object per line")
    return rows


def numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, line) of each line that is not blank; a byte order mark at the start is none.

    Lines end with LF or CRLF, the last one with or without.
    """
    offset = 0
    for number, line in enumerate(file, start=1):
        start, end = offset, offset + len(line)
        if number == 1 and line.startswith(codecs.BOM_UTF8):
            start, line = len(codecs.BOM_UTF8), line[len(codecs.BOM_UTF8) :]
        if line.strip():
            yield number, start, line
        offset = end


def split_rows(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """(training rows, validation rows), by each row's digest: a row's side never depends on the other rows.

    Equal rows fall on the same side. Where no digest falls below `fraction`, the rows with the smallest one are
    validation. Raises BadInput where one of the sides would be empty.
    """
    digests = [row.digest for row in rows]
    threshold = max(int(fraction * 2**64), min(digests) + 1)
    training = [row for row, digest in zip(rows, digests) if digest >= threshold]
    validation = [row for row, digest in zip(rows, digests) if digest < threshold]
    if not training:
        raise BadInput(
            f"the data ({len(rows)} rows) leaves none to train on once validation rows are set aside;"
            " give more rows, or --validation-data FILE.jsonl"
        )
    return training, validation


def parse_row(line: bytes, origin: str) -> Row:
    """The row of one line of JSONL. BadInput says what is wrong with it, after `origin`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter: nested too deeply for Python's parser
        raise BadInput(f"{origin}: not JSON ({error}); each line must be one JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise BadInput(f"{origin}: a JSON {type(value).__name__}, not an object with messages, prompt or text")
    if "messages" in value:
        return Row(origin, messages=_messages(value["messages"], origin))
    if "prompt" in value and "completion" in value:
        prompt, completion = (_string(value, name, origin) for name in ("prompt", "completion"))
        return Row(origin, prompt=prompt, completion=completion)
    if "text" in value:
        return Row(origin, text=_string(value, "text", origin))
    raise BadInput(
        f'{origin}: has the fields {sorted(value)}; it needs "messages", "prompt" and "completion", or "text"'
    )


def _messages(value: Any, origin: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise BadInput(f'{origin}: "messages" must be a list of objects with "role" and "content"')
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadInput(f'{origin}: messages[{index}] must be an object with "role" and "content"')
        place = f"{origin}: messages[{index}]"
        messages.append({name: _string(message, name, place) for name in ("role", "content")})
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInput(f'{origin}: "messages" has no turn with the role "assistant", so nothing to train on')
    return tuple(messages)


def _string(value: dict[str, Any], name: str, origin: str) -> str:
    if not isinstance(value.get(name), str):
        found = "missing" if name not in value else f"a {type(value[name]).__name__}"
        raise BadInput(f'{origin}: "{name}" is {found}; it must be a string')
    text: str = value[name]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f'{origin}: "{name}" holds half a surrogate pair, which is no text; mend the row') from error
    return text
