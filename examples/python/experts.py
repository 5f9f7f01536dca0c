# SPDX-License-Identifier: MIT OR Apache-2.0
"""Experts as a kernel in Rust, between dispatch and combine, and in one kernel with both: python experts.py. Ranks are
threads, on virtual GPUs."""

import gincomm as gin
import numpy as np
from gincomm.ep import Combine, Element, Group, GroupConfig, Tokens


def layer(rank):
    config = GroupConfig(experts=2, hidden=8, topk=2, element=Element.F32, deadline=gin.Deadline(30))
    with rank.communicator() as comm, Group(comm, config) as group:
        stream, slot = rank.stream(), group.slot(0)
        rows, sums = np.full((3, 8), rank.rank + 1, np.float32), np.zeros((3, 8), np.float32)
        ids = np.array([[0, -1], [1, -1], [0, 1]], np.int32)
        # The stream orders all three; nobody waits in between.
        received = slot.exchange(stream, Tokens(rows, ids))
        stream.launch("scale_received", received, 8, 10.0**rank.rank, grid=4)
        received.combine(stream, Combine.reduced(sums))
        stream.synchronize()
        # The same as one kernel of one block.
        again = np.zeros_like(sums)
        fused = slot.fuse(stream, Tokens(rows, ids), Combine.reduced(again))
        stream.launch("exchange_scaled", *fused, 8, 10.0**rank.rank, grid=1, block=64, shared=fused.shared)
        stream.synchronize()
        return group.status(), sums[:, 0].tolist(), bool((again == sums).all())


print(gin.launch(2, layer, device="virtual"))
