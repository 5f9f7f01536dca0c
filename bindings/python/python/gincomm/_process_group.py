# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rank of gin for a process group of torch.distributed."""

from typing import Any

import torch

from . import Rank, StateError, gpus, init, unique_id
from . import rank as _rank
from ._deep_ep_rows import require


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
        return init(number, ranks, shared[0], device="virtual" if str(device) == "cpu" else device)
    if (rank.rank, rank.ranks) != (number, ranks):
        raise StateError(
            f"this process is rank {rank.rank} of {rank.ranks} in gin's job, and rank {number} of {ranks} in the group: "
            "a process is in one job, so pass a group of all its ranks"
        )
    return rank
