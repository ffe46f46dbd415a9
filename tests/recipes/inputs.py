"""Small inputs for runs of the recipe: a model folder and rows of text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
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
