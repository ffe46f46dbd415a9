"""Parameters whose weights stand in a checkpoint in parts, as torchtitan 0.3 saves its fused projections.

There ``...wqkv.weight`` is one parameter, and its optimizer states lie under that name, but the model's entries are
``...wq.weight``, ``...wk.weight`` and ``...wv.weight``: hooks take it apart and put it together. Its rows are, for each
head of keys and values in turn, the rows of the query heads that belong to it, its key rows and its value rows
(``models/common/attention.py`` there). ``w13`` of its fused SwiGLU is ``w1`` and ``w3`` stacked in a dimension of their
own before the last (``overrides/fused_swiglu.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert.lazy import ComputedTensor, LazyTensor

_QKV = ("wq", "wk", "wv")


@dataclass(frozen=True)
class FusedWeight:
    """A parameter and the weights that it is made of.

    Attributes:
        name: of the parameter.
        parts: names of the weights, in order.
        rows_of_parts: how many rows of each follow one another; None where they are stacked.
    """

    name: str
    parts: tuple[str, ...]
    rows_of_parts: tuple[int, ...] | None

    def weight(self, weights: Mapping[str, LazyTensor]) -> LazyTensor:
        """Return the parameter's weight, put together from its parts as it is read."""
        parts = [weights[name] for name in self.parts]
        first = parts[0]
        if self.rows_of_parts is None:
            shape = (*first.shape[:-1], len(parts), first.shape[-1])

            def rows(start: int, stop: int) -> Tensor:
                return torch.stack([part.rows(start, stop) for part in parts], dim=-2)

        else:
            shape = (sum(part.length for part in parts), *first.shape[1:])

            def rows(start: int, stop: int) -> Tensor:
                return torch.cat([parts[index].rows(*span) for index, span in self._spans(start, stop)])

        return ComputedTensor(shape, first.dtype, f"{self.name!r} ({', '.join(self.parts)})", rows)

    def part_shape(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one part of a parameter of this shape."""
        if self.rows_of_parts is None:
            return (*shape[:-2], shape[-1])
        return (shape[0] // sum(self.rows_of_parts) * self.rows_of_parts[index], *shape[1:])

    def part(self, index: int, compute: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        """Return rows of one part; ``compute`` returns rows of the parameter."""
        if self.rows_of_parts is None:
            return compute(start, stop).select(-2, index).contiguous()
        length = self.rows_of_parts[index]
        before, whole = sum(self.rows_of_parts[:index]), sum(self.rows_of_parts)
        found = []
        while start < stop:
            block, row = divmod(start, length)
            count = min(stop - start, length - row)
            first = block * whole + before + row
            found.append(compute(first, first + count))
            start += count
        return torch.cat(found) if len(found) != 1 else found[0]

    def _spans(self, start: int, stop: int) -> list[tuple[int, tuple[int, int]]]:
        """Return what rows of the parameter are: pieces of a part, as its index and (start, stop) in it."""
        assert self.rows_of_parts is not None
        whole = sum(self.rows_of_parts)
        found = []
        for block in range(start // whole, -(-stop // whole)):
            end = block * whole
            for index, length in enumerate(self.rows_of_parts):
                begin, end = end, end + length
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    offset = block * length - begin
                    found.append((index, (first + offset, last + offset)))
        return found


def fused_weight(name: str, weights: Mapping[str, LazyTensor], head_dim: int | None) -> FusedWeight | None:
    """Return how a parameter is made of weights that stand in its place; None if there are none of these names.

    Args:
        name: of a parameter that has optimizer states, and no weight under its own name.
        weights: the weights, by name.
        head_dim: rows of one attention head, where nothing in the checkpoint tells them.

    Raises:
        CheckpointFormatError: the parts don't fit together, or ``head_dim`` is needed and not given.
    """
    prefix, _, last = name.rpartition(".")
    if last == "w13":
        for ends in (("w1.weight", "w3.weight"), ("w1_EFD", "w3_EFD")):
            parts = tuple(f"{prefix}.{end}" for end in ends)
            if all(part in weights for part in parts):
                _check_parts(name, [weights[part] for part in parts], whole=True)
                return FusedWeight(name, parts, None)
    above, _, module = prefix.rpartition(".")
    if module == "wqkv":
        parts = tuple(f"{above}.{part}.{last}".removeprefix(".") for part in _QKV)
        if all(part in weights for part in parts):
            _check_parts(name, [weights[part] for part in parts], whole=False)
            return FusedWeight(name, parts, _rows_of_heads(name, above, parts, weights, head_dim))
    return None


def _check_parts(name: str, parts: list[LazyTensor], *, whole: bool) -> None:
    """See that parts have one dtype and shape, of which the number of rows may differ unless ``whole``."""
    alike = {(part.dtype, part.shape if whole else part.shape[1:]) for part in parts}
    if len(alike) != 1:
        found = ", ".join(f"{part.where}: {part.dtype} {part.shape}" for part in parts)
        raise CheckpointFormatError(f"the weights that {name!r} is made of don't fit together: {found}")


def _rows_of_heads(
    name: str, above: str, parts: tuple[str, ...], weights: Mapping[str, LazyTensor], head_dim: int | None
) -> tuple[int, int, int]:
    q, k, v = (weights[part].length for part in parts)
    head_dim = _head_dim_by_others(above, q, weights) or head_dim
    if head_dim is None:
        raise CheckpointFormatError(
            f"{name!r} is a fused parameter, whose rows alternate between those of {', '.join(parts)} by attention "
            "heads, and nothing in the checkpoint tells the size of a head: give it (--head-dim, head_dim=) as the "
            "model's config has it, such as 16 for torchtitan's llama3 debug model and 128 for Llama 3 8B"
        )
    if head_dim < 1 or k != v or k % head_dim or q % k:
        raise CheckpointFormatError(
            f"heads of {head_dim} rows don't fit the weights that {name!r} is made of, which have {q}, {k} and {v} rows"
        )
    return q // k * head_dim, head_dim, head_dim


def _head_dim_by_others(above: str, query_rows: int, weights: Mapping[str, LazyTensor]) -> int | None:
    """Return a head's size where another weight of the same attention has it: of its norm, or one number per head."""
    attention = above.rpartition(".")[0]
    norm, sinks = weights.get(f"{attention}.q_norm.weight"), weights.get(f"{attention}.sinks")
    if norm is not None and len(norm.shape) == 1:
        return norm.numel
    if sinks is not None and len(sinks.shape) == 1 and sinks.numel:
        return query_rows // sinks.numel
    return None
