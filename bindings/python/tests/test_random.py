# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random calls with random objects, dead and alive: exceptions of the documented kinds, and never a crash."""

import os

import pytest
from support import run

CODE = """
import random, sys, threading, time
import gincomm as gin, numpy as np
from gincomm import ep

seed, seconds = int(sys.argv[1]), float(sys.argv[2])
allowed = (gin.Error, TypeError, ValueError, OverflowError, BufferError, TimeoutError)
names = ["hello_put", "ring_round", "all_to_all", "ring_all_reduce", "credits", "coops", "no_such", "halo"]
counts = {}


def body(rank, end, seed):
    draw = random.Random(seed)
    shapes = [0, 1, 8, (2, 4), (3, 0), -1, (), 1 << 50]
    types = ["uint8", "float32", "uint32", "uint64", "float16", "nothing", np.int64]
    pool = [7, -1, 0.5, True, None, "x", gin.Deadline(0.002), gin.Deadline(0)]
    pool += [np.zeros(8, np.float32), np.zeros(64, np.uint8)]

    def some(kind=object):
        fitting = [each for each in pool if isinstance(each, kind)]
        return draw.choice(fitting) if fitting and draw.random() < 0.9 else draw.choice(pool)

    kept = (gin.Communicator, gin.Window, gin.Stream, np.ndarray, ep.Group, ep.Slot, ep.Sent, ep.Received, ep.Plan)
    kept += (ep.Permuted, ep.PermutedRows, ep.View, ep.Fused)

    def keep(value):
        if isinstance(value, kept):
            pool.append(value)
            if len(pool) > 60:
                pool.pop(draw.randrange(10, len(pool)))

    def launch():
        some(gin.Stream).launch(
            draw.choice(names),
            some(gin.Communicator),
            *[some(gin.Window) for _ in range(draw.randrange(1, 4))],
            *[draw.choice([1, 2, 8, gin.Deadline(0.002)]) for _ in range(draw.randrange(3))],
            gin.Deadline(0.002),
            grid=draw.choice([None, 1, 2, 0, (1, 1)]),
            block=draw.choice([None, 32, 1, 5000]),
        )

    sizes = dict(tokens=4, slots=2, element=ep.Element.F32, threads=32, deadline=gin.Deadline(0.01))
    config, large = ep.GroupConfig(2, 8, 1, **sizes), ep.GroupConfig(2, 8, 1, max_rows=3, **sizes)
    wrong = ep.GroupConfig(2, 8, 40)
    layouts = [ep.Layout.FLAT, ep.Layout.EXPERT_MAJOR_PADDED, ep.Layout.EXPERT_MAJOR_INDICES, ep.Layout.EXPERT_MAJOR_FIXED, ep.Layout.expert_major_packed(2), ep.Layout.expert_major_packed(3)]

    def array(kind, *shapes):
        return np.zeros(draw.choice([*shapes, 3]), draw.choice([kind] * 5 + [np.float16]))

    def tokens():
        rows, ids = array(np.float32, (4, 8), (2, 8), (4, 8)), array(np.int32, (4, 1), (4, 1), (1, 1))
        count = draw.choice([None, None, 1, 4, 9, -1, np.array([2], np.int32)])
        planned = some(ep.Plan) if draw.random() < 0.1 else None
        return ep.Tokens(rows, ids, count, weights=draw.choice([None, array(np.float32, (4, 1))]), planned=planned)

    def sums():
        output = array(np.float32, (4, 8))
        sums = draw.choice([ep.Combine.reduced, ep.Combine.plain])(output, accumulate=draw.random() < 0.5)
        rows = draw.choice([None, None, array(np.float32, (4, 8)), some(ep.Permuted), (some(ep.Permuted), output)])
        return sums, rows

    def combine():
        some(ep.Received).combine(some(gin.Stream), *sums())

    def fused():
        parameters = some(ep.Fused)
        some(gin.Stream).launch("exchange_scaled", *parameters, 8, 2.0, block=32, shared=parameters.shared)

    def scale():
        some(gin.Stream).launch(draw.choice(["scale_received", "scale_permuted"]), some((ep.Received, ep.PermutedRows)), 8, 2.0)

    of_experts = [
        lambda: ep.Group(some(gin.Communicator), draw.choice([config, config, large, wrong])),
        lambda: some(ep.Group).slot(draw.randrange(3)),
        lambda: some(ep.Group).slot(draw.randrange(3)),
        lambda: some(ep.Slot).dispatch(some(gin.Stream), tokens()),
        lambda: some(ep.Slot).exchange(some(gin.Stream), tokens()),
        lambda: some(ep.Slot).exchange(some(gin.Stream), tokens()),
        lambda: some(ep.Slot).plan(some(gin.Stream), tokens()),
        lambda: some(ep.Sent).receive(some(gin.Stream)),
        lambda: some(ep.Sent).receive(some(gin.Stream)),
        lambda: some(ep.Received).rows(draw.choice([None, "uint8", "float64"])),
        lambda: some(ep.Received).region(draw.choice([None, "uint8", "float64"])),
        lambda: draw.choice([ep.Received.counts, ep.Received.experts, ep.Received.tokens, ep.Received.scales])(some()),
        lambda: some(ep.Received).offsets(),
        lambda: some(ep.Received).permute(some(gin.Stream), some(ep.Permuted)),
        lambda: ep.Permuted(some(ep.Group), draw.choice(layouts), draw.choice([None, 0, 4, 1 << 40])),
        lambda: ep.Permuted.without_rows(some(ep.Group), draw.choice(layouts), draw.choice([None, 0, 4])),
        lambda: some(ep.Permuted).with_memory(some(ep.Group), rows=array(np.float32, (16, 8), (4, 8)), counts=draw.choice([None, array(np.int32, (40,), (2,))])),
        lambda: draw.choice([ep.Permuted.rows, ep.Permuted.counts, ep.Permuted.source_info, ep.Permuted.scales, ep.Permuted.tokens])(some()),
        lambda: some(ep.Permuted).fetch_counts(),
        lambda: np.from_dlpack(some(ep.View)),
        combine,
        combine,
        scale,
        lambda: some(ep.Slot).fuse(some(gin.Stream), tokens(), *sums()),
        fused,
        lambda: some(ep.Received).release(),
        lambda: some(ep.Group).status(),
        lambda: some(ep.Group).masked(draw.randrange(3)),
        lambda: some(ep.Group).readmit(),
        lambda: some(ep.Group).destroy(),
    ]
    calls = [
        *of_experts,
        launch,
        launch,
        launch,
        lambda: rank.communicator(signals=draw.choice([None, 0, 2, 1 << 31]), world_barriers=draw.randrange(2)),
        rank.stream,
        lambda: rank.stream(some()),
        lambda: some(gin.Communicator).alloc_window(draw.choice(shapes), draw.choice(types)),
        lambda: some(gin.Communicator).alloc_window(8, "uint64", signals=True),
        lambda: some(gin.Communicator).register(some(np.ndarray)),
        lambda: np.from_dlpack(some(gin.Window)),
        lambda: some(gin.Window).__dlpack__(max_version=draw.choice([None, (1, 0), (0, 8)])),
        lambda: some(gin.Window).deregister(),
        lambda: some(gin.Communicator).check(),
        lambda: some(gin.Communicator).stats(),
        lambda: some(gin.Communicator).fault,
        lambda: some(gin.Communicator).abort(),
        lambda: some(gin.Communicator).destroy(),
        lambda: some(gin.Stream).synchronize(draw.choice([None, 0, 0.01, -1])),
        lambda: some(gin.Stream).is_idle(),
        lambda: some(gin.Stream).wait_for(some(gin.Stream)),
        lambda: pool.pop(draw.randrange(10, len(pool))),
        lambda: repr(some()),
    ]
    # A busy machine makes few calls in this time.
    rare = ("Group", "Received", "Permuted")
    while (now := time.monotonic()) < end or now < end + 30 and not all(name in counts for name in rare):
        call = draw.choice(calls)
        try:
            made = call()
            keep(made)
            for name in ("done", type(made).__name__):
                counts[name] = counts.get(name, 0) + 1
        except AttributeError as error:
            # The object drawn has no such method.
            assert "object has no attribute" in str(error)
        except allowed as error:
            counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1


def threads(rank):
    # Two threads share the rank, each with its own objects; collective calls of one rank need no other.
    end = time.monotonic() + seconds
    other = threading.Thread(target=body, args=(rank, end, seed + 1))
    other.start()
    body(rank, end, seed)
    other.join()


gin.launch(1, threads, device="virtual")
print(counts)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_never_crash(seed):
    """GIN_PY_SECONDS says how long, by default for a second."""
    seconds = os.environ.get("GIN_PY_SECONDS", "1")
    code = CODE.replace("sys.argv[1]", str(seed)).replace("sys.argv[2]", seconds)
    found = eval(run(code, timeout=60 + 2 * float(seconds)))
    assert found["done"] > 100 and found["Error"] > 10 and found["TypeError"] > 10, found
    assert found["Group"] > 0 and found["Received"] > 0 and found["Permuted"] > 0, found
