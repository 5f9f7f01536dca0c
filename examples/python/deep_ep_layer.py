# SPDX-License-Identifier: MIT OR Apache-2.0
"""A layer with a mixture of experts by the calls of DeepEP, as serving programs use them. Only one import differs:

    torchrun --nproc-per-node 2 deep_ep_layer.py         # GPUs, and NCCL
    torchrun --nproc-per-node 2 deep_ep_layer.py --cpu   # virtual GPUs, and Gloo

Prefill has the experts' rows one after the other, decode has a zone of rows for each expert. All numbers are small
integers, so the sums are exact, and equal those of a layer that has all experts.
"""

import os
import sys

import torch
import torch.distributed as dist
from gincomm import deep_ep  # with DeepEP: import deep_ep

EXPERTS, HIDDEN, TOPK, PREFILL, DECODE = 8, 512, 2, 96, 16


def tokens(count, device):
    """Returns rows, ids and weights of a batch."""
    rows = torch.randint(-4, 5, (count, HIDDEN)).to(device, torch.bfloat16)
    ids = torch.rand(count, EXPERTS).topk(TOPK).indices.to(device)
    return rows, ids, torch.randint(1, 3, (count, TOPK)).to(device, torch.float32)


def expert(number, rows):
    """The work of one expert: here it multiplies by a number of its own."""
    return rows * (number % 3 + 1)


def reference(rows, ids, weights):
    """Returns the sums of a layer that has all experts."""
    sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for number in range(EXPERTS):
        factor = torch.where(ids == number, weights, 0).sum(1, keepdim=True)
        sums += factor * expert(number, rows).float()
    return sums.to(rows.dtype)


def prefill(buffer, rows, ids, weights):
    """Each token goes once to each of its ranks, whose experts add up their results before the combine."""
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids, EXPERTS, previous_event=buffer.capture(), async_finish=True
    )
    recv, recv_ids, recv_weights, _, handle, event = buffer.dispatch(
        rows,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
    )
    event.current_stream_wait()
    local = EXPERTS // buffer.group_size
    results = torch.zeros(recv.shape, dtype=torch.float32, device=recv.device)
    for number in range(local):
        token, k = (recv_ids == number).nonzero(as_tuple=True)
        row = expert(buffer.rank * local + number, recv[token]).float()
        results.index_add_(0, token, recv_weights[token, k, None] * row)
    sums, _, event = buffer.combine(results.to(recv.dtype), handle, previous_event=buffer.capture(), async_finish=True)
    event.current_stream_wait()
    return sums


def decode(buffer, rows, ids, weights):
    """Each expert has a zone of rows, of which the first `counts` are tokens. The combine multiplies by weights."""
    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        rows, ids, DECODE, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()
    local = EXPERTS // buffer.group_size
    results = torch.stack([expert(buffer.rank * local + number, recv[number]) for number in range(local)])
    sums, _, hook = buffer.low_latency_combine(results, ids, weights, handle, return_recv_hook=True)
    hook()
    return sums


def main(cpu):
    device = torch.device("cpu") if cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    group = dist.group.WORLD
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(DECODE, HIDDEN, group.size(), EXPERTS)
    # DeepEP has no `device`, and no CPU tensors.
    buffer = deep_ep.Buffer(
        group,
        0,
        size,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // group.size(),
        explicitly_destroy=True,
        device=device,
    )
    torch.manual_seed(group.rank())
    for step, count, layer in [("prefill", PREFILL, prefill)] + [("decode", DECODE - group.rank(), decode)] * 4:
        batch = tokens(count, device)
        if not torch.equal(layer(buffer, *batch), reference(*batch)):
            sys.exit(f"rank {group.rank()}, {step}: the sums differ from those of all experts")
    print(f"rank {group.rank()} of {group.size()}: prefill and 4 steps of decode agree with all experts", flush=True)
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(cpu="--cpu" in sys.argv)
