"""Failures that users of other optimizers reported, on ours: saving, loading and resharding through torch's own API.

Each test is named after the project and number of the report (or `flashoptim_unfiled`), and says what was seen there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from flashoptim_dist import FlashAdamW
from tests.checkpoint.models import differences, gathered, like, steps
from tests.pool import mesh, run_ranks

FORMS = {"nested": False, "flattened": True}


class Weights(nn.Module):
    """Just parameters of given shapes."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])


class Language(nn.Module):
    """A token model whose vocabulary need not divide by the number of ranks; head and embedding may be tied."""

    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(vocabulary, 32)
        self.hidden = nn.Linear(32, 64)
        self.out = nn.Linear(64, 32)
        self.head = nn.Linear(32, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.out(torch.relu(self.hidden(hidden))))

    def loss(self, step: int) -> Tensor:
        """The loss on a batch that depends on the step alone."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.embed.num_embeddings, (4, 9), generator=generator)
        logits = self(tokens[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(module: nn.Module, columns: bool = False) -> nn.Module:
    placement = (lambda parameter: Shard(1)) if columns else None
    return fully_shard(module, mesh=mesh(dist.get_world_size()), shard_placement_fn=placement)


def adamw(module: nn.Module, **options: Any) -> FlashAdamW:
    return FlashAdamW(module.named_parameters(), lr=1e-2, **options)


def save(path: str, module: nn.Module, optimizer: FlashAdamW, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(module, options=options),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=path)


def load(path: str, module: nn.Module, optimizer: FlashAdamW, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(module, options=options),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state["model"], options=options)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)


# ------------------------------------------------------------------------- shapes and placements over world sizes


def save_shapes(path: str, shapes: list[tuple[int, ...]], columns: bool, flat: bool) -> dict[str, Tensor]:
    module = sharded(Weights(*shapes), columns)
    optimizer = adamw(module)
    steps(module, optimizer, range(3))
    save(path, module, optimizer, flat)
    return gathered(module, optimizer)


def load_shapes(path: str, shapes: list[tuple[int, ...]], columns: bool, flat: bool) -> dict[str, Tensor]:
    module = sharded(Weights(*shapes), columns)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    optimizer = adamw(module)
    load(path, module, optimizer, flat)
    return gathered(module, optimizer)


def assert_survives(
    path: Path, shapes: list[tuple[int, ...]], before: int, after: int, *, columns: bool = False, flat: bool = False
) -> None:
    saved = run_ranks(before, save_shapes, str(path), shapes, columns, flat)
    loaded = run_ranks(after, load_shapes, str(path), shapes, columns, flat)
    for result in loaded:
        assert differences(saved[0], result) == []


@pytest.mark.parametrize(
    "before, after, form",
    [
        pytest.param(*worlds, form, marks=[] if (number + turn) % len(FORMS) == 0 else pytest.mark.full)
        for number, worlds in enumerate([(2, 2), (2, 1), (4, 2), (3, 4)])
        for turn, form in enumerate(FORMS)
    ],
)
def test_flashoptim_6_uneven_shards(tmp_path: Path, before: int, after: int, form: str) -> None:
    """`evenly-sharded` ValueError where dimension 0 does not divide by the number of ranks."""
    assert_survives(tmp_path, [(7, 64), (8, 128), (5, 100), (3,)], before, after, flat=FORMS[form])


@pytest.mark.parametrize("shape", [(4, 24), (8, 20), (2, 40), (4, 32)], ids=str)
@pytest.mark.parametrize("before, after", [(4, 2), (2, 1), (1, 4)])
def test_flashoptim_unfiled_a4_scales_of_another_world_size(
    tmp_path: Path, shape: tuple[int, ...], before: int, after: int
) -> None:
    """Groups cut from the local shard moved with the number of ranks: wrong scales, and no error."""
    assert_survives(tmp_path, [shape], before, after)


def test_flashoptim_unfiled_a6_compressed_state_of_a_column_shard(tmp_path: Path) -> None:
    """`Sharding dim 1 greater than tensor ndim 1`, from scales of one dimension."""
    assert_survives(tmp_path, [(8, 64)], 2, 1, columns=True)


@pytest.mark.parametrize("before, after", [(2, 4), (1, 3)])
def test_lightning_16815_resume_on_more_ranks(tmp_path: Path, before: int, after: int) -> None:
    """Size mismatch, and empty shards, where a run resumes on more ranks than a tensor has rows."""
    assert_survives(tmp_path, [(3, 64), (2, 33), (1, 96), (2,)], before, after)


@pytest.mark.full
def test_lightning_16815_resume_on_eight_ranks(tmp_path: Path) -> None:
    """As above, from 6 ranks to 8."""
    assert_survives(tmp_path, [(3, 64), (7, 100), (8, 32)], 6, 8)


# ------------------------------------------------------------------------- training goes on as if not interrupted


def train(module: Language, optimizer: FlashAdamW, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = module.loss(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def straight_and_resumed(path: str, vocabulary: int, tied: bool, flat: bool) -> tuple[list[float], list[float], Any]:
    def new() -> tuple[Language, FlashAdamW]:
        module = Language(vocabulary, tied).to(torch.bfloat16)
        sharded(module)
        return module, adamw(module)

    module, optimizer = new()
    train(module, optimizer, 0, 10)
    save(path, module, optimizer, flat)
    straight = train(module, optimizer, 10, 14)
    resumed_module, resumed_optimizer = new()
    load(path, resumed_module, resumed_optimizer, flat)
    resumed = train(resumed_module, resumed_optimizer, 10, 14)
    return straight, resumed, differences(gathered(module, optimizer), gathered(resumed_module, resumed_optimizer))


@pytest.mark.parametrize("form", FORMS)
def test_flashoptim_3_loss_after_resume(tmp_path: Path, form: str) -> None:
    """After a save and load, a step sent the loss from 2.4 to 1785: plain local states were taken for copies."""
    for straight, resumed, different in run_ranks(2, straight_and_resumed, str(tmp_path), 64, False, FORMS[form]):
        assert resumed == straight
        assert different == []


def test_torchtitan_1136_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    """The loss differed after a resume where the 2,001 rows of a vocabulary do not divide by 4 ranks."""
    for straight, resumed, different in run_ranks(4, straight_and_resumed, str(tmp_path), 2001, False, False):
        assert resumed == straight
        assert different == []


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_148825_tied_weights(tmp_path: Path, form: str) -> None:
    """Tied weights had two names of which the flattened form knew one. They are one state, and it loads."""
    for straight, resumed, different in run_ranks(2, straight_and_resumed, str(tmp_path), 65, True, FORMS[form]):
        assert resumed == straight
        assert different == []


# ------------------------------------------------------------------------- what torch's loading and templates do


def test_pytorch_43706_load_keeps_dtypes() -> None:
    """`load_state_dict` cast int8 codes and scales to the parameter's dtype, bf16."""
    module = Weights((6, 40), (5,))
    optimizer = adamw(module)
    steps(module, optimizer, range(3))
    fresh = adamw(module)
    fresh.load_state_dict(optimizer.state_dict())
    for parameter in module.parameters():
        assert optimizer.state[parameter].keys() == fresh.state[parameter].keys()
        for name, saved in optimizer.state[parameter].items():
            loaded = fresh.state[parameter][name]
            assert loaded.dtype == saved.dtype
            assert loaded.untyped_storage().data_ptr() != saved.untyped_storage().data_ptr()
            assert torch.equal(loaded.flatten().view(torch.uint8), saved.flatten().view(torch.uint8))
    matrix = fresh.state[module.weights[0]]
    assert {name: entry.dtype for name, entry in matrix.items()} == {
        "step": torch.float32,
        "exp_avg": torch.int8,
        "exp_avg_scale": torch.bfloat16,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.bfloat16,
        "error_bits": torch.int8,
    }


def after_one_step(ask_first: bool, flat: bool) -> tuple[dict[str, Tensor], set[str]]:
    module = sharded(Weights((7, 40), (5,)))
    optimizer = adamw(module)
    names: set[str] = set()
    if ask_first:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        template = get_optimizer_state_dict(module, optimizer, options=options)
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(float(optimizer.state[parameter]["step"]) == 0.0 for parameter in module.parameters())
        names = set(template if flat else template["state"])
    steps(module, optimizer, range(1))
    return gathered(module, optimizer), names


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_164929_template_takes_no_step(form: str) -> None:
    """`get_optimizer_state_dict` on a fresh optimizer counted a hidden step, and the next update differed."""
    (untouched, _), _ = run_ranks(2, after_one_step, False, FORMS[form])
    (asked, names), _ = run_ranks(2, after_one_step, True, FORMS[form])
    assert differences(untouched, asked) == []
    assert float(asked["optimizer.weights.0.step"]) == 1.0
    wanted = {"weights.0", "weights.1"}
    assert (wanted <= names) if form == "nested" else all(f"state.{name}.exp_avg" in names for name in wanted)


def test_pytorch_164929_first_step_with_lr_0_counts() -> None:
    """A warm-up that starts at 0 is a step: live gradients tell it from a request for a template."""
    module = Weights((6, 40))
    optimizer = FlashAdamW(module.named_parameters(), lr=0.0)
    before = module.weights[0].detach().clone()
    steps(module, optimizer, range(1))
    state = optimizer.state[module.weights[0]]
    assert float(state["step"]) == 1.0
    assert state["exp_avg"].count_nonzero() > 0
    assert torch.equal(before, module.weights[0])


def load_after_freezing() -> tuple[float, float]:
    module = sharded(Weights((6, 64), (6, 64)))
    optimizer = adamw(module)
    steps(module, optimizer, range(2))
    module.weights[0].requires_grad_(False)
    saved = optimizer.state_dict()
    fresh = adamw(module)
    fresh.load_state_dict(saved)
    frozen, other = module.weights
    kept = float(fresh.state[frozen]["step"])
    frozen.requires_grad_(True)
    for parameter in (frozen, other):
        parameter.grad = like(torch.ones(parameter.shape, dtype=parameter.dtype), parameter)
    fresh.step()
    return kept, float(fresh.state[frozen]["step"])


def test_pytorch_192202_state_of_a_parameter_frozen_later_is_kept() -> None:
    """It was dropped on load, so that training it again began from nothing."""
    assert run_ranks(2, load_after_freezing) == [(2.0, 3.0)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ao_4912_one_precision_on_every_mesh(world_size: int) -> None:
    """A tensor was 8-bit on one mesh and fp32 on another, by its local size."""
    dtypes = run_ranks(world_size, dtypes_of, (6, 1024))
    assert dtypes == [{"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}] * world_size


def dtypes_of(shape: tuple[int, ...]) -> dict[str, torch.dtype]:
    module = sharded(Weights(shape))
    optimizer = adamw(module)
    optimizer.init_state()
    state = optimizer.state[module.weights[0]]
    return {name: state[name].dtype for name in ("exp_avg", "exp_avg_sq")}
