# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert parallelism with tensors of torch: CPU tensors on virtual GPUs, CUDA tensors on GPUs."""

import os

import gincomm as gin
import pytest
import torch_support
from gincomm.ep import Permuted, Combine, Element, Group, GroupConfig, Layout, Tokens
from torch_support import EXAMPLES, capture, exchange, job, needs_gpus, place, torch, torchrun

pytestmark = torch_support.mark

HIDDEN, TOPK, ROOM = 64, 2, 16


def config(ranks, **options):
    return GroupConfig(2 * ranks, HIDDEN, TOPK, tokens=ROOM, deadline=gin.Deadline(30), **options)


def batch(rank, round, count):
    """Returns rows and ids. All numbers are small, so that BF16 are exact."""
    random = torch.Generator().manual_seed(1000 * round + rank.rank)
    rows = torch.randint(-8, 9, (count, HIDDEN), generator=random)
    return rows.bfloat16(), torch.randint(-1, 2 * rank.ranks, (count, TOPK), generator=random)


def expected(rows, ids, ranks):
    """Returns the sums, if the experts of rank r multiply by r + 1."""
    named = torch.stack([(ids // 2 == rank).any(1) for rank in range(ranks)], 1)
    return rows * (named * torch.arange(1, ranks + 1)).sum(1, keepdim=True)


def warm(rank):
    """Uses torch's kernels for the first time, before kernels of gin wait for other ranks."""
    values = torch.ones(ROOM, HIDDEN, dtype=torch.bfloat16, device=place(rank))
    values.mul_(rank.rank + 1)
    values.copy_(values + 1)
    torch.zeros(rank.ranks, dtype=torch.int64, device=values.device).copy_(
        torch.ones(rank.ranks, dtype=torch.int64, device=values.device)
    )


def between(rank, stream, is_first=False):
    """Returns a call between a dispatch and operations of torch, and after them. It waits for the rows on CPU tensors, and
    for all ranks where these operations run for the first time: then no kernel of gin waits for another rank."""

    def meet():
        stream.synchronize(timeout=60)
        rank.barrier()

    if is_first:
        return meet
    return stream.synchronize if place(rank).type == "cpu" else lambda: None


@pytest.mark.parametrize("keeps", [True, False])
def test_tensors_of_torch_go_to_experts_and_back(job, keeps):
    def body(rank, stream):
        device = place(rank)
        wait = stream.synchronize if device.type == "cpu" else lambda: None
        with rank.communicator() as comm, Group(comm, config(rank.ranks), keeps_tensors=keeps) as group:
            slot = group.slot(0)
            warm(rank)
            for round in range(4):
                count = (3 * round + 7 * rank.rank + 5) % (ROOM + 1)
                rows, ids = batch(rank, round, count)
                near, near_ids = rows.to(device), ids.to(device)
                sums, counts = torch.full_like(near, 99), torch.zeros(rank.ranks, dtype=torch.int64, device=device)

                def work():
                    received = slot.exchange(stream, Tokens(near, near_ids))
                    wait()
                    arrived = torch.from_dlpack(received.rows())
                    assert (arrived.dtype, arrived.shape) == (torch.bfloat16, (rank.ranks, ROOM, HIDDEN))
                    assert arrived.device == device
                    arrived.mul_(rank.rank + 1)
                    counts.copy_(torch.from_dlpack(received.counts()))
                    received.combine(stream, Combine.reduced(sums))

                exchange(rank, comm, stream, work)
                assert group.status() is None
                assert torch.equal(sums.cpu(), expected(rows, ids, rank.ranks)), round
                named = [int((ids // 2 == other).any(1).sum()) for other in range(rank.ranks)]
                told = [list(map(int, each.split())) for each in rank.all_gather(" ".join(map(str, named)).encode())]
                assert counts.tolist() == [each[rank.rank] for each in told]

    job(body)


def test_a_graph_runs_again_with_other_ids_and_counts(job):
    """On GPUs each rank replays a CUDA graph of dispatch, experts of torch, and combine."""

    def body(rank, stream):
        device = place(rank)
        wait = (lambda stream: stream.synchronize()) if device.type == "cpu" else lambda stream: None
        with rank.communicator() as comm, Group(comm, config(rank.ranks)) as group:
            slot, permuted = group.slot(0), Permuted(group, Layout.FLAT, rank.ranks * ROOM)
            rows = torch.zeros(ROOM, HIDDEN, dtype=torch.bfloat16, device=device)
            ids = torch.zeros(ROOM, TOPK, dtype=torch.int64, device=device)
            count = torch.zeros(1, dtype=torch.int32, device=device)
            sums = torch.zeros_like(rows)
            tensor, total = torch.from_dlpack(permuted.rows()), torch.from_dlpack(permuted.counts())
            assert (tensor.shape, total.shape) == ((rank.ranks * ROOM, HIDDEN), (1,))

            def step(stream, slot):
                received = slot.dispatch(stream, Tokens(rows, ids, count)).receive(stream)
                received.permute(stream, permuted)
                wait(stream)
                tensor.mul_(rank.rank + 1)
                received.combine(stream, Combine.reduced(sums), permuted)

            warm(rank)
            # All kernels are loaded now, and not in the capture.
            exchange(rank, comm, stream, lambda: step(stream, slot))

            def captured(stream):
                with pytest.raises(gin.StateError, match="a plan allocates memory"):
                    slot.plan(stream, Tokens(rows, ids, count))
                step(stream, slot)

            graph = capture(rank, captured)
            for round in range(7):
                number = (5 * round + 3 * rank.rank) % (ROOM + 1)
                new_rows, new_ids = batch(rank, round, ROOM)
                rows.copy_(new_rows)
                ids.copy_(new_ids)
                count.fill_(number)
                sums.fill_(99)
                exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream, slot))
                assert group.status() is None
                found = sums.cpu()
                assert torch.equal(found[:number], expected(new_rows, new_ids, rank.ranks)[:number]), round
                assert (found[number:] == 99).all()
                sent = (expected(torch.ones(number, 1), new_ids[:number], rank.ranks) != 0).sum()
                assert rank.ranks > 1 or total.item() == sent
            rank.barrier()
            del graph

    job(body)


@pytest.mark.parametrize("name", ["scale_received", "exchange_scaled"])
def test_kernels_find_the_rows_of_each_replay(job, name):
    """Without permuted rows. The second kernel contains dispatch and combine."""

    def body(rank, stream):
        device = place(rank)
        with rank.communicator() as comm, Group(comm, config(rank.ranks, element=Element.F32)) as group:
            slot, kernel = group.slot(0), rank.kernel(name)
            rows = torch.zeros(ROOM, HIDDEN, device=device)
            ids = torch.zeros(ROOM, TOPK, dtype=torch.int64, device=device)
            sums = torch.zeros_like(rows)

            def step(stream):
                tokens, combine, own = Tokens(rows, ids), Combine.reduced(sums), (HIDDEN, float(rank.rank + 1))
                if name == "scale_received":
                    received = slot.exchange(stream, tokens)
                    stream.launch(kernel, received, *own, grid=4, cooperative=False)
                    received.combine(stream, combine)
                else:
                    fused = slot.fuse(stream, tokens, combine)
                    stream.launch(kernel, *fused, *own, shared=fused.shared, cooperative=False)

            exchange(rank, comm, stream, lambda: step(stream))
            graph = capture(rank, step)
            for round in range(5):
                new_rows, new_ids = batch(rank, round, ROOM)
                rows.copy_(new_rows)
                ids.copy_(new_ids)
                exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream))
                assert group.status() is None
                assert torch.equal(sums.cpu(), expected(new_rows.float(), new_ids, rank.ranks)), round
            rank.barrier()
            del graph

    job(body)


@pytest.mark.parametrize("shared", [False, True])
def test_operations_of_torch_on_received_rows_are_captured(job, shared):
    """Graphs of different numbers of tokens, and calls between them. Tensors that are made while a graph is captured
    are those of its replays."""

    def body(rank, stream):
        device = place(rank)
        ranks, room = rank.ranks, rank.ranks * ROOM
        options = {"max_rows": room} if shared else {}
        with rank.communicator() as comm, Group(comm, config(ranks, **options)) as group:
            slot = group.slot(0)
            rows = torch.zeros(ROOM, HIDDEN, dtype=torch.bfloat16, device=device)
            ids = torch.zeros(ROOM, TOPK, dtype=torch.int64, device=device)
            weights = torch.zeros(ROOM, TOPK, device=device)
            sums, copies = torch.zeros_like(rows), torch.zeros(room, HIDDEN, dtype=torch.bfloat16, device=device)
            places, named = torch.arange(room, device=device), torch.zeros(ranks, dtype=torch.int64, device=device)

            def received_rows(received):
                """Returns a tensor of all places of rows, and for each place the sum of its weights; 0 if it has none."""
                counts = torch.from_dlpack(received.counts())
                named.copy_(counts)
                arrived = torch.from_dlpack(received.rows()).view(room, HIDDEN)
                experts = torch.from_dlpack(received.experts()).view(room, TOPK)
                chosen = torch.from_dlpack(received.weights()).view(room, TOPK)
                factors = torch.where(experts >= 0, chosen, 0).sum(1, keepdim=True)
                if shared:
                    first = torch.from_dlpack(received.offsets())
                    is_row = ((places[:, None] >= first) & (places[:, None] < first + counts)).any(1)
                else:
                    is_row = places % ROOM < counts[places // ROOM]
                return arrived, torch.where(is_row[:, None], factors, 0)

            def step(stream, count, combines, is_first=False):
                meet = between(rank, stream, is_first)
                received = slot.exchange(stream, Tokens(rows, ids, count, weights=weights))
                meet()
                arrived, factors = received_rows(received)
                if combines:
                    arrived.copy_(torch.where(factors != 0, arrived * (factors * (rank.rank + 1)), 0).bfloat16())
                    meet()
                    received.combine(stream, Combine.reduced(sums[:count]))
                else:
                    copies.copy_(torch.where(factors != 0, arrived * factors, 0).bfloat16())
                    meet()
                    received.release()

            def check(count, combines, new_rows, new_ids, new_weights, round):
                assert group.status() is None
                own = [
                    torch.where((new_ids[:count] // 2 == other) & (new_ids[:count] >= 0), new_weights[:count], 0).sum(1)
                    for other in range(ranks)
                ]
                if combines:
                    factor = sum(weight * (other + 1) for other, weight in enumerate(own))
                    assert torch.equal(sums[:count].cpu(), (new_rows[:count] * factor[:, None]).bfloat16()), round
                    return
                # The numbers of received rows and the sum of their elements, from the sums of all sources.
                sent = [[int((weight > 0).sum()), int((new_rows[:count] * weight[:, None]).sum())] for weight in own]
                told = [list(map(int, each.split())) for each in rank.all_gather(" ".join(map(str, sum(sent, []))).encode())]
                assert named.tolist() == [each[2 * rank.rank] for each in told], round
                assert int(copies.cpu().double().sum()) == sum(each[2 * rank.rank + 1] for each in told), round

            calls = [(ROOM, True), (ROOM // 2, False), (ROOM - 3, True), (ROOM, False)]
            graphs = [None] * len(calls)
            for is_captured in [False, True]:
                if is_captured:
                    graphs = [capture(rank, lambda stream: step(stream, *call)) for call in calls]
                # A capture returns torch's unused memory to the driver.
                for call in calls:
                    exchange(rank, comm, stream, lambda: step(stream, *call, is_first=True))
            random = torch.Generator().manual_seed(9)
            for round in range(1000 if graphs[0] else 200):
                new_rows, new_ids = batch(rank, round, ROOM)
                new_weights = torch.randint(1, 3, (ROOM, TOPK), generator=torch.Generator().manual_seed(round)).float()
                rows.copy_(new_rows)
                ids.copy_(new_ids)
                weights.copy_(new_weights)
                # The same on all ranks. Every eighth call is outside of a graph.
                number, own = int(torch.randint(4, (), generator=random)), int(torch.randint(8, (), generator=random))
                run = graphs[number].replay if graphs[number] and own else lambda: step(stream, *calls[number])
                exchange(rank, comm, stream, run)
                check(*calls[number], new_rows, new_ids, new_weights, round)
            rank.barrier()
            del graphs

    job(body)


def test_scales_of_received_rows_are_read_in_a_graph(job):
    """Rows of FP8 are released; torch has made BF16 of them."""

    def body(rank, stream):
        device, hidden = place(rank), 256
        ranks, room = rank.ranks, rank.ranks * ROOM
        sizes = GroupConfig(2 * ranks, hidden, TOPK, tokens=ROOM, deadline=gin.Deadline(30), element=Element.E4M3_F32)
        with rank.communicator() as comm, Group(comm, sizes) as group:
            slot = group.slot(0)
            rows = torch.zeros(ROOM, hidden, dtype=torch.bfloat16, device=device)
            # Each token has experts on all ranks of its number.
            ids = (2 * (torch.arange(ROOM) % ranks))[:, None].repeat(1, TOPK).to(device)
            found = torch.zeros(room, hidden, dtype=torch.bfloat16, device=device)

            def step(stream, is_first=False):
                meet = between(rank, stream, is_first)
                received = slot.exchange(stream, Tokens(rows, ids))
                meet()
                arrived = torch.from_dlpack(received.rows()).view(room, hidden // 128, 128).float()
                scales = torch.from_dlpack(received.scales()).view(room, hidden // 128, 1)
                found.copy_((arrived * scales).view(room, hidden).bfloat16())
                meet()
                received.release()

            exchange(rank, comm, stream, lambda: step(stream, is_first=True))
            graph = capture(rank, step)
            for round in range(8):
                # Powers of two have exact scales but for the last bits.
                rows.fill_(2.0 ** (rank.rank + round))
                exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream))
                assert group.status() is None
                for source, of_source in enumerate(found.view(ranks, ROOM, hidden).cpu()):
                    number = len(range(rank.rank, ROOM, ranks))
                    assert torch.allclose(of_source[:number].float(), torch.tensor(2.0 ** (source + round)), rtol=0.01), round
            rank.barrier()
            del graph

    job(body)


def test_a_graph_has_many_layers(job):
    """More tensors than those after which a slot marks its stream: one that is captured takes no mark."""
    layers = 40

    def body(rank, stream):
        device = place(rank)
        with rank.communicator() as comm, Group(comm, config(rank.ranks)) as group:
            slot = group.slot(0)
            rows = torch.ones(ROOM, HIDDEN, dtype=torch.bfloat16, device=device)
            # Each token has an expert on one rank.
            ids = (2 * (torch.arange(ROOM) % rank.ranks))[:, None].repeat(1, TOPK).to(device)
            sums = torch.zeros_like(rows)
            warm(rank)

            def step(stream):
                outputs = [torch.zeros_like(rows) for _ in range(layers)]
                before = rows
                for output in outputs:
                    slot.exchange(stream, Tokens(before, ids)).combine(stream, Combine.reduced(output))
                    if device.type == "cpu":
                        stream.synchronize()
                    before = output + 1
                sums.copy_(before)

            exchange(rank, comm, stream, lambda: step(stream))
            graph = capture(rank, step)
            for round in range(3):
                rows.fill_(round)
                sums.fill_(99)
                exchange(rank, comm, stream, graph.replay if graph else lambda: step(stream))
                assert group.status() is None and (sums == round + layers).all(), sums
            rank.barrier()
            del graph

    job(body)


@pytest.mark.parametrize("keeps", [True, False])
def test_tensors_with_gradients_or_without_memory_are_refused_by_name(keeps):
    """`gin.ep` has no gradients, so it takes no tensor that would miss one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body(rank):
        with rank.communicator() as comm, Group(comm, config(1, element=Element.F32), keeps_tensors=keeps) as group:
            stream, slot = rank.stream(), group.slot(0)
            plain = torch.ones(2, HIDDEN), torch.zeros(2, TOPK, dtype=torch.int32), torch.ones(2, TOPK)
            sums = torch.zeros(2, HIDDEN)

            def step(rows, ids, weights, output):
                received = slot.exchange(stream, Tokens(rows, ids, weights=weights))
                received.combine(stream, Combine.reduced(output))
                stream.synchronize()

            for name, i in (("tokens.rows", 0), ("tokens.weights", 2), ("the output", 3)):
                values = [*plain, sums]
                for tracked in (values[i].clone().requires_grad_(), values[i].clone().requires_grad_() * 1):
                    values[i] = tracked
                    with pytest.raises(BufferError, match=f"{name}: .*require.* gradient, use tensor.detach()"):
                        step(*values)
                    values[i] = tracked.detach()
                    step(*values)
            with torch.no_grad():
                # It has no gradient, though it comes from a tensor that has one.
                step(plain[0].clone().requires_grad_() * 1, *plain[1:], sums)
            fake = FakeTensorMode().from_tensor(plain[0])
            with pytest.raises((ValueError, RuntimeError), match="no memory, as fake tensors have|FakeTensor"):
                step(fake, *plain[1:], sums)
            step(*plain, sums)

    gin.launch(1, body, device="virtual")


@pytest.mark.parametrize("gpus", [0, 2])
def test_two_processes_agree_with_all_to_all_single(gpus):
    needs_gpus(gpus)
    found = torchrun(os.path.join(EXAMPLES, "ep_torch.py"), *([] if gpus else ["--cpu"]))
    assert found.count("rounds agree with all_to_all_single") == 2, found
