"""Models for the tests of shard_model, and the names of a small Llama's units."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

NORMS = {"model.norm"} | {f"model.layers.{i}.{kind}_layernorm" for i in (0, 1) for kind in ("input", "post_attention")}
LAYERS = {"model.layers.0", "model.layers.1"}
ENDS = {"model.embed_tokens", "lm_head"}


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=131,  # divisible by no world size
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Other(Block):
    """A block of another class."""


class Plain(nn.Module):
    """A language model without Hugging Face's metadata."""

    def __init__(self, container: str = "list", vocabulary: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        blocks = [Block(), Block(), Block()]
        self.blocks = nn.ModuleList(blocks) if container == "list" else nn.ModuleDict({"a": blocks[0], "b": blocks[1]})
        self.small = nn.ModuleList([nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks if isinstance(self.blocks, nn.ModuleList) else self.blocks.values():
            h = block(h)
        return self.head(self.norm(self.small[0](h)))


class Mixer(nn.Module):
    """A state-space layer in small: fp32 parameters of its own beside bf16 submodules."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, width)
        self.A_log = nn.Parameter(torch.rand(width))
        self.dt_bias = nn.Parameter(torch.rand(width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.exp(-torch.exp(self.A_log.float()) * torch.nn.functional.softplus(self.dt_bias.float()))
        return x + self.out_proj((self.in_proj(x).float() * decay).to(x.dtype))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Block(), Mixer()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hybrid() -> Hybrid:
    """bf16, with the mixers' own parameters fp32: dtypes that were set without cast_model."""
    torch.manual_seed(0)
    model = Hybrid().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    return model
