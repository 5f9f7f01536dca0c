# SPDX-License-Identifier: MIT OR Apache-2.0
"""`gincomm.torch` on CPU tensors: autograd, torch.compile, and calls that are refused. A dense layer that knows the
inputs of all ranks is the reference."""

import copy
import os
import shutil
import time
from datetime import timedelta

import gincomm as gin
import pytest
import torch_support
from support import run as run_process
from support import start
from torch_support import EXAMPLES, needs_gpus, torch, torchrun

if torch is not None:
    import gincomm.torch as gin_torch
    from gincomm.torch import combine, dispatch
    from torch.utils.checkpoint import checkpoint

pytestmark = torch_support.mark

HIDDEN, TOPK, ROOM, LOCAL = 8, 3, 6, 2
COMPILING = timedelta(seconds=200)
"""How long a rank may compile while another one waits."""
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def group_of(rank, **options):
    """Makes a group of FP32 rows."""
    sizes = {"hidden": HIDDEN, "topk": TOPK, "tokens": ROOM, "timeout": timedelta(seconds=60), **options}
    sizes.setdefault("dtype", torch.float32)
    return gin_torch.Group(rank, experts=LOCAL * rank.ranks, **sizes)


def run(ranks, body, **options):
    """Runs `body(group)` on each rank, a thread."""

    def each(rank):
        with group_of(rank, **options) as group:
            return body(group)

    return gin.launch(ranks, each, device="virtual")


def run_processes(ranks, body, *arguments, **options):
    """Runs a function of this file on each rank, a process. torch 2.11 crashes if a second thread compiles or uses fake
    tensors."""
    code = f"""
import gincomm as gin, test_torch_autograd as tests
rank = gin.init(rank=rank, ranks={ranks}, id=id, device="virtual")
with tests.group_of(rank, **{{"timeout": tests.COMPILING, **{options!r}}}) as group:
    tests.{body.__name__}(group, *{arguments!r})
print("done")
"""
    first = start('import gincomm as gin\nid = gin.unique_id("127.0.0.1")\nprint(id, flush=True)\nrank = 0\n' + code)
    id = first.read_line().strip()
    for process in [first] + [start(f"id = {id!r}\nrank = {rank}\n" + code) for rank in range(1, ranks)]:
        assert process.communicate_within(250) == "done\n"


class Inputs:
    """Small integers, so that all sums are exact: rows, ids with some -1, weights, gradients of the sums."""

    def __init__(self, rank, ranks, round=0, count=None):
        random = torch.Generator().manual_seed(1000 * round + rank)
        count = (5 * round + 3 * rank + 4) % (ROOM + 1) if count is None else count
        self.x = torch.randint(-3, 4, (count, HIDDEN), generator=random).float()
        self.ids = torch.randint(-1, LOCAL * ranks, (count, TOPK), generator=random)
        self.weights = torch.randint(1, 5, (count, TOPK), generator=random).float()
        self.gradient = torch.randint(-3, 4, (count, HIDDEN), generator=random).float()

    def track(self):
        self.x.requires_grad_()
        self.weights.requires_grad_()
        return self


def scales(ranks):
    return torch.arange(1.0, LOCAL * ranks + 1)


def experts(received, scale):
    """The experts of a rank: they square the row, and multiply by weight and scale."""
    here = received.experts >= 0
    factor = torch.where(here, received.weights * scale[received.experts.clamp(min=0)], 0.0)
    return received.rows.square() * factor.sum(1, keepdim=True).to(received.rows.dtype)


def layer(x, ids, weights, scale, group, slot=0):
    received = dispatch(x, ids, weights, group, slot)
    return combine(experts(received, scale), received.handle)


def dense(inputs, scale):
    factor = torch.where(inputs.ids >= 0, inputs.weights * scale[inputs.ids.clamp(min=0)], 0.0)
    return inputs.x.square() * factor.sum(1, keepdim=True)


def reference(rank, ranks, round=0):
    """Returns the sums of a rank, and the gradients of its rows, its weights and its scales."""
    everyone, scale = [Inputs(each, ranks, round).track() for each in range(ranks)], scales(ranks).requires_grad_()
    sums = [dense(inputs, scale) for inputs in everyone]
    torch.autograd.backward(sums, [inputs.gradient for inputs in everyone])
    own = slice(LOCAL * rank, LOCAL * (rank + 1))
    return sums[rank], everyone[rank].x.grad, everyone[rank].weights.grad, scale.grad[own]


def own_scale(group):
    first = LOCAL * group.rank
    return scales(group.ranks)[first : first + LOCAL].clone().requires_grad_()


def step(group, function, round=0, slot=0):
    """Runs a layer forward and backward. Returns what `reference` returns."""
    inputs, scale = Inputs(group.rank, group.ranks, round).track(), own_scale(group)
    sums = function(inputs.x, inputs.ids, inputs.weights, scale, group, slot)
    sums.backward(inputs.gradient)
    return sums, inputs.x.grad, inputs.weights.grad, scale.grad


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), (one, other)


@RANKS
@pytest.mark.parametrize("max_rows", [None, lambda ranks: ranks * ROOM - 1])
def test_gradients_are_those_of_a_dense_layer(ranks, max_rows):
    def body(group):
        for round in range(5):
            same(step(group, layer, round), reference(group.rank, ranks, round))

    run(ranks, body, max_rows=max_rows and max_rows(ranks))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("expert", [0, -1])
def test_skewed_routing_has_gradients_too(expert, shared):
    """All tokens of all ranks go to one rank, and one rank alone has tokens."""

    def body(group):
        for count in (ROOM, ROOM if group.rank == 1 else 0):
            inputs, scale = Inputs(group.rank, 4, count=count).track(), own_scale(group)
            ids = torch.full_like(inputs.ids, expert % (LOCAL * 4))
            sums = layer(inputs.x, ids, inputs.weights, scale, group)
            sums.backward(inputs.gradient)
            other = Inputs(group.rank, 4, count=count).track()
            other.ids = ids
            expected = dense(other, scales(4))
            expected.backward(other.gradient)
            same([sums, inputs.x.grad, inputs.weights.grad], [expected, other.x.grad, other.weights.grad])
            assert (scale.grad != 0).any() == (group.rank == (0 if expert == 0 else 3))

    run(4, body, max_rows=4 * ROOM if shared else None)


@RANKS
@pytest.mark.filterwarnings("ignore:Input .* is not a double precision")
def test_gradients_agree_with_differences(ranks):
    """The ranks perturb their rows and weights at the same time, so they make the same number of calls."""

    def body(group):
        inputs = Inputs(group.rank, ranks, count=2).track()

        def bilinear(x, weights):
            received = dispatch(x, inputs.ids, weights, group)
            return combine(received.rows * received.weights.sum(1, keepdim=True), received.handle)

        # Differences of a function that is linear in each input have no error but rounding.
        assert torch.autograd.gradcheck(bilinear, (inputs.x, inputs.weights), eps=0.5, atol=1e-3, rtol=1e-4)

    run(ranks, body)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_have_gradients_of_16_bits_and_weights_of_fp32(dtype):
    dtype = getattr(torch, dtype)

    def body(group):
        inputs, scale = Inputs(group.rank, 2).track(), own_scale(group)
        rows = inputs.x.detach().to(dtype).requires_grad_()
        sums = layer(rows, inputs.ids, inputs.weights, scale, group)
        sums.backward(inputs.gradient.to(dtype))
        assert (sums.dtype, rows.grad.dtype, inputs.weights.grad.dtype) == (dtype, dtype, torch.float32)
        found = sums, rows.grad, inputs.weights.grad, scale.grad
        for one, other in zip(found, reference(group.rank, 2)):
            torch.testing.assert_close(one.float(), other, rtol=2**-6, atol=2**-5)

    run(2, body, dtype=dtype)


def test_rows_past_the_counts_are_zero_and_their_ids_are_none():
    def body(group):
        # The first round fills the memory, the second has few rows.
        for count in (ROOM, ROOM, 1):
            inputs = Inputs(group.rank, 2, count=count)
            received = dispatch(inputs.x + 5, inputs.ids.clamp(min=0), inputs.weights, group)
            there = torch.arange(ROOM) < received.counts.unsqueeze(1)
            assert there.sum() == received.counts.sum() <= 2 * count
            there = there.flatten()
            assert (received.rows[there] != 0).all() and (received.rows[~there] == 0).all()
            assert (received.experts[there] >= 0).any(1).all() and (received.experts[~there] == -1).all()
            assert torch.equal(received.weights != 0, received.experts >= 0)
            combine(received.rows, received.handle)

    run(2, body)


def check_compiled_layer(group, backend):
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for round in range(4):
        expected = reference(group.rank, group.ranks, round)
        same(step(group, compiled, round), expected)
        with torch.no_grad():
            inputs = Inputs(group.rank, group.ranks, round)
            same([compiled(inputs.x, inputs.ids, inputs.weights, own_scale(group), group)], [expected[0].detach()])


@pytest.mark.parametrize("backend, ranks", [("aot_eager", 1), ("aot_eager", 4), ("inductor", 1)])
def test_a_compiled_layer_is_one_graph_with_the_same_bits(backend, ranks):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs g++")
    run_processes(ranks, check_compiled_layer, backend)


def check_order_of_calls(group):
    calls = []

    def watch(operator):
        def called(*arguments):
            calls.append((operator.__name__, arguments[-1]))
            return operator(*arguments)

        return called

    def function(x, ids, weights, scale):
        unused = dispatch(x, ids, weights, group, 1)
        sums = layer(x, ids, weights, scale, group, 0)
        combine(unused.rows, unused.handle)
        return sums

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for name in ("_send", "_return"):
        setattr(group, name, watch(getattr(group, name)))
    inputs = Inputs(group.rank, 1)
    compiled(inputs.x, inputs.ids, inputs.weights, own_scale(group).detach())
    # The last argument is the number of the dispatch.
    assert calls == [("_send", 0), ("_send", 1), ("_return", 1), ("_return", 0)]


def test_a_compiler_keeps_calls_in_order_even_without_a_use():
    """A rank that left out a call, or changed the order, would be out of step with the others."""
    run_processes(1, check_order_of_calls, slots=2)


def check_error_of_trace(group):
    many, compiled = Inputs(0, 1, count=ROOM + 1), torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="x has 7 tokens; the group has room for 6 of a rank"):
        compiled(many.x, many.ids, many.weights, own_scale(group), group)


def test_a_wrong_argument_is_an_error_of_the_trace():
    run_processes(1, check_error_of_trace)


def check_operators(group):
    inputs = Inputs(0, 1).track()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    operators = torch.ops.gincomm
    arguments = inputs.x, inputs.ids, inputs.weights, group.name, 0
    torch.library.opcheck(operators.dispatch.default, arguments, test_utils=checks)
    rows = torch.randn(group.capacity, HIDDEN).requires_grad_()
    handle = dispatch(inputs.x, inputs.ids, inputs.weights, group).handle
    torch.library.opcheck(operators.combine.default, (rows, *handle, True), test_utils=checks)
    gradient = torch.randn(len(inputs.x), HIDDEN)
    torch.library.opcheck(operators.combine_backward.default, (gradient, *handle), test_utils=checks)
    by_id = torch.randn(group.capacity, TOPK), torch.zeros(group.capacity, TOPK, dtype=torch.int32)
    torch.library.opcheck(operators.weights_backward.default, (*by_id, inputs.ids, group.name, 0), test_utils=checks)


def test_the_operators_keep_the_contract_of_torch():
    run_processes(1, check_operators)


def check_fake_tensors(group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = Inputs(0, 1)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in (inputs.x, inputs.ids, inputs.weights)]
        found = dispatch(*fake, group)
        sums = combine(found.rows, found.handle)
    real = dispatch(inputs.x, inputs.ids, inputs.weights, group)
    assert next(group._numbers) == 1, "a fake dispatch ran"
    for one, other in zip((*found[:4], sums), (*real[:4], combine(real.rows, real.handle))):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def test_fake_tensors_have_the_shapes_of_real_ones():
    run_processes(1, check_fake_tensors)


def test_gradients_flow_only_where_they_are_asked_for():
    def body(group):
        expected, scale = reference(group.rank, 2), own_scale(group).detach()
        for track_x, track_weights in ((True, False), (False, True), (False, False)):
            inputs = Inputs(group.rank, 2)
            x, weights = inputs.x.requires_grad_(track_x), inputs.weights.requires_grad_(track_weights)
            sums = layer(x, inputs.ids, weights, scale, group)
            assert sums.requires_grad == (track_x or track_weights)
            if sums.requires_grad:
                sums.backward(inputs.gradient)
            for given, gradient, tracked in ((x, expected[1], track_x), (weights, expected[2], track_weights)):
                assert torch.equal(given.grad, gradient) if tracked else given.grad is None
        inputs = Inputs(group.rank, 2).track()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                sums = layer(inputs.x, inputs.ids, inputs.weights, scale, group)
            assert not sums.requires_grad and torch.equal(sums, expected[0])

    run(2, body)


def test_tensors_need_not_be_leaves_or_contiguous_or_aligned():
    def body(group):
        inputs, scale = Inputs(group.rank, 2, count=4).track(), own_scale(group)
        x = torch.nn.functional.pad(inputs.x.flatten(), (1, 0))[1:].view(-1, HIDDEN)
        ids = inputs.ids.int().t().contiguous().t()
        weights = torch.nn.functional.pad(inputs.weights, (1, 2))[:, 1:-2]
        assert x.data_ptr() % 16 != 0 and not ids.is_contiguous() and not weights.is_contiguous()
        sums = layer(x, ids, weights, scale, group)
        # A gradient whose elements are one in memory.
        sums.sum().backward()
        everyone = [Inputs(rank, 2, count=4).track() for rank in range(2)]
        torch.autograd.backward([dense(one, scales(2)).sum() for one in everyone])
        own = everyone[group.rank]
        same([inputs.x.grad, inputs.weights.grad], [own.x.grad, own.weights.grad])

    run(2, body)


def test_second_derivatives_are_refused():
    def body(group):
        inputs = Inputs(0, 1).track()
        sums = layer(inputs.x, inputs.ids, inputs.weights, own_scale(group), group)
        first = torch.autograd.grad(sums, inputs.x, inputs.gradient.requires_grad_(), create_graph=True)[0]
        with pytest.raises(RuntimeError, match="through gincomm.* no autograd formula was registered"):
            first.sum().backward()

    run(1, body)


def test_a_checkpoint_sends_again():
    def checkpointed(*arguments):
        return checkpoint(layer, *arguments, use_reentrant=False)

    def body(group):
        for round in range(2):
            same(step(group, checkpointed, round), reference(group.rank, 2, round))

    run(2, body)


def test_slots_are_interleaved_forward_and_backward():
    """The last two layers share a slot, so their backward passes send the routing of both again."""

    def body(group):
        inputs = [Inputs(group.rank, 2, round).track() for round in range(3)]
        scale = own_scale(group)
        first, second = (dispatch(one.x, one.ids, one.weights, group, slot) for slot, one in enumerate(inputs[:2]))
        rows = [experts(one, scale) for one in (first, second)]
        sums = [combine(rows[0], first.handle), combine(rows[1], second.handle)]
        sums.append(layer(inputs[2].x, inputs[2].ids, inputs[2].weights, scale, group, 1))
        gradients = [one.gradient for one in inputs]
        torch.autograd.backward([sums[2], sums[0], sums[1]], [gradients[2], gradients[0], gradients[1]])
        expected = [reference(group.rank, 2, round) for round in range(3)]
        same(sums, [each[0] for each in expected])
        same([one.x.grad for one in inputs], [each[1] for each in expected])
        same([one.weights.grad for one in inputs], [each[2] for each in expected])
        assert torch.equal(scale.grad, sum(each[3] for each in expected))

    run(2, body, slots=2)


def test_a_backward_pass_finds_its_routing_after_other_dispatches():
    def body(group):
        inputs, scale = Inputs(group.rank, 2).track(), own_scale(group)
        received = dispatch(inputs.x, inputs.ids, inputs.weights, group)
        rows = experts(received, scale)

        @torch.enable_grad()
        def between(_):
            same(step(group, layer, 1), reference(group.rank, 2, 1))
            other = Inputs(group.rank, 2, 1)
            dispatch(other.x, other.ids, other.weights, group)

        rows.register_hook(between)
        combine(rows, received.handle).backward(inputs.gradient)
        _, x, weights, _ = reference(group.rank, 2)
        same([inputs.x.grad, inputs.weights.grad], [x, weights])

    run(2, body)


def test_a_combine_takes_the_handle_of_its_dispatch_once():
    def body(group):
        inputs = Inputs(group.rank, 2)
        arguments = inputs.x, inputs.ids, inputs.weights, group
        old, new = dispatch(*arguments), dispatch(*arguments)
        with pytest.raises(TypeError, match="handle is Tensor; pass the `handle` of what dispatch returned"):
            combine(new.rows, new.experts)
        with pytest.raises(gin.StateError, match="combine: dispatch 0 of slot 0 .* has dispatched again since"):
            combine(old.rows, old.handle)
        combine(new.rows, new.handle)
        with pytest.raises(gin.StateError, match="combine: dispatch 1 of slot 0 was combined before"):
            combine(new.rows, new.handle)
        with pytest.raises(ValueError, match=r"rows has shape \[3, 8\]; pass \[12, 8\]"):
            combine(new.rows[:3], new.handle)

    run(2, body)


def test_wrong_arguments_are_refused_with_value_and_limit():
    def body(group):
        inputs = Inputs(group.rank, 2, count=ROOM)
        x, ids, weights = inputs.x, inputs.ids, inputs.weights
        many = Inputs(group.rank, 2, count=ROOM + 1)
        for text, arguments in {
            "x has 7 tokens; the group has room for 6 of a rank": (many.x, many.ids, many.weights),
            "x has dtype torch.float64; pass torch.float32": (x.double(), ids, weights),
            r"x has shape \[6, 7\]; pass \[any, 8\]": (x[:, 1:], ids, weights),
            r"ids has shape \[5, 3\]; pass \[6, 3\]": (x, ids[1:], weights),
            "ids has dtype torch.int16; pass torch.int32 or torch.int64": (x, ids.short(), weights),
            "weights has dtype torch.bfloat16; pass torch.float32": (x, ids, weights.bfloat16()),
            "x is on meta; pass a tensor on cpu": (x.to("meta"), ids, weights),
            "slot is 1; the group has slots 0 to 0": (x, ids, weights, 1),
        }.items():
            arguments, slot = arguments[:3], arguments[3:]
            with pytest.raises(ValueError, match=text):
                dispatch(*arguments, group, *slot)
        with pytest.raises(ValueError, match="dtype is torch.float64; use one of torch.bfloat16"):
            gin_torch.Group(group._rank, 4, 8, 2, tokens=8, dtype=torch.float64)
        return group

    group = run(2, body)[0]
    inputs = Inputs(0, 2)
    with pytest.raises(gin.StateError, match="group .* of rank 0 is destroyed"):
        dispatch(inputs.x, inputs.ids, inputs.weights, group)


def test_copies_of_a_module_share_its_group():
    def body(group):
        module = torch.nn.Linear(2, 2)
        module.group = group
        assert copy.deepcopy(module).group is group

    run(1, body)


def test_an_unknown_expert_is_an_error_of_the_call_and_the_next_one_works():
    def body(group):
        inputs = Inputs(group.rank, 1)
        ids = inputs.ids.clone()
        ids[0, 1] = 77
        with pytest.raises(gin.Error, match="dispatch of group .* of rank 0: .*77"):
            dispatch(inputs.x, ids, inputs.weights, group)
        same(step(group, layer), reference(0, 1))

    run(1, body)


def test_a_full_region_is_an_error_of_the_call_and_the_next_one_works():
    """All tokens of both ranks go to rank 0, which has room for those of one."""

    def body(group):
        x, weights = torch.ones(ROOM, HIDDEN), torch.ones(ROOM, TOPK)
        skewed, even = (torch.full((ROOM, TOPK), -1) for _ in range(2))
        skewed[:, 0], even[:, 0] = 0, LOCAL * group.rank
        with pytest.raises(gin.Error, match=r"dispatch of group .*rank 0"):
            dispatch(x, skewed, weights, group)
        sums = layer(x, even, weights, own_scale(group).detach(), group)
        assert torch.equal(sums, x * scales(2)[LOCAL * group.rank])

    run(2, body, max_rows=ROOM)


@pytest.mark.parametrize("call", ["dispatch", "combine", "the backward of combine", "the backward of dispatch"])
def test_a_silent_rank_is_an_error_of_the_call_within_the_timeout(call):
    def body(group):
        inputs, last, start = Inputs(group.rank, 2, 1).track(), group.rank == 1, time.monotonic()

        def stop():
            if last:
                raise StopIteration

        try:
            received = call == "dispatch" and stop() or dispatch(inputs.x, inputs.ids, inputs.weights, group)
            rows = received.rows * 2
            rows.register_hook(lambda _: stop() if call == "the backward of dispatch" else None)
            sums = call == "combine" and stop() or combine(rows, received.handle)
            call == "the backward of combine" and stop()
            sums.backward(inputs.gradient)
        except StopIteration:
            assert last
            group._rank.barrier()
            return
        except gin.Error as error:
            found = error
        assert not last and time.monotonic() - start < 30
        group._rank.barrier()
        assert f"{call} of {group.name}: " in str(found) and "rank 1" in str(found), found
        with pytest.raises(gin.StateError, match=f"dispatch: group .* failed before .* make a new one. {call} of"):
            dispatch(inputs.x, inputs.ids, inputs.weights, group)

    run(2, body, timeout=timedelta(seconds=0.5))


LEAVING = """
import gincomm as gin, os, signal, torch
from gincomm.torch import Group, combine, dispatch
me = gin.init(rank=rank, ranks=2, id=id, device="virtual")

def leave(here):
    if me.rank == 1 and here == phase:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(7)

try:
    with Group(me, 4, 8, 2, tokens=4, dtype=torch.float32) as group:
        ids, weights = torch.tensor([[0, 2]] * 4), torch.ones(4, 2).requires_grad_()
        print("ready", flush=True)
        for round in range(1000):
            at = lambda name: leave((name, round))
            at("dispatch")
            received = dispatch(torch.ones(4, 8), ids, weights, group)
            rows = received.rows * received.weights.sum(1, keepdim=True)
            rows.register_hook(lambda _: at("the backward of dispatch"))
            at("combine")
            sums = combine(rows, received.handle)
            at("the backward of combine")
            sums.sum().backward()
except gin.FaultError as fault:
    print(fault.kind, "rank 1" in str(fault))
"""
LEFT = {"killed": ("PeerLost True", -9), "ended": ("Aborted True", 7)}


@pytest.mark.parametrize(
    "phase, way",
    [
        ("dispatch", "killed"),
        ("combine", "ended"),
        ("the backward of combine", "killed"),
        ("the backward of dispatch", "ended"),
    ],
)
def test_a_rank_that_leaves_a_training_loop_ends_the_call_of_the_other(phase, way):
    """It is killed, or an exception leaves the group's `with`. The other waits for no timeout, which is 100 s."""
    given = f"phase, way = {(phase, 5)!r}, {way!r}\n"
    first = start('import gincomm as gin\nid = gin.unique_id("127.0.0.1")\nprint(id, flush=True)\nrank = 0\n' + given + LEAVING)
    second = start(f"id = {first.read_line().strip()!r}\nrank = 1\n" + given + LEAVING)
    said, status = LEFT[way]
    second.process.wait(60)
    began = time.monotonic()
    assert first.communicate_within(100) == f"ready\n{said}\n"
    assert second.process.returncode == status and time.monotonic() - began < 60


def test_a_group_has_the_timeout_of_its_process_group():
    code = """
        import datetime, os, torch.distributed as dist
        from gincomm.torch import Group
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=17))
        with Group(dist.group.WORLD, 2, 8, 2, tokens=4) as group:
            print(group.timeout)
        with Group(dist.group.WORLD, 2, 8, 2, tokens=4, timeout=datetime.timedelta(seconds=5)) as group:
            print(group.timeout)
    """
    assert run_process(code) == "0:00:17\n0:00:05\n"


@pytest.mark.parametrize("gpus", [0, 2])
def test_two_processes_train_a_compiled_layer(gpus):
    needs_gpus(gpus)
    found = torchrun(os.path.join(EXAMPLES, "moe_torch.py"), *([] if gpus else ["--cpu"]))
    assert found.count("3 steps agree with a layer of all experts") == 2, found
