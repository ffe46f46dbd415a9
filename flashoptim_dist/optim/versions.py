"""Reading state that an earlier version of the number format wrote: the one place where versions differ.

When the format changes, ``formats.spec.FORMAT_VERSION`` goes up by one and ``UPGRADES`` gains an entry that decodes the
moments of the version before, which are then encoded anew. Corrections have never changed. Nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from flashoptim_dist.formats import FORMAT_NAME, FORMAT_VERSION, GROUP_SIZE, decode_moments, version1

Decoder = Callable[[Sequence[tuple[Tensor, Tensor]], Sequence[bool]], list[Tensor]]
"""(codes and scales of each moment in groups, whether each is a momentum) -> fp32 moments; see ``decode_moments``."""

UPGRADES: dict[int, Decoder] = {1: version1.decode_moments}
"""By earlier version: what decodes its moments."""


def check_format(spec: Mapping[str, Any] | None) -> int:
    """Return the version of saved state by its format record; without a record, the current one.

    Raises:
        ValueError: another format or group size, or a version that this library does not read.
    """
    if spec is None:
        return FORMAT_VERSION
    name, version, group_size = spec.get("name"), spec.get("version"), spec.get("group_size", GROUP_SIZE)
    if name != FORMAT_NAME or group_size != GROUP_SIZE or not isinstance(version, int):
        raise ValueError(
            f"the state has number format {name!r} version {version!r} with groups of {group_size}; this library reads "
            f"{FORMAT_NAME!r} with groups of {GROUP_SIZE}"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"the state has number format {name!r} version {version}, and this library reads up to version "
            f"{FORMAT_VERSION}: install a newer flashoptim_dist"
        )
    if any(v not in UPGRADES for v in range(version, FORMAT_VERSION)):
        raise ValueError(
            f"the state has number format {name!r} version {version}, which this library no longer reads: it reads "
            f"from version {min(UPGRADES, default=FORMAT_VERSION)}"
        )
    return version


def decoder(version: int) -> Decoder:
    """Return what decodes the moments of a version."""
    return UPGRADES.get(version, decode_moments)
