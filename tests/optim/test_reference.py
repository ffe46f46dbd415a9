"""The CPU step: eager, compiled and the definition give the same bits, in bounded memory."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashoptim_dist.formats import (
    decode_moments,
    encode_moments,
    from_groups,
    merge,
    noise_words,
    round_stochastically,
    split,
    to_groups,
)
from flashoptim_dist.formats.rounding import plain_weight_noise, rotation, weight_noise
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim import cpu_backend, reference, scratch
from flashoptim_dist.optim.reference import ParameterStep, Rule
from flashoptim_dist.optim.rules import (
    adam_update,
    contain_overflow,
)
from tests.optim.kinds import KINDS, SHAPES, Kind, assert_same, copy_of, needs_compiler, stored


def step_by_the_book(task: ParameterStep, rule: Rule) -> None:
    """The step as docs and formats/ state it, on whole tensors: rows, groups, global indices."""
    layout, shape = task.layout, task.weight.shape
    rows, length = layout.rows, layout.length
    words = None
    if task.noise_key is not None:
        words = noise_words(torch.arange(task.weight.numel()), task.noise_key, task.step).view(rows, length)
    signed = [moment.signed for moment in task.moments]
    before = [moment.values.view(rows, length) for moment in task.moments]
    if task.compressed:
        stored_groups = [(to_groups(v), m.scale.view(-1)) for v, m in zip(before, task.moments, strict=True)]
        before = [from_groups(groups, rows, length) for groups in decode_moments(stored_groups, signed)]
    master = merge(
        task.weight.reshape(rows, length), None if task.correction is None else task.correction.view(rows, length)
    )
    gradient = task.gradient.reshape(rows, length).float() * task.gradient_factor
    master, after = rule(master, gradient, tuple(before), task.scalars)
    if task.compressed:
        groups = [to_groups(value) for value in contain_overflow(after)]
        of_groups = None if words is None else to_groups(words)
        codes_and_scales = encode_moments(groups, signed, of_groups, rotation(task.step))
        for moment, (codes, scale) in zip(task.moments, codes_and_scales, strict=True):
            moment.values.copy_(from_groups(codes, rows, length).reshape(shape))
            moment.scale.copy_(scale.view(moment.scale.shape))
    else:
        for moment, value in zip(task.moments, after, strict=True):
            moment.values.copy_(value.view(shape))
    if task.correction is None:
        if words is not None and task.weight.dtype in SPLIT_DTYPES:
            master = round_stochastically(master, task.weight.dtype, plain_weight_noise(words))
        task.weight.copy_(master.view(shape))
        return
    noise = None if words is None else weight_noise(words)
    weight, correction = split(master, task.weight.dtype, task.correction.itemsize * 8, noise)
    task.weight.copy_(weight.view(shape))
    task.correction.copy_(correction.view(shape))


# ------------------------------------------------------------------------------------------- eager


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_eager_gives_the_bits_of_the_definition(kind: Kind) -> None:
    cpu_backend("eager")
    for shape in SHAPES:
        for strided in (False, True):
            expected = kind.task(shape, 1, strided=strided and len(shape) > 1)
            actual = copy_of(expected)
            for step in range(3):
                step_by_the_book(*kind.advance(expected))
                reference.step_parameter(*kind.advance(actual))
                assert_same(actual, expected, f"{shape}, step {step}")


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4], KINDS[7], KINDS[8]], ids=str)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 96, 1000])
def test_bits_do_not_depend_on_blocks(kind: Kind, chunk: int) -> None:
    cpu_backend("eager")
    for shape in [(33,), (40, 96), (33, 50), (2, 1500), (16, 8, 3, 3), (3, 20, 37), (3, 64, 5, 5)]:
        for strided in (False, True):
            expected = kind.task(shape, 2, strided=strided and len(shape) > 1)
            actual = copy_of(expected)
            for step in range(2):
                step_by_the_book(*kind.advance(expected))
                reference.step_parameter(*kind.advance(actual), chunk_elements=chunk)
                assert_same(actual, expected, f"{shape}, step {step}")


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=needs_compiler)])
def test_one_odd_element_in_a_block_gives_the_bits_of_the_definition(backend: Any) -> None:
    """One element of each sort that the eager path looks for, alone in a block of ordinary ones."""
    kind = Kind("adamw", gradient=torch.float32)
    cpu_backend(backend)
    for value in (torch.inf, -torch.inf, torch.nan, 1e19, 3e38, 0.0):
        for part in ("weight", "gradient"):
            expected = kind.task((4, 64), 3)
            getattr(expected, part)[1, 5] = value
            actual = copy_of(expected)
            for step in range(2):
                step_by_the_book(*kind.advance(expected))
                reference.step_parameter(*kind.advance(actual))
                assert_same(actual, expected, f"{value} in the {part}, step {step}")
    stale = kind.task((4, 64), 3)  # a negative correction under a zero weight, of either sign
    stale.weight[0, :2] = torch.tensor([0.0, -0.0])
    assert stale.correction is not None
    stale.correction[0, :2] = -5
    actual = copy_of(stale)
    step_by_the_book(*kind.advance(stale))
    reference.step_parameter(*kind.advance(actual))
    assert_same(actual, stale, "stale correction")


def test_the_gradient_is_left_alone() -> None:
    kind = Kind("adamw", gradient=torch.float32, factor=0.5)
    cpu_backend("eager")
    task, rule = kind.advance(kind.task((40, 96), 4))
    before = task.gradient.clone()
    reference.step_parameter(task, rule)
    assert torch.equal(task.gradient, before)


def test_small_parameters_share_a_block() -> None:
    calls: list[int] = []

    def counted(weight: Tensor, *rest: Any) -> Any:
        calls.append(weight.numel())
        return adam_update(weight, *rest)

    cpu_backend("eager")
    kind, shapes = KINDS[2], [(40, 96), (33, 50), (1, 33), (16, 8, 3, 3), (64, 32)]
    together = [kind.task(shape, number) for number, shape in enumerate(shapes)]
    alone = [copy_of(task) for task in together]
    for _ in range(3):
        calls.clear()
        reference.step_parameters([(kind.advance(task)[0], counted) for task in together])
        assert len(calls) == 1
        for one, other in zip(alone, together, strict=True):
            reference.step_parameter(*kind.advance(one))
            assert_same(other, one, str(other.weight.shape))


def test_only_parameters_of_one_kind_share_a_block() -> None:
    cpu_backend("eager")
    kinds = [*KINDS, *KINDS]
    together = [kind.task((33, 50), number) for number, kind in enumerate(kinds)]
    alone = [copy_of(task) for task in together]
    for _ in range(2):
        reference.step_parameters([kind.advance(task) for kind, task in zip(kinds, together, strict=True)])
        for kind, one, other in zip(kinds, alone, together, strict=True):
            reference.step_parameter(*kind.advance(one))
            assert_same(other, one, str(kind))


# ------------------------------------------------------------------------------------------- memory


class LiveMemory(TorchDispatchMode):
    """Records the most bytes that tensors made inside hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []
        self._known: set[int] = set()
        self.peak = 0

    def know(self, tensors: list[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._made = [ref for ref in self._made if ref() is not None]
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        live = {}
        for ref in self._made:
            if (tensor := ref()) is not None:
                storage = tensor.untyped_storage()
                live[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(size for address, size in live.items() if address not in self._known))
        return result


@pytest.mark.parametrize("columns", [256, 250], ids=["whole groups", "padded"])
@pytest.mark.parametrize("kind", [Kind("stochastic"), Kind("nearest-special", stochastic=False, special=1e-4)], ids=str)
def test_temporary_memory_does_not_grow_with_the_parameter(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, columns: int
) -> None:
    cpu_backend("eager")
    peaks, chunk = [], 1 << 15
    for rows in (1 << 9, 1 << 11):
        monkeypatch.setattr(scratch, "_threads", threading.local())  # working memory counts too
        task, rule = kind.advance(kind.task((rows, columns), 6))
        with LiveMemory() as memory:
            memory.know([task.gradient, *stored(task).values()])
            reference.step_parameter(task, rule, chunk_elements=chunk)
        peaks.append(memory.peak)
    assert peaks[0] > 8 * chunk
    assert peaks[1] <= 1.01 * peaks[0]
    assert peaks[1] <= 100 * chunk
