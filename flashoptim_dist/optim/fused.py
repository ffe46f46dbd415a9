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
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.kernels import layout
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
    KernelLaunch,
    advance,
    compiled_options,
    kernel_options,
    tuning,
)
from flashoptim_dist.optim.rules import Hyperparameters
from flashoptim_dist.optim.scaling import GradientInputs
from flashoptim_dist.optim.state import ERROR_BITS, STEP
from flashoptim_dist.optim.watch import MemoryWatch, check_state
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask


# Called as functions through map, they cost the host a fifth less than as methods.
_DATA_PTR, _IS_CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous


@dataclass(slots=True)
class _Segment:
    """A segment before it is in the table: its parameter, the offset in its gradient, and whether it has flat tasks."""

    index: int
    gradient_bytes: int
    flat: bool


class Plan:
    """Tables and launches for one list of tasks on one device.

    Args:
        tasks: the parameters to step, all with gradients, grouped as the optimizer groups them.
        skipped: int32 counter of skipped steps on the device.
        counts_skips: whether this plan counts them; one of an optimizer's plans on a device does.

    Raises:
        GeometryError: a parameter or gradient whose strides no kernel describes.
        RuntimeError: state that does not fit its parameter, or a gradient that is a negative view, named.
    """

    def __init__(self, tasks: Sequence[StepTask], skipped: Tensor, counts_skips: bool) -> None:
        self.device = tasks[0].weight.device
        self.skipped = skipped
        self.counts_skips = counts_skips
        self.hyperparameters: list[Hyperparameters] = []
        self.groups = list(dict.fromkeys(task.group for task in tasks))
        self.group_ends: list[int] = []
        for row, task in enumerate(tasks):
            if not self.hyperparameters or self.hyperparameters[-1] is not task.hyperparameters:
                self.hyperparameters.append(task.hyperparameters)
                self.group_ends.append(row)
            self.group_ends[-1] = row + 1
        for task in tasks:
            check_state(task)
            if task.gradient.is_neg():
                raise RuntimeError(
                    f"parameter {task.record.name!r} {tuple(task.parameter.shape)} has a gradient that torch negates "
                    "as it reads it, which kernels don't: set .grad to grad.resolve_neg()"
                )
        self._watch(tasks)
        self.scalars = torch.zeros(len(tasks), SCALAR_COLUMNS, dtype=torch.float32, device=self.device)
        self.steps = DeviceTable(len(tasks), 2, self.device)
        self.fresh = any(task.fresh_moments for task in tasks)
        for row, task in enumerate(tasks):
            self.steps.host[row] = (task.state[STEP].data_ptr(), int(task.fresh_moments))
        self.steps.upload()
        self._build(tasks)

    def _build(self, tasks: Sequence[StepTask]) -> None:
        buckets: dict[tuple[Any, ...], tuple[TaskList, TaskList]] = {}
        segments: list[_Segment] = []
        rows: list[np.ndarray] = []
        options_of = [kernel_options(task) for task in tasks]
        elements: dict[tuple[Any, ...], int] = {}
        for task, options in zip(tasks, options_of, strict=True):
            elements[options] = elements.get(options, 0) + task.record.layout.numel
        choices = {options: tuning(count, options, self.device) for options, count in elements.items()}
        for index, (task, options) in enumerate(zip(tasks, options_of, strict=True)):
            choice = choices[options]
            flat_tasks, general_tasks = buckets.setdefault(
                options, (TaskList(choice.blocks_per_task), TaskList(choice.blocks_per_task))
            )
            for part, flat in _geometry(task):
                row = np.zeros(SEGMENT_COLUMNS, dtype=np.int64)
                segment = _Segment(index, part.gradient_offset * task.gradient.element_size(), flat)
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
        self._gradient_offsets = np.array([s.gradient_bytes for s in segments], dtype=np.int64)
        is_flat = np.array([s.flat for s in segments], dtype=bool)
        self._flat_parameters = np.unique(self._segment_parameter[is_flat])
        self.launches: list[KernelLaunch] = []
        for options, lists in buckets.items():
            for task_list, general in zip(lists, (False, True), strict=True):
                table = task_list.to(self.device)
                if table is not None:
                    launch = KernelLaunch(options, choices[options], self.table.device, self.scalars, table, general)
                    self.launches.append(launch)
        self.kernel_options = list(buckets)

    def _watch(self, tasks: Sequence[StepTask]) -> None:
        """Remember what a step compares, as one list per attribute: a loop over attributes costs several times more."""
        self.parameters = [task.parameter for task in tasks]
        self._records = [task.record for task in tasks]
        self._is_plain = [not isinstance(task.parameter, DTensor) for task in tasks]
        self._all_plain, self._none_plain = all(self._is_plain), not any(self._is_plain)
        self._plain = [p for p, plain in zip(self.parameters, self._is_plain, strict=True) if plain]
        self._specs = [None if plain else p._spec for p, plain in zip(self.parameters, self._is_plain, strict=True)]  # type: ignore[attr-defined]
        self._gradient_specs: list[Any] = list(self._specs)  # as objects, those of the last gradients
        self._versions = [parameter._version for parameter in self.parameters]
        self._local_versions = [task.weight._version for task in tasks]
        self._weight_addresses = [task.weight.data_ptr() for task in tasks]
        self._gradient_addresses = [task.gradient.data_ptr() for task in tasks]
        self._gradient_dtypes = [task.gradient.dtype for task in tasks]
        self._contiguous = [task.gradient.is_contiguous() for task in tasks]
        strided = [(row, task.gradient.stride()) for row, task in enumerate(tasks) if not self._contiguous[row]]
        self._strided = strided
        self._memory = MemoryWatch(tasks)
        self._unsettled = False

    def _locals(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._all_plain:
            return tensors
        if self._none_plain:
            return [tensor._local_tensor for tensor in tensors]  # type: ignore[attr-defined]
        pairs = zip(tensors, self._is_plain, strict=True)
        return [tensor if plain else tensor._local_tensor for tensor, plain in pairs]  # type: ignore[attr-defined]

    def is_current(self, hyperparameters: Sequence[Hyperparameters]) -> bool:
        """Return whether the plan still describes its parameters; pointers that moved are put into the tables.

        Never true where a weight changed since the last step, the memory of a state was replaced, a gradient is missing
        or of another form, or options that are compiled into the kernels changed. That no state tensor was replaced is
        seen from ``StateTable.changes``.
        """
        if not self._memory.holds():
            return False
        parameters = self.parameters
        try:
            # Attributes of DTensors cost three times as much while torch looks for their __torch_function__.
            with torch._C.DisableTorchFunctionSubclass():
                gradients: list[Any] = [parameter.grad for parameter in parameters]
                weights, locals_ = self._locals(parameters), self._locals(gradients)
                addresses = list(map(_DATA_PTR, locals_))
                if self._none_plain:
                    specs = [gradient._spec for gradient in gradients]
                else:
                    specs = self._specs if self._all_plain else [getattr(g, "_spec", None) for g in gradients]
                if (
                    [weight._version for weight in weights] != self._local_versions
                    or (not self._all_plain and [p._version for p in parameters] != self._versions)
                    or list(map(_DATA_PTR, weights)) != self._weight_addresses
                    or [local.dtype for local in locals_] != self._gradient_dtypes
                    or list(map(_IS_CONTIGUOUS, locals_)) != self._contiguous
                    or any(locals_[row].stride() != strides for row, strides in self._strided)
                    or any(map(_differ_in_kernel, self.hyperparameters, hyperparameters))
                ):
                    return False
        except (AttributeError, TypeError, RuntimeError):
            # A gradient is None, plain where its parameter is a DTensor, or has no memory to point at (sparse).
            return False
        if specs is not self._specs and not all(map(operator.is_, specs, self._gradient_specs)):
            for spec, expected in zip(specs, self._specs, strict=True):
                if spec is None or expected is None:
                    if spec is not expected:
                        return False
                elif spec.placements != expected.placements:
                    return False
            self._gradient_specs = specs
        if addresses != self._gradient_addresses:
            self._gradient_addresses = addresses
            moved = np.array(addresses, dtype=np.int64)
            if (moved[self._flat_parameters] % VECTOR_BYTES).any():
                return False
            self.table.host[:, layout.GRADIENT.value] = moved[self._segment_parameter] + self._gradient_offsets
            self.table.upload()
        return True

    def run(self, hyperparameters: Sequence[Hyperparameters], inputs: GradientInputs) -> None:
        """Launch the step."""
        self.hyperparameters = list(hyperparameters)
        first = 0
        for number, (hyper, end) in enumerate(zip(hyperparameters, self.group_ends, strict=True)):
            advance(
                hyper,
                self.steps.device,
                self.scalars,
                self.skipped,
                first,
                end,
                self.counts_skips and number == 0,
                inputs,
            )
            first = end
        for launch in self.launches:
            launch.run()
        if self.fresh:
            self.fresh = False
            self.steps.host[:, 1] = 0
            self.steps.upload()

    def note_weights(self) -> None:
        """Bump the version counters of plain weights, as an in-place operation does.

        DTensors' counters stay: FSDP2 saves no sharded weight for the backward, and nothing else looks at them.
        """
        if self._plain:
            torch.autograd.graph.increment_version(self._plain)
            if self._all_plain:
                self._versions = self._local_versions = [version + 1 for version in self._versions]
            else:
                plain = self._is_plain
                self._versions = list(map(operator.add, self._versions, plain))
                self._local_versions = list(map(operator.add, self._local_versions, plain))
            self._unsettled = True

    def settle(self) -> None:
        """Tell the records which weights their corrections belong to now."""
        if self._unsettled:
            self._unsettled = False
            values = zip(self._records, self._weight_addresses, self._versions, self._local_versions, strict=True)
            for record, *seen in values:
                record.seen = tuple(seen)


def _differ_in_kernel(old: Hyperparameters, new: Hyperparameters) -> bool:
    return compiled_options(old) != compiled_options(new)


def _first_index(task: StepTask) -> int:
    shard = task.record.layout
    shape = shard.global_shape
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(shard.offset))


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
    shard, weight, gradient = task.record.layout, task.weight, task.gradient
    if shard.numel == 0:
        return []
    compressed = bool(task.record.moments) and task.record.moments[0].scale_name in task.record.entries
    whole_groups = not compressed or shard.length % GROUP_SIZE == 0
    if whole_groups and shard.index_base is not None and weight.is_contiguous() and gradient.is_contiguous():
        tensors = [weight, gradient, _correction(task), *_moment_tensors(task)[0::2]]
        aligned = all(t is None or t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)
        return [(one_row(shard.numel), aligned)]
    shape = shard.global_shape
    index_strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first_column_dim = 1 if shard.flattened else max(len(shape) - 1, 0)
    parts = rows_of(shard.local_shape, first_column_dim, weight.stride(), gradient.stride(), index_strides)
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
