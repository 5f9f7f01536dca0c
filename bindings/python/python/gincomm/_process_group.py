# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rank of gin for a process group of torch.distributed."""

from datetime import timedelta
from typing import Any, Optional

import torch

from . import Rank, StateError, gpus, init, unique_id
from . import rank as _rank
from ._deep_ep_rows import require


def timeout_of(group: Any) -> Optional[timedelta]:
    """Returns the timeout of a process group's collectives; None for a rank of gin, which has none."""
    if isinstance(group, Rank):
        return None
    kind = "cuda" if torch.cuda.is_available() and torch.device("cuda") in group._device_types else "cpu"
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    return getattr(options, "_timeout", None)


def join(group: Any, device: Any) -> Rank:
    """Returns the rank of gin for a process group, or a rank of gin itself. Collective."""
    if isinstance(group, Rank):
        require(device is None, "a rank of gin has a device: do not pass another one")
        return group
    require(group is not None, "pass a process group of torch.distributed, or a rank of gin")
    number, ranks = group.rank(), group.size()
    try:
        rank = _rank()
    except StateError:
        from torch import distributed

        if device is None:
            has_gpu = torch.cuda.is_available() and gpus()
            device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else "virtual"
        shared = [unique_id() if number == 0 else None]
        distributed.broadcast_object_list(shared, src=distributed.get_global_rank(group, 0), group=group)
        limit = timeout_of(group)
        seconds = limit.total_seconds() if limit is not None else None
        device = "virtual" if str(device) == "cpu" else device
        return init(number, ranks, shared[0], device=device, timeout=seconds or 300.0, collective_timeout=seconds)
    if (rank.rank, rank.ranks) != (number, ranks):
        raise StateError(
            f"this process is rank {rank.rank} of {rank.ranks} in gin's job, and rank {number} of {ranks} in the group: "
            "a process is in one job, so pass a group of all its ranks"
        )
    return rank
