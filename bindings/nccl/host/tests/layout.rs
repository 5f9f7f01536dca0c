// SPDX-License-Identifier: MIT OR Apache-2.0

//! The structures of `abi` against NCCL's headers, by a C++ compiler, and the functions against its library. `make
//! nccl-device` fetches both.

use gin_nccl_host::abi::{CommProperties, DevComm, DevCommRequirements, field};
use gin_nccl_host::{Library, TESTED};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fmt::Write;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let trials = vec![
        Trial::ignorable_test("structures_have_the_layouts_of_the_headers", compare),
        Trial::ignorable_test("the_library_opens_and_one_outside_of_the_range_is_refused", open),
    ];
    let mut arguments = Arguments::from_args();
    // The second test sets variables of the process.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit();
}

fn open() -> Result<Completion, Failed> {
    let library = target().join("nccl-device/nvidia/nccl/lib/libnccl.so.2");
    if !library.is_file() {
        return Ok(Completion::ignored_with(format!("no {}: make nccl-device fetches it", library.display())));
    }
    // Safety: the tests run one after the other in this thread.
    let set = |name, value: &std::ffi::OsStr| unsafe { std::env::set_var(name, value) };
    set("GIN_NCCL_LIBRARY", library.as_os_str());
    let opened = Library::open()?;
    assert_eq!(opened.version(), TESTED);
    let text = |expected: &str| match Library::open() {
        Ok(_) => Err(Failed::from(format!("opened, expected: {expected}"))),
        Err(error) if error.to_string().contains(expected) => Ok(()),
        Err(error) => Err(error.to_string().into()),
    };
    set("GIN_NCCL_NEWEST", "2.30.6".as_ref());
    text("the library is NCCL 2.30.7, and kernels linked with")?;
    set("GIN_NCCL_NEWEST", "new".as_ref());
    text("GIN_NCCL_NEWEST=new is no version")?;
    set("GIN_NCCL_NEWEST", "2.30.7".as_ref());
    set("GIN_NCCL_LIBRARY", "/no/libnccl.so.2".as_ref());
    text("pip install nvidia-nccl-cu13==2.30.7")?;
    Ok(Completion::Completed)
}

/// Returns the target folder of the checkout.
fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target")
}

macro_rules! offsets {
    ($rust:ident = $c:literal: $($field:ident = $name:literal),*) => {
        [($c, "", size_of::<$rust>()), $(($c, $name, offset_of!($rust, $field))),*]
    };
}

/// Returns structure, field and offset; the size for an empty field.
fn rows() -> Vec<(&'static str, &'static str, usize)> {
    let requirements = offsets!(DevCommRequirements = "ncclDevCommRequirements":
        size = "size", magic = "magic", version = "version", resources = "resourceRequirementsList",
        teams = "teamRequirementsList", lsa_multimem = "lsaMultimem", barriers = "barrierCount",
        lsa_barriers = "lsaBarrierCount", rail_gin_barriers = "railGinBarrierCount",
        lsa_ll_blocks = "lsaLLA2ABlockCount", lsa_ll_slots = "lsaLLA2ASlotCount",
        gin_force_enable = "ginForceEnable", gin_contexts = "ginContextCount", gin_signals = "ginSignalCount",
        gin_counters = "ginCounterCount", gin_connection = "ginConnectionType",
        gin_exclusive_contexts = "ginExclusiveContexts", gin_queue_depth = "ginQueueDepth",
        gin_traffic_class = "ginTrafficClass", world_gin_barriers = "worldGinBarrierCount",
        gin_strong_signals = "ginStrongSignalsRequired", gin_va_signals = "ginVaSignalsRequired");
    let properties = offsets!(CommProperties = "ncclCommProperties":
        size = "size", magic = "magic", version = "version", rank = "rank", ranks = "nRanks", cuda_device = "cudaDev",
        nvml_device = "nvmlDev", device_api = "deviceApiSupport", multimem = "multimemSupport", gin_type = "ginType",
        lsa_teams = "nLsaTeams", host_rma = "hostRmaSupport", railed_gin_type = "railedGinType");
    let dev_comm = [
        ("", size_of::<DevComm>()),
        ("magic", field::MAGIC),
        ("version", field::VERSION),
        ("rank", field::RANK),
        ("nRanks", field::RANKS),
        ("lsaRank", field::LSA_RANK),
        ("lsaSize", field::LSA_SIZE),
        ("ginSignalCount", field::SIGNALS),
        ("ginCounterCount", field::COUNTERS),
        ("ginContextCount", field::CONTEXTS),
        ("abortFlag", 8 * field::ABORT_FLAG_WORD),
    ];
    let dev_comm = dev_comm.map(|(name, offset)| ("ncclDevComm", name, offset));
    requirements.into_iter().chain(properties).chain(dev_comm).collect()
}

fn compare() -> Result<Completion, Failed> {
    let (nccl, cuda) =
        (target().join("nccl-device/nvidia/nccl/include"), target().join("cuda-tools/nvidia/cu13/include"));
    for (folder, make) in [(&nccl, "make nccl-device"), (&cuda, "make setup")] {
        if !folder.is_dir() {
            return Ok(Completion::ignored_with(format!("no {}: {make} fetches it", folder.display())));
        }
    }
    let mut source = String::from(
        "#include <cstddef>\n#include <cstdint>\n#define __host__\n#define __device__\n#include \"nccl.h\"\n#include \
         \"nccl_device/core.h\"\n#include \"nccl_device/impl/comm__types.h\"\n",
    );
    for (structure, name, offset) in rows() {
        let value = match name {
            "" => format!("sizeof({structure})"),
            _ => format!("offsetof({structure}, {name})"),
        };
        writeln!(source, "static_assert({value} == {offset}, \"{structure}::{name}\");")?;
    }
    writeln!(source, "static_assert(NCCL_VERSION_CODE == {}, \"version\");", TESTED)?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("layout.cpp");
    std::fs::write(&file, source)?;
    let mut compiler = Command::new("c++");
    let said =
        compiler.args(["-std=c++17", "-fsyntax-only", "-I"]).arg(&nccl).arg("-I").arg(&cuda).arg(&file).output()?;
    if said.status.success() { Ok(Completion::Completed) } else { Err(String::from_utf8_lossy(&said.stderr).into()) }
}
