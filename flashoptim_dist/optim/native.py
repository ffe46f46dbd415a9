"""The kernel of the compiled CPU step, in Numba: one pass from codes to codes, group by group, in registers.

The functions of ``formats`` and the rules, restated for scalars, as the Triton kernels restate them for blocks. Bits
are the definition's: every product and sum is rounded on its own (Numba contracts nothing unless it is told to), roots
and quotients are the processor's exact ones. Numba widens sums of int32 to 64 bits; every value that is kept is cut
back, so that LLVM uses 32-bit lanes.

What a kernel is compiled for (:class:`Kind`) is constant inside; all else is an argument. Compiled kernels are kept on
disk, next to this file or, where that is not writable, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from numba.core import cgutils, registry

from flashoptim_dist.formats.moments import LARGEST_MOMENTUM_SCALE, LARGEST_TOP, SPAN, TOP_SHIFT
from flashoptim_dist.formats.rounding import HASH_MULTIPLIER, HASH_SHIFTS, HASH_STRIDE, as_int32
from flashoptim_dist.formats.spec import COARSEST_SHIFT, FINEST_SHIFT, GROUP_SIZE, MOMENTUM_LEVELS

logger = logging.getLogger(__name__)

ADAM, LION, SGD, PLAIN_SGD = range(4)
"""Rules. Plain SGD has no momentum."""

FP32, BF16, FP16 = range(3)
"""Dtypes of weights and gradients. The two of 16 bits come as arrays of int16."""


class Kind(NamedTuple):
    """What a kernel is compiled for. ``bits``: of the correction, 0 for none."""

    rule: int
    weight: int
    bits: int
    gradient: int
    compressed: bool
    stochastic: bool
    nesterov: bool


_SIGN, _MAGNITUDE, _INFINITY, _EXPONENT = -0x80000000, 0x7FFFFFFF, 0x7F800000, 0x3F800000
_LARGEST_FLOAT = np.finfo(np.float32).max
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

_STRIDE, _MULTIPLIER = as_int32(HASH_STRIDE), as_int32(HASH_MULTIPLIER)
_FIRST_SHIFT, _SECOND_SHIFT = HASH_SHIFTS
_FIRST_MASK, _SECOND_MASK = ((1 << (32 - shift)) - 1 for shift in HASH_SHIFTS)

_LEVELS, _INVERSE_LEVELS, _FINE = np.float32(MOMENTUM_LEVELS), np.float32(1.0 / MOMENTUM_LEVELS), np.float32(256.0)
_INVERSE_SPAN = np.float32(1.0 / SPAN)
_LARGEST_SCALE = LARGEST_MOMENTUM_SCALE << 16
_BELOW_TOP_UNIT = (1 << TOP_SHIFT) - 1

_LARGEST_BF16, _LARGEST_FP16 = 0x7F7F, 0x7BFF
_FP16_INFINITY, _FP16_REBIAS = 0x7C00, 112 << 23
_FP16_SMALLEST_NORMAL = np.float32(2.0**-14)
_LARGEST_FP16_IN_FP32 = (_LARGEST_FP16 << 13) + 0x1FFF

_CONSTANTS = (
    GROUP_SIZE,
    MOMENTUM_LEVELS,
    FINEST_SHIFT,
    COARSEST_SHIFT,
    TOP_SHIFT,
    LARGEST_TOP,
    SPAN,
    LARGEST_MOMENTUM_SCALE,
    *HASH_SHIFTS,
    _MULTIPLIER,
    _STRIDE,
)

_inlined: Callable[[Any], Any] = numba.njit(nogil=True, error_model="numpy")


@numba.extending.intrinsic
def _stack(typing_context, dtype):
    """Return memory for a group's numbers on the stack: the compiler sees that no argument lies there."""

    def generate(context, builder, signature, arguments):
        return cgutils.alloca_once(builder, context.get_data_type(dtype.dtype), size=GROUP_SIZE)

    return numba.types.CPointer(dtype.dtype)(dtype), generate


@numba.extending.intrinsic
def _memory(typing_context, address, dtype):
    """Return the memory at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(dtype.dtype)(address, dtype), generate


@_inlined
def _bits(x):
    return np.float32(x).view(np.int32)


@_inlined
def _float(bits):
    return np.int32(bits).view(np.float32)


# ------------------------------------------------------------------------------------------- weights


@_inlined
def _from_fp16(word, correction, bits):
    extended = max(np.int32(((word & 0x7FFF) << bits) + correction), np.int32(0))
    if bits <= 13:
        normal = np.int32((extended << (13 - bits)) + _FP16_REBIAS)
    else:
        normal = np.int32((extended >> (bits - 13)) + _FP16_REBIAS)
    # What fp32 cannot hold is cut off: rounded up, it could reach the next weight.
    rounded = np.float32(extended)
    cut = _bits(rounded) - (1 if np.int32(rounded) > extended else 0)
    small = _bits(_float(cut) * np.float32(2.0 ** (-24 - bits)))
    magnitude = normal if extended >= (1 << (10 + bits)) else small
    if (word & 0x7FFF) >= _FP16_INFINITY:
        magnitude = np.int32(_INFINITY | ((word & 0x3FF) << 13))
    return _float(magnitude | ((word & 0x8000) << 16))


@_inlined
def _to_number(word, kind):
    """Return the fp32 value of a stored number without correction."""
    if kind == FP32:
        return np.float32(word)
    if kind == BF16:
        return _float(np.int32(word) << 16)
    return _from_fp16(np.int32(word), np.int32(0), 0)


@_inlined
def _merge(word, correction, kind, bits):
    """Return an fp32 master weight: ``formats.merge``."""
    if bits == 0:
        return _to_number(word, kind)
    if kind == FP16:
        return _from_fp16(np.int32(word), np.int32(correction), bits)
    pattern = np.int32(np.int32(word) << 16)
    magnitude = np.int32(pattern & _MAGNITUDE)
    extended = max(np.int32(magnitude + (np.int32(correction) << (16 - bits))), np.int32(0))
    return _float((extended | (pattern & _SIGN)) if magnitude < _INFINITY else pattern)


@_inlined
def _extend(master, kind, bits, noise, noise_bits, stochastic):
    """Return the magnitude bits of a 16-bit dtype and ``bits`` more: ``formats.weights._extend``."""
    magnitude = np.int32(_bits(master) & _MAGNITUDE)
    dropped = (16 if kind == BF16 else 13) - bits
    unit = np.int32(0)
    if dropped > 0:
        unit = np.int32(noise >> (noise_bits - dropped)) if stochastic else np.int32(1 << (dropped - 1))
    if kind == BF16:
        return np.int32(np.int32(magnitude + unit) >> dropped)
    size = min(abs(master), _FP16_SMALLEST_NORMAL)
    if dropped <= 0:
        normal = np.int32(min(np.int32(magnitude - _FP16_REBIAS), np.int32(_LARGEST_FP16_IN_FP32)) << -dropped)
        small = np.int32(np.rint(size * np.float32(2.0 ** (24 + bits))))
    else:
        normal = np.int32(np.int32(magnitude - _FP16_REBIAS + unit) >> dropped)
        small = np.int32((np.int32(np.rint(size * np.float32(2.0 ** (24 + bits + dropped)))) + unit) >> dropped)
    return normal if abs(master) >= _FP16_SMALLEST_NORMAL else small


@_inlined
def _non_finite(magnitude, kind):
    """Return the magnitude of the Inf or NaN of 16 bits that is like one of fp32."""
    infinity = 0x7F80 if kind == BF16 else _FP16_INFINITY
    return np.int32(infinity | (infinity >> 1)) if magnitude > _INFINITY else np.int32(infinity)


@_inlined
def _to_nearest(master, kind):
    """Return the magnitude of the nearest 16-bit number, ties to even."""
    magnitude = np.int32(_bits(master) & _MAGNITUDE)
    if kind == BF16:
        return np.int32(np.int32(magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16)
    normal = np.int32(np.int32(magnitude - _FP16_REBIAS + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    small = np.int32(np.rint(min(abs(master), _FP16_SMALLEST_NORMAL) * np.float32(2.0**24)))
    return min(normal if abs(master) >= _FP16_SMALLEST_NORMAL else small, np.int32(_FP16_INFINITY))


@_inlined
def _split(master, kind, bits, words, stochastic):
    """Return the pattern of a 16-bit weight, and its correction: ``formats.split``, or rounded without one."""
    pattern = _bits(master)
    magnitude = np.int32(pattern & _MAGNITUDE)
    largest = _LARGEST_BF16 if kind == BF16 else _LARGEST_FP16
    correction = np.int32(0)
    if bits:
        half = 1 << (bits - 1)
        extended = _extend(master, kind, bits, np.int32(words & 0xFF), 8, stochastic)
        extended = min(extended, np.int32((largest << bits) + half - 1))
        word = np.int32(np.int32(extended + half) >> bits)
        correction = np.int32(extended - (word << bits))
    elif stochastic:
        noise = np.int32(((words & 0xFF) << 8) | ((words >> 8) & 0xFF))
        word = min(_extend(master, kind, 0, noise, 16, True), np.int32(largest))
    else:
        word = _to_nearest(master, kind)
    finite = magnitude < _INFINITY
    word = word if finite else _non_finite(magnitude, kind)
    return np.int32(word | ((pattern >> 16) & 0x8000)), correction if finite else np.int32(0)


# ------------------------------------------------------------------------------------------- noise and lattices


@_inlined
def _scramble(x, rotation):
    """Return a noise word: ``rounding.scramble``."""
    x = np.int32(x ^ ((x >> _FIRST_SHIFT) & _FIRST_MASK))
    x = np.int32(x * _MULTIPLIER)
    x = np.int32(x ^ ((x >> _SECOND_SHIFT) & _SECOND_MASK))
    return np.int32(x + rotation)


@_inlined
def _base_of(top, shift):
    """Return the pattern that code 0 stands for: ``moments.lattice_of``."""
    unit = 1 << shift
    last = ((top << TOP_SHIFT) + (unit - 1)) & -unit
    return max(np.int32(last - 255 * unit), np.int32(0))


@_inlined
def _shift_that_spans(top, smallest):
    """Return k: ``moments.shift_that_spans``."""
    units = np.int32((top << (TOP_SHIFT - FINEST_SHIFT)) - ((smallest - 1) >> FINEST_SHIFT))
    exponent = _bits(np.float32(units) * _INVERSE_SPAN) >> 23
    return np.int32(min(max(exponent - (126 - FINEST_SHIFT), FINEST_SHIFT), COARSEST_SHIFT))


# ------------------------------------------------------------------------------------------- the kernel


def step_kernel(kind: Kind) -> Callable[..., None]:
    """Return the kernel that steps the groups of 32 elements from a first one up to, not including, a last one, in
    place.

    Its arguments after these two: elements and groups of a row, whose last group may be a partial one; the addresses of
    contiguous weight (fp32, or patterns of 16 bits), correction (int8 or int16), gradient, momentum and its scales
    (int8 and bf16; or fp32 and none), variance and its scales (uint8 and bf16, or the same), and of the noise's hash
    inputs (int32, of the first element of every group from ``starts_from`` on); that group; or, where there is no such
    address, the hash input of the tensor's first element; the step's rotation; the rule's numbers (fp32, see
    ``compiled``). An address is 0 where there is nothing.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    rule, weight_kind, bits, gradient_kind, compressed, stochastic, nesterov = kind

    weight_dtype = np.float32 if weight_kind == FP32 else np.int16
    gradient_dtype = np.float32 if gradient_kind == FP32 else np.int16
    correction_dtype = np.int16 if bits == 16 else np.int8
    momentum_dtype, variance_dtype = (np.int8, np.uint8) if compressed else (np.float32, np.float32)

    def step(
        first_group,
        last_group,
        row_length,
        groups_per_row,
        weight_address,
        correction_address,
        gradient_address,
        momentum_address,
        momentum_scales_address,
        variance_address,
        variance_scales_address,
        starts_address,
        starts_from,
        first_start,
        rotation,
        numbers,
    ):
        weight = numba.carray(_memory(weight_address, weight_dtype), (0,), weight_dtype)
        correction = numba.carray(_memory(correction_address, correction_dtype), (0,), correction_dtype)
        gradient = numba.carray(_memory(gradient_address, gradient_dtype), (0,), gradient_dtype)
        momentum = numba.carray(_memory(momentum_address, momentum_dtype), (0,), momentum_dtype)
        variance = numba.carray(_memory(variance_address, variance_dtype), (0,), variance_dtype)
        momentum_scales = numba.carray(_memory(momentum_scales_address, np.int16), (0,), np.int16)
        variance_scales = numba.carray(_memory(variance_scales_address, np.int16), (0,), np.int16)
        starts = numba.carray(_memory(starts_address, np.int32), (0,), np.int32)

        masters = numba.carray(_stack(np.float32), (GROUP_SIZE,), np.float32)
        firsts = numba.carray(_stack(np.float32), (GROUP_SIZE,), np.float32)
        seconds = numba.carray(_stack(np.float32), (GROUP_SIZE,), np.float32)
        noise = numba.carray(_stack(np.int32), (GROUP_SIZE,), np.int32)
        # Read once: for all that the compiler knows, the weights lie in the same place.
        factor, decay, l2, has_l2 = numbers[0], numbers[1], numbers[2], numbers[3] != _ZERO
        lr, beta1, rest1 = numbers[4], numbers[5], numbers[6]
        beta2 = rest2 = correction2 = eps = _ZERO
        if rule in (ADAM, LION):
            beta2, rest2 = numbers[7], numbers[8]
        if rule == ADAM:
            correction2, eps = numbers[9], numbers[10]
        row, column = first_group // groups_per_row, first_group % groups_per_row
        for group in range(first_group, last_group):
            first, count = row * row_length + column * GROUP_SIZE, min(row_length - column * GROUP_SIZE, GROUP_SIZE)
            column += 1
            if column == groups_per_row:
                row, column = row + 1, 0
            # Unsigned: an index that may be negative, for all that the compiler knows, costs three times as much.
            offset = np.uint64(first)
            scale, base, shift = _ONE, np.int32(0), np.int32(FINEST_SHIFT)
            if compressed and rule != PLAIN_SGD:
                scale = _float(np.int32(momentum_scales[np.uint64(group)]) << 16)
            if compressed and rule == ADAM:
                word = np.int32(variance_scales[np.uint64(group)])
                shift = np.int32((word & 7) + FINEST_SHIFT)
                base = _base_of(np.int32(word >> 3), shift)

            largest, smallest = np.int32(0), np.int32(_INFINITY)
            for lane in range(count):
                i = offset + np.uint64(lane)
                w = _merge(weight[i], correction[i] if bits else 0, weight_kind, bits)
                g = _to_number(gradient[i], gradient_kind) * factor
                m, v = _ZERO, _ZERO
                if rule != PLAIN_SGD:
                    if compressed:
                        y = np.float32(momentum[i]) * _INVERSE_LEVELS
                        m = y * abs(y) * scale
                    else:
                        m = np.float32(momentum[i])
                if rule == ADAM:
                    if compressed:
                        code = np.int32(variance[i])
                        pattern = np.int32(base + (code << shift))
                        m = m * _float(((pattern >> 1) & _EXPONENT) + _EXPONENT)
                        v = _float(0 if code == 0 else pattern)
                    else:
                        v = np.float32(variance[i])

                if rule != LION and has_l2:
                    g = g + w * l2
                if rule == ADAM:
                    m = m * beta1 + g * rest1
                    v = v * beta2 + (g * g) * rest2
                    w = w * decay - m / (np.sqrt(v) / correction2 + eps) * lr
                elif rule == LION:
                    direction = m * beta1 + g * rest1
                    m = m * beta2 + g * rest2
                    sign = _ONE if direction > _ZERO else (-_ONE if direction < _ZERO else _ZERO)
                    w = w * decay - sign * lr
                else:
                    direction = g
                    if rule == SGD:
                        m = m * beta1 + g * rest1
                        direction = m * beta1 + g if nesterov else m
                    w = w * decay - direction * lr

                masters[lane] = w
                if not compressed:
                    if rule != PLAIN_SGD:
                        momentum[i] = m
                    if rule == ADAM:
                        variance[i] = v
                else:
                    firsts[lane] = m
                    if rule == ADAM:
                        # As in rules.contain_overflow.
                        firsts[lane] = m if v <= _LARGEST_FLOAT else _ZERO
                        seconds[lane] = v
                        pattern = np.int32(_bits(v) & _MAGNITUDE)
                        finite = pattern < _INFINITY
                        largest = max(largest, pattern if finite else np.int32(0))
                        smallest = min(smallest, pattern if finite and pattern > 0 else np.int32(_INFINITY))

            if stochastic:
                if starts_address:
                    start = starts[np.uint64(group - starts_from)]
                else:
                    start = np.int32(first_start + first * _STRIDE)
                for lane in range(count):
                    noise[lane] = _scramble(np.int32(start + np.int32(lane * _STRIDE)), rotation)

            if compressed and rule == ADAM:
                top = np.int32(min((largest + _BELOW_TOP_UNIT) >> TOP_SHIFT, LARGEST_TOP))
                shift = _shift_that_spans(top, smallest)
                base = _base_of(top, shift)
                variance_scales[np.uint64(group)] = np.int16((top << 3) + (shift - FINEST_SHIFT))
                end = np.int32(top << TOP_SHIFT)
                lowest = np.int32(base + (1 << shift))
                mask, rest = np.int32((1 << shift) - 1), np.int32(32 - shift)
                for lane in range(count):
                    pattern = min(np.int32(_bits(seconds[lane]) & _MAGNITUDE), end)
                    word = noise[lane] if stochastic else rotation
                    rounded = max(np.int32(pattern + (np.int32(word >> rest) & mask)), lowest)
                    rounded = np.int32(base if pattern == 0 else rounded)
                    variance[offset + np.uint64(lane)] = np.uint8(np.int32(rounded - base) >> shift)
                    firsts[lane] = firsts[lane] * _float(_EXPONENT - ((rounded >> 1) & _EXPONENT))

            if compressed and rule != PLAIN_SGD:
                largest = np.int32(0)
                for lane in range(count):
                    pattern = np.int32(_bits(firsts[lane]) & _MAGNITUDE)
                    largest = max(largest, pattern if pattern < _INFINITY else np.int32(0))
                largest = np.int32(min(np.int32((largest + 0xFFFF) & -0x10000), _LARGEST_SCALE))
                momentum_scales[np.uint64(group)] = np.int16(largest >> 16)
                divisor = _float(largest) if largest > 0 else _ONE
                for lane in range(count):
                    m = firsts[lane]
                    size = abs(m) if m == m else _ZERO
                    size = np.sqrt(size / divisor) * _LEVELS
                    size = size if size <= _LEVELS else _LEVELS
                    sign = np.int32(_bits(m) >> 31)
                    if stochastic:
                        code = np.int32(np.rint(size * _FINE))
                        code = np.int32(np.int32((code ^ sign) - sign + ((noise[lane] >> 8) & 0xFF)) >> 8)
                    else:
                        code = np.int32(np.rint(size))
                        code = np.int32((code ^ sign) - sign)
                    momentum[offset + np.uint64(lane)] = np.int8(code)

            for lane in range(count):
                if weight_kind == FP32:
                    weight[offset + np.uint64(lane)] = masters[lane]
                else:
                    word, lower = _split(masters[lane], weight_kind, bits, noise[lane], stochastic)
                    weight[offset + np.uint64(lane)] = np.int16(word)
                    if bits:
                        correction[offset + np.uint64(lane)] = lower

    whole, word = numba.types.int64, numba.types.int32
    signature = numba.types.void(*[whole] * 13, word, word, numba.types.float32[::1])
    step.__qualname__ = f"step_{_identity(kind)}"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(signature, cache=True, **options)(step)
    except Exception:  # no folder to keep it in, a full disk, a damaged file
        logger.info("the kernel of the CPU step cannot be kept on disk", exc_info=True)
        return numba.njit(signature, **options)(step)


def _identity(kind: Kind) -> str:
    """Return a name for a kernel's files that nothing else has.

    Numba writes a file that lists the compiled versions of a function and then the versions, and believes the list: if
    two processes write at once, or one is killed, it may name the code of something else, here to be run on addresses.
    So there is one version for each name: of a kind, this source, the format's constants, Numba and the processor.
    """
    machine = registry.cpu_target.target_context.codegen().magic_tuple()
    source = Path(__file__).read_bytes()
    return hashlib.sha256(repr((kind, _CONSTANTS, source, numba.__version__, machine)).encode()).hexdigest()[:24]
