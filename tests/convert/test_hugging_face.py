"""A tiny Llama of transformers: into a checkpoint and out again, with the weights that it had or was trained to."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, DamagedCheckpointError
from flashoptim_dist.convert import convert, export_hf, import_hf, inspect
from tests.checkpoint.models import build, flash, full, steps
from tests.pool import run_ranks

TOKENIZER = Path(__file__).parents[2] / "recipes" / "llama_support" / "debug_model"


def _config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 102,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            **changes,
        }
    )


def _tokens() -> Tensor:
    return torch.randint(0, 102, (2, 32), generator=torch.Generator().manual_seed(1))


def _logits(folder: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=_tokens()).logits
    return logits


def _hf_folder(path: Path, shard: str = "5GB", **changes: Any) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(**changes))
    model.save_pretrained(path, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    return path, model


def _train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(input_ids=_tokens(), labels=_tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _fine_tuned(tmp_path: Path, **changes: Any) -> tuple[Path, LlamaForCausalLM, fod.FlashAdamW]:
    """A model imported, loaded as bf16 with corrections, and trained for three steps; and its checkpoint."""
    folder, _ = _hf_folder(tmp_path / "hf", **changes)
    import_hf(folder, tmp_path / "start")
    model = LlamaForCausalLM(_config(**changes))
    fod.cast_model(model)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-3)
    checkpoint.load(tmp_path / "start", model, optimizer, verify="full")
    _train(model, optimizer)
    return checkpoint.save(tmp_path / "trained", model, optimizer), model, optimizer


@pytest.mark.parametrize(("shard", "tied"), [("5GB", False), ("40KB", True)])
def test_fp32_weights_come_and_go_bit_for_bit_with_32_bit_masters(tmp_path: Path, shard: str, tied: bool) -> None:
    folder, model = _hf_folder(tmp_path / "hf", shard, tie_word_embeddings=tied)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "40KB")
    import_hf(folder, tmp_path / "ours", options={"master_weight_bits": 32})
    done = export_hf(tmp_path / "ours", tmp_path / "out", dtype=torch.float32, config=folder, shard_bytes=40_000)
    assert done.notes == ()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, left), (_, right) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert torch.equal(_logits(folder), _logits(tmp_path / "out"))
    stored = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in stored["weight_map"]) != tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    text = "a tokenizer that came along"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(folder)(text)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_model_is_exported_as_its_master_weights(tmp_path: Path, tied: bool) -> None:
    saved, model, optimizer = _fine_tuned(tmp_path, tie_word_embeddings=tied)
    masters = optimizer.get_master_weights(model)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    export_hf(saved, tmp_path / "fp32", dtype=torch.float32, config=tmp_path / "hf")
    exact = LlamaForCausalLM(_config(tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(masters[name])
        expected = exact(input_ids=_tokens()).logits
    assert torch.equal(_logits(tmp_path / "fp32", dtype=torch.float32), expected)
    assert torch.equal(_logits(tmp_path / "fp32"), expected)  # config.json says fp32
    trained = {key: value.detach() for key, value in model.named_parameters()}
    rounded = {key: value.half() for key, value in masters.items()}
    for name, dtype, expected_weights in (("bf16", torch.bfloat16, trained), ("fp16", torch.float16, rounded)):
        export_hf(saved, tmp_path / name, dtype=dtype, config=tmp_path / "hf")
        weights = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(weight, expected_weights[key]) for key, weight in weights.items())
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype
    with torch.no_grad():
        assert torch.equal(_logits(tmp_path / "bf16", dtype=torch.bfloat16), model.eval()(input_ids=_tokens()).logits)


def test_the_low_bits_of_fp32_weights_are_in_the_corrections(tmp_path: Path) -> None:
    folder, model = _hf_folder(tmp_path / "hf")
    import_hf(folder, tmp_path / "start")
    loaded = LlamaForCausalLM(_config())
    fod.cast_model(loaded)
    optimizer = fod.FlashAdamW(loaded.named_parameters(), lr=3e-4)
    checkpoint.load(tmp_path / "start", loaded, optimizer, verify="full")
    assert optimizer.param_groups[0]["lr"] == 3e-4  # the checkpoint has none to say
    masters = optimizer.get_master_weights(loaded)
    expected = LlamaForCausalLM(_config())
    fod.cast_model(expected)
    reference = fod.FlashAdamW(expected.named_parameters())
    reference.set_master_weights(dict(model.named_parameters()), expected)
    assert all(torch.equal(value, masters[name]) for name, value in reference.get_master_weights(expected).items())
    found = inspect(tmp_path / "start")
    assert (found.optimizer, found.steps) == ("FlashAdamW", (0,))
    assert found.bytes_per_parameter == pytest.approx(5.2, abs=0.2)


def test_modules_kept_in_fp32_and_plain_optimizers(tmp_path: Path) -> None:
    folder, model = _hf_folder(tmp_path / "hf")
    import_hf(folder, tmp_path / "kept", keep_fp32=["*norm"])
    loaded = LlamaForCausalLM(_config())
    fod.cast_model(loaded, keep_fp32=["*norm"])
    checkpoint.load(tmp_path / "kept", loaded, fod.FlashAdamW(loaded.named_parameters()))
    assert loaded.model.norm.weight.dtype == torch.float32
    import_hf(folder, tmp_path / "plain", to="adamw")
    plain = LlamaForCausalLM(_config())
    checkpoint.load(tmp_path / "plain", plain, torch.optim.AdamW(plain.named_parameters()))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_plain_checkpoint_is_exported_too(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, foreach=False)
    _train(model, optimizer)
    checkpoint.save(tmp_path / "dcp", model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    with torch.no_grad():
        expected = model.eval()(input_ids=_tokens()).logits
    for source in ("dcp", "file.pt"):
        export_hf(tmp_path / source, tmp_path / f"out-{source}", dtype=torch.float32, config=folder)
        assert torch.equal(_logits(tmp_path / f"out-{source}"), expected)
        assert "lm_head.weight" not in load_file(tmp_path / f"out-{source}" / "model.safetensors")


def _export_on_ranks(source: str, target: str, config: str) -> None:
    export_hf(source, target, dtype=torch.float32, config=config, shard_bytes=40_000)


def _import_on_ranks(source: str, target: str) -> None:
    import_hf(source, target)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf", "40KB")
    run_ranks(2, _import_on_ranks, str(folder), str(tmp_path / "two"))
    import_hf(folder, tmp_path / "one")
    run_ranks(2, _export_on_ranks, str(tmp_path / "two"), str(tmp_path / "out-two"), str(folder))
    export_hf(tmp_path / "one", tmp_path / "out-one", dtype=torch.float32, config=folder, shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out-one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out-two").iterdir())
    assert len(files) > 5
    for name in files:
        assert (tmp_path / "out-one" / name).read_bytes() == (tmp_path / "out-two" / name).read_bytes(), name


def _save_on_ranks(path: str) -> dict[str, Tensor]:
    net = build("fsdp")
    optimizer = flash(net)
    steps(net, optimizer, range(2))
    checkpoint.save(path, net, optimizer)
    return {name: full(value) for name, value in optimizer.get_master_weights(net).items()}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_sharded_run_is_exported_whole(tmp_path: Path, world_size: int) -> None:
    """A8 of the collected bug reports: an export under FSDP2 held one rank's pieces, and DTensors beside them."""
    masters = run_ranks(world_size, _save_on_ranks, str(tmp_path / "saved"))[0]
    export_hf(tmp_path / "saved", tmp_path / "out", dtype=torch.float32)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    unsharded = build("single").state_dict()
    assert {name: weight.shape for name, weight in weights.items()} == {n: w.shape for n, w in unsharded.items()}
    assert masters.keys() < weights.keys()
    assert all(torch.equal(weights[name], master) for name, master in masters.items())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())


@pytest.mark.parametrize("kind", ["export", "plain", "ours"])
def test_weights_that_a_dtype_can_not_hold_are_refused(tmp_path: Path, kind: str) -> None:
    """fp16 ends at 65504: what lies beyond would become Inf in silence, or be cut to the format's largest number."""
    net = build("single")
    with torch.no_grad():
        net.up.weight[3, 5] = -70_000.0
    optimizer = flash(net)
    steps(net, optimizer, [0])
    saved = checkpoint.save(tmp_path / "saved", net, optimizer)
    if kind == "export":
        write: Any = partial(export_hf, saved, tmp_path / "out")
    else:
        write = partial(convert, saved, tmp_path / "out", {"plain": "adamw", "ours": "flash_adamw"}[kind])
    with pytest.raises(CheckpointError, match=r"up\.weight.* has elements beyond the range of float16"):
        write(dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_without_a_config_only_weights_are_written(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf")
    import_hf(folder, tmp_path / "ours")
    done = export_hf(tmp_path / "ours", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert "config.json" in done.notes[0]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("keep", [-1, 40, 3, 0])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder, _ = _hf_folder(tmp_path / "hf", "40KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    content = victim.read_bytes()
    victim.write_bytes(content[:keep])
    with pytest.raises(DamagedCheckpointError, match=f"{victim.name} (holds|ends|has no)"):
        import_hf(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def _edit_header(path: Path, **changes: Any) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_offsets": [0, 1 << 40]}, "bytes; the file is damaged"),
        ({"data_offsets": [-96, 0]}, "gives tensor model.norm.weight 96 bytes"),
        ({"shape": [1 << 40]}, "gives tensor model.norm.weight"),
        ({"shape": ["x"]}, "no readable safetensors header"),
        ({"dtype": "F8_E4M3"}, "is stored as F8_E4M3; give a model with unquantized weights"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder, _ = _hf_folder(tmp_path / "hf")
    _edit_header(folder / "model.safetensors", **changes)
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf", "40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"names '\.\./secret\.safetensors', which is no file of this folder"):
        import_hf(folder, tmp_path / "ours")
    content["weight_map"]["model.norm.weight"] = "missing.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpointError, match=r"names missing\.safetensors, which is not there"):
        import_hf(folder, tmp_path / "ours")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf")
    save_file({"model.norm.weight": torch.ones(48)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight stands in both .*model.*other\.safetensors"):
        import_hf(folder, tmp_path / "ours")


def test_folders_without_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds no \.safetensors file"):
        import_hf(tmp_path / "empty", tmp_path / "ours")
    folder, _ = _hf_folder(tmp_path / "hf")
    import_hf(folder, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"empty/config\.json can't be read"):
        export_hf(tmp_path / "ours", tmp_path / "out", config=tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"ours exists: choose another name, or --force"):
        import_hf(folder, tmp_path / "ours")
    assert not (tmp_path / "out").exists()


def test_torchtitans_names_are_not_taken_for_transformers(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"tok_embeddings": torch.nn.Embedding(40, 32)})
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path / "titan", model, optimizer)
    with pytest.raises(CheckpointError, match="torchtitan's names"):
        export_hf(tmp_path / "titan", tmp_path / "out")


def test_an_export_replaces_only_by_force(tmp_path: Path) -> None:
    folder, _ = _hf_folder(tmp_path / "hf")
    import_hf(folder, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "out", dtype=torch.float32)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="out exists"):
        export_hf(tmp_path / "ours", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    export_hf(tmp_path / "ours", tmp_path / "out", overwrite=True)
    assert len((tmp_path / "out" / "model.safetensors").read_bytes()) < 0.6 * len(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours", "out"]


def test_a_conversion_and_an_export_agree(tmp_path: Path) -> None:
    saved, _, _ = _fine_tuned(tmp_path)
    convert(saved, tmp_path / "adamw", "adamw")
    export_hf(saved, tmp_path / "direct", dtype=torch.float32)
    export_hf(tmp_path / "adamw", tmp_path / "through", dtype=torch.float32)
    direct, through = (tmp_path / name / "model.safetensors" for name in ("direct", "through"))
    assert direct.read_bytes() == through.read_bytes()
