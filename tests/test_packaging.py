"""What installs, under which names, and what an import costs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashoptim_dist

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *arguments: str, cwd: Path) -> str:
    """The output of a Python that sees no PYTHONPATH and no current folder."""
    command = [sys.executable, "-I", "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the build leaves nothing beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("flashoptim_dist", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("wheel")
    run_python(
        "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])", str(built), cwd=source
    )
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel's files land in: it is pure Python, so that installing is unpacking."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_has_one_top_level_package(installed: Path) -> None:
    top_level = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top_level == {"flashoptim_dist"}
    (listed,) = installed.glob("*.dist-info/top_level.txt")
    assert listed.read_text().split() == ["flashoptim_dist"]


@pytest.mark.parametrize(("source", "target"), [("flashoptim_dist", "."), ("kernels", "flashoptim_dist")])
def test_wheel_has_every_module(installed: Path, source: str, target: str) -> None:
    modules = {path.relative_to(ROOT / source) for path in (ROOT / source).rglob("*.py")}
    assert modules
    missing = [str(module) for module in modules if not (installed / target / source / module).is_file()]
    assert missing == []


def test_wheel_is_typed_and_licensed(installed: Path) -> None:
    assert (installed / "flashoptim_dist" / "py.typed").is_file()
    (metadata,) = installed.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: <3.14,>=3.10" in lines
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_kernels_import_under_the_package_name_only(installed: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib.util
import flashoptim_dist.kernels
top_level = importlib.util.find_spec("kernels")
print(flashoptim_dist.kernels.__file__)
print(top_level.origin if top_level else None)
"""
    kernels, top_level = run_python(code, str(installed), cwd=tmp_path).splitlines()
    assert Path(kernels) == installed / "flashoptim_dist" / "kernels" / "__init__.py"
    assert not Path(top_level).is_relative_to(installed)


def test_tests_do_not_see_the_root() -> None:
    """With the root on sys.path, transformers would take kernels/ for the package of that name."""
    spec = importlib.util.find_spec("kernels")
    assert spec is None or not Path(str(spec.origin)).is_relative_to(ROOT / "kernels")
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_import_loads_no_optional_package(tmp_path: Path) -> None:
    code = "import sys, flashoptim_dist; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = run_python(code, cwd=tmp_path).split()
    assert "torch" in loaded
    assert not {"triton", "transformers", "tyro", "torchdata", "torchtitan", "tensorboard", "kernels"} & set(loaded)


def test_version_has_one_definition(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == flashoptim_dist.__version__
    assert importlib.metadata.version("flashoptim-dist") == flashoptim_dist.__version__
    sources = [path for name in ("flashoptim_dist", "kernels") for path in (ROOT / name).rglob("*.py")]
    definitions = [
        path.relative_to(ROOT).as_posix()
        for path in [*sources, ROOT / "setup.py"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__version__" for target in node.targets)
    ]
    assert definitions == ["flashoptim_dist/_version.py"]
    assert "\nversion = " not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]


def test_every_dependency_is_declared() -> None:
    """Each third-party module that the package or the recipes import stands in pyproject.toml.

    Benchmarks import the peers they measure inside functions, and go without those that are not installed.
    """
    wanted = importlib.metadata.requires("flashoptim-dist") or []
    declared = {re.split(r"[^\w.-]", requirement.strip())[0].lower() for requirement in wanted}
    modules_of = importlib.metadata.packages_distributions()  # PyYAML's module is yaml
    declared |= {module for module, names in modules_of.items() if declared & {name.lower() for name in names}}
    known = {"flashoptim_dist", *sys.stdlib_module_names, *(name.replace("-", "_") for name in declared)}
    undeclared = []
    for folder in ("flashoptim_dist", "kernels", "recipes", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # Scripts import what lies beside them, and so does what only they import.
            places = [place for place in path.parents if place.is_relative_to(ROOT / folder)]
            beside = {one.stem for place in places for one in place.iterdir()}
            modules = imported_modules(path, inside_functions="benchmarks" not in path.parts)
            undeclared += [f"{path.relative_to(ROOT)} imports {module}" for module in sorted(modules - known - beside)]
    assert undeclared == []


def imported_modules(path: Path, *, inside_functions: bool) -> set[str]:
    """Top-level names of the absolute imports of a file, with or without those inside functions."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(module) if inside_functions else module.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found
