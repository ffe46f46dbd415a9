"""torchtitan's Trainer with gradient release: parameters are stepped during the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.trainer import Trainer

from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.checks import check_switch
from flashoptim_dist.release import GradientRelease, enable_gradient_release


@dataclass(kw_only=True, slots=True)
class GradientReleaseConfig:
    """Options of gradient release."""

    enable: bool = False
    """Step each layer during the backward pass and free its gradients. Needs --training.disable_cuda_graphs."""

    clipping: Literal["global", "parameter", "none"] = "global"
    """What training.max_norm bounds: an estimate of the global norm (its rule is in docs/training-loop.md), the norm of
    each parameter's gradient, or nothing."""


class FlashTrainer(Trainer):
    """``Trainer`` that can release gradients; without ``gradient_release.enable`` it is torchtitan's own.

    With it, the exact clipping by the global norm is not to be had: gradients are gone before the norm is known. The
    logged grad_norm is the exact norm of the update, before clipping (0 with clipping "none", which takes no norm). The
    running norms behind the estimate are not in the checkpoint and begin anew on resume.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's config, and gradient release."""

        gradient_release: GradientReleaseConfig = field(default_factory=GradientReleaseConfig)

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            _check(self)

    def __init__(self, config: Config) -> None:
        """Build everything as torchtitan does, then switch gradient release on if the config says so.

        Raises:
            ValueError: an option that gradient release cannot go with, by name.
        """
        _check(config)  # command-line values come after the config was made
        super().__init__(config)
        self._release: GradientRelease | None = None
        options = config.gradient_release
        if not options.enable:
            return
        foreign = [type(one).__name__ for one in self.optimizers if not isinstance(one, FlashOptimizer)]
        if foreign:
            raise ValueError(
                f"gradient_release.enable steps layer by layer, which {foreign[0]} cannot: give its parameters to one "
                "of this library's optimizers"
            )
        max_norm = config.training.max_norm
        self._release = enable_gradient_release(
            self.model_parts,
            list(self.optimizers),
            accumulation_steps=self.gradient_accumulation_steps,
            clip_global_norm=max_norm if options.clipping == "global" else None,
            clip_parameter_norm=max_norm if options.clipping == "parameter" else None,
        )
        self.metrics_processor.log = _with_norm(self._release, self.metrics_processor.log)

    def train_step(self, data_iterator: Any) -> None:
        """Take one step. A save that is still copying the state has to be done before the backward changes it."""
        if self._release is not None:
            self.checkpointer.maybe_wait_for_staging()
        super().train_step(data_iterator)


def _check(config: Any) -> None:
    options = config.gradient_release
    check_switch({"enable": options.enable}, "enable", "gradient_release.")
    if options.clipping not in ("global", "parameter", "none"):
        raise ValueError(f"gradient_release.clipping is {options.clipping!r}, and must be global, parameter or none")
    if not options.enable:
        return
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "gradient_release.enable frees gradients during the backward pass, and CUDA graphs keep them at fixed "
            "addresses: add --training.disable_cuda_graphs"
        )
    for name in ("pipeline_parallel_degree", "expert_parallel_degree"):
        if getattr(config.parallelism, name) > 1:
            raise ValueError(f"gradient_release.enable is not supported with parallelism.{name} > 1")
    tied = config.model_spec is not None and getattr(config.model_spec.model, "enable_weight_tying", False)
    if tied and isinstance(config.loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "gradient_release.enable steps a tied embedding once, and the loss in chunks (ChunkedLossWrapper) runs "
            "lm_head's backward pass before that of the rest: set config.loss to its loss_fn, CrossEntropyLoss.Config"
        )


def _with_norm(release: GradientRelease, log: Callable[..., None]) -> Callable[..., None]:
    """Return the metrics' ``log`` with the norm that release took: torchtitan's own saw no gradient."""

    def log_with_norm(step: int, average: float, largest: float, norm: float, **kwargs: Any) -> None:
        taken = release.gradient_norm
        log(step, average, largest, norm if taken is None else float(taken), **kwargs)

    return log_with_norm
