"""Where a run stands: resuming it, saving it, and stopping it before a bad step does harm."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import flashoptim_dist
from flashoptim_dist import GradientRelease
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError
from flashoptim_dist.checkpoint.layout import step_name
from flashoptim_dist.memory import MemoryReport

from .config import Config
from .errors import BadInput
from .world import World

_RUN = "run"
_RELEASE = "gradient_release"
_GROUP_OPTIONS = ("betas", "eps", "weight_decay")


@dataclass(frozen=True)
class Progress:
    """Steps are counted over the whole life of a run folder.

    Attributes:
        step: steps done so far.
        first: the step count at which the current learning-rate schedule began.
        last: the step count at which it ends.
        note: what the log should tell of how it was resumed; mostly empty.
    """

    step: int
    first: int
    last: int
    note: str = ""


def prepare_run_folder(config: Config) -> None:
    """Make the run folder and see that this rank can write in it. Raises BadInput; no collective inside."""
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"written to see whether it can be")
    except OSError as error:
        raise BadInput(
            f"cannot write in the run folder {folder} ({error.strerror or error}); choose another with --output"
        ) from error


def checkpoint_folder(config: Config) -> Path:
    """The folder that holds the run's checkpoints."""
    return config.run_folder / "checkpoints"


def resume(
    config: Config, checkpointer: Checkpointer, world: World, release: GradientRelease | None = None
) -> Progress:
    """Load the checkpoint that `--resume` names, if any, and say what is left to do. All ranks must call.

    A run that was cut off goes on with its schedule; where it had reached the last step, a new schedule of as many
    steps begins, or none with `--when-finished stop`, or where torchrun itself has started the ranks again. Raises
    BadInput, on every rank, for a checkpoint that is damaged, of another format version, or of another model, optimizer
    or data.
    """
    steps = checkpointer.steps()
    if config.resume == "never" and steps:
        raise BadInput(
            f"{checkpointer.directory} holds checkpoints (newest: step {steps[-1]}) that this run would replace;"
            " choose another --output, or --resume auto"
        )
    wanted = int(config.resume) if config.resume.isdecimal() else None
    if wanted is not None and wanted not in steps:
        raise BadInput(f"--resume {wanted}: {checkpointer.directory} holds the steps {steps}; give one of these")
    optimizer = checkpointer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    options = [{name: group[name] for name in _GROUP_OPTIONS} for group in optimizer.param_groups]
    extras: dict[str, Any] = {}
    try:
        step = checkpointer.load(wanted, extras=extras)
    except CheckpointError as error:
        raise BadInput(f"{error}; to start anew choose another --output") from error
    # The command line has the last word, also where the checkpoint was trained with another weight decay.
    for group, own in zip(optimizer.param_groups, options):
        group.update(own)
    if step is None:
        return Progress(0, 0, config.steps)
    saved = extras.get(_RUN)
    if saved is None:
        raise BadInput(
            f"step {step} in {checkpointer.directory} was not written by this recipe; choose another --output"
        )
    if saved["data"] != checkpointer.dataloader.dataset.fingerprint:
        raise BadInput(
            f"{checkpointer.directory} is of a run on other data (rows, tokenizer, --sequence-length or --seed have"
            " changed), so its position means nothing here; give the same as before, or another --output"
        )
    progress = after_resume(step, saved, config, same_launch=any(world.gather(_launched_before(saved))))
    return replace(progress, note=_resume_release(release, extras.get(_RELEASE)))


def _resume_release(release: GradientRelease | None, saved: dict[str, Any] | None) -> str:
    """Take over what gradient release had saved, if it was on; returns what to tell where it was switched."""
    if release is None:
        return "" if saved is None else "gradient release, which was on, is off from here on"
    if saved is None:
        return "gradient release is on from here on; its running norms begin anew"
    release.load_state_dict(saved)
    return ""


def after_resume(step: int, saved: Mapping[str, Any], config: Config, *, same_launch: bool = False) -> Progress:
    """What a checkpoint of `step`, saved under the schedule `saved`, has left to do under `config`.

    A schedule that was cut off keeps its beginning, and ends where the command line now says. One that finished under
    the `same_launch` of torchrun, which then lost a rank, is not begun anew: nobody asked for more steps.
    """
    finished = step >= saved["first"] + min(saved["steps"], config.steps)
    if finished and (same_launch or config.when_finished == "stop"):
        return Progress(step, saved["first"], step)
    first = step if finished else saved["first"]
    return Progress(step, first, first + config.steps)


def _launched_before(saved: Mapping[str, Any]) -> bool:
    """Whether this rank was started again by the launch that wrote the checkpoint.

    A rendezvous id tells, which SLURM and Kubernetes jobs keep when they are requeued. Without one torchrun calls it
    "none"; its count of restarts is then what there is.
    """
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return restarted or (launch != "none" and saved.get("launch") == launch)


def save(
    config: Config,
    checkpointer: Checkpointer,
    progress: Progress,
    step: int,
    world: World,
    release: GradientRelease | None = None,
) -> Path:
    """Save the run after `step` steps; returns the checkpoint's folder. All ranks must call.

    Raises BadInput, on every rank, where it cannot be written, or the weights are no longer finite: the checkpoints
    that were there stay.
    """
    model = checkpointer.model
    assert isinstance(model, nn.Module)
    if not weights_are_finite(model, world):
        raise BadInput(
            f"step {step} left weights that are not finite, which were not saved; {way_back(checkpointer, step)}"
        )
    run = {
        "first": progress.first,
        "steps": config.steps,
        "data": checkpointer.dataloader.dataset.fingerprint,
        "launch": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
    }
    try:
        checkpointer.save(step, extras={_RUN: run} | ({_RELEASE: release.state_dict()} if release is not None else {}))
    except CheckpointError as error:
        # A disk that is full says nothing against the weights: the same command is the way out, at the same rate.
        steps = checkpointer.steps()
        rest = f"goes on from step {steps[-1]}" if steps else "starts anew, since no earlier checkpoint is there"
        raise BadInput(f"{error}; make room, then the same command {rest}") from error
    return checkpointer.directory / step_name(step)


def stop_unless_finite(checkpointer: Checkpointer, doing: str, weights_of: int, **values: float) -> None:
    """Raise BadInput, naming the last good checkpoint, if one of `values` is NaN or infinite.

    Args:
        checkpointer: where the checkpoints are.
        doing: what the values are of, for the message.
        weights_of: how many steps the weights that gave the values had been trained.
        values: numbers that are the same on all ranks.
    """
    if not all(math.isfinite(value) for value in values.values()):
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        raise BadInput(f"{doing} has {shown}; training stops here; {way_back(checkpointer, weights_of)}")


class SkippedSteps:
    """Steps left out because their gradient was not finite; too many in a row end the run."""

    def __init__(self, checkpointer: Checkpointer, step: int, last: int, most: int) -> None:
        """Begin after `step` of `last` steps; `most` steps in a row may be left out, the last step never."""
        self._checkpointer = checkpointer
        self._applied = step
        self._last = last
        self._most = most
        self.pending = False
        """Whether the newest step was left out: the weights may be what is wrong, and are not to be saved yet."""

    def check(self, step: int, *, loss: float, gradient_norm: float) -> bool:
        """Whether the update of `step` was applied. The numbers must be the same on all ranks.

        Raises BadInput, naming the last good checkpoint, for a loss that is not finite, or one gradient too many.
        """
        self.pending = not (math.isfinite(loss) and math.isfinite(gradient_norm))
        if not self.pending:
            self._applied = step
            return True
        skipped = step - self._applied - 1
        doing = f"step {step}" + (f", after {skipped} that were left out," if skipped else "")
        if not math.isfinite(loss) or skipped >= self._most or step == self._last:
            stop_unless_finite(self._checkpointer, doing, self._applied, loss=loss, gradient_norm=gradient_norm)
        return False


def way_back(checkpointer: Checkpointer, weights_of: int) -> str:
    """For messages: the newest checkpoint that was seen to work, and how to go on from it.

    That is one from before step `weights_of`: the step after it went well. One of `weights_of` itself holds the very
    weights that gave trouble.
    """
    steps = [step for step in checkpointer.steps() if step < weights_of]
    if not weights_of:
        return "no step was taken before it, so the weights of --model or the data are at fault; give others"
    if not steps:
        return "there is no earlier checkpoint; start again in another --output with a lower --lr or other data"
    return (
        f"the last good checkpoint is step {steps[-1]} in {checkpointer.directory}; go on from it with"
        f" --resume {steps[-1]} and a lower --lr"
    )


def weights_are_finite(model: nn.Module, world: World) -> bool:
    """Whether every element of every rank's shards is finite. All ranks must call."""
    bad = torch.zeros((), dtype=torch.int64, device=world.device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bad += (~torch.isfinite(local)).sum()
    return world.sum(bad.item())[0] == 0


def run_facts(config: Config, memory: MemoryReport, world: World) -> dict[str, Any]:
    """What the report tells of a run besides its metrics: options, memory by part, device and versions."""
    on_gpu = world.device.type == "cuda"
    return {
        "options": asdict(config),
        "memory": memory.to_dict(),
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "flashoptim_dist": flashoptim_dist.__version__,
        },
    }


def describe_checkpoint(folder: Path, model: nn.Module) -> str:
    """Size of a checkpoint on disk, in all and per parameter."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{size / 1e6:,.1f} MB on disk, {size / parameters:.2f} bytes per parameter with all that belongs to it"
