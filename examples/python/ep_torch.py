# SPDX-License-Identifier: MIT OR Apache-2.0
"""A layer with a mixture of experts, by gin and by torch.distributed.all_to_all_single, with the same result:

    torchrun --nproc-per-node 2 ep_torch.py         # GPUs, and NCCL
    torchrun --nproc-per-node 2 ep_torch.py --cpu   # virtual GPUs, and Gloo
"""

import os
import sys

import gincomm as gin
import torch
import torch.distributed as dist
from gincomm.ep import Combine, Group, GroupConfig, Tokens

EXPERTS, HIDDEN, TOPK, TOKENS, ROUNDS = 8, 256, 2, 64, 5


def experts(rows, numbers, weights):
    """Returns the sums of this rank's experts for each row: here each multiplies by a number of its own."""
    factors = torch.where(numbers >= 0, weights * (numbers + 1), 0).sum(-1, keepdim=True)
    return (rows * factors).to(rows.dtype)


def by_torch(rows, ids, weights, rank, ranks):
    """Returns the rows that arrive, and the sums: each token's row goes once to each rank that has its experts."""
    local = EXPERTS // ranks
    here = [ids // local == each for each in range(ranks)]
    tokens = [of_rank.any(1).nonzero().flatten() for of_rank in here]
    to = [len(each) for each in tokens]
    counts = torch.empty(ranks, dtype=torch.int64, device=rows.device)
    dist.all_to_all_single(counts, torch.tensor(to, device=rows.device))
    of = counts.tolist()

    def exchange(values, to, of):
        arrived = torch.empty(sum(of), *values.shape[1:], dtype=values.dtype, device=values.device)
        dist.all_to_all_single(arrived, values, of, to)
        return arrived

    numbers = torch.cat([torch.where(here[each], ids % local, -1)[tokens[each]] for each in range(ranks)])
    tokens = torch.cat(tokens)
    arrived = exchange(rows[tokens], to, of)
    results = experts(arrived, exchange(numbers, to, of), exchange(weights[tokens], to, of))
    sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    sums.index_add_(0, tokens, exchange(results, of, to).float())
    return arrived, sums.to(rows.dtype)


def by_gin(slot, stream, rows, ids, weights, wait):
    received = slot.exchange(stream, Tokens(rows, ids, weights=weights))
    wait()
    arrived = torch.from_dlpack(received.rows())
    numbers, their_weights = torch.from_dlpack(received.experts()), torch.from_dlpack(received.weights())
    # Only for the comparison: what arrived, without the room behind it.
    found = torch.cat([arrived[source, :count] for source, count in enumerate(torch.from_dlpack(received.counts()))])
    arrived.copy_(experts(arrived, numbers, their_weights))
    sums = torch.empty_like(rows)
    received.combine(stream, Combine.reduced(sums))
    wait()
    return found, sums


def main(cpu):
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl", device_id=None if cpu else device)
    rank = gin.init(device="virtual" if cpu else device)
    # The virtual GPU has streams of its own, for which torch does not wait.
    stream = rank.stream() if cpu else rank.stream(torch.cuda.current_stream())
    wait = stream.synchronize if cpu else lambda: None
    config = GroupConfig(EXPERTS, HIDDEN, TOPK, tokens=TOKENS, deadline=gin.Deadline(30))
    with rank.communicator() as comm, Group(comm, config) as group:
        slot = group.slot(0)
        for round in range(ROUNDS):
            torch.manual_seed(100 * round + rank.rank)
            count = TOKENS - round * (rank.rank + 1)
            rows = torch.randn(count, HIDDEN).to(device, torch.bfloat16)
            ids = torch.rand(count, EXPERTS).topk(TOPK).indices.to(device)
            weights = torch.rand(count, TOPK).to(device)
            expected = by_torch(rows, ids, weights, rank.rank, rank.ranks)
            found = by_gin(slot, stream, rows, ids, weights, wait)
            stream.synchronize()
            if (report := group.status()) is not None:
                sys.exit(f"rank {rank.rank}, round {round}: {report}")
            for name, one, other in zip(("rows", "sums"), expected, found, strict=True):
                if not torch.equal(one, other):
                    sys.exit(f"rank {rank.rank}, round {round}: the {name} differ: {one} and {other}")
    print(f"rank {rank.rank} of {rank.ranks}: {ROUNDS} rounds agree with all_to_all_single", flush=True)
    rank.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(cpu="--cpu" in sys.argv)
