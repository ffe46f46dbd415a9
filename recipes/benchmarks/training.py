"""Training quality: a Llama of 27 M parameters on Python source, with each optimizer from the same start and data.

    python recipes/benchmarks/training.py --output OUT                           # a GPU: half a minute a run on an H100
    python recipes/benchmarks/training.py --cases reference nearest --seeds 3 4
    python recipes/benchmarks/training.py --smoke                                # seconds, on a CPU too

Cases: `reference` (fp32 weights under bf16 autocast, torch's AdamW), `nearest` and `stochastic` (FlashAdamW on bf16
weights), `official` (flashoptim's, where it is installed and there is a GPU). A seed is an order of the data; weights
start the same in all runs. Text: Python files of the standard library and of torch, tokenized by a BPE trained on it.
Writes training.json after every run, training.md and training.png.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from sysconfig import get_paths
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn

import flashoptim_dist as fod

Case = Literal["reference", "nearest", "stochastic", "official"]
NAMES = {
    "reference": "torch AdamW, fp32 weights and states",
    "nearest": "FlashAdamW, nearest",
    "stochastic": "FlashAdamW, stochastic",
    "official": "flashoptim FlashAdamW",
}
VOCABULARY, WARM_UP, PEAK_LR = 4096, 60, 1.5e-3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with each optimizer over the seeds and compare."""

    cases: tuple[Case, ...] = ("reference", "nearest", "stochastic", "official")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1000
    batch: int = 64
    """Sequences a step."""
    sequence_length: int = 512
    beta2: float = 0.95
    text_bytes: int = 90_000_000
    """At most so much text."""
    smoke: bool = False
    """A tiny model, text and run."""
    output: Path = Path("runs/benchmark-training")
    """Folder for training.json, training.md and training.png."""


def read_tokens(text_bytes: int) -> Tensor:
    """Return the text's tokens: int64 [tokens]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    roots = [Path(get_paths()["stdlib"]), Path(torch.__file__).parent]
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    texts: list[str] = []
    size = 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 500 < len(text) < 200_000:
            texts.append(text)
            size += len(text)
        if size > text_bytes:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[:1500], trainer)
    return torch.tensor([token for encoded in tokenizer.encode_batch(texts) for token in encoded.ids])


def make_model(options: Options, device: torch.device) -> nn.Module:
    """Return the Llama, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    width, layers = (64, 2) if options.smoke else (512, 8)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=options.sequence_length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(device)


def make_optimizer(case: Case, model: nn.Module, beta2: float) -> torch.optim.Optimizer:
    """Return a case's optimizer; weights have been cast."""
    settings: dict[str, Any] = {"lr": PEAK_LR, "betas": (0.9, beta2), "weight_decay": 0.1}
    if case == "reference":
        return torch.optim.AdamW(model.parameters(), **settings)
    if case == "official":
        from flashoptim import FlashAdamW

        official: torch.optim.Optimizer = FlashAdamW(model.parameters(), **settings)
        return official
    return fod.FlashAdamW(model.named_parameters(), rounding=case, **settings)


def train(case: Case, seed: int, tokens: Tensor, options: Options, device: torch.device) -> dict[str, Any]:
    """Return the training losses of all steps and the validation loss of one run."""
    length, start = options.sequence_length, time.perf_counter()
    held_out = min(1_000_000, len(tokens) // 10) // length * length
    validation, training = tokens[:held_out].view(-1, length)[:1500], tokens[held_out:]
    model = make_model(options, device)
    in_fp32 = case == "reference"
    if not in_fp32:
        fod.cast_model(model, torch.bfloat16)
    optimizer = make_optimizer(case, model, options.beta2)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(batch: Tensor) -> Tensor:
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_fp32):
            loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss.float()

    losses = []
    for step in range(options.steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / options.steps)) * 0.9 + 0.1
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARM_UP) * decay
        firsts = torch.randint(0, len(training) - length, (options.batch,), generator=generator)
        loss = loss_of(torch.stack([training[first : first + length] for first in firsts.tolist()]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        found = [loss_of(part) for part in validation.split(50)]
        weights = torch.tensor([len(part) for part in validation.split(50)], device=device)
        validation_loss = float((torch.stack(found) * weights).sum() / weights.sum())
    return {
        "case": case,
        "seed": seed,
        "validation_loss": validation_loss,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.perf_counter() - start,
        "losses": torch.stack(losses).tolist(),
    }


def table_of(results: list[dict[str, Any]]) -> str:
    """Return the validation losses by case and seed as Markdown."""
    seeds = sorted({row["seed"] for row in results})
    lines = ["| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |", "|---" * (len(seeds) + 2) + "|"]
    for case, name in NAMES.items():
        losses = {row["seed"]: row["validation_loss"] for row in results if row["case"] == case}
        if losses:
            cells = [f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds]
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {sum(losses.values()) / len(losses):.4f} |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot training losses smoothed over 25 steps, and each run's distance from the reference of its seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def smooth(losses: list[float]) -> Tensor:
        width = min(25, len(losses))
        return torch.tensor(losses).unfold(0, width, 1).mean(dim=1)

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True)
    colors = dict(zip(NAMES, ("black", "tab:blue", "tab:red", "tab:gray"), strict=True))
    references = {row["seed"]: smooth(row["losses"]) for row in results if row["case"] == "reference"}
    labelled: set[str] = set()
    for row in results:
        label = NAMES[row["case"]] if row["case"] not in labelled else None
        labelled.add(row["case"])
        curve = smooth(row["losses"])
        above.plot(curve, color=colors[row["case"]], linewidth=0.8, label=label)
        if row["case"] != "reference" and row["seed"] in references:
            below.plot(curve - references[row["seed"]], color=colors[row["case"]], linewidth=0.8)
    above.set(ylabel="training loss", yscale="log")
    above.legend()
    below.axhline(0.0, color="black", linewidth=0.5)
    below.set(xlabel="step", ylabel="loss above the fp32 reference")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(options: Options) -> None:
    """Run everything, and write what there is after every run."""
    if options.smoke:
        text = {"text_bytes": 300_000, "sequence_length": 32, "batch": 2, "steps": 4}
        options = Options(**{**asdict(options), **text, "seeds": options.seeds[:1]})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    options.output.mkdir(parents=True, exist_ok=True)
    tokens = read_tokens(options.text_bytes)
    print(f"{len(tokens):,} tokens, {card}", flush=True)
    results: list[dict[str, Any]] = []
    for seed in options.seeds:
        for case in options.cases:
            if case == "official" and (importlib.util.find_spec("flashoptim") is None or device.type != "cuda"):
                continue
            results.append(train(case, seed, tokens, options, device))
            row = results[-1]
            print(f"{NAMES[case]}, seed {seed}: {row['validation_loss']:.4f} in {row['seconds']:.0f} s", flush=True)
            facts = {"card": card, "torch": torch.__version__, "options": asdict(options), "results": results}
            (options.output / "training.json").write_text(json.dumps(facts, default=str) + "\n", encoding="utf-8")
            (options.output / "training.md").write_text(table_of(results), encoding="utf-8")
    draw(results, options.output / "training.png")
    print(table_of(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
