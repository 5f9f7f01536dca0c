// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::BTreeMap;

use super::*;
use crate::fakes;

const SAID: &str = "\
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 5.817 ms
ptxas info    : Compiling entry function 'busy' for 'sm_90'
ptxas info    : Function properties for busy
    968 bytes stack frame, 1324 bytes spill stores, 1320 bytes spill loads
ptxas info    : Function properties for helper
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 968 bytes cumulative stack size, 768 bytes smem, 400 bytes cmem[0]
";

#[test]
fn the_figures_of_each_kernel_are_read_and_those_of_functions_are_not_mixed_in() {
    let plain = EntryReport { name: "plain".to_owned(), registers: 8, ..EntryReport::default() };
    let busy = EntryReport {
        name: "busy".to_owned(),
        registers: 255,
        stack: 968,
        spill_stores: 1324,
        spill_loads: 1320,
        shared: 768,
        barriers: 2,
    };
    assert_eq!(parse_report(SAID), [plain, busy]);
}

/// Creates a folder with a `ptxas` at `place` that runs `script`.
fn with_ptxas(place: &str, script: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fakes::program(&dir.path().join(place).join("ptxas"), script);
    dir
}

fn environment(name: &str, value: &Path) -> Environment {
    Environment { vars: BTreeMap::from([(name.into(), value.into())]), ..Environment::default() }
}

#[test]
fn the_tools_of_an_enclosing_project_are_found() {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("target/cuda-tools/nvidia/cu13/bin", "");
    let inner = dir.path().join("a/b");
    let found = Ptxas::find_in(&Environment::default(), &inner).unwrap();
    assert_eq!(found.path(), dir.path().join("target/cuda-tools/nvidia/cu13/bin/ptxas"));
}

#[test]
fn the_path_is_searched() {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("bin", "");
    let bin = dir.path().join("bin");
    let found = Ptxas::find_in(&environment("PATH", &bin), Path::new("/nowhere")).unwrap();
    assert_eq!(found.path(), bin.join("ptxas"));
}

#[test]
fn a_variable_that_names_no_assembler_is_not_passed_over() {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("target/cuda-tools/nvidia/cu13/bin", "");
    let reason = Ptxas::find_in(&environment("GIN_PTXAS", Path::new("/nowhere/ptxas")), dir.path()).unwrap_err();
    assert_eq!(reason, "GIN_PTXAS=/nowhere/ptxas is not a file");
}

#[test]
fn cudas_folders_are_searched_the_newest_of_usr_local_first() {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("cuda-12.9/bin", "");
    fakes::program(&dir.path().join("cuda-13.0/bin/ptxas"), "");
    let nowhere = Path::new("/nowhere");
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        let found = Ptxas::find_in(&environment(name, &dir.path().join("cuda-12.9")), nowhere).unwrap();
        assert_eq!(found.path(), dir.path().join("cuda-12.9/bin/ptxas"));
    }
    let local = Environment { local: Some(dir.path().to_owned()), ..Environment::default() };
    assert_eq!(Ptxas::find_in(&local, nowhere).unwrap().path(), dir.path().join("cuda-13.0/bin/ptxas"));
    fakes::program(&dir.path().join("cuda/bin/ptxas"), "");
    assert_eq!(Ptxas::find_in(&local, nowhere).unwrap().path(), dir.path().join("cuda/bin/ptxas"));
}

#[test]
fn python_packages_of_the_active_environment_and_of_python3_are_searched() {
    let _alone = fakes::one_at_a_time();
    for package in ["cuda_nvcc", "cu13"] {
        let place = format!("lib/python3.12/site-packages/nvidia/{package}/bin");
        let dir = with_ptxas(&place, "");
        let found = Ptxas::find_in(&environment("VIRTUAL_ENV", dir.path()), Path::new("/nowhere")).unwrap();
        assert_eq!(found.path(), dir.path().join(&place).join("ptxas"));

        let packages = dir.path().join("lib/python3.12/site-packages");
        fakes::program(&dir.path().join("bin/python3"), &format!("echo /nowhere; echo '{}'", packages.display()));
        let found = Ptxas::find_in(&environment("PATH", &dir.path().join("bin")), Path::new("/nowhere")).unwrap();
        assert_eq!(found.path(), dir.path().join(&place).join("ptxas"));
    }
}

#[test]
fn the_tools_of_gins_checkout_serve_crates_elsewhere() {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("target/cuda-tools/nvidia/cu13/bin", "");
    let environment = Environment { checkout: Some(dir.path().to_owned()), ..Environment::default() };
    let found = Ptxas::find_in(&environment, Path::new("/nowhere")).unwrap();
    assert_eq!(found.path(), dir.path().join("target/cuda-tools/nvidia/cu13/bin/ptxas"));
    let reason = Ptxas::find_in(&Environment::default(), Path::new("/nowhere")).unwrap_err();
    assert!(reason.starts_with("no ptxas found; searched GIN_PTXAS, target/cuda-tools of /nowhere"), "{reason}");
}

fn assemble(script: &str) -> Result<Assembly, BuildError> {
    let _alone = fakes::one_at_a_time();
    let dir = with_ptxas("bin", script);
    let ptxas = Ptxas { path: dir.path().join("bin/ptxas") };
    let ptx = dir.path().join("in.ptx");
    fs::write(&ptx, "text").unwrap();
    ptxas.assemble(Arch::Sm100, &ptx, Path::new("out.cubin"))
}

#[test]
fn an_assembler_that_is_too_old_differs_from_one_that_refuses_the_text() {
    let old = assemble("echo \"ptxas fatal   : Value 'sm_100' is not defined for option 'gpu-name'\" >&2; exit 255");
    let Ok(Assembly::NotTried(reason)) = old else { panic!("{old:?}") };
    assert!(reason.contains("is too old") && reason.contains("sm_100"), "{reason}");
    let old =
        assemble("echo 'ptxas a.ptx, line 5; fatal   : Unsupported .version 8.6; current version is 7.8'; exit 1");
    assert!(matches!(old, Ok(Assembly::NotTried(_))), "{old:?}");
    let refused = assemble("echo 'ptxas in.ptx, line 9; error : Unknown modifier .acqrel'; exit 255").unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("sm_100, ") && text.contains("in.ptx") && text.contains("line 9; error"), "{text}");
}

#[test]
fn what_was_assembled_is_not_assembled_again_unless_text_assembler_or_result_changed() {
    let _alone = fakes::one_at_a_time();
    let script = "echo run >> \"$(dirname \"$0\")/runs\"; cp \"$3\" \"$5\"; echo \"Compiling entry function 'k'\"";
    let dir = with_ptxas("bin", script);
    let at = |name: &str| dir.path().join(name);
    let ptxas = Ptxas { path: at("bin/ptxas") };
    let (ptx, cubin) = (at("in.ptx"), at("out.cubin"));
    let runs_after = |arch| {
        let Ok(Assembly::Done(report)) = ptxas.assemble(arch, &ptx, &cubin) else { panic!("not assembled") };
        assert_eq!((report.entries.len(), report.cubin.is_file()), (1, true));
        fs::read_to_string(at("bin/runs")).unwrap().lines().count()
    };
    fs::write(&ptx, "text").unwrap();
    assert_eq!((runs_after(Arch::Sm90), runs_after(Arch::Sm90)), (1, 1));
    assert_eq!(runs_after(Arch::Sm80), 2, "another architecture");
    fs::write(&ptx, "another text").unwrap();
    assert_eq!((runs_after(Arch::Sm80), runs_after(Arch::Sm80)), (3, 3));
    fs::write(&cubin, "").unwrap();
    assert_eq!(runs_after(Arch::Sm80), 4, "the result was cut short");
    fs::remove_file(&cubin).unwrap();
    assert_eq!(runs_after(Arch::Sm80), 5, "the result is gone");
    fakes::program(&at("bin/ptxas"), &format!("{script}; true"));
    assert_eq!((runs_after(Arch::Sm80), runs_after(Arch::Sm80)), (6, 6), "another assembler");
}
