"""Triton's interpreter, without a cost that its tests would pay a thousand times per launch."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def patch_once_per_launch() -> None:
    """Have the interpreter replace Triton's functions by its own once per launch, not at every call in a kernel.

    It goes through all members of `triton.language` whenever a kernel calls a function, though the launch has replaced
    them already and keeps them replaced until it ends: half of the time of the kernels' tests. Where it keeps no scope
    of what it has replaced, as in other releases of Triton, it is left as it is.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None:
        return
    patch = interpreter._patch_lang

    @cache
    def languages(function: Any) -> list[Any]:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [language for language in (tl, tl.core) if any(value is language for value in seen)]

    def patch_what_is_not(function: Any) -> Any:
        needed = any(tl.core.is_builtin(language.load) for language in languages(function))
        return patch(function) if needed else scope()

    interpreter._patch_lang = patch_what_is_not
