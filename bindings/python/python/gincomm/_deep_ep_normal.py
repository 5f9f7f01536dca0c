# SPDX-License-Identifier: MIT OR Apache-2.0
"""The normal calls of `gincomm.deep_ep`: one row for each rank of a token."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch

from . import Communicator, Deadline, Rank, StateError
from ._deep_ep_exchange import EventOverlap, Exchange, FixedSlot, Queue
from ._deep_ep_rows import Record, aligned, check, require
from .ep import Combine, Element, GroupConfig, Layout, Tokens

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]

_FEW_WORDS = 512
"""The least words of a rank's numbers of tokens, so that most numbers of experts take one group."""


class Routing(NamedTuple):
    """The arguments of a dispatch that say where tokens go; all are None in a dispatch of a handle."""

    in_rank: Optional[torch.Tensor]
    per_rank: Optional[torch.Tensor]
    per_expert: Optional[torch.Tensor]
    ids: Optional[torch.Tensor]
    weights: Optional[torch.Tensor]

    def check(self, count: int, ranks: int, device: torch.device) -> None:
        """Checks the arguments of a dispatch of some tokens without a handle."""
        in_rank, per_rank, per_expert, ids, weights = self
        numbers = {"is_token_in_rank": in_rank, "num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert}
        for name, value in numbers.items():
            require(value is not None, f"{name} is missing: pass the results of get_dispatch_layout, or a handle")
        check("is_token_in_rank", in_rank, device, (torch.bool,), count, ranks)
        check("num_tokens_per_rank", per_rank, device, (torch.int32,), ranks)
        check("num_tokens_per_expert", per_expert, device, (torch.int32,), None)
        experts = per_expert.numel()
        require(experts % ranks == 0, f"num_tokens_per_expert has {experts} numbers; use a multiple of {ranks}")
        require((ids is None) == (weights is None), "pass topk_idx and topk_weights together, or none of them")
        if ids is not None:
            check("topk_idx", ids, device, (torch.int64, torch.int32), count, None)
            check("topk_weights", weights, device, (torch.float32,), *ids.shape)


class Handle(tuple):
    """What a combine and a dispatch of the same routing need.

    `(rank_prefix_matrix, None, None, recv_src_idx, is_token_in_rank, None)`: DeepEP has matrices of channels at the
    places of None.
    """

    tokens: int
    received: int
    topk: int
    ids: torch.Tensor
    slot: FixedSlot


def room_of(tokens: int) -> int:
    """Returns the tokens that a group has room for: a power of two, so that few sizes need groups."""
    return max(16, 1 << (tokens - 1).bit_length())


def dispatch_layout(
    ids: torch.Tensor, experts: int, ranks: int
) -> Tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    """Returns tokens for each rank, None, ids for each expert, and whether each token goes to each rank."""
    require(experts % ranks == 0, f"num_experts {experts} is not a multiple of the {ranks} ranks")
    valid = (ids >= 0) & (ids < experts)
    ids = torch.where(valid, ids, experts).long()
    per_expert = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    per_expert.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    # The column past the ranks takes the ids without an expert.
    named = torch.zeros(ids.size(0), ranks + 1, dtype=torch.bool, device=ids.device)
    named = named.scatter_(1, ids // (experts // ranks), True)[:, :ranks].contiguous()
    return named.sum(0, dtype=torch.int32), None, per_expert[:experts].clone(), named


class Normal:
    """Groups of the normal calls, one for each combination of sizes."""

    def __init__(self, rank: Rank, comm: Communicator, queue: Queue, deadline: Deadline) -> None:
        self.rank, self.comm, self.queue, self.deadline = rank, comm, queue, deadline
        self.exchanges: Dict[Tuple[Any, ...], Exchange] = {}
        self.ends: Dict[Tuple[int, int], torch.Tensor] = {}
        self.each_rank = torch.arange(comm.ranks, dtype=torch.int32, device=queue.device)
        self.every_rank = self.each_rank.unsqueeze(0)

    def _exchange(
        self, tokens: int, hidden: int, row_bytes: int, sms: int, extra: int = 0, element: Optional[Element] = None
    ) -> Exchange:
        """Returns the group for rows of these bytes, with `extra` bytes of metadata, whose ids are numbers of ranks."""
        key = (tokens, hidden, row_bytes, sms, extra, element is None)
        if key not in self.exchanges:
            ranks, dtype = self.comm.ranks, torch.uint8 if element is None else torch.float32
            element = Element.opaque(row_bytes, extra) if element is None else element
            config = GroupConfig(
                ranks, hidden, ranks, tokens=tokens, element=element, sms=sms or None, deadline=self.deadline
            )
            self.exchanges[key] = Exchange(
                self.comm,
                self.queue,
                config,
                Layout.FLAT,
                hidden,
                row_bytes,
                dtype=dtype,
                rows=ranks * tokens,
                scale_bytes=extra,
            )
        return self.exchanges[key]

    def _swap(self, handle: Handle, rows: torch.Tensor, record: Optional[torch.Tensor], sms: int) -> torch.Tensor:
        """Sends rows with their metadata, and returns the rows that arrive, in a tensor of their own."""
        sent, extra = aligned(rows).view(torch.uint8), 0 if record is None else 4 * record.size(1)
        arrived = torch.empty(handle.received, rows.size(1), dtype=rows.dtype, device=rows.device)
        handle.slot = slot = self._exchange(handle.tokens, rows.size(1), sent.size(1), sms, extra).slots[0]
        to = slot.permuted.with_capacity(handle.received)
        tokens = Tokens(sent, handle.ids, scales=None if record is None else record.view(torch.uint8))
        slot.swap(handle, tokens, to.with_memory(slot.exchange.group, rows=arrived.view(torch.uint8)))
        return arrived

    def _agree(self, routing: Routing) -> Tuple[int, torch.Tensor, List[List[int]], List[int]]:
        """Exchanges numbers of tokens, and waits for them. Returns the largest of a rank, tokens `[source][rank]` on
        the device and on the host, and rows by local expert."""
        in_rank, per_rank, per_expert, _, _ = routing
        ranks, experts, device = self.comm.ranks, per_expert.numel(), self.queue.device
        words = max(_FEW_WORDS, room_of(2 + 2 * ranks + experts))
        if (words, experts) not in self.ends:
            end = torch.tensor([0] * (words - 2 - 2 * ranks - experts) + [experts], dtype=torch.int32)
            self.ends[words, experts] = end.to(device)
        count = torch.full((1,), in_rank.size(0), dtype=torch.int32, device=device)
        mine = in_rank.sum(0, dtype=torch.int32)
        row = torch.cat([count, mine, per_rank, per_expert, self.ends[words, experts]])
        exchange = self._exchange(1, words, 4 * words, 0)
        arrived, slot = torch.empty(ranks, words, dtype=torch.int32, device=device), exchange.slots[0]
        to = slot.permuted.with_memory(exchange.group, rows=arrived.view(torch.uint8))
        slot.swap(routing, Tokens(row.view(1, words).view(torch.uint8), self.every_rank), to)
        self.queue.settle()
        everyone = arrived.tolist()
        exchange.check(waited=True)
        mine, given = (everyone[self.rank.rank][begin : begin + ranks] for begin in (1, 1 + ranks))
        require(mine == given, f"num_tokens_per_rank is {given}; is_token_in_rank has {mine}")
        for number, each in enumerate(everyone):
            require(
                each[-1] == experts, f"num_tokens_per_expert has {experts} experts here, and {each[-1]} on rank {number}"
            )
        local = experts // ranks
        begin = 1 + 2 * ranks + self.rank.rank * local
        rows = [sum(each) for each in zip(*(each[begin : begin + local] for each in everyone))]
        sent = [each[1 : 1 + ranks] for each in everyone]
        return max(each[0] for each in everyone), arrived[:, 1 : 1 + ranks], sent, rows

    def dispatch(
        self,
        x: Rows,
        handle: Any,
        routing: Routing,
        alignment: int,
        worst: int,
        sms: int,
        previous: Optional[EventOverlap],
        async_finish: bool,
    ) -> Tuple[
        Rows, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[Handle], EventOverlap
    ]:
        queue, (rows, scales) = self.queue, x if isinstance(x, tuple) else (x, None)
        self._check_rows(rows, scales)
        is_new, numbers, got_ids, got_weights = handle is None, None, None, None
        with queue.after(previous, async_finish):
            if is_new:
                routing.check(rows.size(0), self.comm.ranks, queue.device)
                handle, numbers = self._route(routing, alignment, worst)
            else:
                require(isinstance(handle, Handle), "handle is not one of dispatch")
                none = routing.ids is None and routing.weights is None
                require(none, "with a handle, topk_idx and topk_weights must be None")
                check("x", rows, queue.device, (rows.dtype,), handle.ids.size(0), None)
            record = _record(scales, handle.topk)
            sent = record.pack(rows.size(0), rows.device, scales=scales, ids=routing.ids, weights=routing.weights)
            recv_x = self._swap(handle, rows, sent, sms)
            found = [recv_x]
            if is_new or scales is not None:
                arrived = None if sent is None else sent.new_empty(handle.received, sent.size(1))
                slot, tokens = handle.slot, handle[3] if is_new else None
                slot.received.store_metadata(queue.gin, slot.to, scales=arrived, tokens=tokens)
                queue.settle()
                if scales is not None:
                    found.append(record.take("scales", arrived).contiguous())
                if is_new:
                    got_ids, got_weights = self._local(record, slot, arrived, routing, bool(worst))
        event = queue.finish(async_finish, (rows, scales, handle.ids, *found, got_ids, got_weights, *handle))
        handle.slot.exchange.check()
        recv = recv_x if scales is None else tuple(found)
        return recv, got_ids, got_weights, numbers, handle if is_new else None, event

    def _check_rows(self, rows: torch.Tensor, scales: Optional[torch.Tensor]) -> None:
        dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        check("x", rows, self.queue.device, (dtype,), None, None)
        # Kernels copy words of 16 bytes.
        unit = 16 // rows.element_size()
        require(rows.size(1) % unit == 0, f"hidden is {rows.size(1)}; use a multiple of {unit}")
        if scales is not None:
            check("the scales of x", scales, self.queue.device, (torch.float32, torch.int32), rows.size(0), None)

    def _route(self, routing: Routing, alignment: int, worst: int) -> Tuple[Handle, List[int]]:
        """Makes the handle of a routing, and the list of rows by local expert, which is empty with `num_worst_tokens`."""
        in_rank, count = routing.in_rank, routing.in_rank.size(0)
        ranks, device, numbers = self.comm.ranks, self.queue.device, []
        if worst:
            # A capture refuses copies from the host, so nothing comes from there.
            matrix = torch.zeros(ranks, ranks, dtype=torch.int32, device=device)
            tokens, received = -(-worst // ranks), worst
            require(
                count <= tokens,
                f"x has {count} tokens; num_worst_tokens {worst} allows {tokens} on each of {ranks} ranks",
            )
        else:
            if self.queue.is_capturing():
                raise StateError(
                    "in a capture the host cannot wait for numbers of tokens: pass num_worst_tokens or a handle"
                )
            tokens, sent, of_rank, rows = self._agree(routing)
            matrix = sent.cumsum(0, dtype=torch.int32)
            received = sum(each[self.rank.rank] for each in of_rank)
            numbers = [-(-each // alignment) * alignment for each in rows]
        source = torch.empty(received, dtype=torch.int32, device=device)
        handle = Handle((matrix, None, None, source, in_rank, None))
        handle.tokens, handle.received = room_of(tokens), received
        handle.topk = 0 if routing.ids is None else routing.ids.size(1)
        handle.ids = torch.where(in_rank, self.each_rank, -1)
        return handle, numbers

    def _local(
        self, record: Record, slot: FixedSlot, arrived: Optional[torch.Tensor], routing: Routing, has_gaps: bool
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Returns ids as numbers on this rank, or -1, and the weights, 0 where the id is -1; None if there are no ids.

        With gaps, fewer rows may have arrived than there is room for."""
        if routing.ids is None:
            return None, None
        local = routing.per_expert.numel() // self.comm.ranks
        ids = record.take("ids", arrived) - self.rank.rank * local
        here = (ids >= 0) & (ids < local)
        if has_gaps:
            number = torch.arange(arrived.size(0), dtype=torch.int32, device=arrived.device)
            here &= (number < torch.from_dlpack(slot.permuted.counts())[0]).unsqueeze(1)
        return torch.where(here, ids, -1).long(), torch.where(here, record.take("weights", arrived), 0.0)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        weights: Optional[torch.Tensor],
        biases: Tuple[torch.Tensor, ...],
        sms: int,
        previous: Optional[EventOverlap],
        async_finish: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        require(isinstance(handle, Handle), "handle is not one of dispatch")
        queue, count = self.queue, handle.ids.size(0)
        check("x", x, queue.device, (torch.bfloat16,), handle.received, None)
        hidden = handle.slot.exchange.hidden
        require(x.size(1) == hidden, f"x has {x.size(1)} elements in a row; the dispatch had {hidden}")
        for bias in biases:
            check("bias", bias, queue.device, (torch.bfloat16,), count, hidden)
        if weights is not None:
            check("topk_weights", weights, queue.device, (torch.float32,), handle.received, None)
        with queue.after(previous, async_finish):
            sums, more = torch.empty(count, hidden, dtype=torch.bfloat16, device=queue.device), {}
            if biases:
                more["bias"] = aligned(biases[0])
            if len(biases) > 1:
                sums.copy_(biases[1].detach())
                more["accumulate"] = True
            back = aligned(x)
            _return(handle.slot, handle, Combine.reduced(sums, **more), back)
            total = None if weights is None else self._sum_weights(handle, weights, sms)
        event = queue.finish(async_finish, (x, back, weights, sums, total, handle.ids, *biases))
        handle.slot.exchange.check()
        return sums, total, event

    def _sum_weights(self, handle: Handle, weights: torch.Tensor, sms: int) -> torch.Tensor:
        """Adds up the weights that the ranks of a token return, in FP32."""
        topk = weights.size(1)
        columns = -(-topk // 4) * 4
        slot = self._exchange(handle.tokens, columns, 4 * columns, sms, element=Element.F32).slots[0]
        padded = torch.nn.functional.pad(weights.detach(), (0, columns - topk))
        sums = torch.empty(handle.ids.size(0), columns, dtype=torch.float32, device=weights.device)
        _return(slot, handle, Combine.reduced(sums), padded)
        self.queue.settle()
        slot.exchange.check()
        return sums[:, :topk].contiguous()

    def destroy(self) -> None:
        while self.exchanges:
            self.exchanges.popitem()[1].destroy()


def _record(scales: Optional[torch.Tensor], topk: int) -> Record:
    """Returns the layout of a row's metadata. A dispatch of a handle has the same as the one that made the handle, and so
    the same group."""
    return Record(
        scales=(torch.float32, 0) if scales is None else (scales.dtype, scales.size(1)),
        ids=(torch.int32, topk),
        weights=(torch.float32, topk),
    )


def _return(slot: FixedSlot, handle: Handle, combine: Combine, rows: torch.Tensor) -> None:
    """Returns rows of a handle."""
    slot.combine(handle, handle.ids, combine, rows, slot.permuted.with_capacity(handle.received))
