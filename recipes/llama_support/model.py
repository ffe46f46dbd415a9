"""The Llama itself: transformers' LlamaForCausalLM, cast, sharded, and filled with weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashoptim_dist import cast_model, shard_model

from .attention import implementation
from .config import Config
from .errors import BadInput
from .hf_weights import check_weights, read_into_shards, stored_parameters
from .layers import recompute_activations
from .loss import LlamaWithLoss, uses_liger
from .world import World

DEBUG_MODEL = Path(__file__).resolve().parent / "debug_model"
SHAPES = Path(__file__).resolve().parent / "shapes"
"""A folder per model whose config is known here and whose weights are not."""


def model_folder(model: str) -> Path:
    """The folder that `--model` means. Raises BadInput where there is none."""
    if model == "debug":
        return DEBUG_MODEL
    if model in known_shapes():
        return SHAPES / model
    folder = Path(model)
    if not folder.is_dir():
        raise BadInput(
            f"model folder {model} does not exist; give the path of a downloaded Hugging Face model, or one of"
            f" {', '.join(['debug', *known_shapes()])} for random weights"
        )
    return folder


def known_shapes() -> list[str]:
    """The names that `--model` knows besides "debug"."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def has_weights(folder: Path) -> bool:
    """Whether a model folder is one with weights of its own, rather than one of those that come with the recipe."""
    return folder != DEBUG_MODEL and folder.parent != SHAPES


def read_llama_config(folder: Path, sequence_length: int) -> LlamaConfig:
    """The folder's config.json, checked to be a Llama that can see `sequence_length` tokens. Raises BadInput."""
    path = folder / "config.json"
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"model {folder} has no readable config.json; give a Hugging Face model folder") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON ({error}); download it again") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    architectures = (values.get("architectures") if isinstance(values, dict) else None) or ["LlamaForCausalLM"]
    if kind != "llama" or not isinstance(architectures, list | str) or "LlamaForCausalLM" not in architectures:
        raise BadInput(
            f"model {folder} is not a Llama (model_type {kind}, architectures {architectures}); this recipe trains"
            " LlamaForCausalLM"
        )
    if values.get("quantization_config"):
        raise BadInput(f"model {folder} is quantized (quantization_config in config.json); give its unquantized form")
    try:
        config = LlamaConfig(**values)
    except Exception as error:
        raise BadInput(f"transformers does not accept {path}: {error}") from error
    heads, shared = config.num_attention_heads, config.num_key_value_heads or 0
    if shared < 1 or heads % shared:
        raise BadInput(
            f"{path} has num_attention_heads {heads} and num_key_value_heads {shared}, which does not divide it;"
            " download it again"
        )
    if sequence_length > config.max_position_embeddings:
        raise BadInput(
            f"--sequence-length {sequence_length} is more than the {config.max_position_embeddings} positions of model"
            f" {folder}; lower it"
        )
    config.use_cache = False
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, which must be a fast one; the debug model's for bare shapes. Raises BadInput."""
    if folder.parent == SHAPES:
        folder = DEBUG_MODEL
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise BadInput(f"model folder {folder} has no tokenizer.json; copy the model's tokenizer files into it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise BadInput(f"cannot load a tokenizer from model folder {folder}: {error}") from error
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer in {folder} has no tokenizer.json; save it as a fast tokenizer")
    return tokenizer


def check_model(folder: Path, llama_config: LlamaConfig) -> None:
    """Raise BadInput where the config makes no model, or the weights are not whole or of another. No collective."""
    if has_weights(folder):
        try:
            with torch.device("meta"):
                model = LlamaWithLoss(llama_config)
        except Exception as error:  # of any type: a rope_type or hidden_act that transformers lacks is a KeyError
            raise BadInput(
                f"transformers cannot build the model of {folder / 'config.json'} ({type(error).__name__}: {error});"
                " download it again, or correct the value"
            ) from error
        expected = stored_parameters(model, llama_config.tie_word_embeddings)
        check_weights(folder, {name: tuple(tensor.shape) for name, tensor in expected.items()})


def build_model(config: Config, folder: Path, llama_config: LlamaConfig, world: World) -> LlamaWithLoss:
    """The sharded model with its weights, on this rank's device, in training mode. All ranks must call.

    The debug model's weights come from the seed alone, whatever the number of ranks. Any other model is built without
    memory, and its weights are read straight into the shards, or drawn there if only its shapes are known. Weights are
    bf16 for flash_adamw and fp32 for adamw; both start from the same values where the stored ones are bf16, as the
    debug model's are. Without a mesh the model stays whole, and computes in bf16 as it is.
    """
    dtype = weight_dtype(config)
    llama_config._attn_implementation = implementation(world.device)
    if folder == DEBUG_MODEL:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = LlamaWithLoss(llama_config)
        cast_model(model, torch.bfloat16)
    else:
        with torch.device("meta"):
            model = LlamaWithLoss(llama_config)
    cast_model(model, dtype)
    model.lm_head.use_liger = uses_liger(config.loss, world.device)
    wrap_layers(model, config)
    if world.mesh is not None:
        # Matrix products in bf16 on GPUs. CPUs mostly lack bf16 arithmetic, so there they run in fp32.
        compute_dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        reduce_dtype = gradient_sum_dtype(config, world.size, compute_dtype)
        shard_model(model, world.mesh, param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    if folder != DEBUG_MODEL:
        materialize(model, world.device)
        parameters = stored_parameters(model, llama_config.tie_word_embeddings)
        if has_weights(folder):
            read_into_shards(folder, parameters)
        else:
            draw_weights(model, llama_config.initializer_range, config.seed + world.rank)
    elif world.mesh is None:
        nn.Module.to(model, world.device)  # transformers' own only adds checks for quantized models
    return model.train()


def weight_dtype(config: Config) -> torch.dtype:
    """What the weights are held in."""
    return torch.bfloat16 if config.optimizer == "flash_adamw" else torch.float32


def gradient_sum_dtype(config: Config, world_size: int, compute_dtype: torch.dtype) -> torch.dtype:
    """What gradients are summed over ranks in.

    Gradients of bf16 weights that are computed in bf16 are so before the sum and after it. The sum of two, rounded to
    bf16, is what a sum in bf16 is, so that over two ranks fp32 buffers only take memory and time. A third would be
    added to a rounded sum.
    """
    if config.reduce_dtype == "auto":
        exact = world_size == 2 and compute_dtype == weight_dtype(config) == torch.bfloat16
        return torch.bfloat16 if exact else torch.float32
    return torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32


def wrap_layers(model: LlamaWithLoss, config: Config) -> None:
    """Put activation checkpointing and torch.compile around each layer, as the options say."""
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = recompute_activations(layer, config.activation_checkpointing)
        if config.compile:
            layers[index] = torch.compile(layers[index])


@torch.no_grad()
def draw_weights(model: nn.Module, deviation: float, seed: int) -> None:
    """Draw this rank's part of each matrix from a normal distribution in place, and set every vector to 1.

    The draws are this rank's own: they depend on the number of ranks.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim < 2:
            local.fill_(1.0)
        else:
            local.normal_(0.0, deviation, generator=generator)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model built on the meta device memory on `device`; parameters are left unset, buffers are made anew.

    Unlike `Module.to_empty`, tied parameters stay tied and the rotary frequencies, which no checkpoint holds, are
    right.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta and parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            module._parameters[name] = made.get(parameter, parameter)
        if isinstance(module, LlamaRotaryEmbedding):
            fresh = LlamaRotaryEmbedding(config=module.config).to(device)
            module._buffers.update(fresh._buffers)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise RuntimeError(f"buffers {left} were built without memory and nothing here sets them")
