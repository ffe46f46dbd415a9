"""shard_model: which modules become units."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from flashoptim_dist.casting import cast_model
from flashoptim_dist.sharding.fsdp import plan_units, shard_model
from flashoptim_dist.sharding.layout import ShardingError
from tests.pool import mesh, run_ranks
from tests.sharding.fsdp_models import ENDS, LAYERS, NORMS, Block, Hybrid, Other, Plain, hybrid, tiny_llama


def _names(model: nn.Module, **options: Any) -> set[str]:
    return {unit.name for unit in plan_units(model, **options)}


# ---------------------------------------------------------------------- the plan


@pytest.mark.parametrize("keep, fp32", [((), set()), (("*norm",), NORMS), (("model.norm", "lm_head"), {"model.norm"})])
def test_units_of_a_llama(keep: tuple[str, ...], fp32: set[str]) -> None:
    model = cast_model(tiny_llama(), keep_fp32=keep)
    assert _names(model) == LAYERS | ENDS | fp32
    plan = plan_units(model)
    assert {unit.name for unit in plan if unit.fp32} == fp32 | ({"lm_head"} if "lm_head" in keep else set())
    order = [unit.name for unit in plan]
    for unit in plan:
        inner = [name for name in order if name.startswith(f"{unit.name}.")]
        assert all(order.index(name) < order.index(unit.name) for name in inner)


def test_tied_embeddings_are_in_the_root_unit() -> None:
    assert _names(cast_model(tiny_llama(tied=True))) == LAYERS
    # Tied and in fp32: then everything else of the root unit has to leave it.
    assert _names(cast_model(tiny_llama(tied=True), keep_fp32=["lm_head"])) == LAYERS | {"model.norm"}


def test_a_layer_inside_a_kept_module_and_a_kept_layer() -> None:
    model = cast_model(tiny_llama(), keep_fp32=["model.layers.1"])
    assert _names(model) == LAYERS | ENDS
    assert {unit.name for unit in plan_units(model) if unit.fp32} == {"model.layers.1"}


@pytest.mark.parametrize("container", ["list", "dict"])
def test_layers_are_found_without_metadata(container: str) -> None:
    expected = {"blocks.0", "blocks.1", "blocks.2"} if container == "list" else {"blocks.a", "blocks.b"}
    assert _names(Plain(container)) == expected | {"embedding", "head"}


def test_layers_of_encoder_and_decoder_are_found() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList([Block(), Block()])
    model.decoder = nn.ModuleDict({"x": nn.ModuleList([Other(), Block()])})
    model.tiny = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    assert _names(model) == {"encoder.0", "encoder.1", "decoder.x.0", "decoder.x.1"}


def test_named_layers() -> None:
    model = Plain()
    assert _names(model, layers=model.blocks) == {"blocks.0", "blocks.1", "blocks.2", "embedding", "head"}
    assert _names(model, layers=[model.blocks[1]]) == {"blocks.1", "embedding", "head"}
    assert _names(model, layers=[]) == {"embedding", "head"}
    with pytest.raises(ValueError, match="number 1, a Linear, is not a module of the model"):
        plan_units(model, layers=[model.blocks[0], nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="'blocks' is a ModuleList, which is never called: pass its members"):
        plan_units(model, layers=[model.blocks])


def test_a_model_without_layers_is_one_unit() -> None:
    assert _names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))) == set()


def test_checkpointing_wrappers_are_inside_the_units() -> None:
    model = tiny_llama()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    plan = plan_units(cast_model(model))
    assert {unit.name for unit in plan} == LAYERS | ENDS
    assert {unit.module for unit in plan} >= set(model.model.layers)


def test_layers_that_share_a_parameter_stay_in_the_unit_around_them(caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    model.blocks[0].linear.weight = model.blocks[2].linear.weight
    with caplog.at_level(logging.WARNING):
        assert _names(model) == {"blocks.1", "embedding", "head"}
    assert "blocks.0 shares blocks.0.linear.weight with blocks.2.linear.weight" in caplog.text


def test_a_module_in_two_layers_keeps_both_in_the_unit_around_them() -> None:
    model = Plain()
    model.blocks[1].linear = model.blocks[2].linear
    assert _names(model) == {"blocks.0", "embedding", "head"}
    model.blocks[2] = model.blocks[1]  # one layer that runs twice is no problem
    assert _names(model) == {"blocks.0", "blocks.1", "embedding", "head"}


def test_pytorch_156784_units_split_where_dtypes_meet() -> None:
    mixers = {f"layers.{i}" for i in (0, 2)}
    inner = {f"{mixer}.{name}" for mixer in mixers for name in ("in_proj", "out_proj")}
    assert _names(hybrid()) == mixers | {"layers.1"} | inner
    model = Plain().to(torch.bfloat16)
    model.blocks[1].norm.float()  # part of a layer
    model.norm.float()  # part of the root
    assert _names(model) == {"blocks.0", "blocks.1", "blocks.2", "embedding", "head", "blocks.1.norm", "norm"}
    model = Plain().to(torch.bfloat16)
    model.blocks[1].float()  # a whole layer: one unit, not two
    assert _names(model) == {"blocks.0", "blocks.1", "blocks.2", "embedding", "head"}


def test_frozen_parameters_may_have_another_dtype() -> None:
    model = Plain().to(torch.bfloat16)
    for parameter in model.blocks[0].norm.float().parameters():
        parameter.requires_grad_(False)
    assert _names(model) == {"blocks.0", "blocks.1", "blocks.2", "embedding", "head"}


# ---------------------------------------------------------------------- refusals


def test_pytorch_156784_two_dtypes_in_one_module_are_refused_by_name() -> None:
    model = Hybrid()
    model.layers[0].register_parameter("gain", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    with pytest.raises(ShardingError) as caught:
        plan_units(model)
    text = str(caught.value)
    for part in ("'layers.0' (Mixer)", "'layers.0.A_log' of torch.float32, shape (8,)", "'layers.0.gain'"):
        assert part in text
    assert "keep_fp32=['layers.0']" in text
    cast_model(model, keep_fp32=["layers.0"])  # the way out
    assert "layers.0" in _names(model)


def test_a_parameter_list_belongs_to_the_module_around_it() -> None:
    model = Plain()
    model.blocks[0].gains = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())])
    with pytest.raises(ShardingError, match=r"'blocks\.0' \(Block\) owns parameter 'blocks\.0\.gains\.0'"):
        plan_units(model)


@pytest.mark.parametrize("trainable", [True, False])
def test_parameters_without_dimensions_are_refused_by_name(trainable: bool) -> None:
    model = Plain()
    model.blocks[1].scale = nn.Parameter(torch.tensor(1.0), requires_grad=trainable)
    with pytest.raises(ShardingError, match=r"parameter 'blocks\.1\.scale' has no dimensions.*reshape\(1\)"):
        plan_units(model)


def _refusals() -> dict[str, str]:
    texts = {}

    def attempt(name: str, **options: Any) -> None:
        model = options.pop("model", None) or Plain()
        try:
            shard_model(model, **options)
        except ValueError as error:
            texts[name] = str(error)
        if not name.startswith("twice"):
            assert not any(isinstance(module, FSDPModule) for module in model.modules())

    one, two = mesh(2), mesh(2, 1)
    attempt("3-D", mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")))
    attempt("no names", mesh=init_device_mesh("cpu", (2, 1)))
    scalar = Plain()
    scalar.blocks[1].scale = nn.Parameter(torch.tensor(1.0))
    attempt("scalar", model=scalar, mesh=two)
    attempt("twice", model=shard_model(Plain(), one), mesh=one)
    return texts


def test_refusals_leave_the_model_alone() -> None:
    for texts in run_ranks(2, _refusals):
        assert "3 dimensions: FSDP needs one, HSDP two" in texts["3-D"]
        assert "mesh_dim_names" in texts["no names"]
        assert "'blocks.1.scale'" in texts["scalar"]
        assert "sharded by FSDP2 already" in texts["twice"]
