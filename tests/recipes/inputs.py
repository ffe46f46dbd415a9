"""Small inputs for runs of the recipe: a model folder and rows of text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
DEBUG_MODEL = ROOT / "recipes" / "llama_support" / "debug_model"


def write_tiny_model(folder: Path, *, spoil: bool = False, **changes: object) -> Path:
    """A Llama of 0.3 M parameters, in bf16, with the debug model's tokenizer. `spoil` puts a NaN into its last norm."""
    values: dict[str, object] = {
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **changes,
    }
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    if spoil:
        with torch.no_grad():
            model.model.norm.weight[3] = float("nan")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEBUG_MODEL / name, folder / name)
    return folder


def write_rows(path: Path, count: int = 60) -> Path:
    """Short rows of all three forms."""
    rows = []
    for i in range(count):
        if i % 3 == 0:
            rows.append({"prompt": f"{i} plus {i} is ", "completion": f"{2 * i}, an even number"})
        elif i % 3 == 1:
            chat = [{"role": "user", "content": f"count to {i}"}, {"role": "assistant", "content": f"1 to {i}"}]
            rows.append({"messages": chat})
        else:
            rows.append({"text": f"a line about the number {i} and its neighbour {i + 1}"})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def small_run(folder: Path) -> dict[str, Any]:
    """Options of a run of six steps on a tiny model and a few rows, which are written into `folder`."""
    return {
        "model": str(write_tiny_model(folder / "tiny")),
        "data": str(write_rows(folder / "rows.jsonl")),
        "sequence_length": 48,
        "global_batch": 6,
        "micro_batch": 2,
        "steps": 6,
        "warmup_steps": 2,
        "lr": 1e-2,
        "save_every": 2,
        "evaluate_every": 4,
        "validation_fraction": 0.1,
        "device": "cpu",
    }


def saved_checkpoint(run: Path, step: int) -> dict[str, Any]:
    """All that a run saved after `step` steps, nested."""
    target = run / f"state-{step}.pt"
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:08d}", target)
    loaded: dict[str, Any] = torch.load(target, weights_only=False)
    return loaded


def saved_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Its tensors, by their keys with a / before each."""
    entries = _flat(saved_checkpoint(run, step)).items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _flat(inner, f"{prefix}/{key}").items()}


def assert_same_state(first: Path, second: Path, step: int) -> None:
    """Both runs saved the same bits after `step` steps."""
    left, right = saved_tensors(first, step), saved_tensors(second, step)
    assert left.keys() == right.keys()
    assert sum("exp_avg" in name for name in left) > 10
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
