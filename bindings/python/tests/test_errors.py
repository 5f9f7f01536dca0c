# SPDX-License-Identifier: MIT OR Apache-2.0
"""Provokes the errors of the package, and reads their texts as a user does.

The list of texts is taken from the source: a new error without a provocation here fails the test.
"""

import ctypes
import pathlib
import re
import threading

import gincomm as gin
import numpy as np
import pytest
from gincomm.ep import Permuted, Combine, Element, Group, GroupConfig, Layout, Tokens
from support import Null, run

SOURCES = pathlib.Path(__file__).parents[1] / "src"
EP_SOURCES = SOURCES.parents[2] / "gin-ep/src"

BEGINS = r"(?:new_err\(|format!\(|let text =\s*|let text = if [^\"]*|refuse\(|let (?:text|busy|advice|limit)\b[^\"=;]*=\s*)"
"""What precedes the text of an error in the package."""

EP_BEGINS = r"(?:(?:let )?what(?:: | = )|limit\(|address\(|#\[error\(\s*|\(self, )"
"""What precedes one in gin-ep."""

LITERAL = r'\s*"((?:[^"\\]|\\.|\\\n)*)"'

NOT_PROVOKED = [
    # Representations, and parts of texts.
    "<gin", "{:?}", ": {}", "{its}::", "{of}::", "{name}: {}", "{}({})", "{} bytes", "rank {rank}", "rank {index}", "{}",
    "int{bits}", "uint{bits}", "float{bits}", "complex{bits}", "DLPack type {code}", "{slots} times", "cuda:{id}",
    "DLPack device {other}", "rank {} of {}", "slot {slot}: ", "Opaque(", "{name} {value}",
    # GPUs, several hosts, or PTX of another program are needed.
    "the rank of this process is on device", "{place}: {number} does not fit", "{place}: a float has 4 or 8 bytes",
    "a plan allocates memory, which a capture", "nics=\"soft\": from Python", "GPU {ordinal}", "{count} ranks of this host",
    'network "peer" connects ranks', "loads and stores reach", "a group over a network", "version {version} of `__cuda",
    "an exchange into a layout in a group with ranks", "a kernel with dispatch and combine in a group with ranks",
    "rows of dispatch {seen} for rank", "the communicator was aborted, or has a fault", 'network "{network}": {error}',
    "a group with `max_rows` and ranks that loads", "the number of ranks of an LSA team",
    # Two threads in the same instant.
    "cannot launch: a window", "cannot end it: another thread", "cannot destroy the group: another thread",
    # A state that other checks exclude.
    "the call returned no rows", "the call has brought no result", "the DLPack capsule has no tensor",
    "slot {slot} has no such dispatch", "the memory of ", "{what} has {given} bytes, {needed}",
    "rows that are not there", "{what} has the shape {shape:?}",
    # Rust only.
    "a sum of ", "sums in place of the received rows", "a combine of products of ids", "the number of tiles", "experts",
    # By the tests of groups.
    "the number of rows and gaps that a layout",
    "rank {rank} did not come", "rank {rank} is sent", "rank {rank} has another configuration",
    "{text}; the first exception",
]
"""How texts begin that are not provoked here."""


def texts(folder, begins):
    for path in sorted(folder.rglob("*.rs")):
        if path.name in ("matmul.rs", "multiplier.rs", "grouped.rs", "overlapped.rs", "keep_alive.rs", "config_exchange.rs"):
            continue
        for match in re.finditer(begins + LITERAL, path.read_text(encoding="utf-8")):
            text = re.sub(r"\\\n\s*", "", match[1]).replace('\\"', '"').replace("\\n", "\n")
            if not any(text.startswith(begin) for begin in NOT_PROVOKED):
                yield path.name, text


def pattern(text):
    """Returns a regular expression for a format of Rust."""
    return ".*".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", text))


def in_python(text):
    return text.replace("`Tokens::scales`", "`scales=`").replace("::", ".")


class Strange:
    """A tensor that offers this capsule, on this device."""

    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return self.capsule() if callable(self.capsule) else self.capsule


def capsule(name, *words):
    """Returns a capsule whose memory stays for the rest of the process."""
    memory = (ctypes.c_uint32 * 64)(*words)
    KEPT.append((memory, name))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(ctypes.addressof(memory), name, None)


KEPT = []


class Provoked(list):
    """The texts of errors that calls have raised."""

    def by(self, call, *args, **options):
        try:
            call(*args, **options)
        except (gin.Error, TypeError, ValueError, OverflowError, BufferError, OSError) as error:
            self.append(str(error))
        else:
            raise AssertionError(f"{call} {args} {options} raised nothing")


def errors_of_ranks(errors, rank, comm, stream):
    """Those of a rank, its communicator, windows, streams and launches."""
    made = comm.alloc_window(8, "float32"), comm.alloc_window(8, "uint64"), comm.alloc_window(32, "uint8")
    floats, longs, bytes = made
    good = [comm, floats, floats, 8, 1, gin.Deadline(1)]
    for position, value in [(0, floats), (1, longs), (1, np.zeros(8, np.float32)), (3, -1), (3, 2**70), (5, None)]:
        errors.by(stream.launch, "ring_round", *good[:position], value, *good[position + 1 :])
    errors.by(stream.launch, "ring_round", comm)
    errors.by(stream.launch, "nothing", comm)
    errors.by(stream.launch, "ring_round", *good, grid=(1, 1, 1, 1))
    errors.by(stream.launch, "ring_round", *good, block=2**31)
    errors.by(stream.launch, "alltoall_check", comm, bytes, 1, 0, 0, np.zeros(1, np.float32))
    errors.by(rank.stream, object())
    errors.by(rank.stream, 1)
    errors.by(rank.load, 7)
    errors.by(rank.load, "/nowhere.ptx")
    errors.by(rank.load, ".version 8.0")
    for options in [
        {"backend": "x"}, {"network": "x"}, {"routes": "x"}, {"progress": "x"}, {"backend": "proxy", "nic": "x"},
        {"backend": "gdaki", "network": "verbs"}, {"backend": "gdaki"}, {"contexts": 2**20}, {"queue_depth": 3}, {"lsa_size": 7},
    ]:
        errors.by(rank.communicator, **options)
    errors.by(comm.alloc_window, -1, "uint8")
    errors.by(comm.alloc_window, 1, "no type")
    errors.by(comm.alloc_window, 2**62, "uint8")
    errors.by(floats.nbytes_on, 9)
    errors.by(floats.__dlpack__, copy=True)
    errors.by(floats.__dlpack__, dl_device=(2, 0))
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    shifted = np.zeros(9, np.uint8)[1:].view(np.float32)
    for tensor in [
        [1], np.zeros(4, bool), np.zeros(4, np.complex64), np.zeros((4, 4)).T, frozen, shifted, Strange(None), Strange(None, (2, 1)),
        Strange(None, (3, 0)), Strange(None, (9, 1)), Strange(capsule(b"dltensor_versioned", 2)), floats,
    ]:
        errors.by(comm.register, tensor)
    kept = np.zeros(8)
    comm.register(kept)
    errors.by(comm.register, kept[2:4])
    floats.deregister()
    errors.by(floats.__dlpack__)
    errors.by(floats.deregister)
    errors.by(gin.launch, 1, len, device="virtual", nics="x")
    errors.by(gin.launch, 0, len, device="virtual")
    errors.by(gin.launch, 1, len, device="x")
    errors.by(gin.launch, 1, len, device="cuda")
    errors.by(gin.launch, 1, len, device="cuda:77")
    errors.by(gin.Deadline, -1)
    ended = rank.communicator()
    ended_window = ended.alloc_window(1, "uint8")
    ended.destroy()
    errors.by(ended.alloc_window, 1, "uint8")
    errors.by(ended_window.__dlpack__)
    errors.by(ended.stats)
    errors.by(Group, ended, GroupConfig(1, 8, 1))


def errors_of_groups(errors, comm, stream):
    """The exceptions of gincomm.ep."""
    small = dict(tokens=4, element=Element.F32, threads=32, deadline=gin.Deadline(30))
    for config in [
        GroupConfig(0, 8, 1), GroupConfig(1, 63, 1), GroupConfig(1, 8, 33), GroupConfig(1, 8, 1, tokens=0),
        GroupConfig(1, 8, 1, slots=65), GroupConfig(1, 8, 1, max_rows=999), GroupConfig(1, 8, 1, max_rows=1, combine_at_source=True),
        GroupConfig(1, 8, 1, element=Element.F16, combine_f32=True), GroupConfig(1, 8, 1, combine_at_source=True, combine_f32=True),
        GroupConfig(1, 8, 1, sms=0), GroupConfig(1, 8, 1, grid=0), GroupConfig(1, 8, 1, threads=33),
        GroupConfig(1, 8, 1, threads=1024), GroupConfig(1, 8, 1, element=Element.opaque(17)),
        GroupConfig(1, 8, 1, element=Element.opaque(16, 2**20)),
    ]:
        errors.by(Group, comm, config)
    errors.by(GroupConfig(1, 8, 1).footprint, 65)
    group = Group(comm, GroupConfig(1, 8, 1, slots=2, **small))
    other = Group(comm, GroupConfig(1, 16, 1, **small))
    scaled = Group(comm, GroupConfig(1, 8, 1, **small | {"element": Element.opaque(32, 6)}))
    source = Group(comm, GroupConfig(1, 8, 1, combine_at_source=True, **small))
    wide = Group(comm, GroupConfig(1, 8, 1, max_rows=4, **small))
    slot, rows, ids, output = group.slot(0), np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32), np.zeros((4, 8), np.float32)
    good = Tokens(rows, ids)
    errors.by(group.slot, 0)
    errors.by(group.slot, 9)
    plan = other.slot(0).plan(stream, Tokens(np.ones((1, 16), np.float32), ids[:1].copy()))
    shifted = np.zeros(4 * 8 + 4, np.float32)
    shifted = shifted[next(at for at in range(1, 4) if shifted[at:].ctypes.data % 16) :][: 4 * 8].reshape(4, 8)
    again = Strange(lambda: slot.exchange(stream, good))
    for tokens in [
        Tokens(rows.reshape(-1), ids), Tokens(rows[:, :4].copy(), ids), Tokens(rows, ids.astype(bool)), Tokens(rows, ids, -1),
        Tokens(rows, ids, 1.5), Tokens(rows, ids, 9), Tokens(np.ones((9, 8), np.float32), np.zeros((9, 1), np.int32)),
        Tokens(rows, ids, planned=plan), Tokens(rows, ids, scales=np.zeros((4, 0), np.uint8)), Tokens(shifted, ids), Tokens(again, ids),
        Tokens(rows, ids, np.zeros((1, 1), np.int32)), Tokens(np.float32(1), ids), Tokens(Null((4, 8), "float32"), ids),
    ]:
        errors.by(slot.exchange, stream, tokens)
    errors.by(scaled.slot(0).exchange, stream, Tokens(np.ones((4, 32), np.uint8), ids))
    errors.by(lambda: scaled.slot(0).exchange(stream, Tokens(np.ones((4, 32), np.uint8), ids, scales=np.ones((4, 6), np.uint8))).scales("float32"))
    errors.by(wide.slot(0).fuse, stream, good, Combine.reduced(output))
    sent = slot.dispatch(stream, good)
    errors.by(slot.exchange, stream, good)
    errors.by(group.destroy)
    received = sent.receive(stream)
    errors.by(sent.receive, stream)
    errors.by(slot.dispatch, stream, good)
    errors.by(received.offsets)
    errors.by(received.scales)
    errors.by(Permuted, group, Layout.FLAT)
    errors.by(Permuted, group, Layout.FLAT, 0)
    errors.by(Permuted, group, Layout.expert_major_packed(3), 4)
    flat, listed, padded = Permuted(group, Layout.FLAT, 4), Permuted(group, Layout.EXPERT_MAJOR_INDICES, 4), Permuted(group, Layout.EXPERT_MAJOR_PADDED)
    errors.by(listed.rows)
    errors.by(flat.scales)
    errors.by(flat.tokens)
    fixed, numbers = Permuted.without_rows(group, Layout.EXPERT_MAJOR_FIXED), np.zeros(4, np.int32)
    errors.by(listed.with_memory, group, rows=rows)
    errors.by(fixed.with_capacity, 1)
    errors.by(flat.with_memory, group, tokens=numbers)
    errors.by(fixed.with_memory, group, scales=numbers)
    errors.by(fixed.with_memory, group, tokens=numbers)
    errors.by(stream.launch, "scale_received", received.permute(stream, flat), 8, 3.0)
    errors.by(received.permute, stream, Permuted(other, Layout.FLAT, 4))
    errors.by(received.combine, stream, Combine.reduced(output), np.zeros((1, 4, 8), np.float32))
    errors.by(received.combine, stream, Combine.reduced(output), np.zeros((1, 8), np.float32))
    errors.by(received.combine, stream, Combine.plain(output))
    for rows_back in (None, Permuted(other, Layout.FLAT, 4), padded, (listed, rows)):
        errors.by(slot.exchange(stream, good).combine, stream, Combine.reduced(output), rows_back) if rows_back else None
    errors.by(received.release)
    errors.by(stream.launch, "scale_received", received, 8, 3.0)
    by_id = source.slot(0)
    errors.by(by_id.exchange(stream, good).combine, stream, Combine.reduced(output))
    errors.by(by_id.exchange(stream, good).combine, stream, Combine.plain(output))
    errors.by(by_id.exchange(stream, good).combine, stream, Combine.plain(output), flat)
    back = Group(comm, GroupConfig(1, 8, 1, combine_f32=True, **small | {"element": Element.BF16}))
    halves, sums = Tokens(np.ones((4, 8), np.uint16), ids), Combine.reduced(np.zeros((4, 8), np.uint16))
    places = Permuted(back, Layout.FLAT, 4)
    of_back = back.slot(0)
    for rows_back in (None, places):
        errors.by(of_back.exchange(stream, halves).combine, stream, sums, rows_back)
    fused = slot.fuse(stream, good, Combine.reduced(output))
    errors.by(stream.launch, "exchange_scaled", fused.tokens, *list(fused)[1:], 8, 1.0)
    errors.by(stream.launch, "exchange_scaled", fused, *list(fused)[1:], 8, 1.0)
    slot.exchange(stream, good).release()
    errors.by(stream.launch, "exchange_scaled", *fused, 8, 1.0)
    # Reports, which the next call raises, and then the end.
    second = group.slot(1)
    for tokens in [Tokens(rows, ids + 5), Tokens(rows, ids, np.array([9], np.int32)), Tokens(rows, ids, np.array([-1], np.int32))]:
        second.exchange(stream, tokens).release()
        stream.synchronize()
        errors.by(second.exchange, stream, good)
        errors.append(str(group.status()))
    received = second.exchange(stream, good)
    received.permute(stream, Permuted(group, Layout.FLAT, 3))
    received.release()
    stream.synchronize()
    errors.by(group.destroy)
    errors.by(group.status)
    errors.by(slot.exchange, stream, good)


OF_A_PROCESS = """
import os, time
import gincomm as gin

def provoked(call, *args, **options):
    try:
        call(*args, **options)
    except (gin.Error, TypeError, ValueError) as error:
        print("|", error)
    else:
        raise AssertionError(call)

provoked(gin.rank)
provoked(gin.init)
provoked(gin.init, rank=0, ranks=1)
provoked(gin.init, rank=0, ranks=1, id="gin1:nonsense")
provoked(gin.init, timeout=-1)
provoked(gin.init, rank=0, ranks=1, id="gin1:000102030405060708090a0b0c0d0e0f@127.0.0.1:9")
provoked(gin.init, rank=1, ranks=2, id="gin1:000102030405060708090a0b0c0d0e0f@127.0.0.1:9", timeout=0.2)
provoked(gin.unique_id, "nowhere")
rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
provoked(gin.init, rank=0, ranks=1, id="")
comm = rank.communicator(signals=2, counters=1)
if os.fork() == 0:
    provoked(comm.stats)
    os._exit(0)
os.wait()
comm.abort()
provoked(comm.alloc_window, 1, "uint8")
comm.destroy()
rank.close()
provoked(gin.rank)
provoked(rank.barrier)
"""


@pytest.mark.skipif(not SOURCES.is_dir() or not EP_SOURCES.is_dir(), reason="the sources are not there")
def test_every_error_of_the_package_is_a_sentence_without_words_of_rust():
    errors = Provoked()

    def body(rank):
        with rank.communicator() as comm:
            stream = rank.stream()
            errors_of_ranks(errors, rank, comm, stream)
            errors_of_groups(errors, comm, stream)
            waiting = rank.communicator(signals=2, counters=1)
            empty = waiting.alloc_window(0, "float32")
            stream.launch("ring_round", waiting, empty, empty, 0, 2, gin.Deadline.NONE)
            errors.by(stream.synchronize, timeout=0.01)
            errors.by(stream.synchronize, timeout=-1)
            waiting.abort()
            stream.synchronize()
            waiting.destroy()

    gin.launch(1, body, device="virtual")
    others = {}

    def other(rank):
        others[rank.rank] = rank.communicator(signals=1), rank.communicator(signals=1), rank.stream()
        rank.barrier()
        if rank.rank == 0:
            (comm, second, stream), (_, _, of_other) = others[0], others[1]
            errors.by(of_other.launch, "hello_put", comm, comm, comm, gin.Deadline(1))
        mine = [comm.alloc_window(32, "uint8") for comm in others[rank.rank][:2]]
        if rank.rank == 0:
            errors.by(stream.launch, "hello_put", comm, *mine, gin.Deadline(1))
        rank.barrier()
        others.clear()

    gin.launch(2, other, device="virtual")
    printed = run(OF_A_PROCESS, env={"CUDA_VISIBLE_DEVICES": "-1"})
    errors.extend(text.strip() for text in printed.split("| ")[1:])

    words = re.compile(r"Mutex|Some\(|None\)|\{ |\w::\w|0x[0-9a-f]{6,}|gin_device|gin_gpu|Arc<|&str|: Error|Duration")
    for text in errors:
        assert text and len(text) <= 600 and not words.search(text), text
        assert "\n" not in text, text
    missing = [
        (name, text)
        for name, text in [*texts(SOURCES, BEGINS), *((name, in_python(text)) for name, text in texts(EP_SOURCES, EP_BEGINS))]
        if not any(re.search(pattern(text), found) for found in errors)
    ]
    assert not missing
    # Names of Python in the texts exist.
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)", " ".join(errors)):
        assert hasattr(getattr(gin.ep, owner), name), (owner, name)
