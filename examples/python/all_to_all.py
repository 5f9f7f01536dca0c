# SPDX-License-Identifier: MIT OR Apache-2.0
"""An all-to-all of torch tensors inside a CUDA graph, on two GPUs of a host:

    torchrun --nproc-per-node 2 all_to_all.py

The graph computes the blocks to send, exchanges them by a kernel of gin, and adds up what has arrived. Each replay does
all of it again, without a call of the host in between.
"""

import os
import sys

import gincomm as gin
import torch

BLOCK = 1 << 20
ROUNDS = 10


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    rank = gin.init(device=f"cuda:{local}")
    with rank.communicator(signals=1, world_barriers=1) as comm:
        # Windows that all ranks reach, and tensors of the same memory. The kernel moves bytes.
        inbox_window, outbox_window = (comm.alloc_window((rank.ranks, 4 * BLOCK), torch.uint8) for _ in range(2))
        inbox, outbox = (torch.from_dlpack(window).view(torch.float32) for window in (inbox_window, outbox_window))
        data = torch.zeros(rank.ranks, BLOCK, device="cuda")
        sums = torch.zeros(BLOCK, device="cuda")

        def step():
            torch.add(data, float(rank.rank), out=outbox)
            # torch captures on a stream of its own, and the kernel follows the work that is on it.
            stream = rank.stream(torch.cuda.current_stream())
            stream.launch("all_to_all", comm, inbox_window, outbox_window, gin.Deadline(10), block=256)
            torch.sum(inbox, 0, out=sums)

        # torch loads its kernels at their first use: now, and not in the capture.
        torch.sum(torch.add(data, 1.0, out=outbox), 0, out=sums)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # gin's proxy calls the driver from a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for round in range(ROUNDS):
            # Block p of rank r is 100 * round + 10 * p + r.
            data.copy_((100 * round + 10 * torch.arange(rank.ranks, device="cuda"))[:, None].expand_as(data))
            graph.replay()
            torch.cuda.synchronize()
            comm.check()
            ranks = rank.ranks
            expected = ranks * (100 * round + 10 * rank.rank) + ranks * (ranks - 1) / 2
            if not (sums == expected).all():
                sys.exit(f"rank {rank.rank}, round {round}: expected {expected}, found {sums}")
        del graph
    print(f"rank {rank.rank} of {rank.ranks}: {ROUNDS} rounds of {4 * BLOCK} bytes for each rank are right", flush=True)
    rank.close()


main()
