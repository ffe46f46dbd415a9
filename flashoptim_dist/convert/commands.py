"""The subcommands of ``flashoptim-dist``: their options and what they print. Needs tyro and rich."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from flashoptim_dist.convert.api import Converted, convert
from flashoptim_dist.convert.casting_rule import dtype_named
from flashoptim_dist.convert.hugging_face import export_hf, import_hf
from flashoptim_dist.convert.inspecting import inspect
from flashoptim_dist.convert.progress import Progress, Silent
from flashoptim_dist.convert.tables import bar, print_inspection, readable
from flashoptim_dist.convert.verifying import verify

EXIT_BAD_INPUT = 2

OptimizerName = Literal[
    "adamw", "adam", "lion", "sgd", "flash_adamw", "flash_adam", "flash_lion", "flash_sgd", "flash_sgdw"
]
DtypeName = Literal["bf16", "fp16", "fp32"]
Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")]
Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]

_PROBLEMS_SHOWN = 3


@dataclass(kw_only=True)
class Inspect:
    """Show what a checkpoint holds: format, steps, tensors, and its size against fp32 AdamW's."""

    checkpoint: Checkpoint
    """A DCP directory, a folder of checkpoints (the newest one), a file of torch.save, or a folder of safetensors."""
    json: bool = False
    """Print JSON instead of tables."""
    tensors: bool = True
    """List every tensor, in JSON too."""

    def run(self) -> int:
        """Print it."""
        found = inspect(self.checkpoint)
        if self.json:
            _print_json(found.to_dict(self.tensors))
        elif _speaks():
            print_inspection(_console(), found, self.tensors)
        return 0


@dataclass(kw_only=True)
class Verify:
    """Read all of a checkpoint: files against the manifest, tensors finite, scales and codes in range."""

    checkpoint: Checkpoint
    """As for inspect."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> int:
        """Print the result; the exit code is 2 where something is wrong."""
        with _progress(not self.json) as progress:
            found = verify(self.checkpoint, progress=progress)
        if self.json:
            _print_json(found.to_dict())
        elif _speaks():
            files = "files as in the manifest" if found.has_manifest else "no manifest to compare the files with"
            state = "sound" if not found.problems else f"{len(found.problems)} problems"
            print(f"{found.path}: {files}, {found.tensors} tensors read, {state}")
        if not found.problems:
            return 0
        shown = "; ".join(found.problems[:_PROBLEMS_SHOWN])
        more = len(found.problems) - _PROBLEMS_SHOWN
        complain(f"{found.path} is not sound: {shown}" + (f"; and {more} more (--json lists all)" if more > 0 else ""))
        return EXIT_BAD_INPUT


@dataclass(kw_only=True)
class _Writing:
    """What the commands that write have in common."""

    force: bool = False
    """Replace what is there."""
    json: bool = False
    """Print JSON instead of text."""

    def write(self, progress: Progress) -> Converted:
        """Do it; each command has its own."""
        raise NotImplementedError

    def run(self) -> int:
        """Do it and print what was written."""
        with _progress(not self.json) as progress:
            done = self.write(progress)
        _report(done, self.json)
        return 0


@dataclass(kw_only=True)
class _Format(_Writing):
    """Options of the number format, shared by the commands that write it; refused for plain optimizers."""

    master_weight_bits: Literal["24", "32", "none"] | None = None
    """Of this library's optimizers; left out: as it was, else 24."""
    moments: Literal["8bit", "fp32"] | None = None
    """Of this library's optimizers; left out: as it was, else 8bit."""
    rounding: Literal["stochastic", "nearest"] | None = None
    """Of the training to come; a conversion itself rounds to nearest."""
    seed: int | None = None
    """Of stochastic rounding."""

    def options(self) -> dict[str, Any]:
        """Return what was given, as the optimizers call it."""
        options: dict[str, Any] = {}
        if self.master_weight_bits is not None:
            options["master_weight_bits"] = None if self.master_weight_bits == "none" else int(self.master_weight_bits)
        if self.moments is not None:
            options["quantize"] = self.moments == "8bit"
        if self.rounding is not None:
            options["rounding"] = self.rounding
        if self.seed is not None:
            options["seed"] = self.seed
        return options


@dataclass(kw_only=True)
class Convert(_Format):
    """Convert optimizer states, and the weights with them, for another optimizer."""

    source: Source
    """A DCP directory (this library's, torch's, torchtitan's, the official flashoptim's) or a file of torch.save."""
    target: Target
    """A folder for a DCP directory, or a file name ending in .pt, .pth, .bin or .ckpt for torch.save."""
    to: OptimizerName
    """The optimizer that is to load the result."""
    layout: Literal["nested", "flattened", "torchtitan"] | None = None
    """Of a DCP directory (a file has one layout); left out: that of the source."""
    weights: str | None = None
    """Where the weights are, for a source that holds optimizer states alone."""
    dtype: DtypeName | None = None
    """Of the weights; left out: fp32 for a plain optimizer; for this library's as they were, and bf16 if fp32."""
    keep_fp32: tuple[str, ...] = ()
    """Patterns on names of modules whose weights stay in fp32, as in cast_model."""
    head_dim: int | None = None
    """Size of an attention head, for torchtitan 0.3's fused queries, keys and values (wqkv)."""

    def write(self, progress: Progress) -> Converted:
        """Convert."""
        return convert(
            self.source,
            self.target,
            self.to,
            layout=self.layout,
            weights=self.weights,
            dtype=_dtype(self.dtype),
            keep_fp32=self.keep_fp32,
            options=self.options(),
            head_dim=self.head_dim,
            overwrite=self.force,
            progress=progress,
        )


@dataclass(kw_only=True)
class ExportHf(_Writing):
    """Write a checkpoint's weights as a Hugging Face model folder of safetensors."""

    checkpoint: Checkpoint
    """As for inspect; its weights have the names that transformers gives them."""
    folder: Folder
    """The folder to make."""
    dtype: DtypeName = "bf16"
    """Of the weights; fp32 gives the true master weights: weight and correction."""
    config: str | None = None
    """The model folder that training began from: its config.json and tokenizer are copied."""
    max_shard_size: str = "5GB"
    """Largest size of one file, such as 500MB or 5GB."""

    def write(self, progress: Progress) -> Converted:
        """Export."""
        dtype = _dtype(self.dtype)
        assert dtype is not None
        return export_hf(
            self.checkpoint,
            self.folder,
            dtype=dtype,
            config=self.config,
            shard_bytes=parse_size(self.max_shard_size),
            overwrite=self.force,
            progress=progress,
        )


@dataclass(kw_only=True)
class ImportHf(_Format):
    """Make a checkpoint of a Hugging Face model folder; what bf16 can't hold of fp32 weights is in the corrections."""

    folder: Folder
    """With safetensors, in one file or several."""
    checkpoint: Checkpoint
    """The DCP directory to make."""
    to: OptimizerName = "flash_adamw"
    """The optimizer that is to load it."""
    dtype: DtypeName | None = None
    """Of the weights; left out: bf16 for this library's optimizers, fp32 for plain ones."""
    keep_fp32: tuple[str, ...] = ()
    """Patterns on names of modules whose weights stay in fp32, as in cast_model."""

    def write(self, progress: Progress) -> Converted:
        """Import."""
        return import_hf(
            self.folder,
            self.checkpoint,
            to=self.to,
            dtype=_dtype(self.dtype),
            keep_fp32=self.keep_fp32,
            options=self.options(),
            overwrite=self.force,
            progress=progress,
        )


# ---------------------------------------------------------------------- output


def parse_size(text: str) -> int:
    """Return bytes of "500MB", "5GB", "2GiB" or a plain number.

    Raises:
        ValueError: it is none of these, or not above 0.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "B": 1, "": 1}
    number = text.strip().upper()
    unit = next(name for name in units if number.endswith(name))
    with contextlib.suppress(ValueError, OverflowError):
        size = int(float(number[: len(number) - len(unit)]) * units[unit])
        if size > 0:
            return size
    raise ValueError(f"--max-shard-size {text} is no size: give 500MB or 5GB")


def _dtype(name: DtypeName | None) -> torch.dtype | None:
    return None if name is None else dtype_named(name)


def _report(done: Converted, as_json: bool) -> None:
    if as_json:
        _print_json(done.to_dict())
    elif _speaks():
        print(f"wrote {done.path}: {done.tensors} tensors, {readable(done.nbytes)}, {done.parameters:,} parameters")
        for note in done.notes:
            print(f"note: {note}")


def _print_json(value: Any) -> None:
    if _speaks():
        print(json.dumps(value, indent=2, default=str))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # Console's own ends the process with code 1


def _console() -> Console:
    # Piped, a table has no terminal to fit into: names must not be cut.
    return _Console(width=None if sys.stdout.isatty() else 200)


def complain(text: str) -> None:
    """Say in one line on the first rank's stderr what is wrong."""
    if _speaks():
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _speaks() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[Progress]:
    """Show a bar on stderr where that is a terminal."""
    if not (wanted and _speaks() and sys.stderr.isatty()):
        yield Silent()
        return
    with bar() as progress:
        yield progress


COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": Inspect,
    "verify": Verify,
    "convert": Convert,
    "export-hf": ExportHf,
    "import-hf": ImportHf,
}


def parse(arguments: list[str] | None) -> Any:
    """Return the command that was asked for; ``run()`` does it. Bad usage ends the process with code 2."""
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="flashoptim-dist",
        description="Look at checkpoints of flashoptim_dist, check them, and convert them to and from others.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
