"""A model folder that transformers wrote: read into shards, the same logits; and what is wrong with one, by name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
import torch.distributed as dist
from llama_support.attention import document_causal_mask
from llama_support.config import Config
from llama_support.errors import BadInput
from llama_support.hf_weights import INDEX_NAME, check_weights, read_header
from llama_support.model import DEBUG_MODEL, build_model, check_model, load_tokenizer, read_llama_config
from llama_support.world import World
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.pool import mesh, run_ranks

LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _write_model(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, shard_size: str = "5GB", **changes: object
) -> Path:
    values = {
        "vocab_size": 102,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        **changes,
    }
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**values)).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def _world() -> World:
    size = dist.get_world_size()
    return World(dist.get_rank(), size, torch.device("cpu"), mesh(size))


def _tokens() -> Tensor:
    return torch.randint(0, 102, (2, 96), generator=torch.Generator().manual_seed(1))


def _sharded_logits(folder: str, optimizer: str) -> tuple[Tensor, int, int, bool]:
    """Logits, the elements this rank holds, those of the whole model, and whether head and embedding are one."""
    world = _world()
    llama_config = read_llama_config(Path(folder), 96)
    config = Config(model=folder, optimizer="adamw" if optimizer == "adamw" else "flash_adamw")
    model = build_model(config, Path(folder), llama_config, world)
    parameters = list(model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    held = sum(parameter.to_local().numel() for parameter in parameters)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    tokens = _tokens()
    mask = document_causal_mask(torch.zeros_like(tokens))
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logits, held, sum(parameter.numel() for parameter in parameters), tied


@pytest.mark.parametrize(
    ("changes", "shard_size"),
    [
        ({"tie_word_embeddings": False}, "5GB"),
        ({"tie_word_embeddings": True}, "20KB"),
        ({"tie_word_embeddings": False, "rope_parameters": LLAMA31_ROPE, "attention_bias": True}, "20KB"),
    ],
    ids=["untied", "tied-many-files", "llama31-rope-many-files"],
)
@pytest.mark.parametrize("optimizer", ["flash_adamw", "adamw"])
def test_a_folder_that_transformers_wrote_gives_its_logits(
    tmp_path: Path, changes: dict[str, object], shard_size: str, optimizer: str
) -> None:
    folder = _write_model(tmp_path / "model", shard_size=shard_size, **changes)
    assert (folder / INDEX_NAME).exists() == (shard_size == "20KB")
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        expected = reference(input_ids=_tokens()).logits
    for logits, held, parameters, tied in run_ranks(2, _sharded_logits, str(folder), optimizer):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert held < 0.6 * parameters
        assert tied == changes["tie_word_embeddings"]


def _initial_weights(seed: int) -> dict[str, Tensor]:
    world = _world()
    states = {}
    for optimizer in ("flash_adamw", "adamw"):
        config = Config(optimizer=optimizer, seed=seed)  # type: ignore[arg-type]
        model = build_model(config, DEBUG_MODEL, read_llama_config(DEBUG_MODEL, 96), world)
        parameter = dict(model.named_parameters())["model.layers.1._checkpoint_wrapped_module.mlp.up_proj.weight"]
        states[optimizer] = parameter.full_tensor().clone()  # type: ignore[attr-defined]
    return states


def test_the_debug_model_starts_alike_for_both_optimizers_and_any_world_size() -> None:
    of_two = run_ranks(2, _initial_weights, 0)[0]
    of_one = run_ranks(1, _initial_weights, 0)[0]
    assert of_two["flash_adamw"].dtype == torch.bfloat16
    assert of_two["adamw"].dtype == torch.float32
    assert torch.equal(of_two["flash_adamw"].float(), of_two["adamw"])
    assert torch.equal(of_two["adamw"], of_one["adamw"])
    assert not torch.equal(of_one["adamw"], run_ranks(1, _initial_weights, 1)[0]["adamw"])


def _check(folder: Path) -> None:
    check_model(folder, read_llama_config(folder, 96))


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    _check(_write_model(tmp_path / "model", shard_size="20KB", tie_word_embeddings=True))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model", shard_size="20KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    content = victim.read_bytes()
    for size in (len(content) - 1, 40, 3, 0):
        victim.write_bytes(content[:size])
        with pytest.raises(BadInput, match=f"{victim.name} (holds|ends|has no).*download it again"):
            _check(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model", shard_size="20KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(BadInput, match=f"names {victim.name}, which is not there"):
        _check(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"no \.safetensors file \(only pytorch_model\.bin\)"):
        _check(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(BadInput, match=r"lacks the tensor model\.layers\.3\."):
        _check(folder)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(BadInput, match=r"mlp\.\w+\.weight in .*model\.safetensors has the shape \(.*72.*\)"):
        _check(folder)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="stands in both"):
        _check(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "is not a Llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not a Llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"max_position_embeddings": 64}, "--sequence-length 96 is more than the 64 positions"),
        ({"architectures": 3}, "is not a Llama"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 and num_key_value_heads 4, which does not divide it"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
    ],
)
def test_a_config_that_cannot_be_trained(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = _write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInput, match=message):
        read_llama_config(folder, 96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "KeyError: 'spiral'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "many"}}, "TypeError"),
        ({"hidden_act": "sillu"}, "KeyError: 'sillu'"),
        ({"vocab_size": -1}, "RuntimeError"),
        ({"pad_token_id": 102}, "Padding_idx must be within"),
    ],
    ids=["rope_type", "rope_theta", "hidden_act", "vocab_size", "pad_token_id"],
)
def test_a_config_that_makes_no_model(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = _write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInput, match=rf"cannot build the model of .*config\.json .*{message}"):
        _check(folder)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"num_hidden_layers": 0}, {"attention_bias": False}])
def test_a_tensor_that_the_config_forgets_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = _write_model(tmp_path / "model", attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BadInput, match=r"tensor model\.layers\.\S+ in .* has no place in the model of config\.json"):
        _check(folder)


def test_tensors_beside_the_llama_do_not_matter(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model", tie_word_embeddings=True)
    beside = {
        "lm_head.weight": torch.zeros(102, 48),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "value_head.weight": torch.zeros(3),
    }
    save_file(beside, folder / "beside.safetensors")
    _check(folder)


def test_a_file_with_bytes_behind_its_tensors_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(BadInput, match=r"model\.safetensors holds \d+ bytes, and its header tells of \d+"):
        _check(folder)


def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors is not a file"):
        _check(folder)


@pytest.mark.parametrize("name", [None, 3, ["a"]])
def test_an_index_of_other_things_than_names(tmp_path: Path, name: object) -> None:
    folder = _write_model(tmp_path / "model", shard_size="20KB")
    index = json.loads((folder / INDEX_NAME).read_text())
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(index["weight_map"], name)}))
    with pytest.raises(BadInput, match="is no index of safetensors files"):
        _check(folder)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        read_llama_config(tmp_path, 96)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        read_llama_config(tmp_path, 96)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match="is not JSON"):
        read_llama_config(tmp_path, 96)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_header_says_shapes_and_dtypes(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model", dtype=torch.float16)
    header = read_header(folder / "model.safetensors")
    norm = header["model.norm.weight"]
    assert (norm.shape, norm.dtype) == ((48,), "F16")
    check_weights(folder, {name: tensor.shape for name, tensor in header.items()})
