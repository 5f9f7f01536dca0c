# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of torch: CPU tensors on virtual GPUs, CUDA tensors on GPUs."""

import gc
import importlib.resources
import os

import gincomm as gin
import pytest
import torch_support
from support import LIMIT, install_kernels, run
from torch_support import EXAMPLES, GPUS, capture, exchange, job, needs_gpus, on_device, place, torch, torchrun

pytestmark = torch_support.mark

def test_windows_are_tensors_of_torch(job):
    def body(rank, stream):
        with rank.communicator(signals=1) as comm:
            mine, inbox = comm.alloc_window(32, torch.uint8), comm.alloc_window(32, torch.uint8)
            own, arrived = torch.from_dlpack(mine), torch.from_dlpack(inbox)
            assert own.device == place(rank) and own.dtype == torch.uint8 and own.shape == (32,)
            own.copy_(torch.arange(32, device=own.device) + rank.rank)
            exchange(rank, comm, stream, lambda: stream.launch("hello_put", comm, mine, inbox, LIMIT))
            return arrived.cpu().tolist()

    found = job(body)
    for rank, values in enumerate(found):
        left = (rank + len(found) - 1) % len(found)
        assert values == [left + i for i in range(32)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "float32"])
def test_elements_have_the_types_of_torch(job, dtype):
    def body(rank, stream):
        with rank.communicator() as comm:
            wanted = getattr(torch, dtype)
            tensor = torch.ones(4, 6, device=place(rank)).to(wanted)
            window = comm.register(tensor)
            assert (window.dtype, window.shape) == (dtype, (4, 6))
            if dtype.startswith("float8") and tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
                return
            same = torch.from_dlpack(window)
            assert same.dtype == wanted and same.data_ptr() == tensor.data_ptr()
            assert (same.float() == 1).all()

    try:
        job(body)
    except BufferError as error:
        if not dtype.startswith("float8"):
            raise
        pytest.skip(f"this torch hands out no tensors of {dtype}: {error}")


def test_tensors_of_torch_are_windows_without_a_copy(job):
    def body(rank, stream):
        device = place(rank)
        data = torch.arange(16 * rank.ranks, dtype=torch.float32, device=device) + rank.rank
        inbox = torch.zeros_like(data)
        comm = rank.communicator(signals=1)
        windows = comm.register(data), comm.register(inbox)
        kernel = rank.kernel("ring_all_reduce")
        exchange(rank, comm, stream, lambda: stream.launch(kernel, comm, *windows, LIMIT))
        comm.destroy()
        expected = rank.ranks * torch.arange(16 * rank.ranks) + sum(range(rank.ranks))
        assert (data.cpu() == expected).all(), data

    job(body)


def test_a_tensor_that_the_program_forgets_lives_in_its_window(job):
    def body(rank, stream):
        device = place(rank)
        comm = rank.communicator(signals=1)
        mine = comm.register(torch.full((1 << 20,), rank.rank + 1, dtype=torch.uint8, device=device))
        inbox = comm.register(torch.zeros(1 << 20, dtype=torch.uint8, device=device))
        gc.collect()
        # The allocator would give the memory to these.
        others = [torch.full((1 << 20,), 99, dtype=torch.uint8, device=device) for _ in range(4)]
        exchange(rank, comm, stream, lambda: stream.launch("hello_put", comm, mine, inbox, LIMIT))
        left = (rank.rank + rank.ranks - 1) % rank.ranks
        assert (torch.from_dlpack(inbox) == left + 1).all() and all((other == 99).all() for other in others)
        rank.barrier()
        mine.deregister()
        comm.destroy()

    job(body)


def test_pointers_are_tensors_of_torch(job):
    def body(rank, stream):
        device, ranks, length = place(rank), rank.ranks, 64
        right = torch.zeros(64, dtype=torch.uint64, device=device)
        with rank.communicator(signals=ranks) as comm:
            outbox, inbox = comm.alloc_window(ranks * length, "uint8"), comm.alloc_window(2 * ranks * length, "uint8")
            with pytest.raises(TypeError, match="a tensor of int32 was given"):
                wrong = torch.zeros(64, dtype=torch.int32, device=device)
                stream.launch("alltoall_check", comm, inbox, length, 0, 5, wrong)

            def launch():
                stream.launch("alltoall_fill", comm, outbox, length, 5)
                stream.launch("alltoall", comm, outbox, inbox, length, 0, 3, LIMIT)
                stream.launch("alltoall_check", comm, inbox, length, 0, 5, right)

            exchange(rank, comm, stream, launch)
        # Units of 16 bytes that arrived.
        assert right.cpu().view(torch.int64).sum() == ranks * length // 16

    job(body)


def test_tensors_that_kernels_cannot_use_are_refused(job):
    def body(rank, stream):
        device = place(rank)
        with rank.communicator() as comm:
            for tensor, kind, text in [
                (torch.zeros(4, 4, device=device).t(), ValueError, "not contiguous"),
                (torch.zeros(4, dtype=torch.complex64, device=device), TypeError, "has elements of complex64; gin takes uint8, int8, "),
                (torch.zeros(4, device=device, requires_grad=True), (BufferError, RuntimeError), "require"),
                (torch.zeros(4, device="meta"), Exception, None),
            ]:
                with pytest.raises(kind, match=text):
                    comm.register(tensor)
            if device.type == "cuda":
                with pytest.raises(ValueError, match=f"is on cpu; .* takes tensors on cuda:{device.index}"):
                    comm.register(torch.zeros(4))
                with pytest.raises(gin.Error, match="default stream of a thread"):
                    rank.stream(2)
                # Pinned memory is reached by the GPU.
                comm.register(torch.zeros(64, pin_memory=True))
            if GPUS > 1 and rank.ranks == 2 and device.type == "cuda":
                other = torch.zeros(4, device=f"cuda:{1 - device.index}")
                with pytest.raises(ValueError, match=f"is on cuda:{1 - device.index}"):
                    comm.register(other)

    job(body)


def test_the_same_exchange_runs_again_and_again(job):
    """On GPUs each rank replays a CUDA graph, in which work of torch stands before and behind the kernel."""

    def body(rank, stream):
        device, ranks, length = place(rank), rank.ranks, 1000
        comm = rank.communicator(signals=1, world_barriers=1)
        kernel = rank.kernel("all_to_all")
        inbox_window, outbox_window = (comm.alloc_window((ranks, 4 * length), "uint8") for _ in range(2))
        inbox, outbox = (torch.from_dlpack(window).view(torch.float32) for window in (inbox_window, outbox_window))
        data, sums = torch.zeros(ranks, length, device=device), torch.zeros(length, device=device)

        def step(stream):
            torch.add(data, float(rank.rank), out=outbox)
            stream.launch(kernel, comm, inbox_window, outbox_window, LIMIT)
            if device.type == "cpu":
                stream.synchronize()
            torch.sum(inbox, 0, out=sums)

        if device.type == "cuda":
            # torch loads its kernels now, and not in the capture.
            torch.sum(torch.add(data, 1.0, out=outbox), 0, out=sums)
            torch.cuda.synchronize()
        graph = capture(rank, step)
        for round in range(5):
            data.copy_((100 * round + 10 * torch.arange(ranks, device=device))[:, None].expand_as(data))
            exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream))
            expected = ranks * (100 * round + 10 * rank.rank) + ranks * (ranks - 1) / 2
            assert (sums == expected).all(), (round, expected, sums)
        # The work of all ranks is done, and the graph is not replayed any more.
        rank.barrier()
        del graph
        comm.destroy()

    job(body)


def test_a_fault_and_an_abort_reach_the_program(job):
    def body(rank, stream):
        comm = rank.communicator(signals=2, counters=1)
        window = comm.alloc_window(0, "float32")
        # Waits for a credit that nobody gives.
        stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline(0.1))
        stream.synchronize(timeout=60)
        with pytest.raises(gin.FaultError) as raised:
            comm.check()
        fault = raised.value
        assert (fault.kind, fault.operation, fault.subject, fault.subject_id) == ("Timeout", "wait_signal", "signal", 1)
        assert (fault.expected, fault.seen, fault.deadline_ns) == (1, 0, 100_000_000)
        rank.barrier()
        comm.destroy()

        comm = rank.communicator(signals=2, counters=1)
        window = comm.alloc_window(0, "float32")
        stream.launch("ring_round", comm, window, window, 0, 2, gin.Deadline.NONE)
        with pytest.raises(TimeoutError):
            stream.synchronize(timeout=0.05)
        rank.barrier()
        if rank.rank == 0:
            comm.abort()
        stream.synchronize(timeout=60)
        with pytest.raises(gin.FaultError, match="communicator was aborted"):
            comm.check()
        rank.barrier()
        comm.destroy()

    job(body)


def ptx(variable):
    """Returns the file with PTX of kernels that GIN_PY_PTX names: one with `hello_put`. GIN_PY_OTHER_PTX names one of
    kernels that are not linked."""
    path = os.environ.get(variable)
    if path is None:
        pytest.skip("no file of PTX is named; scripts/gpu-python.sh names one")
    return path


def puts(rank, stream, module):
    with rank.communicator(signals=1) as comm:
        mine, inbox = comm.register(torch.ones(8, dtype=torch.uint8, device="cuda")), comm.alloc_window(8, "uint8")
        kernel = module.kernel("hello_put")
        exchange(rank, comm, stream, lambda: stream.launch(kernel, comm, mine, inbox, LIMIT))
        assert (torch.from_dlpack(inbox) == 1).all()


def test_kernels_of_an_installed_wheel_run(tmp_path, monkeypatch):
    needs_gpus(1)
    with open(ptx("GIN_PY_PTX"), encoding="utf-8") as file:
        monkeypatch.syspath_prepend(install_kernels(tmp_path, "kernels_of_gpus", file.read()))

    def body(rank, stream):
        puts(rank, stream, rank.load(importlib.resources.files("kernels_of_gpus") / "sm_90.ptx"))

    gin.launch(1, lambda rank: on_device(rank, body), device="cuda:0")


@pytest.mark.parametrize("linked", [True, False])
def test_kernels_of_ptx_run_by_name(linked):
    needs_gpus(1)
    path = ptx("GIN_PY_PTX" if linked else "GIN_PY_OTHER_PTX")

    def body(rank, stream):
        module = rank.load(path)
        if not linked:
            spin = module.kernel("hardware_spin")
            assert [bytes for _, _, bytes in spin.parameters] == [8, 8, 8]
            stop, started = (torch.full((1,), value, dtype=torch.int64, device="cuda") for value in (1, 0))
            torch.cuda.synchronize()
            with pytest.raises(OverflowError):
                stream.launch(spin, stop, started, 1 << 64, block=32)
            stream.launch(spin, stop, started, 1_000_000, block=32)
            stream.synchronize(timeout=60)
            assert started.item() == 1
            return
        with open(path, encoding="utf-8") as file:
            assert "hello_put" in module.names and rank.load(file.read()).names == module.names
        puts(rank, stream, module)

    gin.launch(1, lambda rank: on_device(rank, body), device="cuda:0")


def test_torchrun_starts_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import gincomm as gin, torch
rank = gin.init(device="virtual")
with rank.communicator(signals=1) as comm:
    mine, inbox = comm.alloc_window(8, torch.uint8), comm.alloc_window(8, torch.uint8)
    torch.from_dlpack(mine).fill_(rank.rank + 1)
    stream = rank.stream()
    stream.launch("hello_put", comm, mine, inbox, gin.Deadline(20))
    stream.synchronize()
    comm.check()
    print(f"rank {rank.rank} has {torch.from_dlpack(inbox)[7]}", flush=True)
""")
    found = torchrun(str(program))
    # The lines of two processes may be mixed at their ends.
    assert "rank 0 has 2" in found and "rank 1 has 1" in found, found


def test_processes_of_torchrun_exchange_tensors_inside_a_graph():
    needs_gpus(2)
    found = torchrun(os.path.join(EXAMPLES, "all_to_all.py"))
    assert found.count("rounds of") == 2, found


ALLOCATED = """
import os
import gincomm as gin, torch
local = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local)
how = {} if "RANK" in os.environ else {"rank": 0, "ranks": 1, "id": gin.unique_id("127.0.0.1")}
rank = gin.init(device=f"cuda:{local}", **how)
allocator = torch.cuda.memory.CUDAPluggableAllocator(gin._gin.__file__, "gin_torch_alloc", "gin_torch_free")
pool = torch.cuda.MemPool(allocator.allocator())
with torch.cuda.use_mem_pool(pool):
    outbox = torch.full((3 << 20,), rank.rank + 1, dtype=torch.uint8, device="cuda")
    inbox = torch.zeros_like(outbox)
    small, other = (torch.full((32,), value, dtype=torch.uint8, device="cuda") for value in (7, 0))
with rank.communicator(signals=1) as comm:
    windows = comm.register(outbox), comm.register(inbox)
    near = comm.register(small), comm.register(other)
    stream = rank.stream(torch.cuda.Stream())
    for pair in (windows, near):
        torch.cuda.synchronize()
        rank.barrier()
        stream.launch("hello_put", comm, *pair, gin.Deadline(20))
        stream.synchronize(timeout=40)
        comm.check()
        rank.barrier()
    left = (rank.rank + rank.ranks - 1) % rank.ranks + 1
    assert (inbox == left).all() and (other == 7).all(), (inbox, other)
del windows, near, outbox, inbox, small, other, pool
print(f"rank {rank.rank} has what torch allocated", flush=True)
rank.close()
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_memory_that_torch_allocates_through_gin_is_a_window_of_all_processes(gpus, tmp_path):
    needs_gpus(gpus)
    program = tmp_path / "program.py"
    program.write_text(ALLOCATED)
    found = torchrun(str(program)) if gpus == 2 else run(ALLOCATED, timeout=240)
    assert found.count("has what torch allocated") == gpus, found
