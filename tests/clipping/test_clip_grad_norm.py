"""`clip_grad_norm_`: the norm of any mix of meshes, and the coefficient that the next step applies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import flashoptim_dist as fod
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import whole
from tests.pool import run_ranks

bf16, fp32 = torch.bfloat16, torch.float32
CLOSE = 1e-5
SHAPES: dict[str, tuple[int, ...]] = {
    "dense": (24, 64),
    "uneven": (7, 40),
    "expert": (4, 10, 32),
    "norm": (33,),
    "replicated": (6, 32),
    "plain": (5, 48),
    "short": (1, 64),
}


def _whole_gradients(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: scale * torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


def _placed(layout: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on this rank, as a layout of that name would hold them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return {name: weight.clone() for name, weight in weights.items()}
    line = pool.mesh(world)
    plan: dict[str, tuple[Any, tuple[Any, ...]] | None]
    if layout == "fsdp":
        plan = dict.fromkeys(weights, (line, (Shard(0),)))
    elif layout == "hsdp":
        plan = dict.fromkeys(weights, (pool.mesh(2, world // 2), (Replicate(), Shard(0))))
    else:  # several meshes: dense over all ranks, experts over a part, tensor parallel, replicas, one plain tensor
        grid = pool.mesh(world // 2, 2)
        plan = {
            "dense": (line, (Shard(0),)),
            "uneven": (grid, (Shard(0), Replicate())),
            "expert": (grid["dp_shard"], (Shard(0),)),
            "norm": (grid, (Replicate(), Replicate())),
            "replicated": (line, (Replicate(),)),
            "plain": None,
            "short": (grid, (Replicate(), Shard(1))),
        }
    placed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        where = plan[name]
        placed[name] = weight.clone() if where is None else distribute_tensor(weight, *where, src_data_rank=None)
    return placed


def _parameters(
    layout: str, dtype: torch.dtype = fp32, scale: float = 1.0, bad: float | None = None
) -> dict[str, nn.Parameter]:
    """Parameters with gradients; ``bad`` stands in the last element of the dense one, which one rank holds."""
    gradients = _whole_gradients(scale)
    if bad is not None:
        gradients["dense"][-1, -1] = bad
    weights = {name: (gradient * 0.1).to(dtype) for name, gradient in _whole_gradients().items()}
    parameters = {name: nn.Parameter(weight) for name, weight in _placed(layout, weights).items()}
    for name, gradient in _placed(layout, gradients).items():
        parameters[name].grad_dtype = None
        parameters[name].grad = gradient
    return parameters


def _expected(norm_type: float) -> float:
    parts = [gradient.double() for gradient in _whole_gradients().values()]
    if math.isinf(norm_type):
        return max(float(part.abs().max()) for part in parts)
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


LAYOUTS = [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 2), ("hsdp", 4), ("mixed", 2), ("mixed", 4)]


def _norms(layout: str) -> list[float]:
    results = []
    for norm_type in (2.0, math.inf):
        parameters = _parameters(layout, bf16)
        optimizer = fod.FlashAdamW(parameters.items())
        results.append(float(fod.clip_grad_norm_(optimizer, 1.0, norm_type)))
        results.append(float(fod.clip_grad_norm_(list(parameters.values()), 1e9, norm_type)))
    return results


@pytest.mark.parametrize("layout, world_size", LAYOUTS)
def test_d42_norm_of_any_meshes_is_that_of_the_whole_model(layout: str, world_size: int) -> None:
    """pytorch#180346: the same number on all ranks, replicas counted once, plain tensors among DTensors."""
    whole_model = [nn.Parameter(gradient) for gradient in _whole_gradients().values()]
    for parameter, gradient in zip(whole_model, _whole_gradients().values(), strict=True):
        parameter.grad = gradient
    torch_norm = float(nn.utils.clip_grad_norm_(whole_model, math.inf))
    assert torch_norm == pytest.approx(_expected(2.0), rel=CLOSE)
    results = run_ranks(world_size, _norms, layout)
    for result in results:
        assert result == results[0]
        assert result[:2] == pytest.approx([torch_norm] * 2, rel=CLOSE)
        assert result[2:] == pytest.approx([_expected(math.inf)] * 2, rel=CLOSE)


def _clipped_steps(layout: str, in_advance: bool) -> dict[str, Tensor]:
    """Two clipped steps; ``in_advance``: gradients are multiplied by the coefficient beforehand, in fp32."""
    parameters = _parameters(layout, bf16)
    optimizer = fod.FlashAdamW(parameters.items(), lr=1e-2)
    for _ in range(2):
        kept = {name: whole(parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None}
        norm = fod.clip_grad_norm_(optimizer, 0.7)
        assert (norm.shape, norm.dtype) == ((), fp32)
        assert not isinstance(norm, DTensor)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            assert_same_bits(whole(parameter.grad), kept[name], f"gradient of {name}: clipping writes none")
        if in_advance:
            coefficient = optimizer.clip_coefficient
            assert coefficient is not None
            assert float(coefficient) == pytest.approx(0.7 / (float(norm) + 1e-6), rel=1e-6)
            saved = {name: parameter.grad for name, parameter in parameters.items()}
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * coefficient
            optimizer.clip_coefficient = None
        optimizer.step()
        assert optimizer.clip_coefficient is None, "a coefficient is for one step"
        if in_advance:
            for name, parameter in parameters.items():
                parameter.grad = saved[name]
    return {name: whole(parameter) for name, parameter in parameters.items()}


def test_the_next_step_applies_the_coefficient() -> None:
    expected = run_ranks(1, _clipped_steps, "plain", True)[0]
    for layout, world_size in (("plain", 1), ("fsdp", 2), ("hsdp", 2), ("mixed", 4)):
        for result in run_ranks(world_size, _clipped_steps, layout, False):
            for name, weight in expected.items():
                assert_same_bits(result[name], weight, f"{name}, {layout} on {world_size}")


def _one_bad_element(layout: str, bad: float) -> tuple[list[float], int, int, str, bool]:
    parameters = _parameters(layout, bf16)
    optimizer = fod.FlashAdamW(parameters.items(), lr=1e-2)
    optimizer.step()
    before = {name: whole(parameter) for name, parameter in parameters.items()}
    for name, parameter in _parameters(layout, bf16, bad=bad).items():
        parameters[name].grad = parameter.grad
    norm = fod.clip_grad_norm_(optimizer, 1.0)
    try:
        fod.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    optimizer.step()
    unchanged = all(torch.equal(whole(parameter), before[name]) for name, parameter in parameters.items())
    first = optimizer.skipped_steps
    for name, parameter in _parameters(layout, bf16).items():
        parameters[name].grad = parameter.grad
    fod.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    steps = [float(optimizer.state[parameter]["step"]) for parameter in parameters.values()]
    return steps, first, optimizer.skipped_steps, f"{float(norm)} {raised}", unchanged


@pytest.mark.parametrize("layout, world_size", [("plain", 1), ("fsdp", 2), ("mixed", 4)])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_d50_one_element_that_is_not_finite_skips_the_step_on_all_ranks(
    layout: str, world_size: int, bad: float
) -> None:
    """pytorch PR 97415: nobody steps, `step` stays, the skip can be read; the next step is a usual one."""
    for steps, first, skipped, words, unchanged in run_ranks(world_size, _one_bad_element, layout, bad):
        assert unchanged
        assert steps == [2.0] * len(SHAPES)
        assert (first, skipped) == (1, 1)
        assert words.startswith((str(bad), "nan"))
        assert "error_if_nonfinite" in words


def test_parameters_are_clipped_in_place_as_torch_does() -> None:
    for scale, max_norm in ((1.0, 0.5), (1e-4, 1e6)):
        ours, theirs = _parameters("plain", scale=scale), _parameters("plain", scale=scale)
        norm = fod.clip_grad_norm_(ours.values(), max_norm)
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.values(), max_norm)), rel=CLOSE)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=CLOSE, atol=0.0)
    optimizer = torch.optim.AdamW(_parameters("plain").values())
    fod.clip_grad_norm_(optimizer, 0.5)
    assert float(fod.clip_grad_norm_(optimizer, 0.5)) == pytest.approx(0.5, rel=CLOSE)
    one = nn.Parameter(torch.ones(3))
    one.grad = torch.tensor([3.0, 0.0, 4.0])
    assert float(fod.clip_grad_norm_(one, 1.0)) == 5.0
    assert float(fod.clip_grad_norm_(one, 1.0, "inf")) == pytest.approx(0.8)  # type: ignore[arg-type]


def test_several_optimizers_share_one_norm() -> None:
    parameters = _parameters("plain")
    names = list(parameters)
    optimizers = [
        fod.FlashAdamW([(name, parameters[name]) for name in names[:3]]),
        fod.FlashLion([(name, parameters[name]) for name in names[3:]]),
    ]
    assert float(fod.clip_grad_norm_(optimizers, 0.5)) == pytest.approx(_expected(2.0), rel=CLOSE)
    first, second = (optimizer.clip_coefficient for optimizer in optimizers)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_clipping_twice_before_a_step_clips_what_the_first_left() -> None:
    parameters = _parameters("plain")
    optimizer = fod.FlashAdamW(parameters.items())
    fod.clip_grad_norm_(optimizer, 1.0)
    assert float(fod.clip_grad_norm_(optimizer, 0.25)) == pytest.approx(1.0, rel=CLOSE)
    assert optimizer.clip_coefficient is not None
    assert float(optimizer.clip_coefficient) == pytest.approx(0.25 / _expected(2.0), rel=CLOSE)


def test_optimizers_that_were_clipped_apart_have_no_common_norm() -> None:
    """Each has a coefficient of its own then, of which one would be applied to all."""
    names, parameters = list(SHAPES), _parameters("plain")
    first, second = (fod.FlashAdamW([(n, parameters[n]) for n in part]) for part in (names[:3], names[3:]))
    fod.clip_grad_norm_(first, 1.0)
    for given in ([first, second], [second, first]):
        with pytest.raises(
            RuntimeError, match="clipped apart from each other before, in this step: clip them together"
        ):
            fod.clip_grad_norm_(given, 1.0)
    first.zero_grad()
    assert float(fod.clip_grad_norm_([first, second], 0.5)) > 0.5
    assert float(fod.clip_grad_norm_([second, first], 0.5)) == pytest.approx(0.5, rel=CLOSE)


def test_zero_grad_takes_the_coefficient_away() -> None:
    parameters = _parameters("plain")
    optimizer = fod.FlashAdamW(parameters.items())
    fod.clip_grad_norm_(optimizer, 1.0)
    optimizer.zero_grad()
    assert optimizer.clip_coefficient is None


def test_gradients_of_any_size_and_none() -> None:
    """Squares that overflow or vanish in fp32, empty tensors, missing gradients, other strides and dtypes."""
    parameters = {name: nn.Parameter(torch.zeros(4, 6)) for name in ("large", "small", "none", "strided", "bf16")}
    parameters["empty"] = nn.Parameter(torch.zeros(0, 3))
    gradients = {
        "large": torch.full((4, 6), 1e25),
        "small": torch.full((4, 6), 1e-30),
        "strided": torch.full((6, 4), 2e25).t(),
        "bf16": torch.full((4, 6), 3e25, dtype=bf16),
        "empty": torch.zeros(0, 3),
    }
    for name, gradient in gradients.items():
        parameters[name].grad_dtype = None
        parameters[name].grad = gradient
    optimizer = fod.FlashAdamW(parameters.items())
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert float(fod.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(expected, rel=CLOSE)
    for name in ("large", "strided", "bf16"):
        parameters[name].grad = None
    assert float(fod.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(1e-30 * math.sqrt(24), rel=CLOSE)
    optimizer.zero_grad()
    assert float(fod.clip_grad_norm_(optimizer, 1.0)) == 0.0


def _rank_without_gradients() -> float:
    mesh = pool.mesh(2)
    parameter = nn.Parameter(distribute_tensor(torch.ones(1, 32), mesh, [Shard(0)], src_data_rank=None))
    other = nn.Parameter(distribute_tensor(torch.ones(4, 32), mesh, [Shard(0)], src_data_rank=None))
    parameter.grad = distribute_tensor(torch.ones(1, 32), mesh, [Shard(0)], src_data_rank=None)
    if dist.get_rank() == 1:
        parameter.grad = None  # it holds nothing of it anyway
    return float(fod.clip_grad_norm_(fod.FlashAdamW([parameter, other]), 1.0))


def test_a_rank_without_any_gradient_takes_part() -> None:
    assert run_ranks(2, _rank_without_gradients) == pytest.approx([math.sqrt(32)] * 2, rel=CLOSE)


def _pipeline() -> tuple[float, float]:
    """Two stages, each a plain tensor of its own on one rank."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 0.0]) if dist.get_rank() == 0 else torch.tensor([0.0, 4.0, 0.0])
    optimizer = fod.FlashAdamW([parameter])
    norm = float(fod.clip_grad_norm_(optimizer, 1.0, pp_group=dist.group.WORLD))
    return norm, float(fod.clip_grad_norm_([parameter], 1.0, math.inf, pp_group=pool.mesh(2)))


def test_stages_of_a_pipeline_share_one_norm() -> None:
    for norm, largest in run_ranks(2, _pipeline):
        assert norm == 5.0
        assert largest == 4.0


def _partial_gradient() -> float:
    mesh = pool.mesh(2)
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 32), mesh, [Replicate()], src_data_rank=None))
    parts = torch.full((4, 32), float(dist.get_rank() + 1))
    parameter.grad = DTensor.from_local(parts, mesh, [Partial()])
    return float(fod.clip_grad_norm_([parameter], math.inf))


def test_partial_gradients_are_added_up_first() -> None:
    assert run_ranks(2, _partial_gradient) == pytest.approx([3.0 * math.sqrt(128)] * 2, rel=CLOSE)


def _other_placements(norm_type: float) -> list[float]:
    """A replicated weight whose gradient autograd leaves in shards, and a sharded one with a replicated gradient."""
    mesh = pool.mesh(2)
    whole_gradient = torch.linspace(-3.0, 2.0, 128).reshape(4, 32)
    replicated = nn.Parameter(distribute_tensor(torch.ones(4, 32), mesh, [Replicate()], src_data_rank=None))
    (replicated * distribute_tensor(whole_gradient, mesh, [Shard(0)], src_data_rank=None)).sum().backward()
    assert isinstance(replicated.grad, DTensor)
    assert replicated.grad.placements == (Shard(0),)
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 32), mesh, [Shard(0)], src_data_rank=None))
    sharded.grad = distribute_tensor(whole_gradient, mesh, [Replicate()], src_data_rank=None)
    return [float(fod.clip_grad_norm_([p], math.inf, norm_type)) for p in (replicated, sharded)]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_placed_otherwise_than_their_parameters(norm_type: float) -> None:
    expected = float(torch.linspace(-3.0, 2.0, 128).norm(norm_type))
    for norms in run_ranks(2, _other_placements, norm_type):
        assert norms == pytest.approx([expected] * 2, rel=CLOSE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_norm": 1.0, "norm_type": 1}, "norm_type must be 2 or inf, got 1"),
        ({"max_norm": -1.0}, "max_norm must be a number >= 0, got -1"),
        ({"max_norm": math.nan}, "max_norm must be a number >= 0, got nan"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fod.clip_grad_norm_([nn.Parameter(torch.ones(1))], **arguments)


def test_what_is_neither_parameters_nor_optimizers_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(1))
    model = nn.Linear(2, 2)
    cases: list[tuple[Any, str]] = [
        ([parameter, fod.FlashAdamW([parameter])], "FlashAdamW, Parameter"),
        (model, "Linear"),
        (model.named_parameters(), "tuple"),
        ({"weight": parameter}, "str"),
    ]
    for given, kinds in cases:
        with pytest.raises(TypeError, match=f"give parameters, or optimizers, not {kinds}$"):
            fod.clip_grad_norm_(given, 1.0)


def test_an_iterator_that_was_used_before_is_told_of() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    parameters = model.parameters()
    assert float(fod.clip_grad_norm_(parameters, 1.0)) > 0.0
    with pytest.warns(UserWarning, match=r"gives no parameters, and clips nothing.*model\.parameters\(\) each time"):
        assert float(fod.clip_grad_norm_(parameters, 1.0)) == 0.0
    assert float(fod.clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_of_which_no_norm_is_taken_are_refused(norm_type: float) -> None:
    turning = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    turning.grad = torch.tensor([3 + 4j, 0])
    with pytest.raises(
        RuntimeError, match=r"shape \(2,\) has a complex gradient \(torch\.complex64\).*torch\.nn\.utils"
    ):
        fod.clip_grad_norm_([turning], 1.0, norm_type)
    embedding = nn.Embedding(10, 32, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for given in (embedding.parameters(), fod.FlashAdamW(embedding.parameters())):
        with pytest.raises(RuntimeError, match=r"shape \(10, 32\) has a sparse gradient; .*sparse=False"):
            fod.clip_grad_norm_(given, 1.0, norm_type)


def _error_on_uneven_shards(bad: float) -> list[str]:
    """HSDP over two times two ranks, of which most hold nothing of a tensor; both norms, both ways to be called."""
    where = (pool.mesh(2, 2), [Replicate(), Shard(0)])
    parameters = {}
    for name, shape in {"seven": (7, 3), "one": (1, 5), "element": (1,), "none": (0, 3)}.items():
        gradient = torch.ones(shape)
        if name == "seven":
            gradient[-1, -1] = bad
        parameter = nn.Parameter(distribute_tensor(torch.ones(shape), *where, src_data_rank=None))
        parameter.grad = distribute_tensor(gradient, *where, src_data_rank=None)
        parameters[name] = parameter
    told = []
    for norm_type in (2.0, math.inf):
        for given in (fod.FlashAdamW(parameters.items()), list(parameters.values())):
            try:
                norm = fod.clip_grad_norm_(given, 1e9, norm_type, error_if_nonfinite=True)
                told.append(f"{float(norm):.5f}")
            except RuntimeError as error:
                told.append(str(error).partition(";")[0].rpartition(" ")[2])
    return told


@pytest.mark.parametrize("bad", [1.0, math.nan, pytest.param(-math.inf, marks=pytest.mark.full)])
def test_all_ranks_raise_alike_on_uneven_shards(bad: float) -> None:
    expected = ["5.19615", "5.19615", "1.00000", "1.00000"] if bad == 1.0 else [str(abs(bad))] * 4
    assert run_ranks(4, _error_on_uneven_shards, bad) == [expected] * 4


def test_a_step_after_the_error_is_skipped() -> None:
    """For a loop that goes on after it: no NaN gets into the weights."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.nan, 0.0])
    optimizer = fod.FlashAdamW([parameter])
    with pytest.raises(RuntimeError, match=r"is nan; .* skipped and counted in optimizer\.skipped_steps"):
        fod.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    assert optimizer.skipped_steps == 1
    with pytest.raises(RuntimeError, match=r"is nan; .* makes the gradients NaN"):
        fod.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def _scaled_steps(layout: str, fused: bool | None, unscale: bool) -> tuple[list[float], int, float, dict[str, Tensor]]:
    """fp16 with a GradScaler: a usual step, one with an Inf on one rank, a usual one."""
    parameters = _parameters(layout, torch.float16, scale=1e-2)
    optimizer = fod.FlashAdamW(parameters.items(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(3):
        scaler.scale(torch.ones(()))
        scale = 1e-2 * scaler.get_scale()
        bad = math.inf if step == 1 else None
        for name, parameter in _parameters(layout, torch.float16, scale=scale, bad=bad).items():
            parameters[name].grad = parameter.grad
        if unscale:
            scaler.unscale_(optimizer)
            fod.clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        scaler.update()
    steps = [float(optimizer.state[parameter]["step"]) for parameter in parameters.values()]
    weights = {name: whole(parameter) for name, parameter in parameters.items()}
    return steps, optimizer.skipped_steps, scaler.get_scale(), weights


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, clip, step"])
@pytest.mark.parametrize("layout, world_size, fused", [("plain", 1, None), ("fsdp", 2, None), ("fsdp", 2, True)])
def test_d50_grad_scaler_skips_on_all_ranks(layout: str, world_size: int, fused: bool | None, unscale: bool) -> None:
    """pytorch#67590: fp16 with an Inf on one rank, in pure torch and through the kernels."""
    for steps, skipped, scale, weights in run_ranks(world_size, _scaled_steps, layout, fused, unscale):
        assert steps == [2.0] * len(SHAPES)
        assert (skipped, scale) == (1, 4.0)
        for name, weight in weights.items():
            assert weight.isfinite().all(), name
