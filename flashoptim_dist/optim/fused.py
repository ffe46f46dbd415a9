"""The Triton backend: all parameters of a device in one launch per bucket, planned once and kept current.

A *plan* holds everything that does not change between steps: segment, task and scalar tables on the device and the
launches over them. A step then costs one look at every parameter and gradient (pointers, version counters), at most
one asynchronous copy of pointers, and the launches. Nothing waits for the device.

A bucket is what one compiled kernel serves: weight and gradient dtype, correction bits, compressed moments or not,
rounding, rule. Whole blocks of consecutive, aligned memory go to the flat kernel, all else (tails, short or strided
rows, misaligned gradients) to the general one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.kernels.tables import (
    GROUP_SIZE,
    SEGMENT_COLUMNS,
    VECTOR_BYTES,
    DeviceTable,
    Rows,
    TaskList,
    fill_segment,
    one_row,
    rows_of,
)
from flashoptim_dist.optim.launches import (
    SCALAR_COLUMNS,
    AdvanceInputs,
    KernelLaunch,
    advance,
    compiled_options,
    kernel_options,
    tuning,
)
from flashoptim_dist.optim.rules import Hyperparameters
from flashoptim_dist.optim.state import ERROR_BITS, STEP
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask
    from flashoptim_dist.optim.records import ParameterRecord


@dataclass(slots=True)
class _Watched:
    """What a step looks at of one parameter, and what it must find for the plan to hold."""

    parameter: Tensor
    record: ParameterRecord
    local: Tensor
    is_dtensor: bool
    state: dict[str, Any]
    weight_address: int
    versions: tuple[int, int]
    gradient_dtype: torch.dtype
    gradient_strides: tuple[int, ...]


@dataclass(slots=True)
class _Segment:
    """A segment before it is in the table: its parameter, geometry and offsets of the two addresses that can move."""

    index: int
    weight_bytes: int
    gradient_bytes: int
    flat: bool


class Plan:
    """Tables and launches for one list of tasks on one device.

    Args:
        tasks: the parameters to step, all with gradients, grouped as the optimizer groups them.
        skipped: int32 counter of skipped steps on the device.

    Raises:
        GeometryError: a parameter or gradient whose strides no kernel describes.
    """

    def __init__(self, tasks: Sequence[StepTask], skipped: Tensor) -> None:
        self.device = tasks[0].weight.device
        self.skipped = skipped
        self.hyperparameters: list[Hyperparameters] = []
        self.group_ends: list[int] = []
        for row, task in enumerate(tasks):
            if not self.hyperparameters or self.hyperparameters[-1] is not task.hyperparameters:
                self.hyperparameters.append(task.hyperparameters)
                self.group_ends.append(row)
            self.group_ends[-1] = row + 1
        self.watched = [_watch(task) for task in tasks]
        self.scalars = torch.zeros(len(tasks), SCALAR_COLUMNS, dtype=torch.float32, device=self.device)
        self.steps = DeviceTable(len(tasks), 2, self.device)
        self.fresh = any(task.fresh_moments for task in tasks)
        for row, task in enumerate(tasks):
            self.steps.host[row] = (task.state[STEP].data_ptr(), int(task.fresh_moments))
        self.steps.upload()
        self._addresses = np.array(
            [(task.weight.data_ptr(), task.gradient.data_ptr()) for task in tasks], dtype=np.int64
        )
        self._build(tasks)

    def _build(self, tasks: Sequence[StepTask]) -> None:
        buckets: dict[tuple[Any, ...], tuple[TaskList, TaskList]] = {}
        segments: list[_Segment] = []
        rows: list[np.ndarray] = []
        for index, task in enumerate(tasks):
            options = kernel_options(task)
            choice = tuning(options)
            flat_tasks, general_tasks = buckets.setdefault(
                options, (TaskList(choice.blocks_per_task), TaskList(choice.blocks_per_task))
            )
            for part, flat in _geometry(task):
                row = np.zeros(SEGMENT_COLUMNS, dtype=np.int64)
                segment = _Segment(
                    index,
                    part.weight_offset * task.weight.element_size(),
                    part.gradient_offset * task.gradient.element_size(),
                    flat,
                )
                fill_segment(
                    row,
                    part,
                    scalar_row=index,
                    noise=task.record.noise_key or 0,
                    index_base=_first_index(task),
                    addresses=_addresses_of(task, part),
                )
                groups_per_block = choice.block // GROUP_SIZE
                blocks = -(-part.rows * part.groups_per_row // groups_per_block)
                whole = part.length // choice.block if flat else 0
                flat_tasks.add(len(segments), 0, whole)
                general_tasks.add(len(segments), whole, blocks)
                segments.append(segment)
                rows.append(row)
        self.table = DeviceTable(len(rows), SEGMENT_COLUMNS, self.device)
        if rows:
            self.table.host[:] = np.stack(rows)
        self.table.upload()
        self._segment_parameter = np.array([s.index for s in segments], dtype=np.int64)
        self._offsets = np.array([(s.weight_bytes, s.gradient_bytes) for s in segments], dtype=np.int64).reshape(-1, 2)
        is_flat = np.array([s.flat for s in segments], dtype=bool)
        self._flat_parameters = np.unique(self._segment_parameter[is_flat])
        self.launches: list[KernelLaunch] = []
        for options, lists in buckets.items():
            for task_list, general in zip(lists, (False, True), strict=True):
                table = task_list.to(self.device)
                if table is not None:
                    self.launches.append(KernelLaunch(options, table, general))
        self.kernel_options = list(buckets)

    def is_current(self, hyperparameters: Sequence[Hyperparameters], state: Mapping[Tensor, Any]) -> bool:
        """Return whether the plan still describes its parameters; pointers that moved are put into the tables.

        Never true where a weight changed since the last step, a gradient is missing or of another form, or options that
        are compiled into the kernels changed.
        """
        moved = False
        gradients = []
        for watched in self.watched:
            parameter = watched.parameter
            gradient = parameter.grad
            if gradient is None or state.get(parameter) is not watched.state:
                return False
            local = watched.local
            if watched.is_dtensor:
                if parameter._local_tensor is not local or not isinstance(gradient, DTensor):  # type: ignore[attr-defined]
                    return False
                if gradient._spec.placements != parameter._spec.placements:  # type: ignore[attr-defined]
                    return False
                gradient = gradient._local_tensor
            if (
                (parameter._version, local._version) != watched.versions
                or local.data_ptr() != watched.weight_address
                or gradient.dtype is not watched.gradient_dtype
                or gradient.stride() != watched.gradient_strides
            ):
                return False
            gradients.append(gradient.data_ptr())
        for old, new in zip(self.hyperparameters, hyperparameters, strict=True):
            if compiled_options(old) != compiled_options(new):
                return False
        addresses = np.array(gradients, dtype=np.int64)
        moved = not np.array_equal(addresses, self._addresses[:, 1])
        if moved:
            if len(self._flat_parameters) and (addresses[self._flat_parameters] % VECTOR_BYTES).any():
                return False
            self._addresses[:, 1] = addresses
            self.table.host[:, 1] = addresses[self._segment_parameter] + self._offsets[:, 1]
            self.table.upload()
        return True

    def run(self, hyperparameters: Sequence[Hyperparameters], inputs: AdvanceInputs) -> None:
        """Launch the step."""
        self.hyperparameters = list(hyperparameters)
        first = 0
        for number, (hyper, end) in enumerate(zip(hyperparameters, self.group_ends, strict=True)):
            advance(hyper, self.steps.device, self.scalars, self.skipped, first, end, number == 0, inputs)
            first = end
        for launch in self.launches:
            launch.run(self.table.device, self.scalars)
        if self.fresh:
            self.fresh = False
            self.steps.host[:, 1] = 0
            self.steps.upload()

    def note_weights(self) -> None:
        """Bump the version counters of plain weights, as an in-place operation does, and remember all of them.

        DTensors' counters stay: FSDP2 saves no sharded weight for the backward, and nothing else looks at them.
        """
        plain = [watched.parameter for watched in self.watched if not watched.is_dtensor]
        if plain:
            torch.autograd.graph.increment_version(plain)
            for watched in self.watched:
                if not watched.is_dtensor:
                    version = watched.parameter._version
                    watched.versions = (version, version)
                    watched.record.seen = (watched.weight_address, version, version)


def _watch(task: StepTask) -> _Watched:
    parameter = task.parameter
    return _Watched(
        parameter=parameter,
        record=task.record,
        local=task.weight,
        is_dtensor=isinstance(parameter, DTensor),
        state=task.state,
        weight_address=task.weight.data_ptr(),
        versions=(parameter._version, task.weight._version),
        gradient_dtype=task.gradient.dtype,
        gradient_strides=task.gradient.stride(),
    )


def _first_index(task: StepTask) -> int:
    layout = task.record.layout
    shape = layout.global_shape
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(layout.offset))


def _moment_tensors(task: StepTask) -> list[Tensor | None]:
    """Return [moment 0, scale 0, moment 1, scale 1], None where the parameter has none."""
    tensors: list[Tensor | None] = []
    for moment in task.record.moments:
        tensors.append(local_tensor(task.state[moment.name]))
        scale = task.state.get(moment.scale_name) if moment.scale_name in task.record.entries else None
        tensors.append(None if scale is None else local_tensor(scale))
    return tensors + [None] * (4 - len(tensors))


def _correction(task: StepTask) -> Tensor | None:
    return local_tensor(task.state[ERROR_BITS]) if ERROR_BITS in task.record.entries else None


def _geometry(task: StepTask) -> list[tuple[Rows, bool]]:
    """Return the segments of a parameter, each with whether its whole blocks may take the flat kernel."""
    layout, weight, gradient = task.record.layout, task.weight, task.gradient
    if layout.numel == 0:
        return []
    compressed = bool(task.record.moments) and task.record.moments[0].scale_name in task.record.entries
    whole_groups = not compressed or layout.length % GROUP_SIZE == 0
    if whole_groups and layout.index_base is not None and weight.is_contiguous() and gradient.is_contiguous():
        tensors = [weight, gradient, _correction(task), *_moment_tensors(task)[0::2]]
        aligned = all(t is None or t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)
        return [(one_row(layout.numel), aligned)]
    shape = layout.global_shape
    index_strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first_column_dim = 1 if layout.flattened else max(len(shape) - 1, 0)
    parts = rows_of(layout.local_shape, first_column_dim, weight.stride(), gradient.stride(), index_strides)
    return [(part, False) for part in parts]


def _addresses_of(task: StepTask, part: Rows) -> list[int]:
    """Return the seven addresses of a segment."""

    def address(tensor: Tensor | None, offset: int) -> int:
        return 0 if tensor is None else tensor.data_ptr() + offset * tensor.element_size()

    scale_offset = part.state_offset // max(part.length, 1) * part.groups_per_row
    moment_0, scale_0, moment_1, scale_1 = _moment_tensors(task)
    return [
        address(task.weight, part.weight_offset),
        address(task.gradient, part.gradient_offset),
        address(_correction(task), part.state_offset),
        address(moment_0, part.state_offset),
        address(scale_0, scale_offset),
        address(moment_1, part.state_offset),
        address(scale_1, scale_offset),
    ]
