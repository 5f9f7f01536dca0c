# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert parallelism: dispatch and combine of tokens among ranks. docs/python.md and docs/ep.md explain the calls."""

from typing import Any, ClassVar, Iterator, Union, final

from . import Communicator, Deadline, Stream, _Tensor

@final
class Element:
    """The elements of rows. BF16 and F16 may be words of 16 bits, uint16, where NumPy does not know them."""

    BF16: ClassVar[Element]
    F16: ClassVar[Element]
    F32: ClassVar[Element]
    E4M3_F32: ClassVar[Element]
    """BF16, which the dispatch makes FP8 with FP32 scales of 128 elements. The returned rows are BF16."""
    E4M3_F32_POWERS: ClassVar[Element]
    """The same with FP32 scales that are powers of two."""
    E4M3_UE8M0: ClassVar[Element]
    """The same powers of two, one byte each."""
    @staticmethod
    def opaque(row_bytes: int, scale_bytes: int = 0) -> Element:
        """Any bytes, which are copied, with scales of any bytes. The returned rows are BF16."""

@final
class Layout:
    """A layout of received rows."""

    FLAT: ClassVar[Layout]
    """One row for each received one, rank-major: by source and token, without gaps."""
    EXPERT_MAJOR_PADDED: ClassVar[Layout]
    """`[expert][source][token]`: one row for each id, in zones with room for all tokens."""
    EXPERT_MAJOR_INDICES: ClassVar[Layout]
    """The places of packed rows without gaps, and for each of them the received row: nothing is copied."""
    EXPERT_MAJOR_FIXED: ClassVar[Layout]
    """`[expert][row]`: one row for each id, by source rank and token, without gaps, in zones with room for all rows that a
    rank may receive. It also has the rows' tokens, and scales as columns."""
    @staticmethod
    def expert_major_packed(align: int = 1) -> Layout:
        """Zones of experts, one row for each id. The first row of a zone is a multiple of `align`."""

@final
class GroupConfig:
    """Sizes of a group. All ranks pass the same.

    - experts: number of experts of all ranks; each rank has `ceil(experts / ranks)` of them, in order.
    - hidden: number of elements of a row.
    - topk: number of ids of a token.
    - tokens: the maximum number of tokens of a rank's dispatch.
    - slots: number of slots, each with separate memory.
    - element: the elements of rows; by default `Element.BF16`.
    - combine_at_source: one row comes back for each id, not for each rank; the source multiplies and adds them.
    - combine_f32: the returned row for each rank has FP32 elements in place of BF16.
    - max_rows: all sources share a region of a receiver, which has room for this many rows. By default each source has a
      region for `tokens` rows.
    - sms: the maximum number of SMs that a kernel takes, which is its maximum number of blocks; by default all.
    - grid: the number of blocks of a kernel, also if not all fit on the GPU at once; by default as many as have work and
      fit. It changes times, not results.
    - threads: the threads of a block: a multiple of 32, at most 512, or 256 if a rank is reached over a network. By
      default the most, and 256 if `tokens` is at most 256 and `sms` is not set.
    - deadline: how long a rank waits for another one before it goes on without it; by default `gincomm.Deadline(1)`.
    """

    def __new__(
        cls,
        experts: int,
        hidden: int,
        topk: int,
        *,
        tokens: int = 128,
        slots: int = 1,
        element: Element | None = None,
        combine_at_source: bool = False,
        combine_f32: bool = False,
        max_rows: int | None = None,
        sms: int | None = None,
        grid: int | None = None,
        threads: int | None = None,
        deadline: Deadline | None = None,
    ) -> GroupConfig: ...
    def footprint(self, ranks: int) -> int:
        """Returns the bytes that a group takes on each of `ranks` ranks. Allocates nothing."""

@final
class Report:
    """An error of a group's kernels. Group and communicator go on."""

    @property
    def slot(self) -> int: ...
    @property
    def code(self) -> str:
        """Silent, Unsent, UnknownExpert, TooManyTokens, TooManyRows, Full or Stopped."""
    @property
    def rank(self) -> int | None:
        """The rank, if the code is Silent, Unsent or Full."""
    @property
    def expert(self) -> int | None:
        """The id of an expert that does not exist, as it was given."""
    @property
    def seen(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def text(self) -> str: ...
    def __str__(self) -> str: ...

@final
class View:
    """Memory of a group or permuted rows, a tensor by DLPack. On a virtual GPU `from_dlpack` waits for the kernels that
    were launched with it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
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
class Plan:
    """The routing of tokens, counted once for several dispatches of the same ids."""

@final
class Tokens:
    """The tokens of a rank's dispatch."""

    rows: _Tensor
    ids: _Tensor
    count: int | _Tensor | None
    weights: _Tensor | None
    scales: _Tensor | None
    planned: Plan | None
    def __new__(
        cls,
        rows: _Tensor,
        ids: _Tensor,
        count: int | _Tensor | None = None,
        *,
        weights: _Tensor | None = None,
        scales: _Tensor | None = None,
        planned: Plan | None = None,
    ) -> Tokens:
        """`rows` are `[token][element]`, `ids` int32 or int64, `weights` float32, both `[token][id]`, `scales` `[token][..]`. An
        id is none if it is negative, whichever negative number it is. `count` is by default that of the rows; or it is a
        number, or a tensor of one int32 that kernels read when they run, of which a negative one counts as 0 and is reported.
        The group has room for `tokens` of its configuration."""

@final
class Combine:
    """The sums of a combine, in FP32, rounded once. Each starts from `bias` and, with `accumulate`, from the output."""

    @staticmethod
    def reduced(output: _Tensor, *, bias: _Tensor | None = None, accumulate: bool = False) -> Combine:
        """Adds up the rows of a token's ranks. The receiving ranks have multiplied by weights."""
    @staticmethod
    def weighted(
        weights: _Tensor, output: _Tensor, *, bias: _Tensor | None = None, accumulate: bool = False
    ) -> Combine:
        """Adds up the rows of a token's ids, each multiplied by its weight, in a group with `combine_at_source`."""
    @staticmethod
    def plain(output: _Tensor, *, bias: _Tensor | None = None, accumulate: bool = False) -> Combine:
        """Adds up the rows of a token's ids, in a group with `combine_at_source`."""

@final
class Permuted:
    """Memory for received rows in a layout. Its tensors have the same memory after each `Received.permute`."""

    def __new__(cls, group: Group, layout: Layout, rows: int | None = None) -> Permuted:
        """Allocates memory for at most `rows` rows; a padded or fixed layout has room for all rows that may arrive."""
    @staticmethod
    def without_rows(group: Group, layout: Layout, rows: int | None = None) -> Permuted:
        """Allocates memory for counts, places and source infos alone. Kernels copy no row, unless `with_memory` adds
        memory."""
    def with_capacity(self, rows: int) -> Permuted:
        """Returns the same flat or packed layout for at most `rows` rows. The places of rows are in memory that both
        share."""
    def with_memory(
        self,
        group: Group,
        *,
        rows: _Tensor | None = None,
        scales: _Tensor | None = None,
        tokens: _Tensor | None = None,
        counts: _Tensor | None = None,
    ) -> Permuted:
        """Returns the same layout in contiguous tensors of the program, of any shape, in place of memory of this value. The
        places of rows are in memory that both share, so a combine takes either. `tokens` and `counts` are int32."""
    @property
    def capacity(self) -> int: ...
    def rows(self, dtype: Any = None) -> View:
        """Returns the rows: `[row][element]`."""
    def scales(self) -> View:
        """Returns the scales of the rows of a fixed layout: `[expert][word][row]`, where a row's scales are words of 4
        bytes: float32, or int32 if scales have other bytes."""
    def tokens(self) -> View:
        """Returns the number of each row's token at its source, int32, in a fixed layout."""
    def counts(self) -> View:
        """Returns the words that `fetch_counts` copies, as int32."""
    def source_info(self) -> View:
        """Returns a word for each row, int32: `source << 21 | row << 5 | k`, or -1 for a gap."""
    def fetch_counts(self) -> list[int]:
        """Copies the number of rows with gaps, then for each expert of this rank the number of its rows, from each
        source if the layout is padded, then for each expert the number of its first row, if it is packed or fixed. A flat
        layout has the first only. In a fixed layout of `n` experts, pairs follow from word `2 + 2 * n` on: for each expert
        and source the number of its rows, and the number of its first row in the zone. The stream is done; on a virtual GPU
        the call waits for it."""

@final
class PermutedRows:
    """Received rows in another layout, an argument of `Stream.launch`: `gin_ep_kernels::PermutedRows` in the kernel."""

@final
class Received:
    """A dispatch that was received. Dropping it releases the rows. It is an argument of `Stream.launch`, too:
    `gin_ep_kernels::ReceivedRows` in the kernel.

    Its tensors are valid until combine or release, in the order of the stream. If the dispatch was captured in a graph,
    each replay fills the same tensors."""

    def rows(self, dtype: Any = None) -> View:
        """Returns the rows: `[source][row][element]`. Those below `counts` were received. With `max_rows` all sources
        share `[row][element]`, where the rows of a source begin at its number of `offsets`. The same holds for `tokens`,
        `experts`, `weights` and `scales`."""
    def region(self, dtype: Any = None) -> View | None:
        """Returns the memory of the rows, if all sources share it: `[row][element]`, for each row the longer one of a
        row there and a row back. Experts replace the rows there. None without `max_rows`."""
    def offsets(self) -> View:
        """Returns the number of the first row of each source, as int32, in a group with `max_rows`."""
    def counts(self) -> View:
        """Returns the number of rows from each source, as int64."""
    def tokens(self) -> View:
        """Returns the number of each row's token at its source: `[source][row]`, as int32."""
    def experts(self) -> View:
        """Returns the number on this rank of each id's expert, or -1: `[source][row][id]`, as int32."""
    def weights(self) -> View:
        """Returns the weight of each id: `[source][row][id]`, as float32. It has no meaning where the expert is -1."""
    def scales(self, dtype: Any = None) -> View:
        """Returns the scales of each row: `[source][row][element]`."""
    def permute(self, stream: Stream, to: Permuted) -> PermutedRows:
        """Puts the rows into another layout, in the order of the stream. Returns the parameter of kernels."""
    def store_metadata(
        self,
        stream: Stream,
        of: Permuted,
        *,
        experts: _Tensor | None = None,
        weights: _Tensor | None = None,
        scales: _Tensor | None = None,
        tokens: _Tensor | None = None,
    ) -> None:
        """Stores the metadata of rows in contiguous tensors of the program, in the order of the stream, at their places in a
        layout into which the rows were put. Places without a row keep their bytes. `tokens` is int32: the number of the
        row's token at its source. `scales` has the bytes of a row's scales, a multiple of 4. In a flat layout `experts`,
        int32 or int64, and `weights`, float32, are `[row][id]`: the number on this rank of each id's expert, or -1, with a
        weight of 0. In other layouts `weights` is `[row]`, and there are no `experts`."""
    def combine(
        self,
        stream: Stream,
        combine: Combine,
        rows: Union[_Tensor, Permuted, tuple[Permuted, _Tensor], None] = None,
    ) -> None:
        """Returns rows for each received one, and stores the sums of the returned rows. The rows are the received
        ones, or in a tensor, in permuted rows, or in the places of permuted rows in a tensor. A tensor has the shape
        `[ranks * tokens][element]`, where `tokens` is that of the group: row `r` from rank `s` is `s * tokens + r`. With
        `combine_at_source` it is `[ranks * tokens * topk][element]`, and id `k` of that row is `(s * tokens + r) * topk + k`. With
        `max_rows` it is `[max_rows][element]`, in the order of the received ones."""
    def release(self) -> None:
        """Gives the rows up without a combine."""

@final
class Sent:
    """A dispatch that was sent. Until it is received, the slot takes no other."""

    def receive(self, stream: Stream) -> Received:
        """Waits, in the order of the stream, for the rows of all ranks. The call returns at once."""

@final
class Parameter:
    """A parameter of a kernel that contains a dispatch and its combine, an argument of `Stream.launch`."""

@final
class Fused:
    """The parameters of a kernel that contains a dispatch and its combine. It iterates over them, in the order in which
    these take them. They count for any number of launches, until the slot does something else."""

    @property
    def comm(self) -> Parameter:
        """`Comm` in the kernel."""
    @property
    def arena(self) -> Parameter:
        """The memory of the group, `Window<u64>`."""
    @property
    def slot(self) -> Parameter:
        """`gin_ep_kernels::SlotParams`."""
    @property
    def tokens(self) -> Parameter:
        """`gin_ep_kernels::TokenParams`."""
    @property
    def sums(self) -> Parameter:
        """`gin_ep_kernels::Sums`."""
    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory that the dispatch needs."""
    def __iter__(self) -> Iterator[Parameter]: ...

@final
class Slot:
    """A slot: one dispatch at a time. `Group.slot` makes it."""

    @property
    def number(self) -> int: ...
    def dispatch(self, stream: Stream, tokens: Tokens) -> Sent:
        """Sends the rows. They are read in the order of the stream; the call returns at once."""
    def exchange(self, stream: Stream, tokens: Tokens) -> Received:
        """Sends the rows and waits for the rows of all ranks, in one kernel."""
    def exchange_into(self, stream: Stream, tokens: Tokens, to: Permuted) -> tuple[Received, PermutedRows]:
        """Sends the rows, waits for the rows of all ranks, and puts them into another layout as they arrive. All ranks
        call it. Returns what `exchange` and then `permute` return, with thousands of tokens earlier."""
    def plan(self, stream: Stream, tokens: Tokens) -> Plan:
        """Counts the tokens for each rank once, for dispatches of the same ids. Not in a capture."""
    def fuse(
        self,
        stream: Stream,
        tokens: Tokens,
        combine: Combine,
        rows: Union[_Tensor, Permuted, tuple[Permuted, _Tensor], None] = None,
    ) -> Fused:
        """Returns the parameters of a kernel of the program that contains a dispatch and its combine, for launches on
        the stream. The rows are as in `Received.combine`."""

@final
class Group:
    """The ranks of a communicator, with the memory for rows of tokens."""

    def __new__(cls, comm: Communicator, config: GroupConfig, *, keeps_tensors: bool = True) -> Group:
        """Allocates the memory of a group. Collective: all ranks pass the same configuration. With `keeps_tensors=False`
        slots do not keep the tensors of their calls: the program keeps each until the kernels that use it have ended."""
    def slot(self, slot: int) -> Slot:
        """Lends a slot. Its dispatches and combines follow each other; other slots are independent."""
    @property
    def expands(self) -> bool:
        """Whether `Slot.exchange_into` puts rows into an expert-major layout in the kernel of the dispatch. For other ranks
        such a call is the same as `Slot.exchange`."""
    @property
    def blocks(self) -> int:
        """The number of blocks of a launch."""
    def status(self) -> Report | None:
        """Returns the first error of the kernels since the last call. The slots' streams are done. An error that nobody has
        read is raised by the slot's next call that begins a dispatch, by `destroy`, and at the end of `with`."""
    def masked(self, slot: int) -> list[int]:
        """Returns the ranks that a slot goes on without."""
    def readmit(self) -> None:
        """Lets all ranks take part again, in all slots. Collective. No kernel of the group runs on any rank. Releases
        received rows."""
    def destroy(self) -> None:
        """Frees the memory. Collective. Releases received rows, and ends the slots. Then raises an error of the kernels that
        nobody has read."""
    def __enter__(self) -> Group: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool: ...
