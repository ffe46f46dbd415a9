"""The CPU step: eager, compiled and the definition give the same bits, in bounded memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flashoptim_dist.kernels import launching
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashoptim_dist.formats import (
    correction_bits,
    correction_dtype,
    decode_moments,
    encode_moments,
    from_groups,
    merge,
    noise_key,
    noise_words,
    round_stochastically,
    split,
    to_groups,
)
from flashoptim_dist.formats.rounding import plain_weight_noise, rotation, weight_noise
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim import compiled, cpu_backend, reference, scratch
from flashoptim_dist.optim.reference import MomentTensors, ParameterStep, Rule
from flashoptim_dist.optim.rules import (
    LionScalars,
    SgdScalars,
    adam_scalars,
    adam_update,
    contain_overflow,
    lion_update,
    sgd_update,
)
from flashoptim_dist.sharding import shard_layout

needs_compiler = pytest.mark.skipif(not compiled.has_compiler(), reason="Numba is not installed")


@pytest.fixture(autouse=True)
def _backend_stays() -> Iterator[None]:
    before = cpu_backend()
    yield
    cpu_backend(before)


@dataclass(frozen=True)
class Kind:
    """A parameter and how it is stepped. ``special``: the part of weights and gradients that are Inf, NaN or huge."""

    name: str
    weight: torch.dtype = torch.bfloat16
    gradient: torch.dtype = torch.bfloat16
    master_weight_bits: int | None = 24
    rule: str = "adamw"
    stochastic: bool = True
    quantize: bool = True
    factor: float = 1.0
    special: float = 0.0

    def __str__(self) -> str:
        return self.name

    def arithmetic(self, step: int) -> tuple[Any, Rule]:
        """Scalars, another learning rate each step, and the rule."""
        lr = 1e-3 / step
        if self.rule == "lion":
            return LionScalars(lr=lr, beta1=0.9, beta2=0.99, decay=1 - 0.1 * lr), lion_update
        if self.rule in ("sgd", "plain sgd"):
            momentum = 0.9 if self.rule == "sgd" else 0.0
            gain = 1.0 if step == 1 else 0.7
            return SgdScalars(lr=lr, momentum=momentum, gain=gain, nesterov=True, decay=1.0, l2=0.01), sgd_update
        decay, l2 = (1 - 0.1 * lr, 0.0) if self.rule == "adamw" else (1.0, 0.1)
        return adam_scalars(lr=lr, betas=(0.9, 0.999), eps=1e-8, decay=decay, l2=l2, step=step), adam_update

    @property
    def signed(self) -> tuple[bool, ...]:
        """Which moments there are."""
        return {"lion": (True,), "sgd": (True,), "plain sgd": ()}.get(self.rule, (True, False))

    def task(self, shape: tuple[int, ...], seed: int, *, strided: bool = False) -> ParameterStep:
        """A parameter with random state of this kind, before its first step here."""
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        def sprinkle(tensor: Tensor) -> Tensor:
            values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-39, 3.3e38, -1e30])
            chosen = torch.rand(shape, generator=generator) < self.special
            return torch.where(chosen, values[torch.randint(0, len(values), shape, generator=generator)], tensor)

        weight = sprinkle(normal(0.02)).to(self.weight)
        spread = 10.0 ** (torch.rand(shape, generator=generator) * 6 - 7)
        gradient = sprinkle(normal(1.0) * spread).to(self.gradient)
        layout = shard_layout(weight, "p")
        bits = correction_bits(self.weight, self.master_weight_bits)
        correction = None
        if bits:
            half = 1 << (bits - 1)
            correction = torch.randint(-half, half, shape, generator=generator).to(correction_dtype(bits))
        moments = []
        for signed in self.signed:
            if not (self.quantize and layout.quantized):
                value = normal(1e-3)
                moments.append(MomentTensors(signed, value if signed else value * value, None))
                continue
            codes = torch.randint(*((-127, 128) if signed else (1, 256)), shape, generator=generator)
            codes[torch.rand(shape, generator=generator) < 0.1] = 0
            scale = (10.0 ** (torch.rand(layout.scale_local_shape, generator=generator) * 6 - 8)).to(torch.bfloat16)
            if not signed:
                scale.view(torch.int16).bitwise_and_(~1)  # of the three lowest bits, no variance has all
            scale.view(-1)[::7] = 0.0
            moments.append(MomentTensors(signed, codes.to(torch.int8 if signed else torch.uint8), scale))
        if strided:
            weight, gradient = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (weight, gradient))
        return ParameterStep(
            layout=layout,
            weight=weight,
            gradient=gradient,
            correction=correction,
            moments=tuple(moments),
            scalars=None,
            gradient_factor=self.factor,
            noise_key=noise_key(5, seed) if self.stochastic else None,
            step=0,
        )

    def advance(self, task: ParameterStep) -> tuple[ParameterStep, Rule]:
        """Set a task to its next step, with another gradient."""
        task.step += 1
        task.scalars, rule = self.arithmetic(task.step)
        task.gradient = task.gradient.roll(1, 0) if task.gradient.ndim else task.gradient
        return task, rule


KINDS = [
    Kind("adamw"),
    Kind("adamw-nearest-special", stochastic=False, special=0.01),
    Kind("adamw-special", special=0.01, factor=-0.5),
    Kind("adam-l2-32-bits", rule="adam", master_weight_bits=32, gradient=torch.float32),
    Kind("adamw-fp16", weight=torch.float16, gradient=torch.float16, special=0.01),
    Kind("adamw-fp32", weight=torch.float32, gradient=torch.float32),
    Kind("adamw-no-correction", master_weight_bits=None),
    Kind("adamw-fp16-no-correction", weight=torch.float16, master_weight_bits=None, quantize=False, special=0.01),
    Kind("lion-no-correction", rule="lion", master_weight_bits=None, special=0.01),
    Kind("adamw-unquantized", quantize=False),
    Kind("lion", rule="lion", special=0.01),
    Kind("sgd", rule="sgd", stochastic=False),
    Kind("plain-sgd", rule="plain sgd"),
]
SHAPES = [(), (1,), (33,), (3, 2), (1, 33), (40, 96), (33, 50), (16, 8, 3, 3), (3, 20, 37)]


def copy_of(task: ParameterStep) -> ParameterStep:
    moments = (
        MomentTensors(m.signed, m.values.clone(), None if m.scale is None else m.scale.clone()) for m in task.moments
    )
    return ParameterStep(
        **{
            **vars(task),
            "weight": task.weight.clone(),
            "correction": None if task.correction is None else task.correction.clone(),
            "moments": tuple(moments),
        }
    )


def stored(task: ParameterStep) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"weight": task.weight}
    if task.correction is not None:
        tensors["correction"] = task.correction
    for number, moment in enumerate(task.moments):
        tensors[f"moment {number}"] = moment.values
        if moment.scale is not None:
            tensors[f"scale {number}"] = moment.scale
    return tensors


def assert_same(actual: ParameterStep, expected: ParameterStep, where: str) -> None:
    """Compare bits; only which NaN a NaN is may differ, since processors propagate either operand's."""
    for (name, one), other in zip(stored(actual).items(), stored(expected).values(), strict=True):
        if one.is_floating_point():
            integer = torch.int16 if one.itemsize == 2 else torch.int32
            one, other = (torch.where(t.isnan(), -1, t.contiguous().view(integer)) for t in (one, other))
        assert torch.equal(one, other), f"{where}: {name}: {int((one != other).sum())} of {one.numel()} differ"


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


# ------------------------------------------------------------------------------------------- compiled


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compiled_gives_the_bits_of_eager(kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the warning that says that nothing was compiled
        for number, shape in enumerate([*SHAPES, (257, 64), (70000,), (3, 64, 37)]):
            for strided in (False, True):
                eager = kind.task(shape, number, strided=strided and len(shape) > 1)
                through_compiler = copy_of(eager)
                for step in range(3):
                    cpu_backend("eager")
                    reference.step_parameter(*kind.advance(eager))
                    cpu_backend("compiled")
                    reference.step_parameter(*kind.advance(through_compiler), chunk_elements=1 << 14)
                    assert_same(through_compiler, eager, f"{shape}, step {step}")


@needs_compiler
@pytest.mark.parametrize("shape", [(40, 96), (200, 50)])
@pytest.mark.parametrize("quantize", [True, False])
def test_compiled_noise_of_a_shard_of_columns(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], quantize: bool
) -> None:
    """Elements that are not consecutive in the global tensor, in pieces that begin within a row."""
    monkeypatch.setattr(compiled, "_MOST_STARTS", 7)
    kind = Kind("adamw", quantize=quantize)
    eager = kind.task(shape, 1)
    eager.layout = replace(eager.layout, global_shape=(shape[0], 1000), offset=(0, 320))
    assert eager.layout.index_base is None
    through_compiler = copy_of(eager)
    for step in range(3):
        cpu_backend("eager")
        reference.step_parameter(*kind.advance(eager))
        cpu_backend("compiled")
        reference.step_parameter(*kind.advance(through_compiler))
        assert_same(through_compiler, eager, f"step {step}")


@needs_compiler
def test_compiled_leaves_the_gradient_alone_and_takes_a_negative_view() -> None:
    kind = Kind("adamw", gradient=torch.float32, factor=0.5)
    plain = kind.task((40, 96), 4)
    negative = copy_of(plain)
    negative.gradient = torch._neg_view(-plain.gradient)
    before = plain.gradient.clone()
    cpu_backend("compiled")
    for task in (plain, negative):
        task.step = 1
        task.scalars, rule = kind.arithmetic(1)
        reference.step_parameter(task, rule)
    assert torch.equal(plain.gradient, before)
    assert_same(negative, plain, "negative view")


@needs_compiler
def test_bits_do_not_depend_on_threads() -> None:
    kind, threads = KINDS[2], torch.get_num_threads()
    one = kind.task((300, 1000), 7)
    many = [copy_of(one), copy_of(one)]
    try:
        for _ in range(3):
            torch.set_num_threads(1)
            cpu_backend("eager")
            reference.step_parameter(*kind.advance(one))
            torch.set_num_threads(5)  # beyond 4, roots are torch's
            for task, backend in zip(many, ("eager", "compiled"), strict=True):
                cpu_backend(backend)  # type: ignore[arg-type]
                reference.step_parameter(*kind.advance(task))
                assert_same(task, one, backend)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_several_threads_step_at_once() -> None:
    """As the hooks of gradient release may: they wait for each other's shares, never for themselves."""
    kind, threads = Kind("adamw"), torch.get_num_threads()
    expected = [kind.task((300, 1000), number) for number in range(4)]
    actual = [copy_of(task) for task in expected]
    cpu_backend("compiled")
    try:
        torch.set_num_threads(1)
        for task in expected:
            for _ in range(3):
                reference.step_parameter(*kind.advance(task))
        torch.set_num_threads(3)

        def work(task: ParameterStep) -> None:
            torch.set_num_threads(3)
            for _ in range(3):
                reference.step_parameter(*kind.advance(task))

        with ThreadPoolExecutor(len(actual)) as pool:
            list(pool.map(work, actual))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, "stepped by several threads")


_FORKED = """
import os, torch, flashoptim_dist as fod
from flashoptim_dist.optim import cpu_backend
torch.set_num_threads(3)
cpu_backend("compiled")
weight = torch.nn.Parameter(torch.ones(300, 1000, dtype=torch.bfloat16))
optimizer = fod.FlashAdamW([weight])
weight.grad = torch.ones_like(weight)
optimizer.step()
child = os.fork()
if child == 0:
    optimizer.step()
    os._exit(0 if optimizer.state[weight]["step"] == 2 else 1)
print("child:", os.waitpid(child, 0)[1])
"""


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_process_makes_its_own_threads() -> None:
    run = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=120)
    assert "child: 0" in run.stdout, run.stderr


@needs_compiler
@pytest.mark.parametrize("reason", ["no folder", "disabled"])
def test_where_kernels_cannot_be_kept_or_compiled(tmp_path: Path, reason: str) -> None:
    """Without a folder to write to, every process compiles anew; with Numba switched off the step is eager."""
    script = _FORKED.split("child =")[0] + "print(int(optimizer.state[weight]['step']))"
    package = tmp_path / "read-only" / "flashoptim_dist"
    shutil.copytree(Path(compiled.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(launching.__file__).parent, package / "kernels", dirs_exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    if reason == "disabled":
        environment["NUMBA_DISABLE_JIT"] = "1"
    else:
        blocked = tmp_path / "a file"
        blocked.touch()
        for variable in ("HOME", "XDG_CACHE_HOME", "IPYTHONDIR"):
            environment[variable] = str(blocked / "below")
        (package / "optim" / "__pycache__").touch()  # no folder can be made where the kernels would go
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path
    )
    assert run.stdout.split() == ["1"], run.stderr
    assert ("could not be compiled" in run.stderr) == (reason == "disabled"), run.stderr


def test_what_cannot_be_compiled_runs_in_eager_mode_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*kind: Any) -> Any:
        raise OSError("no memory for LLVM")

    monkeypatch.setattr(compiled, "_kernel", broken)
    kind = KINDS[0]
    expected = kind.task((40, 96), 8)
    actual = copy_of(expected)
    cpu_backend("eager")
    reference.step_parameter(*kind.advance(expected))
    cpu_backend("compiled")
    with pytest.warns(RuntimeWarning, match="could not be compiled.*no memory for LLVM") as caught:
        reference.step_parameter(*kind.advance(actual))
    assert len(caught) == 1
    assert_same(actual, expected, "first step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.step_parameter(*kind.advance(actual))


def test_auto_compiles_large_steps_and_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_backend("auto")
    monkeypatch.setattr(compiled, "_stepped", 0)
    monkeypatch.setattr(compiled, "has_compiler", lambda: True)
    assert not compiled.use_compiled(compiled.WORTHWHILE_ELEMENTS - 1)
    assert compiled.use_compiled(compiled.WORTHWHILE_ELEMENTS)
    monkeypatch.setattr(compiled, "_stepped", compiled.WORTHWHILE_IN_ALL - 2)
    assert not compiled.use_compiled(1)
    assert compiled.use_compiled(1)
    monkeypatch.setattr(compiled, "has_compiler", lambda: False)
    assert not compiled.use_compiled(compiled.WORTHWHILE_ELEMENTS)
    cpu_backend("eager")
    assert not compiled.use_compiled(1 << 40)
    cpu_backend("compiled")
    assert compiled.use_compiled(1)


def test_step_sums_all_its_parameters_up_before_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(compiled, "use_compiled", lambda elements: bool(seen.append(elements)))
    kind = KINDS[0]
    reference.step_parameters([kind.advance(kind.task((40, 96), 9)), kind.advance(kind.task((33,), 9))])
    assert seen == [40 * 96 + 33]


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        cpu_backend("fast")  # type: ignore[arg-type]
    assert cpu_backend() == "auto"
