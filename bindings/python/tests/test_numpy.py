# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels, windows and tensors on virtual GPUs, with NumPy."""

import ctypes
import gc
import importlib.resources
import os
import signal
import threading
import time
import weakref

import gincomm as gin
import numpy as np
import pytest
from support import LIMIT, install_kernels


def virtual(ranks, body):
    return gin.launch(ranks, body, device="virtual")


def start_wait(stream, comm, deadline):
    """Launches a kernel that waits for a credit which nobody gives. The communicator has two signals and a counter."""
    window = comm.alloc_window(0, "float32")
    stream.launch("ring_round", comm, window, window, 0, 2, deadline)


@pytest.mark.parametrize("routes", ["automatic", "network"])
def test_every_rank_puts_a_text_into_its_neighbours_memory(routes):
    def body(rank):
        with rank.communicator(signals=1, routes=routes) as comm:
            mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(32, np.uint8)
            text = f"hello from rank {rank.rank}".encode()
            np.from_dlpack(mine)[: len(text)] = np.frombuffer(text, np.uint8)
            stream = rank.stream()
            stream.launch("hello_put", comm, mine, inbox, LIMIT)
            stream.synchronize()
            comm.check()
            rank.barrier()
            return bytes(np.from_dlpack(inbox)).rstrip(b"\0").decode(), comm.stats()[0]["accepted"]

    texts = virtual(3, body)
    assert [text for text, _ in texts] == ["hello from rank 2", "hello from rank 0", "hello from rank 1"]
    assert all((accepted > 0) == (routes == "network") for _, accepted in texts)


def test_the_program_carries_out_requests_by_progress_and_in_waits():
    def body(rank):
        with pytest.raises(ValueError, match='"threads" or "manual", not "none"'):
            rank.communicator(progress="none")
        with rank.communicator(signals=2, counters=1, routes="network", progress="manual") as comm:
            recv, send = comm.alloc_window(8, "float32"), comm.alloc_window(8, "float32")
            np.from_dlpack(send)[:] = rank.rank + 1
            stream = rank.stream()
            stream.launch("ring_round", comm, recv, send, 8, 1, LIMIT)
            time.sleep(0.1)
            assert not stream.is_idle() and comm.stats()[0]["accepted"] == 0
            worked = 0
            while not stream.is_idle():
                worked += comm.progress()
            assert worked > 0 and (np.from_dlpack(send) == 3).all()
            stream.launch("ring_round", comm, recv, send, 8, 2, LIMIT)
            stream.synchronize()
            comm.check()
            return np.from_dlpack(send).tolist()

    assert virtual(2, body) == [[6.0] * 8] * 2


def test_kernels_drive_software_nics():
    def body(rank):
        for backend, expected in ((None, "Gdaki"), ("gdaki", "Gdaki"), ("proxy", "Proxy")):
            with rank.communicator(signals=1, routes="network", backend=backend) as comm:
                assert comm.backend == expected
                mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(32, "uint8")
                np.from_dlpack(mine)[:] = 100 * rank.rank + np.arange(32)
                stream = rank.stream()
                stream.launch("hello_put", comm, mine, inbox, LIMIT)
                stream.synchronize()
                comm.check()
                assert (np.from_dlpack(inbox) == 100 * ((rank.rank + 1) % 2) + np.arange(32)).all()
                rank.barrier()
                assert comm.stats()[0]["accepted"] > 0

    gin.launch(2, body, device="virtual", nics="soft")


def test_back_ends_and_networks_that_do_not_fit_are_refused():
    def body(rank):
        for options, kind, text in [
            ({"backend": "nic"}, ValueError, 'back ends are "auto", "proxy" and "gdaki", not "nic"'),
            ({"network": "tcp"}, ValueError, 'networks are "auto", "peer", "verbs" and "fabric", not "tcp"'),
            ({"network": "verbs", "backend": "gdaki"}, ValueError, "kernels drive NICs themselves"),
            ({"nic": "mlx5_0", "backend": "proxy"}, ValueError, '`nic` names the NIC that kernels drive'),
            ({"nic": "no_such_nic", "backend": "gdaki"}, gin.Error, "NIC no_such_nic: "),
        ]:
            with pytest.raises(kind, match=text):
                rank.communicator(**options)
        if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
            with pytest.raises(gin.Error, match='network "verbs": .*RDMA'):
                rank.communicator(network="verbs")
            with pytest.raises(gin.Error, match="(?i)gdaki"):
                rank.communicator(backend="gdaki")
        rank.communicator(network="peer", backend="proxy").destroy()

    virtual(1, body)
    with pytest.raises(ValueError, match='nics is "soft", or left out, not "mlx5"'):
        gin.launch(1, print, device="virtual", nics="mlx5")


def test_tensors_of_the_program_are_windows_without_a_copy():
    def body(rank):
        data = np.arange(8 * rank.ranks, dtype=np.float32) + rank.rank
        inbox = np.zeros_like(data)
        comm = rank.communicator(signals=1)
        windows = comm.register(data, name="data"), comm.register(inbox)
        assert (windows[0].shape, windows[0].dtype, windows[0].nbytes) == (data.shape, "float32", data.nbytes)
        assert (windows[0].name, windows[1].name, windows[0].nbytes_on(1)) == ("data", None, data.nbytes)
        stream = rank.stream()
        stream.launch(rank.kernel("ring_all_reduce"), comm, *windows, LIMIT)
        stream.synchronize()
        comm.check()
        comm.destroy()
        return data

    sums = virtual(2, body)
    expected = 2 * np.arange(16, dtype=np.float32) + 1
    assert all((found == expected).all() for found in sums)


def test_the_same_launch_exchanges_blocks_again_and_again():
    def body(rank):
        comm = rank.communicator(signals=1, world_barriers=1)
        outbox, inbox = (comm.alloc_window((rank.ranks, 5), "int64") for _ in range(2))
        # The kernel moves bytes: windows of bytes over the same memory, on a communicator of their own.
        moves = rank.communicator(signals=1, world_barriers=1)
        out, into = np.from_dlpack(outbox), np.from_dlpack(inbox)
        to, of = moves.register(out.view(np.uint8)), moves.register(into.view(np.uint8))
        stream = rank.stream()
        for round in range(5):
            out[:] = 100 * round + 10 * rank.rank + np.arange(rank.ranks)[:, None]
            stream.launch("all_to_all", moves, of, to, LIMIT)
            stream.synchronize()
            moves.check()
            expected = 100 * round + 10 * np.arange(rank.ranks)[:, None] + rank.rank
            assert (into == expected).all(), (round, into)
        moves.destroy()
        comm.destroy()

    virtual(3, body)


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]
)
def test_a_window_is_a_tensor_of_its_shape_and_type(dtype):
    def body(rank):
        with rank.communicator() as comm:
            window = comm.alloc_window((2, 3), np.dtype(dtype))
            array = np.from_dlpack(window)
            assert (array.shape, array.dtype.name, array.flags.writeable) == ((2, 3), dtype, True)
            array[1, 2] = 7
            assert np.from_dlpack(window)[1, 2] == 7 and array.sum() == 7
            assert window.__dlpack_device__() == array.__dlpack_device__() == rank.dlpack_device
            assert comm.alloc_window((), dtype).shape == ()
            assert np.from_dlpack(comm.alloc_window(0, dtype)).shape == (0,)
            # Capsules of before DLPack 1, and capsules that nobody takes.
            window.__dlpack__()
            window.__dlpack__(max_version=(1, 0))

    virtual(1, body)


def test_handles_are_addresses_of_what_functions_of_triton_read():
    def body(rank):
        comm = rank.communicator()
        windows = [comm.alloc_window(length, "uint8") for length in (100, 200)]
        abi, backend, own, ranks = (ctypes.c_uint32 * 4).from_address(comm.handle)
        assert abi > 0 and (own, ranks) == (rank.rank, rank.ranks)
        for window, length in zip(windows, (100, 200)):
            active, flags = (ctypes.c_uint32 * 2).from_address(window.handle)
            base, bytes = (ctypes.c_uint64 * 2).from_address(window.handle + 8)
            array = np.from_dlpack(window)
            assert (active, flags, base, bytes) == (1, 0, array.__array_interface__["data"][0], length)
        windows[0].deregister()
        with pytest.raises(gin.StateError, match="window 0 cannot be used: it is deregistered"):
            windows[0].handle
        comm.destroy()
        with pytest.raises(gin.Error, match="destroyed"):
            comm.handle

    virtual(2, body)


def test_a_tensor_keeps_the_memory_of_a_window_that_is_gone():
    def body(rank):
        comm = rank.communicator()
        window = comm.alloc_window(1000, "uint64")
        array = np.from_dlpack(window)
        array[:] = 5
        window.deregister()
        for call in (window.deregister, window.__dlpack__, lambda: np.from_dlpack(window)):
            with pytest.raises(gin.StateError, match="window 0 cannot be used: it is deregistered"):
                call()
        comm.destroy()
        del window, comm
        return array

    array = virtual(1, body)[0]
    gc.collect()
    array += 1
    assert (array == 6).all()


def test_a_window_keeps_the_memory_of_a_tensor_until_it_is_deregistered():
    def body(rank):
        data = np.zeros(1 << 16, np.uint8)
        gone = weakref.ref(data)
        comm = rank.communicator()
        window = comm.register(data)
        del data
        gc.collect()
        assert gone() is not None
        window.deregister()
        del window
        # The windows of the other ranks of this process keep the memory, too.
        rank.barrier()
        gc.collect()
        assert gone() is None
        comm.destroy()

    virtual(2, body)


def test_a_communicator_that_is_dropped_with_its_windows_lets_go_of_tensors():
    def body(rank):
        data = np.zeros(64, np.uint8)
        gone = weakref.ref(data)
        comm = rank.communicator()
        window = comm.register(data)
        rank.barrier()
        del data, window, comm
        gc.collect()
        return gone

    refs = virtual(2, body)
    # The proxies of all ranks have ended, and with them the last users of the memory.
    assert [ref() for ref in refs] == [None, None]


def test_pointers_are_tensors_of_the_right_type():
    def body(rank):
        ranks, length, rounds = rank.ranks, 64, 3
        right = np.zeros(64, np.uint64)
        with rank.communicator(signals=ranks) as comm:
            outbox, inbox = comm.alloc_window(ranks * length, "uint8"), comm.alloc_window(2 * ranks * length, "uint8")
            stream = rank.stream()
            stream.launch("alltoall_fill", comm, outbox, length, 5)
            stream.launch("alltoall", comm, outbox, inbox, length, 0, rounds, LIMIT)
            launch = lambda right: stream.launch("alltoall_check", comm, inbox, length, 0, 5, right)
            for wrong, kind, text in [
                (right.astype(np.float32), TypeError, r"`right: \*mut u64`: a tensor of float32 was given"),
                (right[::2], ValueError, r"`right: .*is not contiguous \(shape \[32\], strides \[2\]\)"),
                (7, TypeError, "`right: .*: a `int` was given; pass .* a tensor for a pointer"),
                (None, TypeError, "a `NoneType` was given"),
            ]:
                with pytest.raises(kind, match=text):
                    launch(wrong)
            launch(right)
            stream.synchronize()
            comm.check()
        # Units of 16 bytes that arrived.
        return int(right.sum()) == ranks * length // 16

    assert virtual(2, body) == [True, True]


def test_a_stream_that_is_never_idle_lets_tensors_go_whose_kernels_have_ended():
    def body(rank):
        waiting = rank.communicator(signals=2, counters=1)
        with rank.communicator() as comm:
            inbox, stream = comm.alloc_window(128, "uint8"), rank.stream()
            gone = []

            def launch():
                right = np.zeros(64, np.uint64)
                gone.append(weakref.ref(right))
                stream.launch("alltoall_check", comm, inbox, 64, 0, 0, right)

            for _ in range(40):
                launch()
            start_wait(stream, waiting, gin.Deadline.NONE)
            end = time.monotonic() + 20
            while any(ref() is not None for ref in gone[:20]):
                assert time.monotonic() < end
                time.sleep(0.01)
                launch()
            assert not stream.is_idle() and gone[-1]() is not None
            waiting.abort()
            stream.synchronize()
            gc.collect()
            assert all(ref() is None for ref in gone)
        waiting.destroy()

    virtual(1, body)


def test_arguments_are_checked_by_number_type_and_value():
    def body(rank):
        with rank.communicator(signals=2, counters=1) as comm:
            floats, longs = comm.alloc_window(8, "float32"), comm.alloc_window(8, "uint64")
            stream = rank.stream()
            good = [comm, floats, floats, 8, 1, LIMIT]
            for position, value, kind, text in [
                (0, floats, TypeError, "parameter 0 of kernel `ring_round`"),
                (1, longs, TypeError, r"`recv: Window<f32>`: a window of uint64 was given"),
                (1, np.zeros(8, np.float32), TypeError, "`recv: Window<f32>`.*a tensor of float32 was given"),
                (3, -1, OverflowError, "`len: usize`: -1 of type `int` does not fit"),
                (3, 1.5, TypeError, "`len: usize`: 1.5 of type `float` does not fit"),
                (3, "8", TypeError, "`len: usize`: '8' of type `str` does not fit"),
                (4, LIMIT, TypeError, "`round: u64`: a `gincomm.Deadline` was given"),
                (5, 1.0, TypeError, "`deadline: Deadline`: a `float` was given; .*gincomm.Deadline for `Deadline`"),
            ]:
                with pytest.raises(kind, match=text):
                    stream.launch("ring_round", *[value if at == position else old for at, old in enumerate(good)])
            with pytest.raises(TypeError, match="`ring_round` takes 6 parameters .*comm, recv.*; 5 were given"):
                stream.launch("ring_round", *good[:-1])
            with pytest.raises(gin.Error, match="no kernel is named `ring_ruond`; there is `ring_round`"):
                stream.launch("ring_ruond", *good)
            with pytest.raises(gin.Error, match="2 kernels are named `halo`: gin_examples_kernels::halo, gin_kernels"):
                rank.kernel("halo")
            assert rank.kernel("gin_kernels::halo").parameters[2][:2] == ("rows", "usize")
            with pytest.raises(gin.Error, match="a block size of 2048 is past the limit of 1024"):
                stream.launch("ring_round", *good, block=2048)
            with pytest.raises(gin.Error, match="cooperative launch needs all its 1000 blocks resident"):
                stream.launch("ring_round", *good, grid=1000)
            with pytest.raises(TypeError, match="an extent has 1 to 3 directions, not 4"):
                stream.launch("ring_round", *good, grid=(1, 1, 1, 1))
            # NumPy's numbers are numbers.
            stream.launch("ring_round", comm, floats, floats, np.int64(0), np.uint8(1), LIMIT, grid=(1,), block=[32, 1])
            stream.synchronize()
            comm.check()

    virtual(1, body)


def test_tensors_that_cannot_be_windows_are_refused():
    def body(rank):
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        data = np.zeros(8, np.uint32)
        with rank.communicator() as comm:
            for value, kind, text in [
                (np.zeros((4, 4))[:, 1], ValueError, "the tensor to register is not contiguous"),
                (np.zeros((4, 4)).T, ValueError, "not contiguous"),
                (np.zeros(4, np.complex64), TypeError, "has elements of .*; gin takes uint8, int8, "),
                (np.zeros(4, bool), TypeError, "has elements of .*; gin takes uint8, int8, "),
                ([1, 2, 3], TypeError, "is a `list`, which has no `__dlpack__`"),
                (frozen, (ValueError, BufferError), "read-?only"),
            ]:
                with pytest.raises(kind, match=text):
                    comm.register(value)
            comm.register(data)
            with pytest.raises(gin.Error, match="already registered, in window 0"):
                comm.register(data[2:4])
            with pytest.raises(TypeError, match="`float31` is no type of elements: there are uint8"):
                comm.alloc_window(1, "float31")
            for shape in (-1, (2, -1), (1 << 40, 1 << 40)):
                with pytest.raises(ValueError, match="a window cannot have the shape"):
                    comm.alloc_window(shape, "uint8")
            with pytest.raises(gin.Error, match="bytes"):
                comm.alloc_window(1 << 46, "uint8")
            with pytest.raises(BufferError, match="memory that kernels use"):
                comm.alloc_window(1, "uint8").__dlpack__(copy=True)

    virtual(1, body)


class OnGpu:
    """A tensor that says that it is on a GPU."""

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, **_):
        raise AssertionError("nobody may take it")


class Strange:
    """A tensor whose capsule is what it was given."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return self.capsule


def test_tensors_of_another_device_and_broken_ones_are_refused():
    def body(rank):
        with rank.communicator() as comm:
            with pytest.raises(ValueError, match="is on cuda:1; the rank's kernels run on virtual GPU 0, .* on cpu"):
                comm.register(OnGpu())
            capsule = np.zeros(4).__dlpack__()
            comm.register(Strange(capsule))
            for broken in (capsule, None, 7, b"text"):
                with pytest.raises(BufferError, match="has returned no DLPack capsule, or one that was used"):
                    comm.register(Strange(broken))

    virtual(1, body)


def test_a_tensor_of_a_window_waits_for_the_kernels_with_this_window_and_for_no_others():
    def body(rank):
        with rank.communicator(signals=1) as comm, rank.communicator(signals=2, counters=1) as waiting:
            mine, inbox, other = (comm.alloc_window(32, "uint8") for _ in range(3))
            stream, second = rank.stream(), rank.stream()
            # A kernel that waits without an end, and has none of these windows.
            start_wait(second, waiting, gin.Deadline.NONE)
            np.from_dlpack(mine)[:] = rank.rank + 1
            np.from_dlpack(other)[:] = 7
            rank.barrier()
            if rank.rank == 1:
                time.sleep(0.2)
            stream.launch("hello_put", comm, mine, inbox, LIMIT)
            # The other rank puts late, and the kernel of this one waits for it.
            assert (np.from_dlpack(inbox)[:17] == 2 - rank.rank).all()
            assert not second.is_idle()
            rank.barrier()
            waiting.abort()
            stream.synchronize()
            second.synchronize()

    virtual(2, body)


def test_a_tensor_is_a_window_of_two_communicators():
    def body(rank):
        text = np.full(32, rank.rank + 1, np.uint8)
        inboxes = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
        stream = rank.stream()
        with rank.communicator(signals=1) as one, rank.communicator(signals=1, routes="network") as two:
            # The tensor of the source is in both.
            windows = [(comm, comm.register(text), comm.register(inbox)) for comm, inbox in zip((one, two), inboxes)]
            for (comm, mine, window), inbox in zip(windows, inboxes):
                # The second time the source is a window of this communicator only.
                stream.launch("hello_put", comm, mine, window, LIMIT)
                stream.synchronize()
                comm.check()
                assert (inbox == 2 - rank.rank).all()
                mine.deregister()

    virtual(2, body)


@pytest.mark.parametrize("routes", ["automatic", "network"])
def test_a_window_that_is_collected_while_a_peer_puts_keeps_its_memory(routes):
    def body(rank):
        comm, stream = rank.communicator(signals=1, routes=routes), rank.stream()
        mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(32, "uint8")
        array = np.from_dlpack(inbox)
        np.from_dlpack(mine)[:] = rank.rank + 1
        rank.barrier()
        if rank.rank == 1:
            # It launches nothing, and only the other rank still uses its part.
            del mine, inbox
            gc.collect()
            rank.barrier()
            rank.barrier()
            assert (array == 1).all()
        else:
            rank.barrier()
            stream.launch("hello_put", comm, mine, inbox, gin.Deadline(0.2))
            # The other rank answers nothing, so the wait ends by its deadline.
            stream.synchronize()
            with pytest.raises(gin.FaultError, match="deadline"):
                comm.check()
            rank.barrier()
        comm.destroy()

    virtual(2, body)


def test_windows_and_communicators_of_others_are_refused():
    made = {}

    def body(rank):
        comm, other = rank.communicator(signals=1), rank.communicator(signals=1)
        mine, theirs = comm.alloc_window(8, "uint8"), other.alloc_window(8, "uint8")
        stream = rank.stream()
        with pytest.raises(ValueError, match="`inbox: .*belongs to another communicator than the kernel gets"):
            stream.launch("hello_put", comm, mine, theirs, LIMIT)
        made[rank.rank] = (comm, mine)
        rank.barrier()
        comm_of_other, window_of_other = made[1 - rank.rank]
        with pytest.raises(ValueError, match="belongs to a rank on virtual GPU .*, and the stream to another rank"):
            stream.launch("hello_put", comm_of_other, window_of_other, window_of_other, LIMIT)
        rank.barrier()
        made.clear()
        rank.barrier()
        comm.destroy()
        for call in (
            lambda: stream.launch("hello_put", comm, theirs, theirs, LIMIT),
            lambda: comm.alloc_window(1, "uint8"),
            comm.destroy,
            comm.abort,
        ):
            with pytest.raises(gin.StateError, match="cannot .*the communicator is destroyed"):
                call()
        with pytest.raises(gin.StateError, match="window 0 cannot be used: its communicator is destroyed"):
            stream.launch("hello_put", other, mine, theirs, LIMIT)
        assert comm.state == "destroyed"
        other.destroy()

    virtual(2, body)


def test_a_fault_of_a_kernel_is_an_exception_with_all_fields():
    def body(rank):
        comm = rank.communicator(signals=1)
        assert comm.fault is None
        mine, inbox = comm.alloc_window(32, "uint8"), comm.alloc_window(16 if rank.rank else 32, "uint8", name="inbox")
        stream = rank.stream()
        stream.launch("hello_put", comm, mine, inbox, gin.Deadline(20))
        stream.synchronize()
        with pytest.raises(gin.FaultError) as raised:
            comm.check()
        fault = raised.value
        assert str(comm.fault) in str(fault) and comm.state == "aborted"
        assert (fault.kind, fault.operation, fault.rank) == ("OutOfRange", "put", 0)
        assert (fault.subject, fault.subject_id, fault.offset) == ("window", inbox.id, 0)
        assert (fault.expected, fault.seen, fault.window) == (16, 32, "inbox")
        assert fault.deadline_ns is None and fault.host and "back end" in fault.back_end and fault.cause is None
        for name in ("context", "peer", "peer_host", "place"):
            assert hasattr(fault, name)
        assert isinstance(fault, gin.Error) and isinstance(fault, RuntimeError)
        with pytest.raises(gin.FaultError):
            comm.alloc_window(1, "uint8")
        comm.destroy()

    virtual(2, body)


def test_an_abort_ends_the_waits_of_kernels_on_all_ranks():
    def body(rank):
        comm = rank.communicator(signals=2, counters=1)
        stream = rank.stream()
        # Nobody raises the signal, and the wait has no limit.
        start_wait(stream, comm, gin.Deadline.NONE)
        assert not stream.is_idle()
        with pytest.raises(TimeoutError, match="has not ended after"):
            stream.synchronize(timeout=0.05)
        with pytest.raises(gin.Error, match="cannot destroy: kernels are running"):
            comm.destroy()
        rank.barrier()
        if rank.rank == 1:
            comm.abort()
        stream.synchronize(timeout=20)
        with pytest.raises(gin.FaultError) as raised:
            comm.check()
        assert (raised.value.kind, raised.value.rank) == ("Aborted", 1)
        rank.barrier()
        comm.destroy()

    virtual(2, body)


def test_a_rank_that_raises_ends_the_others_and_its_exception_is_raised():
    def body(rank):
        comm = rank.communicator(signals=2, counters=1)
        stream = rank.stream()
        start_wait(stream, comm, gin.Deadline.NONE)
        if rank.rank == 1:
            raise KeyError("mine")
        stream.synchronize(timeout=20)
        comm.check()

    with pytest.raises(KeyError, match="mine"):
        virtual(3, body)


def test_other_python_threads_run_while_a_rank_waits():
    turns = []

    def body(rank):
        comm = rank.communicator(signals=2, counters=1)
        stream = rank.stream()
        start_wait(stream, comm, gin.Deadline(0.5))
        until = threading.Event()

        def count():
            while not until.is_set():
                turns.append(1)
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        before = len(turns)
        stream.synchronize()
        after = len(turns)
        until.set()
        thread.join()
        comm.destroy()
        return after - before

    assert virtual(1, body)[0] > 10


def test_a_signal_handler_ends_a_wait_and_the_job():
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    def body(rank):
        comm = rank.communicator(signals=2, counters=1)
        stream = rank.stream()
        start_wait(stream, comm, gin.Deadline.NONE)
        stream.synchronize(timeout=30)
        comm.check()

    old = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(Stop):
            virtual(2, body)
        assert time.monotonic() - start < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_streams_of_a_rank_can_wait_for_each_other():
    def body(rank):
        with rank.communicator(signals=2, counters=1) as comm:
            first, second = rank.stream(), rank.stream()
            assert first.handle is None
            start_wait(first, comm, gin.Deadline(1))
            second.wait_for(first)
            assert not second.is_idle()
            second.synchronize()
            assert first.is_idle()
        with pytest.raises(gin.Error, match="virtual GPU 0 cannot use a CUDA stream of the program"):
            rank.stream(12345)
        with pytest.raises(TypeError, match="a `str` is no CUDA stream"):
            rank.stream("mine")
        with pytest.raises(gin.Error, match="cannot run PTX"):
            rank.load(".version 8.6\n.target sm_90\n")
        with pytest.raises(OSError, match="cannot read the kernels in /nowhere"):
            rank.load("/nowhere/kernels.ptx")

    virtual(1, body)


def test_a_wheel_of_kernels_is_read_by_its_resource(tmp_path, monkeypatch):
    """A virtual GPU reads the file, and refuses PTX. test_torch.py runs kernels of PTX on GPUs."""
    monkeypatch.syspath_prepend(install_kernels(tmp_path, "kernels_of_a_wheel", ".version 8.6\n.target sm_90\n"))

    def body(rank):
        folder = importlib.resources.files("kernels_of_a_wheel")
        with pytest.raises(gin.Error, match="cannot run PTX"):
            rank.load(folder / "sm_90.ptx")
        with pytest.raises(OSError, match="cannot read the kernels in .*sm_80.ptx"):
            rank.load(folder / "sm_80.ptx")

    virtual(1, body)


def test_what_a_kernel_uses_lives_until_it_has_ended():
    """Everything is dropped while a kernel runs that uses all of it."""

    def body(rank):
        comm = rank.communicator(signals=rank.ranks)
        windows = comm.register(np.zeros(64, np.uint8)), comm.register(np.zeros(128, np.uint8))
        stream = rank.stream()
        if rank.rank == 0:
            # Rank 1 never launches, so this waits until its communicator ends.
            right = np.zeros(64, np.uint64)
            stream.launch("alltoall", comm, *windows, 16, 0, 4, gin.Deadline.NONE)
            stream.launch("alltoall_check", comm, windows[1], 16, 0, 0, right)
            time.sleep(0.05)
            del right
        del comm, windows, stream
        gc.collect()
        time.sleep(0.1)

    virtual(2, body)


def test_requirements_and_devices_are_checked():
    def body(rank):
        with pytest.raises(gin.Error, match="queue_depth must be a power of two; 100 was asked for"):
            rank.communicator(queue_depth=100)
        with pytest.raises(ValueError, match='routes are "automatic" or "network", not "both"'):
            rank.communicator(routes="both")
        with pytest.raises(TypeError, match="unexpected keyword"):
            rank.communicator(signal=1)
        with rank.communicator(contexts=2, lsa_size=1, windows=1) as comm:
            assert (comm.rank, comm.ranks, comm.state, comm.backend) == (0, 1, "active", "Proxy")
            assert len(comm.stats()) == 2
            comm.alloc_window(1, "uint8")
            with pytest.raises(gin.Error, match="2 windows were asked for; there can be 1 to 1"):
                comm.alloc_window(1, "uint8")

    virtual(1, body)
    with pytest.raises(gin.Error, match="a job has 1 to .* ranks, not 0"):
        virtual(0, body)
    with pytest.raises(ValueError, match='device "tpu": there are "virtual", "cuda"'):
        gin.launch(1, body, device="tpu")


def test_deadlines_are_times():
    assert gin.Deadline(1.5).ns == 1_500_000_000 and gin.Deadline(1.5) == gin.Deadline(1.5)
    assert repr(gin.Deadline(0.002)) == "<gincomm.Deadline: 2 ms>" and gin.Deadline.NONE.ns == 2**64 - 1
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="deadline = .*: pass a number of seconds, 0 to"):
            gin.Deadline(wrong)


def test_with_destroys_a_communicator_and_aborts_it_after_an_exception():
    def body(rank):
        with rank.communicator() as comm:
            pass
        assert comm.state == "destroyed"
        # Rank 0 waits for a kernel that only the abort of rank 1 ends.
        with pytest.raises(KeyError if rank.rank else gin.FaultError):
            with rank.communicator(signals=2, counters=1) as comm:
                stream = rank.stream()
                start_wait(stream, comm, gin.Deadline.NONE)
                if rank.rank:
                    raise KeyError
                stream.synchronize(timeout=20)
                comm.check()
        rank.barrier()

    virtual(2, body)


def test_a_launch_has_one_block_of_64_threads():
    def body(rank):
        with rank.communicator(signals=1) as comm:
            outbox, inbox, stream = comm.alloc_window(4096, "uint8"), comm.alloc_window(8192, "uint8"), rank.stream()
            stream.launch("alltoall_fill", comm, outbox, 4096, 5)
            stream.launch("alltoall", comm, outbox, inbox, 4096, 0, 1, LIMIT)
            # A word for each thread.
            for shape, threads in ({}, 64), ({"block": 32}, 32):
                right = np.zeros(256, np.uint64)
                stream.launch("alltoall_check", comm, inbox, 4096, 0, 5, right, **shape)
                stream.synchronize()
                comm.check()
                assert right[:threads].all() and not right[threads:].any()

    virtual(1, body)


def test_a_second_collective_call_of_a_communicator_is_refused():
    refused = threading.Event()

    def body(rank):
        comm, made, errors = rank.communicator(), [], []
        if rank.rank == 1:
            # One thread of rank 0 waits for this call.
            assert refused.wait(20)
            comm.alloc_window(8, "uint8")
            comm.destroy()
            return

        def call():
            try:
                made.append(comm.alloc_window(8, "uint8"))
            except gin.StateError as error:
                errors.append(str(error))
                refused.set()

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == len(errors) == 1, errors
        comm.destroy()

    virtual(2, body)


def test_an_abort_of_a_rank_ends_collectives_and_waits_of_all():
    def body(rank):
        comm = rank.communicator(signals=2, counters=1)
        stream = rank.stream()
        start_wait(stream, comm, gin.Deadline.NONE)
        if rank.rank == 1:
            rank.abort()
        else:
            with pytest.raises(gin.Error, match="rank 1"):
                rank.barrier()
        stream.synchronize(timeout=20)
        with pytest.raises(gin.FaultError, match="abort"):
            comm.check()

    virtual(2, body)


@pytest.mark.skipif(bool(gin.gpus()), reason="this machine has GPUs")
def test_without_a_gpu_ranks_have_virtual_ones():
    assert gin.launch(2, lambda rank: rank.dlpack_device) == [(1, 0)] * 2


def test_a_wait_for_a_stream_raises_the_error_of_a_kernel_once():
    def body(rank):
        with rank.communicator(signals=2, world_barriers=1) as comm:
            cells, stream = comm.alloc_window(8, "float32"), rank.stream()
            launch = lambda length: stream.launch("gin_examples_kernels::halo", comm, cells, length, 1, LIMIT)
            launch(1000)
            with pytest.raises(gin.Error, match="kernel `halo` failed: .* is past the end of window 0, which has 8 elements"):
                stream.synchronize()
            launch(2)
            stream.synchronize()
            comm.check()

    virtual(1, body)
