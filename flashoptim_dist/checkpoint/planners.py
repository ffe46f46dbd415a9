"""DCP planners for entries that are already flat: what is written is a snapshot, what is read goes where it belongs."""

from __future__ import annotations

import dataclasses
import io
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.checkpoint.layout import Path_


class SnapshotPlanner(DefaultSavePlanner):
    """Plans the entries given at construction.

    ``local`` maps every item of the plan to this rank's data: tensors (the live ones, or staged copies of them, put
    there before the write) and serialized objects.
    """

    def __init__(self, entries: dict[str, Any], paths: dict[str, Path_], coordinator: bool) -> None:
        """Plan ``entries``: tensors, DTensors, and ``io.BytesIO`` with a serialized object."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        items = create_default_local_save_plan(entries, coordinator).items
        self.local: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {
            item.index: find_state_dict_object(entries, item.index) for item in items
        }
        self.plan = SavePlan(items, planner_data=paths)
        self.is_coordinator = coordinator

    def use(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Write these tensors, by entry, instead of the live ones: copies of this rank's parts.

        Tensors among group options have none: they were copied when the snapshot was taken.
        """
        for index in self.local:
            if index.fqn in copies:
                self.local[index] = copies[index.fqn]

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: everything was set up at construction."""

    def create_local_plan(self) -> SavePlan:
        """Return the plan made at construction."""
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Drop what replicas hold twice, and join the paths of all ranks."""
        plans, metadata = super().create_global_plan(all_plans)
        paths = dict(ChainMap(*(plan.planner_data for plan in all_plans)))
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return this rank's data of an item."""
        return self.local[index]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the data as it is: objects were serialized when the snapshot was taken."""
        if write_item.type == WriteItemType.BYTE_IO:
            object.seek(0)
        return object


class InPlacePlanner(DefaultLoadPlanner):
    """Reads tensors straight into the tensors it is given."""

    def __init__(self) -> None:
        """Make a planner for one load."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: objects are read by themselves, through the allow-list."""
        raise CheckpointFormatError(f"{read_item.dest_index.fqn!r} is an object in it, and a tensor here")
