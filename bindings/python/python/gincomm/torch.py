# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dispatch and combine of tokens with autograd and torch.compile. docs/python.md explains the calls.

from gincomm.torch import Group, combine, dispatch
group = Group(process_group, experts=256, hidden=7168, topk=8, tokens=4096)
received = dispatch(x, ids, weights, group)
sums = combine(my_experts(received), received.handle)
"""

import itertools
import os
import weakref
from datetime import timedelta
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import custom_op

from . import Deadline, Error, FaultError, StateError, ep
from ._deep_ep_exchange import Queue
from ._deep_ep_rows import check, require
from ._process_group import join, timeout_of

__all__ = ["Group", "Handle", "Received", "combine", "dispatch"]

_ELEMENTS = {torch.bfloat16: ep.Element.BF16, torch.float16: ep.Element.F16, torch.float32: ep.Element.F32}
_IDS = (torch.int32, torch.int64)
_USUAL_TIMEOUT = timedelta(seconds=100)


class Handle(NamedTuple):
    """What `combine` needs of a dispatch: the ids, the number of the dispatch, the name of the group, the slot."""

    ids: torch.Tensor
    number: torch.Tensor
    group: str
    slot: int


class Received(NamedTuple):
    """The result of a dispatch. Sizes are fixed: a group has `capacity` rows, whatever arrives.

    - rows: `[capacity][hidden]`. Row `i` from rank `s` is `s * tokens + i`; with `max_rows`, rows follow each other by
      source and token. Other rows are 0.
    - experts: the number on this rank of each id's expert, or -1: `[capacity][topk]`, int32. -1 in other rows.
    - weights: the weight of each id, 0 where the expert is -1: `[capacity][topk]`, float32.
    - counts: the number of rows from each rank, int64.
    - handle: for `combine`.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    handle: Handle


class _Slot:
    """A slot for rows and one for gradients of weights, and the routing that the first has now."""

    def __init__(self, group: "Group", number: int) -> None:
        self.rows, self.weights = group._rows.slot(number), group._weights.slot(number)
        self.received: Optional[ep.Received] = None
        self.routing: Optional[int] = None
        """The number of the dispatch whose routing `received` has."""
        self.open: Optional[int] = None
        """The number of the dispatch that `combine` has not ended."""

    def send(self, group: "Group", number: int, tokens: ep.Tokens) -> ep.Received:
        self.release()
        self.received, self.routing = group._exchange(self.rows, tokens), number
        return self.received

    def release(self) -> None:
        if self.received is not None:
            received, self.received, self.open = self.received, None, None
            received.release()


class Group:
    """The ranks of a process group, with the memory for rows of tokens. Collective: all ranks pass the same sizes.

    - group: a process group of torch.distributed, or a `gincomm.Rank`. Its ranks are all ranks of gin's job; a process
      without a job starts one.
    - experts, hidden, topk, slots, max_rows, sms: as in `gincomm.ep.GroupConfig`.
    - tokens: the maximum number of tokens of a rank's dispatch.
    - dtype: that of rows: bfloat16, float16 or float32.
    - timeout: how long a rank waits in a call for other ranks; by default the process group's timeout, or 100 s for a
      `gincomm.Rank`.
    - device: that of the tensors: "cpu" for virtual GPUs, or a CUDA device. By default the current CUDA device, or "cpu"
      if there is none.
    """

    def __init__(
        self,
        group: Any,
        experts: int,
        hidden: int,
        topk: int,
        *,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        slots: int = 1,
        max_rows: Optional[int] = None,
        sms: Optional[int] = None,
        timeout: Optional[timedelta] = None,
        device: Any = None,
    ) -> None:
        require(dtype in _ELEMENTS, f"dtype is {dtype}; use one of {', '.join(map(str, _ELEMENTS))}")
        self._rank = join(group, device)
        self.rank, self.ranks = self._rank.rank, self._rank.ranks
        self.hidden, self.topk, self.tokens, self.dtype, self.slots = hidden, topk, tokens, dtype, slots
        self.timeout = timeout or timeout_of(group) or _USUAL_TIMEOUT
        self.capacity = self.ranks * tokens if max_rows is None else max_rows
        self._shared = max_rows is not None
        # With `max_rows` a rank waits up to three deadlines for rows.
        deadline = Deadline(self.timeout.total_seconds() / (3 if self._shared else 1))

        def config(columns: int, element: ep.Element) -> ep.GroupConfig:
            return ep.GroupConfig(
                experts, columns, topk, tokens=tokens, slots=slots, element=element, max_rows=max_rows, sms=sms,
                deadline=deadline,
            )

        # A row has a multiple of 16 bytes.
        self._columns = -(-topk // 4) * 4
        rows, weights = config(hidden, _ELEMENTS[dtype]), config(self._columns, ep.Element.F32)
        self._queue = Queue(self._rank)
        self._comm = self._rank.communicator()
        self._rows, self._weights = ep.Group(self._comm, rows), ep.Group(self._comm, weights)
        self._slots: List[_Slot] = [_Slot(self, number) for number in range(slots)]
        self._failure: Optional[str] = None
        self._numbers = itertools.count()
        self.name = f"group {next(_names)} of rank {self.rank}"
        _groups[self.name] = self

    def destroy(self) -> None:
        """Frees the memory. Collective."""
        _groups.pop(self.name, None)
        for slot in self._slots:
            slot.release()
        self._slots = []
        self._weights.destroy()
        self._rows.destroy()
        self._comm.destroy()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.destroy()
        else:
            # Other ranks may wait for this one.
            self._comm.abort()

    def __deepcopy__(self, memo: Any) -> "Group":
        """Returns the group itself: copies of a module share it."""
        return self

    def _slot(self, call: str, number: int) -> _Slot:
        if self._failure is not None:
            raise StateError(f"{call}: {self.name} failed before and is out of step; make a new one. {self._failure}")
        if self._queue.is_capturing():
            raise StateError(f"{call} cannot be captured: use gincomm.ep with a Permuted in a CUDA graph")
        return self._slots[number]

    def _exchange(self, slot: ep.Slot, tokens: ep.Tokens) -> ep.Received:
        try:
            return slot.exchange(self._queue.gin, tokens)
        except (FaultError, StateError):
            raise
        except Error as error:
            # The report of an earlier call on a GPU. Nobody knows which steps were without a rank.
            self._failure = str(error)
            raise

    def _check(self, call: str) -> None:
        """Raises the first error of the kernels, if they have ended: on CPU tensors, or with CUDA_LAUNCH_BLOCKING=1."""
        if self._queue.is_gpu:
            if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
                return
            self._queue.gin.synchronize()
        self._comm.check()
        for each in (self._rows, self._weights):
            if (report := each.status()) is not None:
                text = f"{call} of {self.name}: {report}"
                if report.code in ("Silent", "Unsent", "Stopped"):
                    self._failure = text
                raise Error(text)

    def _views(self, received: ep.Received, *views: ep.View) -> Tuple[torch.Tensor, ...]:
        """Copies received values: those of no row are 0. Last come the counts."""
        counts = torch.from_dlpack(received.counts()).clone()
        number = torch.arange(self.capacity if self._shared else self.tokens, device=counts.device)
        there = number < counts.sum() if self._shared else (number < counts.unsqueeze(1)).flatten()
        each = (torch.from_dlpack(view).reshape(self.capacity, -1) for view in views)
        return (*(torch.where(there.unsqueeze(1), one, 0) for one in each), there, counts)

    def _send(self, call: str, x: torch.Tensor, ids: torch.Tensor, weights: Any, slot: int, number: Any) -> Any:
        """Sends rows and receives them. Returns copies of rows, experts and weights, and the counts."""
        own, queue = self._slot(call, slot), self._queue
        with queue.after():
            rows, ids = _plain(x), _plain(ids)
            weights = None if weights is None else _plain(weights)
            received = own.send(self, number, ep.Tokens(rows, ids, weights=weights))
            queue.settle()
            self._check(call)
            more = () if weights is None else (received.experts(), received.weights())
            found = self._views(received, received.rows(), *more)
        queue.finish(False, (rows, ids, weights, *found))
        return found

    def _return(self, call: str, rows: torch.Tensor, ids: torch.Tensor, slot: int, number: int) -> torch.Tensor:
        """Returns rows of a dispatch to their sources, and adds them up. Sends the routing again if the slot lacks it."""
        own, queue = self._slot(call, slot), self._queue
        with queue.after():
            rows, ids = _plain(rows), _plain(ids)
            sums = torch.empty(ids.size(0), self.hidden, dtype=self.dtype, device=queue.device)
            if own.received is None or own.routing != number:
                own.send(self, number, ep.Tokens(torch.zeros_like(sums), ids))
                queue.settle()
            received, own.received, own.open = own.received, None, None
            received.combine(queue.gin, ep.Combine.reduced(sums), rows)
        queue.finish(False, (rows, ids, sums))
        self._check(call)
        return sums

    def _return_weights(self, call: str, values: torch.Tensor, ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Returns values of received ids to their tokens. Only the rank of an id's expert has a value other than 0."""
        own, queue = self._slot(call, slot), self._queue
        with queue.after():
            padded, ids = torch.nn.functional.pad(values, (0, self._columns - self.topk)).contiguous(), _plain(ids)
            sums = torch.zeros(ids.size(0), self._columns, dtype=torch.float32, device=queue.device)
            received = self._exchange(own.weights, ep.Tokens(sums, ids))
            received.combine(queue.gin, ep.Combine.reduced(sums), padded)
            queue.settle()
            found = sums[:, : self.topk].contiguous()
        queue.finish(False, (values, padded, ids, sums, found))
        self._check(call)
        return found

    def _check_slot(self, slot: int) -> None:
        require(0 <= slot < self.slots, f"slot is {slot}; the group has slots 0 to {self.slots - 1}")

    def _check_rows(self, name: str, rows: torch.Tensor) -> None:
        check(name, rows, self._queue.device, (self.dtype,), self.capacity, self.hidden)


_names = itertools.count()
_groups: "weakref.WeakValueDictionary[str, Group]" = weakref.WeakValueDictionary()


def _find(name: str) -> Group:
    group = _groups.get(name)
    if group is None:
        raise StateError(f"{name} is destroyed, or nothing refers to it: keep the group as long as its handles")
    return group


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor as gin takes them: contiguous, aligned to 16 bytes, without a gradient."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _check_dispatch(group: Group, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slot: int) -> None:
    device = group._queue.device
    group._check_slot(slot)
    check("x", x, device, (group.dtype,), None, group.hidden)
    count = x.size(0)
    require(count <= group.tokens, f"x has {count} tokens; the group has room for {group.tokens} of a rank")
    check("ids", ids, device, _IDS, count, group.topk)
    check("weights", weights, device, (torch.float32,), count, group.topk)


_Tensors = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@custom_op("gincomm::dispatch", mutates_args=())
def _dispatch(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: str, slot: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own = _find(group)
    _check_dispatch(own, x, ids, weights, slot)
    number = next(own._numbers)
    rows, experts, got, there, counts = own._send("dispatch", x, ids, weights, slot, number)
    own._slots[slot].open = number
    here = there.unsqueeze(1) & (experts >= 0)
    return rows, torch.where(there.unsqueeze(1), experts, -1), torch.where(here, got, 0.0), counts, torch.tensor(number)


@_dispatch.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: str, slot: int) -> _Tensors:
    own = _find(group)
    _check_dispatch(own, x, ids, weights, slot)
    by_id = own.capacity, own.topk
    return (
        x.new_empty(own.capacity, own.hidden),
        x.new_empty(by_id, dtype=torch.int32),
        x.new_empty(by_id, dtype=torch.float32),
        x.new_empty(own.ranks, dtype=torch.int64),
        torch.empty((), dtype=torch.int64),
    )


@custom_op("gincomm::combine", mutates_args=())
def _combine(
    rows: torch.Tensor, ids: torch.Tensor, number: torch.Tensor, group: str, slot: int, backward: bool
) -> torch.Tensor:
    own, dispatched = _find(group), int(number)
    own._check_rows("rows", rows)
    if not backward and own._slots[slot].open != dispatched:
        raise StateError(
            f"combine: dispatch {dispatched} of slot {slot} was combined before, or slot {slot} has dispatched again "
            "since: combine each dispatch once, before the next one of its slot, or use another slot"
        )
    return own._return("the backward of dispatch" if backward else "combine", rows, ids, slot, dispatched)


@_combine.register_fake
def _(
    rows: torch.Tensor, ids: torch.Tensor, number: torch.Tensor, group: str, slot: int, backward: bool
) -> torch.Tensor:
    _find(group)._check_rows("rows", rows)
    return rows.new_empty(ids.size(0), rows.size(1))


@custom_op("gincomm::combine_backward", mutates_args=())
def _combine_backward(
    gradient: torch.Tensor, ids: torch.Tensor, number: torch.Tensor, group: str, slot: int
) -> torch.Tensor:
    return _find(group)._send("the backward of combine", gradient, ids, None, slot, int(number))[0]


@_combine_backward.register_fake
def _(gradient: torch.Tensor, ids: torch.Tensor, number: torch.Tensor, group: str, slot: int) -> torch.Tensor:
    return gradient.new_empty(_find(group).capacity, gradient.size(1))


@custom_op("gincomm::weights_backward", mutates_args=())
def _weights_backward(
    gradient: torch.Tensor, experts: torch.Tensor, ids: torch.Tensor, group: str, slot: int
) -> torch.Tensor:
    values = torch.where(experts >= 0, gradient, 0.0)
    return _find(group)._return_weights("the backward of dispatch", values, ids, slot)


@_weights_backward.register_fake
def _(gradient: torch.Tensor, experts: torch.Tensor, ids: torch.Tensor, group: str, slot: int) -> torch.Tensor:
    return gradient.new_empty(ids.shape)


def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    _, ids, _, ctx.group, ctx.slot = inputs
    _, experts, _, _, number = output
    ctx.save_for_backward(ids, experts, number)


def _backward_of_dispatch(ctx: Any, rows: torch.Tensor, _e: Any, weights: torch.Tensor, _c: Any, _n: Any) -> Any:
    ids, experts, number = ctx.saved_tensors
    by_row, _, by_id, _, _ = ctx.needs_input_grad
    x = _combine(rows, ids, number, ctx.group, ctx.slot, True) if by_row else None
    return x, None, _weights_backward(weights, experts, ids, ctx.group, ctx.slot) if by_id else None, None, None


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    _, ids, number, ctx.group, ctx.slot, _ = inputs
    ctx.save_for_backward(ids, number)


def _backward_of_combine(ctx: Any, sums: torch.Tensor) -> Any:
    ids, number = ctx.saved_tensors
    return _combine_backward(sums, ids, number, ctx.group, ctx.slot), None, None, None, None, None


_dispatch.register_autograd(_backward_of_dispatch, setup_context=_save_dispatch)
_combine.register_autograd(_backward_of_combine, setup_context=_save_combine)

# A compiler may neither reorder nor remove nor merge these operators, because all ranks call them in one order.
for _operator in ("dispatch", "combine", "combine_backward", "weights_backward"):
    _register_effectful_op(getattr(torch.ops.gincomm, _operator).default, _EffectType.ORDERED)


def dispatch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: Group, slot: int = 0) -> Received:
    """Sends each token to the ranks of its experts, and receives the rows of all ranks. Collective.

    `x` is `[token][hidden]`; `ids` are `[token][topk]`, int32 or int64, none if negative; `weights` are
    `[token][topk]`, float32. The backward sums the gradients of rows by token, and returns those of weights.
    """
    rows, experts, got, counts, number = _dispatch(x, ids, weights, group.name, slot)
    return Received(rows, experts, got, counts, Handle(ids, number, group.name, slot))


def combine(rows: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Returns each received row's result to its source, and adds up the results of each token: `[token][hidden]`.

    Collective. Ends the dispatch: combine a handle once, before the next dispatch of its slot. The backward sends the
    gradients of sums to the ranks of each token.
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"handle is {type(handle).__name__}; pass the `handle` of what dispatch returned")
    return _combine(rows, *handle, False)
