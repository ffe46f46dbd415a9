"""The options that the adapter of torchtitan 0.2.2 adds to torchtitan's; see ``v0_2``.

torchtitan merges dataclasses by the types of their fields, which therefore can't be postponed: no
``from __future__ import annotations`` here. It loses docstrings of fields, so that their help stands in the types.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass
class Optimizer:
    """What ``--optimizer.`` offers beside torchtitan's own options (name, lr, beta1, beta2, eps, weight_decay)."""

    master_weight_bits: Annotated[
        Literal[24, 32] | None,
        arg(help="Bits of the master weight of a 16-bit parameter: 24 (1 byte more), 32 (2 bytes more), None (none)."),
    ] = 24
    quantize: Annotated[bool, arg(help="False keeps the moments in fp32.")] = True
    rounding: Annotated[Literal["stochastic", "nearest"], arg(help="How moments and master weights are rounded.")] = (
        "stochastic"
    )
    seed: Annotated[
        int, arg(help="Seed of the stochastic rounding; results depend on it, never on the number of ranks.")
    ] = 0
    momentum: Annotated[float, arg(help="Momentum of FlashSGD and FlashSGDW; 0 keeps no moments.")] = 0.0
    dampening: Annotated[float, arg(help="Dampening of SGD's momentum.")] = 0.0
    nesterov: Annotated[bool, arg(help="Nesterov momentum for SGD.")] = False
    maximize: Annotated[bool, arg(help="Ascend instead of descend.")] = False
    decouple_lr: Annotated[
        bool, arg(help="Decay by 1 - weight_decay * lr / initial lr (AdamW, FlashLion, FlashSGDW).")
    ] = False
    decay_norms_and_embeddings: Annotated[
        bool, arg(help="False: weight_decay 0 for norms, biases and embeddings, by their names.")
    ] = True
    no_decay: Annotated[
        list[str], arg(help="Regular expressions; parameters whose names they match have weight_decay 0.")
    ] = field(default_factory=list)
    check_numerics: Annotated[
        bool, arg(help="Count the updates too small to change a weight: optimizers[i].numerics_report().")
    ] = False
    offload_states: Annotated[
        bool, arg(help="Keep the states in pinned host memory and stream them through the step.")
    ] = False


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig, for ``--job.custom_config_module``."""

    optimizer: Optimizer = field(default_factory=Optimizer)
