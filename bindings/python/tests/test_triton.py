# SPDX-License-Identifier: MIT OR Apache-2.0
"""`gincomm.triton`: kernels of Triton compile to machine code without a GPU, and calls keep their place in them. With two
GPUs the examples run."""

import hashlib
import importlib.util
import os
import pathlib
import re
import sys
import types

import gincomm as gin
import pytest
from support import run

try:
    import triton
    import triton.language as tl
    from gincomm import triton as gt
    from triton.backends.compiler import GPUTarget
except ImportError as error:
    pytestmark = pytest.mark.skip(f"all tests of Triton need it ({error}); GIN_PY_TRITON=1 installs it")

    class Absent:
        """Lets the file load without Triton."""

        def __getattr__(self, name):
            return lambda function: function if callable(function) else Absent()

    triton = tl = gt = Absent()
else:
    pytestmark = pytest.mark.skipif(not gin._gin._device_ir(), reason="the package is built without kernels for GPUs")

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.environ.get("GIN_PY_EXAMPLES", os.path.join(HERE, "..", "..", "..", "examples", "python"))

SECOND = tl.constexpr(10**9)


@pytest.fixture(autouse=True, scope="module")
def compile_anew(tmp_path_factory):
    """Triton keeps what it has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def architectures():
    """Returns the architectures that the package has functions for, as Triton counts them."""
    names = [name.removeprefix("sm_") for name, _ in gin._gin._device_ir()]
    return [int(name) for name in names if name.isdigit()]


def compiled(kernel, arch=None, *, options=None, **types):
    """Compiles a kernel with parameters of these types. Returns its forms by name. A number is a constant."""
    arch = architectures()[-1] if arch is None else arch
    constants = {name: value for name, value in types.items() if not isinstance(value, str)}
    signature = {name: "constexpr" if name in constants else value for name, value in types.items()}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    options = {"extern_libs": gt.extern_libs(arch)} | (options or {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm


def entry(ptx):
    """Returns the lines of the kernel, without its functions."""
    return ptx[ptx.index(".entry") :].split("\n}\n")[0].splitlines()


@triton.jit
def every_call(comm, window, other, out, value, peer, least):
    fault = gt.put(comm, peer, window, 0, other, 64, 1024, SECOND, signal=1, amount=2, counter=3, context=0)
    fault |= gt.put(comm, peer, window, 0, other, 64, 1024, SECOND)
    fault |= gt.put_value(comm, peer, window, 8, value, SECOND, signal=1)
    fault |= gt.get(comm, peer, window, 0, other, 0, 1024, SECOND)
    fault |= gt.signal(comm, peer, 1, SECOND)
    fault |= gt.wait_signal(comm, 1, least, SECOND)
    fault |= gt.wait_counter(comm, 3, least, SECOND)
    fault |= gt.flush(comm, SECOND)
    fault |= gt.barrier(comm, "world", 0, "put_get", SECOND)
    tl.store(out, gt.read_signal(comm, 1) + gt.read_counter(comm, 3))
    pointer = gt.peer_pointer(comm, window, peer, tl.float32, offset=4)
    if pointer.to(tl.uint64) != 0:
        tl.store(pointer, 1.0)
    gt.report(comm, fault)


TYPES = {"comm": "i64", "window": "i64", "other": "i64", "out": "*u64", "value": "fp16", "peer": "i32", "least": "i64"}


def test_every_call_compiles_to_machine_code_for_every_architecture():
    for arch in architectures():
        forms = compiled(every_call, arch, **TYPES)
        assert forms["cubin"][:4] == b"\x7fELF"
        # A function that another LLVM does not know would stay undefined, and ptxas would refuse it or its name.
        assert ".extern .func" not in forms["ptx"] and "llvm." not in forms["ptx"]
        # The functions inline, but for rare cases inside them.
        assert not re.search(r"^\.func.*gin_triton_", forms["ptx"], re.M)


@triton.jit
def exchange(comm, window, data, out, N: tl.constexpr):
    i = tl.arange(0, N)
    before = tl.load(data + i)
    tl.store(out + i, before)
    fault = gt.put(comm, 1, window, 0, window, 0, N * 4, SECOND, signal=0)
    fault |= gt.wait_signal(comm, 0, 1, SECOND)
    tl.store(out + i, tl.load(data + i) + before)


def own(lines, kind):
    """Returns the numbers of the lines with loads or stores of the kernel itself, as Triton writes them."""
    return [i for i, line in enumerate(lines) if re.search(rf"\b{kind}\.global\.b32 (\{{|\[ )", line)]


def test_stores_come_before_the_put_and_loads_after_the_wait():
    forms = compiled(exchange, comm="i64", window="i64", data="*fp32", out="*fp32", N=1024)
    order = re.findall(r"tt\.(?:load|store)|barrier(?=[ \n])|gin_triton_\w+", forms["ttgir"])
    call = ["barrier", "gin_triton_put", "barrier", "gin_triton_wait_signal"]
    assert order == ["tt.load", "tt.store", *call, "tt.load", "tt.store"]
    lines = entry(forms["ptx"])
    meets = [i for i, line in enumerate(lines) if re.search(r"\bbar\.", line)]
    loads, stores = own(lines, "ld"), own(lines, "st")
    # A thread has 8 of the 1024 elements. None is loaded once for both places, and none on the wrong side of a barrier.
    assert len(loads) == len(stores) == 16
    assert loads[7] < stores[7] < meets[0] and meets[-1] < loads[8] < stores[8]
    # One thread acts for the block: the block votes on its fault, at the end of each call.
    assert sum("bar.red.or.pred" in line or "barrier.cta.red.or" in line for line in lines) >= 2
    assert any("fence.rel" in line or "fence.acq_rel" in line for line in lines)
    assert any("fence.acq" in line for line in lines)


@triton.jit
def pipeline(comm, x, out, tiles, N: tl.constexpr):
    i = tl.arange(0, N)
    sum = tl.zeros((N,), tl.float32)
    for tile in tl.range(0, tiles, num_stages=3):
        gt.wait_signal(comm, 0, tile + 1, SECOND)
        sum += tl.load(x + tile * N + i)
    tl.store(out + i, sum)


@triton.jit
def without_calls(comm, x, out, tiles, N: tl.constexpr):
    i = tl.arange(0, N)
    sum = tl.zeros((N,), tl.float32)
    for tile in tl.range(0, tiles, num_stages=3):
        sum += tl.load(x + tile * N + i)
    tl.store(out + i, sum)


def test_triton_does_not_load_in_a_loop_before_the_wait_for_the_data():
    types = {"comm": "i64", "x": "*fp32", "out": "*fp32", "tiles": "i32", "N": 1024}
    # Triton does so where it may: else this test would prove nothing.
    assert "async_copy" in compiled(without_calls, **types)["ttgir"]
    text = compiled(pipeline, **types)["ttgir"]
    assert "async_copy" not in text
    loop = text[text.index("scf.for") :]
    assert loop.index("gin_triton_wait_signal") < loop.index("tt.load")


@triton.jit
def uniform(comm, out):
    seen = gt.read_signal(comm, 0)
    if seen > 3:
        tl.debug_barrier()
        tl.store(out, seen)


def test_all_threads_of_the_block_get_the_value_that_one_of_them_read():
    lines = entry(compiled(uniform, comm="i64", out="*u64")["ptx"])
    value = next(re.search(r"st\.global\.b64 \[.*\{ (%rd\d+)", line) for line in lines if "st.global.b64" in line)[1]
    made = next(i for i, line in enumerate(lines) if re.search(rf"^\s*ld\.volatile\.b64 +\t?{value},", line))
    # It comes from a word in shared memory, after a barrier; the branch of the kernel is by this value too.
    assert "bar.sync" in lines[made - 1] or "bar.sync" in lines[made - 2]
    assert any(re.search(rf"setp\..*{value},", line) for line in lines[made:])


@triton.jit
def put_value_of(comm, window, value):
    gt.put_value(comm, 1, window, 0, value, SECOND)


def test_a_value_has_the_width_of_its_type():
    for name, width in (("i8", 1), ("fp16", 2), ("bf16", 2), ("fp32", 4), ("i64", 8), ("fp64", 8)):
        text = compiled(put_value_of, comm="i64", window="i64", value=name)["ttir"]
        call = next(line for line in text.splitlines() if "gin_triton_put_value" in line)
        operands = re.search(r"extern_elementwise ([^{]*)\{", call)[1].split(",")
        constant = operands[4].strip()
        assert re.search(rf"{re.escape(constant)} = arith.constant {width} : i32", text), (name, call)


@triton.jit
def wrong(comm, x, CASE: tl.constexpr):
    if CASE == 0:
        gt.signal(comm, -1, 0, SECOND)
    elif CASE == 1:
        gt.signal(comm, 1.5, 0, SECOND)
    elif CASE == 2:
        gt.signal(comm, tl.arange(0, 32), 0, SECOND)
    elif CASE == 3:
        gt.barrier(comm, "all", 0, "none", SECOND)
    elif CASE == 4:
        gt.barrier(comm, "world", 0, "puts", SECOND)
    elif CASE == 5:
        gt.put_value(comm, 0, 0, 0, x, SECOND)
    elif CASE == 6:
        gt.signal(comm, 2**32, 0, SECOND)


WRONG = [
    "`peer` is -1, and gin takes 0 to 4294967295",
    "`peer` is of type fp32, and gin takes an integer",
    r"`peer` is a tensor of shape .*32.*, and gin takes one value for the block",
    "`team` is 'all', and gin knows 'world', 'rail', 'lsa'",
    "`fence` is 'puts', and gin knows 'none', 'put', 'get', 'put_get'",
    r"`value` is of type pointer<fp32>, and gin takes a number of 1, 2, 4 or 8 bytes",
    "`peer` is 4294967296, and gin takes 0 to 4294967295",
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_an_argument_that_does_not_fit_is_named(case):
    with pytest.raises(Exception) as raised:
        compiled(wrong, comm="i64", x="*fp32", CASE=case)
    causes, error = [], raised.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__ or error.__context__
    assert re.search(WRONG[case], "\n".join(causes)), causes


def test_a_call_of_several_blocks_is_refused():
    with pytest.raises(Exception) as raised:
        compiled(uniform, comm="i64", out="*u64", options={"num_ctas": 2})
    causes = f"{raised.value} {raised.value.__cause__}"
    assert "num_ctas=2: a call of gin is a call of one block; launch with num_ctas=1" in causes


@triton.jit
def signal_of(comm, peer):
    gt.signal(comm, peer, 0, SECOND)


def test_a_rank_past_32_bits_does_not_become_another_rank():
    text = compiled(signal_of, comm="i64", peer="i64")["ttir"]
    assert "arith.minui" in text and "4294967295" in text
    assert "arith.minui" not in compiled(signal_of, comm="i64", peer="i32")["ttir"]


def test_kernels_of_an_older_module_are_not_reused():
    with open(gt.extern_libs(architectures()[0])["gin"], encoding="utf-8") as file:
        head = file.readline()
    assert hashlib.sha256(pathlib.Path(gt.__file__).read_bytes()).hexdigest() in head


def test_an_architecture_without_functions_is_named():
    with pytest.raises(ValueError, match=r"built with device functions for sm_\d+.*, and sm_70 needs others: .*GIN_ARCHS=sm_70"):
        gt.extern_libs(70)


INTERPRETED = """
import triton
import triton.language as tl
from gincomm import triton as gt

@triton.jit
def kernel(comm):
    gt.signal(comm, 0, 0, 1)

try:
    kernel[(1,)](1)
except Exception as error:
    while error is not None:
        print(error)
        error = error.__cause__
"""


def test_the_interpreter_says_that_it_cannot_call(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(INTERPRETED)
    said = run(f"import runpy; runpy.run_path({str(path)!r})", env={"TRITON_INTERPRET": "1"})
    assert "interpreter cannot call signal of gin: unset TRITON_INTERPRET" in said


EXAMPLE_KERNELS = [
    (
        "triton_all_to_all.py",
        "all_to_all",
        {
            **dict.fromkeys(["comm", "inbox_window", "outbox_window", "deadline"], "i64"),
            **dict.fromkeys(["inbox", "result"], "*fp32"),
            **dict.fromkeys(["rank", "ranks", "elements", "round"], "i32"),
            "TILE": 1024,
        },
    ),
    (
        "triton_fused_add.py",
        "receive_and_add",
        {
            **dict.fromkeys(["comm", "inbox_window", "outbox_window", "deadline"], "i64"),
            **dict.fromkeys(["inbox", "outbox", "x", "y", "result"], "*fp32"),
            **dict.fromkeys(["left", "right", "round"], "i32"),
            "TILE": 2048,
        },
    ),
    (
        "triton_fused_add.py",
        "load_and_add",
        {
            **dict.fromkeys(["comm", "outbox_window", "deadline"], "i64"),
            **dict.fromkeys(["outbox", "x", "y", "result"], "*fp32"),
            "ranks": "i32",
            "TILE": 2048,
        },
    ),
]


@pytest.mark.parametrize("file, name, parameters", EXAMPLE_KERNELS)
def test_the_kernels_of_the_examples_compile(file, name, parameters, tmp_path, monkeypatch):
    text = pathlib.Path(EXAMPLES, file).read_text(encoding="utf-8")
    (tmp_path / file).write_text(text.removesuffix("\nmain()\n"))
    # Only the host's part uses torch.
    if importlib.util.find_spec("torch") is None:
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    spec = importlib.util.spec_from_file_location("example", tmp_path / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    ordered = {each: parameters[each] for each in kernel.arg_names}
    forms = compiled(kernel, **ordered)
    assert forms["cubin"][:4] == b"\x7fELF" and ".extern .func" not in forms["ptx"]


@triton.jit
def load_wide(comm, window, out, N: tl.constexpr, ALIGNED: tl.constexpr):
    i = tl.arange(0, N)
    pointer = gt.peer_pointer(comm, window, 1, tl.float32)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(out + i, tl.load(pointer + i))


def test_loads_of_a_peers_memory_are_wide_where_the_kernel_states_the_alignment():
    for aligned, width in ((0, "b32 {"), (1, "v4.b32")):
        ptx = compiled(load_wide, comm="i64", window="i64", out="*fp32", N=1024, ALIGNED=aligned)["ptx"]
        assert re.search(rf"\bld\.global\.{width}", ptx), (aligned, ptx)


@triton.jit
def to_itself(comm, window, other, mine, there, out, values, deadline):
    """Every operation, by one rank with itself."""
    i = tl.arange(0, 256)
    tl.store(mine + i, i + 1)
    fault = gt.put(comm, 0, other, 0, window, 0, 1024, deadline, signal=0, amount=3, counter=0)
    fault |= gt.wait_signal(comm, 0, 3, deadline)
    tl.store(out + i, tl.load(there + i))
    fault |= gt.wait_counter(comm, 0, 1, deadline)
    tl.store(values, gt.read_signal(comm, 0))
    tl.store(values + 1, gt.read_counter(comm, 0))
    fault |= gt.put_value(comm, 0, other, 4, tl.cast(-7, tl.int16), deadline, signal=1)
    fault |= gt.put_value(comm, 0, other, 8, 1.5, deadline, signal=1)
    fault |= gt.wait_signal(comm, 1, 2, deadline)
    fault |= gt.get(comm, 0, other, 0, window, 512, 512, deadline)
    fault |= gt.flush(comm, deadline)
    tl.store(out + 256 + i, tl.load(mine + i))
    fault |= gt.barrier(comm, "world", 0, "put_get", deadline)
    pointer = gt.peer_pointer(comm, other, 0, tl.int32, offset=1020)
    tl.store(values + 2, tl.load(pointer))
    # Past the end.
    tl.store(values + 3, gt.peer_pointer(comm, other, 0, tl.int32, offset=1024).to(tl.uint64))
    fault |= gt.signal(comm, 0, 1, deadline, amount=5)
    fault |= gt.wait_signal(comm, 1, 7, deadline)
    tl.store(values + 4, gt.report(comm, fault))


@pytest.mark.parametrize("routes", ["automatic", "network"])
def test_every_operation_of_a_rank_with_itself(routes):
    torch = pytest.importorskip("torch")
    from torch_support import needs_gpus, on_device

    needs_gpus(1)

    def body(rank, stream):
        with rank.communicator(signals=2, counters=1, world_barriers=1, routes=routes) as comm:
            windows = [comm.alloc_window(256, "int32") for _ in range(2)]
            mine, there = (torch.from_dlpack(window) for window in windows)
            out, values = torch.zeros(512, dtype=torch.int32, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda")
            handles = comm.handle, *(window.handle for window in windows)
            to_itself[(1,)](*handles, mine, there, out, values, gin.Deadline(10).ns, extern_libs=gt.extern_libs())
            stream.synchronize(timeout=30)
            comm.check()
            first = list(range(1, 257))
            assert out[:256].tolist() == first
            changed = [1, (2 & ~0xFFFF) | 0xFFF9, 0x3FC00000, *first[3:128]]
            assert out[256:].tolist() == first[:128] + changed
            assert values.tolist() == [3, 1, 256, 0, 0]
        torch.cuda.synchronize()

    gin.launch(1, lambda rank: on_device(rank, body), device="cuda")


@triton.jit
def wait_in_vain(comm, out, deadline):
    fault = gt.wait_signal(comm, 0, 1, deadline)
    gt.report(comm, fault)
    tl.store(out, gt.read_signal(comm, 5))


def test_a_wait_ends_at_its_deadline_and_the_host_gets_the_first_fault():
    torch = pytest.importorskip("torch")
    from torch_support import needs_gpus, on_device

    needs_gpus(1)

    def body(rank, stream):
        with rank.communicator(signals=1) as comm:
            out = torch.ones(1, dtype=torch.int64, device="cuda")
            wait_in_vain[(1,)](comm.handle, out, gin.Deadline(0.05).ns, extern_libs=gt.extern_libs())
            stream.synchronize(timeout=30)
            with pytest.raises(gin.FaultError) as raised:
                comm.check()
            fault = raised.value
            assert (fault.kind, fault.operation, fault.subject_id) == ("Timeout", "wait_signal", 0)
            assert (fault.expected, fault.seen, fault.deadline_ns) == (1, 0, 50_000_000)
            # A signal that does not exist reads as 0.
            assert out.item() == 0

    gin.launch(1, lambda rank: on_device(rank, body), device="cuda")


@pytest.mark.parametrize("name, lines", [("triton_all_to_all.py", 2), ("triton_fused_add.py", 4)])
def test_two_processes_run_the_examples(name, lines):
    pytest.importorskip("torch")
    from torch_support import needs_gpus, torchrun

    needs_gpus(2)
    found = torchrun(os.path.join(EXAMPLES, name))
    assert found.count("are right") == lines, found
