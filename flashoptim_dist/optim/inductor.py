"""The kernel of the compiled CPU step, through torch.compile: one pass from codes to codes.

Numbers that change between steps come as tensors. The C++ is built without contraction to fused multiply-adds and
without unsafe mathematics, which would change bits. Formulas are written as torch.compile vectorizes them: 32-bit
lanes, shifts by one number for all, maxima of floats (those of integers it takes lane by lane), no 16-bit integers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import decode_momentum
from flashoptim_dist.formats.moments import (
    LARGEST_MOMENTUM_SCALE,
    TOP_SHIFT,
    lattice_of,
    shift_that_spans,
    top_of,
)
from flashoptim_dist.formats.rounding import leading_bits, momentum_noise, scramble, weight_noise
from flashoptim_dist.formats.spec import COARSEST_SHIFT, FINEST_SHIFT, MOMENTUM_LEVELS
from flashoptim_dist.optim.rules import Rule

logger = logging.getLogger(__name__)

AT_RUN_TIME = "given at run time"
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_INFINITY = 0x7F800000
_EXPONENT = 0x3F800000


@dataclasses.dataclass(frozen=True)
class UpdateKind:
    """What a kernel is compiled for. In ``scalars``, those given at run time are :data:`AT_RUN_TIME`.

    ``splits``: weights are bf16 and 8 bits; ``gives_noise``: another split, by ``eager``, needs the noise.
    """

    rule: Rule
    scalars: Any
    signed: tuple[bool, ...]
    compressed: bool
    gradient_dtype: torch.dtype
    scales_gradient: bool
    stochastic: bool
    splits: bool
    gives_noise: bool
    one_thread: bool


_numbers = itertools.count()


def _compile(function: Callable[..., None], one_thread: bool) -> Callable[..., None]:
    """Compile a function of tensors, and lists of them, whose 2-dim ones have a first dimension of any length."""
    # torch.compile keeps what it compiled by code object, and only so many for each.
    function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    options: dict[str, Any] = {
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.dynamic_threads": not one_thread,
    }
    compiled = torch.compile(function, fullgraph=True, options=options)
    called = False

    def call(*arguments: Any) -> None:
        nonlocal called
        if not called:
            for leaf in torch.utils._pytree.tree_leaves(arguments):
                if isinstance(leaf, Tensor) and leaf.ndim == 2:
                    torch._dynamo.mark_dynamic(leaf, 0)
            called = True
            try:
                with _bitcasts_in_registers():
                    compiled(*arguments)
                return
            except Exception:  # such as an old C++ compiler's; another reason shows again
                logger.info("compiled without bit casts in registers", exc_info=True)
        compiled(*arguments)

    return call


@contextlib.contextmanager
def _bitcasts_in_registers() -> Iterator[None]:
    """Let torch.compile take the bits of a register as another type of the same size at once.

    By itself it moves them through memory one by one, which takes half the time of the kernel. Bits are the same either
    way, so nothing else is wrong where torch's internals are not as expected here: the step is slower then.
    """
    try:
        from torch._inductor.codegen.cpp import CppVecOverrides
        from torch._inductor.virtualized import V

        one_by_one = CppVecOverrides.to_dtype_bitcast
    except (ImportError, AttributeError):
        one_by_one = None
    if one_by_one is None or platform.machine() not in ("x86_64", "AMD64"):
        yield
        return

    def to_dtype_bitcast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
        kinds = (torch.int32, torch.float32)
        if dtype not in kinds or src_dtype not in kinds or not hasattr(V.kernel, "_get_vec_type"):
            return one_by_one(x, dtype, src_dtype)
        return f"__builtin_bit_cast({V.kernel._get_vec_type(dtype)}, {x})"

    CppVecOverrides.to_dtype_bitcast = staticmethod(to_dtype_bitcast)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppVecOverrides.to_dtype_bitcast = staticmethod(one_by_one)  # type: ignore[method-assign]


@functools.cache
def update_kernel(kind: UpdateKind) -> Callable[..., None]:
    """Return the kernel that updates weights, moments (``values``: codes with bf16 ``scales`` [G, 1], or fp32) and
    ``correction`` in place.

    ``weight`` is bf16 where it splits, else the fp32 master. ``words`` receives what ``eager.store_master`` needs of
    the noise.
    """
    rule, signed, compressed, stochastic = kind.rule, kind.signed, kind.compressed, kind.stochastic
    scales_gradient, splits, gives_noise = kind.scales_gradient, kind.splits, kind.gives_noise
    make_scalars = type(kind.scalars)
    fields = {field.name: getattr(kind.scalars, field.name) for field in dataclasses.fields(kind.scalars)}
    changing = [name for name, value in fields.items() if value is AT_RUN_TIME]
    fixed = {name: value for name, value in fields.items() if value is not AT_RUN_TIME}

    def update(
        weight: Tensor,
        correction: Tensor | None,
        gradient: Tensor,
        factor: Tensor,
        values: list[Tensor],
        scales: list[Tensor],
        noise: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        words: Tensor | None,
        numbers: list[Tensor],
    ) -> None:
        scalars = make_scalars(**fixed, **dict(zip(changing, numbers)))
        gradient = gradient.to(torch.float32)
        if scales_gradient:
            gradient = gradient * factor
        master = weight
        if splits:
            assert correction is not None
            master = _merge(weight.to(torch.float32).view(torch.int32), correction).view(torch.float32)
        before = _decode(values, scales, signed) if compressed else values
        master, after = rule(master, gradient, tuple(before), scalars)
        hashed = None
        if stochastic:
            assert noise is not None
            hashed = scramble(noise[0] + noise[1], rotation)
        if compressed:
            if len(after) == 2:
                # What contain_overflow does, in a form that the compiler vectorizes.
                after = (torch.where(after[1] <= _LARGEST_FLOAT, after[0], 0.0), after[1])
            inverse = None
            for i in range(len(signed)):
                if not signed[i]:
                    codes, scale, inverse = _encode_variance(after[i], hashed, rotation)
                    values[i].copy_(codes)
                    scales[i].copy_(scale)
            for i in range(len(signed)):
                if signed[i]:
                    codes, scale = _encode_momentum(after[i] if inverse is None else after[i] * inverse, hashed)
                    values[i].copy_(codes)
                    scales[i].copy_(scale)
        else:
            for i in range(len(signed)):
                values[i].copy_(after[i])
        if splits:
            assert correction is not None
            bits, lower = _split(master.view(torch.int32), 0x80 if hashed is None else weight_noise(hashed))
            weight.copy_(bits.view(torch.float32))
            correction.copy_(lower)
        else:
            weight.copy_(master)
        if gives_noise:
            assert words is not None
            assert hashed is not None
            words.copy_(hashed & 0xFFFF)

    return _compile(update, kind.one_thread)


# The functions of ``formats`` in forms that torch.compile vectorizes.


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return fp32 2**exponent of int32."""
    return ((exponent + 127) << 23).view(torch.float32)


def _decode(values: list[Tensor], scales: list[Tensor], signed: tuple[bool, ...]) -> list[Tensor]:
    decoded, unit = list(values), None
    for i in range(len(signed)):
        if not signed[i]:
            word = scales[i].to(torch.float32).view(torch.int32) >> 16
            base, shift = lattice_of(word >> 3, (word & 7) + FINEST_SHIFT)
            code = values[i].to(torch.int32)
            pattern = base + code * (1 << shift)
            decoded[i] = torch.where(code == 0, 0, pattern).view(torch.float32)
            unit = (((pattern >> 1) & _EXPONENT) + _EXPONENT).view(torch.float32)
    for i in range(len(signed)):
        if signed[i]:
            momentum = decode_momentum(values[i], scales[i].squeeze(1))
            decoded[i] = momentum if unit is None else momentum * unit
    return decoded


def _encode_variance(variance: Tensor, words: Tensor | None, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales as fp32 that are bf16 values, and the inverse of the momentum's unit."""
    largest = torch.where(variance <= _LARGEST_FLOAT, variance, 0.0).amax(dim=-1, keepdim=True).view(torch.int32)
    smallest = torch.where(variance > 0.0, variance, torch.inf).amin(dim=-1, keepdim=True).view(torch.int32)
    top = top_of(largest)
    shift = shift_that_spans(top, smallest)
    base, _ = lattice_of(top, shift)
    if words is None:
        added = leading_bits(rotation, shift)
    else:
        # Shifts by one number for all, and products with powers of two, are what the compiler vectorizes.
        leading = (words >> (32 - COARSEST_SHIFT)) & ((1 << COARSEST_SHIFT) - 1)
        added = (leading.to(torch.float32) * _power_of_two(shift - COARSEST_SHIFT)).to(torch.int32)
    magnitude = variance.view(torch.int32) & 0x7FFFFFFF
    known = torch.where(magnitude < _INFINITY, magnitude, _INFINITY)
    known = torch.minimum(known, top << TOP_SHIFT)
    rounded = torch.maximum(known + added, base + (1 << shift))
    rounded = torch.where(known == 0, base, rounded)
    code = ((rounded - base) >> FINEST_SHIFT).to(torch.float32) * _power_of_two(FINEST_SHIFT - shift)
    scale = (((top << 3) + (shift - FINEST_SHIFT)) << 16).view(torch.float32)
    inverse = (_EXPONENT - ((rounded >> 1) & _EXPONENT)).view(torch.float32)
    return code.to(torch.int32), scale, inverse


def _encode_momentum(momentum: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    size = momentum.abs()
    largest = torch.where(size <= _LARGEST_FLOAT, size, 0.0).amax(dim=-1, keepdim=True)
    pattern = ((largest.view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=LARGEST_MOMENTUM_SCALE << 16)
    scale = pattern.view(torch.float32)
    size = torch.where(size == size, size, 0.0)
    code = torch.sqrt(size / torch.where(scale > 0, scale, 1.0)) * MOMENTUM_LEVELS
    code = torch.where(code <= MOMENTUM_LEVELS, code, float(MOMENTUM_LEVELS))
    # A copysign would be a call per 16 elements. The sign of a zero is lost in an integer.
    code = torch.where(momentum < 0.0, -code, code)
    if words is None:
        return torch.round(code).to(torch.int8), scale.to(torch.bfloat16)
    fixed = torch.round(code * 256.0).to(torch.int32)
    return ((fixed + momentum_noise(words)) >> 8).to(torch.int8), scale.to(torch.bfloat16)


def _merge(bits: Tensor, correction: Tensor) -> Tensor:
    """Return the patterns of fp32 master weights, of patterns that are bf16 values and 8 bits of correction."""
    magnitude = bits & 0x7FFFFFFF
    extended = (magnitude + correction.to(torch.int32) * 256).clamp(min=0)
    return torch.where(magnitude < _INFINITY, extended | (bits & -0x80000000), bits)


def _split(bits: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """Split patterns of fp32 weights into patterns that are bf16 values, and the 8 bits of correction below."""
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < _INFINITY
    extended = ((magnitude + noise) >> 8).clamp(max=0x7F7F7F)
    rounded = (extended + 0x80) >> 8
    weight = torch.where(finite, (rounded << 16) | (bits & -0x80000000), bits)
    return weight, torch.where(finite, extended - (rounded << 8), 0).to(torch.int8)
