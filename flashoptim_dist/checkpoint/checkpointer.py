"""A folder of checkpoints by step: the latest, how many are kept, saves in the background."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist

from flashoptim_dist.checkpoint import async_saving, layout, retention, saving, snapshot
from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError
from flashoptim_dist.checkpoint.files import local_path, write_durably
from flashoptim_dist.checkpoint.loading import load
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.pending import finish_pending
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.verify import Verify


class Checkpointer:
    """Saves and loads a training run by step number (all ranks make one, and call its methods together).

    Usable as a context manager: leaving it waits for a background save.

    Args:
        directory: the folder; made at the first save. One run at a time writes to it.
        model: the module, or the list of this rank's parts of it.
        optimizer: one or several.
        scheduler: an object with ``state_dict``, or a list of them.
        dataloader: an object with ``state_dict``, each rank's own.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: also keep every checkpoint whose step is a multiple of this.
        background: whether ``save`` returns once the state is copied to host memory, and writes it in the background.
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
        background: bool = False,
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
        self.background = background
        self.rng = rng
        self.process_group = process_group

    def save(self, step: int, extras: Mapping[str, Any] | None = None) -> None:
        """Save the run as it is after ``step`` steps; a checkpoint of that step is replaced.

        ``latest`` moves, and older checkpoints go, only when this one is on disk.

        Args:
            step: steps done.
            extras: see :func:`save`.

        Raises:
            CheckpointError: on every rank; the checkpoints that were there are untouched. With ``background`` a failed
                save surfaces at the next call of this object, which then does nothing else.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        finish_pending()
        optimizers = as_optimizers(self.optimizer)
        source = snapshot.Source(as_parts(self.model), optimizers, self.scheduler, self.dataloader, extras, self.rng)
        draft = saving.Draft(
            self.directory / layout.step_name(step),
            own_ranks(self.process_group),
            overwrite=True,
            before=lambda: retention.clean(self.directory),
            published=lambda: self._publish(step),
        )
        if self.background:
            async_saving.start(draft, source, async_saving.staging_for(optimizers[0]))
        else:
            draft.take(source)
            saving.finish(draft)

    def load(
        self, step: int | None = None, *, extras: MutableMapping[str, Any] | None = None, verify: Verify = "size"
    ) -> int | None:
        """Load a step, or the latest one that is whole.

        Args:
            step: which one. With None the one that ``latest`` names is taken; where it is damaged, a warning names the
                file and the next older one is taken.
            extras: filled with the saved extras.
            verify: see :func:`load`.

        Returns:
            The step, or None where there is no checkpoint yet.

        Raises:
            CheckpointError: the step asked for is not there or damaged; none of the checkpoints is whole; or the newest
                does not fit this run.
        """
        finish_pending()
        ranks = own_ranks(self.process_group)
        candidates = ranks.on_first(
            f"loading from {self.directory}", lambda: self._candidates() if step is None else [step]
        )
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

    def wait(self) -> None:
        """Wait for a background save.

        Raises:
            CheckpointError: it failed.
        """
        finish_pending()

    def close(self) -> None:
        """Wait for a background save and give the staging memory back.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            finish_pending()
        finally:
            async_saving.staging_for(as_optimizers(self.optimizer)[0]).release()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        return layout.steps_in(self.directory)

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Close; an error on the way out does not hide the one that led here."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    def _candidates(self) -> list[int]:
        """Return the steps to try: the one that ``latest`` names, then older ones, then newer ones."""
        for replaced in self.directory.glob(".step-*.replaced"):
            saving.recover(self.directory / replaced.name.removeprefix(".").removesuffix(".replaced"))
        steps = self.steps()
        pointed = retention.read_latest(self.directory)
        if pointed is None:
            return steps[::-1]
        if pointed not in steps:
            warnings.warn(f"{self.directory / layout.LATEST} names step {pointed}, which is not there", stacklevel=2)
        newer = [step for step in steps if step > pointed]
        older = [step for step in steps if step <= pointed]
        return older[::-1] + newer[::-1]

    def _publish(self, step: int) -> None:
        write_durably(self.directory / layout.LATEST, f"{layout.step_name(step)}\n".encode())
        retention.prune(self.directory, step, self.keep_last, self.keep_every)
