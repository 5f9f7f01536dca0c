# SPDX-License-Identifier: MIT OR Apache-2.0
"""`gincomm.deep_ep.ElasticBuffer` on CPU tensors, against references in torch that know the inputs of all ranks."""

import time

import gincomm as gin
import pytest
import torch_support
from torch_support import torch

if torch is not None:
    from gincomm import deep_ep

pytestmark = torch_support.mark

HIDDEN, TOPK, ROOM, LOCAL, ALIGN = 256, 3, 12, 2, 4
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def run(ranks, body, **options):
    """Runs `body(buffer)` on each rank, and destroys the buffer."""

    def each(rank):
        buffer = deep_ep.ElasticBuffer(rank, num_max_tokens_per_rank=ROOM, explicitly_destroy=True, **options)
        body(buffer)
        buffer.destroy()

    gin.launch(ranks, each, device="virtual")


def everyone(ranks, round=0):
    """Returns the rows, ids and weights of each rank. Some ids are -1; the ids of a token differ.

    In round 2, rank 1 has no tokens.
    """
    found = []
    for rank in range(ranks):
        random = torch.Generator().manual_seed(1000 * round + rank)
        count, experts = (5 * round + 7 * rank + 9) % (ROOM + 1), LOCAL * ranks
        ids = torch.rand(count, max(experts, TOPK), generator=random).topk(TOPK).indices
        ids[(ids >= experts) | (torch.rand(count, TOPK, generator=random) < 0.2)] = -1
        rows = torch.randn(count, HIDDEN, generator=random).bfloat16()
        found.append((rows, ids, torch.rand(count, TOPK, generator=random)))
    return found


def scaled(rows):
    """Returns FP8 rows and FP32 scales, column-major."""
    return (rows * 8).to(torch.float8_e4m3fn), rows.float().unflatten(1, (-1, 128)).amax(2).T.contiguous().T


def arrivals(rank, inputs):
    """Returns source, token, local ids and weights of the rows that a rank receives, by source and token."""
    found = []
    for source, (_, ids, weights) in enumerate(inputs):
        for token, (row, factors) in enumerate(zip(ids.tolist(), weights.tolist())):
            here = [id - LOCAL * rank if id >= 0 and id // LOCAL == rank else -1 for id in row]
            if max(here) >= 0:
                found.append((source, token, here, [w if id >= 0 else 0.0 for id, w in zip(here, factors)]))
    return found


def zones(arrived):
    """Returns for each local expert the number of the received row, the position of the id, and the weight."""
    found = [[] for _ in range(LOCAL)]
    for n, (_, _, here, kept) in enumerate(arrived):
        for k, expert in enumerate(here):
            if expert >= 0:
                found[expert].append((n, k, kept[k]))
    return found


def near(found, exact, rounded, terms):
    """Compares sums of BF16 with exact ones. The sums of each rank are rounded, and then FP32 sums of all `terms`."""
    bound = 2**-8 * (exact.abs() + rounded) + 2**-16 * terms
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


def check_handle(handle, arrived, ranks, expands, waits):
    counts, padded, ends, start = [], [], [], 0
    for zone in zones(arrived):
        counts.append(len(zone))
        padded.append(-(-len(zone) // ALIGN) * ALIGN)
        ends.append(start + (counts[-1] if expands else padded[-1]))
        start += padded[-1]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    sums = [sum(source <= end for source, *_ in arrived) for end in range(ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
    assert handle.num_recv_tokens_per_expert_list == (padded if waits else [])
    worst = -(-(ranks * ROOM * min(TOPK, LOCAL) + (ALIGN - 1) * LOCAL) // ALIGN) * ALIGN
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (
        (len(arrived), sum(padded)) if waits else (ranks * ROOM, worst)
    )
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata.shape == (handle.num_recv_tokens, 2 + TOPK)
    slots = torch.full((len(arrived), TOPK), -1)
    for expert, zone in enumerate(zones(arrived)) if expands else ():
        for place, (n, k, _) in enumerate(zone):
            slots[n, k] = sum(padded[:expert]) + place
    for n, (source, token, here, _) in enumerate(arrived):
        last = max(k for k, id in enumerate(here) if id >= 0)
        assert metadata[n].tolist() == [source * ROOM + token, source * TOPK + last, *slots[n].tolist()]
    return padded


def check_rows(found, inputs, arrived, padded, fp8, expands):
    """Compares rows, scales, ids and weights of a dispatch. Rows past them have no meaning."""
    recv, ids, weights = found
    sent = [scaled(rows) if fp8 else (rows,) for rows, *_ in inputs]
    for part, column in zip(recv if fp8 else (recv,), zip(*sent)):
        want = [column[source][token].float() for source, token, *_ in arrived]
        if expands:
            gap, expected = torch.zeros(part.size(1)), []
            for zone, room in zip(zones(arrived), padded):
                expected += [want[n] for n, *_ in zone] + [gap] * (room - len(zone))
            want = expected
        assert part.dtype == column[0].dtype
        assert all(torch.equal(row.float(), other) for row, other in zip(part, want)) and len(part) >= len(want)
    if expands:
        kept = [[w for *_, w in zone] + [0.0] * (room - len(zone)) for zone, room in zip(zones(arrived), padded)]
        assert ids is None
        assert weights is None or weights[: sum(padded)].tolist() == sum(kept, [])
    else:
        n = len(arrived)
        assert ids.dtype == torch.int64 and ids[:n].tolist() == [here for *_, here, _ in arrived]
        assert (ids[n:] == -1).all()
        assert weights is None or (weights[:n].tolist() == [kept for *_, kept in arrived] and (weights[n:] == 0).all())


def check_sums(buffer, inputs, handle, arrived, weights, **options):
    """Combines rows that depend on source, token, rank and, if they stand by expert, on the expert."""
    rows, ids, given = inputs[buffer.rank_idx]
    of = lambda expert, row: (row.float() * (expert + 1)).bfloat16()
    first, expands = LOCAL * buffer.rank_idx, handle.do_expand
    count = handle.num_expanded_tokens if expands else handle.num_recv_tokens
    # Rows without a meaning must not take part.
    back = torch.full((count, HIDDEN), float("nan"), dtype=torch.bfloat16)
    for n, (source, token, here, _) in enumerate(arrived):
        row = inputs[source][0][token]
        results = [(k, of(first + id, row)) for k, id in enumerate(here) if id >= 0]
        if expands:
            for k, result in results:
                back[handle.recv_src_metadata[n, 2 + k]] = result
        else:
            back[n] = sum(result.float() for _, result in results).bfloat16()
    exact, terms = torch.zeros(len(rows), HIDDEN).double(), torch.zeros(len(rows), HIDDEN).double()
    for token, experts in enumerate(ids.tolist()):
        for expert in experts:
            if expert >= 0:
                result = of(expert, rows[token]).double()
                exact[token], terms[token] = exact[token] + result, terms[token] + result.abs()
    biases = rows * 3, rows * -5
    more = sum(bias.double() for bias in biases)
    for bias, extra in ((None, 0), (biases[0], biases[0].double()), (biases, more)):
        sums, total, event = buffer.combine(back, handle, weights, bias, **options)
        event.current_stream_wait(release_handle=True) if options.get("async_with_compute_stream") else None
        # The rows of a rank are rounded once more, unless FP32 rows return.
        rounded = terms if buffer.allow_multiple_reduction or not expands else torch.zeros_like(terms)
        near(sums, exact + extra, rounded, terms + 8 * rows.double().abs())
        if weights is None:
            assert total is None
        else:
            assert torch.equal(total, torch.where(ids >= 0, given, 0))


@RANKS
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("expands", [False, True])
def test_rows_reach_their_ranks_and_experts_and_return(ranks, fp8, expands):
    def body(buffer):
        for round in range(3):
            inputs = everyone(ranks, round)
            rows, ids, weights = inputs[buffer.rank_idx]
            arrived, x = arrivals(buffer.rank_idx, inputs), scaled(rows) if fp8 else rows
            options = dict(do_expand=expands, do_zero_padding=expands)
            stats = torch.full((LOCAL,), 10, dtype=torch.int32)
            call = dict(topk_idx=ids, num_experts=LOCAL * ranks, expert_alignment=ALIGN, **options)
            *found, handle, _ = buffer.dispatch(
                x, topk_weights=weights, cumulative_local_expert_recv_stats=stats, **call
            )
            padded = check_handle(handle, arrived, ranks, expands, True)
            check_rows(found, inputs, arrived, padded, fp8, expands)
            assert (stats == handle.num_unaligned_recv_tokens_per_expert + 10).all()
            check_sums(buffer, inputs, handle, arrived, found[2])
            # Without a wait of the host, tensors have room for all rows that may arrive.
            *more, other, _ = buffer.dispatch(x, topk_weights=weights, do_cpu_sync=False, **call)
            check_handle(other, arrived, ranks, expands, False)
            check_rows(more, inputs, arrived, padded, fp8, expands)
            # The same routing, other rows, with and without weights.
            given = [(each * -2, *rest) for each, *rest in inputs]
            x = scaled(given[buffer.rank_idx][0]) if fp8 else given[buffer.rank_idx][0]
            for kept in (weights, None):
                *cached, same, _ = buffer.dispatch(x, topk_weights=kept, handle=handle, **options)
                assert same is handle and (cached[2] is None) == (kept is None)
                check_rows(cached, given, arrived, padded, fp8, expands)
            check_sums(buffer, inputs, handle, arrived, None)
            # The slot has the rows of another handle by now.
            check_sums(buffer, inputs, other, arrived, more[2])

    run(ranks, body)


def test_a_rank_may_receive_nothing():
    """All ids are of rank 0, or -1 in the second round."""

    def body(buffer):
        for ids in (torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), -1)):
            for fp8 in (False, True):
                for expands in (False, True):
                    rows = torch.ones(2, HIDDEN).bfloat16()
                    recv, _, weights, handle, _ = buffer.dispatch(
                        scaled(rows) if fp8 else rows, ids, ids.float(), num_experts=4, do_expand=expands
                    )
                    empty = buffer.rank_idx == 1 or ids.max() < 0
                    count = 0 if empty else 6 if expands else 4
                    assert handle.num_recv_tokens_per_expert_list == ([0, 0] if empty else [2, 4])
                    back = torch.ones(count, HIDDEN).bfloat16()
                    sums, total, _ = buffer.combine(back, handle, weights)
                    assert len(recv[0] if fp8 else recv) == count
                    places = (ids >= 0).sum(1) if expands else (ids >= 0).any(1)
                    assert torch.equal(sums.float(), places.float().unsqueeze(1).expand(2, HIDDEN))
                    assert torch.equal(total, ids.clamp(min=0).float())

    run(2, body)


def test_calls_may_be_asynchronous_and_follow_events():
    def body(buffer):
        inputs = everyone(2)
        rows, ids, weights = inputs[buffer.rank_idx]
        for previous in (buffer.capture(), deep_ep.EventOverlap(buffer.capture())):
            options = dict(
                previous_event=previous,
                previous_event_before_epilogue=previous,
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            call = dict(num_experts=4, expert_alignment=ALIGN, **options)
            # No tensor is contiguous.
            turned = [each.T.contiguous().T for each in (rows, ids, weights)]
            *found, handle, event = buffer.dispatch(*turned, **call)
            with event(release_handle=True):
                pass
            assert event.event is None
            arrived = arrivals(buffer.rank_idx, inputs)
            padded = check_handle(handle, arrived, 2, False, True)
            check_rows(found, inputs, arrived, padded, False, False)
            check_sums(buffer, inputs, handle, arrived, found[2], **options)
        buffer.barrier()

    run(2, body)


@pytest.mark.parametrize("expands, reduces", [(False, True), (True, True), (True, False)])
def test_a_combine_finds_the_routing_of_its_handle(expands, reduces):
    """Later dispatches with other ids, of FP8 and of BF16 rows, use the same slots before earlier rows return."""

    def body(buffer):
        calls = []
        for round in range(4):
            inputs = everyone(2, round)
            rows, ids, weights = inputs[buffer.rank_idx]
            x = scaled(rows) if round % 2 else rows
            call = dict(num_experts=4, expert_alignment=ALIGN, do_expand=expands)
            calls.append((inputs, *buffer.dispatch(x, ids, weights, **call)[2:4]))
        for inputs, recv_weights, handle in calls:
            check_sums(buffer, inputs, handle, arrivals(buffer.rank_idx, inputs), recv_weights)

    run(2, body, allow_multiple_reduction=reduces)


def test_one_reduction_rounds_once():
    """A rank's sum 256 + 1 is no BF16 number, but with the bias -256 the sum of all terms is."""

    def body(buffer):
        rows, ids = torch.zeros(1, HIDDEN).bfloat16(), torch.tensor([[0, 1]])
        handle = buffer.dispatch(rows, ids, num_experts=2, do_expand=True)[3]
        back = torch.tensor([256, 1]).bfloat16().unsqueeze(1).expand(2, HIDDEN).contiguous()
        sums, *_ = buffer.combine(back, handle, bias=rows - 256)
        assert (sums == (0 if buffer.allow_multiple_reduction else 1)).all()

    for reduces in (True, False):
        run(1, body, allow_multiple_reduction=reduces)


def test_a_combine_returns_rows_of_the_handles_last_dispatch():
    """A handle may take FP8 rows of twice as many elements after BF16 rows."""

    def body(buffer):
        rows, ids, _ = everyone(2)[buffer.rank_idx]
        handle = buffer.dispatch(rows, ids, num_experts=4)[3]
        recv, *_ = buffer.dispatch(scaled(torch.cat([rows, rows], 1)), handle=handle)
        assert recv[0].size(1) == 2 * HIDDEN
        sums, *_ = buffer.combine(torch.ones(recv[0].shape).bfloat16(), handle)
        ranks = [len({expert // LOCAL for expert in row if expert >= 0}) for row in ids.tolist()]
        assert torch.equal(sums, torch.tensor(ranks).bfloat16().unsqueeze(1).expand(-1, 2 * HIDDEN))
        with pytest.raises(ValueError, match=r"x has shape .* pass \[\d+, 512\]"):
            buffer.combine(torch.zeros(recv[0].size(0), HIDDEN).bfloat16(), handle)

    run(2, body)


def test_each_dispatch_has_its_alignment():
    def body(buffer):
        inputs = everyone(2)
        rows, ids, _ = inputs[buffer.rank_idx]
        arrived = arrivals(buffer.rank_idx, inputs)
        for alignment in (1, 8, 2):
            call = dict(num_experts=4, do_expand=True, expert_alignment=alignment)
            recv, _, _, handle, _ = buffer.dispatch(rows, ids, **call)
            start = 0
            for zone, room in zip(zones(arrived), handle.num_recv_tokens_per_expert_list):
                assert room == -(-len(zone) // alignment) * alignment
                for place, (n, *_) in enumerate(zone):
                    source, token, *_ = arrived[n]
                    assert torch.equal(recv[start + place], inputs[source][0][token])
                start += room
            assert len(recv) == start

    run(2, body)


def test_scales_may_be_column_major():
    def body(buffer):
        inputs = everyone(2, 1)
        rows, ids, _ = inputs[buffer.rank_idx]
        for expands in (False, True):
            call = dict(topk_idx=ids, num_experts=4, do_expand=expands)
            _, plain = buffer.dispatch(scaled(rows), **call)[0]
            _, scales = buffer.dispatch(scaled(rows), use_tma_aligned_col_major_sf=True, **call)[0]
            count = scales.size(0)
            assert plain.is_contiguous() and scales.stride() == (1, -(-count // 4) * 4) and count > 1
            assert torch.equal(plain, scales)
            # Packed UE8M0 scales are words, which gin copies.
            words = scaled(rows)[1].contiguous().view(torch.int32)
            _, copied = buffer.dispatch((scaled(rows)[0], words), **call)[0]
            assert torch.equal(copied, plain.view(torch.int32))

    run(2, body)


def test_a_handle_has_a_copy_of_the_ids_unless_the_program_declines():
    def body(buffer):
        inputs = everyone(1)
        rows, ids, _ = inputs[0]
        before = ids.clone()
        _, _, _, handle, _ = buffer.dispatch(rows, ids, num_experts=LOCAL, expert_alignment=ALIGN)
        _, _, _, other, _ = buffer.dispatch(rows, ids, num_experts=LOCAL, do_handle_copy=False)
        assert other.topk_idx is ids
        ids.fill_(-1)
        assert torch.equal(handle.topk_idx, before)
        inputs = [(rows, before, torch.zeros(len(rows), TOPK))]
        check_sums(buffer, inputs, handle, arrivals(0, inputs), None)

    run(1, body)


def test_what_is_wrong_is_refused_before_a_launch():
    def body(buffer):
        rows, ids, weights = torch.zeros(4, HIDDEN).bfloat16(), torch.zeros(4, TOPK).long(), torch.zeros(4, TOPK)
        ids[:, 1:] = -1
        send, back = buffer.dispatch, buffer.combine
        _, _, got, handle, event = send(rows, ids, weights, num_experts=2)
        _, _, _, expanded, _ = send(rows, ids, num_experts=2, do_expand=True)
        stats = torch.zeros(2, dtype=torch.int32)
        for call, text in (
            (lambda: send(rows.float(), ids, num_experts=2), "x has dtype torch.float32; pass torch.bfloat16"),
            (lambda: send(rows, ids[:3], num_experts=2), r"topk_idx has shape \[3, 3\]; pass \[4, any\]"),
            (lambda: send(rows, ids), "num_experts is missing"),
            (lambda: send(rows, ids, num_experts=2, num_max_tokens_per_rank=3), "num_max_tokens_per_rank is 3"),
            (lambda: send(rows, ids, num_experts=2, num_max_tokens_per_rank=0), "num_max_tokens_per_rank is 0; pass 1"),
            (lambda: send(rows, ids, num_experts=2, expert_alignment=0), "expert_alignment is 0; use 1 or more"),
            (lambda: send(rows, ids, num_experts=2, num_sms=-1), "num_sms is -1; use 0 for all SMs, or more"),
            (
                lambda: send(rows, ids, num_experts=2, expert_alignment=12, do_expand=True),
                "expert_alignment is 12; do_expand needs a power of two, at most 65536",
            ),
            (lambda: send(rows, ids, num_experts=2, do_zero_padding=True), "do_zero_padding=True needs do_expand=True"),
            (lambda: send(rows, ids, weights[:, 1:], num_experts=2), r"topk_weights has shape \[4, 2\]; pass \[4, 3\]"),
            (lambda: send(rows, ids, handle=handle), "with a handle, topk_idx must be None"),
            (lambda: send(rows, handle=(1, 2)), "handle is not one of ElasticBuffer.dispatch"),
            (lambda: send(rows[1:], handle=handle), r"x has shape \[3, 256\]; pass \[4, any\]"),
            (lambda: send(rows, handle=handle, do_cpu_sync=True), "do_cpu_sync=True needs a dispatch without a handle"),
            (lambda: send(rows, None, None, stats, handle=handle), "with a handle, the statistics must be None"),
            (lambda: send(rows, handle=expanded), "do_expand is False; the dispatch of the handle had True"),
            (lambda: send(rows, handle=handle, expert_alignment=8), "expert_alignment is 8; .* had 1"),
            (lambda: back(rows[1:], handle), r"x has shape \[3, 256\]; pass \[4, 256\]"),
            (lambda: back(rows, expanded, got), r"topk_weights has shape \[4, 3\]; pass \[4\]"),
            (lambda: back(rows, handle, None, rows[1:]), r"bias has shape \[3, 256\]; pass \[4, 256\]"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(gin.StateError, match="async_with_compute_stream=True"):
            event.current_stream_wait()
        assert (back(rows, handle)[0] == 0).all()

    run(1, body)


def test_a_silent_rank_is_an_error_of_the_call():
    def body(rank):
        options = dict(num_gpu_timeout_secs=0.2, explicitly_destroy=True)
        buffer = deep_ep.ElasticBuffer(rank, num_max_tokens_per_rank=ROOM, **options)
        rows, ids, _ = everyone(2)[0]
        buffer.dispatch(rows, ids, num_experts=4)
        rank.barrier()
        if rank.rank == 0:
            start = time.monotonic()
            with pytest.raises(gin.Error, match="rank 1"):
                buffer.dispatch(rows, ids, num_experts=4)
            assert time.monotonic() - start < 15, "the default is 100 s"
        rank.barrier()
        buffer.destroy()

    gin.launch(2, body, device="virtual")


def test_a_buffer_has_the_attributes_that_programs_read():
    def body(buffer):
        assert (buffer.num_ranks, buffer.num_max_tokens_per_rank) == (2, ROOM)
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == buffer.get_logical_domain_size() == (1, 2)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size() == (1, 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, buffer.rank_idx)
        assert buffer.get_theoretical_num_sms(8, 2) == 64 and buffer.get_theoretical_num_qps(64) == 0
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint
        sizes = [hint(buffer.group, 64, HIDDEN, use_fp8_dispatch=fp8) for fp8 in (True, False)]
        assert 0 < sizes[0] < sizes[1] < hint(buffer.group, 128, HIDDEN)
        with pytest.raises(gin.StateError, match="a buffer of CPU tensors has no CUDA stream"):
            buffer.get_comm_stream()

    run(2, body, prefer_overlap_with_compute=False)


def test_what_is_not_there_is_refused_by_name():
    def body(rank):
        with pytest.raises(NotImplementedError, match="no ElasticBuffer.num_cpu_bytes="):
            deep_ep.ElasticBuffer(rank, num_cpu_bytes=1 << 21)
        buffer = deep_ep.ElasticBuffer(rank)
        for name in ("engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv", "all_gather"):
            with pytest.raises(NotImplementedError, match=f"gincomm.deep_ep has no ElasticBuffer.{name}: use "):
                getattr(buffer, name)()
        for name in ("get_engram_storage_size_hint", "get_pp_buffer_size_hint", "get_agrs_buffer_size_hint"):
            with pytest.raises(NotImplementedError, match=f"gincomm.deep_ep has no ElasticBuffer.{name}: use "):
                getattr(deep_ep.ElasticBuffer, name)(1, 2)
        with pytest.raises(gin.StateError, match="destroy.. needs ElasticBuffer.explicitly_destroy=True"):
            buffer.destroy()

    gin.launch(1, body, device="virtual")
