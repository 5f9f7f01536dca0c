# SPDX-License-Identifier: MIT OR Apache-2.0
"""Types of the package. docs/python.md explains the classes."""

from os import PathLike
from typing import Any, Callable, ClassVar, Protocol, Sequence, TypeVar, Union, final

from . import ep as ep

__version__: str

_T = TypeVar("_T")
_Extent = Union[int, Sequence[int]]

class _Tensor(Protocol):
    """A value that offers its memory by DLPack, such as an array of NumPy or a tensor of torch."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Error(RuntimeError):
    """An error of gin. Its text names the cause and the remedy."""

class StateError(Error):
    """A call that the present state refuses: too early, too late, or after a fork."""

class FaultError(Error):
    """A fault that has ended the communicator."""

    kind: str
    """Timeout, Aborted, PeerLost, Network, OutOfRange and so on, as `FaultKind` of the Rust API."""
    operation: str
    """The operation that failed, such as put or wait_signal; nothing if there is none."""
    context: int | None
    peer: int | None
    """The world rank of the peer."""
    subject: str | None
    """signal, counter, barrier or window."""
    subject_id: int | None
    offset: int | None
    """The first byte in the window."""
    expected: int
    """The value that was waited for, or the limit."""
    seen: int
    """The value that was found instead."""
    deadline_ns: int | None
    place: str | None
    """File, line and column of the call in the kernel, on virtual GPUs."""
    rank: int
    """The rank that found the fault."""
    host: str
    peer_host: str | None
    window: str | None
    """The name of the window, if it has one."""
    back_end: str
    cause: str | None

@final
class Deadline:
    """Time limit of a wait in a kernel, from the start of that wait."""

    NONE: ClassVar[Deadline]
    """No time limit. An abort or a fault still ends the wait."""
    def __new__(cls, seconds: float) -> Deadline: ...
    @property
    def ns(self) -> int: ...

@final
class Kernel:
    """A kernel that can be launched."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> list[tuple[str, str, int]]:
        """Name, type and bytes of each parameter. PTX of another program has only the bytes."""

@final
class Module:
    """Kernels of PTX that the program has loaded."""

    @property
    def names(self) -> list[str]: ...
    def kernel(self, name: str) -> Kernel: ...

@final
class Window:
    """A window: one part on each rank, which kernels of all ranks reach. This rank's part is a tensor by DLPack. On a virtual
    GPU `from_dlpack` waits for the kernels that were launched with the window."""

    @property
    def id(self) -> int: ...
    @property
    def handle(self) -> int:
        """The address of the window's entry in the GPU's memory: a window of `gincomm.triton`."""
    @property
    def name(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def nbytes_on(self, rank: int) -> int:
        """Returns the bytes of a rank's part."""
    def deregister(self) -> None:
        """Ends the window. Collective. Tensors of it keep its memory."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Communicator:
    """One rank's member of a group of ranks that share windows, signals and counters."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def handle(self) -> int:
        """The address of the communicator's handle in the GPU's memory: the argument `comm` of `gincomm.triton`."""
    @property
    def state(self) -> str:
        """active, aborted or destroyed."""
    @property
    def backend(self) -> str: ...
    @property
    def fault(self) -> FaultError | None:
        """The fault that has ended the communicator."""
    def alloc_window(
        self, shape: _Extent, dtype: Any, *, signals: bool = False, name: str | None = None
    ) -> Window:
        """Allocates this rank's part of a new window, zeroed, and registers it. Collective."""
    def register(self, tensor: _Tensor, *, signals: bool = False, name: str | None = None) -> Window:
        """Registers a tensor's memory as this rank's part of a window, without a copy. Collective.
        Memory of a window can be in windows of other communicators, also of later jobs."""
    def check(self) -> None:
        """Raises FaultError if a fault has ended the communicator. Programs call this after a kernel has run."""
    def abort(self) -> None:
        """Ends every wait of the communicator on every rank."""
    def progress(self) -> bool:
        """Carries out requests of kernels, if made with `progress="manual"`. Returns whether there was anything to do."""
    def stats(self) -> list[dict[str, int]]:
        """Returns the statistics of each context."""
    def destroy(self) -> None:
        """Ends the communicator and frees its resources. Collective if it is active."""
    def __enter__(self) -> Communicator: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool: ...

@final
class Stream:
    """Kernels of one rank in order."""

    @property
    def handle(self) -> int | None:
        """The driver's handle of the stream; None on a virtual GPU."""
    def launch(
        self,
        kernel: Kernel | str,
        *args: Communicator | Window | Deadline | _Tensor | ep.Received | ep.PermutedRows | int | float | bool,
        grid: _Extent | None = None,
        block: _Extent | None = None,
        shared: int = 0,
        cooperative: bool = True,
        cluster: _Extent | None = None,
    ) -> None:
        """Launches a kernel: by default 1 block of 64 threads. Does not wait for it."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Waits until all work is done, and raises the error of a kernel."""
    def is_idle(self) -> bool: ...
    def wait_for(self, other: Stream) -> None:
        """Delays later work of this stream until all present work of the other one is done."""

@final
class Rank:
    """One rank of a job."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def dlpack_device(self) -> tuple[int, int]: ...
    @property
    def id(self) -> str | None:
        """The id with which processes can join this job while it runs; None for a rank of `gincomm.launch`. A process
        that has it can join."""
    @property
    def lost(self) -> list[int]:
        """The ranks that are known to be lost."""
    def grow(self, joining: Sequence[int], *, timeout: float = 300.0) -> Rank:
        """Makes a job with processes that join as the ranks `joining`: in the place of lost ranks, or as new ones, whose
        numbers follow. All other ranks call it, and the new processes `gincomm.init(..., join=True)`. Returns this rank
        in the new job, with the same number and device. This job goes on until the rank is closed."""
    def alloc(self, shape: _Extent, dtype: Any) -> ep.View:
        """Allocates memory, zeroed, that can be this rank's part of windows: a tensor by DLPack. Not collective."""
    def communicator(
        self,
        *,
        contexts: int | None = None,
        signals: int | None = None,
        counters: int | None = None,
        queue_depth: int | None = None,
        world_barriers: int | None = None,
        rail_barriers: int | None = None,
        lsa_barriers: int | None = None,
        max_outstanding_per_peer: int | None = None,
        max_message: int | None = None,
        windows: int | None = None,
        print_lines: int | None = None,
        strong_signals: bool = False,
        va_signals: bool = False,
        lsa_size: int | None = None,
        routes: str = "automatic",
        backend: str | None = None,
        nic: str | None = None,
        network: str = "auto",
        progress: str = "threads",
        survive_losses: bool = False,
    ) -> Communicator:
        """Creates a communicator of all ranks. Collective. All ranks pass the same values.

        `routes` are automatic or network, back ends auto, proxy and gdaki, networks auto, peer, verbs and fabric.
        `nic` names the NIC that kernels drive with gdaki. With `progress="manual"` no thread of gin carries out requests
        of kernels: `progress()` and waits of gin do. With `survive_losses` the loss of a rank does not end it.
        """
    def stream(self, stream: Any = None) -> Stream:
        """Makes a stream, or uses one of the program, such as `torch.cuda.current_stream()`."""
    def kernel(self, name: str) -> Kernel:
        """Returns the linked kernel of this name."""
    def kernels(self) -> list[str]:
        """Returns the names and parameters of all linked kernels."""
    def load(self, source: str | bytes | PathLike[str]) -> Module:
        """Loads kernels from PTX or a cubin: its text, its bytes, or its path. On GPUs only."""
    def barrier(self) -> None:
        """Waits for all ranks. Collective."""
    def all_gather(self, data: bytes) -> list[bytes]:
        """Gives every rank the bytes of all ranks, by rank. Collective."""
    def abort(self) -> None:
        """Ends the collective calls of all ranks, and every wait of this rank's communicators on every rank."""
    def close(self) -> None:
        """Leaves the job. Destroy the communicators first."""
    def __enter__(self) -> Rank: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool: ...

def init(
    rank: int | None = None,
    ranks: int | None = None,
    id: str | None = None,
    *,
    device: Any = None,
    timeout: float = 300.0,
    collective_timeout: float | None = None,
    join: bool = False,
) -> Rank:
    """Makes this process one rank of a job: as its launcher says, or by hand with rank, ranks and id. With `join` the job
    runs already: its ranks call `grow` with the number of this rank."""

def rank() -> Rank:
    """Returns the rank that `gincomm.init`, or the last `Rank.grow`, has made in this process."""

def from_torch(group: Any, device: Any = None) -> Rank:
    """Returns the rank of gin for a process group of torch.distributed. Collective. A process without a job joins one."""

def unique_id(address: str | None = None) -> str:
    """Makes the id of a job, which this process will join as rank 0."""

def launch(
    ranks: int, body: Callable[[Rank], _T], *, device: Any = None, nics: str | None = None
) -> list[_T]:
    """Runs `body(rank)` on a thread for each rank of a job in this process. Returns the results by rank.

    After Ctrl-C it aborts all ranks and waits for their bodies; a second Ctrl-C leaves them.
    `nics="soft"` gives each rank a software NIC, which kernels drive.
    """

def gpus() -> list[str]:
    """Returns the names of the GPUs that gin can use here; empty if there is none."""
