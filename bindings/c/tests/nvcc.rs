// SPDX-License-Identifier: MIT OR Apache-2.0

//! The device functions as CUDA C++ programs link them. Nothing runs on a GPU. Without a compiler for kernels, or
//! `nvcc` beside `ptxas`, the trials are reported as ignored.

mod common;

use common::{HERE, library, run, try_run};
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, NEAR_WORDS, STRIDE_SHIFT};
use gin_abi::{COUNTER_BITS, CommHandle, ContextData, FaultKind, Operation, SIGNAL_BITS, WindowData, WindowHandle};
use gin_build::{Arch, DeviceLibrary, KernelBuilder, Ptxas, Toolchain, UsePtxas};
use gin_capi_device::options;
use gin_device::internal::signal_words::{self, Words};
use gin_device::internal::{host_word, status::NOW_AND_THEN};
use gin_device::sys::{Global, OPERATIONS, data::DATA_OPERATIONS};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::LazyLock;

/// The folder of NVIDIA's tools, or the reason why there is none.
static FOUND: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
    let ptxas = Ptxas::find(Path::new(HERE))?;
    let root = ptxas.path().ancestors().nth(2).expect("ptxas is in the folder bin").to_path_buf();
    if root.join("bin/nvcc").is_file() { Ok(root) } else { Err(format!("{} has no nvcc", root.display())) }
});

static CUDA: LazyLock<&PathBuf> = LazyLock::new(|| FOUND.as_ref().expect("the trials are ignored without nvcc"));

/// The folder of NVIDIA's libraries: `lib64` in an installation, `lib` in the Python packages.
static CUDA_LIB: LazyLock<String> = LazyLock::new(|| {
    let lib64 = CUDA.join("lib64");
    if lib64.is_dir() { lib64 } else { CUDA.join("lib") }.display().to_string()
});

/// A folder for the results of this program.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("make a folder"));

/// The library of the device functions.
static LIBRARY: LazyLock<DeviceLibrary> = LazyLock::new(|| {
    let builder = KernelBuilder::new(Path::new(HERE).join("device")).arch(Arch::Sm90).ptxas(UsePtxas::No).quiet();
    let built = builder
        .bitcode(true)
        .target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"))
        .build()
        .expect("compile the functions");
    built.write_device_library(&FOLDER.path().join("device-lib"), "gin_device", 128).expect("make the library")
});

fn missing() -> Option<String> {
    let without_compiler = || Toolchain::find().err().map(|error| error.to_string().replace('\n', " "));
    FOUND.as_ref().err().cloned().or_else(without_compiler)
}

fn try_nvcc<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<String, String> {
    try_nvcc_for("sm_90", arguments)
}

fn try_nvcc_for<S: AsRef<OsStr>>(arch: &str, arguments: impl IntoIterator<Item = S>) -> Result<String, String> {
    let mut command = Command::new(CUDA.join("bin/nvcc"));
    command.args(["-std=c++17", &format!("-arch={arch}"), "-rdc=true", &format!("-I{HERE}/include")]);
    try_run(command.arg(format!("-L{}", *CUDA_LIB)).args(arguments))
}

fn nvcc<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) {
    try_nvcc(arguments).unwrap_or_else(|error| panic!("{error}"));
}

fn here(path: &str) -> String {
    format!("{HERE}/{path}")
}

fn out(name: &str) -> String {
    FOLDER.path().join(name).display().to_string()
}

/// Every operation of the header finds its function. A second gin module in the program does no harm; without the
/// library the program does not link.
fn links() {
    let object = out("calls.o");
    nvcc(["-dc", &here("tests/cuda/calls.cu"), "-o", &object]);
    let archive = LIBRARY.archive.display().to_string();
    nvcc([&object, &archive, "-o", &out("calls")]);

    // Another module of gin-device: the same functions under other names.
    let text = std::fs::read_to_string(&LIBRARY.ptx[0].1).expect("read the PTX");
    let twin =
        text.replace("gin_abi_version", "GIN_ABI").replace("gin_", "twin_").replace("GIN_ABI", "gin_abi_version");
    let twin = twin.replace("twin_dynamic_shared", "gin_dynamic_shared");
    std::fs::write(out("twin.ptx"), &twin).expect("write PTX");
    nvcc(["-dc", &out("twin.ptx"), "-o", &out("twin.o")]);
    nvcc([&object, &archive, &out("twin.o"), "-o", &out("two")]);
    let strong = |text: &str| text.replace(".weak .global", ".visible .global");
    std::fs::write(out("strong.ptx"), strong(&twin)).expect("write PTX");
    std::fs::write(out("first.ptx"), strong(&text)).expect("write PTX");
    for name in ["strong", "first"] {
        nvcc(["-dc", &out(&format!("{name}.ptx")), "-o", &out(&format!("{name}.o"))]);
    }
    let refused = |objects: &[&str]| {
        let all = objects.iter().map(|name| out(name)).chain([object.clone(), "-o".to_owned(), out("refused")]);
        try_nvcc(all).expect_err("it was linked")
    };
    assert!(refused(&["first.o", "strong.o"]).contains("gin_abi_version"), "two strong variables link");
    assert!(refused(&[]).contains("gin_put"), "a program links without the functions");
}

/// Before sm_90 the header has the fences that these GPUs have.
fn older() {
    let [ptx, object] = [out("older.ptx"), out("older.o")];
    for (kind, to) in [("-ptx", &ptx), ("-dc", &object)] {
        try_nvcc_for("sm_80", [kind, &here("tests/cuda/calls.cu"), "-o", to]).unwrap_or_else(|error| panic!("{error}"));
    }
    let text = std::fs::read_to_string(&ptx).expect("read PTX");
    assert!(text.contains("fence.acq_rel.sys"), "{text}");
    assert!(!text.contains("fence.acquire") && !text.contains("fence.release"), "{text}");
}

/// Writes a PTX module as if it had been compiled with another ABI number. Returns its path.
fn of_another_number(ptx: &Path) -> String {
    let words = |version: u32| format!("gin_abi_version[{}]", 4 * version);
    let text = std::fs::read_to_string(ptx).expect("read the PTX");
    let other = text.replace(&words(gin_abi::ABI_VERSION), &words(gin_abi::ABI_VERSION + 1));
    assert_ne!(other, text, "the module has the variable");
    std::fs::write(out("other.ptx"), other).expect("write PTX");
    out("other.ptx")
}

/// A crate outside of this workspace exports a device function. Its object and its fat binary link into a program that
/// uses gin's own functions, too.
fn links_own() {
    let folder = FOLDER.path().join("own");
    std::fs::create_dir_all(folder.join("src")).expect("make a folder");
    let manifest = std::fs::read_to_string(here("tests/own/Cargo.toml.in")).expect("read a manifest");
    let manifest = manifest.replace("GIN/", &format!("{}/", here("../..")));
    std::fs::write(folder.join("Cargo.toml"), manifest).expect("write a manifest");
    std::fs::copy(here("tests/own/src/lib.rs"), folder.join("src/lib.rs")).expect("copy a source");
    let builder = KernelBuilder::new(&folder).arch(Arch::Sm90).ptxas(UsePtxas::No).quiet();
    let built = builder.target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR")).build().expect("compile the function");
    let own = built.write_device_library(&folder.join("out"), "own_functions", 128).expect("make the library");

    let [main, archive] = [out("own_main.o"), LIBRARY.archive.display().to_string()];
    nvcc(["-dc", &here("tests/own/main.cu"), "-o", &main]);
    let object = own.object.display().to_string();
    nvcc([&main, &object, &archive, "-o", &out("own_main")]);
    let disassembled = |file: &str| run(Command::new(CUDA.join("bin/cuobjdump")).args(["-sass", &out(file)]));
    // Fat binaries become an image that a program loads; objects carry them into the program itself.
    let fat = [&own.fat_binary, &LIBRARY.fat_binary].map(|file| file.display().to_string());
    nvcc(["-dlink", "-cubin", &main, &fat[0], &fat[1], "-o", &out("own.cubin")]);
    for program in ["own_main", "own.cubin"] {
        let code = disassembled(program);
        for function in ["shift", "own_shift", "gin_report", "gin_flush"] {
            assert!(code.contains(&format!("Function : {function}\n")), "{program} has no {function}: {code}");
        }
    }

    // The same function as of a gin with another number, then a kernel as of its header.
    nvcc(["-dc", &of_another_number(&own.ptx[0].1), "-o", &out("other.o")]);
    let headers = FOLDER.path().join("headers");
    std::fs::create_dir_all(&headers).expect("make a folder");
    for entry in std::fs::read_dir(here("include")).expect("read the folder of headers").flatten() {
        let text = std::fs::read_to_string(entry.path()).expect("read a header");
        let define = |version: u32| format!("#define GIN_ABI_VERSION {version}\n");
        let text = text.replace(&define(gin_abi::ABI_VERSION), &define(gin_abi::ABI_VERSION + 1));
        std::fs::write(headers.join(entry.file_name()), text).expect("write a header");
    }
    // A source finds headers of its own folder first.
    let (source, newer) = (headers.join("main.cu"), out("newer.o"));
    std::fs::copy(here("tests/own/main.cu"), &source).expect("copy a source");
    nvcc(["-dc", &source.display().to_string(), "-o", &newer]);
    for linked in [[&main, &out("other.o"), &archive], [&newer, &object, &archive]] {
        let said = try_nvcc(linked.into_iter().chain([&"-o".to_owned(), &out("refused")])).expect_err("it was linked");
        assert!(said.contains("Size doesn't match for 'gin_abi_version'"), "{said}");
    }

    let refused = |with: &str| try_nvcc([&main, with, "-o", &out("refused")]).expect_err("it was linked");
    assert!(refused(&archive).contains("Undefined reference to 'own_shift'"), "{}", refused(&archive));
    assert!(refused(&object).contains("Undefined reference to 'gin_flush'"), "{}", refused(&object));
}

/// Returns the parameters and results of the functions of a module, by name.
fn prototypes(text: &str, directive: &str) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for part in text.split(directive).skip(1) {
        // Up to the body, or the end of a declaration.
        let head = part.split(['{', ';']).next().unwrap_or_default();
        let head = head.trim_start().strip_prefix(".func").unwrap_or(head).trim();
        let (result, rest) = match head.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((result, rest)) => (result, rest),
            None => ("", head),
        };
        let (name, parameters) = rest.trim().split_once('(').unwrap_or((rest.trim(), ""));
        // A parameter is `.param .b64 NAME` or `.param .align 8 .b8 NAME[16]`.
        let kind = |parameter: &str| {
            let words: Vec<&str> = parameter.split_whitespace().collect();
            let array = words.last().and_then(|name| name.split_once('[')).map_or("", |(_, length)| length);
            format!(
                "{}{}",
                words.iter().take(words.len().saturating_sub(1)).copied().collect::<Vec<_>>().join(" "),
                array
            )
        };
        let parameters = parameters.trim_end().trim_end_matches(')');
        let all = std::iter::once(result).chain(parameters.split(',')).map(kind).collect();
        if name.trim().starts_with("gin_") {
            found.insert(name.trim().to_owned(), all);
        }
    }
    found
}

/// C++ and Rust have the same functions with the same parameters.
fn agrees() {
    nvcc(["-ptx", &here("tests/cuda/calls.cu"), "-o", &out("calls.ptx")]);
    let theirs = std::fs::read_to_string(out("calls.ptx")).expect("read PTX");
    let ours = std::fs::read_to_string(&LIBRARY.ptx[0].1).expect("read PTX");
    let (theirs, ours) = (prototypes(&theirs, ".extern "), prototypes(&ours, ".visible "));
    assert!(ours.len() >= 50, "{ours:?}");
    for (name, parameters) in &ours {
        assert_eq!(theirs.get(name), Some(parameters), "{name}, in C++ and in Rust");
    }
    assert_eq!(theirs.len(), ours.len());
}

/// nvcc moves no read of a table out of a loop without the condition under which there is a table.
fn guarded() {
    nvcc(["-ptx", &here("tests/cuda/loops.cu"), "-o", &out("loops.ptx")]);
    let text = std::fs::read_to_string(out("loops.ptx")).expect("read PTX");
    let kernel = text.split(".entry many_puts(").nth(1).expect("the PTX has the kernel");
    // The first label, or the first jump without a condition, is the loop's beginning.
    let before = kernel.split("\n$").next().and_then(|text| text.split("bra.uni").next()).unwrap_or_default();
    assert!(kernel.contains("ld.global") && before.contains("ld.param"), "{kernel}");
    // Of two windows, three words each. After a wait they would otherwise take a trip to L2 in each round.
    assert_eq!(before.matches("@p ld.global").count(), before.matches("ld.global").count(), "{before}");
    assert_eq!(before.matches("@p ld.global").count(), 6, "{before}");
    assert_eq!(kernel.matches("@p ld.global").count(), 6, "{kernel}");
    for guard in before.split("setp.ne.u32 p, ").skip(1) {
        assert!(guard.starts_with("%r"), "a constant: {before}");
    }
}

/// A kernel finds received rows by loads alone: without a call, a stack or spills.
fn received() {
    let (cubin, arch) = (out("received.cubin"), "-arch=sm_90");
    let mut command = Command::new(CUDA.join("bin/nvcc"));
    command.args(["-std=c++17", arch, "-Xptxas", "-v", &format!("-I{HERE}/include"), "-cubin"]);
    let said = run(command.args([&here("tests/cuda/received.cu"), "-o", &cubin]));
    assert!(said.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), "{said}");
}

/// A wait polls in code of the kernel, and calls only after that.
fn polls() {
    nvcc(["-ptx", &here("tests/cuda/loops.cu"), "-o", &out("polls.ptx")]);
    let text = std::fs::read_to_string(out("polls.ptx")).expect("read PTX");
    for (name, function) in [("one_wait", "gin_wait_signal"), ("one_count", "gin_wait_counter")] {
        let kernel = text.split(&format!(".entry {name}(")).nth(1).and_then(|text| text.split(".entry").next());
        let kernel = kernel.expect("the PTX has the kernel");
        let (before, _) = kernel.split_once(&format!("{function}, ")).expect("it calls the function");
        let poll = before.find("ld.relaxed.sys.global.u64").expect("it polls before that");
        assert!(before[poll..].contains("fence.acquire.sys"), "{kernel}");
    }
}

/// A translation unit with the layouts and codes of gin-abi, as assertions.
fn assertions() -> String {
    let mut text = String::from("#include \"gin_device.cuh\"\n#include <cstddef>\n");
    macro_rules! layout {
        ($rust:ident, $c:literal, $($field:ident),* $(,)?) => {{
            writeln!(text, "static_assert(sizeof({}) == {}, \"\");", $c, size_of::<$rust>()).expect("write");
            $(
                let (field, offset) = (stringify!($field), offset_of!($rust, $field));
                writeln!(text, "static_assert(offsetof({}, {field}) == {offset}, \"\");", $c).expect("write");
            )*
            // The list is complete.
            let _ = |$rust { $($field: _),* }: $rust| ();
        }};
    }
    layout!(
        CommHandle,
        "gin_device_comm_t",
        abi,
        backend,
        rank,
        ranks,
        lsa_rank,
        lsa_size,
        contexts,
        signals,
        counters,
        windows,
        capabilities,
        engines,
        world_barriers,
        rail_barriers,
        lsa_barriers,
        trap_on_fault,
        proxy_contexts,
        strong_signals,
        lsa_first,
        lsa_reach,
        context_table,
        window_table,
        host_status,
        kernel_status,
        kernel_status_copy,
        barrier_state,
        peer_signals,
        queue_pairs,
        window_keys,
        gdaki_contexts,
        reserved,
        copy
    );
    layout!(
        WindowHandle,
        "gin_device_window_t",
        base,
        own_length,
        least_length,
        data,
        id,
        flags,
        stride,
        rank,
        lsa_first,
        lsa_reach
    );
    layout!(
        WindowData,
        "gin_device_window_entry_t",
        active,
        flags,
        base,
        length,
        lengths,
        peers,
        va_gpu,
        va_cpu,
        va_near,
        peer_va_gpu,
        stride,
        reserved
    );
    layout!(
        ContextData,
        "gin::detail::Context",
        producer_index,
        consumer_index,
        slots,
        depth_log2,
        timed,
        depth_mask,
        oldest_incomplete,
        completion_index,
        counters,
        counter_near,
        signal_gpu,
        signal_nic,
        signal_cpu,
        signal_near,
        signal_shadow,
        counters_gpu,
        busy,
        mailbox
    );
    writeln!(text, "static_assert(alignof(gin::detail::Context) == {}, \"\");", align_of::<ContextData>())
        .expect("write");
    let codes = [
        ("OpPut", Operation::Put as u64),
        ("OpPutValue", Operation::PutValue as u64),
        ("OpSignal", Operation::Signal as u64),
        ("OpWaitSignal", Operation::WaitSignal as u64),
        ("OpWaitCounter", Operation::WaitCounter as u64),
        ("EngineGpu", ENGINE_GPU.into()),
        ("EngineNic", ENGINE_NIC.into()),
        ("EngineCpu", ENGINE_CPU.into()),
        ("NearBytes", 8 * NEAR_WORDS),
        ("NearBase", 8 * host_word::SPARE),
        ("NearLast", 8 * host_word::LAST),
        ("NearMail", 8 * host_word::MAIL),
        ("Wide", signal_words::WIDE.into()),
        ("Looks", Words::<Global>::LOOKS_ALONE.into()),
        ("NowAndThen", NOW_AND_THEN),
        ("Signal", options::SIGNAL.into()),
        ("Weak", options::WEAK.into()),
        ("Counter", options::COUNTER.into()),
        ("AllRoutes", options::ALL_ROUTES.into()),
        ("AllContexts", options::ALL_CONTEXTS.into()),
        ("Look", options::LOOK.into()),
        ("SignalBits", SIGNAL_BITS.into()),
        ("CounterBits", COUNTER_BITS.into()),
        ("StrideShift", STRIDE_SHIFT.into()),
    ];
    for (name, code) in codes {
        writeln!(text, "static_assert(gin::detail::{name} == {code}, \"\");").expect("write");
    }
    for (wrapper, c) in [("Comm", "gin_device_comm_t"), ("Window<float>", "gin_device_window_t")] {
        writeln!(text, "static_assert(sizeof(gin::{wrapper}) == sizeof({c}), \"\");").expect("write");
    }
    for kind in FaultKind::ALL {
        writeln!(text, "static_assert(gin::FaultKind::{kind:?} == gin::FaultKind({}), \"\");", *kind as u32)
            .expect("write");
    }
    writeln!(text, "static_assert(GIN_ABI_VERSION == {}, \"\");", gin_abi::ABI_VERSION).expect("write");
    text
}

/// The accesses of the header that inline are those of `sys`, by name and instruction.
fn accesses() {
    let text = std::fs::read_to_string(here("include/gin_inline.cuh")).expect("read the header");
    let known = |name: &str| OPERATIONS.iter().chain(DATA_OPERATIONS).find(|row| row.name == name);
    let mut seen = 0;
    for line in text.lines() {
        let Some((name, rest)) = ["GIN_LOAD(", "GIN_STORE(", "GIN_CHANGE(", "GIN_FENCE("]
            .iter()
            .find_map(|begin| line.strip_prefix(begin)?.split_once(", "))
        else {
            continue;
        };
        let ptx = rest.split('"').nth(1).expect("a line has an instruction");
        let row = known(name).unwrap_or_else(|| panic!("sys has no {name}"));
        assert_eq!(row.ptx, ptx, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 14, "the header lists the accesses");
    for name in ["load_weak_pair", "store_weak_pair", "read_word"] {
        let row = known(name).expect("sys has it");
        assert!(text.contains(&format!("\"{} ", row.ptx)) || text.contains(&format!("({}", row.ptx)), "{name}");
    }
    let row = known("cycles").expect("sys has it");
    assert!(text.contains(&row.ptx.replace("mov.u64 %", "mov.u64 %0, %%")), "{}", row.ptx);
}

/// nvcc, and the compiler of the host, have the layouts of Rust.
fn layouts() {
    std::fs::write(out("layouts.cu"), assertions()).expect("write the source");
    std::fs::write(out("layouts.cpp"), assertions()).expect("write the source");
    nvcc(["-dc", &out("layouts.cu"), "-o", &out("layouts.o")]);
    run(common::compiler(true).args(["-fsyntax-only", &out("layouts.cpp")]));
}

/// The example links with the library when it is built, and by nvJitLink when it runs.
fn examples() {
    let gin = library("libgin_capi.so").display().to_string();
    let example = |name: &str| here(&format!("../../examples/cuda-cpp/{name}"));
    nvcc([&example("main.cu"), &LIBRARY.archive.display().to_string(), &gin, "-o", &out("main")]);
    nvcc(["-cubin", &example("kernels.cu"), "-o", &out("kernels.cubin")]);
    // The tests and the benchmark of GPUs.
    let library = ["-L", &out("device-lib"), "-lgin_device"].map(str::to_owned);
    for (source, name) in [("tests/c/operations.cpp", "operations"), ("../../bench/kernels/capi.cu", "bench")] {
        nvcc(["-x", "cu", "-dc", &here(source), "-o", &out(&format!("{name}.o"))]);
        let linked = ["-dlink", "-cubin", &out(&format!("{name}.o")), "-o", &out(&format!("{name}.cubin"))];
        nvcc(linked.map(str::to_owned).iter().chain(&library));
    }
    // The relocatable machine code.
    let cubin = LIBRARY.cubins[0].1.display().to_string();
    nvcc(["-dlink", "-cubin", &out("operations.o"), &cubin, "-o", &out("by_cubin.cubin")]);
    let cuda = CUDA.display();
    let mut compile = common::compiler(true);
    compile.args([&example("jit.cpp"), &format!("-I{cuda}/include"), "-o", &out("jit"), &gin]);
    compile.args(["-pthread", "-Wno-pedantic", &format!("{}/libnvJitLink.so.13", *CUDA_LIB)]);
    run(&mut compile);
    let mut jit = Command::new(out("jit"));
    jit.env("LD_LIBRARY_PATH", &*CUDA_LIB);
    let said = run(jit.args([&out("kernels.cubin"), &LIBRARY.ptx[0].1.display().to_string(), "link"]));
    assert!(said.contains("linked: "), "{said}");
    let mut jit = Command::new(out("jit"));
    jit.env("LD_LIBRARY_PATH", &*CUDA_LIB);
    // nvJitLink only prints an error. A function compares its number when it is called.
    let said = run(jit.args([&out("kernels.cubin"), &of_another_number(&LIBRARY.ptx[0].1), "link"]));
    assert!(said.contains("Size doesn't match for 'gin_abi_version'"), "{said}");
}

/// CMake builds the example with nvcc, and the program that nvJitLink links while it runs.
fn by_cmake() {
    let cmake = common::cmake().expect("the trial is ignored without cmake");
    LazyLock::force(&LIBRARY);
    let prefix = common::installed(&FOLDER.path().join("root"), FOLDER.path());
    let cuda = CUDA.display();
    // nvcc itself looks in lib64 only.
    let options = [format!("-DCMAKE_CUDA_COMPILER={cuda}/bin/nvcc"), format!("-DCMAKE_CUDA_FLAGS=-L{}", *CUDA_LIB)];
    let build = common::by_cmake(&cmake, &prefix, &options.each_ref().map(String::as_str));
    assert!(build.join("main").is_file());
    let mut jit = Command::new(build.join("jit"));
    let said = run(jit.arg(build.join("kernels.cubin")).arg(prefix.join("share/gin/gin_device.sm_90.ptx")).arg("link"));
    assert!(said.contains("linked: "), "{said}");
}

/// Returns the command of a clang that reads bitcode of the compiler for kernels: the words of `GIN_CLANG`, else
/// `clang`.
///
/// # Errors
/// The reason why there is none.
fn clang() -> Result<Vec<String>, String> {
    let words = std::env::var("GIN_CLANG").unwrap_or_else(|_| "clang".to_owned());
    let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    let program = words.first().ok_or("GIN_CLANG is empty")?;
    let said = try_run(Command::new(program).args(&words[1..]).arg("--version"))?;
    let major = |text: &str, before: &str| -> Option<u32> {
        text.split(before).nth(1)?.trim_start().split('.').next()?.parse().ok()
    };
    let toolchain = Toolchain::find().map_err(|error| error.to_string().replace('\n', " "))?;
    let rustc = try_run(Command::new(&toolchain.rustc).arg("-vV"))?;
    match (major(&said, "clang version"), major(&rustc, "LLVM version:")) {
        (Some(clang), Some(llvm)) if clang >= llvm => Ok(words),
        (clang, llvm) => Err(format!("clang is of LLVM {clang:?}, the bitcode of LLVM {llvm:?}")),
    }
}

/// clang inlines the functions of Rust into a kernel in C++.
fn inlines() {
    let words = clang().expect("the trial is ignored without clang");
    let (_, bitcode) = LIBRARY.bitcode.first().expect("the library has bitcode");
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args([
        "-x",
        "cuda",
        "--cuda-device-only",
        "--cuda-gpu-arch=sm_90",
        "--cuda-feature=+ptx86",
    ]);
    command.args(["-nocudainc", "-nocudalib", "-include", &here("tests/cuda/clang.h"), "-std=c++17", "-O3", "-S"]);
    command.args([&format!("-I{HERE}/include"), "-Xclang", "-mlink-builtin-bitcode", "-Xclang"]).arg(bitcode);
    run(command.args([&here("tests/cuda/inlined.cu"), "-o", &out("inlined.ptx")]));
    let text = std::fs::read_to_string(out("inlined.ptx")).expect("read PTX");
    let kernel = text.split(".entry put_and_wait(").nth(1).expect("the PTX has the kernel");
    for name in ["gin_put", "gin_wait_signal", "gin_flush"] {
        assert!(!kernel.contains(name), "the kernel calls {name}");
    }
    // The fences are those of Rust for this architecture.
    assert!(text.contains("fence.acquire.sys") && !text.contains("acq_rel"), "{text}");
    let ptxas = CUDA.join("bin/ptxas");
    let said = run(Command::new(ptxas).args(["-arch=sm_90", "-v", &out("inlined.ptx"), "-o", &out("inlined.cubin")]));
    let used = said.split("Compiling entry function 'put_and_wait'").nth(1).expect("ptxas names the kernel");
    assert!(used.contains("0 bytes stack frame") && !used.contains("cumulative stack"), "{said}");
}

fn main() -> ExitCode {
    let none = missing();
    let trial = |name: &'static str, without: Option<String>, run: fn()| {
        let without = none.clone().or(without);
        Trial::ignorable_test(name, move || -> Result<Completion, Failed> {
            if let Some(reason) = without {
                return Ok(Completion::ignored_with(reason));
            }
            run();
            Ok(Completion::Completed)
        })
    };
    let trials = vec![
        trial("clang_inlines_the_functions_of_rust", clang().err(), inlines),
        trial("cmake_builds_the_example_with_nvcc", common::cmake().err(), by_cmake),
        trial("nvcc_leaves_reads_of_tables_behind_their_conditions", None, guarded),
        trial("kernels_find_received_rows_without_a_stack", None, received),
        trial("waits_poll_in_code_of_the_kernel_before_they_call", None, polls),
        trial("code_that_inlines_makes_the_accesses_of_rust", None, accesses),
        trial("device_functions_and_two_modules_link_into_a_program", None, links),
        trial("the_header_compiles_for_gpus_before_sm_90", None, older),
        trial("functions_of_a_users_crate_link_beside_those_of_gin", None, links_own),
        trial("cpp_and_rust_agree_on_the_parameters_of_every_function", None, agrees),
        trial("cpp_and_rust_agree_on_every_layout_and_code", None, layouts),
        trial("the_example_links_both_ways", None, examples),
    ];
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials);
    // Statics are not dropped.
    let _ = std::fs::remove_dir_all(FOLDER.path());
    conclusion.exit_code()
}
