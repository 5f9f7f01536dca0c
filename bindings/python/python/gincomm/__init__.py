# SPDX-License-Identifier: MIT OR Apache-2.0
"""GPU-initiated networking: kernels put data into other GPUs' memory. docs/python.md has the whole interface."""

import sys

from ._gin import *
from ._gin import __all__ as _native
from ._gin import __version__, ep

__all__ = [*_native, "from_torch"]

# So that `import gincomm.ep` finds it.
sys.modules[f"{__name__}.ep"] = ep


def from_torch(group, device=None):
    """Returns the rank of gin for a process group of torch.distributed. Collective.

    A process without a job joins one with the ranks of the group, on `device`: by default torch's current GPU, or a
    virtual GPU if there is none. Memory that NCCL allocated, as by `torch.cuda.MemPool(backend.mem_allocator)`, can be
    a window of all processes of the host.
    """
    from ._process_group import join

    return join(group, device)
