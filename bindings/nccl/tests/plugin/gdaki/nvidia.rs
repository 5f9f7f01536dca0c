// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA's own device code, compiled for the CPU from a checkout of NCCL that `GIN_NCCL_SOURCE` names. Without the
//! variable the tests play it (`doca`).
//!
//! Three statements of its headers are PTX; the functions of `tests/nvidia` take their place, as they do for CUDA's
//! functions. The rest is unchanged: reservation of slots, entries, records, doorbells, polls, and NCCL's calls.

use std::ffi::c_int;
use std::fs::{copy, create_dir_all, read_dir, read_to_string, write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The arguments of all calls. `device.cc` has the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) handle: u64,
    pub(super) rank: c_int,
    pub(super) ranks: c_int,
    pub(super) context: c_int,
    pub(super) peer: c_int,
    pub(super) to_window: u64,
    pub(super) from_window: u64,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: u64,
    pub(super) signal_type: c_int,
    pub(super) signal: u32,
    pub(super) signal_window: u64,
    pub(super) signal_offset: u64,
    pub(super) amount: u64,
    pub(super) has_counter: c_int,
    pub(super) counter: u32,
    pub(super) flags: u32,
    pub(super) value: u64,
}

type Function = unsafe extern "C" fn(*const Call);

/// The functions of the library.
#[derive(Debug)]
pub(super) struct Code {
    pub(super) put: Function,
    pub(super) put_value: Function,
    pub(super) get: Function,
    pub(super) flush: Function,
}

/// Returns NVIDIA's code if there is a checkout of NCCL.
pub(super) fn code() -> Option<&'static Code> {
    static CODE: OnceLock<Option<Code>> = OnceLock::new();
    let get = || {
        let source = std::env::var_os("GIN_NCCL_SOURCE")?;
        let stage = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nvidia-{}", std::process::id()));
        let code = load(&build(Path::new(&source), &stage));
        // The library stays loaded.
        std::fs::remove_dir_all(stage).unwrap();
        Some(code)
    };
    CODE.get_or_init(get).as_ref()
}

fn load(path: &Path) -> Code {
    // Safety: the library has no initialisers. It is never closed, so its functions stay.
    unsafe {
        let library = Box::leak(Box::new(libloading::Library::new(path).unwrap()));
        let function = |name: &[u8]| *library.get::<Function>(name).unwrap();
        Code {
            put: function(b"gin_nv_put"),
            put_value: function(b"gin_nv_put_value"),
            get: function(b"gin_nv_get"),
            flush: function(b"gin_nv_flush"),
        }
    }
}

/// Compiles the library in the folder `stage`.
fn build(source: &Path, stage: &Path) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvidia");
    let doca = source.join("src/transport/net_ib/gdaki/doca-gpunetio/include");
    let gdaki = source.join("src/include/nccl_device/gin/gdaki");
    for (from, to) in [
        (&doca, "doca_gpunetio"),
        (&doca.join("common"), "doca_gpunetio/common"),
        (&doca.join("device"), "doca_gpunetio/device"),
        (&gdaki, "gin/gdaki"),
        (&own, "."),
    ] {
        copy_headers(from, &stage.join(to));
    }
    // The headers find these by the paths of NCCL and CUDA.
    for (path, text) in [
        ("gin/gin_device_common.h", "#include \"../gin_device_common.h\"\n"),
        ("nccl_device/utility.h", "#include \"../gin_device_common.h\"\n"),
        ("cuda/atomic", "#include \"../cuda_on_cpu.hpp\"\n"),
    ] {
        create_dir_all(stage.join(path).parent().unwrap()).unwrap();
        write(stage.join(path), text).unwrap();
    }
    let library = stage.join("libgin_nvidia.so");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-I."]).current_dir(stage);
    let output = compiler.args(["device.cc", "-o"]).arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// Copies the files of a folder, without its folders, and replaces what is PTX in them.
fn copy_headers(from: &Path, to: &Path) {
    create_dir_all(to).unwrap();
    let files = read_dir(from).unwrap_or_else(|error| panic!("GIN_NCCL_SOURCE: {}: {error}", from.display()));
    for path in files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        let to = to.join(path.file_name().unwrap());
        if path.extension().is_some_and(|extension| extension == "cuh") {
            write(to, without_ptx(&read_to_string(path).unwrap())).unwrap();
        } else {
            copy(path, to).unwrap();
        }
    }
}

fn without_ptx(text: &str) -> String {
    let mut parts = text.split("asm volatile(");
    let mut all = parts.next().unwrap().to_owned();
    for part in parts {
        let (statement, rest) = part.split_once(");").unwrap();
        all += match statement {
            statement if statement.contains("st.weak.cs.v2.b64") => "gin_store_segment(ptr, val);",
            statement if statement.contains("dbrec_head_16b") => "dbrec_val = __builtin_bswap32(prod_index & 0xffff);",
            _ => "std::abort();",
        };
        all += rest;
    }
    all
}

impl Call {
    pub(super) fn run(&self, function: Function) {
        // Safety: the code reads the argument, and memory that the test keeps.
        unsafe { function(std::ptr::from_ref(self)) };
    }
}

const _: () = assert!(size_of::<Call>() == 120);
