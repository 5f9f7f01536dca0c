# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every rank puts a text into its neighbour's memory: python hello_put.py. Ranks are threads here, on virtual GPUs."""

import gincomm as gin
import numpy as np


def hello(rank):
    with rank.communicator(signals=1) as comm:
        mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(32, "uint8")
        np.from_dlpack(mine)[:17] = np.frombuffer(f"hello from rank {rank.rank}".encode(), np.uint8)
        stream = rank.stream()
        stream.launch("hello_put", comm, mine, inbox, gin.Deadline(1))
        stream.synchronize()
        comm.check()
        return bytes(np.from_dlpack(inbox)).rstrip(b"\0").decode()


print(gin.launch(2, hello, device="virtual"))
