"""Options of the model that change how it computes and not what: recomputation, compilation, replicas, no mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
import torch.distributed as dist
from llama_support.attention import document_bounds, document_causal_mask, packed_attention
from llama_support.config import Config
from llama_support.data import StepBatches
from llama_support.errors import BadInput
from llama_support.model import (
    SHAPES,
    build_model,
    gradient_sum_dtype,
    known_shapes,
    model_folder,
    read_llama_config,
)
from llama_support.optimizers import build_optimizer
from llama_support.packing import IGNORED
from llama_support.training import accumulate_gradient
from llama_support.world import World, start_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

from flashoptim_dist import shard_model
from tests.pool import mesh, run_ranks
from tests.recipes.inputs import write_tiny_model

LENGTH = 24


def _batch(sequences: int) -> dict[str, Tensor]:
    """As many sequences, of two documents each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4096, (sequences, LENGTH + 1), generator=generator)
    documents = (torch.arange(LENGTH) >= 9).long().expand(sequences, LENGTH).contiguous()
    positions = torch.where(documents == 0, torch.arange(LENGTH), torch.arange(LENGTH) - 9)
    labels = tokens[:, 1:].clone()
    labels[:, 8] = IGNORED
    return {"input_ids": tokens[:, :-1], "labels": labels, "position_ids": positions, "document_ids": documents}


def _train(world: World, folder: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps over four sequences, and the weights after them."""
    config = Config(model=folder, global_batch=4, micro_batch=2, lr=1e-3, **options)
    model = build_model(config, Path(folder), read_llama_config(Path(folder), LENGTH), world)
    optimizer = build_optimizer(config, model)
    whole = _batch(4)
    share = 4 // world.size
    mine = {name: value[world.rank * share : (world.rank + 1) * share] for name, value in whole.items()}
    micro = [{name: value[start : start + 2] for name, value in mine.items()} for start in range(0, share, 2)]
    step = StepBatches(micro, int((whole["labels"] != IGNORED).sum()))
    losses = []
    for _ in range(3):
        losses.append(accumulate_gradient(model, step, world))
        optimizer.step()
        optimizer.zero_grad()
    names = [name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for name, _ in (
        model.named_parameters()
    )]  # fmt: skip
    values = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return losses, dict(zip(names, values, strict=True))


def _train_on_ranks(folder: str, options: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [
        _train(start_world("cpu", replicas=one.get("replicate", 1)), folder, **one) for one in options
    ]  # fmt: skip


def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    options = [{"activation_checkpointing": what} for what in ("none", "full", "selective")]
    (losses, weights), *others = run_ranks(2, _train_on_ranks, folder, options)[0]
    assert losses[2] < losses[0]
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert all(torch.equal(value, weights[name]) for name, value in other_weights.items())


def test_replicas_and_ranks_give_the_same_training(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    sharded, replicated = run_ranks(4, _train_on_ranks, folder, [{}, {"replicate": 2}])[0]
    alone = _train(World(0, 1, torch.device("cpu"), None), folder)
    torch.testing.assert_close(replicated[0], sharded[0], rtol=1e-5, atol=0)
    # Without a mesh the products are in bf16: 2^-8 of each, and the loss averages over 92 labels.
    torch.testing.assert_close(alone[0], sharded[0], rtol=2e-3, atol=0)
    assert alone[1].keys() == sharded[1].keys() == replicated[1].keys()


@pytest.mark.full
def test_compiled_layers_train_alike(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    plain, compiled = run_ranks(2, _train_on_ranks, folder, [{}, {"compile": True}])[0]
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-4, atol=0)
    assert compiled[1].keys() == plain[1].keys()


def _refuse() -> str:
    with pytest.raises(BadInput) as caught:
        start_world("cpu", replicas=3)
    return str(caught.value)


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    assert run_ranks(2, _refuse) == ["--replicate 3 does not divide the 2 ranks; give a divisor"] * 2


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama3_1b", 1_235_814_400), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)]
)
def test_known_shapes_have_the_parameters_of_their_models(name: str, parameters: int) -> None:
    from llama_support.loss import LlamaWithLoss

    assert name in known_shapes()
    assert model_folder(name) == SHAPES / name
    with torch.device("meta"):
        model = LlamaWithLoss(read_llama_config(model_folder(name), 8192))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_bounds_of_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    bounds = document_bounds(positions)
    assert bounds.tolist() == [0, 3, 4, 6, 12]
    assert bounds.dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_by_bounds_is_attention_by_mask(key_heads: int) -> None:
    device = torch.device("cuda")
    batch = _batch(3)
    generator = torch.Generator(device).manual_seed(0)
    heads = [torch.randn(3, n, LENGTH, 64, device=device, dtype=torch.bfloat16, generator=generator) for n in (
        4, key_heads, key_heads,
    )]  # fmt: skip
    inputs = [x.requires_grad_() for x in heads]
    bounds = document_bounds(batch["position_ids"]).to(device)
    actual, _ = packed_attention(
        torch.nn.Module(), *inputs, None, scaling=0.125, document_bounds=bounds, longest=LENGTH
    )  # fmt: skip
    mask = document_causal_mask(batch["document_ids"]).to(device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7)
    weights = torch.randn(actual.shape, device=device, dtype=torch.bfloat16, generator=generator)
    gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    references = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for one, other in zip(gradients, references, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.01


def test_attention_by_bounds_refuses_what_it_cannot_do() -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="takes no mask, no dropout and the usual scaling"):
        packed_attention(torch.nn.Module(), x, x, x, torch.ones(1, 1, 4, 4), scaling=8**-0.5)


def _gradients(world_size: int, reduce_dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7)).to(torch.bfloat16)
    shard_model(model, mesh(world_size), layers=[model[0]], param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(5, 24)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def _gradients_by_dtype(world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    return _gradients(world_size, torch.float32), _gradients(world_size, torch.bfloat16)


def test_two_ranks_sums_of_bf16_gradients_have_the_same_bits_in_bf16() -> None:
    for fp32, bf16 in run_ranks(2, _gradients_by_dtype, 2):
        assert all(gradient.dtype == torch.bfloat16 for gradient in (*fp32, *bf16))
        assert all(torch.equal(one, other) for one, other in zip(fp32, bf16))


def test_bf16_sums_over_more_ranks_are_rounded_in_between() -> None:
    # Why "auto" takes bf16 for two ranks only.
    assert any(
        not torch.equal(one, other)
        for fp32, bf16 in run_ranks(4, _gradients_by_dtype, 4)
        for one, other in zip(fp32, bf16)
    )


@pytest.mark.parametrize(
    "world_size, optimizer, compute, given, expected",
    [
        (2, "flash_adamw", torch.bfloat16, "auto", torch.bfloat16),
        (2, "flash_adamw", torch.float32, "auto", torch.float32),
        (2, "adamw", torch.bfloat16, "auto", torch.float32),
        (4, "flash_adamw", torch.bfloat16, "auto", torch.float32),
        (4, "flash_adamw", torch.bfloat16, "bf16", torch.bfloat16),
        (2, "flash_adamw", torch.bfloat16, "fp32", torch.float32),
    ],
)
def test_dtype_of_the_sum_over_ranks(
    world_size: int, optimizer: str, compute: torch.dtype, given: str, expected: torch.dtype
) -> None:
    config = Config(optimizer=optimizer, reduce_dtype=given)  # type: ignore[arg-type]
    assert gradient_sum_dtype(config, world_size, compute) == expected
