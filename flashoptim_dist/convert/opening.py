"""Finding out what a path holds, and reading its contents without its tensors."""

from __future__ import annotations

from pathlib import Path

from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.format_check import check_record
from flashoptim_dist.checkpoint.verify import check_manifest_exists
from flashoptim_dist.convert.dcp_source import is_dcp, newest_in, read_dcp
from flashoptim_dist.convert.safetensors_folder import is_safetensors, read_safetensors
from flashoptim_dist.convert.torch_source import read_torch_file
from flashoptim_dist.convert.training_state import TrainingState


def open_checkpoint(path: str | Path) -> TrainingState:
    """Return the contents of a checkpoint: a DCP directory (or a folder of them: the newest), a file of torch.save, a
    folder or file of safetensors. Tensors stay on disk.

    Raises:
        CheckpointError: there is none, or it is damaged, unsafe, or of a newer layout; the file is named.
    """
    place = newest_in(local_path(path))
    try:
        return _open(place)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # contents that nobody thought of: a file may come from anybody
        raise DamagedCheckpointError(f"{place} can't be read: {type(error).__name__}: {error}") from error


def _open(place: Path) -> TrainingState:
    if not place.exists():
        raise CheckpointError(f"{place} does not exist")
    if is_safetensors(place):
        return read_safetensors(place)
    if place.is_file():
        return read_torch_file(place)
    if not is_dcp(place):
        raise CheckpointError(
            f"{place} is no checkpoint: it holds neither .metadata (a DCP directory) nor .safetensors files"
        )
    state = read_dcp(place)
    check_record(state.record, place)
    if state.record.get("library") == "flashoptim_dist":
        check_manifest_exists(place)
    return state
