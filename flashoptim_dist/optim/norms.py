"""Norms of this rank's gradients, added up per bucket: one launch on GPUs, chunks in fp64 elsewhere. No communication.

A bucket is whatever its caller adds up together, a device mesh or a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flashoptim_dist.optim.stepper import takes_kernels

if TYPE_CHECKING:
    from flashoptim_dist.kernels.tables import DeviceTable
    from flashoptim_dist.optim.norm_launch import NormLaunch

_CHUNK = 1 << 20
"""Elements per chunk on CPU: 8 MB in fp64."""
_ALIGNMENT = 16

# Called as functions through map, they cost the host a fifth less than as methods.
_DATA_PTR, _IS_CONTIGUOUS, _NUMEL = Tensor.data_ptr, Tensor.is_contiguous, Tensor.numel


class NormPlan:
    """Which gradients of one device go into which bucket; kept between steps as long as they look the same.

    Args:
        gradients: local tensors on one device, in any strides.
        buckets: the bucket of each.
        count: number of buckets.
        device: of the gradients and the result.
        infinity: add up to the largest magnitude instead of the sum of squares.
        fused: the optimizer's argument; see ``stepper.takes_kernels``.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        buckets: Sequence[int],
        count: int,
        device: torch.device,
        *,
        infinity: bool,
        fused: bool | None = None,
    ) -> None:
        self._buckets, self._count, self._device, self._infinity = list(buckets), count, device, infinity
        self._forms = _Forms(gradients)
        self._kernels: _Kernels | None = None
        if takes_kernels(device, fused):
            self._kernels = _Kernels(gradients, buckets, count, device, infinity)

    def fits(self, gradients: Sequence[Tensor], buckets: Sequence[int], count: int) -> bool:
        """Return whether :meth:`sums` may be called with these."""
        return count == self._count and list(buckets) == self._buckets and self.addresses_if_same(gradients) is not None

    def addresses_if_same(self, gradients: Sequence[Tensor]) -> list[int] | None:
        """Return where the gradients lie if :meth:`sums` may be called with them, in the buckets there are; else None.

        They must lie on the plan's device, and be plain tensors.
        """
        return self._forms.addresses_if_same(gradients)

    @torch.no_grad()
    def sums(self, gradients: Sequence[Tensor], addresses: Sequence[int] | None = None) -> Tensor:
        """Return, per bucket, the sum of squares or the largest magnitude (0 for none): fp64 [buckets], a new tensor.

        NaN and Inf come through. The same gradients always give the same bits. No synchronization on GPUs.

        Args:
            gradients: that fit.
            addresses: what :meth:`addresses_if_same` returned for them, so that they are not read again.
        """
        if self._kernels is not None:
            return self._kernels.sums(gradients, list(map(_DATA_PTR, gradients)) if addresses is None else addresses)
        if self._device.type == "cuda":
            return self._sums_by_foreach(gradients)
        totals = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        for gradient, bucket in zip(gradients, self._buckets, strict=True):
            for chunk in gradient.reshape(-1).split(_CHUNK):
                wide = chunk.double()
                if self._infinity:
                    totals[bucket] = torch.maximum(totals[bucket], wide.abs().max()) if wide.numel() else totals[bucket]
                else:
                    totals[bucket] += wide.dot(wide)
        return totals

    def _sums_by_foreach(self, gradients: Sequence[Tensor]) -> Tensor:
        """Without Triton: torch's foreach norms, which are fp32."""
        present = [(g, b) for g, b in zip(gradients, self._buckets, strict=True) if g.numel()]
        totals = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        if not present:
            return totals
        order = float("inf") if self._infinity else 2.0
        norms = torch.stack([n.double() for n in torch._foreach_norm([g for g, _ in present], order)])
        for bucket in {b for _, b in present}:
            chosen = norms[[row for row, (_, b) in enumerate(present) if b == bucket]]
            totals[bucket] = chosen.max() if self._infinity else chosen.square().sum()
        return totals


class _Forms:
    """What a plan depends on, as one list per attribute: a loop over gradients costs the host several times more.

    Of contiguous gradients dtype, size and how far from 16 bytes the memory begins; of others shape and strides too.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._dtypes = [gradient.dtype for gradient in gradients]
        self._sizes = list(map(_NUMEL, gradients))
        self._contiguous = list(map(_IS_CONTIGUOUS, gradients))
        rows = [row for row, contiguous in enumerate(self._contiguous) if not contiguous]
        self._strided = [(row, (gradients[row].shape, gradients[row].stride())) for row in rows]
        self._addresses = list(map(_DATA_PTR, gradients))
        self._misalignments = [address % _ALIGNMENT for address in self._addresses]

    def addresses_if_same(self, gradients: Sequence[Tensor]) -> list[int] | None:
        try:
            if (
                [gradient.dtype for gradient in gradients] != self._dtypes
                or list(map(_NUMEL, gradients)) != self._sizes
                or list(map(_IS_CONTIGUOUS, gradients)) != self._contiguous
                or any((gradients[row].shape, gradients[row].stride()) != form for row, form in self._strided)
            ):
                return None
            addresses = list(map(_DATA_PTR, gradients))
        except RuntimeError:  # a sparse gradient has no strides and no address
            return None
        if addresses != self._addresses:
            if [address % _ALIGNMENT for address in addresses] != self._misalignments:
                return None
            self._addresses = addresses
        return addresses


def _consecutive(gradient: Tensor) -> Tensor:
    """Return a tensor whose elements fill one run of memory: the gradient itself wherever that is so."""
    if gradient.is_contiguous() or (gradient.ndim == 2 and gradient.t().is_contiguous()):
        return gradient
    if gradient.ndim == 4 and gradient.is_contiguous(memory_format=torch.channels_last):
        return gradient
    return gradient.contiguous()


class _Kernels:
    """The tables of one plan, and its launches."""

    def __init__(
        self, gradients: Sequence[Tensor], buckets: Sequence[int], count: int, device: torch.device, infinity: bool
    ) -> None:
        from flashoptim_dist.kernels.tables import DeviceTable, TaskList
        from flashoptim_dist.optim.norm_launch import NormLaunch, norm_segments

        rows: list[tuple[int, int, int]] = []
        parameter: list[int] = []
        offsets: list[int] = []
        tasks = TaskList(NormLaunch.blocks_per_task)
        ranges = np.zeros((count, 2), dtype=np.int32)
        # A stable sort by bucket: the partial results of a bucket lie side by side.
        for index in sorted(range(len(gradients)), key=lambda index: buckets[index]):
            gradient = _consecutive(gradients[index])
            bucket = buckets[index]
            if ranges[bucket, 1] == 0:
                ranges[bucket] = tasks.count
            for offset, elements, code in norm_segments(gradient):
                tasks.add(len(rows), 0, -(-elements // NormLaunch.block))
                rows.append((gradient.data_ptr() + offset, elements, code))
                parameter.append(index)
                offsets.append(offset)
            ranges[bucket, 1] = tasks.count
        self._parameter, self._offset = np.array(parameter, dtype=np.int64), np.array(offsets, dtype=np.int64)
        self._strided = [row for row, gradient in enumerate(gradients) if not gradient.is_contiguous()]
        self._addresses: list[int] | None = None
        self._table: DeviceTable = DeviceTable(len(rows), 3, device)
        if rows:
            self._table.host[:] = np.array(rows, dtype=np.int64)
        task_table = tasks.to(device)
        self._launch: NormLaunch | None = None
        if task_table is not None:
            self._launch = NormLaunch(self._table.device, task_table, ranges, infinity)
        self._count, self._device = count, device

    def sums(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> Tensor:
        if self._launch is None:
            return torch.zeros(self._count, dtype=torch.float64, device=self._device)
        addresses = list(addresses)
        # Copies of unusual gradients are kept until the launch is in the stream.
        runs = [_consecutive(gradients[row]) for row in self._strided]
        for row, run in zip(self._strided, runs, strict=True):
            addresses[row] = run.data_ptr()
        if addresses != self._addresses:
            self._table.host[:, 0] = np.array(addresses, dtype=np.int64)[self._parameter] + self._offset
            self._table.upload()
            self._addresses = addresses
        return self._launch.run()
