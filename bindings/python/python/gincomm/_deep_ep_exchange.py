# SPDX-License-Identifier: MIT OR Apache-2.0
"""What both modes of `gincomm.deep_ep` use: events, the stream of a buffer, and groups with their slots."""

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

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

    def current_stream_wait(self) -> None:
        """Delays later work of the current stream until the event.

        Raises StateError if there is no event: the call had no `async_finish`.
        """
        if self.event is None:
            raise StateError("there is no event to wait for: pass async_finish=True to the call that returns it")
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if self.event is not None:
            self.current_stream_wait()


class Queue:
    """The stream of a buffer's work. gin refuses torch's default stream, so events order both."""

    def __init__(self, rank: Rank) -> None:
        kind, number = rank.dlpack_device
        self.device = torch.device("cpu") if kind == 1 else torch.device("cuda", number)
        self.torch = torch.cuda.Stream(self.device) if self.is_gpu else None
        self.gin = rank.stream(self.torch) if self.is_gpu else rank.stream()

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def is_capturing(self) -> bool:
        return self.is_gpu and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def after(self, previous: Optional[EventOverlap] = None) -> Iterator[None]:
        """Runs torch's work of the body on this stream, after an event or after the work of the current stream."""
        if not self.is_gpu:
            yield
            return
        if previous is not None and previous.event is not None and previous.event.event is not None:
            self.torch.wait_event(previous.event.event)
        else:
            self.torch.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.torch):
            yield

    def finish(self, async_finish: bool, tensors: Sequence[Any]) -> EventOverlap:
        """Delays the current stream until the work of this one is done, or with `async_finish` returns the event."""
        if not self.is_gpu:
            self.gin.synchronize()
            return EventOverlap(EventHandle() if async_finish else None)
        used = tuple(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        current = torch.cuda.current_stream(self.device)
        if not self.is_capturing():
            for tensor in used:
                tensor.record_stream(self.torch)
                tensor.record_stream(current)
        event = torch.cuda.Event()
        event.record(self.torch)
        if async_finish:
            return EventOverlap(EventHandle(event), used)
        current.wait_event(event)
        return EventOverlap()

    def settle(self) -> None:
        """Waits for kernels that write memory which torch reads next, if that memory belongs to a CPU."""
        if not self.is_gpu:
            self.gin.synchronize()


class FixedSlot:
    """A slot, its fixed memory for received rows, and the routing whose rows it has now.

    A combine of a routing whose rows the slot no longer has sends the routing again.
    """

    def __init__(self, exchange: "Exchange", number: int, layout: Layout, capacity: int) -> None:
        self.exchange = exchange
        self.gin = exchange.group.slot(number)
        self.permuted = Permuted(exchange.group, layout, capacity)
        self.rows = torch.from_dlpack(self.permuted.rows("uint8"))
        self.counts = torch.from_dlpack(self.permuted.counts())
        self.info = torch.from_dlpack(self.permuted.source_info())
        self.routing: Any = None
        self.sent: Optional[Sent] = None
        self.received: Optional[Received] = None

    def send(self, routing: Any, tokens: Tokens) -> None:
        """Sends rows. `routing` stands for their ids."""
        if self.sent is not None:
            raise StateError("call the hook of the dispatch before the last one first: its rows were not received")
        self._release()
        self.sent = self.gin.dispatch(self.exchange.queue.gin, tokens)
        self.routing = routing

    def receive(self) -> None:
        """Receives the sent rows into the fixed memory. Does nothing if they were received."""
        if self.sent is not None:
            sent, self.sent = self.sent, None
            self._hold(sent.receive(self.exchange.queue.gin))

    def swap(self, routing: Any, tokens: Tokens) -> None:
        """Sends rows and receives them into the fixed memory."""
        if self.sent is not None:
            raise StateError("call the hook of the dispatch before the last one first: its rows were not received")
        self._release()
        received = self.gin.exchange(self.exchange.queue.gin, tokens)
        self.routing = routing
        self._hold(received)

    def combine(self, routing: Any, ids: torch.Tensor, combine: Combine, rows: Callable[[], torch.Tensor]) -> None:
        """Returns rows of a routing. `rows` makes them after the routing is in the fixed memory."""
        if self.sent is not None:
            raise StateError("call the hook of the dispatch before the combine: its rows were not received")
        queue = self.exchange.queue
        if self.received is None or self.routing is not routing:
            empty = torch.zeros(ids.size(0), self.exchange.row_bytes, dtype=torch.uint8, device=queue.device)
            self.swap(routing, Tokens(empty.view(self.exchange.dtype), ids))
            queue.settle()
        received, self.received = self.received, None
        received.combine(queue.gin, combine, (self.permuted, rows()))

    def _hold(self, received: Received) -> None:
        received.permute(self.exchange.queue.gin, self.permuted)
        self.received = received

    def _release(self) -> None:
        if self.received is not None:
            received, self.received = self.received, None
            received.release()


class Exchange:
    """A group of gin, and its slots with their memory."""

    def __init__(
        self,
        comm: Communicator,
        queue: Queue,
        config: GroupConfig,
        layout: Layout,
        capacity: int,
        hidden: int,
        row_bytes: int,
        slots: int = 1,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        if queue.is_capturing():
            raise StateError("the first call with these sizes allocates memory: make it once before the capture")
        self.queue, self.capacity, self.hidden, self.row_bytes, self.dtype = queue, capacity, hidden, row_bytes, dtype
        self.group = Group(comm, config)
        self.slots: List[FixedSlot] = [FixedSlot(self, number, layout, capacity) for number in range(slots)]
        self.turn = 0

    def next_slot(self) -> FixedSlot:
        """Returns the slots in turn."""
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        return slot

    def check(self) -> None:
        """Raises the first error of the kernels, on CPU tensors. On GPUs the next dispatch raises it."""
        if not self.queue.is_gpu and (report := self.group.status()) is not None:
            raise Error(str(report))

    def destroy(self) -> None:
        for slot in self.slots:
            slot._release()
            slot.rows = slot.counts = slot.info = None
        self.slots = []
        self.group.destroy()
