# SPDX-License-Identifier: MIT OR Apache-2.0
"""One of two ranks on two hosts, whose communicators take RDMA NICs. `rdma.rs` runs it in virtual machines."""

import gincomm as gin
import numpy as np

COUNT = 1 << 16

rank = gin.init(device="virtual")
left = 1 - rank.rank
mine = np.arange(COUNT, dtype="float32") % 1000

# A job of several hosts takes the network "verbs".
with rank.communicator(signals=2, counters=1) as comm:
    recv, send = comm.alloc_window(COUNT, "float32"), comm.alloc_window(COUNT, "float32")
    np.from_dlpack(send)[:] = mine + rank.rank
    stream = rank.stream()
    stream.launch("ring_round", comm, recv, send, COUNT, 1, gin.Deadline(60))
    stream.synchronize()
    comm.check()
    print("recv", np.array_equal(np.from_dlpack(recv), mine + left))
    print("send", np.array_equal(np.from_dlpack(send), 2 * mine + 1))

# An abort of rank 1 ends a wait of rank 0 that has no limit.
comm = rank.communicator(signals=2, counters=1)
window = comm.alloc_window(0, "float32")
if rank.rank == 0:
    stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
rank.barrier()
if rank.rank == 1:
    comm.abort()
stream.synchronize(timeout=60)
try:
    comm.check()
except gin.FaultError as fault:
    print("fault", fault.kind, fault.rank, fault.back_end)
comm.destroy()
rank.close()
