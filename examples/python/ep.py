# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokens go to experts on other ranks, and their sums come back: python ep.py. Ranks are threads, on virtual GPUs."""

import gincomm as gin
import numpy as np
from gincomm.ep import Combine, Element, Group, GroupConfig, Tokens


def layer(rank):
    config = GroupConfig(experts=2, hidden=8, topk=2, element=Element.F32, deadline=gin.Deadline(30))
    with rank.communicator() as comm, Group(comm, config) as group:
        stream, slot = rank.stream(), group.slot(0)
        rows, sums = np.full((3, 8), rank.rank + 1, np.float32), np.zeros((3, 8), np.float32)
        ids = np.array([[0, -1], [1, -1], [0, 1]], np.int32)  # the experts of three tokens; -1 is none
        received = slot.exchange(stream, Tokens(rows, ids))
        stream.synchronize()
        np.from_dlpack(received.rows())[:] *= 10**rank.rank  # this rank's expert, in place
        received.combine(stream, Combine.reduced(sums))
        stream.synchronize()
        return group.status(), sums[:, 0].tolist()


print(gin.launch(2, layer, device="virtual"))
