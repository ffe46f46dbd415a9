"""Attention within the documents of packed sequences: FlashAttention's variable lengths on GPUs, a mask elsewhere."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "packed_documents"
"""Name of the implementation in transformers' registry, for `config._attn_implementation`."""


def document_causal_mask(document_ids: Tensor) -> Tensor:
    """Which key each query may see: earlier or equal positions of its own document.

    Args:
        document_ids: int64, (batch, length).

    Returns:
        bool, (batch, 1, length, length), True where attention is allowed.
    """
    length = document_ids.shape[1]
    same_document = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same_document & causal)[:, None]


def document_bounds(position_ids: Tensor) -> Tensor:
    """Where documents begin and end in a batch whose sequences lie one after another.

    Args:
        position_ids: int64, (batch, length), 0 at the first position of each document and of the unused rest.

    Returns:
        int32, (documents + 1,): the first position of each document, then batch * length.
    """
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)


def attention_arguments(batch: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Keyword arguments for the model's forward that keep attention within the documents of `packing.collate`'s batch.

    On a GPU the bounds of the documents: 4 bytes each, where a mask would take a byte for each pair of positions.
    """
    if device.type != "cuda":
        return {"attention_mask": document_causal_mask(batch["document_ids"]).to(device)}
    # The batch is in host memory: on the device the number of bounds would need a synchronization.
    bounds = document_bounds(batch["position_ids"])
    return {"document_bounds": bounds.to(device, non_blocking=True), "longest": batch["position_ids"].shape[1]}


def implementation(device: torch.device) -> str:
    """The attention implementation of transformers to ask for, which takes what `attention_arguments` gives."""
    if device.type != "cuda":
        return "sdpa"
    AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    document_bounds: Tensor | None = None,
    longest: int = 0,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document, as transformers calls it.

    Args:
        module: the attention module.
        query: bf16 or fp16, (batch, heads, length, head dimension).
        key: as `query`, with the number of key and value heads, a divisor of the number of heads.
        value: as `key`.
        attention_mask: None; the bounds take its place.
        scaling: factor on the scores; must be 1 / sqrt(head dimension).
        document_bounds: what the function of that name returns; None: each sequence is one document.
        longest: no document is longer.
        dropout: must be 0.

    Returns:
        (batch, length, heads, head dimension), and no attention weights.
    """
    batch, heads, length, dimension = query.shape
    if attention_mask is not None or dropout != 0.0 or abs(scaling * dimension**0.5 - 1) > 1e-6:
        raise ValueError("attention within documents takes no mask, no dropout and the usual scaling alone")
    if document_bounds is None:
        document_bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
        longest = length
    grouped, arguments = _varlen_arguments()
    if not grouped and key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    flat = [x.transpose(1, 2).reshape(batch * length, x.shape[1], dimension) for x in (query, key, value)]
    attended = varlen_attn(flat[0], flat[1], flat[2], document_bounds, document_bounds, longest, longest, **arguments)
    assert isinstance(attended, Tensor)
    return attended.view(batch, length, heads, dimension), None


@functools.cache
def _varlen_arguments() -> tuple[bool, dict[str, Any]]:
    """Whether varlen_attn takes fewer key heads than query heads, and how this torch asks for causal attention."""
    known = inspect.signature(varlen_attn).parameters
    arguments: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        return True, {**arguments, "enable_gqa": True}
    return False, arguments
