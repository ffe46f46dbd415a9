"""The command line, the schedule, and where a run stands after it was resumed."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import yaml
from llama_support.config import Config, read_command_line
from llama_support.errors import BadInput
from llama_support.model import model_folder
from llama_support.progress import Progress, after_resume
from llama_support.training import learning_rate

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_and_options() -> None:
    assert read_command_line([]) == Config()
    config = read_command_line(["--model", "some/llama", "--steps", "7", "--lr", "2e-5", "--betas", "0.8", "0.9"])
    assert (config.steps, config.peak_lr, config.betas) == (7, 2e-5, (0.8, 0.9))
    assert config.run_folder == Path("runs/llama-stdlib-flash_adamw")
    assert Config(output="elsewhere").run_folder == Path("elsewhere")


def test_a_real_model_is_not_trained_at_the_debug_models_rate() -> None:
    assert Config().peak_lr > 100 * Config(model="some/llama").peak_lr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--eps", "0"),
        ("--global-batch", "-1"),
        ("--lr", "nan"),
        ("--lr", "-1"),
        ("--clip-norm", "inf"),
        ("--min-lr-ratio", "2"),
        ("--validation-fraction", "1"),
        ("--validation-fraction", "0"),
        ("--resume", "newest"),
        ("--save-every", "-2"),
        ("--seed", str(2**43)),
        ("--model", ""),
        ("--data", ""),
    ],
)
def test_a_value_no_run_can_have_is_named(option: str, value: str) -> None:
    with pytest.raises(BadInput, match=f"^{option} is .*; it must be "):
        read_command_line([option, value])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_usage_errors_are_printed_once_and_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as raised:
        read_command_line(["--no-such-option", "1"])
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert ("no-such-option" in printed.out + printed.err) == (rank == "0")


def test_warm_up_and_cosine() -> None:
    config = Config(lr=1.0, steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.55)  # half way: the mean of peak and end
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 10), (5, 5), (5, 100), (3, 0)])
def test_no_rate_of_a_short_schedule_is_zero_or_above_the_peak(steps: int, warmup: int) -> None:
    config = Config(lr=2.0, steps=steps, warmup_steps=warmup, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 and math.isfinite(rate) for rate in rates)


@pytest.mark.parametrize(
    ("step", "saved", "changes", "expected"),
    [
        (20, {"first": 0, "steps": 60}, {}, Progress(20, 0, 60)),  # cut off
        (80, {"first": 60, "steps": 60}, {}, Progress(80, 60, 120)),  # cut off in the second schedule
        (60, {"first": 0, "steps": 60}, {}, Progress(60, 60, 120)),  # finished: another schedule
        (60, {"first": 0, "steps": 60}, {"when_finished": "stop"}, Progress(60, 0, 60)),
        (20, {"first": 0, "steps": 60}, {"when_finished": "stop"}, Progress(20, 0, 60)),
        (20, {"first": 0, "steps": 60}, {"steps": 100}, Progress(20, 0, 100)),  # cut off, then lengthened
        (20, {"first": 0, "steps": 60}, {"steps": 30}, Progress(20, 0, 30)),  # or shortened
        (40, {"first": 0, "steps": 60}, {"steps": 30}, Progress(40, 40, 70)),  # to less than is done
    ],
)
def test_what_is_left_to_do(step: int, saved: dict[str, int], changes: dict[str, Any], expected: Progress) -> None:
    assert after_resume(step, saved, Config(**{"steps": 60, **changes})) == expected


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_named_configs_are_read_and_the_command_line_comes_on_top(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    config = read_command_line(["--config", path.stem, "--steps", "7"])
    assert config.steps == 7
    assert config.config == path.stem
    for name, value in written.items():
        if name != "steps":
            assert getattr(config, name) == value
    assert model_folder(config.model).is_dir()


def test_a_config_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1\nbetas: [0.8, 0.99]\nmodel: some/llama\ncompile: true\nvalidation_data: null\n")
    config = read_command_line([f"--config={path}", "--betas", "0.7", "0.9"])
    assert config == Config(config=str(path), lr=1.0, betas=(0.7, 0.9), model="some/llama", compile=True)
    assert isinstance(config.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "sets 'stepz', which is no option"),
        ("config: llama3_8b", "sets 'config', which is no option"),
        ("steps: 1.5", "'steps' of config .* is 1.5, which is no int"),
        ("steps: true", "'steps' of config .* is True"),
        ("lr: 1e-5", "is '1e-5', which is no .*write 1.0e-5"),
        ("betas: [0.9]", "'betas' of config"),
        ("optimizer: lion", "'optimizer' of config .* is 'lion'; it must be one of flash_adamw, adamw"),
        ("- 1", "holds no options"),
        ("a: [", "is not YAML"),
        ("steps: 0", "--steps is 0"),
    ],
)
def test_what_is_wrong_in_a_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_command_line(["--config", str(path)])


def test_a_config_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"config llama9 .*No such file.* one of llama3_1b, llama3_70b, llama3_8b"):
        read_command_line(["--config", "llama9"])
