"""What a run costs whose weights torchtitan keeps in fp32, and what bf16 weights would cost, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashoptim_dist.formats import correction_bits
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.state import bytes_per_entry, entry_specs
from flashoptim_dist.sharding import local_tensor


def describe_fp32_weights(optimizers: Iterable[FlashOptimizer]) -> str:
    """Return one line on what fp32 weights cost and how to change that; empty where no weight is fp32."""
    elements, now, then = 0, 0, 0
    fp32, total = 0, 0
    for optimizer in optimizers:
        bits = correction_bits(torch.bfloat16, optimizer._options["master_weight_bits"])
        for parameter, _, _, group in optimizer._named():
            record = optimizer._record(parameter)
            numel = local_tensor(parameter).numel()
            total += numel
            if parameter.dtype != torch.float32:
                continue
            fp32 += numel
            elements += numel
            now += 4 * numel + sum(bytes_per_entry(record.entries).values())
            specs = entry_specs(
                record.layout,
                record.moments,
                quantize=bool(group.get("quantize", optimizer._options["quantize"])),
                correction_bits=bits,
            )
            then += 2 * numel + sum(bytes_per_entry(specs).values())
    if not fp32:
        return ""
    share = "all weights" if fp32 == total else f"{100 * fp32 / total:.0f} % of the weights"
    return (
        f"{share} are fp32, so that moments alone are compressed: {now / elements:.2f} bytes per parameter for weight "
        f"and optimizer state, and 4 for the gradient. With --training.dtype bfloat16 these are "
        f"{then / elements:.2f} and 2, at {16 + bits}-bit master weights"
    )
