# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sums over ranks inside kernels of Triton, in two ways, on two GPUs of a host:

    torchrun --nproc-per-node 2 triton_fused_add.py

`receive_and_add` computes a tile, puts it to the right neighbour, and adds the tile of the left neighbour when it arrives.
With two ranks the result is the sum of both. `load_and_add` sums the tiles of all ranks by loads over NVLink.
"""

import os
import sys

import gincomm as gin
import torch
import triton
import triton.language as tl
from gincomm import triton as gt

TILE = 2048
TILES = 64
ROUNDS = 20


# Without this Triton compiles again for values such as 1.
@triton.jit(do_not_specialize=["left", "right", "round"])
def receive_and_add(comm, inbox_window, outbox_window, inbox, outbox, x, y, result, left, right, round, deadline,
                    TILE: tl.constexpr):
    """Program instance i does tile i, with two signals: 2 * i counts arrivals, 2 * i + 1 the tiles that right has added."""
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    own = tl.load(x + place) * tl.load(y + place)
    tl.store(outbox + place, own)
    fault = gt.wait_signal(comm, 2 * tile + 1, round - 1, deadline)
    if fault == 0:
        # It releases the stores of the block.
        fault = gt.put(comm, right, inbox_window, tile * TILE * 4, outbox_window, tile * TILE * 4, TILE * 4, deadline,
                       signal=2 * tile, counter=tile)
    if fault == 0:
        fault = gt.wait_signal(comm, 2 * tile, round, deadline)
    if fault == 0:
        tl.store(result + place, own + tl.load(inbox + place))
        fault = gt.signal(comm, left, 2 * tile + 1, deadline)
    if fault == 0:
        # The source may be reused.
        fault = gt.wait_counter(comm, tile, round, deadline)
    gt.report(comm, fault)


@triton.jit
def load_and_add(comm, outbox_window, outbox, x, y, result, ranks, deadline, TILE: tl.constexpr):
    """Program instance i does tile i, and meets the instances i of the other ranks in barrier i."""
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    tl.store(outbox + place, tl.load(x + place) * tl.load(y + place))
    fault = gt.barrier(comm, "lsa", tile, "none", deadline)
    if fault == 0:
        sum = tl.zeros((TILE,), tl.float32)
        for peer in range(0, ranks):
            sum += tl.load(tl.multiple_of(gt.peer_pointer(comm, outbox_window, peer, tl.float32), 16) + place)
        tl.store(result + place, sum)
        # All ranks have loaded the tile.
        fault = gt.barrier(comm, "lsa", tile, "none", deadline)
    gt.report(comm, fault)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    rank = gin.init(device=f"cuda:{local}")
    me, ranks = rank.rank, rank.ranks
    if ranks != 2:
        sys.exit(f"the program is for 2 ranks, and {ranks} were started")
    requirements = {"signals": 2 * TILES, "counters": TILES, "lsa_barriers": TILES}
    with rank.communicator(**requirements) as comm, torch.cuda.stream(torch.cuda.Stream()):
        inbox_window, outbox_window = (comm.alloc_window(TILES * TILE, "float32") for _ in range(2))
        inbox, outbox = torch.from_dlpack(inbox_window), torch.from_dlpack(outbox_window)
        grid, options = (TILES,), {"TILE": TILE, "launch_cooperative_grid": True, "extern_libs": gt.extern_libs()}
        deadline, other = gin.Deadline(10).ns, 1 - me
        places = torch.arange(TILES * TILE, device="cuda", dtype=torch.float32)
        x, result = places % 7 + me, torch.zeros_like(places)

        def receive(y, round, how):
            handles = comm.handle, inbox_window.handle, outbox_window.handle
            how(*handles, inbox, outbox, x, y, result, other, other, round, deadline, **options)

        def load(y, round, how):
            how(comm.handle, outbox_window.handle, outbox, x, y, result, ranks, deadline, **options)

        for kernel, step in ((receive_and_add, receive), (load_and_add, load)):
            # No rank waits for a rank that still compiles.
            step(places, 1, lambda *values, **keywords: kernel.warmup(*values, grid=grid, **keywords))
            torch.cuda.synchronize()
            rank.barrier()
            times = []
            for round in range(1, ROUNDS + 1):
                y = places % 5 + round
                expected = (places % 7 + 0) * y + (places % 7 + 1) * y
                result.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step(y, round, kernel[grid])
                end.record()
                torch.cuda.synchronize()
                comm.check()
                times.append(begin.elapsed_time(end))
                if not (result == expected).all():
                    sys.exit(f"rank {me}, round {round} of {kernel.__name__}: expected {expected}, found {result}")
            middle = 1000 * sorted(times)[ROUNDS // 2]
            print(f"rank {me} of {ranks}: {ROUNDS} sums of {kernel.__name__} are right, {middle:.1f} us", flush=True)
    rank.close()


main()
