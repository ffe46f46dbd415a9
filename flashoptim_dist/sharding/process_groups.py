"""Process groups over a part of all ranks, made by that part alone, so that nothing waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def device_served(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return a device if a group serves it, else one that the group serves."""
    devices = group._device_types
    if device in devices or device.type in {d.type for d in devices}:
        return device
    return torch.device(devices[0].type, torch.accelerator.current_device_index())


def can_make_a_group(over: Sequence[dist.ProcessGroup], possible: bool = True) -> bool:
    """Return whether these ranks can make a group by themselves (``new_group(use_local_synchronization=True)``).

    Not where they have made different numbers of groups before, as the number is in the new one's name and they would
    wait for each other under different names; nor where one of them says that it isn't ``possible``. Waits for the
    groups' devices. All ranks must call.

    Args:
        over: groups of more than one rank, a reduction over one after the other of which is one over the ranks.
        possible: what this rank says.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    agreed = torch.tensor([count, -count, int(not possible)])
    for group in over:
        agreed = agreed.to(device_served(group, agreed.device))
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, refused = agreed.tolist()
    return bool(not refused and largest == -smallest)
