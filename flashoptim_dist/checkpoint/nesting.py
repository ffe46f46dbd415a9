"""Nested dictionaries and lists: taken apart into leaves and put together again by torch's rule, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from flashoptim_dist.checkpoint.layout import Path_


def leaves(value: Any, path: Path_ = ()) -> list[tuple[Path_, Any]]:
    """Return the entries of nested dictionaries, and of lists that hold tensors or dictionaries, with paths."""
    if isinstance(value, Mapping):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, str(name)))]
    if isinstance(value, list) and any(isinstance(inner, torch.Tensor | Mapping) for inner in value):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [(path, value)]


def comes_apart(value: Any) -> bool:
    """Return whether ``nest`` undoes ``leaves``: all keys are strings, and no inner dictionary is empty."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and comes_apart(inner) for name, inner in value.items())
    if isinstance(value, list) and any(isinstance(inner, torch.Tensor | Mapping) for inner in value):
        return all(comes_apart(inner) for inner in value)
    return True


def is_plain(value: Any) -> bool:
    """Return whether a value is an immutable one of Python's own: a number, string, None, or a tuple of such."""
    if type(value) is tuple:
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def nest(entries: Iterable[tuple[Path_, Any]]) -> dict[Any, Any]:
    """Return what ``leaves`` took apart; numbers in a path are positions in lists."""
    root: dict[Any, Any] = {}
    for path, value in entries:
        target = root
        for piece in path[:-1]:
            target = target.setdefault(piece, {})
        target[path[-1]] = value
    return {name: _lists(value) for name, value in root.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _lists(item) for name, item in value.items()}
    if inner and all(isinstance(name, int) for name in inner):
        return [inner[index] for index in sorted(inner)]
    return inner


def digest_of(value: Any) -> str:
    """Return a hash of numbers, strings, tensors and arrays in containers: equal for equal values."""
    digest = hashlib.blake2b(digest_size=16)

    def feed(value: Any) -> None:
        if isinstance(value, Mapping):
            for name in sorted(value, key=repr):
                digest.update(repr(name).encode())
                feed(value[name])
        elif isinstance(value, list | tuple) and not all(isinstance(item, int) for item in value):
            digest.update(f"{type(value).__name__} {len(value)}".encode())
            for item in value:
                feed(item)
        elif isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray) and value.dtype != object:
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())

    feed(value)
    return digest.hexdigest()
