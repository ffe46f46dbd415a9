"""What a run is: one dataclass, which tyro turns into the command line."""

from __future__ import annotations

import argparse
import contextlib
import glob
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from .errors import BadInput
from .shards import pattern_root

_SEEDS = 2**43
"""Each epoch has a seed of its own, a million times this one and more, and torch takes 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tune a Llama under FSDP2 with a sharded, compressed AdamW."""

    config: str = ""
    """A file of recipes/configs by its name ("llama3_8b") or any YAML file: option names (with _ for -) and values that
    replace the defaults. Options on the command line come on top."""
    model: str = "debug"
    """A Hugging Face directory with a LlamaForCausalLM; "debug" (5 M parameters, random weights); or the shapes alone,
    with random weights and the debug model's tokenizer, of "llama3_1b", "llama3_8b" or "llama3_70b"."""
    data: str = "stdlib"
    """"stdlib" (the documented functions of Python's standard library) or a .jsonl file whose rows hold "messages",
    "prompt" and "completion", or "text". Of a folder or a pattern ("data/part-*.jsonl") of such files the rows are read
    as they are needed, and never all in memory."""
    data_workers: int = 1
    """Processes per rank that read, encode and pack the rows of a folder or pattern; 0: the rank does that itself."""
    validation_data: str | None = None
    """A .jsonl file, folder or pattern of its own for the validation loss. Without it a fixed part of the data is set
    aside."""
    validation_fraction: float = 0.05
    """Part of the rows set aside for validation, chosen by a hash of each row's content."""
    output: str = ""
    """Run folder: checkpoints, metrics.jsonl, TensorBoard files. Empty: runs/MODEL-DATA-OPTIMIZER."""

    optimizer: Literal["flash_adamw", "adamw"] = "flash_adamw"
    """flash_adamw: bf16 weights with compressed states. adamw: torch's AdamW with fp32 weights and states."""
    steps: int = 60
    """Optimizer steps of this run. A run that had finished is continued for as many steps again."""
    lr: float | None = None
    """Peak learning rate. Left out: 3e-3 for the debug model, which starts from nothing, and 1e-5 for any other."""
    warmup_steps: int = 10
    """Steps of linear warm-up to the peak; the first step already has lr / warmup-steps."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this part of the peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    skips_in_a_row: int = 2
    """Most steps in a row that are left out because their gradient is not finite; one more ends the run, as does a last
    step that would be left out, and any loss that is not finite. While steps are left out nothing is saved."""

    sequence_length: int = 256
    """Tokens per packed sequence."""
    global_batch: int = 8
    """Packed sequences per optimizer step, over all ranks and accumulation steps."""
    micro_batch: int = 4
    """Most sequences per rank and forward pass; a rank with more of the global batch accumulates gradients."""
    long_rows: Literal["truncate", "skip"] = "truncate"
    """What happens to a row longer than the sequence length."""
    activation_checkpointing: Literal["full", "selective", "none"] = "full"
    """full: keep only each layer's input and recompute the rest in the backward pass. selective: keep what attention
    and every other matrix product give, and recompute what is cheap. none: keep all."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    loss: Literal["auto", "chunked", "liger"] = "auto"
    """What computes the loss and its gradient within the head, from the logits of a few positions at a time. chunked:
    torch. liger: Liger's kernel, on GPUs. auto: that where liger-kernel is installed, else in chunks."""
    gradient_release: bool = False
    """Step each layer during the backward pass and free its gradient, so that no more than two layers' gradients exist
    at once. --clip-norm then goes by an estimate of the global norm. For flash_adamw."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over ranks. auto: fp32, but bf16 for flash_adamw on two GPUs, where the sum
    of two bf16 gradients has the same bits either way and half as many bytes travel."""
    replicate: int = 1
    """Copies of the whole set of shards (HSDP): 1 cuts the weights over all ranks, N over each of N parts of them."""

    evaluate_every: int = 30
    """Steps between validation losses; there is always one before and one after. 0: only these two."""
    validation_sequences: int = 64
    """Most packed sequences that a validation loss is taken over; 0 takes all."""
    sample_tokens: int = 32
    """Most tokens that the model writes after the last step, continuing a validation row; 0: no sample."""
    save_every: int = 20
    """Steps between checkpoints; there is always one at the end. 0: only that one."""
    keep_last: int = 2
    """Checkpoints to keep."""
    resume: str = "auto"
    """"auto" goes on from the newest checkpoint if there is one, a number from that step's, "never" from none."""
    when_finished: Literal["continue", "stop"] = "continue"
    """What to do on resuming a run that had reached its last step: train `steps` more, or leave it as it is."""
    seed: int = 0
    """Seed of the initial weights, the data order and stochastic rounding."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPUs where there are any."""

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, given or by default."""
        if self.lr is not None:
            return self.lr
        return 3e-3 if self.model == "debug" else 1e-5

    @property
    def run_folder(self) -> Path:
        """Where this run writes."""
        if self.output:
            return Path(self.output)
        data = (pattern_root(self.data) if glob.has_magic(self.data) else Path(self.data)).stem
        return Path("runs") / f"{Path(self.model).name or 'model'}-{data}-{self.optimizer}"

    def check(self) -> None:
        """Raise BadInput for a value no run can have."""
        for name in ("steps", "sequence_length", "global_batch", "micro_batch", "keep_last", "replicate"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "a number of at least 1")
        for name in (
            *("warmup_steps", "evaluate_every", "validation_sequences", "sample_tokens", "save_every", "seed"),
            *("skips_in_a_row", "data_workers"),
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or a positive number")
        _require(self.seed < _SEEDS, "seed", self.seed, f"less than {_SEEDS}")
        for name in ("model", "data"):
            _require(getattr(self, name) != "", name, "empty", "a name or a path")
        for name, value in (
            *(("lr", self.peak_lr), ("weight_decay", self.weight_decay)),
            ("clip_norm", self.clip_norm),
        ):
            _require(math.isfinite(value) and value >= 0, name, value, "finite and not negative")
        # Without it a weight that has had no gradient yet becomes 0 / 0; less than this is 0 in fp32.
        _require(1e-30 <= self.eps < math.inf, "eps", self.eps, "finite and at least 1e-30")
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        fraction = self.validation_fraction
        _require(0 < fraction < 1, "validation_fraction", fraction, "between 0 and 1, both excluded")
        if self.gradient_release and self.optimizer != "flash_adamw":
            raise BadInput(
                f"--gradient-release steps layer by layer, which --optimizer {self.optimizer} cannot; give"
                " --no-gradient-release or --optimizer flash_adamw"
            )
        resume_is_known = self.resume in ("auto", "never") or self.resume.isdecimal()
        _require(resume_is_known, "resume", self.resume, 'a step number, "auto" or "never"')


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")


CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def read_config_file(name: str) -> Config:
    """The config of a file of recipes/configs, or of any YAML file. Raises BadInput; no collective inside."""
    named = CONFIGS / f"{name}.yaml"
    path = named if named.is_file() else Path(name)
    known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"cannot read the config {name} ({error.strerror or error}); give a YAML file, or one of {known}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise BadInput(f"config {path} holds no options; write lines such as 'lr: 1.0e-5'")
    hints = get_type_hints(Config)
    for option, value in values.items():
        if option not in hints or option == "config":
            raise BadInput(f"config {path} sets {option!r}, which is no option; --help lists them")
        values[option] = _converted(f"{option!r} of config {path}", value, hints[option])
    return Config(**values, config=name)


def _converted(name: str, value: Any, wanted: Any) -> Any:
    """A value of a YAML file as an option's type; BadInput where it is of another."""
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    for kind in kinds:
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return value
        elif get_origin(kind) is tuple:
            if isinstance(value, list) and len(value) == len(get_args(kind)):
                return tuple(_converted(name, item, inner) for item, inner in zip(value, get_args(kind)))
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    note = ""
    if isinstance(value, str) and float in kinds:
        note = "; YAML reads 1e-5 as text: write 1.0e-5"
    if get_origin(wanted) is Literal:
        raise BadInput(f"{name} is {value!r}; it must be one of {', '.join(get_args(wanted))}")
    raise BadInput(f"{name} is {value!r}, which is no {getattr(wanted, '__name__', wanted)}{note}")


def read_command_line(arguments: list[str] | None = None) -> Config:
    """The checked config of the command line. Usage errors are tyro's: rank 0 prints them, all ranks exit with 2."""
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", nargs="?")
        named = first.parse_known_args(arguments)[0].config
        config = tyro.cli(Config, args=arguments, default=read_config_file(named) if named else Config())
    config.check()
    return config
