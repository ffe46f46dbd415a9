"""The shell functions that make .venv, in a copy of launch/ whose pip and torch are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "cksum", "dirname", "env", "grep", "mkdir", "mv", "rm", "touch")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the files that an install reads, and an empty bin/ to serve as PATH."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", clone / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "flashoptim_dist/_version.py"):
        (clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        place = shutil.which(tool)
        assert place, f"{tool} is not on this machine"
        (tmp_path / "bin" / tool).symlink_to(place)
    return clone


# A Python that runs `prelude` before what it is asked to run with -c, and whose `-m venv` makes an environment with an
# empty pip: the real one takes seconds.
PYTHON = """#!{executable}
import os, sys, sysconfig, venv
option, text, *rest = sys.argv[1:]
if option == "-c":
    sys.argv[:] = ["-c", *rest]
    {prelude}
    exec(text)
elif (option, text) == ("-m", "venv") and {venv}:
    venv.create(rest[0], symlinks=True)
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10
    library = sysconfig.get_path("purelib", scheme, vars={{"base": rest[0], "platbase": rest[0]}})
    os.mkdir(library + "/pip")
    open(library + "/pip/__main__.py", "w").close()
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def add_python(clone: Path, name: str, prelude: str = "pass", *, real_venv: bool = False) -> Path:
    """Put a Python on PATH under `name`."""
    path = clone.parent / "bin" / name
    path.write_text(PYTHON.format(executable=sys.executable, prelude=prelude, venv=not real_venv))
    path.chmod(0o755)
    return path


def add_program(clone: Path, name: str, script: str) -> None:
    path = clone.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def shell(clone: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash after lib.sh, as a script of launch/ does."""
    environment = {"PATH": str(clone.parent / "bin"), "HOME": str(clone.parent), **variables}
    script = f"set -euo pipefail; source launch/lib.sh; {code}"
    return subprocess.run(
        ["bash", "-c", script, "launch/test"],
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Stand-ins for the parts of an install that need an index: what pip is asked for is printed.
NO_INDEX = 'pip_install() { echo "pip install $*"; }; imports() { return 0; }; '


def test_without_any_python(clone: Path) -> None:
    done = shell(clone, "find_python cpu")
    assert done.returncode == 2
    assert "no usable Python found. Install Python 3.10 to 3.13" in done.stderr


def test_each_rejected_python_is_named_with_its_reason(clone: Path) -> None:
    add_program(clone, "python3.12", "exit 127")
    add_python(clone, "python3.10", 'sys.modules["ensurepip"] = None')
    add_python(clone, "python3", "sys.version_info = (3, 9, 18)")
    done = shell(clone, "find_python cpu")
    assert done.returncode == 2
    assert "python3.12 does not run" in done.stderr
    assert "python3.10 lacks the venv or the ensurepip module" in done.stderr
    assert "python3 is Python 3.9" in done.stderr


def test_a_fitting_python_is_found_behind_broken_ones(clone: Path) -> None:
    add_program(clone, "python3.11", "exit 127")
    wanted = add_python(clone, "python3.13")
    done = shell(clone, "find_python cpu")
    assert (done.returncode, done.stdout.strip()) == (0, str(wanted))


def test_python_3_11_comes_first_and_the_variable_before_it(clone: Path) -> None:
    first = add_python(clone, "python3.11")
    add_python(clone, "python3")
    named = add_python(clone, "my-python")
    assert shell(clone, "find_python cpu").stdout.strip() == str(first)
    assert shell(clone, "find_python cpu", PYTHON="my-python").stdout.strip() == str(named)
    done = shell(clone, "find_python cpu", PYTHON="no-python")
    assert done.returncode == 2
    assert "PYTHON=no-python is not there" in done.stderr


def test_with_a_gpu_the_python_whose_torch_reaches_it_comes_first(clone: Path) -> None:
    add_python(clone, "python3.11")
    wanted = add_python(clone, "python3")
    code = "has_cuda_torch() { [[ $1 == */python3 ]]; }; find_python gpu"
    assert shell(clone, code).stdout.strip() == str(wanted)
    code = "has_cuda_torch() { return 1; }; find_python gpu"
    assert shell(clone, code).stdout.strip().endswith("/python3.11")


@pytest.mark.parametrize(
    ("listing", "hidden", "found"),
    [("GPU 0: NVIDIA H100", None, True), ("GPU 0: NVIDIA H100", "", False), ("", None, False)],
)
def test_gpu_detection(clone: Path, listing: str, hidden: str | None, found: bool) -> None:
    add_program(clone, "nvidia-smi", f'echo "{listing}"')
    variables = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert (shell(clone, "has_gpu", **variables).returncode == 0) is found


def test_without_a_gpu_the_cpu_build_comes_first(clone: Path) -> None:
    add_python(clone, "python3.11")
    done = shell(clone, NO_INDEX + "has_gpu() { return 1; }; install_project recipes")
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert asked[0] == "pip install torch==2.13.0"
    assert asked[-1] == f"pip install --no-build-isolation --editable {clone}[recipes]"


def test_with_a_gpu_torch_is_left_to_pip(clone: Path) -> None:
    add_python(clone, "python3.11")
    done = shell(clone, NO_INDEX + "has_gpu() { return 0; }; has_cuda_torch() { return 1; }; install_project recipes")
    assert done.returncode == 0, done.stderr
    assert "torch==" not in done.stdout
    assert f"--editable {clone}[recipes]" in done.stdout


def test_packages_of_a_python_with_a_cuda_torch_are_inherited(clone: Path, tmp_path: Path) -> None:
    site = tmp_path / "their-site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("")
    add_python(clone, "python3.11", f'sys.path.insert(0, "{site}")')
    gpu = "has_gpu() { return 0; }; has_cuda_torch() { return 0; }; "
    done = shell(clone, NO_INDEX + gpu + "install_project recipes")
    assert done.returncode == 0, done.stderr
    code = "import torch; print(torch.__file__)"
    seen = subprocess.run([clone / ".venv/bin/python", "-I", "-c", code], capture_output=True, text=True, check=False)
    assert seen.stdout.strip() == str(site / "torch" / "__init__.py"), seen.stderr


def test_second_install_does_nothing_until_what_it_read_changes(clone: Path) -> None:
    add_python(clone, "python3.11")
    install = NO_INDEX + "installed() { return 0; }; install_project recipes"
    assert shell(clone, install).stdout
    again = shell(clone, install)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    with (clone / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert "--editable" in shell(clone, install).stdout


def test_moved_clone_is_installed_again(clone: Path) -> None:
    add_python(clone, "python3.11")
    install = NO_INDEX + "installed() { return 0; }; install_project recipes"
    shell(clone, install)
    moved = clone.rename(clone.parent / "moved")
    assert f"--editable {moved}[recipes]" in shell(moved, install).stdout


@pytest.mark.parametrize("what", ["no python", "no pip", "not a folder"])
def test_half_made_venv_is_made_anew(clone: Path, what: str) -> None:
    add_python(clone, "python3.11")
    install = NO_INDEX + "has_gpu() { return 1; }; install_project recipes"
    venv = clone / ".venv"
    if what == "not a folder":
        venv.write_text("kept")
    else:
        venv.mkdir()
        (venv / ".made-by-launch").touch()
        if what == "no pip":
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
            (venv / "left-over").touch()
    done = shell(clone, install)
    assert done.returncode == 0, done.stderr
    subprocess.run([venv / "bin/python", "-m", "pip", "--version"], check=True, capture_output=True)
    assert not (venv / "left-over").exists()
    aside = list(clone.glob(".venv.broken.*"))
    assert [path.read_text() for path in aside] == (["kept"] if what == "not a folder" else [])


def test_damaged_install_is_made_anew_once(clone: Path) -> None:
    add_python(clone, "python3.11")
    install = NO_INDEX + "has_gpu() { return 1; }; imports() { return 1; }; install_project recipes"
    done = shell(clone, install)
    assert done.returncode == 2
    assert done.stderr.count("is damaged: making it anew") == 1
    assert "does not import" in done.stderr
    assert not list((clone / ".venv").glob(".installed-*"))


def test_venv_of_an_unsupported_python_is_left_alone(clone: Path) -> None:
    add_python(clone, "python3.11")
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(add_python(clone, "old", "sys.version_info = (3, 9, 18)"), clone / ".venv" / "bin" / "python")
    done = shell(clone, NO_INDEX + "install_project recipes")
    assert done.returncode == 2
    assert "is Python 3.9; Python 3.10 to 3.13 is needed" in done.stderr
    assert (clone / ".venv" / "bin" / "python").is_file()


@pytest.mark.full
def test_failed_download_is_explained(clone: Path, tmp_path: Path) -> None:
    add_python(clone, "python3.11", real_venv=True)
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = shell(clone, "has_gpu() { return 1; }; install_project recipes", **nothing)
    assert done.returncode == 2
    assert "pip could not install torch==2.13.0" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr


def test_unwritable_clone_is_refused(clone: Path) -> None:
    """/proc takes no folder from anyone, root included, whom permission bits do not stop."""
    add_python(clone, "python3.11")
    code = "ROOT=/proc VENV=/proc/.venv VENV_PYTHON=/proc/.venv/bin/python VENV_MARK=/proc/.venv/mark; "
    done = shell(clone, NO_INDEX + code + "install_project recipes")
    assert done.returncode == 2
    assert "cannot write to /proc: clone the repository to a folder you may write to" in done.stderr
    assert done.stdout == ""


def test_modules_run_without_the_current_folder_on_the_path(clone: Path) -> None:
    (clone / "shadow.py").write_text("raise SystemExit('imported from the current folder')")
    script = f'VENV_PYTHON="{sys.executable}"; run_module shadow'
    done = shell(clone, script)
    assert done.returncode == 1
    assert "No module named shadow" in done.stderr
