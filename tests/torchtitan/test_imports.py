"""The package without torchtitan 0.3: it imports, and registers nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import flashoptim_dist.torchtitan as package


def _forget_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)


def test_without_torchtitan_there_are_no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget_torchtitan(monkeypatch)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    assert not package._has_overrides()


def test_with_a_release_like_022_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan.config is there, torchtitan.config.override is not."""
    config = tmp_path / "torchtitan" / "config"
    config.mkdir(parents=True)
    (tmp_path / "torchtitan" / "__init__.py").touch()
    (config / "__init__.py").touch()
    _forget_torchtitan(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert not package._has_overrides()
        (config / "override.py").touch()
        importlib.invalidate_caches()
        assert package._has_overrides()  # as 0.3 is: so it was the file that was missing
    finally:
        for name in ("torchtitan", "torchtitan.config"):
            sys.modules.pop(name, None)


def test_all_names_are_known() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flash_sophia'"):
        package.flash_sophia  # noqa: B018
    modules = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    assert set(package._MODULES.values()) <= modules
