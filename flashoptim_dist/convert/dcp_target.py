"""Writing a DCP directory chunk by chunk, through the same machinery as a save: it appears at once, or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from flashoptim_dist.checkpoint import snapshot
from flashoptim_dist.checkpoint.layout import FORMAT, MODEL, Path_, key_of
from flashoptim_dist.checkpoint.planners import SnapshotPlanner
from flashoptim_dist.checkpoint.ranks import Ranks
from flashoptim_dist.checkpoint.saving import Job, make_staging, write
from flashoptim_dist.convert.lazy import chunks
from flashoptim_dist.convert.progress import Progress
from flashoptim_dist.convert.result import Result, Unit, format_entries, group_entries, path_in
from flashoptim_dist.convert.sharing import shares
from flashoptim_dist.convert.training_state import Layout


def write_dcp(target: Path, result: Result, layout: Layout, ranks: Ranks, overwrite: bool, progress: Progress) -> None:
    """Write a result as a DCP directory (all ranks must call; each writes its share of the parameters).

    Raises:
        CheckpointError: on every rank, with the file and the reason; nothing is left under the target's name then, or
            the older checkpoint as it was.
    """
    doing = f"writing {target}"
    staging = target.with_name(ranks.on_first(doing, lambda: make_staging(target, overwrite)))
    aliases = {
        key_of(path_in(layout, (MODEL, alias))): key_of(path_in(layout, (MODEL, name)))
        for alias, name in result.aliases.items()
    }
    job = Job(target, staging, ranks, overwrite, snapshot.Entries(), aliases)
    job.doing = doing
    units = shares(result.units, ranks.world_size)[ranks.rank]
    progress.begin(doing, sum(unit.nbytes for unit in units))
    write(job, lambda: _BlockPlanner(units, _objects(result, layout) if ranks.is_first else {}, layout, progress))


def _objects(result: Result, layout: Layout) -> dict[Path_, Any]:
    objects = dict(group_entries(layout, result.groups, result.unnamed))
    objects |= dict(format_entries(layout, result))
    objects |= {path_in(layout, path): value for path, value in result.objects}
    return objects | {(FORMAT,): result.record}


class _BlockPlanner(SnapshotPlanner):
    """Plans rows of a unit's tensors as chunks of their own, and computes them when the writer asks for them.

    The chunks of the same rows follow each other, so that their results are all that is held.
    """

    def __init__(self, units: Sequence[Unit], objects: dict[Path_, Any], layout: Layout, progress: Progress) -> None:
        super().__init__({}, {}, False)
        paths: dict[str, Path_] = {}
        items: list[WriteItem] = []
        self._progress = progress
        self._objects: dict[str, Any] = {}
        self._where: dict[tuple[str, int], tuple[int, int, int, int]] = {}
        self._held: tuple[tuple[int, int], dict[int, Tensor]] | None = None
        self._units = list(units)
        for path, value in objects.items():
            key = key_of(path)
            paths[key] = path
            self._objects[key] = snapshot.serialize(value, key)
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        for number, unit in enumerate(self._units):
            placed = [path_in(layout, output.path) for output in unit.outputs]
            paths |= {key_of(path): path for path in placed}
            for start, stop in chunks(unit.shape):
                for position, output in enumerate(unit.outputs):
                    key = key_of(placed[position])
                    self._where[key, start] = (number, position, start, stop)
                    items.append(_item(key, output.shape, output.dtype, start, stop))
        self.plan = SavePlan(items, planner_data=paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return an object, or compute a chunk; each is asked for once."""
        if index.fqn in self._objects:
            return self._objects.pop(index.fqn)
        start = index.offset[0] if index.offset else 0
        number, position, start, stop = self._where[index.fqn, start]
        if self._held is None or self._held[0] != (number, start):
            self._held = None
            self._held = ((number, start), dict(enumerate(self._units[number].rows(start, stop))))
        value = self._held[1].pop(position)
        self._progress.advance(value.nbytes)
        return value


def _item(key: str, shape: tuple[int, ...], dtype: torch.dtype, start: int, stop: int) -> WriteItem:
    offsets = torch.Size([start] + [0] * (len(shape) - 1) if shape else [])
    sizes = torch.Size([stop - start, *shape[1:]] if shape else [])
    properties = TensorProperties(dtype=dtype)
    whole = math.prod(sizes) == math.prod(shape)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(shape))
    kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
    return WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data)
