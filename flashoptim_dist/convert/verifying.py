"""Whether a checkpoint is whole and sound: its files as they were written, its tensors finite, its codes in range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.layout import MANIFEST
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.verify import check_files
from flashoptim_dist.convert.api import Pathlike
from flashoptim_dist.convert.dcp_source import is_dcp, newest_in
from flashoptim_dist.convert.inspecting import named_tensors
from flashoptim_dist.convert.lazy import LazyTensor, blocks, in_blocks
from flashoptim_dist.convert.opening import open_checkpoint
from flashoptim_dist.convert.parameters import ParameterConversion, Saved
from flashoptim_dist.convert.progress import Progress, Silent
from flashoptim_dist.convert.sharing import shares
from flashoptim_dist.convert.targets import TARGETS, moments_of
from flashoptim_dist.convert.training_state import TrainingState
from flashoptim_dist.formats import FORMAT_VERSION, GROUP_SIZE, find_fault, read_faults, to_groups, to_rows, version1
from flashoptim_dist.optim.state import ERROR_BITS, STEP

_VARIANCE_FLOOR = {1: version1.SMALLEST_VARIANCE_CODE}
"""Smallest code of a variance above zero, by the format's version; 1 where none is named."""


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        path: of the checkpoint.
        has_manifest: whether its files could be compared with a manifest.
        tensors: how many were read.
        problems: one line each, naming file or tensor; empty where all is well.
    """

    path: Path
    has_manifest: bool
    tensors: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data (JSON-serializable)."""
        return {
            "path": str(self.path),
            "manifest": self.has_manifest,
            "tensors": self.tensors,
            "problems": list(self.problems),
            "ok": not self.problems,
        }


@dataclass(frozen=True)
class _Check:
    """Tensors that are checked together."""

    tensors: int
    nbytes: int
    run: Any


def verify(
    path: Pathlike, *, progress: Progress | None = None, process_group: dist.ProcessGroup | None = None
) -> Verification:
    """Read all of a checkpoint and report what is wrong with it (all ranks must call; they share it out).

    Every file is compared with the manifest, size and checksum; every floating tensor must be finite; of this library's
    states, scales must be ones that the format's version writes, codes in their range and zero where the scale is, step
    counts whole numbers, and the decoded moments finite.

    Raises:
        CheckpointError: on every rank: there is no checkpoint, or a file is missing or damaged, so that what it holds
            can't be checked.
    """
    ranks, place = own_ranks(process_group), newest_in(local_path(path))
    doing = f"verifying {place}"
    progress = progress or Silent()

    def files() -> None:
        if is_dcp(place):
            check_files(place, "full", ranks.rank, ranks.world_size)

    ranks.run(doing, files)

    def tensors() -> list[str]:
        checks = _checks(open_checkpoint(place), progress)
        mine = shares(checks, ranks.world_size)[ranks.rank]
        progress.begin(doing, sum(check.nbytes for check in mine))
        return [problem for check in mine for problem in check.run()]

    found = ranks.all_gather(doing, tensors)
    state = open_checkpoint(place)
    count = sum(check.tensors for check in _checks(state, progress))
    has_manifest = place.is_dir() and (place / MANIFEST).is_file()
    return Verification(place, has_manifest, count, tuple(problem for of_rank in found for problem in of_rank))


def _checks(state: TrainingState, progress: Progress) -> list[_Check]:
    flash = state.state_format() == "flash"
    in_states = {f"optimizer.state.{name}.{key}" for name, entries in state.states.items() for key in entries}
    checks = []
    for name, tensor in named_tensors(state):
        if not (flash and name in in_states):
            checks.append(_Check(1, tensor.nbytes, lambda name=name, tensor=tensor: _finite(name, tensor, progress)))
    if flash:
        for name, entries in state.states.items():
            tensors = [value for value in entries.values() if isinstance(value, LazyTensor)]
            size = sum(tensor.nbytes for tensor in tensors)
            checks.append(_Check(len(tensors), size, lambda name=name: _states(state, name, progress)))
    return checks


def _finite(name: str, tensor: LazyTensor, progress: Progress) -> list[str]:
    bad = 0
    for block in in_blocks(tensor):
        if block.dtype.is_floating_point or block.dtype.is_complex:
            bad += int((~torch.isfinite(block)).sum())
        progress.advance(block.nbytes)
    return [f"{name} has {bad} of {tensor.numel} elements that are not finite"] if bad else []


def _states(state: TrainingState, name: str, progress: Progress) -> list[str]:
    """Check one parameter's compressed state."""
    record = next((dict(spec) for spec in state.specs if spec.get("name")), None)
    entries = {key: value for key, value in state.states[name].items() if value is not None}
    problems: dict[str, str] = {}
    try:
        saved = Saved(
            name, None, {k: v for k, v in entries.items() if k != ERROR_BITS}, "flash", state.family(), record
        )
        step = saved.step()
        if not step >= 0 or step != int(step):
            problems[STEP] = f"optimizer.state.{name}.{STEP} is {step}, which is no count of steps"
        tensors = [value for key, value in saved.state.items() if isinstance(value, LazyTensor) and key != STEP]
        conversion = ParameterConversion(saved, TARGETS[_plain(state.family())], None) if tensors else None
    except (CheckpointError, ValueError, OverflowError) as error:
        return [f"optimizer.state.{name}: {error}"]
    if conversion is None:
        return list(problems.values())
    version = int((record or {}).get("version", FORMAT_VERSION))
    for start, stop in blocks(saved.shape):
        for key, reason in _block_problems(saved, state.family(), start, stop, version):
            problems.setdefault(key, f"optimizer.state.{name}.{key} {reason}")
        if not problems:
            for key, value in conversion.compute(start, stop).items():
                if not bool(torch.isfinite(value).all()):
                    problems[key] = f"optimizer.state.{name}.{key} has elements that are not finite"
    progress.advance(sum(value.nbytes for value in tensors))
    return list(problems.values())


def _block_problems(saved: Saved, family: str, start: int, stop: int, version: int) -> Iterator[tuple[str, str]]:
    for moment in moments_of(family):
        codes, scales = saved.state.get(moment.name), saved.state.get(moment.scale_name)
        if not isinstance(codes, LazyTensor):
            continue
        code = codes.rows(start, stop)
        if not isinstance(scales, LazyTensor):
            if code.dtype.is_floating_point and not bool(torch.isfinite(code).all()):
                yield moment.name, "has elements that are not finite"
            continue
        scale = scales.rows(start, stop)
        (fault,) = read_faults([find_fault(scale, moment.signed, version)])
        if fault:
            yield moment.scale_name, fault
        yield from ((moment.name, reason) for reason in _code_problems(code, scale, moment.signed, version))


def _code_problems(code: Tensor, scale: Tensor, signed: bool, version: int) -> Iterator[str]:
    expected = torch.int8 if signed else torch.uint8
    if code.dtype != expected:
        yield f"is {code.dtype}, and codes are {expected}"
        return
    if signed and bool((code == -128).any()):
        yield "has codes of -128, which is out of range"
    floor = _VARIANCE_FLOOR.get(version, 1)
    if not signed and bool(((code > 0) & (code < floor)).any()):
        yield f"has codes below {floor}, which is out of range"
    groups = to_groups(to_rows(code))
    if groups.shape[0] != scale.numel():
        yield f"has {groups.shape[0]} groups of {GROUP_SIZE} in some rows, and {scale.numel()} scales"
    elif bool(((groups != 0).any(dim=-1) & (scale.reshape(-1) == 0)).any()):
        yield "has codes other than 0 where the scale is 0"


def _plain(family: str) -> str:
    return {"adam": "adamw", "lion": "lion", "sgd": "sgd"}[family]
