# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times of DeepEP's calls, by gin or by DeepEP itself, which torchrun starts with one process for each GPU:

    torchrun --nproc-per-node 2 deep_ep_times.py                     # gincomm.deep_ep
    torchrun --nproc-per-node 2 deep_ep_times.py --library deep_ep   # DeepEP
    torchrun --nproc-per-node 2 deep_ep_times.py --cpu --hidden 512 --prefill 64   # virtual GPUs: a check, no measure

Each line has the median of batches, and the shortest and the longest, in microseconds. The longest rank counts. A pair
is a low-latency dispatch and its combine; in a graph, ten pairs are captured, and a tenth of their time is shown. With
gin, the same pairs by `gincomm.ep` follow. The sums of each are checked once.
"""

import argparse
import importlib
import os
import statistics
import sys
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

BATCHES, CALLS, PAIRS = 7, 10, 10


class Clock:
    """The time between two points of the current stream."""

    def __init__(self, cpu):
        self.cpu = cpu
        self.start = None if cpu else torch.cuda.Event(enable_timing=True)
        self.end = None if cpu else torch.cuda.Event(enable_timing=True)

    def microseconds(self, work):
        if self.cpu:
            start = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - start)
        self.start.record()
        work()
        self.end.record()
        torch.cuda.synchronize()
        return 1e3 * self.start.elapsed_time(self.end)


class Times:
    """Prints times of calls that all ranks make."""

    def __init__(self, cpu, device):
        self.clock, self.device = Clock(cpu), device

    def show(self, what, call, each=1):
        call()
        times = []
        for _ in range(BATCHES):
            # Ranks begin together.
            dist.all_reduce(torch.zeros(1, device=self.device))
            spent = self.clock.microseconds(lambda: [call() for _ in range(CALLS)])
            longest = torch.tensor(spent / CALLS / each, device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            times.append(longest.item())
        if dist.get_rank() == 0:
            print(f"{what:56} {statistics.median(times):9.1f} ({min(times):.1f} to {max(times):.1f})", flush=True)


def check(what, sums, expected):
    """Compares sums of BF16 rows."""
    if not torch.allclose(sums.float(), expected, rtol=0.05, atol=0.05):
        sys.exit(f"{what}: rank {dist.get_rank()} has wrong sums")


def show_pair(times, name, pair):
    """Shows the time of a pair, and of one in a graph."""
    times.show(name, pair)
    if times.clock.cpu:
        return
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pair()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(PAIRS):
                pair()
    times.show(name + ", in a graph", graph.replay, each=PAIRS)


@contextmanager
def gins_own(arguments, x, ids, weights, results, fp8):
    """Returns the same pair by the names of gin."""
    import gincomm
    from gincomm.ep import Combine, Element, Group, GroupConfig, Layout, Permuted, Tokens

    element = Element.E4M3_F32 if fp8 else Element.BF16
    config = GroupConfig(
        arguments.experts, arguments.hidden, arguments.topk, tokens=len(x), element=element, combine_at_source=True
    )
    rank = gincomm.rank()
    with rank.communicator() as comm, Group(comm, config) as group:
        slot, permuted = group.slot(0), Permuted(group, Layout.EXPERT_MAJOR_FIXED)
        sums, rows = torch.empty_like(x), results.view(-1, arguments.hidden)

        def pair():
            stream = rank.stream() if arguments.cpu else rank.stream(torch.cuda.current_stream())
            received, _ = slot.exchange_into(stream, Tokens(x, ids), permuted)
            received.combine(stream, Combine.weighted(weights, sums), (permuted, rows))
            if arguments.cpu:
                stream.synchronize()
            return sums

        yield pair
        if not arguments.cpu:
            torch.cuda.synchronize()


def decode(times, library, arguments, options, count):
    ranks, experts, device = dist.get_world_size(), arguments.experts, times.device
    size = library.Buffer.get_low_latency_rdma_size_hint(count, arguments.hidden, ranks, experts)
    buffer = library.Buffer(
        dist.group.WORLD,
        0,
        size,
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        explicitly_destroy=True,
        **options,
    )
    x = torch.randn(count, arguments.hidden).to(device, torch.bfloat16)
    ids = torch.rand(count, experts).topk(arguments.topk).indices.to(device)
    weights = torch.rand(count, arguments.topk).to(device)
    for fp8 in (False, True):
        name = f"pair, {count} tokens, {'FP8' if fp8 else 'BF16'}"
        results = torch.randn(experts // ranks, ranks * count, arguments.hidden).to(device, torch.bfloat16)

        def pair(rows=None):
            received, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, count, experts, use_fp8=fp8)
            rows = results if rows is None else received
            return buffer.low_latency_combine(rows, ids, weights, handle)[0]

        if not fp8:
            check(name, pair(rows="received"), x.float() * weights.sum(1, keepdim=True))
        show_pair(times, name, pair)
        if arguments.library == "gincomm.deep_ep":
            with gins_own(arguments, x, ids, weights, results, fp8) as own:
                check(name, own(), pair().float())
                show_pair(times, f"{name}, gincomm.ep", own)
    buffer.destroy()


def prefill(times, library, arguments, options):
    count, experts, device = arguments.prefill, arguments.experts, times.device
    buffer = library.Buffer(dist.group.WORLD, int(2e9), 0, explicitly_destroy=True, **options)
    x = torch.randn(count, arguments.hidden).to(device, torch.bfloat16)
    ids = torch.rand(count, experts).topk(arguments.topk).indices.to(device)
    weights = torch.rand(count, arguments.topk).to(device)
    for sms in arguments.sms:
        library.Buffer.set_num_sms(sms)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        routing = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        routing |= dict(topk_idx=ids, topk_weights=weights)
        rows, _, _, _, handle, _ = buffer.dispatch(x, **routing)
        name = f"{count} tokens, {sms} SMs"
        check(name, buffer.combine(rows, handle)[0], x.float() * in_rank.sum(1, keepdim=True))
        times.show(f"dispatch, {name}", lambda: buffer.dispatch(x, **routing))
        times.show(f"dispatch of a handle, {name}", lambda: buffer.dispatch(x, handle=handle))
        times.show(f"combine, {name}", lambda: buffer.combine(rows, handle))
    buffer.destroy()


def main(arguments):
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not arguments.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if arguments.cpu else "nccl", device_id=None if arguments.cpu else device)
    library = importlib.import_module(arguments.library)
    options = {"device": device} if arguments.library == "gincomm.deep_ep" else {}
    torch.manual_seed(dist.get_rank())
    times = Times(arguments.cpu, device)
    for count in arguments.decode:
        decode(times, library, arguments, options, count)
    prefill(times, library, arguments, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="gincomm.deep_ep", choices=["gincomm.deep_ep", "deep_ep"])
    parser.add_argument("--cpu", action="store_true", help="virtual GPUs in place of GPUs")
    parser.add_argument("--decode", type=int, nargs="+", default=[8, 128], help="tokens of low-latency calls")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of dispatch and combine")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", type=int, nargs="+", default=[24, 64], help="SMs of dispatch and combine")
    main(parser.parse_args())
