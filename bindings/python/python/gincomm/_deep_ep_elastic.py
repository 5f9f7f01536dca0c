# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeepEP's `ElasticBuffer` on gin."""

from typing import Any, Dict, NoReturn, Optional, Tuple, Union

import torch

from . import Deadline, Rank, StateError
from ._deep_ep_elastic_rows import Elastic, EPHandle
from ._deep_ep_exchange import EventHandle, EventOverlap, Queue
from ._deep_ep_rows import check, refuse, require
from ._process_group import join
from .ep import Element, GroupConfig

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
Event = Union[EventHandle, EventOverlap, None]

_USUAL_TOPK = 8

_ALIGNMENT = 65536
"""The largest alignment of `Layout.expert_major_packed`."""

_REFUSED = {
    "use comm.alloc_window of gincomm": "engram_write engram_fetch get_engram_storage_size_hint",
    "use send and recv of torch.distributed": "pp_set_config pp_send pp_recv get_pp_buffer_size_hint",
    "use all_gather of torch.distributed": "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config "
    "agrs_get_inplace_tensor all_gather get_agrs_num_max_session_bytes get_agrs_buffer_size_hint",
}
"""What a program can call in place of DeepEP's calls that have nothing to do with expert parallelism."""


class ElasticBuffer:
    """Expert parallelism with the calls of DeepEP's second version. The docs of each call say only what differs or what
    gin adds.

    `group` is a process group of torch.distributed, or a `gincomm.Rank`. The constructor, `dispatch`, `combine`, `barrier`
    and `destroy` are collective. The first dispatch and combine with new sizes allocate memory.
    """

    num_sms: int = 20
    """The number that `get_theoretical_num_sms` returns with `prefer_overlap_with_compute`."""

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        device: Any = None,
    ) -> None:
        """Joins the ranks of the group. Collective. `device` is as in `Buffer`.

        A rank waits at most `num_gpu_timeout_secs` for another one. docs/deep_ep.md lists the arguments without effect.
        """
        if num_cpu_bytes:
            refuse("ElasticBuffer(num_cpu_bytes=)", "leave it out: it is memory for engram_write")
        self._rank = join(group, device)
        self.group, self.rank_idx, self.num_ranks = group, self._rank.rank, self._rank.ranks
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.num_allocated_qps = prefer_overlap_with_compute, num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._queue = Queue(self._rank)
        self._comm = self._rank.communicator()
        self._elastic = Elastic(self._comm, self._queue, Deadline(num_gpu_timeout_secs), allow_multiple_reduction)

    def destroy(self) -> None:
        """Frees the memory. Collective. The buffer was made with `explicitly_destroy`."""
        if not self.explicitly_destroy:
            raise StateError("destroy() needs ElasticBuffer(explicitly_destroy=True)")
        self._elastic.destroy()
        self._comm.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes of a group of gin on each rank, without its outputs. By default a token has 8 ids."""
        ranks = group.ranks if isinstance(group, Rank) else group.size()
        row_bytes, scale_bytes = (hidden, hidden // 128 * 4) if use_fp8_dispatch else (2 * hidden, 0)
        element, topk = Element.opaque(row_bytes, scale_bytes), num_topk or _USUAL_TOPK
        return GroupConfig(ranks, hidden, topk, tokens=num_max_tokens_per_rank, element=element).footprint(ranks)

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """Returns `(1, num_ranks)`: a program calls gin in the same way for all ranks."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """Returns `(1, num_ranks)`: a row goes straight to its rank."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *args: Any, **kwargs: Any) -> int:
        """Returns `ElasticBuffer.num_sms`, or 64 without `prefer_overlap_with_compute`: gin models no times."""
        return ElasticBuffer.num_sms if self.prefer_overlap_with_compute else 64

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: gin selects the queue pairs."""
        return 0

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the CUDA stream of calls with `async_with_compute_stream`."""
        if self._queue.torch is None:
            raise StateError("a buffer of CPU tensors has no CUDA stream")
        return self._queue.torch

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits, on the host, for all ranks' work on the stream of the buffer or on the current one. Collective."""
        if self._queue.is_gpu:
            stream = self._queue.torch if use_comm_stream else torch.cuda.current_stream(self._queue.device)
            torch.cuda.synchronize(self._queue.device) if with_cpu_sync else stream.synchronize()
        self._rank.barrier()

    def dispatch(
        self,
        x: Rows,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap]:
        """Sends each token once to each of its ranks. Rows arrive by source rank, then by token. With `do_expand` there
        is a row for each id, by expert, then by source rank and token; the gaps of experts are zero.

        Returns rows, or a tuple of rows and scales; ids as numbers on this rank, or -1, and None with `do_expand`; weights
        if `topk_weights` is given, 0 where there is no id; the handle, which is the given one if there is one; the event.
        """
        queue, (rows, scales) = self._queue, x if isinstance(x, tuple) else (x, None)
        self._check_rows(rows, scales)
        require(num_sms >= 0, f"num_sms is {num_sms}; use 0 for all SMs, or more")
        require(do_expand or not do_zero_padding, "do_zero_padding=True needs do_expand=True")
        given, is_new = (num_experts, num_max_tokens_per_rank, expert_alignment, do_expand), handle is None
        if is_new:
            sizes = self._sizes(rows.size(0), topk_idx, *given)
        else:
            _check_handle(handle, topk_idx, *given)
            require(not do_cpu_sync, "do_cpu_sync=True needs a dispatch without a handle")
            require(cumulative_local_expert_recv_stats is None, "with a handle, the statistics must be None")
            check("x", rows, queue.device, (rows.dtype,), handle.topk_idx.size(0), None)
        if topk_weights is not None:
            shape = (topk_idx if is_new else handle.topk_idx).shape
            check("topk_weights", topk_weights, queue.device, (torch.float32,), *shape)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            local = num_experts // self.num_ranks
            check("cumulative_local_expert_recv_stats", stats, queue.device, (torch.int32,), local)
        waits = is_new and do_cpu_sync is not False
        if waits and queue.is_capturing():
            raise StateError("in a capture the host cannot wait for numbers: pass do_cpu_sync=False or a handle")
        with queue.after(_overlap(previous_event), async_with_compute_stream):
            _wait(previous_event_before_epilogue)
            if is_new:
                ids = topk_idx.clone() if do_handle_copy else topk_idx
                handle = EPHandle(topk_idx=ids, num_sms=num_sms, do_expand=do_expand, **sizes)
            found = self._elastic.dispatch(
                rows,
                scales,
                topk_weights,
                handle,
                is_new,
                waits,
                use_tma_aligned_col_major_sf,
                stats,
                num_sms or handle.num_sms,
            )
        used = (rows, scales, topk_idx, topk_weights, stats, *found, *handle.tensors())
        event = queue.finish(async_with_compute_stream, used)
        handle._slot.exchange.check()
        recv, recv_scales, recv_ids, recv_weights = found
        return recv if scales is None else (recv, recv_scales), recv_ids, recv_weights, handle, event

    def _check_rows(self, rows: torch.Tensor, scales: Optional[torch.Tensor]) -> None:
        dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        check("x", rows, self._queue.device, (dtype,), None, None)
        # Kernels copy words of 16 bytes.
        unit = 16 // rows.element_size()
        require(rows.size(1) % unit == 0, f"hidden is {rows.size(1)}; use a multiple of {unit}")
        if scales is not None:
            check("the scales of x", scales, self._queue.device, (torch.float32, torch.int32), rows.size(0), None)

    def _sizes(
        self,
        count: int,
        topk_idx: Any,
        num_experts: Optional[int],
        num_max_tokens_per_rank: Optional[int],
        expert_alignment: Optional[int],
        do_expand: bool,
    ) -> Dict[str, int]:
        """Checks the arguments of a dispatch without a handle. Returns the sizes of the handle."""
        check("topk_idx", topk_idx, self._queue.device, (torch.int64, torch.int32), count, None)
        ranks, experts = self.num_ranks, num_experts
        require(experts is not None, "num_experts is missing: pass the number of all experts, or a handle")
        require(experts % ranks == 0, f"num_experts {experts} is not a multiple of the {ranks} ranks")
        tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        require(tokens >= 1, f"num_max_tokens_per_rank is {tokens}; pass 1 or more to dispatch or to ElasticBuffer")
        require(count <= tokens, f"x has {count} tokens; num_max_tokens_per_rank is {tokens}")
        alignment = 1 if expert_alignment is None else expert_alignment
        require(alignment >= 1, f"expert_alignment is {alignment}; use 1 or more")
        fits = alignment & (alignment - 1) == 0 and alignment <= _ALIGNMENT
        text = f"expert_alignment is {alignment}; do_expand needs a power of two, at most {_ALIGNMENT}"
        require(fits or not do_expand, text)
        return dict(num_experts=experts, num_max_tokens_per_rank=tokens, expert_alignment=alignment)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Returns a row for each received one, and adds up the rows of each token and its biases in FP32, by rank.

        After a dispatch with `do_expand`, torch first adds up the rows of a token's experts on this rank in FP32. With
        `allow_multiple_reduction` it rounds the sum to BF16; otherwise FP32 rows return.
        """
        require(isinstance(handle, EPHandle), "handle is not one of ElasticBuffer.dispatch")
        queue, (count, topk) = self._queue, handle.topk_idx.shape
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        hidden = handle._slot.exchange.hidden
        check("x", x, queue.device, (torch.bfloat16,), rows, hidden)
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        require(len(biases) <= 2, f"bias has {len(biases)} tensors; pass one, or a tuple of two")
        for each in biases:
            check("bias", each, queue.device, (torch.bfloat16,), count, hidden)
        if topk_weights is not None:
            shape = (rows,) if handle.do_expand else (rows, topk)
            check("topk_weights", topk_weights, queue.device, (torch.float32,), *shape)
        with queue.after(_overlap(previous_event), async_with_compute_stream):
            _wait(previous_event_before_epilogue)
            sums, total, used = self._elastic.combine(x, handle, topk_weights, biases)
        event = queue.finish(async_with_compute_stream, (*used, *handle.tensors()))
        handle._slot.exchange.check()
        return sums, total, event


def _check_handle(handle: Any, topk_idx: Any, *given: Any) -> None:
    """Checks the arguments of a dispatch that repeats a routing."""
    require(isinstance(handle, EPHandle), "handle is not one of ElasticBuffer.dispatch")
    require(topk_idx is None, "with a handle, topk_idx must be None")
    names = "num_experts", "num_max_tokens_per_rank", "expert_alignment", "do_expand"
    for name, value in zip(names, given):
        has = getattr(handle, name)
        require(value in (None, has), f"{name} is {value}; the dispatch of the handle had {has}")


def _refusal(name: str, remedy: str) -> Any:
    """Returns a call that is refused."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"ElasticBuffer.{name}", remedy)

    call.__name__, call.__doc__ = name, "Refused."
    return staticmethod(call)


for _remedy, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, _refusal(_name, _remedy))


def _overlap(event: Event) -> Optional[EventOverlap]:
    return EventOverlap(event) if isinstance(event, EventHandle) else event


def _wait(event: Event) -> None:
    """Delays the current stream's work until an event, if there is one."""
    handle = event.event if isinstance(event, EventOverlap) else event
    if handle is not None:
        handle.current_stream_wait()
