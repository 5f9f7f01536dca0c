# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a program may do while torch captures a CUDA graph, and what a replay reports."""

import gincomm as gin
import pytest
import torch_support
from gincomm.ep import Combine, Element, Group, GroupConfig, Tokens
from torch_support import capture, exchange, job, needs_gpus, torch

pytestmark = torch_support.mark

HIDDEN, TOPK, ROOM = 64, 2, 16


def config(ranks):
    return GroupConfig(ranks, HIDDEN, TOPK, tokens=ROOM, element=Element.F32, deadline=gin.Deadline(30))


def tensors(rank):
    """Returns rows, ids of the first expert, and output."""
    device = torch_support.place(rank)
    ids = torch.zeros(ROOM, TOPK, dtype=torch.int32, device=device)
    return torch.ones(ROOM, HIDDEN, device=device), ids, torch.zeros(ROOM, HIDDEN, device=device)


def test_a_replay_with_a_count_past_the_room_is_reported(job):
    """The number of tokens is on the device, so only the kernel sees that it is too large."""

    def body(rank, stream):
        with rank.communicator() as comm, Group(comm, config(rank.ranks)) as group:
            slot, (rows, ids, sums) = group.slot(0), tensors(rank)
            count = torch.full((1,), ROOM, dtype=torch.int32, device=rows.device)

            def step(stream):
                received = slot.exchange(stream, Tokens(rows, ids, count))
                received.combine(stream, Combine.reduced(sums))

            exchange(rank, comm, stream, lambda: step(stream))
            graph = capture(rank, step)
            for number in (3, ROOM + 1 + rank.rank, ROOM):
                count.fill_(number)
                sums.zero_()
                exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream))
                # The first tokens take part.
                assert (sums.sum(1) != 0).sum().item() == min(number, ROOM)
                report = group.status()
                if number <= ROOM:
                    assert report is None
                else:
                    assert (report.code, report.seen, report.limit) == ("TooManyTokens", number, ROOM)
            rank.barrier()
            del graph

    job(body)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_makes_objects_and_refuses_to_wait(mode):
    needs_gpus(1)

    def body(rank):
        torch.cuda.set_device(torch_support.place(rank))
        rows, ids, sums = tensors(rank)
        graph, own = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=own, capture_error_mode=mode):
            stream = rank.stream(torch.cuda.current_stream())
            comm = rank.communicator(signals=1)
            window = comm.alloc_window(1024, "int32")
            group = Group(comm, config(1))
            with pytest.raises(gin.Error, match="wait before the capture, or after a launch of the graph"):
                stream.synchronize()
            with pytest.raises(gin.Error, match="wait before the capture, or after a launch of the graph"):
                stream.synchronize(timeout=1)
            slot = group.slot(0)
            slot.exchange(stream, Tokens(rows, ids)).combine(stream, Combine.reduced(sums))
            rows.add_(1)
        for replays in (1, 2):
            graph.replay()
            own.synchronize()
            torch.cuda.synchronize()
            assert group.status() is None and (sums == replays).all() and (rows == replays + 1).all()
        # The stream and the objects go on without the graph.
        with torch.cuda.stream(own):
            slot.exchange(stream, Tokens(rows, ids)).combine(stream, Combine.reduced(sums))
        stream.synchronize(timeout=60)
        assert (sums == 3).all()
        assert torch.from_dlpack(window).sum().item() == 0
        del graph
        group.destroy()
        comm.destroy()

    gin.launch(1, body, device="cuda")
