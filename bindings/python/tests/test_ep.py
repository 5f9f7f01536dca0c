# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert parallelism on virtual GPUs, compared with what NumPy computes."""

import copy
import gc
import re
import threading
import time
import weakref

import gincomm as gin
import numpy as np
import pytest
from gincomm.ep import Permuted, Combine, Element, Group, GroupConfig, Layout, Tokens
from support import Null, run, start

WAIT = gin.Deadline(30)
"""How long a rank waits for another that will come."""


def virtual(ranks, body):
    return gin.launch(ranks, body, device="virtual")


def narrow(values):
    """Returns BF16, as bits: the nearest, or the even one of two."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


class Kind:
    """Elements of a group: their type in tensors of NumPy, and the way to FP32 and back."""

    def __init__(self, element, dtype, narrow, widen):
        self.element, self.dtype, self.narrow, self.widen = element, dtype, narrow, widen


KINDS = {
    "F32": Kind(Element.F32, "float32", np.float32, np.float32),
    "F16": Kind(Element.F16, "float16", np.float16, np.float32),
    "BF16": Kind(Element.BF16, "uint16", narrow, widen),
}


class Shape:
    def __init__(self, ranks, experts, topk, hidden):
        self.ranks, self.experts, self.topk, self.hidden = ranks, experts, topk, hidden
        self.local = -(-experts // ranks)

    def config(self, **options):
        return GroupConfig(self.experts, self.hidden, self.topk, **{"deadline": WAIT, "threads": 64, **options})


class Batch:
    """The tokens of a rank, from its number and that of the round."""

    def __init__(self, shape, kind, rank, round, count):
        random = np.random.default_rng([rank, round, count])
        self.rows = kind.narrow(random.normal(size=(count, shape.hidden)).astype(np.float32))
        self.ids = random.integers(-1, shape.experts, (count, shape.topk)).astype(np.int32)
        self.weights = random.uniform(0.1, 1, (count, shape.topk)).astype(np.float32)

    def first(self, count):
        """Returns the first tokens, or all if `count` is None."""
        part = copy.copy(self)
        part.rows, part.ids, part.weights = self.rows[:count], self.ids[:count], self.weights[:count]
        return part


def arriving(shape, batches, rank):
    """Returns for each source the tokens that it sends to a rank, and the experts there of their ids."""
    for batch in batches:
        ids = batch.ids
        here = (ids >= 0) & (ids // shape.local == rank)
        tokens = np.flatnonzero(here.any(1) & (ids < shape.experts).all(1))
        yield tokens, np.where(here, ids % shape.local, -1)[tokens]


def expert(kind, rows, experts, weights):
    """Returns what the experts of a rank make of rows: for each a factor of its own, then the sum by weight."""
    factor = np.where(experts >= 0, weights * (experts + 1), 0).astype(np.float32).sum(-1, keepdims=True)
    return kind.narrow(kind.widen(rows) * factor)


def reduced(shape, kind, batch, arrives=lambda token, rank: True):
    """Returns the sums of what the ranks of each token return, in the order in which its ids name them. `arrives` says
    whether a token's row has a place at a rank."""
    sums = np.zeros((len(batch.ids), shape.hidden), np.float32)
    for token, ids in enumerate(batch.ids):
        if (ids >= shape.experts).any():
            continue
        for rank in dict.fromkeys(int(id) // shape.local for id in ids if id >= 0):
            if not arrives(token, rank):
                continue
            experts = np.where((ids >= 0) & (ids // shape.local == rank), ids % shape.local, -1)
            row = expert(kind, batch.rows[token], experts, batch.weights[token])
            sums[token] = sums[token] + kind.widen(row)
    return kind.narrow(sums)


def run_experts(kind, received):
    """Replaces the received rows, on the CPU. The stream is done."""
    rows, counts = np.from_dlpack(received.rows(kind.dtype)), np.from_dlpack(received.counts())
    experts, weights = np.from_dlpack(received.experts()), np.from_dlpack(received.weights())
    for source, count in enumerate(counts):
        rows[source, :count] = expert(kind, rows[source, :count], experts[source, :count], weights[source, :count])


def same(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_dispatch_and_combine_agree_with_numpy(ranks, name):
    kind, shape, max_tokens = KINDS[name], Shape(ranks, 2 * ranks + 1, 3, 16), 9

    def body(rank):
        with rank.communicator() as comm, Group(comm, shape.config(tokens=max_tokens, element=kind.element)) as group:
            stream, slot, me = rank.stream(), group.slot(0), rank.rank
            output = np.zeros((max_tokens, shape.hidden), kind.dtype)
            for round in range(6):
                batches = [Batch(shape, kind, each, round, (5 * each + 3 * round) % (max_tokens + 1)) for each in range(ranks)]
                mine = batches[me]
                count = len(mine.rows)
                tokens = Tokens(mine.rows, mine.ids, weights=mine.weights)
                if round % 2:
                    # Ids of 64 bits, and the number of tokens in memory.
                    room = lambda values: np.concatenate([values, np.zeros((max_tokens - count, *values.shape[1:]), values.dtype)])
                    rows, ids, weights = room(mine.rows), room(mine.ids.astype(np.int64)), room(mine.weights)
                    tokens = Tokens(rows, ids, np.array([count], np.int32), weights=weights)
                    received = slot.exchange(stream, tokens)
                else:
                    received = slot.dispatch(stream, tokens).receive(stream)
                stream.synchronize()
                rows, counts = np.from_dlpack(received.rows(kind.dtype)), np.from_dlpack(received.counts())
                assert rows.shape == (ranks, max_tokens, shape.hidden) and received.rows().dtype == {
                    "BF16": "bfloat16", "F16": "float16", "F32": "float32"
                }[name]
                for source, (sent, experts) in enumerate(arriving(shape, batches, me)):
                    assert counts[source] == len(sent)
                    here = slice(0, len(sent))
                    assert same(rows[source, here], batches[source].rows[sent])
                    assert (np.from_dlpack(received.tokens())[source, here] == sent).all()
                    assert (np.from_dlpack(received.experts())[source, here] == experts).all()
                    weights = np.from_dlpack(received.weights())[source, here]
                    assert (weights[experts >= 0] == batches[source].weights[sent][experts >= 0]).all()
                run_experts(kind, received)
                output[:] = 7
                received.combine(stream, Combine.reduced(output))
                stream.synchronize()
                assert group.status() is None and group.masked(0) == []
                assert same(output[:count], reduced(shape, kind, mine)), (round, output[:count])
                assert (output[count:] == 7).all()

    virtual(ranks, body)


def source_info(permuted):
    """Returns source, received row and position of the id of each row of permuted rows, or None."""
    words = np.from_dlpack(permuted.source_info())
    return [None if word < 0 else (word >> 21, word >> 5 & 0xFFFF, word & 31) for word in words.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_layouts_have_the_rows_of_experts_and_combine_from_there(ranks):
    kind, shape, max_tokens = KINDS["F32"], Shape(ranks, 2 * ranks, 2, 8), 6

    def body(rank):
        comm = rank.communicator()
        group = Group(comm, shape.config(tokens=max_tokens, element=kind.element, combine_at_source=True))
        stream, slot, me = rank.stream(), group.slot(0), rank.rank
        align = 4
        layouts = {
            "flat": (Layout.FLAT, ranks * max_tokens),
            "packed": (Layout.expert_major_packed(align), 2 * ranks * max_tokens + 2 * align),
            "padded": (Layout.EXPERT_MAJOR_PADDED, None),
            "listed": (Layout.EXPERT_MAJOR_INDICES, 2 * ranks * max_tokens),
            "fixed": (Layout.EXPERT_MAJOR_FIXED, None),
        }
        cases = [(name, *layout, arrives) for name, layout in layouts.items() for arrives in (False, True)]
        for round, (name, layout, room, arrives) in enumerate(cases):
            to = Permuted(group, layout, room)
            batches = [Batch(shape, kind, each, round, max_tokens - each) for each in range(ranks)]
            mine = batches[me]
            tokens = Tokens(mine.rows, mine.ids, weights=mine.weights)
            if arrives:
                received, _ = slot.exchange_into(stream, tokens, to)
            else:
                received = slot.exchange(stream, tokens)
                received.permute(stream, to)
            stream.synchronize()
            assert group.status() is None
            counts, places = np.from_dlpack(to.counts()), source_info(to)
            assert to.fetch_counts() == counts.tolist()
            sent = list(arriving(shape, batches, me))
            flat = [(source, row) for source, (tokens, _) in enumerate(sent) for row in range(len(tokens))]
            zones = [
                [(s, row, k) for s, row in flat for k in range(2) if sent[s][1][row, k] == each]
                for each in range(shape.local)
            ]
            row_of = lambda s, row, *_: batches[s].rows[sent[s][0][row]]
            if name == "flat":
                assert counts.tolist() == [len(flat)]
                expected = {at: (s, row, 0) for at, (s, row) in enumerate(flat)}
            elif name == "padded":
                by_source = [[[at for at in zone if at[0] == s] for s in range(ranks)] for zone in zones]
                assert to.capacity == shape.local * ranks * max_tokens
                assert counts[1:].tolist() == [len(part) for zone in by_source for part in zone]
                expected = {
                    (number * ranks + s) * max_tokens + at: place
                    for number, zone in enumerate(by_source)
                    for s, part in enumerate(zone)
                    for at, place in enumerate(part)
                }
            elif name == "fixed":
                zone = ranks * max_tokens
                assert to.capacity == shape.local * zone
                expected = {number * zone + at: place for number, rows in enumerate(zones) for at, place in enumerate(rows)}
                firsts = [number * zone for number in range(shape.local)]
                assert counts[: 1 + 2 * shape.local].tolist() == [to.capacity, *map(len, zones), *firsts]
                by_source = [[sum(at[0] == s for at in rows) for s in range(ranks)] for rows in zones]
                pairs = [[n, sum(each[:s])] for each in by_source for s, n in enumerate(each)]
                assert counts[2 + 2 * shape.local :].tolist() == sum(pairs, [])
                found = np.from_dlpack(to.tokens())
                assert all(found[at] == sent[s][0][row] for at, (s, row, _) in expected.items())
            else:
                step = align if name == "packed" else 1
                offsets = np.cumsum([0] + [-(-len(zone) // step) * step for zone in zones])
                assert counts.tolist() == [offsets[-1], *map(len, zones), *offsets[:-1]]
                expected = {offsets[number] + at: place for number, zone in enumerate(zones) for at, place in enumerate(zone)}
            assert {at: places[at] for at in expected} == expected
            if name == "listed":
                with pytest.raises(gin.StateError, match="the layout has no rows of its own"):
                    to.rows()
                received.release()
                continue
            rows = np.from_dlpack(to.rows())
            assert rows.shape == (to.capacity, shape.hidden)
            assert all((rows[at] == row_of(*place)).all() for at, place in expected.items())
            if name == "packed":
                gaps = set(range(counts[0])) - set(expected)
                assert all(places[at] is None and not rows[at].any() for at in gaps)
            if name == "flat":
                # It has a row for each rank, and this group returns one for each id.
                with pytest.raises(ValueError, match="a combine of a layout that has not the returned rows"):
                    received.combine(stream, Combine.plain(np.zeros((max_tokens, 8), np.float32)), to)
                continue
            # Experts in place or into other memory.
            results = rows if name == "packed" else np.zeros_like(rows)
            for at, (s, row, k) in expected.items():
                results[at] = row_of(s, row) * np.float32(sent[s][1][row, k] + 1)
            output, bias = np.ones((max_tokens, 8), np.float32), np.full((max_tokens, 8), 3, np.float32)
            weighted = name == "packed"
            sums = (
                Combine.weighted(mine.weights, output)
                if weighted
                else Combine.plain(output, bias=bias, accumulate=True)
            )
            received.combine(stream, sums, to if weighted else (to, results))
            stream.synchronize()
            for token, ids in enumerate(mine.ids):
                total = np.zeros(8, np.float32) if weighted else np.full(8, 4, np.float32)
                for k, id in enumerate(ids):
                    if id >= 0:
                        term = mine.rows[token] * np.float32(id % shape.local + 1)
                        # The kernel multiplies and adds with one rounding.
                        factor = np.float64(mine.weights[token, k]) if weighted else np.float64(1)
                        total = (total.astype(np.float64) + term.astype(np.float64) * factor).astype(np.float32)
                assert np.allclose(output[token], total, rtol=1e-6, atol=1e-6), (name, token)
        group.destroy()
        comm.destroy()

    virtual(ranks, body)


def test_a_layout_is_stored_in_tensors_of_the_program():
    """The columns of given scales, in memory of the group and in tensors."""
    shape, room = Shape(2, 4, 2, 64), 6

    def body(rank):
        element = Element.opaque(16, 12)
        with rank.communicator() as comm, Group(comm, shape.config(tokens=room, element=element)) as group:
            stream, slot, zone = rank.stream(), group.slot(0), 2 * room
            make = lambda source: np.random.default_rng(source).integers(0, 256, (room, 28), np.uint8)
            mine = make(rank.rank)
            rows, scales = mine[:, :16].copy(), mine[:, 16:].copy()
            # Each token has two experts of one rank.
            ids = np.array([[token % 4, token % 4 ^ 1] for token in range(room)], np.int32)
            assert group.expands
            own = Permuted(group, Layout.EXPERT_MAJOR_FIXED)
            places = Permuted.without_rows(group, Layout.EXPERT_MAJOR_FIXED)
            for read in (places.rows, places.scales, places.tokens):
                with pytest.raises(gin.StateError, match="the layout has no"):
                    read()
            arrays = dict(
                rows=np.full((2, zone, 16), 7, np.uint8),
                scales=np.full((2, 3, zone), 7, np.int32),
                tokens=np.full(2 * zone, 7, np.int32),
                counts=np.full(2 + 2 * 2 * 3, 7, np.int32),
            )
            for to in (own, places.with_memory(group, **arrays)):
                received, _ = slot.exchange_into(stream, Tokens(rows, ids, scales=scales), to)
                stream.synchronize()
                assert group.status() is None
                received.release()
                found = {name: np.from_dlpack(getattr(to, name)()).reshape(arrays[name].shape) for name in ("rows", "scales", "tokens", "counts")}
                assert to is own or all((found[name] == arrays[name]).all() for name in arrays)
                here = [token for token in range(room) if token % 4 // 2 == rank.rank]
                for expert in range(2):
                    at = 0
                    for source in range(2):
                        for token in here:
                            each = make(source)[token]
                            assert (found["rows"][expert, at] == each[:16]).all()
                            assert (found["scales"][expert, :, at].copy().view(np.uint8) == each[16:]).all()
                            assert found["tokens"][expert * zone + at] == token
                            at += 1
                    assert found["counts"][1 + expert] == at
            for wrong, text in (
                (dict(rows=arrays["rows"][:1]), "the memory of permuted rows has 192 bytes, 384 are needed"),
                (dict(tokens=arrays["tokens"]), "add memory for the rows"),
                (dict(rows=np.float32(1)), "the tensor of rows"),
                (dict(counts=np.zeros(14, np.float32)), "the tensor of counts has elements of float32"),
            ):
                with pytest.raises((ValueError, TypeError), match=text):
                    places.with_memory(group, **wrong)
            with pytest.raises(ValueError, match="use the layout with fixed zones"):
                Permuted(group, Layout.FLAT, 4).with_memory(group, tokens=arrays["tokens"])
            del slot

    virtual(2, body)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_group_keeps_the_tensors_of_its_calls_or_leaves_that_to_the_program(keeps):
    def body(rank):
        comm = rank.communicator()
        group = Group(comm, Shape(1, 1, 1, 4).config(tokens=1, element=Element.F32), keeps_tensors=keeps)
        stream, slot = rank.stream(), group.slot(0)
        rows, ids, output = np.full((1, 4), 3, np.float32), np.zeros((1, 1), np.int32), np.zeros((1, 4), np.float32)
        gone = [weakref.ref(each) for each in (rows, ids, output)]
        slot.exchange(stream, Tokens(rows, ids)).combine(stream, Combine.reduced(output))
        stream.synchronize()
        assert (output == 3).all()
        del rows, ids, output
        gc.collect()
        assert [ref() is None for ref in gone] == [not keeps] * 3
        group.destroy()
        gc.collect()
        assert all(ref() is None for ref in gone)

    virtual(1, body)


def test_rows_come_back_from_other_memory_and_by_id():
    shape, max_tokens = Shape(2, 2, 2, 4), 4

    def body(rank):
        with rank.communicator() as comm:
            stream = rank.stream()
            for combine_at_source in (False, True):
                with Group(comm, shape.config(tokens=max_tokens, element=Element.F32, combine_at_source=combine_at_source)) as group:
                    slot, output = group.slot(0), np.zeros((1, 4), np.float32)
                    rows, ids = np.full((1, 4), rank.rank + 1, np.float32), np.array([[0, 1]], np.int64)
                    received = slot.exchange(stream, Tokens(rows, ids))
                    back = np.full((2 * max_tokens * (2 if combine_at_source else 1), 4), 10 * (rank.rank + 1), np.float32)
                    received.combine(stream, (Combine.plain if combine_at_source else Combine.reduced)(output), back)
                    stream.synchronize()
                    assert group.status() is None and (output == 30).all(), output

    virtual(2, body)


def test_a_plan_serves_several_dispatches():
    kind, shape, max_tokens = KINDS["F32"], Shape(2, 4, 2, 8), 40

    def body(rank):
        with rank.communicator() as comm, Group(comm, shape.config(tokens=max_tokens, element=kind.element)) as group:
            stream, slot = rank.stream(), group.slot(0)
            mine = Batch(shape, kind, rank.rank, 0, max_tokens - 3)
            tokens = lambda **options: Tokens(mine.rows, mine.ids, weights=mine.weights, **options)
            plan = slot.plan(stream, tokens())
            outputs = []
            for planned in (plan, plan, None):
                output = np.zeros_like(mine.rows)
                received = slot.exchange(stream, tokens(planned=planned))
                stream.synchronize()
                run_experts(kind, received)
                received.combine(stream, Combine.reduced(output))
                stream.synchronize()
                outputs.append(output)
            assert all(same(output, reduced(shape, kind, mine)) for output in outputs)
            assert group.status() is None

    virtual(2, body)


@pytest.mark.parametrize("element", [Element.E4M3_F32, Element.E4M3_F32_POWERS, Element.E4M3_UE8M0])
def test_dispatches_make_fp8_with_scales(element):
    shape, powers, bytes_of_scales = Shape(2, 2, 1, 256), element != Element.E4M3_F32, element == Element.E4M3_UE8M0

    def body(rank):
        with rank.communicator() as comm, Group(comm, shape.config(tokens=4, element=element)) as group:
            stream, slot = rank.stream(), group.slot(0)
            values = widen(narrow(np.random.default_rng(rank.rank).normal(size=(4, 256)).astype(np.float32)))
            # All rows go to the other rank.
            ids = np.full((4, 1), 1 - rank.rank, np.int32)
            received = slot.exchange(stream, Tokens(narrow(values), ids))
            stream.synchronize()
            assert (received.rows().dtype, received.scales().dtype) == ("float8_e4m3fn", "uint8" if bytes_of_scales else "float32")
            sent = widen(narrow(np.random.default_rng(1 - rank.rank).normal(size=(4, 256)).astype(np.float32)))
            bits = np.from_dlpack(received.rows("uint8"))[1 - rank.rank].astype(np.int32)
            exponent, fraction = bits >> 3 & 15, bits & 7
            magnitude = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
            scales = np.from_dlpack(received.scales())[1 - rank.rank]
            scales = 2.0 ** (scales.astype(np.float64) - 127) if bytes_of_scales else scales.astype(np.float64)
            assert not powers or (np.log2(scales) % 1 == 0).all()
            greatest = abs(sent).reshape(4, 2, 128).max(-1)
            if not powers:
                assert np.allclose(scales, greatest / 448, rtol=1e-6)
            assert (scales >= greatest / 448 * 0.999).all() and (scales < greatest / 448 * 2.001).all()
            found = np.where(bits >> 7, -magnitude, magnitude).reshape(4, 2, 128) * scales[..., None]
            # Half of the last of four bits, or half of the least number.
            limit = np.maximum(abs(sent).reshape(4, 2, 128) / 16, scales[..., None] * 2.0**-10)
            assert (abs(found - sent.reshape(4, 2, 128)) <= limit * 1.001).all()
            # BF16 come back, from memory of the experts.
            back, output = np.zeros((8, 256), np.uint16), np.ones((4, 256), np.uint16)
            back.reshape(2, 4, 256)[1 - rank.rank] = narrow(found.reshape(4, 256).astype(np.float32))
            with pytest.raises(TypeError, match="the output has elements of float32; the group takes bfloat16 or uint16"):
                received.combine(stream, Combine.reduced(values), back)
            received.combine(stream, Combine.reduced(output), back)
            stream.synchronize()
            assert np.allclose(widen(output), values, rtol=0.1, atol=0.02)

    virtual(2, body)


def test_a_sum_of_fp32_rows_is_rounded_once():
    shape = Shape(2, 2, 2, 8)

    def body(rank):
        config = shape.config(tokens=1, combine_f32=True)
        assert config.footprint(2) == shape.config(tokens=1).footprint(2) + 2 * 2 * 16
        with rank.communicator() as comm, Group(comm, config) as group:
            stream, slot = rank.stream(), group.slot(0)
            rows, ids = narrow(np.full((1, 8), 3, np.float32)), np.array([[0, 1]], np.int32)
            # From 128 on, BF16 are integers.
            back, output = np.full((2, 8), [138.625, 0.71875][rank.rank], np.float32), np.zeros((1, 8), np.uint16)
            received = slot.exchange(stream, Tokens(rows, ids))
            with pytest.raises(TypeError, match="the tensor of rows has elements of uint16; the group takes float32"):
                received.combine(stream, Combine.reduced(output), narrow(back))
            with pytest.raises(TypeError, match="the output has elements of float32; the group takes bfloat16 or uint16"):
                received.combine(stream, Combine.reduced(back), back)
            received.combine(stream, Combine.reduced(output), back)
            stream.synchronize()
            assert group.status() is None and (widen(output) == 139).all()

    virtual(2, body)


def test_opaque_rows_travel_with_their_scales():
    shape = Shape(2, 2, 1, 16)

    def body(rank):
        element = Element.opaque(32, 6)
        with rank.communicator() as comm, Group(comm, shape.config(tokens=4, element=element)) as group:
            stream, slot, other = rank.stream(), group.slot(0), 1 - rank.rank
            make = lambda rank: (np.arange(64, dtype=np.uint32).reshape(8, 8)[:3] + rank, np.full((3, 3), 5 + rank, np.int16))
            rows, scales = make(rank.rank)
            ids = np.full((3, 1), other, np.int32)
            with pytest.raises(ValueError, match="tokens without scales, which the group's rows have"):
                slot.exchange(stream, Tokens(rows, ids))
            with pytest.raises(ValueError, match=r"tokens.scales .*dimension 1 is 2, and must be 3 \(the scales of a row\)"):
                slot.exchange(stream, Tokens(rows, ids, scales=scales[:, :2].copy()))
            received = slot.exchange(stream, Tokens(rows, ids, scales=scales))
            stream.synchronize()
            rows, scales = make(other)
            assert (np.from_dlpack(received.rows("uint32"))[other, :3] == rows).all()
            assert (np.from_dlpack(received.scales("int16"))[other, :3] == scales).all()
            assert np.from_dlpack(received.rows()).shape == (2, 4, 32)
            with pytest.raises(ValueError, match="the scales of a row: 6 bytes are no multiple of the 4 bytes of float32"):
                received.scales("float32")

    virtual(2, body)


@pytest.mark.parametrize("wide", [False, True])
def test_metadata_of_a_layout_is_stored_in_tensors_of_the_program(wide):
    """Each rank has two experts; tokens have two ids, which may be of one rank."""
    shape, room = Shape(2, 4, 2, 16), 5

    def body(rank):
        element = Element.opaque(16, 8)
        with rank.communicator() as comm, Group(comm, shape.config(tokens=room, element=element)) as group:
            stream, slot = rank.stream(), group.slot(0)

            def make(source):
                random = np.random.default_rng(source)
                ids = np.array([random.permutation(4)[:2] for _ in range(room)], np.int32)
                scales = random.integers(0, 1 << 30, (room, 2), np.int32)
                return ids, random.random((room, 2)).astype(np.float32), scales

            ids, weights, scales = make(rank.rank)
            flat = Permuted(group, Layout.FLAT, 2 * room)
            received = slot.exchange(stream, Tokens(np.zeros((room, 16), np.uint8), ids, weights=weights, scales=scales))
            received.permute(stream, flat)
            into = dict(
                experts=np.full((2 * room, 2), 7, np.int64 if wide else np.int32),
                weights=np.full((2 * room, 2), 7, np.float32),
                scales=np.full((2 * room, 2), 7, np.int32),
                tokens=np.full(2 * room, 7, np.int32),
            )
            received.store_metadata(stream, flat, **into)
            stream.synchronize()
            row = 0
            for source in range(2):
                ids, weights, scales = make(source)
                for token in range(room):
                    here = ids[token] // 2 == rank.rank
                    if here.any():
                        assert into["tokens"][row] == token and (into["scales"][row] == scales[token]).all()
                        assert (into["experts"][row] == np.where(here, ids[token] % 2, -1)).all()
                        assert (into["weights"][row] == np.where(here, weights[token], 0)).all()
                        row += 1
            assert 0 < row and all((values[row:] == 7).all() for values in into.values())
            for wrong, text in (
                (dict(tokens=into["tokens"][1:]), "the memory of the tokens of rows has 36 bytes, 40 are needed"),
                (dict(experts=into["weights"]), "the tensor of experts has elements of float32"),
                (dict(weights=into["tokens"]), "the tensor of weights has elements of int32"),
                (dict(scales=np.float32(1)), "the tensor of scales"),
            ):
                with pytest.raises((ValueError, TypeError), match=text):
                    received.store_metadata(stream, flat, **wrong)
            packed = Permuted(group, Layout.expert_major_packed(1), 4 * room)
            received.permute(stream, packed)
            with pytest.raises(ValueError, match="the experts of an expert-major layout's rows: leave it out"):
                received.store_metadata(stream, packed, experts=into["experts"])
            received.release()
            with pytest.raises(gin.StateError, match="was combined or released before"):
                received.store_metadata(stream, flat)

    virtual(2, body)


def small(body, ranks=1, **options):
    """Runs with a group of one expert for each rank, rows of 8 FP32 and room for 4 tokens."""

    def inner(rank):
        with rank.communicator() as comm:
            options.setdefault("deadline", WAIT)
            with Group(comm, GroupConfig(ranks, 8, 1, tokens=4, element=Element.F32, threads=32, **options)) as group:
                return body(rank, comm, group, rank.stream())

    return virtual(ranks, inner)


def token(count=1, id=0):
    return Tokens(np.ones((count, 8), np.float32), np.full((count, 1), id, np.int32))


def test_calls_in_another_order_are_refused():
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        refused = lambda text: pytest.raises(gin.StateError, match=text)
        with refused("slot 0 is in use: an earlier call returned it; keep that slot, or drop it first"):
            group.slot(0)
        with refused("slot 7 is not there: the group has 2"):
            group.slot(7)
        sent = slot.dispatch(stream, token())
        for call in (slot.dispatch, slot.exchange, slot.plan):
            with refused("the last dispatch of slot 0 was not received; call `receive` on the value that `dispatch` returns"):
                call(stream, token())
        for call in (group.destroy, group.readmit):
            with refused("cannot .*: the last dispatch of slot 0 was not received"):
                call()
        received = sent.receive(stream)
        with refused("the dispatch was received before"):
            sent.receive(stream)
        with refused("slot 0 still has received rows: call `combine` or `release` first"):
            slot.dispatch(stream, token())
        # Another slot is independent.
        other = group.slot(1)
        other.exchange(stream, token()).release()
        received.combine(stream, Combine.reduced(output))
        to = Permuted(group, Layout.FLAT, 4)
        for call in (
            lambda: received.combine(stream, Combine.reduced(output)),
            received.release,
            received.rows,
            lambda: received.permute(stream, to),
        ):
            with refused("it was combined or released before"):
                call()
        with refused("the dispatch was received before"):
            sent.receive(stream)
        # A dropped value releases its rows, and an old one does not end a new dispatch.
        slot.exchange(stream, token())
        again = slot.exchange(stream, token())
        with refused("it was combined or released before"):
            received.release()
        del received
        gc.collect()
        assert again.counts().shape == (1,)
        again.release()
        # A dispatch that nobody can receive any more.
        slot.dispatch(stream, token())
        with refused("the last dispatch of slot 0 was not received"):
            slot.exchange(stream, token())
        del slot, sent, again
        gc.collect()
        slot = group.slot(0)
        stream.synchronize()
        group.destroy()
        for call in (lambda: group.slot(0), group.status, group.destroy, lambda: group.blocks):
            with refused("the group is destroyed"):
                call()
        with refused("slot 0 has ended with its group"):
            slot.exchange(stream, token())

    small(body, slots=2)


def test_a_group_ends_with_its_communicator_and_memory_of_views_stays():
    def body(rank):
        comm = rank.communicator()
        group = Group(comm, GroupConfig(1, 8, 1, tokens=4, element=Element.F32, deadline=WAIT))
        stream, slot = rank.stream(), group.slot(0)
        received = slot.exchange(stream, token(2))
        stream.synchronize()
        rows = np.from_dlpack(received.rows())
        received.release()
        comm.destroy()
        for call in (lambda: slot.exchange(stream, token()), group.status, lambda: Group(comm, GroupConfig(1, 8, 1))):
            with pytest.raises(gin.StateError, match="cannot .*: the communicator is destroyed"):
                call()
        del slot, received, group, comm
        gc.collect()
        assert (rows[0, :2] == 1).all()
        rows[:] = 3
        return rows

    assert (virtual(1, body)[0] == 3).all()


def test_with_destroys_a_group():
    def body(rank):
        with rank.communicator() as comm:
            with Group(comm, GroupConfig(1, 8, 1, tokens=4, element=Element.F32, deadline=WAIT)) as group:
                assert group.status() is None
            with pytest.raises(gin.StateError, match="the group is destroyed"):
                group.status()

    virtual(1, body)


def test_tensors_are_checked_with_the_dimension_and_the_limit():
    def body(rank, comm, group, stream):
        slot = group.slot(0)
        rows, ids, weights = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
        for tokens, kind, text in [
            ((rows[:, :4].copy(), ids), ValueError, r"tokens.rows has the shape \[4, 4\]: dimension 1 is 4, and must be 8"),
            ((rows.reshape(-1), ids), ValueError, r"tokens.rows has the shape \[32\], and must have 2 dimensions: at least 32 \(the tokens\), 8 \(the elements of a row\)"),
            ((rows.astype(np.float64), ids), TypeError, "tokens.rows has elements of float64; the group takes float32"),
            ((rows[:, ::2], ids), ValueError, "tokens.rows is not contiguous"),
            ((rows, ids[:2].copy()), ValueError, r"tokens.ids .*dimension 0 is 2, and must be at least 4 \(the tokens\)"),
            ((rows, ids.astype(np.uint32)), TypeError, "tokens.ids has elements of uint32; .* takes int32 or int64"),
            ((rows, ids.reshape(2, 2)), ValueError, "tokens.ids .*dimension 0 is 2"),
            ((rows, ids, 9), ValueError, "tokens.rows .*dimension 0 is 4, and must be at least 9"),
            ((rows[:2].copy(), ids, 3), ValueError, "tokens.rows .*dimension 0 is 2, and must be at least 3"),
            ((rows, ids, -1), ValueError, "tokens.count is -1, and must be the number of tokens"),
            ((rows, ids, 1.5), ValueError, "tokens.count is 1.5, and must be the number of tokens"),
            ((rows, ids, np.array([1, 2])), TypeError, "tokens.count has elements of int64; .* takes int32 or uint32"),
            ((rows, ids, np.array([1, 2], np.int32)), ValueError, r"tokens.count .*must be 1 \(one number\)"),
            (([1, 2], ids), TypeError, "tokens.rows is a `list`, which has no `__dlpack__`"),
        ]:
            with pytest.raises(kind, match=text):
                slot.exchange(stream, Tokens(*tokens))
        with pytest.raises(TypeError, match="tokens.weights has elements of float64"):
            slot.exchange(stream, Tokens(rows, ids, weights=weights.astype(np.float64)))
        with pytest.raises(ValueError, match=r"only `Element.opaque\(row_bytes, scale_bytes\)` takes them"):
            slot.exchange(stream, Tokens(rows, ids, scales=np.zeros((4, 0), np.uint8)))
        shifted = np.zeros(4 * 8 + 4, np.float32)
        shifted = shifted[next(at for at in range(1, 4) if shifted[at:].ctypes.data % 16):][: 4 * 8].reshape(4, 8)
        with pytest.raises(ValueError, match="the memory of rows begins (4|8|12) bytes past a multiple of 16; it must begin at such a multiple"):
            slot.exchange(stream, Tokens(shifted, ids))
        received = slot.exchange(stream, Tokens(rows, ids))
        for combine, back, kind, text in [
            (Combine.reduced(rows[:3].copy()), None, ValueError, r"the output .*dimension 0 is 3, .* at least 4"),
            (Combine.reduced(rows, bias=rows[:, :4].copy()), None, ValueError, "the bias .*dimension 1 is 4, and must be 8"),
            (Combine.reduced(rows), rows[:1].copy(), ValueError, "the tensor of rows .*dimension 0 is 1, .* at least 4"),
            (Combine.weighted(ids, rows), None, TypeError, "the tensor of weights has elements of int32"),
        ]:
            with pytest.raises(kind, match=text):
                received.combine(stream, combine, back)
        with pytest.raises(ValueError, match="configure `combine_at_source`, or use `Combine.reduced`"):
            received.combine(stream, Combine.plain(rows))
        with pytest.raises(gin.StateError, match="combined or released before"):
            received.release()
        with pytest.raises(ValueError, match="pass the maximum number of rows of the layout"):
            Permuted(group, Layout.FLAT)
        with pytest.raises(ValueError, match="the alignment of zones is 3; the limit is a power of two"):
            Permuted(group, Layout.expert_major_packed(3), 4)
        stream.synchronize()
        assert group.status() is None

    small(body)


def test_more_tokens_than_the_group_has_room_for_are_refused_before_anything_is_sent():
    def body(rank, comm, group, stream):
        slot = group.slot(0)
        rows, ids, output = np.ones((129, 8), np.float32), np.zeros((129, 1), np.int32), np.full((129, 8), np.nan, np.float32)
        text = "the number of tokens of a batch is {}; the limit is at most 128, for which the group has room; .* `tokens`"
        calls = [slot.dispatch, slot.exchange, slot.plan, lambda *args: slot.fuse(*args, Combine.reduced(output))]
        calls += [lambda *args: slot.exchange_into(*args, Permuted(group, Layout.FLAT, 129))]
        for count in (None, 129, 2**32 - 1):
            few = r"tokens.rows .*dimension 0 is 129, and must be at least 4294967295 \(the tokens\)"
            for call in calls:
                with pytest.raises(ValueError, match=text.format(129) if count in (None, 129) else few):
                    call(stream, Tokens(rows, ids, count))
        # The tensors may be larger than their batch, and the group has room for this one.
        slot.exchange(stream, Tokens(rows, ids, 128)).combine(stream, Combine.reduced(output))
        with pytest.raises(ValueError, match=r"the output .*dimension 0 is 127, and must be at least 128 \(the tokens\)"):
            slot.exchange(stream, Tokens(rows, ids, 128)).combine(stream, Combine.reduced(output[:127].copy()))
        stream.synchronize()
        assert group.status() is None and (output[:128] == 1).all() and np.isnan(output[128]).all()

    def alone(rank):
        # 128 tokens are the default.
        with rank.communicator() as comm, Group(comm, GroupConfig(1, 8, 1, element=Element.F32, deadline=WAIT)) as group:
            body(rank, comm, group, rank.stream())

    virtual(1, alone)


@pytest.mark.parametrize("count", [9, -1, -(2**31)])
def test_a_number_of_tokens_on_the_device_that_does_not_fit_is_reported(count):
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.full((4, 8), 7, np.float32)
        tokens = Tokens(np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32), np.array([count], np.int32))
        received = slot.exchange(stream, tokens)
        assert np.from_dlpack(received.counts()).tolist() == [4 if count > 0 else 0]
        received.combine(stream, Combine.reduced(output))
        stream.synchronize()
        report = group.status()
        assert (report.code, report.limit, report.rank, report.seen) == ("TooManyTokens", 4, None, count % 2**32)
        some, none = "a batch has 9 tokens, .*", f"the number of tokens of a batch is {count} on the device; it has none"
        assert re.fullmatch(f"slot 0: {some if count > 0 else none}", str(report))
        assert (output == (1 if count > 0 else 7)).all()

    small(body)


@pytest.mark.parametrize("what", ["expert", "rank", "number"])
def test_a_report_that_nobody_has_read_is_raised(what):
    """By the next call that begins a dispatch, by `destroy`, and by the end of `with`."""
    ranks = 2 if what == "rank" else 1
    texts = {
        "expert": "slot 0: token 0 has the expert id 4294967296, there are 1 experts; the token was dropped",
        "rank": r"slot 0: rank 1 did not come to dispatch 1 in time, .*; the group goes on without it",
        "number": "slot 0: a batch has 9 tokens, the group has room for 4; the others were dropped",
    }
    text = f"an earlier call has left a report that nobody has read by `Group.status`: {texts[what]}"

    def body(rank):
        comm, stream = rank.communicator(), rank.stream()
        config = GroupConfig(ranks, 8, 1, tokens=4, element=Element.F32, deadline=gin.Deadline(0.2) if ranks > 1 else WAIT)
        outcomes, output = [], np.zeros((4, 8), np.float32)
        rows, ids = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int64)
        wrong = {
            "expert": lambda: Tokens(rows, np.array([[2**32], [0], [0], [0]])),
            "rank": lambda: Tokens(rows, ids),
            "number": lambda: Tokens(rows, ids, np.array([9], np.int32)),
        }[what]
        good = Tokens(rows, ids)
        for end in ("call", "destroy", "exit", "exception"):
            group = Group(comm, config)
            slot = group.slot(0)
            if rank.rank == 0:
                # The combine of the dispatch works all the same.
                slot.exchange(stream, wrong()).combine(stream, Combine.reduced(output))
                stream.synchronize(timeout=60)
            rank.barrier()
            if rank.rank == 1:
                if end != "exception":
                    group.destroy()
            elif end == "call":
                for call in (slot.dispatch, slot.exchange, slot.plan):
                    with pytest.raises(gin.Error, match=text):
                        call(stream, good)
                with pytest.raises(gin.Error, match=text):
                    slot.fuse(stream, good, Combine.reduced(output))
                with pytest.raises(gin.Error, match=text):
                    slot.exchange_into(stream, good, Permuted(group, Layout.FLAT, 4 * ranks))
                # Another slot than that of the report would work, and the group goes on once the report is read.
                assert str(group.status()) in text or what == "rank"
                assert group.status() is None
                slot.exchange(stream, good).combine(stream, Combine.reduced(output))
                stream.synchronize(timeout=60)
                assert (output == 1).all()
                group.destroy()
            elif end == "destroy":
                with pytest.raises(gin.Error, match=text):
                    group.destroy()
                with pytest.raises(gin.StateError, match="the group is destroyed"):
                    group.status()
            elif end == "exit":
                with pytest.raises(gin.Error, match=text):
                    with group:
                        pass
            else:
                # Another exception is not hidden. The group is left to its communicator.
                with pytest.raises(KeyError):
                    with group:
                        raise KeyError
                del slot, group
                gc.collect()
        if ranks == 1:
            comm.destroy()

    virtual(ranks, body)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_out_of_range_are_reported_as_given_and_any_negative_one_is_none(dtype):
    def body(rank, comm, group, stream):
        slot = group.slot(0)
        largest = np.iinfo(dtype).max
        for id in (1, 2**31 - 1, 2**31, 2**32, largest):
            if id > largest:
                continue
            slot.exchange(stream, Tokens(np.ones((2, 8), np.float32), np.array([[0], [id]], dtype))).release()
            stream.synchronize()
            report = group.status()
            assert (report.code, report.expert, report.seen) == ("UnknownExpert", id, 1)
            assert str(report) == f"slot 0: token 1 has the expert id {id}, there are 1 experts; the token was dropped"
        for id in (-1, -7, -(2**31), np.iinfo(dtype).min):
            received = slot.exchange(stream, Tokens(np.ones((2, 8), np.float32), np.array([[0], [id]], dtype)))
            assert np.from_dlpack(received.counts()).tolist() == [1]
            received.release()
            stream.synchronize()
            assert group.status() is None

    small(body)


def test_views_wait_for_the_kernels_that_write_them():
    """The memory of a virtual GPU is a tensor of the CPU, whose reader has no stream."""

    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        to = Permuted(group, Layout.FLAT, 8)
        for round in range(4):
            # The other rank is late, so the kernel is under way.
            if rank.rank == 1:
                time.sleep(0.1)
            if round % 2:
                received, _ = slot.exchange_into(stream, token(4, id=1 - rank.rank), to)
            else:
                received = slot.exchange(stream, token(4, id=1 - rank.rank))
            assert np.from_dlpack(received.counts()).tolist() == ([0, 4] if rank.rank == 0 else [4, 0])
            assert (np.from_dlpack(received.rows())[1 - rank.rank] == 1).all()
            assert (np.from_dlpack(received.tokens())[1 - rank.rank] == range(4)).all()
            # A kernel of the program that takes the rows, and the layout.
            stream.launch("scale_received", received, 8, 3.0)
            assert (np.from_dlpack(received.rows())[1 - rank.rank] == 3).all()
            if round % 2 == 0:
                received.permute(stream, to)
            assert to.fetch_counts() == [4] and np.from_dlpack(to.counts()).tolist() == [4]
            assert (np.from_dlpack(to.rows())[:4] == (1 if round % 2 else 3)).all()
            received.combine(stream, Combine.reduced(output))
            stream.synchronize()
            assert group.status() is None and (output == 3).all()

    small(body, ranks=2)


def test_a_view_that_a_kernel_takes_is_not_waited_for():
    def body(rank, comm, group, stream):
        slot, output, to = group.slot(0), np.zeros((4, 8), np.float32), Permuted(group, Layout.FLAT, 8)
        if rank.rank == 1:
            # The other rank comes here after all its calls, while its kernels wait for this one.
            rank.barrier()
        received = slot.exchange(stream, token(4, id=1 - rank.rank))
        received.permute(stream, to)
        received.combine(stream, Combine.reduced(output), (to, to.rows()))
        if rank.rank == 0:
            assert not stream.is_idle()
            rank.barrier()
        stream.synchronize()
        assert group.status() is None and (output == 1).all()

    small(body, ranks=2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_large_batches_agree_with_numpy_and_rows_past_max_rows_are_reported(ranks, name):
    kind, shape, max_tokens = KINDS[name], Shape(ranks, 2 * ranks + 1, 3, 16), 9
    batches = [[Batch(shape, kind, each, round, max_tokens - (each + round) % 3) for each in range(ranks)] for round in range(4)]
    sent = [[list(arriving(shape, all, rank)) for rank in range(ranks)] for all in batches]
    received_by = lambda round, rank: sum(len(tokens) for tokens, _ in sent[round][rank])
    room = max(received_by(round, rank) for round in range(4) for rank in range(ranks))
    # The tokens of a rank in each round, or all. Few fit into every region.
    few = [3, None, 3, None]

    def body(rank):
        stream, me, reports = rank.stream(), rank.rank, 0
        with rank.communicator() as comm:
            for max_rows in (room, room - 1, 3 * ranks):
                config = shape.config(tokens=max_tokens, element=kind.element, max_rows=max_rows)
                with Group(comm, config) as group:
                    slot = group.slot(0)
                    plans = [slot.plan(stream, Tokens(mine[me].rows, mine[me].ids)) for mine in batches]
                    for round in range(4):
                        cut = [batch.first(few[round]) for batch in batches[round]]
                        there = [list(arriving(shape, cut, each)) for each in range(ranks)]
                        offsets = [np.cumsum([0] + [len(tokens) for tokens, _ in each]) for each in there]
                        mine, plan = cut[me], None if few[round] else plans[round]
                        tokens = Tokens(mine.rows, mine.ids, weights=mine.weights, planned=plan)
                        if round < 2:
                            received = slot.dispatch(stream, tokens).receive(stream)
                        else:
                            received = slot.exchange(stream, tokens)
                        stream.synchronize()
                        view = lambda what: np.from_dlpack(what)
                        rows, counts, starts = view(received.rows(kind.dtype)), view(received.counts()), view(received.offsets())
                        assert rows.shape == (max_rows, shape.hidden) and view(received.tokens()).shape == (max_rows,)
                        assert view(received.experts()).shape == (max_rows, shape.topk)
                        region = view(received.region(kind.dtype))
                        assert region.shape == rows.shape and region.__array_interface__["data"] == rows.__array_interface__["data"]
                        for source, (which, experts) in enumerate(there[me]):
                            first = offsets[me][source]
                            count = max(0, min(len(which), max_rows - first))
                            assert (starts[source], counts[source]) == (first, count)
                            here, which, experts = slice(first, first + count), which[:count], experts[:count]
                            assert same(rows[here], cut[source].rows[which])
                            assert (view(received.tokens())[here] == which).all()
                            assert (view(received.experts())[here] == experts).all()
                            weights = view(received.weights())[here]
                            assert (weights[experts >= 0] == cut[source].weights[which][experts >= 0]).all()
                            rows[here] = expert(kind, rows[here], experts, weights)
                        output = np.full((max_tokens, shape.hidden), 7, kind.dtype)
                        received.combine(stream, Combine.reduced(output))
                        stream.synchronize()

                        def arrives(token, to):
                            place = np.flatnonzero(there[to][me][0] == token)[0]
                            return offsets[to][me] + place < max_rows

                        count = len(mine.rows)
                        assert same(output[:count], reduced(shape, kind, mine, arrives)), (max_rows, round)
                        assert (output[count:] == 7).all()
                        # This rank as a receiver, or a receiver without room for all rows of this rank.
                        full = {(me, offsets[me][-1])} | {(to, offsets[to][me + 1]) for to in range(ranks) if len(there[to][me][0])}
                        full = {place for place in full if place[1] > max_rows}
                        report = group.status()
                        if not full:
                            assert report is None
                            continue
                        assert report.code == "Full" and report.limit == max_rows and (report.rank, report.seen) in full
                        assert "configure more by `max_rows`" in str(report)
                        assert group.status() is None and group.masked(0) == []
                        reports += 1
        return reports

    assert sum(virtual(ranks, body)) > 0


def test_a_flat_layout_of_a_shared_region_copies_nothing_and_other_memory_comes_back():
    kind, shape, max_tokens = KINDS["F32"], Shape(2, 4, 2, 8), 6

    def body(rank):
        with rank.communicator() as comm:
            config = shape.config(tokens=max_tokens, element=kind.element, max_rows=2 * max_tokens)
            with Group(comm, config) as group:
                stream, slot, me = rank.stream(), group.slot(0), rank.rank
                to = Permuted(group, Layout.FLAT, 2 * max_tokens)
                with pytest.raises(gin.StateError, match="the layout has no rows of its own"):
                    to.rows()
                for round in range(3):
                    batches = [Batch(shape, kind, each, round, max_tokens - each) for each in range(2)]
                    mine = batches[me]
                    sent = list(arriving(shape, batches, me))
                    received = slot.exchange(stream, Tokens(mine.rows, mine.ids, weights=mine.weights))
                    received.permute(stream, to)
                    stream.synchronize()
                    flat = [(source, row, 0) for source, (tokens, _) in enumerate(sent) for row in range(len(tokens))]
                    assert to.fetch_counts() == [len(flat)] and source_info(to)[: len(flat)] == flat
                    rows = np.concatenate([batches[s].rows[tokens] for s, (tokens, _) in enumerate(sent)])
                    results = np.zeros((2 * max_tokens, 8), np.float32)
                    experts = np.concatenate([experts for _, experts in sent])
                    weights = np.concatenate([batches[s].weights[tokens] for s, (tokens, _) in enumerate(sent)])
                    results[: len(flat)] = expert(kind, rows, experts, weights)
                    output = np.zeros_like(mine.rows)
                    # Into the region, from memory of rows, or from that in the places of the permuted rows.
                    if round == 0:
                        np.from_dlpack(received.region())[:] = results
                    received.combine(stream, Combine.reduced(output), [to, results, (to, results)][round])
                    stream.synchronize()
                    assert group.status() is None and same(output, reduced(shape, kind, mine))
                with pytest.raises(ValueError, match="a kernel with dispatch and combine in a group with `max_rows`"):
                    slot.fuse(stream, Tokens(mine.rows, mine.ids), Combine.reduced(output))
            with Group(comm, shape.config(tokens=max_tokens, element=kind.element)) as group:
                received = group.slot(0).exchange(stream, Tokens(mine.rows, mine.ids))
                assert received.region() is None
                with pytest.raises(ValueError, match="from row 0 on, in a group without `max_rows`"):
                    received.offsets()
                stream.synchronize()

    virtual(2, body)


def test_rows_that_are_longer_on_their_way_back_have_room_in_a_shared_region():
    shape = Shape(2, 2, 1, 128)

    def body(rank):
        config = shape.config(tokens=4, element=Element.E4M3_F32, max_rows=4)
        with rank.communicator() as comm, Group(comm, config) as group:
            stream, slot, other = rank.stream(), group.slot(0), 1 - rank.rank
            # The greatest magnitude is 448, so scales are 1 and FP8 has the values.
            values = np.tile(np.array([448, 1, -2, 0.5], np.float32), (3, 32)) * (1 - 2 * rank.rank)
            output, ids = np.zeros((3, 128), np.uint16), np.full((3, 1), other, np.int32)
            received = slot.exchange(stream, Tokens(narrow(values), ids))
            stream.synchronize()
            rows, scales = np.from_dlpack(received.rows("uint8")), np.from_dlpack(received.scales())
            assert rows.shape == (4, 128) and rows.strides == (256, 1) and (scales[:3] == 1).all()
            back = np.from_dlpack(received.region("uint16"))
            assert received.region().dtype == "bfloat16" and back.shape == (4, 128)
            codes = {0x7E: 448, 0x38: 1, 0x40: 2, 0x30: 0.5}
            found = np.array([[codes[code & 0x7F] * (-1 if code >> 7 else 1) for code in row] for row in rows[:3].tolist()])
            back[:3] = narrow(found * np.float32(2))
            received.combine(stream, Combine.reduced(output))
            stream.synchronize()
            assert group.status() is None and (widen(output) == 2 * values).all()

    virtual(2, body)


def test_configurations_are_checked_and_have_a_footprint():
    config = GroupConfig(256, 7168, 8, tokens=128)
    assert config.footprint(2) == 14_725_504 and config == GroupConfig(256, 7168, 8)
    assert GroupConfig(256, 7168, 8, tokens=4096, max_rows=4096).footprint(8) == 59_184_160
    for wrong, text in [
        (GroupConfig(0, 8, 1), "the number of experts is 0; the limit is at least 1"),
        (GroupConfig(2, 8, 33), "the number of experts of a token is 33; the limit is at most 32"),
        (GroupConfig(2, 8, 1, tokens=70_000), "the number of tokens is 70000; the limit is at most 65536"),
        (GroupConfig(2, 7, 1), "`hidden`, .* is 7; the limit is a multiple of 8, at most 32768: pad rows with zeros to 8 elements"),
        (GroupConfig(2, 64, 1, element=Element.E4M3_F32), "a multiple of 128"),
        (GroupConfig(2, 8, 1, tokens=4, max_rows=0), "`max_rows` is 0; the limit is 1 to 8, which is all that 2 ranks with 4 tokens send"),
        (GroupConfig(2, 8, 1, tokens=4, max_rows=9), "`max_rows` is 9; the limit is 1 to 8"),
        (GroupConfig(2, 8, 1, tokens=4, max_rows=8, combine_at_source=True), "leave out `combine_at_source`, or `max_rows`"),
        (GroupConfig(2, 8, 1, element=Element.F16, combine_f32=True), "leave out `combine_f32`"),
    ]:
        with pytest.raises(ValueError, match=text):
            wrong.footprint(2)

    def body(rank):
        with rank.communicator() as comm:
            with pytest.raises(gin.Error, match="rank . has another configuration than this rank: `experts` is . there and . here; all ranks pass the same"):
                Group(comm, GroupConfig(2 + rank.rank, 8, 1))

    virtual(2, body)


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_a_rank_without_tokens_passes_tensors_whose_address_is_null(ids):
    ways = ["exchange", "dispatch", "into", "plan", "count", "count of the device", "weights", "bias", "source", "max_rows", "fuse"]

    def body(rank):
        with rank.communicator() as comm:
            stream = rank.stream()
            for way in ways:
                options = {"source": {"combine_at_source": True}, "max_rows": {"max_rows": 8}}.get(way, {})
                config = GroupConfig(2, 8, 1, tokens=4, element=Element.F32, threads=32, grid=1, deadline=WAIT, **options)
                with Group(comm, config) as group:
                    slot, empty, sent = group.slot(0), rank.rank == 1, 4
                    make = lambda values: Null((0, *values.shape[1:]), str(values.dtype)) if empty else values
                    rows, output = make(np.ones((sent, 8), np.float32)), np.zeros((sent, 8), np.float32)
                    weights, bias = make(np.ones((sent, 1), np.float32)), make(np.full((sent, 8), 2, np.float32))
                    count = {"count": 0 if empty else sent, "count of the device": np.array([sent], np.int32)}.get(way)
                    if way == "count of the device":
                        # The memory of all tokens is needed there.
                        rows, empty = np.ones((sent, 8), np.float32), False
                        count[0] = sent if rank.rank == 0 else 0
                    tokens = lambda **more: Tokens(rows, make(np.ones((sent, 1), ids)), count, **more)
                    of = make(output)
                    if way == "fuse":
                        fused = slot.fuse(stream, tokens(), Combine.reduced(of))
                        stream.launch("exchange_scaled", *fused, 8, 1.0, block=32, shared=fused.shared)
                    elif way == "into":
                        received, _ = slot.exchange_into(stream, tokens(), Permuted(group, Layout.FLAT, 8))
                    elif way == "dispatch":
                        received = slot.dispatch(stream, tokens()).receive(stream)
                    else:
                        planned = slot.plan(stream, tokens()) if way == "plan" else None
                        received = slot.exchange(stream, tokens(planned=planned, weights=weights if way == "weights" else None))
                    if way != "fuse":
                        assert np.from_dlpack(received.counts()).tolist() == ([0, 0] if rank.rank == 0 else [4, 0]), way
                        back = np.ones((8, 8), np.float32) if way == "source" else None
                        sums = Combine.weighted(weights, of) if way == "source" else Combine.reduced(of)
                        received.combine(stream, Combine.reduced(of, bias=bias) if way == "bias" else sums, back)
                    stream.synchronize()
                    expected = (3 if way == "bias" else 1) if rank.rank == 0 else 0
                    assert group.status() is None and (output == expected).all(), (way, output)

    virtual(2, body)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("topk", [1, 3, 5, 7])
def test_odd_numbers_of_ids_blocks_and_threads_agree_with_numpy(topk, shared):
    kind, shape, max_tokens = KINDS["F32"], Shape(2, 5, topk, 8), 9

    def body(rank):
        stream, me = rank.stream(), rank.rank
        with rank.communicator() as comm:
            for grid in (1, 3, 7):
                for threads in (32, 96, 224):
                    config = shape.config(tokens=max_tokens, element=kind.element, max_rows=2 * max_tokens if shared else None, grid=grid, threads=threads)
                    with Group(comm, config) as group:
                        slot = group.slot(0)
                        for round in range(2):
                            mine = Batch(shape, kind, me, round, max_tokens - round * me)
                            received = slot.exchange(stream, Tokens(mine.rows, mine.ids, weights=mine.weights))
                            views = [received.rows(), received.counts(), received.experts(), received.weights()]
                            rows, counts, experts, weights = map(np.from_dlpack, views)
                            offsets = np.from_dlpack(received.offsets()) if shared else [0, 0]
                            for source, count in enumerate(counts):
                                part = slice(offsets[source], offsets[source] + count)
                                here = part if shared else (source, part)
                                rows[here] = expert(kind, rows[here], experts[here], weights[here])
                            output = np.zeros_like(mine.rows)
                            received.combine(stream, Combine.reduced(output))
                            stream.synchronize()
                            assert group.status() is None and same(output, reduced(shape, kind, mine)), (grid, threads, round)

    virtual(2, body)


def test_ids_have_two_types_and_one_layout():
    def body(rank, comm, group, stream):
        slot, rows = group.slot(0), np.ones((4, 8), np.float32)
        ids = np.zeros((4, 1), np.int64)
        for dtype in (np.int32, np.int64, np.uint32, np.uint64, np.int16, np.float32, bool):
            given = ids.astype(dtype)
            longer = np.zeros((4, 3), dtype)
            shifted = np.zeros(5, dtype)[1:].reshape(4, 1)
            if dtype not in (np.int32, np.int64):
                for wrong in (given, longer[:, 1:2], shifted):
                    with pytest.raises(TypeError, match=f"tokens.ids has elements of {given.dtype}; the group takes int32 or int64"):
                        slot.exchange(stream, Tokens(rows, wrong))
                continue
            with pytest.raises(ValueError, match=r"tokens.ids is not contiguous \(shape \[4, 1\], strides \[3, 1\]\)"):
                slot.exchange(stream, Tokens(rows, longer[:, 1:2]))
            for right in (given, shifted):
                received = slot.exchange(stream, Tokens(rows, right))
                assert np.from_dlpack(received.counts()).tolist() == [4]
                received.release()
        stream.synchronize()

    small(body)


def test_a_slot_keeps_tensors_and_lets_them_go():
    def body(rank, comm, group, stream):
        slot = group.slot(0)
        gone = []

        def pair():
            rows, ids, output = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32), np.zeros((4, 8), np.float32)
            gone.extend(map(weakref.ref, (rows, ids, output)))
            slot.exchange(stream, Tokens(rows, ids)).combine(stream, Combine.reduced(output))

        pair()
        gc.collect()
        assert all(ref() is not None for ref in gone)
        # The slot looks from time to time which kernels are done.
        for _ in range(60):
            pair()
            stream.synchronize()
        gc.collect()
        assert all(ref() is None for ref in gone[:3]) and sum(ref() is not None for ref in gone) < 40
        del slot
        gc.collect()
        assert all(ref() is None for ref in gone)
        # The same tensors again and again are kept once.
        slot, rows, ids = group.slot(0), np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32)
        for _ in range(200):
            slot.exchange(stream, Tokens(rows, ids)).combine(stream, Combine.reduced(rows))
        stream.synchronize()
        assert (rows == 1).all() and group.status() is None

    small(body)


def test_received_and_permuted_rows_are_arguments_of_kernels():
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        received = slot.exchange(stream, token(4))
        stream.launch("scale_received", received, 8, 3.0, grid=2)
        to = Permuted(group, Layout.FLAT, 6)
        permuted = received.permute(stream, to)
        for wrong, text in [(permuted, "`received: ReceivedRows`: a `gincomm.ep.PermutedRows` was given"), (to, "a `Permuted` was given")]:
            with pytest.raises(TypeError, match=text):
                stream.launch("scale_received", wrong, 8, 3.0)
        stream.launch("scale_permuted", permuted, 8, 5.0, grid=2)
        received.combine(stream, Combine.reduced(output), to)
        for kernel, value in [("scale_received", received), ("scale_permuted", permuted)]:
            with pytest.raises(gin.StateError, match="cannot be passed to a kernel: it was combined or released"):
                stream.launch(kernel, value, 8, 3.0)
        stream.synchronize()
        assert (output == 15).all() and group.status() is None
        # A launch keeps the memory, and not the rows: dropping the object releases them.
        received = slot.exchange(stream, token(4))
        stream.launch("scale_received", received, 8, 3.0)
        del received
        slot.exchange(stream, token(4)).combine(stream, Combine.reduced(output))
        stream.synchronize()
        assert (output == 1).all()

    small(body)


def test_a_kernel_of_the_program_dispatches_and_combines_by_the_parameters_of_fuse():
    ranks = 2

    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        for round in range(1, 5):
            # Token i of a rank goes to the expert of rank i % 2, which multiplies it.
            rows = np.full((4, 8), 10 * rank.rank + round, np.float32)
            tokens = Tokens(rows, np.arange(4, dtype=np.int32).reshape(4, 1) % ranks)
            fused = slot.fuse(stream, tokens, Combine.reduced(output))
            launch = lambda *args: stream.launch("exchange_scaled", *args, 8, rank.rank + 2.0, block=64, shared=fused.shared)
            if round % 2:
                launch(*fused)
            else:
                launch(fused.comm, fused.arena, fused.slot, fused.tokens, fused.sums)
            stream.synchronize()
            assert (output == rows * np.array([[2], [3], [2], [3]])).all() and group.status() is None
        # The parameters count for several launches, until the slot does something else.
        output[:] = 0
        launch(*fused)
        launch(*fused)
        received = slot.exchange(stream, tokens)
        for call in (lambda: launch(*fused), lambda: slot.fuse(stream, tokens, Combine.reduced(output))):
            with pytest.raises(gin.StateError, match="slot 0 still has received rows"):
                call()
        found = np.from_dlpack(received.rows())
        assert all((found[source, :2] == 10 * source + round).all() for source in range(ranks))
        received.combine(stream, Combine.reduced(np.zeros((4, 8), np.float32)))
        with pytest.raises(gin.StateError, match="slot 0 was used since `fuse`"):
            launch(*fused)
        stream.synchronize()
        assert (output == rows * np.array([[2], [3], [2], [3]])).all()
        fused = slot.fuse(stream, tokens, Combine.reduced(output))
        for wrong, text in [
            ((fused.tokens, fused.arena, fused.slot, fused.tokens, fused.sums), "`comm: Comm`: the parameter `tokens` of `Slot.fuse` was given"),
            ((fused, fused.arena, fused.slot, fused.tokens, fused.sums), "a `Fused` was given; pass .*gincomm.ep.Slot.fuse"),
        ]:
            with pytest.raises(TypeError, match=text):
                launch(*wrong)
        assert repr(fused.sums) == "<gincomm.ep.Parameter `sums`>" and len(list(fused)) == 5
        with pytest.raises(ValueError, match="the output has the shape"):
            slot.fuse(stream, tokens, Combine.reduced(np.zeros((3, 8), np.float32)))
        return fused, stream

    for fused, stream in small(body, ranks, grid=1):
        with pytest.raises(gin.StateError, match="slot 0 has ended with its group"):
            stream.launch("exchange_scaled", *fused, 8, 1.0)


def test_a_launch_keeps_the_tensors_behind_the_parameters_of_fuse():
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        tokens = token(4)
        ref = weakref.ref(tokens.rows)
        fused = slot.fuse(stream, tokens, Combine.reduced(output))
        stream.launch("exchange_scaled", *fused, 8, 3.0, block=64, shared=fused.shared)
        del tokens, fused
        gc.collect()
        assert ref() is not None
        stream.synchronize()
        assert (output == 3).all()
        for _ in range(20):
            slot.exchange(stream, token(4)).combine(stream, Combine.reduced(np.zeros((4, 8), np.float32)))
            stream.synchronize()
        gc.collect()
        assert ref() is None

    small(body, grid=1)


def test_unknown_experts_and_more_rows_than_a_layout_has_are_reported():
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.full((4, 8), 9, np.float32)
        slot.exchange(stream, token(2, id=5)).combine(stream, Combine.reduced(output))
        stream.synchronize()
        report = group.status()
        assert (report.code, report.slot, report.expert, report.limit) == ("UnknownExpert", 0, 5, 1)
        assert (output[:2] == 0).all() and group.status() is None
        to = Permuted(group, Layout.FLAT, 3)
        received = slot.exchange(stream, token(4))
        received.permute(stream, to)
        received.combine(stream, Combine.reduced(output), to)
        stream.synchronize()
        report = group.status()
        assert (report.code, report.seen, report.limit) == ("TooManyRows", 4, 3) and to.fetch_counts() == [4]
        assert (output[:3] == 1).all() and (output[3] == 0).all()

    small(body)


def test_a_silent_rank_is_masked_and_admitted_again():
    def body(rank, comm, group, stream):
        slot, output = group.slot(0), np.zeros((4, 8), np.float32)
        if rank.rank == 0:
            slot.exchange(stream, token(4, id=1)).combine(stream, Combine.reduced(output))
            stream.synchronize(timeout=60)
            report = group.status()
            assert (report.code, report.rank) == ("Silent", 1) and "rank 1 did not come" in str(report)
            assert group.masked(0) == [1] and (output == 0).all()
        rank.barrier()
        # The slots of the group are lent; it takes and returns them.
        group.readmit()
        assert group.masked(0) == []
        received = slot.exchange(stream, token(4, id=1 - rank.rank))
        stream.synchronize(timeout=60)
        # The number of dispatches is the maximum over the ranks.
        assert np.from_dlpack(received.counts()).tolist() == ([0, 4] if rank.rank == 0 else [4, 0])
        assert (np.from_dlpack(received.rows())[1 - rank.rank] == 1).all()
        received.combine(stream, Combine.reduced(output))
        stream.synchronize(timeout=60)
        assert group.status() is None and (output == 1).all()

    small(body, ranks=2, deadline=gin.Deadline(4))


def test_values_of_other_ranks_and_groups_are_refused():
    made = {}

    def body(rank, comm, group, stream):
        made[rank.rank] = stream
        slot = group.slot(0)
        rank.barrier()
        with pytest.raises(ValueError, match="the group belongs to a rank on virtual GPU .*, and the stream to another rank"):
            slot.exchange(made[1 - rank.rank], token())
        rank.barrier()
        made.clear()
        with Group(comm, GroupConfig(2, 16, 1, tokens=4, element=Element.F32, deadline=WAIT)) as other:
            to = Permuted(other, Layout.FLAT, 4)
            plan = other.slot(0).plan(stream, Tokens(np.ones((1, 16), np.float32), np.zeros((1, 1), np.int32)))
            ids = np.zeros((1, 1), np.int32)
            with pytest.raises(ValueError, match="a plan of a group with other sizes"):
                slot.exchange(stream, Tokens(np.ones((1, 8), np.float32), ids, planned=plan))
            received = slot.exchange(stream, token())
            with pytest.raises(ValueError, match="permuted rows of a group with other sizes"):
                received.permute(stream, to)
            received.release()
            # The communicator lets no window go while kernels run.
            stream.synchronize()

    small(body, ranks=2)


def test_threads_that_share_a_slot_are_refused_or_follow_each_other():
    def body(rank, comm, group, stream):
        slot, refused, others = group.slot(0), [], []

        def work():
            for _ in range(50):
                try:
                    slot.exchange(stream, token()).release()
                except gin.StateError as error:
                    refused.append(str(error))
                except BaseException as error:
                    others.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not others
        assert all("at the same time" in text or "still has received rows" in text or "released before" in text for text in refused)
        slot.exchange(stream, token()).release()

    small(body)


def test_ranks_that_are_processes_exchange_rows():
    code = """
import gincomm as gin, numpy as np
from gincomm.ep import Combine, Element, Group, GroupConfig, Tokens
rank = gin.init(rank=rank, ranks=2, id=id, device="virtual")
with rank.communicator() as comm:
    config = GroupConfig(2, 8, 2, tokens=4, element=Element.F32, deadline=gin.Deadline(30))
    with Group(comm, config) as group:
        stream, slot = rank.stream(), group.slot(0)
        rows, output = np.full((3, 8), 1 + rank.rank, np.float32), np.zeros((3, 8), np.float32)
        for round in range(20):
            received = slot.exchange(stream, Tokens(rows, np.array([[0, 1]] * 3)))
            stream.synchronize()
            np.from_dlpack(received.rows())[:] *= 10 ** rank.rank
            received.combine(stream, Combine.reduced(output))
        stream.synchronize()
        print(group.status(), output.min(), output.max())
rank.close()
"""
    first = start('import gincomm as gin\nid = gin.unique_id("127.0.0.1")\nprint(id, flush=True)\nrank = 0\n' + code)
    id = first.read_line().strip()
    second = start(f"id = {id!r}\nrank = 1\n" + code)
    assert first.communicate_within() == "None 11.0 11.0\n"
    assert second.communicate_within() == "None 22.0 22.0\n"


def test_a_fork_cannot_use_a_group_and_harms_nobody():
    code = """
import gc, os
import gincomm as gin, numpy as np
from gincomm.ep import Permuted, Combine, Element, Group, GroupConfig, Layout, Tokens

def body(rank):
    comm = rank.communicator()
    group = Group(comm, GroupConfig(1, 8, 1, tokens=4, element=Element.F32))
    slot, stream = group.slot(0), rank.stream()
    rows, ids = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32)
    tokens = Tokens(rows, ids)
    received, to = slot.exchange(stream, tokens), Permuted(group, Layout.FLAT, 4)
    stream.synchronize()
    view, plan = received.rows(), None
    reader, writer = os.pipe()
    if os.fork() == 0:
        calls = [lambda: Group(comm, GroupConfig(1, 8, 1)), lambda: group.slot(1), group.status, group.readmit,
                 group.destroy, lambda: slot.exchange(stream, tokens), lambda: slot.plan(stream, tokens), received.rows,
                 received.release, lambda: received.combine(stream, Combine.reduced(rows)), view.__dlpack__,
                 lambda: to.rows(), to.fetch_counts]
        refused = 0
        for call in calls:
            try:
                call()
            except gin.StateError as error:
                refused += "is a fork of process" in str(error)
        del comm, group, slot, stream, received, view, to, tokens, calls, call
        gc.collect()
        os.write(writer, b"%d of 13" % refused)
        os._exit(0)
    print(os.read(reader, 100).decode(), os.wait()[1])
    received.combine(stream, Combine.reduced(rows))
    stream.synchronize()
    group.destroy()
    comm.destroy()
    return rows.sum()

print(gin.launch(1, body, device="virtual"))
"""
    assert run(code) == "13 of 13 0\n[np.float32(32.0)]\n"


def test_a_signal_handler_ends_the_wait_for_other_ranks_of_a_group():
    code = """
import signal, time
import gincomm as gin
from gincomm.ep import Group, GroupConfig

def stop(*_):
    raise KeyboardInterrupt

def body(rank):
    comm = rank.communicator()
    if rank.rank == 0:
        try:
            Group(comm, GroupConfig(2, 8, 1))
        except gin.Error as error:
            print(type(error).__name__, "abort" in str(error))
            raise
    while comm.state == "active":
        time.sleep(0.01)

signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.5)
start = time.monotonic()
try:
    gin.launch(2, body, device="virtual")
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 20)
"""
    assert run(code).endswith("True\ninterrupted True\n")
