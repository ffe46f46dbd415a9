"""What only a GPU shows: graph capture, no waits, no recompilation, more than 2**31 elements, two devices, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from flashoptim_dist.kernels.adam import adam_kernel
from flashoptim_dist.kernels.advance import adam_advance_kernel, momentum_advance_kernel
from flashoptim_dist.kernels.momentum import momentum_kernel
from torch import Tensor, nn

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD
from flashoptim_dist.optim.base import FlashOptimizer
from tests.kernels.pairs import bf16, named, random_gradient, random_weights
from tests.numbers import assert_same_bits

pytestmark = pytest.mark.gpu

SHAPES = [(64, 256), (33, 40), (7,), (8, 16, 3, 3)]
CUDA = torch.device("cuda")


def make(
    kind: type[FlashOptimizer] = FlashAdamW, device: torch.device = CUDA, **options: object
) -> tuple[FlashOptimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().to(device)) for w in random_weights(SHAPES, bf16)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return kind(named(parameters), **{"lr": 0.01, **options}, fused=True), parameters


def fill_gradients(parameters: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(random_gradient(parameter.shape, bf16))


def everything(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [t for p in parameters for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("kind", [FlashAdamW, FlashAdam, FlashLion, FlashSGD])
def test_captured_steps_give_the_bits_of_eager_ones(kind: type[FlashOptimizer]) -> None:
    """With a learning rate on the device that changes between replays, and a skipped step among them."""
    options = {"momentum": 0.9} if kind is FlashSGD else {}
    sides = []
    for captured in (False, True):
        lr, found_inf = torch.tensor(0.01, device=CUDA), torch.zeros((), device=CUDA)
        optimizer, parameters = make(kind, lr=lr, weight_decay=0.1, **options)
        optimizer.found_inf = found_inf
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(2):
                fill_gradients(parameters, step)
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(2, 7):
            fill_gradients(parameters, step)
            lr.fill_(0.01 / step)
            found_inf.fill_(float(step == 4))
            if captured:
                graph.replay()
            else:
                optimizer.step()
        sides.append(everything(optimizer, parameters))
        assert optimizer.skipped_steps == 1
        assert optimizer.state[parameters[0]]["step"].item() == 6
    for a, b in zip(*sides, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("kind", [FlashAdamW, FlashLion])
def test_captured_forward_and_backward_follow_the_steps(kind: type[FlashOptimizer]) -> None:
    """torchtitan 0.3's CUDA graphs: forward and backward are replayed, gradients stay where they are, steps are not in
    the graph. Weights are stepped in place, so that a replay sees them."""
    sides = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)).to(CUDA, bf16)
        optimizer = kind(model.named_parameters(), lr=1e-3, fused=True)
        batch, losses = torch.empty(8, 64, device=CUDA, dtype=bf16), []

        def forward_and_backward(model: nn.Module = model, batch: Tensor = batch) -> Tensor:
            loss = (model(batch) - batch).float().square().mean()
            loss.backward()
            return loss

        def fill(step: int, batch: Tensor = batch) -> None:
            generator = torch.Generator().manual_seed(step)
            batch.copy_(torch.randn(8, 64, generator=generator))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fill(0)
            forward_and_backward()
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad(set_to_none=False)
        graph, loss = torch.cuda.CUDAGraph(), torch.empty(())
        if captured:
            with torch.cuda.graph(graph):
                loss = forward_and_backward()
            optimizer.zero_grad(set_to_none=False)
        for step in range(1, 7):
            fill(step)
            if captured:
                graph.replay()
            else:
                loss = forward_and_backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        sides.append((losses, everything(optimizer, list(model.parameters()))))
    (losses, states), (replayed_losses, replayed_states) = sides
    assert losses == replayed_losses
    for a, b in zip(states, replayed_states, strict=True):
        assert_same_bits(a, b)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [FlashAdamW, FlashLion])
def test_no_step_waits_for_the_device(kind: type[FlashOptimizer], no_waiting: None) -> None:
    """Kept plans, gradients that moved or are missing, scalars on the device that change."""
    torch.cuda.set_sync_debug_mode("default")
    optimizer, parameters = make(kind)
    fill_gradients(parameters, 0)
    optimizer.step()
    lr, found_inf = torch.tensor(0.1, device=CUDA), torch.zeros((), device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    kept, parameters[0].grad = parameters[0].grad, None
    optimizer.step()
    parameters[0].grad = kept
    optimizer.step()
    optimizer.found_inf = found_inf
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    optimizer.step()


def compiled_kernels() -> int:
    kernels = (adam_kernel, momentum_kernel, adam_advance_kernel, momentum_advance_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_nothing_that_changes_between_steps_recompiles() -> None:
    lrs, flags = torch.rand(8, device=CUDA), torch.zeros(8, device=CUDA)
    optimizer, parameters = make(lr=lrs[0])
    optimizer.found_inf, optimizer.grad_scale = flags[0], lrs[0]
    for step in range(2):
        fill_gradients(parameters, step)
        optimizer.step()
    before = compiled_kernels()
    assert before > 0
    for step in range(1, 8):
        group = optimizer.param_groups[0]
        group["lr"], optimizer.found_inf, optimizer.grad_scale = lrs[step], flags[step], lrs[step]
        group["weight_decay"], group["eps"], group["betas"] = 0.1 * step, 1e-8 * step, (0.9, 1 - 0.1**step)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if step == 5:
            parameters[1].grad = None
        optimizer.step()
    assert compiled_kernels() == before


def test_d48_more_than_2_31_elements() -> None:
    """flash-linear-attention#1080: the last elements of 2**31 + 64 (2 rows) get the bits of the same rows alone."""
    length = (1 << 30) + 32
    needed = 2 * length * 8
    if torch.cuda.mem_get_info()[0] < needed * 1.3:
        pytest.skip(f"needs {needed * 1.3 / 2**30:.0f} GiB of device memory")
    torch.manual_seed(0)
    tail = 4096
    start, gradient = torch.randn(2, tail).to(bf16).cuda(), (torch.randn(2, tail) * 1e-3).to(bf16).cuda()
    big = nn.Parameter(torch.zeros(2, length, dtype=bf16, device=CUDA))
    big.grad = torch.zeros_like(big)
    with torch.no_grad():
        big[:, -tail:] = start
        big.grad[:, -tail:] = gradient
    small = nn.Parameter(start.clone())
    small.grad = gradient.clone()
    states = []
    for parameter in (big, small):
        optimizer = FlashAdamW([parameter], lr=0.01, rounding="nearest", fused=True)
        optimizer.step()
        optimizer.step()
        state = optimizer.state[parameter]
        groups = tail // 32
        states.append(
            [parameter.detach()[:, -tail:], *(state[n][:, -tail:] for n in ("exp_avg", "exp_avg_sq", "error_bits")),
             *(state[n][:, -groups:] for n in ("exp_avg_scale", "exp_avg_sq_scale"))]
        )  # fmt: skip
    for a, b in zip(*states, strict=True):
        assert_same_bits(a.contiguous(), b.contiguous())
    assert not big.detach()[:, :-tail].any()
    del big, states, optimizer, state
    gc.collect()
    torch.cuda.empty_cache()


def test_two_devices_in_one_process() -> None:
    """Tensors on both devices in one optimizer, whatever device is the current one, get the bits of one device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for devices in ((0, 0, 0, 0), (0, 1, 1, 0)):
        torch.manual_seed(0)
        weights = random_weights(SHAPES, bf16)
        parameters = [nn.Parameter(w.detach().to(f"cuda:{d}")) for w, d in zip(weights, devices, strict=True)]
        optimizer = FlashAdamW(named(parameters), lr=0.01, fused=True)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            fill_gradients(parameters, step)
            with torch.cuda.device(step % 2):
                optimizer.step()
        results.append([t.cpu() for t in everything(optimizer, parameters)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_memory_beside_the_states() -> None:
    """Tables of a rank's tensors: under 16 MiB beside the states for 8B over 8 ranks, so under 1.6 for a tenth."""
    parameters = [nn.Parameter(torch.zeros(1024, 4096, dtype=bf16, device=CUDA)) for _ in range(24)]
    optimizer = FlashAdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.init_state()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    optimizer.step()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 1.6 * 2**20, f"{extra / 2**20:.2f} MiB beside the states"


def test_b23_load_peak() -> None:
    """Megatron-LM#7371: loading needs no second copy of the state: at most the state and its largest tensor."""
    shapes = [(512, 1024)] * 16
    parameters = [nn.Parameter(torch.zeros(shape, dtype=bf16, device=CUDA)) for shape in shapes]
    optimizer = FlashAdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {n: {k: v.cpu() for k, v in entry.items()} for n, entry in saved["state"].items()}
    size = sum(v.numel() * v.element_size() for entry in saved["state"].values() for v in entry.values())
    fresh = FlashAdamW(parameters, fused=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fresh.load_state_dict(saved)
    peak = torch.cuda.max_memory_allocated() - before
    largest = 512 * 1024
    # Every tensor starts at a multiple of 512 bytes.
    assert peak <= size + largest + 512 * 7 * len(shapes), f"{peak} bytes for a state of {size}"
    assert_same_bits(fresh.state[parameters[0]]["exp_avg"], optimizer.state[parameters[0]]["exp_avg"])


def test_state_on_the_cpu_is_refused_by_name() -> None:
    optimizer, parameters = make()
    fill_gradients(parameters, 0)
    optimizer.step()
    state = optimizer.state[parameters[1]]
    moved = state["exp_avg"].cpu()
    state["exp_avg"] = moved
    with pytest.raises(RuntimeError, match=r"exp_avg.*layers\.1\.weight.*cpu"):
        optimizer.step()
    state["exp_avg"] = moved.cuda()
    optimizer.step()
