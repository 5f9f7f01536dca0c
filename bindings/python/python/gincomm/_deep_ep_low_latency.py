# SPDX-License-Identifier: MIT OR Apache-2.0
"""The low-latency calls of `gincomm.deep_ep`."""

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch

from . import Communicator, Deadline
from ._deep_ep_exchange import EventOverlap, Exchange, FixedSlot, Queue
from ._deep_ep_rows import BLOCK, Record, check, quantise, require
from .ep import Combine, Element, GroupConfig, Layout, Tokens

SLOTS = 2
"""The number of dispatches that may be under way, as in DeepEP."""


def config_of(
    ranks: int, tokens: int, hidden: int, experts: int, topk: int, row_bytes: int, deadline: Optional[Deadline] = None
) -> GroupConfig:
    """Returns the configuration of a group whose combine multiplies by weights."""
    require(experts % ranks == 0, f"num_experts {experts} is not a multiple of the {ranks} ranks")
    element = Element.opaque(row_bytes)
    return GroupConfig(
        experts, hidden, topk, tokens=tokens, slots=SLOTS, element=element, combine_at_source=True, deadline=deadline
    )


class Format(NamedTuple):
    """The elements of dispatched rows: BF16, or FP8 with FP32 scales, which may be powers of two, which may be UE8M0."""

    fp8: bool
    round_scale: bool
    ue8m0: bool

    def scales(self, hidden: int) -> Tuple[torch.dtype, int]:
        """Returns the dtype and the number of scales of a row."""
        if self.ue8m0:
            return torch.int32, hidden // (4 * BLOCK)
        return torch.float32, hidden // BLOCK if self.fp8 else 0

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
    places: torch.Tensor


class LowLatency:
    """Groups of the low-latency calls, one for each combination of sizes."""

    def __init__(self, comm: Communicator, queue: Queue, deadline: Deadline) -> None:
        self.comm, self.queue, self.deadline = comm, queue, deadline
        self.exchanges: Dict[Tuple[int, ...], Tuple[Exchange, Record]] = {}
        self.buffers: Dict[FixedSlot, torch.Tensor] = {}

    def _exchange(
        self, tokens: int, hidden: int, experts: int, topk: int, scales: Tuple[torch.dtype, int]
    ) -> Tuple[Exchange, Record]:
        key = (tokens, hidden, experts, topk, scales[1], scales[0].itemsize)
        if key not in self.exchanges:
            elements = torch.float8_e4m3fn if scales[1] else torch.bfloat16
            record = Record(x=(elements, hidden), scales=scales, token=(torch.int32, 1))
            ranks = self.comm.ranks
            config = config_of(ranks, tokens, hidden, experts, topk, record.bytes, self.deadline)
            layout, rows = Layout.expert_major_packed(1), ranks * tokens * topk
            exchange = Exchange(self.comm, self.queue, config, layout, rows, hidden, record.bytes, SLOTS)
            self.exchanges[key] = exchange, record
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
        exchange, record = self._exchange(tokens, hidden, experts, topk, form.scales(hidden))
        slot = exchange.next_slot()
        with queue.after():
            ids = ids.contiguous()
            rows, factors = quantise(x, *form[1:]) if form.fp8 else (x, x.new_empty(count, 0, dtype=torch.float32))
            numbers = torch.arange(count, dtype=torch.int32, device=queue.device).unsqueeze(1)
            sent = Tokens(record.pack(count, queue.device, x=rows, scales=factors, token=numbers), ids)
            out = _Output(slot, record, self.comm.ranks, tokens, hidden, experts, ids)
            if hooked:
                slot.send(out.handle, sent)
            else:
                slot.swap(out.handle, sent)
                queue.settle()
                out.fill(stats)
        used = (x, ids, out.counts, *out.x, *out.handle[:2], out.handle.places)

        def hook() -> None:
            with queue.after():
                slot.receive()
                queue.settle()
                out.fill(stats)
            queue.finish(False, used)
            exchange.check()

        event = queue.finish(async_finish, used) if not (hooked and not queue.is_gpu) else EventOverlap()
        if not hooked:
            exchange.check()
        return tuple(out.x) if form.fp8 else out.x[0], out.counts, out.handle, event, hook if hooked else None

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
        with queue.after():
            sums = torch.empty(count, hidden, dtype=torch.bfloat16, device=queue.device) if out is None else out
            given = (self.next_buffer(handle) if zero_copy else x).reshape(local * zone, hidden)
            weighted = Combine.weighted(weights.contiguous(), sums)
            slot.combine(
                handle, handle.ids, weighted, lambda: given.index_select(0, handle.places.clamp(max=len(given) - 1))
            )
        used = (x, ids, weights, sums, handle.places)
        if not hooked:
            event = queue.finish(async_finish, used)
            slot.exchange.check()
            return sums, event, None

        def hook() -> None:
            queue.finish(False, used)
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
            self.exchanges.popitem()[1][0].destroy()


class _Output:
    """The tensors that a dispatch returns: a zone of rows for each expert of this rank."""

    def __init__(
        self, slot: FixedSlot, record: Record, ranks: int, tokens: int, hidden: int, experts: int, ids: torch.Tensor
    ) -> None:
        self.slot, self.record, self.ranks, self.zone, self.local = (
            slot,
            record,
            ranks,
            ranks * tokens,
            experts // ranks,
        )
        device, local, rows = slot.rows.device, self.local, self.zone * self.local
        # One row more takes what has no place.
        self.bytes = torch.empty(rows + 1, record.bytes_of("x", slot.rows).size(1), dtype=torch.uint8, device=device)
        self.x = [self.bytes[:-1].view(record.parts["x"][0]).view(local, self.zone, hidden)]
        columns = record.bytes_of("scales", slot.rows).size(1) // 4
        if columns:
            # The scales of a zone are column-major.
            scales = torch.empty(local, columns, self.zone, dtype=record.parts["scales"][0], device=device)
            self.x.append(scales.transpose(1, 2))
        self.counts = torch.empty(local, dtype=torch.int32, device=device)
        source_info = torch.empty(local, self.zone, dtype=torch.int32, device=device)
        layout_range = torch.empty(local, ranks, dtype=torch.int64, device=device)
        self.handle = LowLatencyHandle((source_info, layout_range, tokens, hidden, experts))
        self.handle.slot, self.handle.ids = slot, ids
        self.handle.places = torch.empty(slot.exchange.capacity, dtype=torch.int64, device=device)

    def fill(self, stats: Optional[torch.Tensor]) -> None:
        """Copies the packed rows of the slot to the experts' zones. The host waits for no number of a GPU."""
        slot, record, local, zone = self.slot, self.record, self.local, self.zone
        counts, offsets = slot.counts[1 : 1 + local], slot.counts[1 + local :]
        offsets = offsets[:local].contiguous()
        number = torch.arange(slot.exchange.capacity, dtype=torch.int32, device=slot.rows.device)
        # Experts without rows have the offset of the next one, and `right` takes the last of them.
        expert = (torch.searchsorted(offsets, number, right=True) - 1).clamp(min=0)
        row = number - offsets[expert]
        valid = (number < slot.counts[0]) & (row < zone)
        self.handle.places.copy_(torch.where(valid, expert * zone + row, local * zone))
        places = self.handle.places
        self.bytes.index_copy_(0, places, record.bytes_of("x", slot.rows))
        self.handle[0].copy_(self._by_place(record.take("token", slot.rows), places).view(local, zone))
        if len(self.x) > 1:
            scales = self._by_place(record.take("scales", slot.rows), places)
            self.x[1].copy_(scales.view(local, zone, -1))
        self.counts.copy_(counts)
        if stats is not None:
            stats.add_(counts)
        self._fill_ranges(expert, valid)

    def _by_place(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns values of packed rows in the order of places."""
        found = values.new_zeros(self.local * self.zone + 1, values.size(1))
        return found.index_copy_(0, places, values)[:-1]

    def _fill_ranges(self, expert: torch.Tensor, valid: torch.Tensor) -> None:
        """Stores first row and number of rows from each source: `first << 32 | number`."""
        # The word of a row is `source << 21 | row << 5 | k`; past the total it has no meaning.
        source = torch.where(valid, self.slot.info.long() >> 21, 0)
        group = torch.where(valid, expert * self.ranks + source, self.local * self.ranks)
        numbers = torch.zeros(self.local * self.ranks + 1, dtype=torch.int64, device=valid.device)
        numbers.scatter_add_(0, group, torch.ones_like(group))
        numbers = numbers[:-1].view(self.local, self.ranks)
        self.handle[1].copy_((numbers.cumsum(1) - numbers) << 32 | numbers)
