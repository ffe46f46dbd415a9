"""Writing a file of torch.save block by block; it appears at once, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.files import sync_directory
from flashoptim_dist.checkpoint.layout import FORMAT, MODEL, OPTIMIZER, PARAM_GROUPS, RNG, STATE
from flashoptim_dist.checkpoint.nesting import nest
from flashoptim_dist.checkpoint.ranks import Ranks
from flashoptim_dist.convert.archive_writer import write_archive
from flashoptim_dist.convert.progress import Progress
from flashoptim_dist.convert.result import Result

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def write_torch_file(target: Path, result: Result, ranks: Ranks, overwrite: bool, progress: Progress) -> None:
    """Write a result as one file of torch.save (all ranks must call; the first one writes).

    It holds ``model`` and ``optimizer``, each as its ``state_dict()`` has it, ``format``, and what else there was but
    random states; where there are only optimizer states, it is the optimizer's ``state_dict()``. Parameters are
    numbered, with their names in ``param_names`` where they are known.

    Raises:
        CheckpointError: on every rank. The target is what it was then.
    """
    doing = f"writing {target}"
    ranks.run(doing, lambda: _write(target, result, overwrite, progress) if ranks.is_first else None)


def _write(target: Path, result: Result, overwrite: bool, progress: Progress) -> None:
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists")
    progress.begin(f"writing {target}", result.nbytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.writing-*"):
        leftover.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.writing-{uuid.uuid4().hex[:12]}")
    try:
        with open(temporary, "wb") as stream:
            write_archive(stream, _nested(result), progress)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{target} can't be written: {error.strerror or error}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def _nested(result: Result) -> dict[str, Any]:
    tensors = [pair for unit in result.units for pair in unit.tensors()]
    # Random states may hold numpy's, which torch.load reads with weights_only=False alone.
    nested = nest([*tensors, *(pair for pair in result.objects if pair[0][0] != RNG)])
    model = nested.get(MODEL, {})
    for alias, name in result.aliases.items():
        model[alias] = model[name]
    states = nested.get(OPTIMIZER, {}).get(STATE, {})
    numbers = _numbers(name for group in result.groups for name in group.names)
    # States of parameters that are in no group can't be numbered, and no optimizer would load them.
    optimizer = {
        STATE: {numbers[name]: state for name, state in states.items() if name in numbers},
        PARAM_GROUPS: [
            {
                **group.options,
                "params": [numbers[name] for name in group.names],
                **({} if result.unnamed else {"param_names": list(group.names)}),
            }
            for group in result.groups
        ],
    }
    if result.record.get("optimizers", [{}])[0].get("name"):
        optimizer[FORMAT] = dict(result.record["optimizers"][0])
    others = {key: value for key, value in nested.items() if key not in (MODEL, OPTIMIZER)}
    if not model and not others:
        return optimizer  # what load_state_dict takes
    return {MODEL: model, OPTIMIZER: optimizer, FORMAT: result.record, **others}


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
