# SPDX-License-Identifier: MIT OR Apache-2.0
"""`gincomm.deep_ep` on CPU tensors, compared with references in torch that know the inputs of all ranks."""

import os

import gincomm as gin
import pytest
import torch_support
from gincomm.ep import Element, Group, GroupConfig, Tokens
from torch_support import EXAMPLES, needs_gpus, torch, torchrun

if torch is not None:
    from gincomm import deep_ep

pytestmark = torch_support.mark

HIDDEN, TOPK, ROOM, LOCAL = 512, 3, 12, 2
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def run(ranks, body, **options):
    """Runs `body(buffer, inputs)` on each rank, and destroys the buffer."""

    def each(rank):
        buffer = deep_ep.Buffer(rank, low_latency_mode=True, explicitly_destroy=True, **options)
        body(buffer)
        buffer.destroy()

    gin.launch(ranks, each, device="virtual")


def batch(rank, ranks, round=0):
    """Returns the rows, ids and weights of a rank. Some ids are -1; the ids of a token differ."""
    random = torch.Generator().manual_seed(1000 * round + rank)
    count = (5 * round + 7 * rank + 4) % (ROOM + 1)
    rows = torch.randn(count, HIDDEN, generator=random) * (10.0 ** torch.arange(count).remainder(7).sub(3)[:, None])
    experts = LOCAL * ranks
    ids = torch.rand(count, max(experts, TOPK), generator=random).topk(TOPK).indices
    ids[ids >= experts] = -1
    ids[torch.rand(count, TOPK, generator=random) < 0.2] = -1
    return rows.bfloat16(), ids, torch.rand(count, TOPK, generator=random)


def everyone(ranks, round=0):
    return [batch(rank, ranks, round) for rank in range(ranks)]


def zones(rank, inputs):
    """Returns for each expert of a rank the source, token and row of its tokens, by source and token."""
    return [
        [
            (source, token, rows[token])
            for source, (rows, ids, _) in enumerate(inputs)
            for token in range(len(rows))
            if expert in ids[token]
        ]
        for expert in range(LOCAL * rank, LOCAL * (rank + 1))
    ]


def weighted(inputs, rank, results):
    """Returns the sums of a rank's tokens. `results[expert][token]` is the row of an expert."""
    rows, ids, weights = inputs[rank]
    sums = torch.zeros(len(rows), HIDDEN, dtype=torch.float64)
    for token in range(len(rows)):
        for k, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                sums[token] += weights[token, k].double() * results(expert, rows[token]).double()
    return sums


def near(found, expected):
    """Compares sums of BF16: FP32 in another order, rounded once."""
    largest = expected.abs().amax(1, keepdim=True)
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-16 * largest).all()


def expert_of(expert, row):
    return (row.float() * (expert + 1)).bfloat16()


def check_zones(buffer, inputs, recv, counts, handle):
    """Compares BF16 rows, counts and handle of a low-latency dispatch."""
    source_info, ranges, room, hidden, experts = handle
    assert (room, hidden, experts) == (ROOM, HIDDEN, LOCAL * buffer.group_size)
    assert counts.dtype == torch.int32 and ranges.dtype == torch.int64 and source_info.dtype == torch.int32
    assert recv.shape == (LOCAL, buffer.group_size * ROOM, HIDDEN)
    for i, zone in enumerate(zones(buffer.rank, inputs)):
        assert counts[i] == len(zone)
        assert source_info[i, : len(zone)].tolist() == [token for _, token, _ in zone]
        first = 0
        for source in range(buffer.group_size):
            number = sum(each[0] == source for each in zone)
            assert ranges[i, source] == first << 32 | number
            first += number
        if zone:
            assert torch.equal(recv[i, : len(zone)], torch.stack([row for *_, row in zone]))


@RANKS
@pytest.mark.parametrize("hooked", [False, True])
def test_low_latency_rows_reach_the_zones_of_their_experts_and_return(ranks, hooked):
    def body(buffer):
        for round in range(4):
            inputs = everyone(ranks, round)
            rows, ids, weights = inputs[buffer.rank]
            stats = torch.full((LOCAL,), 10, dtype=torch.int32)
            recv, counts, handle, event, hook = buffer.low_latency_dispatch(
                rows, ids, ROOM, LOCAL * ranks, stats, use_fp8=False, async_finish=not hooked, return_recv_hook=hooked
            )
            hook() if hooked else event.current_stream_wait()
            check_zones(buffer, inputs, recv, counts, handle)
            assert (stats == counts + 10).all()
            results = torch.stack([expert_of(LOCAL * buffer.rank + i, recv[i]) for i in range(LOCAL)])
            expected = weighted(inputs, buffer.rank, expert_of)
            out = torch.full_like(rows, 99)
            found, event, hook = buffer.low_latency_combine(
                results, ids, weights, handle, async_finish=not hooked, return_recv_hook=hooked, out=out
            )
            hook() if hooked else event.current_stream_wait()
            assert found is out
            near(found, expected)
            # A second combine of the handle sends the routing again.
            buffer.get_next_low_latency_combine_buffer(handle).copy_(results)
            again, _, hook = buffer.low_latency_combine(
                torch.zeros_like(results), ids, weights, handle, zero_copy=True, return_recv_hook=hooked
            )
            hook() if hooked else None
            assert torch.equal(again, found)

    run(ranks, body)


def test_two_low_latency_dispatches_are_under_way():
    def body(buffer):
        first, second = everyone(2, 0), everyone(2, 1)
        calls = []
        for inputs in (first, second):
            rows, ids, _ = inputs[buffer.rank]
            calls.append(buffer.low_latency_dispatch(rows, ids, ROOM, 4, use_fp8=False, return_recv_hook=True))
        with pytest.raises(gin.StateError, match="call the hook of the dispatch before the last one first"):
            buffer.low_latency_dispatch(*first[buffer.rank][:2], ROOM, 4, use_fp8=False)
        with pytest.raises(gin.StateError, match="call the hook of the dispatch before the combine"):
            buffer.low_latency_combine(calls[0][0], *first[buffer.rank][1:], calls[0][2])
        for inputs, (recv, counts, handle, _, hook) in zip((first, second), calls):
            hook()
            check_zones(buffer, inputs, recv, counts, handle)
        for inputs, (recv, _, handle, _, _) in zip((first, second), calls):
            found, _, _ = buffer.low_latency_combine(recv, *inputs[buffer.rank][1:], handle)
            near(found, weighted(inputs, buffer.rank, lambda _, row: row))

    run(2, body)


def test_a_rank_may_use_the_hook_where_another_does_not():
    def body(buffer):
        for round in range(4):
            inputs = everyone(2, round)
            rows, ids, weights = inputs[buffer.rank]
            hooked = (buffer.rank + round) % 2 == 1
            recv, counts, handle, _, hook = buffer.low_latency_dispatch(
                rows, ids, ROOM, 4, use_fp8=False, return_recv_hook=hooked
            )
            hook() if hooked else None
            check_zones(buffer, inputs, recv, counts, handle)
            found, _, _ = buffer.low_latency_combine(recv, ids, weights, handle)
            near(found, weighted(inputs, buffer.rank, lambda _, row: row))

    run(2, body)


@pytest.mark.parametrize("fp8", [False, True])
def test_low_latency_calls_leave_all_rows_to_gins_kernels(fp8):
    """torch allocates memory and names parts of it. It adds the counts, one number for each expert."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.overloadpacket._qualified_op_name)
            return function(*args, **(kwargs or {}))

    def body(buffer):
        rows, ids, weights = batch(0, 1)
        stats = torch.zeros(LOCAL, dtype=torch.int32)
        for zero_copy in (False, True):
            with Seen() as first:
                recv, _, handle, _, _ = buffer.low_latency_dispatch(rows, ids, ROOM, LOCAL, stats, use_fp8=fp8)
            results = torch.zeros(LOCAL, ROOM, HIDDEN).bfloat16()
            buffer.get_next_low_latency_combine_buffer(handle)
            with Seen() as second:
                buffer.low_latency_combine(results, ids, weights, handle, zero_copy=zero_copy)
            # On CPU tensors the ids are compared.
            allowed = {"empty", "view", "slice", "transpose", "detach", "is_pinned", "add_", "equal"}
            assert {name.split("::")[1] for name in first.names | second.names} <= allowed

    run(1, body)


def test_rows_are_combined_where_they_are():
    """A combine reads the tensor, or with `zero_copy` the buffer, after the call in the order of the stream."""

    def body(buffer):
        rows, ids, weights = batch(0, 1)
        _, _, handle, _, _ = buffer.low_latency_dispatch(rows, ids, ROOM, LOCAL, use_fp8=False)
        wide = torch.zeros(LOCAL, ROOM, 2 * HIDDEN).bfloat16()
        wide[:, :, 1::2] = 5
        exact = (weights * (ids >= 0)).double().sum(1, keepdim=True).expand(-1, HIDDEN)
        # A tensor that is not contiguous is copied.
        found, _, _ = buffer.low_latency_combine(wide[:, :, 1::2], ids, weights, handle)
        near(found, 5 * exact)
        buffer.get_next_low_latency_combine_buffer(handle).fill_(3)
        found, _, _ = buffer.low_latency_combine(wide[:, :, ::2], ids, weights, handle, zero_copy=True)
        near(found, 3 * exact)

    run(1, body)


@pytest.mark.parametrize("round_scale, ue8m0", [(False, False), (True, True)])
def test_groups_with_room_for_more_rows_store_the_same(round_scale, ue8m0):
    """With room for more than 4096 rows several kernels store what one kernel stores otherwise."""

    def body(buffer):
        inputs = everyone(2)
        rows, ids, weights = inputs[buffer.rank]
        options = dict(round_scale=round_scale, use_ue8m0=ue8m0)
        (recv, scales), counts, handle, *_ = buffer.low_latency_dispatch(rows, ids, ROOM, 4, **options)
        (more, factors), numbers, other, *_ = buffer.low_latency_dispatch(rows, ids, 2049, 4, **options)
        assert torch.equal(counts, numbers) and torch.equal(handle[1], other[1])
        for i, count in enumerate(counts.tolist()):
            assert torch.equal(recv[i, :count].view(torch.uint8), more[i, :count].view(torch.uint8))
            assert torch.equal(scales[i, :count], factors[i, :count])
            assert torch.equal(handle[0][i, :count], other[0][i, :count])
        results = torch.ones(LOCAL, 2 * 2049, HIDDEN).bfloat16()
        found, *_ = buffer.low_latency_combine(results, ids, weights, other)
        near(found, weighted(inputs, buffer.rank, lambda _, row: torch.ones(HIDDEN)))

    run(2, body)


FP8 = {(False, False): "E4M3_F32", (True, False): "E4M3_F32_POWERS", (True, True): "E4M3_UE8M0"}


def quantised(rank, element, rows):
    """Returns FP8 rows and scales as the kernels of gin quantise them."""
    config = GroupConfig(1, HIDDEN, 1, tokens=ROOM, element=getattr(Element, element), deadline=gin.Deadline(30))
    with rank.communicator() as comm, Group(comm, config) as group:
        stream, slot = rank.stream(), group.slot(0)
        ids = torch.zeros(len(rows), 1, dtype=torch.int32)
        received = slot.exchange(stream, Tokens(rows, ids))
        stream.synchronize()
        fp8 = torch.from_dlpack(received.rows("uint8"))[0, : len(rows)].clone()
        scales = torch.from_dlpack(received.scales())[0, : len(rows)].clone()
        received.release()
        return fp8, scales


@pytest.fixture(scope="module")
def fp8_of_gin():
    """Returns the FP8 rows and scales of each rank of the first round, by element, from jobs of one rank."""
    return {
        (ranks, element): [
            gin.launch(1, lambda one: quantised(one, element, rows), device="virtual")[0]
            for rows, *_ in everyone(ranks)
        ]
        for ranks in (1, 2, 4)
        for element in FP8.values()
    }


@RANKS
@pytest.mark.parametrize("round_scale, ue8m0", FP8)
def test_low_latency_fp8_has_the_bits_of_gins_kernels(ranks, round_scale, ue8m0, fp8_of_gin):
    sources = fp8_of_gin[ranks, FP8[round_scale, ue8m0]]

    def body(buffer):
        inputs = everyone(ranks)
        rows, ids, weights = inputs[buffer.rank]
        (recv, scales), counts, handle, *_ = buffer.low_latency_dispatch(
            rows, ids, ROOM, LOCAL * ranks, round_scale=round_scale, use_ue8m0=ue8m0
        )
        columns = HIDDEN // (512 if ue8m0 else 128)
        assert recv.dtype == torch.float8_e4m3fn
        assert (scales.dtype, scales.shape) == (torch.int32 if ue8m0 else torch.float32, (LOCAL, ranks * ROOM, columns))
        assert scales.stride()[1:] == (1, ranks * ROOM), "the last two dimensions are column-major"
        for i, zone in enumerate(zones(buffer.rank, inputs)):
            for n, (source, token, _) in enumerate(zone):
                fp8, factors = sources[source]
                assert torch.equal(recv[i, n].view(torch.uint8), fp8[token])
                found = scales[i, n].clone(memory_format=torch.contiguous_format)
                assert torch.equal(found.view(torch.uint8) if ue8m0 else found, factors[token])
        wide = recv.float()
        if not ue8m0:
            wide = (wide.unflatten(2, (-1, 128)) * scales.unsqueeze(-1)).flatten(2)
        found, *_ = buffer.low_latency_combine(wide.bfloat16(), ids, weights, handle)
        if not ue8m0:
            exact = weighted(inputs, buffer.rank, lambda _, row: row)
            largest = weighted([(r.abs(), i, w) for r, i, w in inputs], buffer.rank, lambda _, row: row).amax(
                1, keepdim=True
            )
            assert ((found.double() - exact).abs() <= largest.clamp(min=1e-3) / 8).all()

    run(ranks, body)


def layout_of(ids, ranks):
    """Returns tokens by rank, ids by expert, and whether a token goes to a rank, by loops."""
    named = torch.zeros(len(ids), ranks, dtype=torch.bool)
    experts = torch.zeros(LOCAL * ranks, dtype=torch.int32)
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if expert >= 0:
                named[token, expert // LOCAL] = True
                experts[expert] += 1
    return named.sum(0).int(), experts, named


def arrivals(rank, inputs):
    """Returns source, token, local ids and weights of the rows that a rank receives, by source and token."""
    found = []
    for source, (_, ids, weights) in enumerate(inputs):
        for token in range(len(ids)):
            local = [
                expert - LOCAL * rank if expert >= 0 and expert // LOCAL == rank else -1
                for expert in ids[token].tolist()
            ]
            if max(local) >= 0:
                kept = [w if expert >= 0 else 0.0 for expert, w in zip(local, weights[token].tolist())]
                found.append((source, token, local, kept))
    return found


def scaled(rows):
    """Returns FP8 rows with scales of the caller, column-major."""
    return rows.clamp(-400, 400).to(torch.float8_e4m3fn), rows.float().unflatten(1, (-1, 128)).amax(2).T.contiguous().T


@RANKS
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("topk", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_normal_rows_reach_their_ranks_and_return(ranks, fp8, topk, overlap):
    def body(buffer):
        for round in range(3):
            inputs = everyone(ranks, round)
            rows, ids, weights = inputs[buffer.rank]
            per_rank, rdma, per_expert, named, _ = buffer.get_dispatch_layout(ids, LOCAL * ranks)
            assert rdma is None
            for found, expected in zip((per_rank, per_expert, named), layout_of(ids, ranks)):
                assert found.dtype == expected.dtype and torch.equal(found, expected)
            routing = dict(num_tokens_per_rank=per_rank, is_token_in_rank=named, num_tokens_per_expert=per_expert)
            options = dict(async_finish=overlap, previous_event=buffer.capture() if overlap else None)
            if topk:
                routing.update(topk_idx=ids, topk_weights=weights)
            x = scaled(rows) if fp8 else rows
            recv, recv_ids, recv_weights, numbers, handle, event = buffer.dispatch(x, **routing, **options)
            event.current_stream_wait() if overlap else None
            expected = arrivals(buffer.rank, inputs)

            def check(recv, extra=0):
                parts = recv if fp8 else (recv,)
                all_parts = [scaled(each) if fp8 else (each,) for each, *_ in inputs]
                for n, part in enumerate(parts):
                    assert len(part) == len(expected) + extra and part.is_contiguous()
                    for row, (source, token, *_) in zip(part, expected):
                        want = all_parts[source][n][token]
                        assert row.dtype == want.dtype and torch.equal(row.float(), want.float())

            check(recv)
            assert handle[3].tolist() == [token for _, token, *_ in expected]
            ends = torch.tensor([sum(each[0] <= source for each in expected) for source in range(ranks)])
            assert torch.equal(handle[0][:, buffer.rank].long(), ends)
            assert numbers == [len(zone) for zone in zones(buffer.rank, inputs)]
            if topk:
                assert recv_ids.dtype == torch.int64
                assert recv_ids.tolist() == [local for *_, local, _ in expected]
                assert recv_weights.tolist() == [kept for *_, kept in expected]
            else:
                assert recv_ids is None and recv_weights is None

            # The worst number of tokens is known to all ranks, so the host waits for nothing.
            worst = ranks * ROOM
            more = buffer.dispatch(x, **routing, **options, num_worst_tokens=worst)
            check(more[0], worst - len(expected))
            assert more[3] == []
            if topk:
                assert torch.equal(more[1][: len(expected)], recv_ids) and (more[1][len(expected) :] == -1).all()
                assert torch.equal(more[2][: len(expected)], recv_weights) and (more[2][len(expected) :] == 0).all()

            # A cached handle, whose rows the combine then returns.
            cached = buffer.dispatch(x, handle=handle, **options)
            check(cached[0])
            assert cached[1:5] == (None, None, None, None)
            sums_of(buffer, inputs, handle, expected, recv_weights, options)
            sums_of(buffer, inputs, handle, expected, recv_weights, options)
            sums_of(buffer, inputs, more[4], expected, more[2], options, worst)

    run(ranks, body)


def sums_of(buffer, inputs, handle, expected, recv_weights, options, room=None):
    """Combines rows that depend on source, token and rank, with weights and two biases."""
    rows, ids, weights = inputs[buffer.rank]
    per_rank = lambda rank, row: (row.float() * (rank + 1)).bfloat16()
    back = torch.zeros(room or len(expected), HIDDEN, dtype=torch.bfloat16)
    for n, (source, token, *_) in enumerate(expected):
        back[n] = per_rank(buffer.rank, inputs[source][0][token])
    biases = rows * 3, rows * -5
    sums, total, event = buffer.combine(back, handle, recv_weights, biases, **options)
    event.current_stream_wait() if options["async_finish"] else None
    named = layout_of(ids, buffer.group_size)[2]
    exact = biases[0].double() + biases[1].double()
    for rank in range(buffer.group_size):
        exact += torch.where(named[:, rank, None], per_rank(rank, rows).double(), 0)
    near(sums, exact)
    if recv_weights is None:
        assert total is None
    else:
        assert torch.equal(total, torch.where(ids >= 0, weights, 0))
    plain, *_ = buffer.combine(back, handle)
    near(plain, exact - biases[0].double() - biases[1].double())


class Dispatched(torch.autograd.Function if torch else object):
    """A dispatch whose backward is a combine, as training programs write it."""

    @staticmethod
    def forward(ctx, x, weights, buffer, ids, handles):
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, LOCAL * buffer.group_size)
        routing = dict(num_tokens_per_rank=per_rank, is_token_in_rank=named, num_tokens_per_expert=per_expert)
        rows, local, arrived, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **routing)
        handles.append(handle)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local)
        return rows, local, arrived

    @staticmethod
    def backward(ctx, rows, _, weights):
        x, weights, _ = ctx.buffer.combine(rows.contiguous(), ctx.handle, topk_weights=weights.contiguous())
        return x, weights, None, None, None


class Combined(torch.autograd.Function if torch else object):
    """A combine whose backward is a dispatch of the same handle."""

    @staticmethod
    def forward(ctx, rows, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx, sums):
        return ctx.buffer.dispatch(sums.contiguous(), handle=ctx.handle)[0], None, None


def test_functions_with_gradients_call_it_with_inputs_that_require_them():
    def body(buffer):
        _, ids, _ = everyone(2)[buffer.rank]
        # Small integers, so that all sums are exact.
        rows, weights = torch.randint(-3, 4, (len(ids), HIDDEN)).bfloat16(), torch.randint(1, 5, ids.shape).float()
        x, w, handles = rows.clone().requires_grad_(), weights.clone().requires_grad_(), []
        arrived, local, their_weights = Dispatched.apply(x, w, buffer, ids, handles)
        own = torch.where(local >= 0, their_weights, 0).sum(1, keepdim=True)
        sums = Combined.apply((arrived * own).bfloat16(), buffer, handles[0])
        sums.backward(torch.ones_like(sums))
        named = (ids >= 0).float()
        factors = (weights * named).sum(1, keepdim=True)
        assert torch.equal(sums.float(), rows * factors)
        assert torch.equal(x.grad.float(), factors.expand_as(rows))
        assert torch.equal(w.grad, named * rows.float().sum(1, keepdim=True))
        # Tensors with gradients, without a function: the results have none.
        assert not buffer.combine(arrived, handles[0])[0].requires_grad

    run(2, body)


def test_a_combine_finds_the_routing_of_its_handle():
    """Later dispatches with other ids use the same slot before the rows of earlier ones return."""

    def body(buffer):
        batches, calls = [everyone(2, round) for round in range(3)], []
        for inputs in batches:
            rows, ids, _ = inputs[buffer.rank]
            per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, 4)
            recv, _, _, _, handle, _ = buffer.dispatch(rows, None, per_rank, None, named, per_expert)
            zone, _, low_latency, _, _ = buffer.low_latency_dispatch(rows, ids.int(), ROOM, 4, use_fp8=False)
            calls.append((recv, handle, zone, low_latency))
        for inputs, (recv, handle, zone, low_latency) in zip(batches, calls):
            rows, ids, weights = inputs[buffer.rank]
            named = layout_of(ids, 2)[2]
            near(buffer.combine(recv, handle)[0], rows.double() * named.sum(1, keepdim=True))
            found, _, _ = buffer.low_latency_combine(zone, ids, weights, low_latency)
            near(found, weighted(inputs, buffer.rank, lambda _, row: row))

    run(2, body)


def test_a_silent_rank_is_an_error_of_the_call():
    def body(rank):
        deep_ep.Buffer.deadline, before = gin.Deadline(0.2), deep_ep.Buffer.deadline
        rank.barrier()
        buffer = deep_ep.Buffer(rank, low_latency_mode=True, explicitly_destroy=True)
        rank.barrier()
        deep_ep.Buffer.deadline = before
        rows, ids, _ = batch(0, 2)
        buffer.low_latency_dispatch(rows, ids, ROOM, 4, use_fp8=False)
        rank.barrier()
        if rank.rank == 0:
            with pytest.raises(gin.Error, match="rank 1"):
                buffer.low_latency_dispatch(rows, ids, ROOM, 4, use_fp8=False)
        rank.barrier()
        buffer.destroy()

    gin.launch(2, body, device="virtual")


def test_a_buffer_may_be_dropped():
    def body(rank):
        for round in range(3):
            buffer = deep_ep.Buffer(rank, low_latency_mode=True)
            rows, ids, weights = batch(rank.rank, 2, round)
            recv, _, handle, _, _ = buffer.low_latency_dispatch(rows, ids, ROOM, 4, use_fp8=False)
            near(
                buffer.low_latency_combine(recv, ids, weights, handle)[0],
                weighted(everyone(2, round), rank.rank, lambda _, row: row),
            )
            with pytest.raises(gin.StateError, match="destroy.. needs Buffer.explicitly_destroy=True"):
                buffer.destroy()
            rank.barrier()

    gin.launch(2, body, device="virtual")


def test_numbers_of_rows_are_aligned():
    def body(buffer):
        inputs = everyone(2, 1)
        rows, ids, weights = inputs[buffer.rank]
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, 4)
        numbers = buffer.dispatch(rows, None, per_rank, None, named, per_expert, expert_alignment=8)[3]
        assert numbers == [-(-len(zone) // 8) * 8 for zone in zones(buffer.rank, inputs)]

    run(2, body)


def test_ranks_with_other_numbers_of_experts_are_refused():
    def body(buffer):
        rows, ids, _ = everyone(2, 1)[buffer.rank]
        experts = 4 + 2 * buffer.rank
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, experts)
        other = f"has {experts} experts here, and {10 - experts} on rank {1 - buffer.rank}"
        with pytest.raises(ValueError, match=other):
            buffer.dispatch(rows, None, per_rank, None, named, per_expert)
        # The next call works.
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, 4)
        recv, _, _, numbers, _, _ = buffer.dispatch(rows, None, per_rank, None, named, per_expert)
        assert recv.size(0) <= sum(numbers)

    run(2, body)


def test_a_silent_rank_is_an_error_of_dispatch():
    def body(rank):
        deep_ep.Buffer.deadline, before = gin.Deadline(0.2), deep_ep.Buffer.deadline
        rank.barrier()
        buffer = deep_ep.Buffer(rank, explicitly_destroy=True)
        rank.barrier()
        deep_ep.Buffer.deadline = before
        rows, ids, _ = batch(0, 2)
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, 4)
        buffer.dispatch(rows, None, per_rank, None, named, per_expert)
        rank.barrier()
        if rank.rank == 0:
            with pytest.raises(gin.Error, match="rank 1"):
                buffer.dispatch(rows, None, per_rank, None, named, per_expert)
        rank.barrier()
        buffer.destroy()

    gin.launch(2, body, device="virtual")


def test_what_is_wrong_is_refused_before_a_launch():
    def body(buffer):
        rows, ids, weights = torch.zeros(4, HIDDEN).bfloat16(), torch.zeros(4, TOPK).long(), torch.zeros(4, TOPK)
        send = buffer.low_latency_dispatch
        for call, text in (
            (lambda: send(rows.float(), ids, ROOM, 2), "x has dtype torch.float32; pass torch.bfloat16"),
            (lambda: send(rows, ids[:3], ROOM, 2), r"topk_idx has shape \[3, 3\]; pass \[4, any\]"),
            (lambda: send(rows, ids, 3, 2), "x has 4 tokens; num_max_dispatch_tokens_per_rank is 3"),
            (lambda: send(rows, ids, ROOM, 2, use_ue8m0=True), "use_ue8m0=True needs round_scale=True"),
            (lambda: send(rows, ids, ROOM, 2, use_fp8=False, round_scale=True), "belong to use_fp8=True"),
            (lambda: send(rows[:, :72], ids, ROOM, 2), "hidden is 72; use_fp8 needs a multiple of 128"),
            (lambda: send(rows, ids, ROOM, 2, async_finish=True, return_recv_hook=True), "not both"),
            (lambda: buffer.combine(rows, (1, 2)), "handle is not one of dispatch"),
            (lambda: buffer.dispatch(rows), "is_token_in_rank is missing: pass the results of get_dispatch_layout"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        recv, _, handle, event, _ = send(rows, ids, ROOM, 2, use_fp8=False)
        with pytest.raises(gin.StateError, match="pass async_finish=True"):
            event.current_stream_wait()
        back = buffer.low_latency_combine
        for call, text in (
            (lambda: back(recv, ids + 1, weights, handle), "topk_idx differs from the ids of the dispatch"),
            (lambda: back(recv[:, 1:], ids, weights, handle), r"x has shape \[2, 11, 512\]; pass \[2, 12, 512\]"),
            (lambda: back(recv, ids, weights, tuple(handle)), "handle is not one of low_latency_dispatch"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        per_rank, _, per_expert, named, _ = buffer.get_dispatch_layout(ids, 2)
        with pytest.raises(ValueError, match=r"num_tokens_per_rank is \[5\]; is_token_in_rank has \[4\]"):
            buffer.dispatch(rows, None, per_rank + 1, None, named, per_expert)
        with pytest.raises(ValueError, match="x has 4 tokens; num_worst_tokens 3 allows 3 on each of 1 ranks"):
            buffer.dispatch(rows, None, per_rank, None, named, per_expert, num_worst_tokens=3)
        assert (back(recv, ids, weights, handle)[0] == 0).all()

    run(1, body)


def test_what_is_not_there_is_refused_by_name():
    def body(rank):
        with pytest.raises(NotImplementedError, match="no Buffer.enable_shrink=True"):
            deep_ep.Buffer(rank, enable_shrink=True)
        buffer = deep_ep.Buffer(rank, explicitly_destroy=True)
        rows, ids = torch.zeros(1, HIDDEN).bfloat16(), torch.zeros(1, 1).long()
        with pytest.raises(gin.StateError, match="low_latency_dispatch needs Buffer.low_latency_mode=True"):
            buffer.low_latency_dispatch(rows, ids, ROOM, 2)
        for name in ("internode_dispatch", "low_latency_query_mask_buffer", "get_local_buffer_tensor"):
            with pytest.raises(NotImplementedError, match=f"gincomm.deep_ep has no {name}"):
                getattr(buffer, name)()
        with pytest.raises(NotImplementedError, match="no dispatch.num_tokens_per_rdma_rank="):
            buffer.dispatch(rows, num_tokens_per_rdma_rank=ids)
        buffer.destroy()

    gin.launch(1, body, device="virtual")


def test_the_size_hint_grows_with_tokens_and_experts():
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert 0 < hint(64, HIDDEN, 2, 4) < hint(128, HIDDEN, 2, 4) < hint(128, HIDDEN, 2, 8)
    with pytest.raises(ValueError, match="num_experts 5 is not a multiple of the 2 ranks"):
        hint(64, HIDDEN, 2, 5)


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_process_group_computes_a_layer(gpus):
    needs_gpus(gpus)
    found = torchrun(os.path.join(EXAMPLES, "deep_ep_layer.py"), *([] if gpus else ["--cpu"]))
    assert found.count("prefill and 4 steps of decode agree with all experts") == 2, found


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_times_of_all_calls_are_shown(gpus):
    needs_gpus(gpus)
    small = "--hidden 512 --experts 8 --topk 2 --decode 8 --prefill 16 --sms 4".split()
    found = torchrun(os.path.join(EXAMPLES, "deep_ep_times.py"), *small, *([] if gpus else ["--cpu"]))
    lines = [line for line in found.splitlines() if " tokens, " in line]
    assert len(lines) == (11 if gpus else 7) and all(" to " in line for line in lines), found
