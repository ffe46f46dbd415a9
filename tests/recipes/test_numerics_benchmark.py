"""The numerics benchmark: that it runs and writes what it says, and that its figures would show a wrong optimizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"))

import numerics
import pytest
import torch
from numerics_support.bounds import checks
from numerics_support.exact import OTHERS, Setting
from numerics_support.families import NAMES, make_families
from numerics_support.measure import Result, Subject, ours, run
from torch import nn

import flashoptim_dist


@pytest.mark.full
def test_smoke_run_writes_tables_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numerics.main(numerics.Config(smoke=True, betas2=(0.95, 0.999), output=tmp_path))
    document = json.loads((tmp_path / "numerics.json").read_text())
    keys = {(r["optimizer"], r["family"], r["beta2"], r["label"]) for r in document["results"]}
    settings = [("FlashAdamW", 0.95), ("FlashAdamW", 0.999), *((other.optimizer, other.beta2) for other in OTHERS)]
    expected = {
        (o, name, beta2, rounding) for o, beta2 in settings for name in NAMES for rounding in numerics.ROUNDINGS
    }
    assert keys >= expected  # the official package's too, where it can run
    for r in document["results"]:
        # Of an outlier's mates, whose gradients are 1e-4 of it, Lion's codes hold no more than a guess of the sign.
        if r["label"] != "official" and (r["optimizer"], r["family"]) != ("FlashLion", "outlier"):
            assert 0.0 <= r["error"] < 1.0, r
            assert r["cosine"] > 0.5, r
    assert (tmp_path / "numerics.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "numerics.md").read_text()
    assert table in capsys.readouterr().out + "\n"
    assert table.count("holds") + table.count("**fails**") == len(document["checks"]) + len(document["specials"])
    # What a few steps can show already: Gaussian gradients of every size, and what must not move at all.
    for check in document["checks"]:
        if check["family"].startswith("Gaussian"):
            assert check["holds"], check
    for special in document["specials"]:
        if "moved" in special["what"] or "other groups" in special["what"]:
            assert special["holds"], special


def _compare(subject: Subject) -> dict[str, Result]:
    families = make_families(rows=1, columns=64, stop_step=20, seed=0)
    results = run(families, [subject.setting], lambda setting, shape: [subject], 60)
    return {result.family: result for result in results}


SHAPE = make_families(rows=1, columns=64, stop_step=20, seed=0).shape


def test_exact_adam_has_no_error_and_a_wrong_one_is_seen() -> None:
    def adam(beta1: float) -> Subject:
        parameter = nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.Adam([parameter], lr=1.0, betas=(beta1, 0.95), eps=1e-15)
        return Subject("torch", Setting(beta2=0.95), parameter, optimizer)

    right, wrong = _compare(adam(0.9)), _compare(adam(0.8))
    assert all(result.error < 1e-5 and result.cosine > 1 - 1e-9 for result in right.values())
    assert right["Gaussian 0.01"].largest == pytest.approx(right["Gaussian 0.01"].exact_largest, rel=1e-5)
    assert wrong["Gaussian 0.01"].error > 0.1
    nearest = _compare(ours(Setting(beta2=0.95), SHAPE, "nearest", "cpu"))["Gaussian 1e-09"]
    assert 0.001 < nearest.error < 0.02
    assert nearest.root_ratio is not None
    assert nearest.root_ratio[1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("setting", OTHERS, ids=lambda setting: setting.optimizer)
def test_the_exact_others_are_torchs_and_ours_without_compression(setting: Setting) -> None:
    """L2 and decoupled decay enter the figures too: the weight is not zero."""

    def subject(make: Any, **changes: Any) -> Subject:
        parameter = nn.Parameter(torch.zeros(SHAPE))
        return Subject("x", setting, parameter, make([parameter], **{**setting.options, **changes}))

    subjects = [subject(getattr(flashoptim_dist, setting.optimizer), quantize=False)]
    torchs = {"FlashAdam": torch.optim.Adam, "FlashSGD": torch.optim.SGD}.get(setting.optimizer)
    if torchs is not None:
        subjects.append(subject(torchs))
    for each in subjects:
        for family, result in _compare(each).items():
            assert result.error < 1e-4, family
    # Without the decay the smallest gradients look otherwise.
    wrong = _compare(subject(getattr(flashoptim_dist, setting.optimizer), quantize=False, weight_decay=0.0))
    if setting.optimizer != "FlashLion":  # whose update is 1 beside a decay of 1e-7
        assert wrong["Gaussian 1e-09"].error > 0.5


def test_bounds_mark_what_lies_outside() -> None:
    good = Result("lognormal 1", 0.95, "stochastic", error=0.05, largest=1.5, exact_largest=1.0)
    bad = Result("lognormal 1", 0.95, "stochastic", error=0.06, largest=2.6, exact_largest=1.0)
    assert [check.holds for check in checks([good])] == [True, True, True]
    assert [check.holds for check in checks([bad])] == [False, False, False]
    assert checks([Result("lognormal 1", 0.95, "official", error=9.0)]) == []
    assert [check.holds for check in checks([Result("rare rows", 0.999, "nearest", exact_largest=float("nan"))])] == [
        False
    ]


def test_groups_must_be_whole() -> None:
    with pytest.raises(SystemExit, match="multiple of 32"):
        numerics.main(numerics.Config(columns=40))
