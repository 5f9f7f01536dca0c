# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rows of `gincomm.deep_ep.ElasticBuffer`: by source, or by expert."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from . import Communicator, Deadline
from ._deep_ep_exchange import Exchange, FixedSlot, Queue
from ._deep_ep_rows import aligned
from .ep import Combine, Element, GroupConfig, Layout, Permuted, Tokens

_WORDS = 4
"""The columns of scales begin at multiples of this many words of 4 bytes, as in DeepEP."""


def _align(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class EPHandle:
    """What a combine and a dispatch of the same routing need. `ElasticBuffer.dispatch` returns it.

    - do_expand: whether rows stand by expert, one for each id.
    - topk_idx: the ids of the dispatch.
    - num_recv_tokens: the received rows, or room for all that may arrive if the host did not wait.
    - num_expanded_tokens: the rows by expert with gaps, or the room for them.
    - num_recv_tokens_per_expert_list: for each local expert its rows, aligned; empty if the host did not wait.
    - psum_num_recv_tokens_per_scaleup_rank: int32 `[rank]`, for each source the end of its received rows.
    - psum_num_recv_tokens_per_expert: int32 `[expert]`. With `do_expand` the end of an expert's rows, without its gap;
      otherwise the sum of aligned rows up to this expert.
    - num_unaligned_recv_tokens_per_expert: int32 `[expert]`, the rows of each local expert.
    - recv_src_metadata: int32 `[row][2 + id]`: the source token, which is `source * num_max_tokens_per_rank + token`;
      `source * ids + k`, where `k` is the last id on this rank; then the row by expert of each id, or -1.
    """

    dst_buffer_slot_idx: None = None
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: List[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
        self._ids = aligned(self.topk_idx)
        self._slot: Optional[FixedSlot] = None
        # Programs may replace the public tensors.
        self._here: Optional[torch.Tensor] = None
        self._slots: Optional[torch.Tensor] = None

    def tensors(self) -> Tuple[torch.Tensor, ...]:
        """Returns all tensors of the handle."""
        return tuple(value for value in self.__dict__.values() if isinstance(value, torch.Tensor))


class _Sizes(NamedTuple):
    """What selects a group."""

    experts: int
    topk: int
    tokens: int
    hidden: int
    row_bytes: int
    scale_bytes: int
    sms: int
    combine_f32: bool = False


class _Arrived(NamedTuple):
    """The metadata of received rows, in regions of the sources."""

    counts: torch.Tensor
    experts: torch.Tensor

    @staticmethod
    def of(slot: FixedSlot) -> "_Arrived":
        return _Arrived(*map(torch.from_dlpack, (slot.received.counts(), slot.received.experts())))

    def per_expert(self, local: int) -> torch.Tensor:
        """Returns the number of rows of each local expert, int32."""
        row = torch.arange(self.experts.size(1), device=self.experts.device)
        valid = (row < self.counts.unsqueeze(1)).unsqueeze(2) & (self.experts >= 0)
        # The number past the experts takes the ids without a row here.
        ids = torch.where(valid, self.experts, local).flatten().long()
        numbers = torch.zeros(local + 1, dtype=torch.int32, device=ids.device)
        return numbers.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:local].clone()


class _Places(NamedTuple):
    """Source, row in its region, and id of each row of a layout. Gaps have the first row of the first source."""

    valid: torch.Tensor
    source: torch.Tensor
    row: torch.Tensor
    k: torch.Tensor

    @staticmethod
    def of(permuted: Permuted, rows: int) -> "_Places":
        info, total = torch.from_dlpack(permuted.source_info())[:rows], torch.from_dlpack(permuted.counts())[0]
        valid = (torch.arange(rows, device=info.device) < total) & (info >= 0)
        info = torch.where(valid, info, 0).long()
        return _Places(valid, info >> 21, info >> 5 & 0xFFFF, info & 31)


def room_by_expert(sizes: _Sizes, ranks: int, alignment: int) -> int:
    """Returns the rows of a rank by expert, with gaps, if all tokens have as many ids there as they can."""
    local = sizes.experts // ranks
    return _align(ranks * sizes.tokens * min(sizes.topk, local) + (alignment - 1) * local, alignment)


def _columns(scales: torch.Tensor) -> torch.Tensor:
    """Returns column-major scales."""
    stride = _align(scales.size(0), _WORDS)
    found = torch.empty_strided(scales.shape, (1, stride), dtype=scales.dtype, device=scales.device)
    return found.copy_(scales)


def _fold(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Adds up the rows by expert of each received row in FP32, in the order of the ids."""
    sums = torch.zeros(slots.size(0), x.size(1), dtype=torch.float32, device=x.device)
    for column in slots.unbind(1):
        sums += torch.where((column >= 0).unsqueeze(1), x[column.clamp(min=0)], 0)
    return sums


class Elastic:
    """Groups of the calls, one for each combination of sizes, and the calls themselves."""

    def __init__(self, comm: Communicator, queue: Queue, deadline: Deadline, rounds: bool) -> None:
        self.comm, self.queue, self.deadline, self.rounds = comm, queue, deadline, rounds
        self.exchanges: Dict[_Sizes, Exchange] = {}
        self.packed: Dict[Tuple[_Sizes, int], Permuted] = {}

    def exchange(self, sizes: _Sizes) -> Exchange:
        """Returns the group. Its rows are bytes, and return as BF16 or FP32. Rows of 4 bytes for each element are
        FP32."""
        if sizes not in self.exchanges:
            is_f32 = sizes.row_bytes == 4 * sizes.hidden
            element = Element.F32 if is_f32 else Element.opaque(sizes.row_bytes, sizes.scale_bytes)
            config = GroupConfig(
                sizes.experts,
                sizes.hidden,
                sizes.topk,
                tokens=sizes.tokens,
                element=element,
                sms=sizes.sms or None,
                combine_f32=sizes.combine_f32,
                deadline=self.deadline,
            )
            self.exchanges[sizes] = Exchange(
                self.comm,
                self.queue,
                config,
                Layout.FLAT,
                sizes.hidden,
                sizes.row_bytes,
                dtype=torch.float32 if is_f32 else torch.uint8,
                rows=self.comm.ranks * sizes.tokens,
                scale_bytes=sizes.scale_bytes,
            )
        return self.exchanges[sizes]

    def by_expert(self, sizes: _Sizes, alignment: int) -> Permuted:
        """Returns the places of rows by expert, for all rows that may arrive."""
        key = (sizes, alignment)
        if key not in self.packed:
            group, room = self.exchange(sizes).group, room_by_expert(sizes, self.comm.ranks, alignment)
            self.packed[key] = Permuted.without_rows(group, Layout.expert_major_packed(alignment), room)
        return self.packed[key]

    def dispatch(
        self,
        rows: torch.Tensor,
        scales: Optional[torch.Tensor],
        weights: Optional[torch.Tensor],
        handle: EPHandle,
        is_new: bool,
        waits: bool,
        column_major: bool,
        stats: Optional[torch.Tensor],
        sms: int,
    ) -> List[Optional[torch.Tensor]]:
        """Returns rows, scales, ids and weights that arrive. Completes a new handle."""
        sizes = _Sizes(
            handle.num_experts,
            handle.topk_idx.size(1),
            handle.num_max_tokens_per_rank,
            rows.size(1),
            rows.size(1) * rows.element_size(),
            0 if scales is None else 4 * scales.size(1),
            sms,
            handle.do_expand and not self.rounds,
        )
        slot = self.exchange(sizes).slots[0]
        sent = aligned(rows).view(torch.uint8)
        sent_weights = None if weights is None else aligned(weights)
        sent_scales = None if scales is None else scales.contiguous().view(torch.uint8)
        slot.swap(handle, Tokens(sent, handle._ids, weights=sent_weights, scales=sent_scales))
        handle._slot, arrived = slot, _Arrived.of(slot)
        if is_new:
            self._count(handle, sizes, arrived, waits)
        if stats is not None:
            stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        expands, count = handle.do_expand, handle.num_recv_tokens
        if expands:
            count, layout = handle.num_expanded_tokens, self.by_expert(sizes, handle.expert_alignment)
        else:
            layout = slot.permuted
        recv = torch.empty(count, rows.size(1), dtype=rows.dtype, device=rows.device)
        to = layout.with_capacity(count).with_memory(slot.exchange.group, rows=recv.view(torch.uint8))
        slot.received.permute(self.queue.gin, to)
        if is_new:
            self._trace(handle, arrived, slot, to)
        got_scales = got_weights = None
        if scales is not None:
            got_scales = scales.new_zeros(count, scales.size(1))
        if weights is not None:
            got_weights = weights.new_zeros((count,) if expands else (count, sizes.topk))
        slot.received.store_metadata(self.queue.gin, to, scales=got_scales, weights=got_weights)
        self.queue.settle()
        if column_major and scales is not None:
            got_scales = _columns(got_scales)
        return [recv, got_scales, None if expands else handle._here.to(handle.topk_idx.dtype), got_weights]

    def _count(self, handle: EPHandle, sizes: _Sizes, arrived: _Arrived, waits: bool) -> None:
        """Sets the numbers of rows of a handle. If the host `waits`, they are exact."""
        ranks, unit = self.comm.ranks, handle.expert_alignment
        per_expert = arrived.per_expert(sizes.experts // ranks)
        padded = (per_expert + unit - 1) // unit * unit
        ends = padded.cumsum(0, dtype=torch.int32)
        handle.num_unaligned_recv_tokens_per_expert = per_expert
        handle.psum_num_recv_tokens_per_scaleup_rank = arrived.counts.cumsum(0).int()
        handle.psum_num_recv_tokens_per_expert = ends - padded + per_expert if handle.do_expand else ends
        handle.num_recv_tokens = ranks * sizes.tokens
        handle.num_expanded_tokens = room_by_expert(sizes, ranks, unit)
        handle.num_recv_tokens_per_expert_list = []
        if waits:
            found = torch.cat([handle.psum_num_recv_tokens_per_scaleup_rank, padded]).tolist()
            handle.num_recv_tokens, handle.num_recv_tokens_per_expert_list = found[ranks - 1], found[ranks:]
            handle.num_expanded_tokens = sum(found[ranks:])

    def _trace(self, handle: EPHandle, arrived: _Arrived, slot: FixedSlot, to: Permuted) -> None:
        """Sets the sources of a handle's received rows, and the rows by expert that are copies of each."""
        count, topk = handle.num_recv_tokens, handle.topk_idx.size(1)
        here = torch.full((count, topk), -1, dtype=torch.int32, device=arrived.counts.device)
        tokens, flat = torch.zeros(count, dtype=torch.int32, device=here.device), slot.permuted.with_capacity(count)
        slot.received.store_metadata(self.queue.gin, flat, experts=here, tokens=tokens)
        self.queue.settle()
        rows = _Places.of(flat, count)
        numbers = torch.arange(topk, device=here.device)
        last = torch.where(here >= 0, numbers, -1).amax(1)
        token = rows.source * handle.num_max_tokens_per_rank + tokens
        # The row past the received ones takes the gaps.
        slots = torch.full(((count + 1) * topk,), -1, dtype=torch.int64, device=here.device)
        if handle.do_expand:
            places, first = _Places.of(to, to.capacity), arrived.counts.cumsum(0) - arrived.counts
            target = torch.where(places.valid, (first[places.source] + places.row) * topk + places.k, count * topk)
            slots.scatter_(0, target, torch.arange(places.k.numel(), device=here.device))
        handle._here, handle._slots = here, slots.view(-1, topk)[:count]
        handle.recv_src_metadata = torch.cat(
            [token.unsqueeze(1), (rows.source * topk + last).unsqueeze(1), handle._slots], 1
        ).int()

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        weights: Optional[torch.Tensor],
        biases: Tuple[torch.Tensor, ...],
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Tuple[Any, ...]]:
        """Returns sums of rows and of weights, and the tensors that the work uses."""
        sums, more = torch.empty(handle._ids.size(0), x.size(1), dtype=torch.bfloat16, device=x.device), {}
        if biases:
            more["bias"] = aligned(biases[0])
        if len(biases) > 1:
            sums.copy_(biases[1])
            more["accumulate"] = True
        if handle.do_expand:
            rows = _fold(x, handle._slots)
            rows = rows.bfloat16() if self.rounds else rows
        else:
            rows = aligned(x)
        self._return(handle, handle._slot, Combine.reduced(sums, **more), rows)
        total = None if weights is None else self._sum_weights(handle, weights)
        return sums, total, (x, rows, weights, sums, total, handle._ids, *biases, *more.values())

    def _sum_weights(self, handle: EPHandle, weights: torch.Tensor) -> torch.Tensor:
        """Returns each weight to its token from the rank of its id; 0 if there is no id."""
        if handle.do_expand:
            weights = weights[handle._slots.clamp(min=0)]
        topk = weights.size(1)
        words = _align(topk, 4)
        padded = torch.nn.functional.pad(torch.where(handle._here >= 0, weights, 0.0), (0, words - topk))
        tokens, sms = handle.num_max_tokens_per_rank, handle.num_sms
        sizes = _Sizes(handle.num_experts, topk, tokens, words, 4 * words, 0, sms)
        slot = self.exchange(sizes).slots[0]
        sums = torch.empty(handle._ids.size(0), words, dtype=torch.float32, device=weights.device)
        self._return(handle, slot, Combine.reduced(sums), padded)
        self.queue.settle()
        slot.exchange.check()
        return sums[:, :topk].contiguous()

    def _return(self, handle: EPHandle, slot: FixedSlot, combine: Combine, rows: torch.Tensor) -> None:
        slot.combine(handle, handle._ids, combine, rows, slot.permuted.with_capacity(handle.num_recv_tokens))

    def destroy(self) -> None:
        self.packed.clear()
        while self.exchanges:
            self.exchanges.popitem()[1].destroy()
