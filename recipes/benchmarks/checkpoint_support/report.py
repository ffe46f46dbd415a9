"""The checkpoint benchmark's results: a table on the terminal, checkpoint.json and checkpoint.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashoptim_dist.checkpoint.files import write_durably

from .measure import Result

_HEAD = (
    "bytes/param",
    "save s",
    "save GB/s",
    "load s",
    "load GB/s",
    "first stall ms",
    "stall ms",
    "stall %",
    "step slower by",
    "save MB",
    "async MB",
    "load MB",
)
_GPU_HEAD = ("GPU save MB", "GPU async MB", "GPU load MB")


def as_document(result: Result) -> dict[str, Any]:
    """Return what checkpoint.json holds of one subject."""
    return {**asdict(result), "bytes_per_parameter": result.bytes_per_parameter, "stall": result.stall}


def show(document: dict[str, Any], results: Sequence[Result]) -> None:
    """Print the table of what was measured; why something was not has been said in its place."""
    results = [result for result in results if not result.error]
    table = Table(title=_title(document))
    table.add_column("")
    head, rows = _head(results), _rows(results)
    for name in head:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)
    print(_speeds(document))


def write(document: dict[str, Any], results: Sequence[Result], output: Path) -> None:
    """Write checkpoint.json and checkpoint.md, each at once."""
    output.mkdir(parents=True, exist_ok=True)
    write_durably(output / "checkpoint.json", json.dumps(document, indent=1).encode())
    head = _head(results)
    lines = [["", *head], ["---"] * (len(head) + 1), *_rows(results)]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = f"{_title(document)}. {_speeds(document)}:\n\n    {document['command']}\n\n{body}\n"
    write_durably(output / "checkpoint.md", text.encode())


def _title(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    return (
        f"{document['model']}, {document['parameters'] / 1e6:,.1f} M parameters; {document['machine']}; {versions}; "
        f"{document['date']}"
    )


def _speeds(document: dict[str, Any]) -> str:
    return (
        f"A plain sequential write with fsync: {document['disk_bytes_per_s'] / 1e9:.2f} GB/s; a copy in host memory by "
        f"one thread: {document['copy_bytes_per_s'] / 1e9:.2f} GB/s"
    )


def _on_gpu(results: Sequence[Result]) -> bool:
    return any(result.save_gpu_memory is not None for result in results)


def _head(results: Sequence[Result]) -> tuple[str, ...]:
    return (*_HEAD, *_GPU_HEAD) if _on_gpu(results) else _HEAD


def _rows(results: Sequence[Result]) -> list[list[str]]:
    width = len(_head(results))
    rows = []
    for result in results:
        cells = [result.error] if result.error else _cells(result)
        rows.append([result.name, *cells[:width], *[""] * (width - len(cells))])
    return rows


def _cells(result: Result) -> list[str]:
    slower = result.step_while_saving_s / result.step_s - 1 if result.step_while_saving_s and result.step_s else None
    memory = (result.save_memory, result.async_memory, result.load_memory)
    gpu_memory = (result.save_gpu_memory, result.async_gpu_memory, result.load_gpu_memory)
    return [
        f"{result.bytes_per_parameter:.3f}",
        f"{result.save_s:.3f}",
        f"{result.bytes_on_disk / result.save_s / 1e9:.2f}",
        f"{result.load_s:.3f}",
        f"{result.bytes_on_disk / result.load_s / 1e9:.2f}",
        _number(result.first_stall_s, 1e3, "{:.1f}"),
        _number(result.stall_s, 1e3, "{:.1f}"),
        _number(result.stall, 100, "{:.1f}"),
        _number(slower, 100, "{:.0f} %"),
        *(_number(value, 1e-6, "{:.0f}") for value in (*memory, *gpu_memory)),
    ]


def _number(value: float | None, factor: float, text: str) -> str:
    return "" if value is None else text.format(value * factor)
