"""What a layer keeps of its forward pass for the backward pass, and what it computes again."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_MATRIX_PRODUCTS = frozenset({"mm", "addmm", "linear"})
_ATTENTIONS = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_varlen_attn",
    }
)


def recompute_activations(layer: nn.Module, what: Literal["full", "selective", "none"]) -> nn.Module:
    """Wrap a layer so that its backward pass recomputes what is not kept; names of parameters stay the same.

    Args:
        layer: the layer.
        what: "full": keep the input. "selective": keep the results of attention and of every other matrix product too,
            which take most of the time and little of the memory. "none": keep all; returns the layer itself.
    """
    if what == "none":
        return layer
    if what == "full":
        return checkpoint_wrapper(layer)
    return checkpoint_wrapper(layer, context_fn=_selective_contexts)


def _selective_contexts() -> tuple[Any, Any]:
    counts = {False: 0, True: 0}  # matrix products so far in forward and in recomputation, which see the same ones

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = _name(operation)
        if name in _ATTENTIONS:
            return CheckpointPolicy.MUST_SAVE
        if name in _MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def _name(operation: torch._ops.OpOverload) -> str:
    return operation.name().rpartition("::")[2].partition(".")[0]
