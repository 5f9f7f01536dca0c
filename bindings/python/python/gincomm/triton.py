# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations of gin in kernels of Triton, on GPUs: docs/python.md, "Triton".

    from gincomm import triton as gt

    @triton.jit
    def kernel(comm, inbox, outbox, peer, nbytes, round, deadline):
        fault = gt.put(comm, peer, inbox, 0, outbox, 0, nbytes, deadline, signal=0)
        if fault == 0:
            fault = gt.wait_signal(comm, 0, round, deadline)
        gt.report(comm, fault)

    kernel[(1,)](comm.handle, inbox.handle, outbox.handle, ..., extern_libs=gt.extern_libs())

A program instance is a block of threads, and each call is a call of the whole block. Its threads meet, one of them acts
(for `put` and `get` by loads and stores: all of them copy), and they meet again. So all program instances that reach a
call make it; the calls are neither for elements of a tensor nor for a part of the threads.

`comm` and windows are the `handle` of a `gincomm.Communicator` and a `gincomm.Window`. A peer is a world rank. Offsets
and lengths are in bytes, deadlines in nanoseconds (`gincomm.Deadline(1).ns`). Operations return a fault in one word, 0
if there is none: pass it to `report`, and do not use the data.
"""

import functools
import hashlib
import pathlib

import triton
from triton.language import core

from ._gin import _device_ir

__all__ = [
    "barrier",
    "extern_libs",
    "flush",
    "get",
    "peer_pointer",
    "put",
    "put_value",
    "read_counter",
    "read_signal",
    "report",
    "signal",
    "wait_counter",
    "wait_signal",
]

# Bits of the argument `options`: bindings/c/device/src/options.rs.
_SIGNAL = 1 << 10
_COUNTER = 1 << 12

_TEAMS = {"world": 0, "rail": 1, "lsa": 2}
_FENCES = {"none": 0, "put": 1, "get": 2, "put_get": 3}

_U32, _U64 = core.uint32, core.uint64


def extern_libs(arch=None):
    """Returns the launch option by which Triton finds gin's device functions: `kernel[grid](..., extern_libs=...)`.

    `arch` is an architecture as Triton counts them, such as 90; by default that of the current GPU. Raises ValueError if
    gincomm was built for none that serves it.
    """
    if arch is None:
        arch = triton.runtime.driver.active.get_current_target().arch
    return {"gin": _library(arch)}


@functools.cache
def _library(arch):
    """Returns the path of the device functions for an architecture."""
    # sm_90a is for 90 alone, sm_90 for all from 90 on.
    have = {name.removeprefix("sm_"): text for name, text in _device_ir()}
    serving = [name for name in have if name == f"{arch}a" or (name.isdigit() and int(name) <= arch)]
    if not serving:
        found = ", ".join(f"sm_{name}" for name in have) or "no GPU"
        raise ValueError(
            f"gincomm was built with device functions for {found}, and sm_{arch} needs others: "
            f"build it with the feature cuda and GIN_ARCHS=sm_{arch}"
        )
    name = max(serving, key=lambda name: int(name.removesuffix("a")))
    # Triton keeps kernels by the hash of this file, and does not see that this module calls other functions now.
    version = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
    text = f"; for gincomm.triton {version}\n".encode() + have[name]
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(text).hexdigest())
    file = f"gin.sm_{name}.ll"
    return cache.get_file(file) or cache.put(text, file)


def _extern(function):
    """Makes a function that kernels call."""
    inner = core.extern(function)

    @functools.wraps(inner)
    def call(*arguments, **keywords):
        if "_semantic" not in keywords and triton.knobs.runtime.interpret:
            raise RuntimeError(f"Triton's interpreter cannot call {function.__name__} of gin: unset TRITON_INTERPRET, on a GPU")
        return inner(*arguments, **keywords)

    return call


def _scalar(what, value, semantic):
    """Returns the scalar tensor of an argument."""
    tensor = semantic.to_tensor(core._unwrap_if_constexpr(value))
    if tensor.type.is_block():
        raise ValueError(f"`{what}` is a tensor of shape {tensor.type.shape}, and gin takes one value for the block")
    return tensor


def _integer(what, value, dtype, semantic):
    """Returns an argument as an integer of `dtype`. A number that does not fit is refused here, or by the function."""
    value = core._unwrap_if_constexpr(value)
    largest = 2**dtype.primitive_bitwidth - 1
    if isinstance(value, int) and not 0 <= value <= largest:
        raise ValueError(f"`{what}` is {value}, and gin takes 0 to {largest}")
    tensor = _scalar(what, value, semantic)
    if not tensor.dtype.is_int():
        raise ValueError(f"`{what}` is of type {tensor.dtype}, and gin takes an integer")
    if tensor.dtype.primitive_bitwidth > dtype.primitive_bitwidth:
        # Else a number past 32 bits would become a valid one. No rank, context or counter has the largest.
        tensor = core.minimum(core.cast(tensor, _U64, _semantic=semantic), largest, _semantic=semantic)
    return core.cast(tensor, dtype, _semantic=semantic)


def _choice(what, value, values):
    value = core._unwrap_if_constexpr(value)
    if value not in values:
        raise ValueError(f"`{what}` is {value!r}, and gin knows {', '.join(map(repr, values))}")
    return values[value]


def _call(name, arguments, semantic):
    """Calls a device function with `arguments`: name, value and type of each. Returns its word."""
    options = getattr(semantic.builder, "options", None)
    if getattr(options, "num_ctas", 1) != 1:
        raise ValueError(f"num_ctas={options.num_ctas}: a call of gin is a call of one block; launch with num_ctas=1")
    values = [_integer(*argument, semantic) for argument in arguments]
    # Triton hoists loads of a loop over calls, to have them in flight early (num_stages): a load could come before the wait
    # for its data. It leaves loops with a barrier alone. The barrier also has the call follow all accesses of the block.
    core.debug_barrier(_semantic=semantic)
    symbols = {tuple(dtype for _, _, dtype in arguments): (name, _U64)}
    return core.extern_elementwise("gin", "", values, symbols, is_pure=False, _semantic=semantic)


def _raised(signal, amount):
    """Returns the option and the arguments of a signal that a post raises."""
    signal = core._unwrap_if_constexpr(signal)
    if signal is None:
        return 0, [("signal", 0, _U64), ("amount", 0, _U64)]
    return _SIGNAL, [("signal", signal, _U64), ("amount", amount, _U64)]


@_extern
def put(comm, peer, to, to_offset, source, source_offset, nbytes, deadline, signal=None, amount=1, counter=None, context=0,
        _semantic=None):
    """Writes `nbytes` bytes of this rank's part of the window `source` to the peer's part of the window `to`.

    Then raises the peer's `signal` by `amount`, and this rank's `counter` by 1 when `source` may be reused. Releases all
    earlier writes of the block. Returns a fault, 0 if there is none.
    """
    options, raised = _raised(signal, amount)
    counter = core._unwrap_if_constexpr(counter)
    if counter is not None:
        options |= _COUNTER
    return _call("gin_triton_put", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", options, _U32), ("peer", peer, _U32),
        ("counter", 0 if counter is None else counter, _U32), ("to", to, _U64), ("to_offset", to_offset, _U64),
        ("source", source, _U64), ("source_offset", source_offset, _U64), ("nbytes", nbytes, _U64), *raised,
        ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def put_value(comm, peer, to, to_offset, value, deadline, signal=None, amount=1, context=0, _semantic=None):
    """Writes a scalar of 1, 2, 4 or 8 bytes to the peer's part of the window `to`. Else as `put`.

    The type of `value` gives its width: a Python number is an int32 or a float32.
    """
    value = _scalar("value", value, _semantic)
    bits = 0 if value.dtype.is_ptr() else value.dtype.primitive_bitwidth
    if bits not in (8, 16, 32, 64):
        raise ValueError(f"`value` is of type {value.dtype}, and gin takes a number of 1, 2, 4 or 8 bytes")
    value = core.cast(value, core.get_int_dtype(bits, False), bitcast=True, _semantic=_semantic)
    options, raised = _raised(signal, amount)
    return _call("gin_triton_put_value", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", options, _U32), ("peer", peer, _U32),
        ("bytes", bits // 8, _U32), ("to", to, _U64), ("to_offset", to_offset, _U64), ("value", value, _U64), *raised,
        ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def get(comm, peer, source, source_offset, to, to_offset, nbytes, deadline, context=0, _semantic=None):
    """Reads `nbytes` bytes of the peer's part of the window `source` into this rank's part of the window `to`.

    The bytes are there after `flush`. Returns a fault, 0 if there is none.
    """
    return _call("gin_triton_get", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("peer", peer, _U32),
        ("source", source, _U64), ("source_offset", source_offset, _U64), ("to", to, _U64), ("to_offset", to_offset, _U64),
        ("nbytes", nbytes, _U64), ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def signal(comm, peer, signal, deadline, amount=1, context=0, _semantic=None):
    """Raises the peer's `signal` by `amount`, after all earlier puts of the context to the peer.

    Releases all earlier writes of the block, also stores by `peer_pointer`. Returns a fault, 0 if there is none.
    """
    options, raised = _raised(signal, amount)
    return _call("gin_triton_signal", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", options, _U32), ("peer", peer, _U32), *raised,
        ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def wait_signal(comm, signal, least, deadline, context=0, _semantic=None):
    """Waits until this rank's `signal` is at or past `least`.

    Then all threads of the block see what the peers wrote before they raised it. Returns a fault, 0 if there is none.
    """
    return _call("gin_triton_wait_signal", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("signal", signal, _U64),
        ("least", least, _U64), ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def wait_counter(comm, counter, least, deadline, context=0, _semantic=None):
    """Waits until this rank's `counter` is at or past `least`. Returns a fault, 0 if there is none."""
    return _call("gin_triton_wait_counter", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("counter", counter, _U32),
        ("least", least, _U64), ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def read_signal(comm, signal, context=0, _semantic=None):
    """Returns the value of this rank's `signal`, as one thread reads it. Reports a fault, and returns 0 then."""
    return _call("gin_triton_read_signal", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("signal", signal, _U64),
    ], _semantic)


@_extern
def read_counter(comm, counter, context=0, _semantic=None):
    """Returns the value of this rank's `counter`, as one thread reads it. Reports a fault, and returns 0 then."""
    return _call("gin_triton_read_counter", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("counter", counter, _U32),
    ], _semantic)


@_extern
def flush(comm, deadline, context=0, _semantic=None):
    """Waits until all earlier operations of the context are complete: sources may be reused, and gets have arrived.

    Returns a fault, 0 if there is none.
    """
    return _call("gin_triton_flush", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def barrier(comm, team, index, fence, deadline, context=0, _semantic=None):
    """Meets the ranks of a team, "world", "rail" or "lsa", in barrier `index` of the communicator, with one block each.

    Afterwards the block sees what these blocks wrote before, also by `peer_pointer`. `fence` names what else it waits for:
    "none", "put" (puts to this rank are visible), "get" (gets have arrived, and sources may be reused) or "put_get". Returns
    a fault, 0 if there is none.
    """
    return _call("gin_triton_barrier", [
        ("comm", comm, _U64), ("context", context, _U32), ("options", 0, _U32), ("team", _choice("team", team, _TEAMS), _U32),
        ("index", index, _U32), ("fence", _choice("fence", fence, _FENCES), _U32), ("deadline", deadline, _U64),
    ], _semantic)


@_extern
def peer_pointer(comm, window, peer, dtype, offset=0, _semantic=None):
    """Returns the pointer to elements of `dtype` by which this GPU loads and stores a peer's part of the window.

    The pointer is null if this GPU does not reach the peer, or the part has no byte at `offset`:
    `pointer.to(tl.uint64) == 0`. Triton knows no alignment of it: `tl.multiple_of(pointer, 16)` states it.
    """
    dtype = core._unwrap_if_constexpr(dtype)
    address = _call("gin_triton_peer_pointer", [
        ("comm", comm, _U64), ("window", window, _U64), ("offset", offset, _U64), ("peer", peer, _U32),
    ], _semantic)
    return core.cast(address, core.pointer_type(dtype), _semantic=_semantic)


@_extern
def report(comm, fault, _semantic=None):
    """Reports a fault to the host, if it is not 0. It ends every wait of the communicator, on all ranks.

    `Communicator.check` raises it there. Returns the fault.
    """
    return _call("gin_triton_report", [("comm", comm, _U64), ("fault", fault, _U64)], _semantic)
