# SPDX-License-Identifier: MIT OR Apache-2.0
"""gin in a job of torch.distributed: its ranks, and memory of NCCL beside NCCL's collectives."""

import ctypes

import pytest
import torch_support
from support import run
from torch_support import GPUS, needs_gpus, torchrun

pytestmark = torch_support.mark


def test_a_process_group_gives_the_rank_of_gin():
    code = """
        import torch.distributed as dist, gincomm as gin
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rank = gin.from_torch(dist.group.WORLD, "cpu")
        print(rank.rank, rank.ranks, gin.from_torch(dist.group.WORLD).rank)
        rank.close()
    """
    assert run(code) == "0 1 0\n"


PROGRAM = """
import ctypes, os
import gincomm as gin, torch, torch.distributed as dist
from gincomm import ep

local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=torch.device("cuda", local))
group = dist.group.WORLD
rank = gin.from_torch(group)
assert (rank.rank, rank.ranks) == (dist.get_rank(), dist.get_world_size())
backend = group._get_backend(torch.device("cuda"))
TOKENS, HIDDEN, EXPERTS = 64, 1024, 4 * rank.ranks

def tensors():
    outbox = torch.full((3 << 20,), rank.rank + 1, dtype=torch.uint8, device="cuda")
    rows = torch.full((TOKENS, HIDDEN), rank.rank + 1.0, dtype=torch.bfloat16, device="cuda")
    return outbox, torch.zeros_like(outbox), rows, torch.zeros_like(rows)

class Memory:
    def __init__(self, tensor):
        self.address, bytes = ctypes.c_void_p(), tensor.nbytes
        result = ctypes.CDLL("libnccl.so.2").ncclMemAlloc(ctypes.byref(self.address), ctypes.c_size_t(bytes))
        assert result == 0, result
        data = (self.address.value, False)
        self.__cuda_array_interface__ = {"shape": (bytes,), "typestr": "|u1", "data": data, "version": 3}

def of_nccl(tensor):
    return torch.as_tensor(Memory(tensor), device="cuda").view(tensor.dtype).view(tensor.shape).copy_(tensor)

try:
    pool = torch.cuda.MemPool(backend.mem_allocator)
except RuntimeError as error:
    # torch has the allocator only on GPUs with multicast.
    print(error, flush=True)
    pool = None
    outbox, inbox, rows, sums = map(of_nccl, tensors())
else:
    with torch.cuda.use_mem_pool(pool):
        outbox, inbox, rows, sums = tensors()
    # NCCL's collectives run in their own way on memory that NCCL has registered.
    backend.register_mem_pool(pool)
stream = torch.cuda.Stream()
queue = rank.stream(stream)
ids = (torch.arange(TOKENS, dtype=torch.int32, device="cuda") % EXPERTS).unsqueeze(1)
left, everyone = (rank.rank - 1) % rank.ranks + 1, sum(range(1, rank.ranks + 1))
with rank.communicator(signals=1) as comm, torch.cuda.stream(stream):
    windows = comm.register(outbox), comm.register(inbox)
    stream.synchronize()
    rank.barrier()
    queue.launch("hello_put", comm, *windows, gin.Deadline(20))
    queue.synchronize(timeout=60)
    comm.check()
    assert (inbox == left).all(), inbox
    with ep.Group(comm, ep.GroupConfig(EXPERTS, HIDDEN, 1, tokens=TOKENS)) as tokens:
        slot = tokens.slot(0)
        for step in range(10):
            dist.all_reduce(inbox if step % 2 else outbox)
            received = slot.exchange(queue, ep.Tokens(rows, ids))
            received.combine(queue, ep.Combine.reduced(sums))
            queue.synchronize(timeout=60)
            assert tokens.status() is None and (sums == rows).all(), (step, sums)
            assert (outbox == everyone * rank.ranks ** (step // 2) % 256).all(), (step, outbox)
            sums.zero_()
        stream.synchronize()
        rank.barrier()
print(f"rank {rank.rank} has put and reduced in memory of NCCL", flush=True)
if pool is not None:
    backend.deregister_mem_pool(pool)
del windows, outbox, inbox, rows, sums, pool
rank.close()
dist.destroy_process_group()
"""


def test_memory_of_nccl_is_a_window_of_all_processes_beside_its_collectives(tmp_path, monkeypatch):
    needs_gpus(1)
    if GPUS == 1:
        # Both processes use the GPU.
        version = ctypes.c_int()
        assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0
        if version.value < 23000:
            pytest.skip(f"two ranks share a GPU with NCCL 2.30 or later; torch has loaded {version.value}")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = torchrun(str(program))
    assert found.count("has put and reduced in memory of NCCL") == 2, found
