"""Launching without Triton's dispatch: the first launch compiles, later ones go straight to the compiled kernel.

Triton's own dispatch binds, specializes and hashes every argument and compares every global the kernel reads, about
0.1 ms a launch. A caller that knows that its arguments keep their types and alignment needs none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Launcher:
    """Launches of one Triton kernel whose arguments, per ``key``, keep dtypes, alignment and compile-time values.

    ``constants``: names of the kernel's compile-time arguments (upper case by convention), in its order.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        self.constants = [name for name in kernel.arg_names if name.isupper()]

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        warps: int,
        registers: int | None = None,
    ) -> None:
        """Launch on the current device and stream.

        Args:
            key: of the compiled kernel; the current device must be part of it.
            grid: number of programs.
            arguments: the run-time arguments, in the kernel's order.
            constants: the compile-time arguments, in the kernel's order, after the run-time ones.
            warps: per program.
            registers: most per thread; None leaves them to the compiler.
        """
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)](*arguments, *constants.values())
            return
        # Contraction to fused multiply-adds is off, so that all kernels of a rule give the same bits.
        options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
        if registers is not None:
            options["maxnreg"] = registers
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled

    def prepared(
        self, key: Hashable, grid: tuple[int], arguments: Sequence[Any], constants: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Return a function that launches with just these arguments, once the key was launched; else None."""
        compiled = self._compiled.get(key)
        if compiled is None:
            return None
        run = compiled[(*grid, 1, 1)]
        fixed = (*arguments, *constants.values())
        return lambda: run(*fixed)
