"""The compiled CPU step: the bits of the eager one, whatever the tensors, the threads and the files of kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flashoptim_dist.kernels import launching
from torch import Tensor
from torch.utils._pytree import tree_map

import flashoptim_dist as fod
from flashoptim_dist.optim import compiled, cpu_backend, reference
from flashoptim_dist.optim.reference import ParameterStep
from tests.optim.kinds import KINDS, SHAPES, Kind, assert_same, copy_of, needs_compiler


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


class Wrapped(Tensor):
    """A tensor whose numbers are another's, as those of a collective that is on its way."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, Wrapped) else leaf, (args, kwargs or {}))
        return function(*args, **kwargs)


@needs_compiler
@pytest.mark.parametrize("odd", ["wrapped gradient", "negative weight", "negative moment", "strided correction"])
def test_tensors_that_are_not_what_lies_at_their_address(odd: str) -> None:
    kind = Kind("adamw", weight=torch.float32 if odd == "negative weight" else torch.bfloat16, quantize=False)
    cpu_backend("compiled")
    for shape in ((40, 96), (300, 1000)):
        plain = kind.task(shape, 3)
        other = copy_of(plain)
        if odd == "wrapped gradient":
            other.gradient = Wrapped(other.gradient)
        elif odd == "negative weight":
            other.weight = torch._neg_view(-other.weight)
        elif odd == "negative moment":
            other.moments[0].values = torch._neg_view(-other.moments[0].values)
        else:
            other.correction = other.correction.t().contiguous().t()
        for task in (plain, other):
            task.step, (task.scalars, rule) = 1, kind.arithmetic(1)
            reference.step_parameter(task, rule)
        for moment in other.moments:
            moment.values = moment.values.resolve_neg()
        other.weight = other.weight.resolve_neg()
        assert_same(other, plain, odd)


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=needs_compiler)])
@pytest.mark.parametrize("lost", ["gradient", "weight", "moment", "zero tensor"])
def test_tensors_without_memory_are_an_error(backend: Any, lost: str) -> None:
    kind = Kind("adamw")
    cpu_backend(backend)
    for shape in ((40, 96), (33, 50)):
        _lose(kind, shape, lost)


def _lose(kind: Kind, shape: tuple[int, ...], lost: str) -> None:
    task, rule = kind.advance(kind.task(shape, 3))
    if lost == "zero tensor":
        task.gradient = torch._efficientzerotensor(shape, dtype=torch.bfloat16)
        task.moments[1].values = torch._efficientzerotensor(shape, dtype=torch.uint8)
    else:
        tensor = task.moments[0].values if lost == "moment" else getattr(task, lost)
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        reference.step_parameter(task, rule)


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=needs_compiler)])
def test_autograd_and_other_optimizers_notice_the_step(backend: Any) -> None:
    cpu_backend(backend)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = fod.FlashAdamW([("w", weight)])
    y = torch.randn(4, 64, requires_grad=True) @ weight
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    # The correction of one optimizer does not belong to the weight that another one wrote.
    shared = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    first, second = fod.FlashAdamW([("p", shared)]), fod.FlashLion([("p", shared)])
    for one in (first, second):
        shared.grad = torch.randn(64, 64).bfloat16()
        one.step()
    assert torch.equal(first.master_weight(shared), shared.float())


@needs_compiler
def test_scalars_at_the_edge_of_fp32() -> None:
    for options in ({"lr": 1e39}, {"weight_decay": 1e-50}, {"lr": 1e20, "weight_decay": 1e20}):
        for make in (fod.FlashAdam, fod.FlashAdamW):
            results = []
            for backend in ("eager", "compiled"):
                cpu_backend(backend)  # type: ignore[arg-type]
                weight = torch.nn.Parameter(torch.tensor([1.0, torch.inf, 0.0, -2.0] * 16).bfloat16())
                optimizer = make([("w", weight)], **options)
                weight.grad = torch.ones(64, dtype=torch.bfloat16)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    optimizer.step()
                results.append(weight.detach().clone())
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_a_negative_view_of_an_fp16_gradient_keeps_its_sign() -> None:
    cpu_backend("eager")  # torch's copy_ of such a view into fp32 loses it
    weight = torch.nn.Parameter(torch.ones(40, dtype=torch.float16))
    weight.grad = torch._neg_view(torch.full((40,), 0.25, dtype=torch.float16))
    fod.FlashSGD([("w", weight)], lr=1.0).step()
    assert torch.equal(weight, torch.full((40,), 1.25, dtype=torch.float16))


@needs_compiler
def test_without_threads_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, threads = Kind("adamw"), torch.get_num_threads()
    expected = kind.task((300, 1000), 7)
    actual = copy_of(expected)
    cpu_backend("compiled")
    try:
        torch.set_num_threads(1)
        reference.step_parameter(*kind.advance(expected))
        torch.set_num_threads(3)
        pool = ThreadPoolExecutor(2)
        pool.shutdown()  # as at the end of the interpreter
        monkeypatch.setattr(compiled, "_pool", lambda threads, process: pool)
        reference.step_parameter(*kind.advance(actual))
    finally:
        torch.set_num_threads(threads)
    assert_same(actual, expected, "one thread")


@needs_compiler
def test_an_interrupted_step_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in one thread ends the step when the others have ended theirs, and they take no new shares."""
    threads, running, calls = torch.get_num_threads(), threading.Event(), []
    others_done = threading.Event()

    def kernel(first: int, last: int, *arguments: Any) -> None:
        calls.append(first)
        if threading.current_thread() is threading.main_thread():
            assert running.wait(30)
            raise KeyboardInterrupt
        running.set()
        time.sleep(0.3)
        others_done.set()

    kind = Kind("adamw")
    try:
        torch.set_num_threads(2)
        shares = compiled.Shares()
        shares.add(kind.advance(kind.task((300, 1000), 7))[0], kernel)
        with pytest.raises(KeyboardInterrupt):
            shares.run()
        assert others_done.is_set()
        assert len(calls) <= 3
    finally:
        torch.set_num_threads(threads)


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
@pytest.mark.parametrize("reason", ["no folder", "damaged", "disabled"])
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
    elif reason == "damaged":
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
        subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=240)
        kept = [*(tmp_path / "cache").rglob("*.nb[ic]")]
        assert kept
        for path in kept:
            path.write_bytes(path.read_bytes()[:20])
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
