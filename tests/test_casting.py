"""cast_model: what is cast, what stays in fp32, and that what stays works in forward."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from flashoptim_dist.casting import cast_model, modules_kept_in_fp32
from tests.pool import mesh, run_ranks


def tiny_llama(*, tied: bool = False, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Gate(nn.Module):
    """Takes tensors by keyword, in containers, beside integers; returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, index: Tensor, parts: dict[str, Any]) -> dict[str, Any]:
        self.seen = [x.dtype, index.dtype, parts["left"][0].dtype]
        return {"out": x * self.weight + parts["left"][0], "index": index, "note": parts["note"]}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.gate = Gate()
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = self.gate(h, index=torch.arange(3), parts={"left": (h,), "note": "text"})
        assert out["index"].dtype == torch.int64
        assert out["note"] == "text"
        return self.second(out["out"])


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("inv_freq", torch.rand(3))
        self.register_buffer("original_inv_freq", torch.rand(3))
        self.register_buffer("full_attention_inv_freq", torch.rand(3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("codes", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", None)


class FrozenBatchNorm(nn.Module):
    """As vision models write it: no BatchNorm class, the same statistics."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.weight + self.bias


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_is_cast_and_its_rotary_frequencies_are_not(dtype: torch.dtype) -> None:
    model = tiny_llama()
    before = model.model.rotary_emb.inv_freq.clone()
    assert cast_model(model, dtype) is model
    assert _dtypes(model) == {dtype}
    for name in ("inv_freq", "original_inv_freq"):
        buffer = getattr(model.model.rotary_emb, name)
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before)
    assert modules_kept_in_fp32(model) == []
    assert model(input_ids=torch.arange(16)[None]).logits.dtype == dtype


def test_only_plain_floating_buffers_are_cast() -> None:
    module = Buffers()
    kept = {n: (b.dtype, b) for n, b in module.named_buffers() if n != "mean"}
    cast_model(module)
    assert module.mean.dtype == torch.bfloat16
    for name, (dtype, buffer) in kept.items():
        assert getattr(module, name).dtype == dtype
        assert getattr(module, name) is buffer
    assert module.nothing is None


def test_integer_parameters_stay() -> None:
    module = nn.Linear(4, 4)
    module.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    cast_model(module)
    assert module.codes.dtype == torch.int8
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "norm, shape",
    [
        (nn.BatchNorm1d(3), (4, 3)),
        (nn.BatchNorm2d(3), (2, 3, 4, 4)),
        (nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
        (nn.SyncBatchNorm(3), None),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 4, 4)),
        (nn.InstanceNorm1d(3), (2, 3, 8)),
        (FrozenBatchNorm(), (2, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_batchnorm_like_layers_stay_fp32_and_work(norm: nn.Module, shape: tuple[int, ...] | None) -> None:
    norm = copy.deepcopy(norm)
    model = nn.Sequential(nn.Identity(), norm)
    floats = [t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
    cast_model(model)
    after = [t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
    assert {t.dtype for t in after} <= {torch.float32}
    assert len(after) == len(floats)
    if shape is not None:
        x = torch.randn(shape).bfloat16()
        expected = copy.deepcopy(norm)
        out = model(x)
        assert out.dtype == torch.bfloat16
        plain = type(norm).forward(expected, x.float()).bfloat16()
        assert torch.equal(out, plain)


def test_batchnorm_that_comes_in_bf16_goes_to_fp32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)).to(torch.bfloat16)
    cast_model(model)
    assert _dtypes(model[0]) == {torch.bfloat16}
    assert _dtypes(model[1]) == {torch.float32}
    assert model[1].running_mean.dtype == torch.float32
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model(torch.randn(2, 3, 8, 8).bfloat16()).dtype == torch.bfloat16


def test_batchnorm_as_first_module_takes_fp32_input() -> None:
    model = cast_model(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)))
    assert model(torch.randn(4, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "patterns, kept",
    [
        (("*norm",), {"model.norm", "model.layers.0.input_layernorm", "model.layers.1.input_layernorm"}),
        (("model.norm", "lm_head"), {"model.norm", "lm_head"}),
        (("model.layers.0",), {"model.layers.0"}),
        (("model.layers.?.mlp",), {"model.layers.0.mlp", "model.layers.1.mlp"}),
        (("model.layers",), {"model.layers.0", "model.layers.1"}),
        ("lm_head", {"lm_head"}),
        (("*.q_proj", "model.layers.1"), {"model.layers.0.self_attn.q_proj", "model.layers.1"}),
    ],
)
def test_patterns_keep_modules_in_fp32_and_the_model_runs(patterns: tuple[str, ...], kept: set[str]) -> None:
    model = tiny_llama()
    cast_model(model, keep_fp32=patterns)
    names = {module: name for name, module in model.named_modules()}
    roots = {names[module] for module in modules_kept_in_fp32(model)}
    if patterns == ("*norm",):
        kept = kept | {n.replace("input", "post_attention") for n in kept if "input" in n}
    assert roots == kept
    for name, parameter in model.named_parameters():
        inside = any(name.startswith(f"{root}.") for root in roots)
        assert parameter.dtype == (torch.float32 if inside else torch.bfloat16), name
    out = model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None])
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all()


def test_a_module_kept_in_fp32_computes_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    cast_model(model, keep_fp32=["1"])
    seen: list[Tensor] = []
    x = torch.randn(4, 64).bfloat16()
    model[1].register_forward_hook(lambda module, args, output: seen.extend([args[0], output]))
    model(x)
    middle = model[0](x)
    exact = torch.nn.functional.linear(middle.float(), model[1].weight, model[1].bias)
    assert torch.equal(seen[0], middle.float())
    assert torch.equal(seen[1], exact.bfloat16())


def test_embedding_kept_in_fp32_gives_the_models_dtype() -> None:
    model = cast_model(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2)), keep_fp32=["0"])
    assert model[0].weight.dtype == torch.float32
    assert model(torch.arange(10)).dtype == torch.bfloat16


def test_keyword_arguments_and_containers_are_cast() -> None:
    model = cast_model(Mixed(), keep_fp32=["gate"])
    out = model(torch.randn(3, 8).bfloat16())
    assert model.gate.seen == [torch.float32, torch.int64, torch.float32]
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.gate.weight.grad is not None
    assert model.gate.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("keep", [(), ("lm_head",), ("model.embed_tokens",)])
def test_tied_parameters_stay_tied(keep: tuple[str, ...]) -> None:
    model = tiny_llama(tied=True)
    parameter = model.lm_head.weight
    count = sum(1 for _ in model.parameters())
    cast_model(model, keep_fp32=keep)
    assert model.model.embed_tokens.weight is model.lm_head.weight is parameter
    assert sum(1 for _ in model.parameters()) == count
    assert parameter.dtype == (torch.float32 if keep else torch.bfloat16)
    assert modules_kept_in_fp32(model) == ([model.model.embed_tokens, model.lm_head] if keep else [])
    out = model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None])
    out.loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == parameter.dtype


def test_parameters_stay_the_same_objects_and_gradients_are_cast_along() -> None:
    model = nn.Linear(4, 4)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    cast_model(model)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_shared_buffers_stay_shared() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    table = torch.rand(5)
    for module in model:
        module.register_buffer("table", table)
    cast_model(model, keep_fp32=["2"])
    assert model[0].table is model[1].table
    assert model[0].table.dtype == torch.bfloat16
    assert model[2].table.dtype == torch.float32


def test_a_second_call_changes_nothing() -> None:
    model = tiny_llama()
    cast_model(model, keep_fp32=("*norm", "lm_head"))
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    cast_model(model, keep_fp32=("*norm", "lm_head"))
    assert hooks == [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == values[name].dtype
        assert torch.equal(parameter, values[name])


def test_a_call_with_other_arguments_replaces_the_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cast_model(model, keep_fp32=["0"])
    cast_model(model, torch.float16, keep_fp32=["1"])
    assert modules_kept_in_fp32(model) == [model[1]]
    assert _dtypes(model[0]) == {torch.float16}
    assert model(torch.ones(1, 4).half()).dtype == torch.float16
    cast_model(model, torch.float32)
    assert modules_kept_in_fp32(model) == []
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert model(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_working(duplicate: Any) -> None:
    model = cast_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), keep_fp32=["0"])
    other = duplicate(model)
    x = torch.randn(2, 4).bfloat16()
    assert torch.equal(other(x), model(x))
    assert modules_kept_in_fp32(other) == [other[0]]
    cast_model(other)
    assert modules_kept_in_fp32(other) == []
    assert modules_kept_in_fp32(model) == [model[0]]
    assert model(x).dtype == torch.bfloat16


def test_meta_tensors() -> None:
    with torch.device("meta"):
        model = tiny_llama(tied=True)
    cast_model(model, keep_fp32=["*norm"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_meta
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_wrapper_prefixes_are_no_part_of_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)))
    cast_model(model, keep_fp32=["1"])
    assert modules_kept_in_fp32(model) == [model[1]]
    assert _dtypes(model[1]) == {torch.float32}
    x = torch.randn(2, 4, requires_grad=True)
    model(x.bfloat16()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "patterns, text",
    [
        (("lm_heat",), r"'lm_heat' matches no module of LlamaForCausalLM; close names: 'lm_head'"),
        (("norm",), r"whole names"),
        (("*norm", "nothing.*"), r"'nothing\.\*' matches no module"),
        (("lm_head.weight",), r"matches the parameter 'lm_head\.weight': name its module, 'lm_head'"),
        (("",), None),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_and_changes_nothing(
    patterns: tuple[str, ...], text: str | None
) -> None:
    model = tiny_llama()
    if text is None:  # the model itself has the empty name
        cast_model(model, keep_fp32=patterns)
        assert _dtypes(model) == {torch.float32}
        return
    with pytest.raises(ValueError, match=text):
        cast_model(model, keep_fp32=patterns)
    assert _dtypes(model) == {torch.float32}
    assert modules_kept_in_fp32(model) == []


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*torch\.int8"):
        cast_model(nn.Linear(2, 2), torch.int8)
    with pytest.raises(ValueError, match=r"parameter 'weight' of LazyLinear has no shape yet"):
        cast_model(nn.Sequential(nn.LazyLinear(4)))


def test_precisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="flashoptim_dist.casting"):
        cast_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), keep_fp32=["0"])
    assert "20 in torch.float32, 20 in torch.bfloat16" in caplog.text
    assert "kept 0.weight in torch.float32" in caplog.text


def _cast_after_sharding() -> tuple[str, bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    cast_model(model)  # nothing to do: no error
    try:
        cast_model(model, keep_fp32=["1"])
    except ValueError as error:
        return str(error), model[1].weight.dtype == torch.bfloat16
    return "", False


def test_casting_a_sharded_model_is_refused() -> None:
    for text, unchanged in run_ranks(2, _cast_after_sharding):
        assert "'1.weight' is sharded by FSDP2 as torch.bfloat16" in text
        assert "before shard_model" in text
        assert unchanged


def _cast_tensor_parallel() -> tuple[bool, str, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 4))
    expected = model[0].weight.detach().clone()
    parallelize_module(model[0], mesh(dist.get_world_size(), names=("tp",)), ColwiseParallel())
    parameter = model[0].weight
    cast_model(model)
    assert isinstance(parameter, DTensor)
    return model[0].weight is parameter, str(parameter.dtype), parameter.full_tensor().detach() - expected.bfloat16()


def test_tensor_parallel_parameters_are_cast_in_place() -> None:
    for same, dtype, difference in run_ranks(2, _cast_tensor_parallel):
        assert same
        assert dtype == "torch.bfloat16"
        assert not difference.any()


def test_modules_in_place_of_patterns_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="patterns on the names of modules, not a Linear"):
        cast_model(model, keep_fp32=[model[0]])  # type: ignore[list-item]
