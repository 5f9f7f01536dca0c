# SPDX-License-Identifier: MIT OR Apache-2.0
"""The low-latency calls of `gincomm.deep_ep`."""

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch

from . import Communicator, Deadline
from ._deep_ep_exchange import EventOverlap, Exchange, FixedSlot, Queue
from ._deep_ep_rows import BLOCK, aligned, check, require
from .ep import Combine, Element, GroupConfig, Layout, Tokens

SLOTS = 2
"""The number of dispatches that may be under way, as in DeepEP."""


def config_of(
    ranks: int, tokens: int, hidden: int, experts: int, topk: int, element: Element, deadline: Optional[Deadline] = None
) -> GroupConfig:
    """Returns the configuration of a group whose combine multiplies by weights."""
    require(experts % ranks == 0, f"num_experts {experts} is not a multiple of the {ranks} ranks")
    return GroupConfig(
        experts, hidden, topk, tokens=tokens, slots=SLOTS, element=element, combine_at_source=True, deadline=deadline
    )


class Format(NamedTuple):
    """The elements of dispatched rows: BF16, or FP8 with FP32 scales, which may be powers of two, which may be UE8M0."""

    fp8: bool
    round_scale: bool
    ue8m0: bool

    def element(self) -> Element:
        """Returns the elements of the group."""
        if not self.fp8:
            return Element.BF16
        if self.ue8m0:
            return Element.E4M3_UE8M0
        return Element.E4M3_F32_POWERS if self.round_scale else Element.E4M3_F32

    def check(self, hidden: int) -> None:
        fp8, round_scale, ue8m0 = self
        require(hidden % 8 == 0, f"hidden is {hidden}; use a multiple of 8")
        require(not fp8 or hidden % BLOCK == 0, f"hidden is {hidden}; use_fp8 needs a multiple of {BLOCK}")
        require(fp8 or not (round_scale or ue8m0), "round_scale and use_ue8m0 belong to use_fp8=True")
        require(round_scale or not ue8m0, "use_ue8m0=True needs round_scale=True")
        require(
            not ue8m0 or hidden % (4 * BLOCK) == 0, f"hidden is {hidden}; use_ue8m0 needs a multiple of {4 * BLOCK}"
        )


class LowLatencyHandle(tuple):
    """What a combine needs: `(src_info, layout_range, max_tokens, hidden, num_experts)`."""

    slot: FixedSlot
    ids: torch.Tensor


class LowLatency:
    """Groups of the low-latency calls, one for each combination of sizes."""

    def __init__(self, comm: Communicator, queue: Queue, deadline: Deadline) -> None:
        self.comm, self.queue, self.deadline = comm, queue, deadline
        self.exchanges: Dict[Tuple[int, int, int, int, Format], Exchange] = {}
        self.buffers: Dict[FixedSlot, torch.Tensor] = {}

    def _exchange(self, tokens: int, hidden: int, experts: int, topk: int, form: Format) -> Exchange:
        key = (tokens, hidden, experts, topk, form)
        if key not in self.exchanges:
            config = config_of(self.comm.ranks, tokens, hidden, experts, topk, form.element(), self.deadline)
            self.exchanges[key] = Exchange(
                self.comm,
                self.queue,
                config,
                Layout.EXPERT_MAJOR_FIXED,
                hidden,
                2 * hidden,
                SLOTS,
                torch.bfloat16,
            )
        return self.exchanges[key]

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        tokens: int,
        experts: int,
        stats: Optional[torch.Tensor],
        form: Format,
        async_finish: bool,
        hooked: bool,
    ) -> Tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Optional[Callable[[], None]]]:
        self._check(x, ids, tokens, experts, stats)
        form.check(x.size(1))
        require(not (async_finish and hooked), "pass async_finish or return_recv_hook, not both")
        queue, hidden, (count, topk) = self.queue, x.size(1), ids.shape
        exchange = self._exchange(tokens, hidden, experts, topk, form)
        slot = exchange.next_slot()
        with queue.after(overlaps=async_finish):
            sent = Tokens(aligned(x), aligned(ids))
            out = _Output(slot, form, self.comm.ranks, tokens, hidden, experts, sent.ids)
            if hooked:
                slot.send(out.handle, sent, out.to)
            else:
                slot.swap(out.handle, sent, out.to)
                self._add(stats, out.counts)
        used = (x, ids, sent.rows, sent.ids, stats, *out.tensors)

        def hook() -> None:
            with queue.after():
                slot.receive()
                self._add(stats, out.counts)
            # The program may call the hook on another stream.
            queue.keep(used, overlaps=False)
            queue.finish(False, used)
            exchange.check()

        event = queue.finish(async_finish, used) if not (hooked and not queue.is_gpu) else EventOverlap()
        if not hooked:
            exchange.check()
        return tuple(out.x) if form.fp8 else out.x[0], out.counts, out.handle, event, hook if hooked else None

    def _add(self, stats: Optional[torch.Tensor], counts: torch.Tensor) -> None:
        if stats is not None:
            self.queue.settle()
            stats.add_(counts)

    def _check(
        self, x: torch.Tensor, ids: torch.Tensor, tokens: int, experts: int, stats: Optional[torch.Tensor]
    ) -> None:
        device, ranks = self.queue.device, self.comm.ranks
        check("x", x, device, (torch.bfloat16,), None, None)
        count = x.size(0)
        check("topk_idx", ids, device, (torch.int64, torch.int32), count, None)
        require(count <= tokens, f"x has {count} tokens; num_max_dispatch_tokens_per_rank is {tokens}")
        require(experts % ranks == 0, f"num_experts {experts} is not a multiple of the {ranks} ranks")
        if stats is not None:
            check("cumulative_local_expert_recv_stats", stats, device, (torch.int32,), experts // ranks)

    def combine(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool,
        async_finish: bool,
        hooked: bool,
        out: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        require(isinstance(handle, LowLatencyHandle), "handle is not one of low_latency_dispatch")
        require(not (async_finish and hooked), "pass async_finish or return_recv_hook, not both")
        queue, slot, (_, _, tokens, hidden, experts) = self.queue, handle.slot, handle
        local, zone, count, topk = experts // self.comm.ranks, self.comm.ranks * tokens, *handle.ids.shape
        check("x", x, queue.device, (torch.bfloat16,), local, zone, hidden)
        check("topk_idx", ids, queue.device, (torch.int64, torch.int32), count, topk)
        check("topk_weights", weights, queue.device, (torch.float32,), count, topk)
        if not queue.is_gpu:
            same = torch.equal(ids, handle.ids.to(ids.dtype))
            require(same, "topk_idx differs from the ids of the dispatch; pass the same ids to both")
        if out is not None:
            check("out", out, queue.device, (torch.bfloat16,), count, hidden)
            require(out.is_contiguous(), "out is not contiguous; pass a contiguous tensor")
        overlaps = async_finish or hooked
        with queue.after(overlaps=overlaps):
            sums = torch.empty(count, hidden, dtype=torch.bfloat16, device=queue.device) if out is None else out
            # The kernel reads the rows where they are.
            rows = self.next_buffer(handle) if zero_copy else aligned(x)
            factors = aligned(weights)
            slot.combine(handle, handle.ids, Combine.weighted(factors, sums), rows.view(local * zone, hidden))
        used = (x, rows, ids, handle.ids, weights, factors, sums)
        if not hooked:
            event = queue.finish(async_finish, used)
            slot.exchange.check()
            return sums, event, None
        # The program may drop the hook.
        queue.keep(used)

        def hook() -> None:
            queue.finish(False, used, overlaps)
            slot.exchange.check()

        return sums, EventOverlap(), hook

    def next_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Returns the rows that a combine of this handle takes with `zero_copy`."""
        require(isinstance(handle, LowLatencyHandle), "handle is not one of low_latency_dispatch")
        if handle.slot not in self.buffers:
            _, _, tokens, hidden, experts = handle
            shape = (experts // self.comm.ranks, self.comm.ranks * tokens, hidden)
            self.buffers[handle.slot] = torch.zeros(shape, dtype=torch.bfloat16, device=self.queue.device)
        return self.buffers[handle.slot]

    def destroy(self) -> None:
        self.buffers.clear()
        while self.exchanges:
            self.exchanges.popitem()[1].destroy()


class _Output:
    """The tensors that a dispatch returns, in which kernels store: a zone of rows for each expert of this rank."""

    def __init__(
        self, slot: FixedSlot, form: Format, ranks: int, tokens: int, hidden: int, experts: int, ids: torch.Tensor
    ) -> None:
        device, local, zone = slot.exchange.queue.device, experts // ranks, ranks * tokens
        elements = torch.float8_e4m3fn if form.fp8 else torch.bfloat16
        rows = torch.empty(local, zone, hidden, dtype=elements, device=device)
        self.x, scales = [rows], None
        if form.fp8:
            # The scales of a zone are column-major.
            columns, dtype = (hidden // (4 * BLOCK), torch.int32) if form.ue8m0 else (hidden // BLOCK, torch.float32)
            scales = torch.empty(local, columns, zone, dtype=dtype, device=device)
            self.x.append(scales.transpose(1, 2))
        source_info = torch.empty(local, zone, dtype=torch.int32, device=device)
        # The total; for each expert the number of its rows and its first row; a word; for each expert and source
        # `first << 32 | number`.
        words = torch.empty(2 + 2 * local * (1 + ranks), dtype=torch.int32, device=device)
        self.counts = words[1 : 1 + local]
        ranges = words[2 + 2 * local :].view(torch.int64).view(local, ranks)
        self.tensors = (rows, scales, source_info, words)
        self.handle = LowLatencyHandle((source_info, ranges, tokens, hidden, experts))
        self.handle.slot, self.handle.ids = slot, ids
        # DLPack of older versions has no FP8.
        memory = dict(rows=rows.view(torch.uint8), scales=scales, tokens=source_info, counts=words)
        self.to = slot.permuted.with_memory(slot.exchange.group, **memory)
