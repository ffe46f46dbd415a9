"""Cross-entropy of a large vocabulary, a few positions at a time, so that the logits of all never exist together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import LlamaForCausalLM

from .errors import BadInput
from .packing import IGNORED

LOGITS_BYTES = 2**29
"""Size of the fp32 logits that are made at a time."""


class LlamaWithLoss(LlamaForCausalLM):
    """A LlamaForCausalLM whose forward can return the summed loss instead of the logits; names and weights stay.

    The head computes the loss within its own forward, so FSDP2 gathers its weight for just that time.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        head = LossHead(config.hidden_size, config.vocab_size, bias=False, device="meta")
        head.weight = self.lm_head.weight  # the same parameter: tied embeddings stay tied, no random number is drawn
        self.lm_head = head

    def forward(self, input_ids: Tensor | None = None, *, loss_labels: Tensor | None = None, **arguments: Any) -> Any:
        """Return the loss summed over labels (fp32, 0-dim) if `loss_labels` are given; else as LlamaForCausalLM does.

        Args:
            input_ids: int64, (batch, length).
            loss_labels: int64, (batch, length): the token that follows each position, or IGNORED.
            arguments: further arguments of LlamaForCausalLM.forward.
        """
        if loss_labels is None:
            return super().forward(input_ids=input_ids, **arguments)
        hidden = self.model(input_ids=input_ids, **arguments).last_hidden_state
        return self.lm_head(hidden, loss_labels)


class LossHead(nn.Linear):
    """The output projection: logits, or with labels the loss."""

    use_liger = False
    """Take the loss with Liger's kernel, as :func:`uses_liger` allows it."""

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits (..., vocabulary), or the cross-entropy summed over `labels` (fp32, 0-dim)."""
        if labels is None:
            return super().forward(input)
        hidden, labels = input.flatten(0, -2), labels.flatten()
        # Liger's makes no gradient of the weight where the input needs none (all layers frozen).
        needs_weight_alone = torch.is_grad_enabled() and self.weight.requires_grad and not hidden.requires_grad
        if self.use_liger and not needs_weight_alone:
            return liger_cross_entropy(hidden, self.weight, labels)
        return summed_cross_entropy(hidden, self.weight, labels)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, logits_bytes: int = LOGITS_BYTES) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[label] over the labels that are not IGNORED.

    Products are taken in the dtype of `hidden` and `weight`, all else in fp32 (fp64 for fp64). The gradients are made
    in the forward pass, while a chunk's logits are there, and only scaled in backward: beyond them, at most twice
    `logits_bytes` are held.

    Args:
        hidden: (positions, width), floating.
        weight: (vocabulary, width), same dtype.
        labels: int64, (positions,).
        logits_bytes: most bytes of fp32 logits at a time.

    Returns:
        fp32 (fp64 for fp64), 0-dim; differentiable once in `hidden` and `weight`.
    """
    loss: Tensor = _SummedCrossEntropy.apply(hidden, weight, labels, logits_bytes)
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, logits_bytes: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.zeros_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        # Fixed chunks and masks rather than a selection of the labelled positions, whose number the host doesn't know.
        chunk = max(1, logits_bytes // (4 * weight.shape[0]))
        for start in range(0, len(labels), chunk):
            part, wanted = hidden[start : start + chunk], labels[start : start + chunk]
            counts = wanted != IGNORED
            index = torch.where(counts, wanted, 0)[:, None]
            logits = F.linear(part, weight).to(exact)
            logits -= logits.amax(dim=1, keepdim=True)
            picked = logits.gather(1, index)
            sums = logits.exp_().sum(dim=1, keepdim=True)
            total += (sums.log() - picked).squeeze(1).masked_fill(~counts, 0.0).sum()
            if hidden_gradient is None and weight_gradient is None:
                continue
            # d loss / d logits = softmax - one_hot(label)
            probabilities = logits.div_(sums)
            probabilities.scatter_add_(1, index, torch.full_like(picked, -1.0))
            probabilities.masked_fill_(~counts[:, None], 0.0)
            gradient = probabilities.to(part.dtype)
            del logits, probabilities
            if hidden_gradient is not None:
                torch.mm(gradient, weight, out=hidden_gradient[start : start + chunk])
            if weight_gradient is not None:
                weight_gradient.addmm_(gradient.T, part)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # In place: the head's gradient is large. Autograd notices a second backward pass and refuses it.
        hidden, weight = (None if saved is None else saved.mul_(loss_gradient) for saved in ctx.saved_tensors)
        return hidden, weight, None, None


def uses_liger(choice: str, device: torch.device) -> bool:
    """Whether `--loss` means Liger's kernel on a device.

    "liger" does, "chunked" does not; "auto" does on a GPU where liger-kernel can be imported. Raises BadInput for
    "liger" where it cannot run.
    """
    if choice == "chunked" or (choice == "auto" and device.type != "cuda"):
        return False
    if device.type != "cuda":
        raise BadInput(f"--loss liger runs on GPUs, and this run is on {device.type}; give --loss chunked")
    try:
        import liger_kernel.transformers.functional  # noqa: F401
    except Exception as error:  # of any type: an old release may not go with this torch or Triton
        if choice == "auto":
            return False
        raise BadInput(
            f"--loss liger: liger-kernel cannot be imported ({type(error).__name__}: {error}); pip install"
            " liger-kernel, or give --loss chunked"
        ) from error
    return True


def liger_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same as `summed_cross_entropy` by Liger's kernel, which makes logits for as many bytes as `hidden` has."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED, reduction="sum")
    return loss.float()
