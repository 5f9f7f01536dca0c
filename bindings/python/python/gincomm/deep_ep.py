# SPDX-License-Identifier: MIT OR Apache-2.0
"""The interface of DeepEP's `Buffer` and `ElasticBuffer` on gin, for CUDA tensors and for CPU tensors.

docs/deep_ep.md has the differences.

from gincomm import deep_ep
buffer = deep_ep.Buffer(group, low_latency_mode=True)
"""

from typing import Any, Callable, List, NoReturn, Optional, Tuple, Union

import torch

from . import Deadline, StateError
from ._deep_ep_elastic import ElasticBuffer, EPHandle
from ._deep_ep_exchange import EventHandle, EventOverlap, Queue
from ._deep_ep_low_latency import Format, LowLatency, LowLatencyHandle, config_of
from ._deep_ep_normal import Handle, Normal, Routing, Rows, dispatch_layout
from ._deep_ep_rows import check, require
from ._deep_ep_rows import refuse as _refuse
from ._process_group import join
from .ep import Element

__all__ = ["Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64
"""The dtype of ids of experts."""

_USUAL_TOPK = 8


class Config:
    """Sizes of DeepEP's kernels. gin uses `num_sms` only."""

    def __init__(self, num_sms: int = 20, *chunks: int) -> None:
        require(num_sms >= 0, f"num_sms is {num_sms}; use 0 for all SMs, or more")
        require(len(chunks) <= 4, f"Config takes num_sms and 4 sizes of chunks, not {len(chunks)}")
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: the first call of each size allocates its memory."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: the first call of each size allocates its memory."""
        return 0


class Buffer:
    """Expert parallelism with the calls of DeepEP. The docs of each call say only what differs or what gin adds.

    `group` is a process group of torch.distributed, or a `gincomm.Rank`. All calls but `get_dispatch_layout` and
    `capture` are collective. Their first use with new sizes allocates memory.
    """

    num_sms: int = 20
    """The maximum number of SMs of `dispatch` and `combine`; 0 for all."""

    deadline: Deadline = Deadline(100)
    """How long a rank waits for another one. Set it before the buffer is made."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
        *,
        device: Any = None,
    ) -> None:
        """Joins the ranks of the group. Collective.

        `device` is that of the tensors: "cpu" for virtual GPUs, or a CUDA device. By default the current CUDA device,
        or "cpu" if there is none. The sizes of buffers have no effect.
        """
        if comm is not None:
            _refuse("Buffer(comm=)", "pass a process group of torch.distributed")
        if enable_shrink:
            _refuse("Buffer(enable_shrink=True)", "gincomm.ep.Group goes on without silent ranks")
        if allow_mnnvl:
            _refuse("Buffer(allow_mnnvl=True)", "leave it out")
        if not allow_nvlink_for_low_latency_mode:
            _refuse("Buffer(allow_nvlink_for_low_latency_mode=False)", "leave it out")
        self._rank = join(group, device)
        self.group, self.rank, self.group_size = group, self._rank.rank, self._rank.ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, False
        self._queue = Queue(self._rank)
        self._comm = self._rank.communicator()
        self._low_latency = LowLatency(self._comm, self._queue, self.deadline)
        self._normal = Normal(self._rank, self._comm, self._queue, self.deadline)

    def destroy(self) -> None:
        """Frees the memory. Collective. The buffer was made with `explicitly_destroy`."""
        if not self.explicitly_destroy:
            raise StateError("destroy() needs Buffer(explicitly_destroy=True)")
        self._low_latency.destroy()
        self._normal.destroy()
        self._comm.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: FP8 rows work on all devices."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the maximum number of SMs of later groups of `dispatch` and `combine`. All ranks set the same."""
        require(new_num_sms % 2 == 0 and new_num_sms >= 0, f"the number of SMs is {new_num_sms}; use an even one")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes that a group of gin takes for BF16 rows and 8 ids of a token, without its outputs."""
        topk = min(num_experts, _USUAL_TOPK)
        config = config_of(num_ranks, num_max_dispatch_tokens_per_rank, hidden, num_experts, topk, Element.BF16)
        return config.footprint(num_ranks)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns `Config(Buffer.num_sms)`."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns `Config(Buffer.num_sms)`."""
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the CUDA stream of the buffer's work."""
        if self._queue.torch is None:
            raise StateError("a buffer of CPU tensors has no CUDA stream")
        return self._queue.torch

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Returns tokens by rank, None, ids by expert, whether a token goes to a rank, and the event."""
        check("topk_idx", topk_idx, self._queue.device, (torch.int64, torch.int32), None, None)
        with self._queue.after(previous_event, async_finish):
            found = dispatch_layout(topk_idx, num_experts, self.group_size)
        return (*found, self._queue.finish(async_finish, (topk_idx, *found)))

    def dispatch(
        self,
        x: Rows,
        handle: Any = None,
        num_tokens_per_rank: Optional[torch.Tensor] = None,
        num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
        is_token_in_rank: Optional[torch.Tensor] = None,
        num_tokens_per_expert: Optional[torch.Tensor] = None,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[
        Rows, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[Handle], EventOverlap
    ]:
        """Sends each token once to each of its ranks. Rows arrive by source rank, then by token.

        With `num_worst_tokens`, which is the same on all ranks, no rank has more tokens than its share:
        `ceil(num_worst_tokens / ranks)`. Then the host waits for nothing.
        """
        if num_tokens_per_rdma_rank is not None:
            _refuse("dispatch(num_tokens_per_rdma_rank=)", "pass the None that get_dispatch_layout returns")
        require(expert_alignment >= 1, f"expert_alignment is {expert_alignment}; use 1 or more")
        require(num_worst_tokens >= 0, f"num_worst_tokens is {num_worst_tokens}; use 0 or more")
        sms = Buffer.num_sms if config is None else config.num_sms
        routing = Routing(is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert, topk_idx, topk_weights)
        return self._normal.dispatch(
            x, handle, routing, expert_alignment, num_worst_tokens, sms, previous_event, async_finish
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None] = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Returns a row for each received one, and adds up the rows of each token and its biases in FP32, by rank."""
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        require(len(biases) <= 2, f"bias has {len(biases)} tensors; pass one, or a tuple of two")
        sms = Buffer.num_sms if config is None else config.num_sms
        return self._normal.combine(x, handle, topk_weights, biases, sms, previous_event, async_finish)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: both modes of gin use separate memory, and leave nothing to clean."""
        self._check_mode("clean_low_latency_buffer")

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Optional[Callable[[], None]]]:
        """Sends each token to its experts. In the zone of an expert the rows stand by source rank, then by token.

        Returns `recv_x`, or with `use_fp8` a tuple of rows and scales; `recv_count`; the handle; the event; the hook.
        """
        self._check_mode("low_latency_dispatch")
        if dispatch_wait_recv_cost_stats is not None:
            _refuse("low_latency_dispatch(dispatch_wait_recv_cost_stats=)", "leave it out")
        return self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            Format(use_fp8, round_scale, use_ue8m0),
            async_finish,
            return_recv_hook,
        )

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[torch.Tensor] = None,
        combine_wait_recv_cost_stats: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Returns the experts' rows to their tokens, and adds them up by weights in FP32, in the order of the ids."""
        self._check_mode("low_latency_combine")
        if use_logfmt:
            _refuse("low_latency_combine(use_logfmt=True)", "rows return as BF16")
        if combine_wait_recv_cost_stats is not None:
            _refuse("low_latency_combine(combine_wait_recv_cost_stats=)", "leave it out")
        return self._low_latency.combine(
            x, topk_idx, topk_weights, handle, zero_copy, async_finish, return_recv_hook, out
        )

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """Returns the rows that `low_latency_combine(zero_copy=True)` of this handle takes in place of `x`."""
        self._check_mode("get_next_low_latency_combine_buffer")
        return self._low_latency.next_buffer(handle)

    def _check_mode(self, call: str) -> None:
        if not self.low_latency_mode:
            raise StateError(f"{call} needs Buffer(low_latency_mode=True)")

    def get_local_buffer_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("get_local_buffer_tensor", "use comm.alloc_window of gincomm")

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("internode_dispatch", "call dispatch")

    def internode_combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("internode_combine", "call combine")

    def low_latency_update_mask_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("low_latency_update_mask_buffer", "gincomm.ep.Group masks silent ranks")

    def low_latency_query_mask_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("low_latency_query_mask_buffer", "use gincomm.ep.Group.masked")

    def low_latency_clean_mask_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        _refuse("low_latency_clean_mask_buffer", "use gincomm.ep.Group.readmit")
