"""Checkpoints that torchtitan 0.3's CheckpointManager wrote of its own debug models, converted and loaded by it again.

Queries, keys and values are one parameter there and three entries in the file; qwen3 has fewer heads of keys than of
queries, and a norm that tells their size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_dist.convert import convert
from tests.pool import run_ranks
from tests.torchtitan import device
from tests.torchtitan.device import CheckpointManager, FlashOptimizersContainer, LRSchedulersContainer, default_adamw

pytestmark = pytest.mark.full


class _Position:
    """Stands for the trainer and for its data loader."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


def _model(name: str, dtype: torch.dtype) -> nn.Module:
    with device.as_device():
        import importlib

        spec = importlib.import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    del spec.model.layers[1:]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = spec.model.build()
        model.init_states()
    finally:
        torch.set_default_dtype(before)
    return model


def _run(name: str, folder: str, flash: bool, steps: int) -> dict[str, Tensor]:
    """Load what there is, step with given gradients, save; return weights (masters) and plain moments by name."""
    model = _model(name, torch.bfloat16 if flash else torch.float32)
    config = FlashOptimizersContainer.Config(lr=1e-2) if flash else default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    position = _Position(0)
    manager = CheckpointManager.Config(enable=True, last_save_model_only=False, keep_latest_k=0).build(
        dataloader=_Position(7),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=100),
        states={"train_state": position},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load()
    assert len(optimizers.optimizers) == 1
    optimizer: Any = optimizers.optimizers[0]
    for _ in range(steps):
        position.step += 1
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * position.step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizers.step()
    if steps:
        manager.save(position.step, last_step=True)
    manager.close()
    masters = optimizer.get_master_weights(model) if flash else dict(model.named_parameters())
    found = {f"{name}.weight": value.detach().clone() for name, value in masters.items()}
    if flash:
        optimizer.compress_state_dict = False
    saved = optimizer.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    for number, state in saved["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            found[f"{names[number]}.{key}"] = state[key].float()
    return found


@pytest.mark.parametrize(("name", "head_dim"), [("llama3", 16), ("qwen3", None)])
def test_adamws_checkpoint_becomes_ours_and_the_other_way_round(
    tmp_path: Path, name: str, head_dim: int | None
) -> None:
    def run(place: str, flash: bool, steps: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = run_ranks(1, _run, name, str(tmp_path / place), flash, steps)[0]
        return found

    theirs = run("adamw", False, 3)
    source, target = (tmp_path / place / "checkpoint" / "step-3" for place in ("adamw", "flash"))
    convert(source, target, "flash_adamw", head_dim=head_dim)
    ours = run("flash", True, 0)
    assert ours.keys() == theirs.keys()
    assert any("wqkv" in key for key in ours)
    for key, value in theirs.items():
        if key.endswith(".weight"):
            assert bool(((ours[key] - value).abs() <= value.abs() * 2.0**-16).all()), key
        elif key.endswith(".step"):
            assert float(ours[key]) == 3.0
    trained = run("flash", True, 1)
    convert(target.with_name("step-4"), tmp_path / "back" / "checkpoint" / "step-4", "adamw", head_dim=head_dim)
    back = run("back", False, 0)
    for key, value in trained.items():
        assert torch.equal(back[key], value), key
