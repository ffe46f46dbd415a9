"""A model with torchtitan's names, small enough for every test, and containers over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flashoptim_dist.formats import canonical_name
from tests.torchtitan.device import FlashOptimizersContainer, LRSchedulersContainer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(64)
        self.w1 = nn.Linear(64, 128, bias=True)
        self.w2 = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.tanh(self.w1(self.attention_norm(x))))


class Model(nn.Module):
    """38 thousand parameters; a vocabulary that 2 and 3 ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(37, 64)
        self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})
        self.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 37, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_model(
    dtype: torch.dtype = torch.bfloat16,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    tensor_parallel: DeviceMesh | None = None,
) -> Model:
    """Return the model, the same for the same seed, sharded over a mesh if there is one."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    if mesh is not None:
        for layer in model.layers.values():
            if tensor_parallel is not None:
                parallelize_module(layer, tensor_parallel, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def container(model: nn.Module, **options: Any) -> FlashOptimizersContainer:
    built: FlashOptimizersContainer = FlashOptimizersContainer.Config(**options).build(model_parts=[model])
    return built


def schedulers(optimizers: FlashOptimizersContainer, steps: int = 10) -> Any:
    config = LRSchedulersContainer.Config(warmup_steps=2)
    return config.build(optimizers=optimizers, training_steps=steps)


def set_gradients(model: nn.Module, step: int) -> None:
    """Give every parameter a gradient that depends on its name's place and the step, not on how it is sharded."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(97 * step + number)
        full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        else:
            parameter.grad = full


def train(model: nn.Module, optimizers: Any, scheduler: Any, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(model, step)
        optimizers.step()
        optimizers.zero_grad()
        scheduler.step()


def full(value: Any) -> Any:
    """Return a DTensor's whole tensor, anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def snapshot(model: nn.Module, optimizers: Any) -> dict[str, Any]:
    """Return copies of all weights and flat states, whole."""
    weights = {f"model.{name}": full(value).clone() for name, value in model.state_dict().items()}
    weights |= {f"parameter.{canonical_name(n)}": full(p.detach()).clone() for n, p in model.named_parameters()}
    return weights | {
        key: full(value).clone() if isinstance(value, Tensor) else value
        for key, value in optimizers.state_dict().items()
    }


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Compare snapshots bit for bit, dtypes included."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right[key]
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype, key
            assert torch.equal(value, other), key
        else:
            assert value == other, key
