"""A training text that is on every machine: the documented functions of Python's own standard library."""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
)
PROMPT_END = "\n# What this function does:\n"


def stdlib_functions(root: Path | None = None) -> list[tuple[str, str]]:
    """(prompt, completion) of every documented function under `root`, the running Python's library by default.

    The prompt is the function's signature and source without its docstring, the completion is the docstring. Files are
    read in sorted order and equal pairs kept once, so one Python installation always gives one list. Empty where the
    library ships no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    pairs: dict[tuple[str, str], None] = {}
    for path in _source_files(folder):
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some library files hold escapes that newer Pythons warn about
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue  # templates and deliberately broken files are no functions to learn from
        lines = text.split("\n")  # as ast counts them; splitlines() would also split at form feeds
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                pair = _prompt_and_docstring(node, lines)
                if pair is not None:
                    pairs.setdefault(pair)
    return list(pairs)


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _SKIPPED_FOLDERS and not path.name.startswith(("__pycache__", "config-")):
                yield from _source_files(path)
        elif path.suffix == ".py":
            yield path


def _prompt_and_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    docstring = ast.get_docstring(node, clean=False)
    statement = node.body[0]
    if docstring is None or statement.lineno == node.lineno:
        return None
    completion = inspect.cleandoc(docstring).strip()
    if not completion:
        return None
    kept = lines[node.lineno - 1 : statement.lineno - 1] + lines[statement.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).strip() + PROMPT_END, completion
