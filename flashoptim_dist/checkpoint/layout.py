"""Names: of the files and folders on disk, and of the entries inside a checkpoint.

    DIRECTORY/
        latest                      name of the newest complete checkpoint
        step-00000100/              one checkpoint: a DCP directory
            .metadata  __0_0.distcp  __1_0.distcp ...  manifest.json
        .step-00000200.saving-...   a save under way, or what a killed one left
        .step-00000050.deleting-... a checkpoint being deleted, likewise

Entries: ``model.<name>``, ``optimizer.state.<name>.<state>``, ``optimizer.param_groups.<i>.<key>`` as torch's own
``get_model_state_dict`` and ``get_optimizer_state_dict`` call them, and ``format``, ``scheduler``, ``extras...``,
``rng.<rank>``, ``dataloader.<rank>``.
"""

from __future__ import annotations

import re
from pathlib import Path

METADATA = ".metadata"
MANIFEST = "manifest.json"
LATEST = "latest"

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state"
PARAM_GROUPS = "param_groups"
FORMAT = "format"
SCHEDULER = "scheduler"
DATALOADER = "dataloader"
RNG = "rng"
EXTRAS = "extras"

Path_ = tuple[str | int, ...]
"""Where an entry sits in the nested state dict."""

_STEP = re.compile(r"step-(\d{8,})")


def key_of(path: Path_) -> str:
    """Return the name of an entry in the flat dictionary."""
    return ".".join(map(str, path))


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def steps_in(directory: Path) -> list[int]:
    """Return the steps whose checkpoints are in a directory, whole or not, in ascending order."""
    if not directory.is_dir():
        return []
    found = (step_of(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(step for step in found if step is not None)


def may_be_replaced(directory: Path) -> bool:
    """Return whether a folder is a checkpoint or a model folder, whole or not, and not something else altogether."""
    patterns = (METADATA, "*.distcp", MANIFEST, "*.safetensors")
    return step_of(directory.name) is not None or any(any(directory.glob(pattern)) for pattern in patterns)


def staging_path(target: Path, token: str) -> Path:
    """Return the hidden folder beside ``target`` in which a save is written."""
    return target.with_name(f".{target.name}.saving-{token}")


def replaced_path(target: Path) -> Path:
    """Return where an older checkpoint of the same name waits while the new one takes its place."""
    return target.with_name(f".{target.name}.replaced")


def deleting_path(directory: Path, token: str) -> Path:
    """Return the hidden name under which a directory is deleted; that of one being deleted is its own."""
    if ".deleting" in directory.name:
        return directory
    return directory.with_name(f".{directory.name.removeprefix('.')}.deleting-{token}")


def leftovers(target: Path) -> list[Path]:
    """Return the folders that earlier saves to ``target`` left when they were killed."""
    name = _escape(target.name)
    patterns = (f".{name}.saving-*", f".{name}.deleting-*", f".{name}.replaced.deleting-*")
    return sorted(found for pattern in patterns for found in target.parent.glob(pattern))


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
