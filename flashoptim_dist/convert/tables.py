"""Tables and bars of the command line; needs rich."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from flashoptim_dist.convert.inspecting import FP32_ADAMW_BYTES, Inspection


def print_inspection(console: Console, found: Inspection, tensors: bool) -> None:
    """Print what a checkpoint holds: figures, then every tensor."""
    figures = Table(show_header=False, box=None)
    for name, value in _figures(found):
        figures.add_row(Text(name), Text(value))
    console.print(figures)
    if not tensors:
        return
    table = Table(box=None)
    table.add_column("tensor", overflow="fold")
    for title in ("dtype", "shape"):
        table.add_column(title)
    table.add_column("bytes", justify="right")
    for line in found.tensors:
        shape = " x ".join(map(str, line.shape)) or "scalar"
        table.add_row(Text(line.name), line.dtype, shape, f"{line.nbytes:,}")
    for alias, name in found.aliases.items():
        table.add_row(Text(f"model.{alias}"), "", Text(f"tied to {name}"), "0")
    console.print(table)


def _figures(found: Inspection) -> list[tuple[str, str]]:
    kinds = {"dcp": f"DCP directory, {found.layout}", "torch": "torch.save", "safetensors": "safetensors"}
    states = {
        None: "no optimizer states",
        "flash": "compressed states of flashoptim_dist",
        "torch": "plain floating-point states",
        "flashoptim": "states of the official flashoptim",
    }
    lines = [("path", str(found.path)), ("kind", f"{kinds[found.container]}; {states[found.state_format]}")]
    lines.append(("optimizer", found.optimizer))
    for spec in found.formats:
        if spec.get("name"):
            options = ", ".join(f"{key} {value}" for key, value in spec.items() if key not in ("name", "optimizer"))
            lines.append(("format", f"{spec['name']} ({options})"))
    lines.append(("steps", ", ".join(map(str, found.steps)) or "none"))
    lines.append(("parameters", f"{found.parameters:,}"))
    whole = found.parameters * FP32_ADAMW_BYTES
    share = f", {found.nbytes / whole:.0%} of the {readable(whole)} of fp32 AdamW" if whole else ""
    lines.append(("tensors", f"{readable(found.nbytes)}, {found.bytes_per_parameter:.3f} bytes per parameter{share}"))
    lines.append(("on disk", readable(found.disk_bytes)))
    return lines


def readable(size: int) -> str:
    """Return bytes in a unit that fits."""
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


class _Bar:
    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._task: Any = None

    def begin(self, what: str, total: int) -> None:
        self._task = self._shown.add_task(what, total=total)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._shown.advance(self._task, count)


@contextlib.contextmanager
def bar() -> Iterator[_Bar]:
    """Show a bar on stderr while the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        yield _Bar(shown)
