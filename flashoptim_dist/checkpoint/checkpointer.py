"""A folder of checkpoints by step: `latest`, and how many are kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

from flashoptim_dist.checkpoint import layout, retention, saving, snapshot
from flashoptim_dist.checkpoint.errors import DamagedCheckpointError
from flashoptim_dist.checkpoint.files import local_path, write_durably
from flashoptim_dist.checkpoint.loading import load
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.verify import Verify


class Checkpointer:
    """Saves and loads a training run by step number (all ranks make one, and call its methods together).

    Args:
        directory: the folder; made at the first save.
        model: the module, or the list of this rank's parts of it.
        optimizer: one or several.
        scheduler: an object with ``state_dict``, or a list of them.
        dataloader: an object with ``state_dict``, each rank's own.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: also keep every checkpoint whose step is a multiple of this.
        rng: whether to save and restore the random states of Python, numpy and torch.
        process_group: the ranks that take part; default all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: ModelParts,
        optimizer: Optimizers,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        rng: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """See the class."""
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None")
        self.directory = local_path(directory)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.dataloader = dataloader
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.rng = rng
        self.process_group = process_group

    def save(self, step: int, extras: Mapping[str, Any] | None = None) -> None:
        """Save the run as it is after ``step`` steps; a checkpoint of that step is replaced.

        ``latest`` moves, and older checkpoints go, only when this one is on disk.

        Raises:
            CheckpointError: on every rank; the checkpoints that were there are untouched.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        source = snapshot.Source(
            as_parts(self.model), as_optimizers(self.optimizer), self.scheduler, self.dataloader, extras, self.rng
        )
        target = self.directory / layout.step_name(step)
        prepared = saving.prepare(target, source, own_ranks(self.process_group), overwrite=True)
        saving.write(prepared, lambda: self._publish(step))

    def load(
        self, step: int | None = None, *, extras: MutableMapping[str, Any] | None = None, verify: Verify = "size"
    ) -> int | None:
        """Load a step, or the latest one that is whole.

        Args:
            step: which one. With None the newest is taken; where it is damaged, a warning names the file and the next
                older one is taken.
            extras: filled with the saved extras.
            verify: see :func:`load`.

        Returns:
            The step, or None where there is no checkpoint yet.

        Raises:
            CheckpointError: the step asked for is not there or damaged; none of the checkpoints is whole; or the newest
                does not fit this run.
        """
        ranks = own_ranks(self.process_group)
        doing = f"loading from {self.directory}"
        candidates = ranks.together(doing, self._candidates)[0] if step is None else [step]
        damage: list[str] = []
        for candidate in candidates:
            try:
                load(
                    self.directory / layout.step_name(candidate),
                    self.model,
                    self.optimizer,
                    scheduler=self.scheduler,
                    dataloader=self.dataloader,
                    extras=extras,
                    verify=verify,
                    rng=self.rng,
                    process_group=self.process_group,
                )
                return candidate
            except DamagedCheckpointError as error:
                if step is not None:
                    raise
                damage.append(str(error))
                warnings.warn(f"{error}. Trying the checkpoint before it", stacklevel=2)
        if damage:
            raise DamagedCheckpointError("no checkpoint is whole: " + "; ".join(damage))
        return None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        return layout.steps_in(self.directory)

    def _candidates(self) -> list[int]:
        """Return the steps to try: what ``latest`` names first, then older ones, then newer ones."""
        retention.recover(self.directory)
        steps = self.steps()
        pointed = retention.read_latest(self.directory)
        if pointed is None:
            return steps[::-1]
        newer = [step for step in steps if step > pointed]
        older = [step for step in steps if step <= pointed]
        return older[::-1] + newer[::-1]

    def _publish(self, step: int) -> None:
        write_durably(self.directory / layout.LATEST, f"{layout.step_name(step)}\n".encode())
        retention.prune(self.directory, step, self.keep_last, self.keep_every)
