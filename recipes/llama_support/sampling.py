"""What the model writes: a greedy continuation, for a look at the end of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import attention_arguments
from .config import Config
from .encode import Document
from .report import SAMPLE_FILE
from .world import World

_LONGEST_PROMPT = 128
_PROMPT_OF_TEXT = 16


def prompt_of(document: Document) -> list[int]:
    """The tokens before the first one that is trained; of a text, which is trained from the start, its first 16."""
    untrained = int(document.trained.argmax()) if document.trained.any() else len(document.tokens)
    length = untrained if untrained > 1 else _PROMPT_OF_TEXT
    return [int(token) for token in document.tokens[:length][-_LONGEST_PROMPT:]]


@torch.no_grad()
def continue_greedily(
    model: nn.Module, prompt: list[int], count: int, *, longest: int, stop: int | None, device: torch.device
) -> list[int]:
    """The most probable next tokens, at most `count` of them, up to and without `stop`. All ranks must call alike.

    Every token takes a whole forward pass: FSDP2 gathers each layer's weights for it.
    """
    model.eval()
    tokens = list(prompt)
    for _ in range(min(count, longest - len(prompt))):
        input_ids = torch.tensor([tokens])
        batch = {
            "position_ids": torch.arange(len(tokens))[None],
            "document_ids": torch.zeros_like(input_ids),
        }
        logits: Tensor = model(
            input_ids=input_ids.to(device),
            position_ids=batch["position_ids"].to(device),
            use_cache=False,
            logits_to_keep=1,
            **attention_arguments(batch, device),
        ).logits
        token = int(logits[0, -1].argmax())
        if token == stop:
            break
        tokens.append(token)
    model.train()
    return tokens[len(prompt) :]


def write_sample(config: Config, model: nn.Module, tokenizer: Any, document: Document, world: World) -> str:
    """Let the model continue a row, and keep prompt and continuation in the run folder; returns them as text.

    All ranks must call. The text is empty with `--sample-tokens 0`.
    """
    if config.sample_tokens == 0:
        return ""
    prompt = prompt_of(document)
    continuation = continue_greedily(
        model,
        prompt,
        config.sample_tokens,
        longest=config.sequence_length,
        stop=tokenizer.eos_token_id,
        device=world.device,
    )
    text = f"{tokenizer.decode(prompt)}\n--- and the model goes on:\n{tokenizer.decode(continuation).rstrip()}\n"
    if world.is_main:
        (config.run_folder / SAMPLE_FILE).write_text(text, encoding="utf-8")
    return text
