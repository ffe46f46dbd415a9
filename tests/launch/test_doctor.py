"""launch/doctor: what it tells of this machine, and of others with less."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _doctor(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(
        [root / "launch" / "doctor", *arguments], env=environment, capture_output=True, text=True, timeout=200
    )


def _facts(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks by name and abilities by what they are."""
    told = json.loads(done.stdout)
    assert told["quickstart"] is (done.returncode == 0)
    return {one["name"]: one for one in told["checks"]}, {one["what"]: one for one in told["abilities"]}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """launch/ in a folder of its own, without .venv."""
    shutil.copytree(ROOT / "launch", tmp_path / "clone" / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "clone"


def _add_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def _bare_python(folder: Path, pip: str = "no pip") -> Path:
    """This Python without any package of its own; its pip downloads whatever it is asked for, or nothing."""
    path = folder / "bare-python"
    download = 'open(arguments[arguments.index("--dest") + 1] + "/package.whl", "w").close()'
    path.write_text(
        f"#!{sys.executable} -IS\nimport runpy, sys\narguments = sys.argv[1:]\n"
        "sys.argv[:] = arguments\n"
        f"sys.executable = {str(path)!r}\n"
        'if arguments[0] == "-c":\n    exec(arguments[1])\n'
        f'elif arguments[:2] == ["-m", "pip"]:\n'
        f"    if {pip!r} == 'no pip':\n        sys.exit(1)\n"
        f"    if 'download' in arguments and {pip!r} == 'index':\n        {download}\n"
        "    print('pip 24')\n"
        'else:\n    runpy.run_path(arguments[0], run_name="__main__")\n'
    )
    path.chmod(0o755)
    return path


def test_it_tells_of_this_machine() -> None:
    done = _doctor(ROOT, "--json")
    checks, abilities = _facts(done)
    assert done.stderr == ""
    assert checks["torch"]["status"] == "good"
    assert checks["flashoptim_dist"]["status"] == "good"
    assert {"GPUs", "NCCL", "triton", "C compiler", "free disk", "Python"} <= checks.keys()
    assert abilities["optimizers and checkpoints, in pure PyTorch"]["runs"]
    for one in (*checks.values(), *abilities.values()):
        failed = one.get("status", "good") != "good" or not one.get("runs", True)
        assert not failed or one["fix"], one


@pytest.mark.full
def test_as_text_it_ends_with_the_verdict() -> None:
    done = _doctor(ROOT)
    assert ("Does not run here:" in done.stdout) or ("Runs here:" in done.stdout)
    verdict = "will run" if done.returncode == 0 else "will not run: see what is wrong above"
    assert done.stdout.endswith(f"./launch/quickstart {verdict}\n")


@pytest.mark.parametrize(("pip", "runs"), [("index", True), ("no pip", True), ("no index", False)])
def test_with_nothing_installed_it_says_what_to_install(clone: Path, pip: str, runs: bool) -> None:
    done = _doctor(clone, "--json", PYTHON=str(_bare_python(clone.parent, pip)))
    assert done.stdout, done.stderr
    checks, abilities = _facts(done)
    assert checks["torch"] == {
        "name": "torch",
        "status": "missing",
        "found": "ModuleNotFoundError: No module named 'torch'",
        "fix": "./launch/quickstart installs it",
    }
    assert "transformers" in checks["packages of [recipes]"]["found"]
    assert abilities["./launch/quickstart"]["runs"] is runs
    assert not abilities["optimizers and checkpoints, in pure PyTorch"]["runs"]
    if not runs:
        assert "PIP_INDEX_URL" in abilities["./launch/quickstart"]["fix"]


def test_without_a_usable_python_it_says_so(clone: Path) -> None:
    done = _doctor(clone, "--json", PYTHON="/no/python")
    assert done.returncode == 1
    checks, _ = _facts(done)
    assert checks["Python"]["status"] == "wrong"
    assert "/no/python is not there" in done.stderr


# A stand-in for torch on a machine with two GPUs.
TORCH = """
from types import SimpleNamespace as Names
__version__ = "{version}"
version = Names(cuda="12.8")
cuda = Names(
    is_available=lambda: {usable},
    device_count=lambda: 2,
    get_device_capability=lambda place: {capability},
    get_device_properties=lambda place: Names(total_memory={gib} * 2**30),
    nccl=Names(version=lambda: (2, 27, 5)),
)
distributed = Names(is_available=lambda: True, is_nccl_available=lambda: True, is_gloo_available=lambda: True)
"""
FUSED, SINGLE = "fused Triton kernels", "full fine-tuning of Llama 8B on one GPU"


@pytest.mark.parametrize(
    ("torch", "wont"),
    [
        ({}, {}),
        ({"capability": (7, 0)}, {FUSED: "Triton needs compute capability 8.0 or more"}),
        ({"gib": 24}, {SINGLE: "24 GiB; it needs 50"}),
        ({"usable": False}, {FUSED: "CUDA in torch: torch reaches none of the GPUs; training is on the CPU"}),
    ],
)
def test_what_a_gpu_machine_runs(clone: Path, torch: dict[str, Any], wont: dict[str, str]) -> None:
    packages = clone.parent / "packages"
    packages.mkdir()
    values = {"version": "2.11.0", "usable": True, "capability": (9, 0), "gib": 80, **torch}
    (packages / "torch.py").write_text(TORCH.format(**values))
    listing = "NVIDIA H100 80GB HBM3, 81559 MiB, 9.0, 570.1"
    _add_program(clone.parent / "bin", "nvidia-smi", f'printf "%s\\n" "{listing}" "{listing}"')
    _add_program(clone.parent / "bin", "gcc", "true")
    path = f"{clone.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    code = (
        "import importlib.metadata, sys\n"
        "sys.path.insert(0, sys.argv.pop(1))\n"
        "importlib.metadata.version = lambda name: '9.9'\n"
        "import doctor\n"
        "sys.modules['flashoptim_dist'] = doctor\n"
        "doctor.check_index = lambda: doctor.Check('package index', 'good', '')\n"
        "sys.exit(doctor.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(packages), "--json"],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(clone / "launch")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    checks, abilities = _facts(done)
    assert checks["GPUs"]["found"].startswith("2 x NVIDIA H100")
    assert checks["NCCL"]["found"] == "2.27.5"
    for what in (FUSED, SINGLE):
        if what in wont:
            assert not abilities[what]["runs"]
            assert abilities[what]["why"] == wont[what]
            assert abilities[what]["fix"]
        elif values["usable"]:
            assert abilities[what]["runs"], abilities[what]
