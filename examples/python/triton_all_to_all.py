# SPDX-License-Identifier: MIT OR Apache-2.0
"""An all-to-all inside a kernel of Triton, which doubles each block as it arrives, on two GPUs of a host:

    torchrun --nproc-per-node 2 triton_all_to_all.py

Program instance p exchanges blocks with rank p. Signal r of a rank counts the blocks of rank r that have arrived, signal
`ranks + r` the own blocks that rank r has used.
"""

import os
import sys

import gincomm as gin
import torch
import triton
import triton.language as tl
from gincomm import triton as gt

ELEMENTS = 1 << 18
ROUNDS = 20


# Without this Triton compiles again for values such as 1.
@triton.jit(do_not_specialize=["rank", "round"])
def all_to_all(comm, inbox_window, outbox_window, inbox, result, rank, ranks, elements, round, deadline, TILE: tl.constexpr):
    peer = tl.program_id(0)
    nbytes = elements.to(tl.int64) * 4
    # The peer has used the block of the last round, so this one may replace it.
    fault = gt.wait_signal(comm, ranks + peer, round - 1, deadline)
    if fault == 0:
        fault = gt.put(comm, peer, inbox_window, rank * nbytes, outbox_window, peer * nbytes, nbytes, deadline, signal=rank)
    if fault == 0:
        fault = gt.wait_signal(comm, peer, round, deadline)
    if fault == 0:
        start = peer.to(tl.int64) * elements
        for tile in range(0, elements, TILE):
            place = start + tile + tl.arange(0, TILE)
            mask = tile + tl.arange(0, TILE) < elements
            tl.store(result + place, tl.load(inbox + place, mask) * 2, mask)
        fault = gt.signal(comm, peer, ranks + rank, deadline)
    if fault == 0:
        # The next round's kernels write to the outbox.
        fault = gt.flush(comm, deadline)
    gt.report(comm, fault)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    rank = gin.init(device=f"cuda:{local}")
    me, ranks = rank.rank, rank.ranks
    with rank.communicator(signals=2 * ranks) as comm, torch.cuda.stream(torch.cuda.Stream()):
        inbox_window, outbox_window = (comm.alloc_window((ranks, ELEMENTS), "float32") for _ in range(2))
        inbox, outbox = torch.from_dlpack(inbox_window), torch.from_dlpack(outbox_window)
        result = torch.zeros_like(inbox)
        grid, options = (ranks,), {"num_warps": 8, "launch_cooperative_grid": True, "extern_libs": gt.extern_libs()}

        def step(round):
            arguments = (comm.handle, inbox_window.handle, outbox_window.handle, inbox, result, me, ranks, ELEMENTS, round)
            return arguments, {"deadline": gin.Deadline(10).ns, "TILE": 1024} | options

        # No rank waits for a rank that still compiles.
        arguments, keywords = step(1)
        all_to_all.warmup(*arguments, grid=grid, **keywords)
        torch.cuda.synchronize()
        rank.barrier()
        times = []
        for round in range(1, ROUNDS + 1):
            # Block p of rank r is 100 * round + 10 * p + r.
            outbox.copy_((100 * round + 10 * torch.arange(ranks, device="cuda") + me)[:, None].expand_as(outbox))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            arguments, keywords = step(round)
            begin.record()
            all_to_all[grid](*arguments, **keywords)
            end.record()
            torch.cuda.synchronize()
            comm.check()
            times.append(begin.elapsed_time(end))
            expected = 2 * (100 * round + 10 * me + torch.arange(ranks, device="cuda"))[:, None]
            if not (result == expected).all():
                sys.exit(f"rank {me}, round {round}: expected {expected}, found {result}")
    middle = 1000 * sorted(times)[ROUNDS // 2]
    print(f"rank {me} of {ranks}: {ROUNDS} rounds of {4 * ELEMENTS} bytes for each rank are right, {middle:.1f} us", flush=True)
    rank.close()


main()
