"""Makes flashoptim_0.1.4/: states that the official flashoptim package itself wrote, and what it decodes them to.

    TRITON_INTERPRET=1 python tests/convert/data/make_flashoptim.py OUT
    TRITON_INTERPRET=1 torchrun --nproc-per-node 4 tests/convert/data/make_flashoptim.py OUT

Needs flashoptim 0.1.4. Its kernels run in Triton's interpreter on the CPU; what stands in the way there (the question
for a GPU, autotuning, a library function that the interpreter lacks) is replaced here, its arithmetic is not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import triton
import triton.language as tl
from torch import nn


class _Untuned:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, _: Any) -> Any:
        return lambda *arguments, **options: self._kernel[lambda _: (1,)](*arguments, BLOCK_SIZE_N=1024, **options)


triton.autotune = lambda configs, key: _Untuned

import flashoptim.optimizers as official  # noqa: E402 after the replacement


def _set_data(self: Any, data: torch.Tensor) -> None:
    self._data = self._quantized = self._scales = None
    if self._try_quantize:
        options = {"signed": self._signed, "sqrt": self._sqrt, "softsign": self._softsign}
        self._quantized, self._scales = official.quantize(data, **options)
    else:
        self._data = data.to(dtype=self._storage_dtype)


torch.cuda.is_available = lambda: True
official._make_grid = official._make_ecc_grid = lambda *_: (1,)
official._MaybeQuantizedTensor.set_data = _set_data
official.libdevice.copysign = lambda size, sign: tl.where(sign < 0, -size, size)

CASES = {
    "adamw_24": (torch.bfloat16, "FlashAdamW", {}),
    "adamw_32": (torch.bfloat16, "FlashAdamW", {"master_weight_bits": 32}),
    "adamw_fp16": (torch.float16, "FlashAdamW", {}),
    "adamw_uncompressed": (torch.bfloat16, "FlashAdamW", {"compress_state_dict": False}),
    "lion": (torch.bfloat16, "FlashLion", {}),
    "sgd": (torch.bfloat16, "FlashSGDW", {"momentum": 0.9}),
}


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 6), nn.Linear(6, 33, bias=False), nn.LayerNorm(33)).to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, make: Any) -> None:
    for step in range(3):
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            whole = torch.randn(parameter.shape, generator=generator) * 10.0 ** (-number)
            parameter.grad = make(whole.to(parameter.dtype), parameter)
        optimizer.step()


def decoded(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    local = parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()
    result = {key: value.materialize() for key, value in state.items() if hasattr(value, "materialize")}
    result["master"] = official.reconstruct_fp32_param(local, state["error_bits"])
    return {key: value.reshape(local.shape) for key, value in result.items()}


def single(out: Path) -> None:
    for name, (dtype, kind, options) in CASES.items():
        module = net(dtype)
        optimizer = getattr(official, kind)(list(module.named_parameters()), lr=1e-2, fused=False, **options)
        train(module, optimizer, lambda whole, _: whole)
        expected = {key: decoded(value, optimizer.state[value]) for key, value in module.named_parameters()}
        whole = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "expected": expected}
        torch.save(whole, out / f"{name}.pt")


def sharded(out: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Rows of 24: a rank's shard of the first is not a multiple of 32, so each rank's groups begin anew.
    module = nn.Sequential(nn.Linear(24, 4, bias=False), nn.Linear(4, 64)).to(torch.bfloat16)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = official.FlashAdamW(list(module.named_parameters()), lr=1e-2, fused=False)
    train(module, optimizer, lambda whole, p: distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
    mine = {key: decoded(value, optimizer.state[value]) for key, value in module.named_parameters()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    whole = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    torch.cuda.is_available = lambda: False
    dcp.save(whole, checkpoint_id=out / "sharded")
    if dist.get_rank() == 0:
        expected = {
            key: {state: torch.cat([rank[key][state] for rank in ranks]) for state in mine[key]} for key in mine
        }
        torch.save(expected, out / "sharded_expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    (sharded if int(os.environ.get("WORLD_SIZE", "1")) > 1 else single)(target)
