"""Training by torchtitan's own Trainer, on CPU ranks with the shims of ``debug_run``: the slow tier."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flashoptim_dist.convert import convert
from tests.pool import run_ranks
from tests.torchtitan import device
from tests.torchtitan.models import assert_equal

assert device.CPU is not None  # skips the file where torchtitan is not installed

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

SAVES = {"checkpoint.enable": True, "checkpoint.interval": 3, "checkpoint.last_save_model_only": False}
EXPORTS = {"checkpoint.enable": True, "checkpoint.interval": 100, "checkpoint.last_save_model_only": True}
WQKV = "layers.0.attention.qkv_linear.wqkv.weight"


def _run(kind: str, folder: str, **options: Any) -> Any:
    from tests.torchtitan import debug_run

    return debug_run.run(getattr(debug_run, kind), folder, **options)


def _train(world_size: int, kind: str, folder: Path, **options: Any) -> Any:
    """Return what the first rank has, after comparing with the second."""
    results = run_ranks(world_size, _run, kind, str(folder), timeout_s=600.0, **options)
    for other in results[1:]:
        assert_equal(results[0].loaded, other.loaded)
        assert_equal(results[0].state, other.state)
    return results[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Three steps on two ranks, saved after the third: what is left of them, and the folder."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return _train(2, "llama", folder, steps=3, change=SAVES), folder


def test_twenty_steps_learn_and_the_export_is_what_fp32_training_goes_on_with(tmp_path: Path) -> None:
    trained = _train(2, "llama", tmp_path / "a", steps=20, change=EXPORTS)
    losses = [loss for _, loss, _ in trained.metrics]
    assert [step for step, _, _ in trained.metrics] == list(range(1, 21))
    assert losses[-1] < losses[0] - 1.5
    assert trained.optimizers == ["FlashAdamW"]
    assert trained.state[f"state.{WQKV}.exp_avg"].dtype == torch.int8
    # The fused projection is saved as its three parts, masters too; a model of fp32 weights puts them together again.
    again = {
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": str(tmp_path / "a" / "checkpoint" / "step-20"),
        "training.dtype": "float32",
    }
    loaded = _train(2, "llama", tmp_path / "b", steps=0, change=again)
    assert loaded.masters.keys() == trained.masters.keys()
    for name, value in trained.masters.items():
        assert loaded.masters[name].dtype == torch.float32
        assert torch.equal(loaded.masters[name], value), name
    rounded = {name: torch.equal(value.bfloat16().float(), value) for name, value in trained.masters.items()}
    assert not rounded[WQKV]  # the corrections matter


@pytest.mark.long
def test_export_as_hugging_face_safetensors_loads_again(tmp_path: Path) -> None:
    exports = {**EXPORTS, "checkpoint.last_save_in_hf": True}
    trained = _train(2, "llama", tmp_path / "a", steps=2, change=exports)
    again = {
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": str(tmp_path / "a" / "checkpoint" / "step-2"),
        "checkpoint.initial_load_in_hf": True,
    }
    loaded = _train(2, "llama", tmp_path / "b", steps=0, change={**again, "training.dtype": "float32"})
    for name, value in trained.masters.items():
        assert torch.equal(loaded.masters[name], value), name
    # Into bf16 weights, as a fine-tune begins: the optimizer starts from them, without corrections.
    loaded = _train(2, "llama", tmp_path / "c", steps=0, change=again)
    for name, value in trained.masters.items():
        assert torch.equal(loaded.masters[name], value.bfloat16().float()), name


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_resume_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    change = {**SAVES, "checkpoint.async_mode": mode}
    trained = _train(2, "llama", tmp_path, steps=6, change=change)
    resumed = _train(2, "llama", tmp_path, steps=6, change={**change, "checkpoint.load_step": 3})
    assert [step for step, _, _ in resumed.metrics] == [4, 5, 6]
    assert resumed.metrics == trained.metrics[3:]
    assert_equal(trained.state, resumed.state)


@pytest.mark.parametrize(
    "world_size, parallelism",
    [
        (1, {}),
        (2, {"tensor_parallel_degree": 2}),
        (4, {}),
        (4, {"data_parallel_replicate_degree": 2}),
        pytest.param(4, {"tensor_parallel_degree": 2}, marks=pytest.mark.long),
    ],
    ids=["1", "TP 2", "4", "HSDP 2x2", "FSDP 2 x TP 2"],
)
def test_checkpoints_of_two_ranks_load_elsewhere(
    tmp_path: Path, two_ranks: tuple[Any, Path], world_size: int, parallelism: dict[str, int]
) -> None:
    saved, folder = two_ranks
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    elsewhere = {**SAVES, "checkpoint.load_step": 3, "checkpoint.exclude_from_loading": ["dataloader"]}
    resumed = _train(world_size, "llama", tmp_path, steps=5, change=elsewhere, **parallelism)
    assert_equal(saved.state, resumed.loaded)
    assert [step for step, _, _ in resumed.metrics] == [4, 5]
    assert all(math.isfinite(loss) for _, loss, _ in resumed.metrics)


def test_one_override_on_torchtitans_own_config(tmp_path: Path) -> None:
    imports: list[Any] = [("flashoptim_dist.torchtitan.flash_adamw", {"lr": 3e-3})]
    trained = _train(2, "stock_llama", tmp_path / "a", steps=2, change={"override.imports": imports})
    assert trained.optimizers == ["FlashAdamW"]
    assert trained.state["model.tok_embeddings.weight"].dtype == torch.float32
    assert trained.state[f"state.{WQKV}.exp_avg"].dtype == torch.int8
    assert f"state.{WQKV}.error_bits" not in trained.state
    bf16 = {"override.imports": imports, "training.dtype": "bfloat16"}
    trained = _train(2, "stock_llama", tmp_path / "b", steps=2, change=bf16)
    assert trained.state[f"state.{WQKV}.error_bits"].dtype == torch.int8


@pytest.mark.parametrize(
    "parallelism", [{}, pytest.param({"tensor_parallel_degree": 2}, marks=pytest.mark.long)], ids=["FSDP", "TP"]
)
def test_gradient_release_is_the_same_training(tmp_path: Path, parallelism: dict[str, int]) -> None:
    release = {"gradient_release.enable": True, "gradient_release.clipping": "none"}
    accumulate = {"training.global_batch_size": 8, "training.max_norm": 1e9}
    without = _train(2, "llama", tmp_path / "a", steps=4, change=accumulate, **parallelism)
    with_release = _train(2, "llama", tmp_path / "b", steps=4, change={**release, **accumulate}, **parallelism)
    assert_equal(without.state, with_release.state)
    assert [loss for _, loss, _ in without.metrics] == [loss for _, loss, _ in with_release.metrics]


@pytest.mark.long
def test_gradients_that_stay_change_nothing(tmp_path: Path) -> None:
    """As under CUDA graphs, which keep the gradients' memory; without a GPU torchtitan runs eagerly then."""
    freed = _train(2, "llama", tmp_path / "a", steps=4)
    kept = _train(2, "llama", tmp_path / "b", steps=4, change={"training.disable_cuda_graphs": False})
    assert_equal(freed.state, kept.state)


@pytest.mark.long
def test_gradient_release_logs_the_norm_it_clips_by(tmp_path: Path) -> None:
    without = _train(2, "llama", tmp_path / "a", steps=1)
    trained = _train(2, "llama", tmp_path / "b", steps=20, change={"gradient_release.enable": True})
    norms = [norm for _, _, norm in trained.metrics]
    assert norms[0] == pytest.approx(without.metrics[0][2], rel=1e-2)  # torchtitan's is a bf16 number
    assert all(norm > 0.0 for norm in norms)
    losses = [loss for _, loss, _ in trained.metrics]
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.long
def test_experts_train_and_resume(tmp_path: Path) -> None:
    trained = _train(2, "moe", tmp_path, steps=6, change=SAVES)
    assert trained.metrics[-1][1] < trained.metrics[0][1]
    experts = [key for key in trained.state if "experts" in key and key.endswith(".exp_avg")]
    assert experts
    assert all(trained.state[key].dtype == torch.int8 for key in experts)
    resumed = _train(2, "moe", tmp_path, steps=6, change={**SAVES, "checkpoint.load_step": 3})
    assert_equal(trained.state, resumed.state)


@pytest.mark.long
def test_torchtitans_adamw_converts_to_ours_and_back(tmp_path: Path) -> None:
    """AdamW in torchtitan, on with FlashAdamW, and back with AdamW; each goes on training."""
    head = 16
    plain = _train(2, "stock_llama", tmp_path / "adamw", steps=3, change=SAVES)
    source, place = tmp_path / "adamw/checkpoint/step-3", tmp_path / "flash/checkpoint/step-3"
    convert(source, place, "flash_adamw", head_dim=head)
    change = {**SAVES, "checkpoint.load_step": 3}
    ours = _train(2, "llama", tmp_path / "flash", steps=3, change=change)
    for name, value in ours.masters.items():
        saved = plain.state[f"parameter.{name}"]
        torch.testing.assert_close(value, saved, rtol=2**-16, atol=0.0)
        assert float(ours.state[f"state.{name}.step"]) == 3.0
    onward = _train(2, "llama", tmp_path / "flash", steps=6, change=change)
    assert [step for step, _, _ in onward.metrics] == [4, 5, 6]
    assert all(math.isfinite(loss) for _, loss, _ in onward.metrics)
    back = tmp_path / "back/checkpoint/step-6"
    convert(tmp_path / "flash/checkpoint/step-6", back, "adamw", head_dim=head)
    again = _train(2, "stock_llama", tmp_path / "back", steps=6, change={**SAVES, "checkpoint.load_step": 6})
    assert again.optimizers == ["AdamW"]
    for name, value in onward.masters.items():
        assert torch.equal(again.state[f"parameter.{name}"], value), name
    resumed = _train(2, "stock_llama", tmp_path / "back", steps=8, change={**SAVES, "checkpoint.load_step": 6})
    assert [step for step, _, _ in resumed.metrics] == [7, 8]


@pytest.mark.long
def test_expert_parallel_checkpoints_load_without_it(tmp_path: Path) -> None:
    """Experts lie on another mesh than the rest then; the optimizer takes parameters of both."""
    trained = _train(2, "moe", tmp_path, steps=3, change=SAVES, expert_parallel_degree=2)
    elsewhere = {**SAVES, "checkpoint.load_step": 3, "checkpoint.exclude_from_loading": ["dataloader"]}
    resumed = _train(2, "moe", tmp_path, steps=5, change=elsewhere)
    assert_equal(trained.state, resumed.loaded)
    assert [step for step, _, _ in resumed.metrics] == [4, 5]
