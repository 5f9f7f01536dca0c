# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of torch use."""

import os
import subprocess
import sys

import gincomm as gin
import pytest

try:
    import torch
except ImportError as error:
    torch = None
    mark = pytest.mark.skip(f"all tests of torch need torch ({error}); make test-torch installs it")
else:
    mark = []

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.environ.get("GIN_PY_EXAMPLES", os.path.join(HERE, "..", "..", "..", "examples", "python"))

GPUS = len(gin.gpus()) if torch is not None and torch.cuda.is_available() else 0

# The devices of a job, the number of its ranks, and the GPUs that it needs.
JOBS = {
    "virtual": ("virtual", 2, 0),
    "one_rank_on_a_gpu": ("cuda", 1, 1),
    "two_ranks_on_a_gpu": ("cuda:0", 2, 1),
    "two_gpus": ("cuda", 2, 2),
}


@pytest.fixture(params=JOBS)
def job(request):
    device, ranks, gpus = JOBS[request.param]
    if gpus > GPUS:
        pytest.skip(f"it needs {gpus} GPU(s) that gin and torch can use; there are {GPUS}")
    return lambda body: gin.launch(ranks, lambda rank: on_device(rank, body), device=device)


def needs_gpus(gpus):
    if gpus > GPUS:
        pytest.skip(f"it needs {gpus} GPU(s) that gin and torch can use; there are {GPUS}")


def place(rank):
    """Returns torch's device of a rank."""
    kind, number = rank.dlpack_device
    return torch.device("cpu") if kind == 1 else torch.device("cuda", number)


def on_device(rank, body):
    """Runs a rank's function on its GPU and on a stream of torch, which is not the default stream."""
    device = place(rank)
    if device.type == "cpu":
        return body(rank, rank.stream())
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return body(rank, rank.stream(torch.cuda.current_stream()))


def exchange(rank, comm, stream, launch):
    """Launches on all ranks at a time, waits for the work, and raises the fault of any rank.

    Between the barriers no rank allocates memory or uses a kernel of torch for the first time: the driver lets both
    wait for kernels that run, and these may wait for that rank.
    """
    if GPUS > 0:
        torch.cuda.current_stream().synchronize()
    rank.barrier()
    launch()
    stream.synchronize(timeout=60)
    rank.barrier()
    comm.check()


def capture(rank, step):
    """Captures `step(stream)` on a GPU, and returns how to replay it; on a virtual GPU, None.

    One rank after another, because a capture is a matter of the whole process.
    """
    device, graph = place(rank), None
    if device.type == "cuda":
        for turn in range(rank.ranks):
            if turn == rank.rank:
                graph = torch.cuda.CUDAGraph()
                own = torch.cuda.Stream(device)
                with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
                    step(rank.stream(torch.cuda.current_stream()))
            rank.barrier()
    return graph


def torchrun(program, *arguments):
    """Runs a program as two processes of torchrun, and returns what they print."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
