"""Where elements lie must change no bit: flat and general kernels, tails, strides, alignment, blocks, pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist.optim import fused
from flashoptim_dist.optim.launches import Tuning
from tests.kernels.pairs import bf16, copy_of, decoded, fp32, named, random_gradient, random_weights, set_gradient
from tests.numbers import assert_same_bits

Place = Callable[[Tensor], Tensor]


def as_is(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def misaligned(tensor: Tensor) -> Tensor:
    """A view at an odd element of a larger buffer, as FSDP2's reduce-scatter gives."""
    buffer = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
    buffer[3:] = tensor.reshape(-1)
    return buffer[3:].view(tensor.shape)


def row_strided(tensor: Tensor) -> Tensor:
    """Columns of a wider matrix: a tensor-parallel shard."""
    buffer = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype, device=tensor.device)
    buffer[..., 2:-3] = tensor
    return buffer[..., 2:-3]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def permuted(tensor: Tensor) -> Tensor:
    """All dimensions in reverse order: more levels of strides than the kernels describe, in three column dimensions."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def step_placed(shape: tuple[int, ...], weight: Place, gradient: Place, device: torch.device) -> tuple[Tensor, ...]:
    """Weight, correction, codes and scales after two steps with this placement."""
    torch.manual_seed(0)
    (start,) = random_weights([shape], bf16)
    parameter = nn.Parameter(weight(start.detach().to(device)))
    assert parameter.stride() == weight(start.detach()).stride()
    optimizer = fod.FlashAdamW(named([parameter]), lr=0.01, fused=True)
    for _ in range(2):
        parameter.grad = gradient(random_gradient(shape, bf16).to(device))
        optimizer.step()
    return (parameter.detach().contiguous(), *(value.contiguous() for value in optimizer.state[parameter].values()))


@pytest.mark.parametrize(
    "shape, weight, gradient",
    [
        ((17, 32), as_is, misaligned),
        ((17, 32), misaligned, as_is),
        ((17, 32), row_strided, as_is),
        ((3, 40), as_is, transposed),
        ((17, 32), transposed, row_strided),
        ((4, 8, 3, 3), channels_last, as_is),
        ((4, 8, 3, 3), channels_last, channels_last),
        ((2, 3, 2, 40), as_is, row_strided),
        ((2, 3, 4, 2, 2), permuted, permuted),
        ((7,), misaligned, misaligned),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_strides_and_alignment_change_no_bit(
    shape: tuple[int, ...], weight: Place, gradient: Place, device: torch.device
) -> None:
    """The flat kernel, the general one and, where no segment describes the strides, the definition's codes within 1."""
    expected = step_placed(shape, as_is, as_is, device)
    actual = step_placed(shape, weight, gradient, device)
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if weight is permuted:
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1), number
        else:
            assert_same_bits(a, b, f"tensor {number}")


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.full
def test_every_alignment(offset: int, device: torch.device) -> None:
    def shifted(tensor: Tensor) -> Tensor:
        buffer = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
        buffer[offset:] = tensor.reshape(-1)
        return buffer[offset:].view(tensor.shape)

    expected = step_placed((17, 32), as_is, as_is, device)
    for a, b in zip(step_placed((17, 32), as_is, shifted, device), expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    "block, blocks_per_task", [(512, 1), pytest.param(128, 3, marks=pytest.mark.full),
                               pytest.param(1024, 2, marks=pytest.mark.full)]
)  # fmt: skip
@pytest.mark.parametrize("kind", [fod.FlashAdamW, pytest.param(fod.FlashLion, marks=pytest.mark.full)])
def test_blocks_change_no_bit(
    kind: type, block: int, blocks_per_task: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weights = random_weights([(17, 32), (3, 40), (5,)], bf16)
    gradients = [random_gradient(w.shape, bf16) for w in weights]
    results = []
    for choice in (None, Tuning(block=block, warps=block // 256 or 1, blocks_per_task=blocks_per_task)):
        if choice is not None:
            monkeypatch.setattr(fused, "tuning", lambda *_, chosen=choice: chosen)
        parameters = [nn.Parameter(w.detach().to(device, copy=True)) for w in weights]
        optimizer = kind(named(parameters), lr=0.01, fused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(device)
        optimizer.step()
        results.append([t for p in parameters for t in (p.detach(), *optimizer.state[p].values())])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, pytest.param(31, marks=pytest.mark.full)])
def test_a_piece_of_a_tensor_gets_the_same_bits(rows: int, device: torch.device) -> None:
    """Rows from some row on, as a shard whose noise starts at its global index, against the whole tensor."""
    torch.manual_seed(0)
    (whole,) = random_weights([(rows + 3, 32)], bf16)
    gradient = random_gradient(whole.shape, bf16)
    results = []
    for first in (0, 3):
        parameter = nn.Parameter(whole.detach()[first:].to(device, copy=True))
        optimizer = fod.FlashAdamW(named([parameter]), lr=0.01, fused=True)
        optimizer.init_state()
        record = optimizer._record(parameter)
        record.layout = type(record.layout)(
            **{**vars(record.layout), "offset": (first, 0), "global_shape": tuple(whole.shape)}
        )
        parameter.grad = gradient[first:].to(device)
        optimizer.step()
        results.append([parameter.detach(), *(v for n, v in optimizer.state[parameter].items() if n != "step")])
    for name, a, b in zip(("weight", "m", "m scale", "v", "v scale", "correction"), *results, strict=True):
        assert_same_bits(a[3:], b, name)


@pytest.mark.parametrize("stride", [64, (1 << 31) + 64])
def test_rows_2_31_elements_apart(stride: int, device: torch.device) -> None:
    """D48: offsets beyond 2**31. The memory between the rows is reserved, and on a CPU not touched."""
    needed = 4 * (stride + 64)
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2 * needed:
        pytest.skip(f"needs {2 * needed >> 30} GiB of device memory")
    torch.manual_seed(0)
    (start,) = random_weights([(2, 64)], bf16)
    gradient = random_gradient((2, 64), bf16)

    def spread(tensor: Tensor) -> Tensor:
        buffer = torch.empty(stride + 64, dtype=bf16, device=device)
        view = buffer.as_strided((2, 64), (stride, 1))
        view.copy_(tensor)
        return view

    parameter = nn.Parameter(spread(start.detach()))
    optimizer = fod.FlashAdamW(named([parameter]), lr=0.01, fused=True)
    parameter.grad = spread(gradient)
    optimizer.step()
    expected = fod.FlashAdamW(named([start]), lr=0.01, fused=False)
    start.grad = gradient
    expected.step()
    difference = decoded(optimizer, parameter)["weight"] - decoded(expected, start)["weight"]
    assert difference.abs().max() <= 2**-12 * 0.1  # one unit of a 24-bit master weight of up to 0.1
    codes = optimizer.state[parameter]["exp_avg"].cpu().int() - expected.state[start]["exp_avg"].int()
    assert codes.abs().max() <= 1


def test_flat_blocks_beyond_2_31_elements(device: torch.device) -> None:
    """D48: a flat task far into a segment, whose addresses are moved back as far, steps the memory that is there."""
    torch.manual_seed(0)
    (start,) = random_weights([(16, 32)], bf16)
    gradient = random_gradient(start.shape, bf16).to(device)
    far = 1 << 32  # a multiple of 2**32, so that the noise is the same
    results = []
    for shift in (0, far):
        parameter = nn.Parameter(start.detach().to(device, copy=True))
        optimizer = fod.FlashAdamW(named([parameter]), lr=0.01, fused=True)
        optimizer.init_state()
        parameter.grad = gradient
        plan_class = fused.Plan
        if shift:
            plan_class = type("Shifted", (fused.Plan,), {"_build": _shifted_build(far)})
        tasks = next(iter(optimizer._tasks().values()))
        plan = plan_class(tasks, torch.zeros((), dtype=torch.int32, device=device), True)
        plan.run(plan.hyperparameters, fused.GradientInputs())
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
        assert plan.launches
    assert not torch.equal(results[0][0], start.detach().to(device))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def _shifted_build(far: int) -> Callable[..., None]:
    def build(self: fused.Plan, tasks: list) -> None:
        fused.Plan._build(self, tasks)
        for column, size in enumerate((2, 2, 1, 1, 2 / 32, 1, 2 / 32)):
            self.table.host[:, column] -= int(far * size)
        self.table.upload()
        for launch in self.launches:
            table = launch._arguments[2]
            table[:, 1] += far // launch._constants["BLOCK"]

    return build


def test_empty_and_single_elements(device: torch.device) -> None:
    """Nothing happens to an empty tensor, and nothing breaks beside it."""
    torch.manual_seed(0)
    weights = random_weights([(0, 64), (), (1,), (0,)], fp32)
    optimizer = fod.FlashAdamW(named(weights), lr=0.01, fused=False)
    optimizer.init_state()
    for weight in weights:
        set_gradient(weight, random_gradient(weight.shape, fp32))
    copies, other = copy_of(optimizer, weights, device, lr=0.01)
    optimizer.step()
    other.step()
    for weight, copy in zip(weights, copies, strict=True):
        assert torch.allclose(weight.detach(), copy.detach().cpu(), rtol=1e-6)
        assert other.state[copy]["step"].item() == 1


def test_only_empty_tensors(device: torch.device) -> None:
    parameter = nn.Parameter(torch.zeros(0, 64, dtype=bf16, device=device))
    optimizer = fod.FlashAdamW([parameter], fused=True)
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 2
