# SPDX-License-Identifier: MIT OR Apache-2.0
"""What both modes of `gincomm.deep_ep` use: events, the stream of a buffer, and groups with their slots."""

from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch

from . import Communicator, Error, Rank, StateError
from .ep import Combine, Group, GroupConfig, Layout, Permuted, Received, Sent, Tokens


class EventHandle:
    """An event on the current CUDA stream. On CPU tensors all work before it is done."""

    def __init__(self, event: Optional[torch.cuda.Event] = None) -> None:
        self.event = event
        if event is None and torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Delays later work of the current stream until the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event that the current stream can wait for. In `with`, the wait is at the end.

    `extra_tensors` stay alive as long as this object.
    """

    def __init__(
        self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[torch.Tensor, ...]] = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Delays later work of the current stream until the event. With `release_handle` drops the event then.

        Raises StateError if there is no event: the call had no `async_finish`.
        """
        if self.event is None:
            raise StateError(
                "there is no event to wait for: pass async_finish=True, or async_with_compute_stream=True to an "
                "ElasticBuffer, to the call that returns it"
            )
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """Returns this object, for `with`, whose wait then has this argument."""
        self._releases = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)


class Queue:
    """The streams of a buffer's work: the program's current stream, or a stream of the buffer, whose work overlaps with
    the program's. `gin` is the stream of the present call."""

    def __init__(self, rank: Rank) -> None:
        kind, number = rank.dlpack_device
        self.rank = rank
        self.device = torch.device("cpu") if kind == 1 else torch.device("cuda", number)
        self.is_gpu = self.device.type == "cuda"
        self.torch = torch.cuda.Stream(self.device) if self.is_gpu else None
        self.gin = rank.stream(self.torch) if self.is_gpu else rank.stream()
        self.last = self.given = self.torch

    def is_capturing(self) -> bool:
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def after(self, previous: Optional[EventOverlap] = None, overlaps: bool = False) -> Iterator[None]:
        """Runs the body's work after an event or after the current stream's work: on the current stream, or on the
        buffer's if it `overlaps`."""
        if not self.is_gpu:
            yield
            return
        event = None if previous is None or previous.event is None else previous.event.event
        current = torch.cuda.current_stream(self.device)
        if not overlaps:
            if event is not None:
                current.wait_event(event)
            self._begin(current)
            yield
            return
        if event is not None:
            self.torch.wait_event(event)
        else:
            self.torch.wait_stream(current)
        self._begin(self.torch)
        with torch.cuda.stream(self.torch):
            yield

    def _begin(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream the present one. Kernels of a slot run one after another, on whatever stream."""
        if not self.is_capturing():
            if self.last != stream:
                stream.wait_stream(self.last)
            self.last = stream
        if stream != self.given:
            self.gin, self.given = self.rank.stream(stream), stream

    def finish(self, async_finish: bool, tensors: Sequence[Any], overlaps: bool = False) -> EventOverlap:
        """Delays the current stream until the work of a call is done, or with `async_finish` returns the event."""
        if not self.is_gpu:
            self.gin.synchronize()
            return EventOverlap(EventHandle() if async_finish else None)
        if not (async_finish or overlaps):
            return EventOverlap()
        used = self.keep(tensors)
        current = torch.cuda.current_stream(self.device)
        event = torch.cuda.Event()
        event.record(self.torch)
        if async_finish:
            return EventOverlap(EventHandle(event), used)
        current.wait_event(event)
        return EventOverlap()

    def keep(self, tensors: Sequence[Any], overlaps: bool = True) -> Tuple[torch.Tensor, ...]:
        """Has torch keep the memory of tensors until the work so far has ended: the current stream's, and the buffer's
        if it `overlaps`."""
        used = tuple(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        if self.is_gpu and not self.is_capturing():
            current = torch.cuda.current_stream(self.device)
            for tensor in used:
                tensor.record_stream(current)
                if overlaps:
                    tensor.record_stream(self.torch)
        return used

    def settle(self) -> None:
        """Waits for kernels that write memory which torch reads next, if that memory belongs to a CPU."""
        if not self.is_gpu:
            self.gin.synchronize()


class FixedSlot:
    """A slot, the places of its received rows, and the routing whose rows it has now.

    A combine of a routing whose rows the slot no longer has sends the routing again.
    """

    def __init__(self, exchange: "Exchange", number: int, permuted: Permuted) -> None:
        self.exchange = exchange
        self.gin = exchange.group.slot(number)
        self.permuted = permuted
        self.to = permuted
        self.routing: Any = None
        self.sent: Optional[Sent] = None
        self.received: Optional[Received] = None

    def send(self, routing: Any, tokens: Tokens, to: Optional[Permuted] = None) -> None:
        """Sends rows, which are received into memory with the slot's places. `routing` stands for their ids."""
        self._begin(to)
        self.sent = self.gin.dispatch(self.exchange.queue.gin, tokens)
        self.routing = routing

    def receive(self) -> None:
        """Receives the sent rows. Does nothing if they were received."""
        if self.sent is not None:
            sent, self.sent = self.sent, None
            self._hold(sent.receive(self.exchange.queue.gin))

    def swap(self, routing: Any, tokens: Tokens, to: Optional[Permuted] = None) -> None:
        """Sends rows and receives them as `send` and `receive`."""
        self._begin(to)
        stream = self.exchange.queue.gin
        if self.exchange.expands:
            self.received, _ = self.gin.exchange_into(stream, tokens, self.to)
        else:
            self._hold(self.gin.exchange(stream, tokens))
        self.routing = routing

    def combine(
        self, routing: Any, ids: torch.Tensor, combine: Combine, rows: torch.Tensor, to: Optional[Permuted] = None
    ) -> None:
        """Returns rows of a routing, which have the slot's places."""
        if self.sent is not None:
            raise StateError("call the hook of the dispatch before the combine: its rows were not received")
        queue = self.exchange.queue
        if self.received is None or self.routing is not routing:
            zeros = lambda columns: torch.zeros(ids.size(0), columns, dtype=torch.uint8, device=queue.device)
            scales = zeros(self.exchange.scale_bytes) if self.exchange.scale_bytes else None
            self.swap(routing, Tokens(zeros(self.exchange.row_bytes).view(self.exchange.dtype), ids, scales=scales))
        received, self.received = self.received, None
        received.combine(queue.gin, combine, (self.permuted if to is None else to, rows))

    def _begin(self, to: Optional[Permuted]) -> None:
        if self.sent is not None:
            raise StateError("call the hook of the dispatch before the last one first: its rows were not received")
        self._release()
        self.to = self.permuted if to is None else to

    def _hold(self, received: Received) -> None:
        received.permute(self.exchange.queue.gin, self.to)
        self.received = received

    def _release(self) -> None:
        if self.received is not None:
            received, self.received = self.received, None
            received.release()


class Exchange:
    """A group of gin, and its slots with the places of rows in a layout."""

    def __init__(
        self,
        comm: Communicator,
        queue: Queue,
        config: GroupConfig,
        layout: Layout,
        hidden: int,
        row_bytes: int,
        slots: int = 1,
        dtype: torch.dtype = torch.uint8,
        rows: Optional[int] = None,
        scale_bytes: int = 0,
    ) -> None:
        if queue.is_capturing():
            raise StateError("the first call with these sizes allocates memory: make it once before the capture")
        self.queue, self.hidden, self.row_bytes, self.dtype = queue, hidden, row_bytes, dtype
        self.scale_bytes = scale_bytes
        # torch's allocator keeps tensors for the work of their streams on GPUs. A slot would keep the large ones longer,
        # and those of a capture as long as the group.
        self.group = Group(comm, config, keeps_tensors=not queue.is_gpu)
        # One kernel sends rows and stores them by expert. For other ranks it is an exchange.
        self.expands = layout == Layout.EXPERT_MAJOR_FIXED and self.group.expands
        self.slots: List[FixedSlot] = [
            FixedSlot(self, number, Permuted.without_rows(self.group, layout, rows)) for number in range(slots)
        ]
        self.turn = 0

    def next_slot(self) -> FixedSlot:
        """Returns the slots in turn."""
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        return slot

    def check(self, waited: bool = False) -> None:
        """Raises the first error of the kernels, on CPU tensors, or if the host has `waited` for them. Otherwise the
        next dispatch raises it."""
        if (waited or not self.queue.is_gpu) and (report := self.group.status()) is not None:
            raise Error(str(report))

    def destroy(self) -> None:
        for slot in self.slots:
            slot._release()
        self.slots = []
        self.group.destroy()
