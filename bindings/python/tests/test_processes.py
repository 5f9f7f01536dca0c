# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks that are processes, the order of calls, and forks."""

import os
import signal
import socket

import gincomm as gin
import pytest
from support import run, start

HELLO = """
import sys
import gincomm as gin, numpy as np
rank = gin.init(device="virtual", {how})
assert gin.rank() is rank
with rank.communicator(signals=1) as comm:
    mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(32, "uint8")
    np.from_dlpack(mine)[:3] = 10 * rank.rank + np.arange(3)
    stream = rank.stream()
    stream.launch("hello_put", comm, mine, inbox, gin.Deadline(20))
    stream.synchronize()
    comm.check()
    gathered = rank.all_gather(bytes([rank.rank]))
    print(rank.rank, rank.ranks, np.from_dlpack(inbox)[:3].tolist(), gathered)
rank.close()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def expected(rank, ranks):
    left = 10 * ((rank + ranks - 1) % ranks)
    return f"{rank} {ranks} [{left}, {left + 1}, {left + 2}] {[bytes([each]) for each in range(ranks)]}\n"


VARIABLES = {
    "torchrun": lambda rank, ranks, port: {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port - 1,
    },
    "Slurm": lambda rank, ranks, port: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": ranks,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_STEP_NODELIST": "here",
        "SLURM_STEP_NUM_TASKS": ranks,
        "SLURM_STEP_TASKS_PER_NODE": ranks,
        "SLURM_JOB_ID": 1,
        "GIN_ADDR": "127.0.0.1",
        "GIN_PORT": port,
    },
    "gin launch": lambda rank, ranks, port: {
        "GIN_RANK": rank,
        "GIN_RANKS": ranks,
        "GIN_LOCAL_RANK": rank,
        "GIN_LOCAL_RANKS": ranks,
        "GIN_ADDR": "127.0.0.1",
        "GIN_PORT": port,
        "GIN_SECRET": "0123456789abcdef" * 2,
    },
}


@pytest.mark.parametrize("launcher", VARIABLES)
def test_the_variables_of_a_launcher_make_a_job(launcher):
    ranks, port = 2, free_port()
    variables = lambda rank: {name: str(value) for name, value in VARIABLES[launcher](rank, ranks, port).items()}
    started = [start(HELLO.format(how=""), env=variables(rank)) for rank in range(ranks)]
    for rank, process in enumerate(started):
        assert process.communicate_within() == expected(rank, ranks)


def by_hand(code, ranks=2):
    """Starts ranks that get the id of rank 0."""
    first = start('import gincomm as gin\nid = gin.unique_id("127.0.0.1")\nprint(id, flush=True)\nrank = 0\n' + code)
    id = first.read_line().strip()
    return [first] + [start(f"id = {id!r}\nrank = {rank}\n" + code) for rank in range(1, ranks)]


def test_an_id_makes_a_job():
    started = by_hand(HELLO.format(how="rank=rank, ranks=3, id=id"), 3)
    for rank, process in enumerate(started):
        assert process.communicate_within() == expected(rank, 3)


def test_a_killed_rank_ends_the_others_with_its_number():
    code = """
import gincomm as gin, os, signal
rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
comm = rank.communicator(signals=2, counters=1)
window = comm.alloc_window(0, "float32")
stream = rank.stream()
rank.barrier()
if rank.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
# Rank 1 never raises the signal, and the wait has no limit.
stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
stream.synchronize(timeout=40)
try:
    comm.check()
except gin.FaultError as fault:
    print(fault.kind, fault.peer, "is lost" in str(fault), fault.cause is not None)
try:
    rank.barrier()
except gin.Error as error:
    print("rank 1" in str(error))
"""
    first, second = by_hand(code)
    assert first.communicate_within() == "PeerLost 1 True True\nTrue\n"
    second.process.communicate()
    assert second.process.returncode == -signal.SIGKILL


def test_tensors_of_a_process_cannot_be_windows_of_others_and_the_error_says_what_can():
    code = """
import gincomm as gin, numpy as np
rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
comm = rank.communicator()
try:
    comm.register(np.zeros(8))
except gin.Error as error:
    print("alloc_window" in str(error), comm.state)
comm.destroy()
"""
    for process in by_hand(code):
        assert process.communicate_within() == "True active\n"


ALLOCATED = """
import ctypes, gc, weakref
import gincomm as gin, numpy as np
library = ctypes.CDLL(gin._gin.__file__)
alloc, free = library.gin_torch_alloc, library.gin_torch_free
alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
print(alloc(64, 0, None))
rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
print(alloc(64, 3, None), alloc(-1, 0, None), alloc(1 << 60, 0, None))
segment = alloc(1 << 16, 0, None)
memory = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 16)).from_address(segment))
assert not memory.any()
# Tensors of one segment, as torch cuts them.
out, into, other = memory[512:544], memory[4096:4128], memory[8192:8200]
kept = weakref.ref(other)
comm = rank.communicator(signals=1)
mine, inbox = comm.register(out), comm.register(into)
comm.register(other)
del other
gc.collect()
# The communicator has the window, and keeps the tensor, although nobody has the object.
assert kept() is not None
out[:] = 10 * rank.rank + np.arange(32)
stream = rank.stream()
stream.launch("hello_put", comm, mine, inbox, gin.Deadline(20))
stream.synchronize()
comm.check()
# The windows have the memory when the allocator has none.
free(segment, 1 << 16, 0, None)
print(np.from_dlpack(inbox)[:3].tolist(), into[31])
inbox.deregister()
comm.destroy()
gc.collect()
assert kept() is None
rank.close()
"""


def test_memory_for_the_allocator_of_torch_can_be_windows_of_several_processes():
    started = by_hand(ALLOCATED)
    for rank, process in enumerate(started):
        out, err = process.process.communicate(timeout=60)
        left = 10 * (1 - rank)
        assert (process.process.returncode, out) == (0, f"None\nNone None None\n[{left}, {left + 1}, {left + 2}] {left + 31}\n"), err
        for reason in ("gincomm.init() makes the rank", "the rank of this process is on device 0", "not negative", "bytes"):
            assert reason in err


def test_a_process_that_forgets_everything_still_ends():
    code = """
import gincomm as gin, numpy as np
rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
comm = rank.communicator(signals=2, counters=1)
window = comm.alloc_window(4, "float32")
array = np.from_dlpack(window)
stream = rank.stream()
stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
rank.barrier()
"""
    for process in by_hand(code):
        process.communicate_within()


@pytest.mark.parametrize("running", [False, True])
def test_tensors_in_windows_that_nobody_ends_do_not_keep_the_interpreter_from_ending(running):
    code = f"""
import sys
import gincomm as gin, numpy as np
rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
comm = rank.communicator(signals=2, counters=1)
window = comm.register(np.zeros(16, np.float32))
stream = rank.stream()
if {running}:
    stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
# The interpreter drops this after all variables.
sys.modules["kept"] = window
print("end")
"""
    assert run(code) == "end\n"


def test_calls_before_and_after_the_job_are_refused():
    code = """
import gincomm as gin

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (gin.Error, ValueError) as error:
        print(type(error).__name__, str(error)[:70])
    else:
        raise AssertionError("it was not refused")

refused(gin.rank)
refused(gin.init)
refused(gin.init, rank=0, ranks=1)
refused(gin.init, rank=0, ranks=1, id="gin1:nonsense")
id = gin.unique_id("127.0.0.1")
refused(gin.init, rank=0, ranks=1, id="gin1:000102030405060708090a0b0c0d0e0f@127.0.0.1:9")
refused(gin.init, rank=1, ranks=2, id="gin1:000102030405060708090a0b0c0d0e0f@127.0.0.1:9", timeout=0.5)
refused(gin.unique_id, "nowhere")
rank = gin.init(rank=0, ranks=1, id=id, device="virtual")
refused(gin.init, rank=0, ranks=1, id=id)
comm = rank.communicator()
rank.close()
rank.close()
refused(gin.rank)
refused(rank.communicator)
refused(rank.barrier)
comm.destroy()
rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
print(rank, gin.rank() is rank)
"""
    lines = run(code, env={"CUDA_VISIBLE_DEVICES": "-1"}).splitlines()
    for line, begin in zip(
        lines,
        [
            "StateError gincomm.init() has not been called in this process",
            "StateError no launcher has started this process: start it by torchrun, srun,",
            "ValueError pass all of rank, ranks and id, or none of them",
            "ValueError the secret of an id is 32 hexadecimal digits",
            "StateError rank 0 is the process in which gincomm.unique_id() made the id, and jo",
            "Error rank 1 cannot reach rank 0 at 127.0.0.1:9",
            "ValueError address = \"nowhere\": ",
            "StateError gincomm.init() was called before: this process is rank 0 of 1; ",
            "StateError the rank of this process is closed",
            "StateError rank 0 is closed",
            "StateError rank 0 is closed",
            "<gincomm.Rank: 0 of 1> True",
        ],
        strict=True,
    ):
        assert line.startswith(begin), (line, begin)


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise KeyError", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_a_process_may_end_under_a_running_kernel(way, status):
    code = f"""
import os, signal, sys, time
import gincomm as gin, numpy as np
from gincomm.ep import Element, Group, GroupConfig, Tokens

rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
comm, stream = rank.communicator(signals=2, counters=1), rank.stream()
group = Group(comm, GroupConfig(1, 8, 1, tokens=4, element=Element.F32))
received = group.slot(0).exchange(stream, Tokens(np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32)))
window = comm.alloc_window(0, "float32")
stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
assert not stream.is_idle()
print("ready", flush=True)
{way}
"""
    process = start(code).process
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("ready\n", status), err
    assert "panicked" not in err and "fatal" not in err.lower()


def test_a_process_is_in_two_jobs_one_after_the_other():
    code = """
import gincomm as gin, numpy as np
from gincomm.ep import Combine, Element, Group, GroupConfig, Tokens

def layer(rank):
    with rank.communicator() as comm:
        config = GroupConfig(rank.ranks, 8, 1, tokens=4, element=Element.F32, deadline=gin.Deadline(30))
        with Group(comm, config) as group:
            stream, output = rank.stream(), np.zeros((3, 8), np.float32)
            ids = np.full((3, 1), (rank.rank + 1) % rank.ranks, np.int32)
            group.slot(0).exchange(stream, Tokens(np.full((3, 8), 7, np.float32), ids)).combine(stream, Combine.reduced(output))
            stream.synchronize()
    rank.close()
    return rank.ranks, float(output.min()), float(output.max())
"""
    first = start(
        code
        + """
print(layer(gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")))
id = gin.unique_id("127.0.0.1")
print(id, flush=True)
print(layer(gin.init(rank=0, ranks=2, id=id, device="virtual")))
print(gin.launch(2, layer, device="virtual"))
"""
    )
    assert first.read_line() == "(1, 7.0, 7.0)\n"
    id = first.read_line().strip()
    second = start(code + f'print(layer(gin.init(rank=1, ranks=2, id="{id}", device="virtual")))')
    assert second.communicate_within() == "(2, 7.0, 7.0)\n"
    assert first.communicate_within() == "(2, 7.0, 7.0)\n[(2, 7.0, 7.0), (2, 7.0, 7.0)]\n"


GROW = """
import os, signal, time
import gincomm as gin, numpy as np

def exchange(rank, mine, inbox, first):
    with rank.communicator(signals=1) as comm:
        out, into = comm.register(mine), comm.register(inbox)
        mine[:3] = first + 10 * rank.rank + np.arange(3)
        stream = rank.stream()
        stream.launch("hello_put", comm, out, into, gin.Deadline(20))
        stream.synchronize()
        comm.check()
    print(rank.rank, rank.ranks, gin.rank() is rank, inbox[:3].tolist(), int(mine[31]), flush=True)

"""

FIRST = GROW + """
rank = gin.init(rank=rank, ranks=3, id=id, device="virtual")
comm, survivor = rank.communicator(signals=2, counters=1), rank.communicator(survive_losses=True)
inbox = np.from_dlpack(comm.alloc_window(32, "uint8"))
mine = np.from_dlpack(comm.alloc_window(32, "uint8"))
mine[31] = 100 + rank.rank
exchange(rank, mine, inbox, 0)
rank.barrier()
if rank.rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
while not rank.lost:
    time.sleep(0.01)
assert (comm.state, survivor.state, survivor.fault) == ("aborted", "active", None)
comm.destroy()
print(rank.lost, rank.id, flush=True)
next = rank.grow([3, *rank.lost])
rank.close()
exchange(next, mine, inbox, 100)
survivor.destroy()
"""

JOINS = GROW + """
rank = gin.init({how}device="virtual", join=True)
mine, inbox = np.from_dlpack(rank.alloc(32, "uint8")), np.from_dlpack(rank.alloc(32, "uint8"))
assert not mine.any()
exchange(rank, mine, inbox, 100)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_processes_join_in_the_place_of_a_killed_rank_and_as_a_new_rank_and_the_others_keep_their_memory(victim):
    def line(rank, ranks, first, kept):
        left = first + 10 * ((rank + ranks - 1) % ranks)
        return f"{rank} {ranks} True [{left}, {left + 1}, {left + 2}] {kept}\n"

    started = by_hand(FIRST.replace("{victim}", str(victim)), 3)
    for rank, process in enumerate(started):
        assert process.read_line() == line(rank, 3, 0, 100 + rank)
    others = [rank for rank in range(3) if rank != victim]
    id = next(started[rank].read_line() for rank in reversed(others)).split()[1]
    # One by hand, one by variables.
    how = f"rank={victim}, ranks=4, id={id!r}, "
    joined = {victim: start(JOINS.replace("{how}", how))}
    variables = {"GIN_RANK": "3", "GIN_RANKS": "4", "GIN_UNIQUE_ID": id}
    joined[3] = start(JOINS.replace("{how}", ""), env=variables)
    for rank, process in joined.items():
        assert process.communicate_within() == line(rank, 4, 100, 0)
    for rank in others:
        said = started[rank].communicate_within().splitlines(keepends=True)
        assert said[-1] == line(rank, 4, 100, 100 + rank)
        assert said[:-1] in ([], [f"[{victim}] {id}\n"]) or said[0].startswith(f"[{victim}] gin1:")
    started[victim].process.communicate()


def test_a_job_that_does_not_grow_goes_on():
    code = """
import gincomm as gin

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (gin.Error, ValueError, OverflowError) as error:
        print(type(error).__name__, str(error)[:60])
    else:
        raise AssertionError("it was not refused")

rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
refused(rank.grow, [2], timeout=0.3)
refused(rank.grow, [3], timeout=0.3)
refused(rank.grow, [rank.rank])
refused(rank.grow, [-1])
refused(rank.grow, [2], timeout=-1)
refused(gin.init, rank=2, ranks=3, id=rank.id, join=True)
print(gin.rank() is rank, rank.lost, rank.all_gather(b"x"))
"""
    expected = [
        "Error rank",
        "Error there is no rank 3 in a job of 3 ranks",
        "Error rank",
        "OverflowError ",
        "ValueError timeout = -1: pass a number of seconds",
        "StateError gincomm.init() was called before",
        "True [] [b'x', b'x']",
    ]
    first, second = by_hand(code)
    for process in (first, second):
        for line, begin in zip(process.communicate_within().splitlines(), expected, strict=True):
            assert line.startswith(begin), (line, begin)
    late = """
import gincomm as gin
gin.unique_id("127.0.0.1")
rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
print(rank.id, flush=True)
input()
"""
    alone = start(late)
    id = alone.read_line().strip()
    code = f"""
import gincomm as gin
try:
    gin.init(rank=1, ranks=2, id={id!r}, device="virtual", timeout=0.5, join=True)
except gin.Error as error:
    print("its ranks must call `grow` with this number" in str(error))
"""
    assert run(code) == "True\n"
    alone.process.communicate("\n")

    def body(rank):
        assert (rank.id, rank.lost) == (None, [])
        with pytest.raises(gin.Error, match="threads of one process"):
            rank.grow([1])

    gin.launch(1, body, device="virtual")


@pytest.mark.parametrize("work", ["while True: pass", "time.sleep(600)"])
def test_an_interrupted_launch_names_the_bodies_that_run_and_a_second_ctrl_c_leaves_them(work):
    code = """
import os, time
import gincomm as gin

def body(rank):
    if rank.rank == 2:
        return
    os.write(1, b"ready\\n")
    WORK

try:
    gin.launch(3, body, device="virtual")
except KeyboardInterrupt:
    print("interrupted")
"""
    started = start(code.replace("WORK", work))
    process = started.process
    assert [started.read_line() for _ in range(2)] == ["ready\n", "ready\n"]
    process.send_signal(signal.SIGINT)
    said = started.read_line(process.stderr)
    assert "waits for the bodies of these ranks, which run code outside of gin: 0, 1; press Ctrl-C again" in said
    process.send_signal(signal.SIGINT)
    assert started.communicate_within() == "interrupted\n"


def test_ranks_of_a_launch_name_the_exception_that_ended_them():
    code = """
import gincomm as gin

found = []

def body(rank):
    comm = rank.communicator()
    try:
        if rank.rank == 1:
            raise ValueError("the cause\\nand more")
        if rank.rank == 0:
            rank.barrier()
        comm.alloc_window(1, "uint8")
    except gin.Error as error:
        found.append((rank.rank, "; the first exception was that of rank 1, ValueError: the cause" in str(error), error.__cause__))
        raise

try:
    gin.launch(3, body, device="virtual")
except ValueError as error:
    print(error.args, [(rank, named, cause is error) for rank, named, cause in sorted(found)])
"""
    assert run(code) == "('the cause\\nand more',) [(0, True, True), (2, True, True)]\n"


def test_a_signal_handler_ends_the_wait_for_other_ranks():
    code = """
import signal, time
import gincomm as gin

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.3)
start = time.monotonic()
try:
    gin.init(rank=0, ranks=2, id=gin.unique_id("127.0.0.1"), device="virtual")
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 20)
"""
    assert run(code) == "interrupted True\n"


def test_a_signal_handler_ends_the_wait_for_a_stream_and_its_kernel_continues():
    code = """
import signal
import gincomm as gin

def stop(*_):
    raise KeyboardInterrupt

rank = gin.init(rank=0, ranks=1, id=gin.unique_id("127.0.0.1"), device="virtual")
comm = rank.communicator(signals=2, counters=1)
window = comm.alloc_window(0, "float32")
stream = rank.stream()
stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    stream.synchronize()
except KeyboardInterrupt:
    print("interrupted", stream.is_idle(), comm.state)
comm.abort()
stream.synchronize()
comm.destroy()
"""
    assert run(code) == "interrupted False active\n"


def test_a_signal_handler_ends_a_collective_call_and_aborts_its_communicator():
    code = """
import signal, time
import gincomm as gin

def stop(*_):
    raise KeyboardInterrupt

rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
comm = rank.communicator()
if rank.rank == 0:
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        comm.alloc_window(8, "uint8")
    except KeyboardInterrupt:
        print("interrupted", comm.state)
else:
    end = time.monotonic() + 40
    while comm.state == "active" and time.monotonic() < end:
        time.sleep(0.01)
    print(comm.fault.kind, comm.fault.rank)
rank.barrier()
comm.destroy()
"""
    first, second = by_hand(code)
    assert first.communicate_within() == "interrupted aborted\n"
    assert second.communicate_within() == "Aborted 0\n"


def test_a_fork_is_refused_and_harms_nobody():
    code = """
import gc, os
import gincomm as gin, numpy as np

def body(rank):
    comm = rank.communicator(signals=1)
    window = comm.alloc_window(4, "uint8")
    tensor = comm.register(np.zeros(8))
    array, stream = np.from_dlpack(window), rank.stream()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [lambda: gin.init(device="virtual"), gin.rank, gin.unique_id, gin.gpus, lambda: gin.launch(1, print),
                 comm.destroy, comm.check, lambda: comm.alloc_window(1, "uint8"), lambda: comm.register(np.zeros(8)),
                 window.deregister, window.__dlpack__, lambda: window.shape, rank.communicator, rank.barrier,
                 rank.close,
                 lambda: stream.launch("hello_put", comm, window, window, gin.Deadline(1)), stream.synchronize]
        refused = 0
        for call in calls:
            try:
                call()
            except gin.StateError as error:
                refused += "is a fork of process" in str(error)
        # What the child has of the parent's objects ends without harm.
        del comm, window, tensor, stream, calls
        array[:] = 1
        del array
        gc.collect()
        os.write(writer, b"%d of 17" % refused)
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 100).decode(), os.waitpid(child, 0)[1])
    stream.launch("hello_put", comm, window, window, gin.Deadline(20))
    stream.synchronize()
    comm.check()
    comm.destroy()
    return "done"

print(gin.launch(1, body, device="virtual"))

# A child that leaves by the interpreter's own end.
pid = os.fork()
if pid == 0:
    raise SystemExit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code) == "17 of 17 0\n['done']\n3\n"


def test_a_fork_before_the_first_use_is_free():
    code = """
import os
import gincomm as gin
if os.fork() == 0:
    print(gin.launch(2, lambda rank: rank.rank, device="virtual"), flush=True)
    os._exit(0)
os.wait()
print(gin.launch(2, lambda rank: rank.rank, device="virtual"))
"""
    assert run(code) == "[0, 1]\n[0, 1]\n"


@pytest.mark.skipif(bool(gin.gpus()), reason="this machine has GPUs")
def test_a_gpu_that_is_not_there_is_an_error():
    for device in ("cuda", "cuda:3"):
        with pytest.raises(gin.Error, match=f'device "{device}": '):
            gin.launch(1, print, device=device)


@pytest.mark.parametrize("name", ["__init__", "ep"])
def test_the_stubs_have_the_names_of_the_module(name):
    import ast

    import gincomm.ep

    module = gin.ep if name == "ep" else gin
    path = os.path.join(os.path.dirname(gin.__file__), f"{name}.pyi")
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    named = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inner = (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AnnAssign)))
            named[node.name] = {each.name if isinstance(each, ast.FunctionDef) else each.target.id for each in inner}
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = None
    assert set(named) == {name for name in module.__all__ if not name.startswith("__")} - {"ep"}
    special = {"__dlpack__", "__dlpack_device__", "__enter__", "__exit__", "__iter__"}
    for name, inner in named.items():
        thing = getattr(module, name)
        if inner is None or issubclass(thing, BaseException):
            continue
        public = {each for each in vars(thing) if not each.startswith("_") or each in special}
        assert inner - {"__init__", "__new__", "__str__"} == public, name


@pytest.mark.parametrize("name", ["__init__", "ep"])
def test_the_stubs_have_the_parameters_and_defaults_of_the_module(name):
    import ast
    import inspect

    import gincomm.ep

    module = gin.ep if name == "ep" else gin
    with open(os.path.join(os.path.dirname(gin.__file__), f"{name}.pyi"), encoding="utf-8") as file:
        tree = ast.parse(file.read())

    def stated(node):
        arguments = node.args
        names = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
        values = [inspect.Parameter.empty if each is None else ast.literal_eval(each) for each in defaults]
        return {name: value for name, value in zip(names, values, strict=True) if name not in ("self", "cls")}

    def found(thing):
        parameters = inspect.signature(thing).parameters.values()
        return {each.name: each.default for each in parameters if each.name != "self" and each.kind != each.VAR_POSITIONAL}

    compared = 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            assert stated(node) == found(getattr(module, node.name)), node.name
            compared += 1
        elif isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            for each in node.body:
                is_plain = isinstance(each, ast.FunctionDef) and "property" not in map(ast.unparse, each.decorator_list)
                if is_plain and (each.name == "__new__" or not each.name.startswith("__")):
                    owner = getattr(module, node.name)
                    thing = owner if each.name == "__new__" else getattr(owner, each.name)
                    assert stated(each) == found(thing), (node.name, each.name)
                    compared += 1
    assert compared > 20


def test_the_help_of_a_group_configuration_has_its_defaults():
    import pydoc

    import gincomm.ep

    text = pydoc.plain(pydoc.render_doc(gin.ep.GroupConfig))
    for part in ("tokens=128", "slots=1", "`Element.BF16`", "`gincomm.Deadline(1)`", "sms: the maximum number of SMs", "at most 512"):
        assert part in text
