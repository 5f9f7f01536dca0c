// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::BTreeMap;
use std::sync::MutexGuard;

use super::*;
use crate::fakes;

/// A machine with a fake compiler of LLVM 22, and what each test adds.
struct Machine {
    dir: tempfile::TempDir,
    vars: BTreeMap<std::ffi::OsString, std::ffi::OsString>,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fakes::program(&dir.path().join("rust/bin/rustc"), "echo 'LLVM version: 22.1.8'");
        let vars = BTreeMap::from([("RUSTUP_HOME".into(), dir.path().join("rustup").into())]);
        Machine { dir, vars, _alone: fakes::one_at_a_time() }
    }

    /// Adds NCCL's Python package as a checkout's target folder has it.
    fn with_package(self, version: &str) -> Self {
        let nccl = self.dir.path().join("project/target/nccl-device/nvidia/nccl");
        fs::create_dir_all(nccl.join("lib")).unwrap();
        fs::create_dir_all(nccl.join("include")).unwrap();
        fs::write(nccl.join("lib/libnccl_device.bc"), "").unwrap();
        fs::write(nccl.join("include/nccl.h"), format!("\n#define NCCL_VERSION_CODE {version}\n")).unwrap();
        self
    }

    /// Adds LLVM's programs to a toolchain of rustup.
    fn with_tools(self, toolchain: &str, llvm: &str, targets: &str) -> Self {
        let bin = self.dir.path().join("rustup/toolchains").join(toolchain).join("lib/rustlib/some-host/bin");
        for program in PROGRAMS {
            fakes::program(&bin.join(program), &format!("echo '  LLVM version {llvm}-rust'; echo '  {targets}'"));
        }
        self
    }

    fn find(&self) -> Result<Nccl, String> {
        let rustc = self.dir.path().join("rust/bin/rustc");
        let toolchain =
            Toolchain { cargo: rustc.clone(), rustc, version: "rustc 1.96.0".into(), target_cpus: Vec::new() };
        let environment = Environment { vars: self.vars.clone(), ..Environment::default() };
        let kernels = self.dir.path().join("project/kernels");
        Nccl::find_in(&environment, &kernels, &toolchain).map_err(|error| error.to_string())
    }
}

#[test]
fn library_and_programs_are_found_below_the_project_and_in_rustups_toolchains() {
    let machine = Machine::new().with_package("23007").with_tools("stable", "22.1.2", "nvptx64");
    let found = machine.find().unwrap();
    assert!(found.library.ends_with("project/target/nccl-device/nvidia/nccl/lib/libnccl_device.bc"), "{found:?}");
    assert!(found.tools.ends_with("toolchains/stable/lib/rustlib/some-host/bin"), "{found:?}");
}

#[test]
fn what_is_missing_is_named_with_the_command_that_installs_it() {
    let text = Machine::new().with_tools("stable", "22.1.2", "nvptx64").find().unwrap_err();
    assert!(
        text.contains("found no libnccl_device.bc") && text.contains("pip install nvidia-nccl-cu13==2.30.7"),
        "{text}"
    );
    let text = Machine::new().with_package("23007").find().unwrap_err();
    assert!(text.contains("llvm-link, opt, llc") && text.contains("rustup component add llvm-tools"), "{text}");
    assert!(text.contains("rustc 1.96.0"), "{text}");
}

#[test]
fn programs_of_an_older_llvm_or_without_the_target_are_refused_with_the_reason() {
    let machine = Machine::new().with_package("23007");
    let text = machine.with_tools("old", "21.1.0", "nvptx64").with_tools("other", "22.1.0", "x86").find().unwrap_err();
    assert!(text.contains("of LLVM 21, the compiler of 22") && text.contains("cannot make PTX"), "{text}");
}

#[test]
fn a_library_of_another_version_is_refused_with_both_versions() {
    let machine = Machine::new().with_package("23203").with_tools("stable", "22.1.2", "nvptx64");
    let text = machine.find().unwrap_err();
    assert!(text.contains("is of NCCL 2.32.3") && text.contains("tested with 2.30.7"), "{text}");
    let header = machine.dir.path().join("project/target/nccl-device/nvidia/nccl/include/nccl.h");
    fs::write(&header, "#define NCCL_MAJOR 2\n").unwrap();
    assert!(machine.find().unwrap_err().contains("no line `#define NCCL_VERSION_CODE`"));
    fs::remove_file(header).unwrap();
    let text = machine.find().unwrap_err();
    assert!(text.contains("is unknown") && text.contains("put NCCL's header"), "{text}");
}

#[test]
fn variables_that_name_nothing_are_refused() {
    let mut machine = Machine::new().with_package("23007").with_tools("stable", "22.1.2", "nvptx64");
    machine.vars.insert(TOOLS.into(), "/no/such".into());
    assert!(machine.find().unwrap_err().contains("GIN_LLVM_BIN=/no/such has not all of llvm-link, opt, llc"));
    machine.vars.insert(LIBRARY.into(), "/no/such.bc".into());
    assert!(machine.find().unwrap_err().contains("GIN_NCCL_DEVICE=/no/such.bc is not a file"));
}

#[test]
fn architectures_before_sm_90_are_refused() {
    assert!(check_archs(&[Arch::Sm90, Arch::Sm100]).is_ok());
    let text = check_archs(&[Arch::Sm90, Arch::Sm80]).unwrap_err().to_string();
    assert!(text.contains("not for sm_80") && text.contains("GIN_ARCHS"), "{text}");
}

const LINKED: &str = "; a module
  %1 = load ptr, ptr %0, align 8, !tbaa !7
  %2 = load ptr, ptr %1, align 8, !tbaa !7, !noalias !9
  %3 = load ptr, ptr %1, align 8, !tbaa !77
  %4 = load i64, ptr %1, align 8, !tbaa !7
define dso_local void @ncclCoopAnyInitThread(ptr noundef %0) #3 {
  store ptr addrspacecast (ptr addrspace(4) @threads to ptr), ptr %2, align 8, !tbaa !7
}
!4 = !{!\"_ZTS11ncclCoopAny\", !5, i64 0, !6, i64 16}
!6 = !{!4, !5, i64 0}
!7 = !{!4, !5, i64 16}
!8 = !{!\"llvm.loop.unroll.disable\"}
";

#[test]
fn loads_of_the_table_are_the_table_of_threads_and_loops_may_be_unrolled() {
    let text = inlinable(LINKED).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let table = "getelementptr i8, ptr addrspacecast (ptr addrspace(4) @threads to ptr), i64 0";
    assert_eq!(lines[1..3], [format!("  %1 = {table}"), format!("  %2 = {table}")]);
    assert_eq!(lines[3..11], LINKED.lines().collect::<Vec<_>>()[3..11], "all else is left as it is");
    assert_eq!(lines[11..], ["!8 = !{!\"gin.loop\"}"]);
}

#[test]
fn a_library_without_these_parts_is_refused() {
    for part in ["_ZTS11ncclCoopAny", "!7 = !{!4, !5, i64 16}", "load ptr, ", "InitThread", "unroll.disable"] {
        assert!(inlinable(&LINKED.replace(part, "other")).is_err(), "{part}");
    }
}

#[test]
fn kernels_and_public_variables_stay_and_all_else_is_internal() {
    let ptx = ".version 8.6\n.visible .entry ring(\n\t.param .b64 a\n)\n.visible .global .align 4 .b8 layout[4] = {1};\n\
               .visible .global .align 4 .u32 version = 23007;\n.visible .func  (.param .b32 r) helper(\n.extern .func x\n\
               .func inner(\n";
    assert_eq!(exported(ptx), ["ring", "helper", "layout", "version"]);
}
