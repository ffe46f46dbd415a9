"""Square roots with the same bits on every machine.

``torch.sqrt`` of fp32 on CPU goes through a vector math library where torch has one, and that rounds some results the
wrong way: 0.6 % of them on a CPU with AVX-512, none with AVX2, 16 % on its portable path. Codes would depend on the
kind of CPU, and a compiled step would differ from an eager one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MOST_THREADS_FOR_NUMPY = 4


def numpy_takes_roots() -> bool:
    """Return whether roots on CPU are numpy's, which are exact and use one thread."""
    return torch.get_num_threads() <= _MOST_THREADS_FOR_NUMPY


def square_root(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the correctly rounded square root (IEEE 754) of a tensor of any dtype and device; NaN below zero.

    Args:
        x: any shape.
        out: takes the result if given, same shape and dtype; may be ``x``.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.sqrt(x) if out is None else torch.sqrt(x, out=out)
    if out is None:
        out = torch.empty_like(x)
    if not numpy_takes_roots():
        # Rounding to fp32 an fp64 root that is off by one fp64 ulp is exact: no root of an fp32 number comes so close
        # to the middle between two fp32 numbers. Three passes, but by all threads.
        return out.copy_(x.to(torch.float64).sqrt_())
    with np.errstate(invalid="ignore"):
        np.sqrt(x.detach().numpy(), out=out.numpy())
    return out
