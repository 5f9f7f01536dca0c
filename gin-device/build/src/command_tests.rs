// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::environment::is_of_an_outer_cargo;

fn toolchain() -> Toolchain {
    Toolchain {
        rustc: "/tc/bin/rustc".into(),
        cargo: "/tc/bin/cargo".into(),
        version: "rustc 1.96.0".to_owned(),
        target_cpus: vec!["sm_90".to_owned()],
    }
}

fn plan_of(backend: Backend, arch: Arch, features: &[&str], default_features: bool) -> Plan {
    plan_with(backend, arch, features, default_features, false)
}

fn plan_with(backend: Backend, arch: Arch, features: &[&str], default_features: bool, bitcode: bool) -> Plan {
    let features: Vec<String> = features.iter().map(|name| (*name).to_owned()).collect();
    let request = Request {
        manifest: Path::new("/k/Cargo.toml"),
        lib_name: "my_kernels",
        features: &features,
        default_features,
        target_dir: Path::new("/t"),
        jobs: Some("2"),
        arch,
        bitcode,
        ir: false,
    };
    Plan::new(&toolchain(), &backend, &request)
}

fn flags(plan: &Plan) -> Vec<String> {
    let (_, flags) = plan.env.iter().find(|(name, _)| *name == "CARGO_ENCODED_RUSTFLAGS").unwrap();
    flags.to_str().unwrap().split(FLAG_SEPARATOR).map(str::to_owned).collect()
}

#[test]
fn the_command_for_llvm_is_the_one_that_is_known_to_give_ptx() {
    let plan = plan_of(Backend::Llvm, Arch::Sm90, &[], true);
    assert_eq!(plan.program, Path::new("/tc/bin/cargo"));
    let line = plan.shell_line();
    assert!(
        line.contains(
            "/tc/bin/cargo rustc --manifest-path /k/Cargo.toml --release --lib --crate-type staticlib \
             -Zbuild-std=core --target nvptx64-nvidia-cuda --target-dir /t/sm_90 --jobs 2 -- --emit=asm=/t/sm_90/"
        ),
        "{line}"
    );
    assert!(line.contains("RUSTC_BOOTSTRAP=1") && line.contains("CARGO_PROFILE_RELEASE_LTO=fat"), "{line}");
    assert_eq!(
        flags(&plan),
        [
            "-Ctarget-cpu=sm_90",
            "-Ctarget-feature=+ptx86",
            "-Zmir-enable-passes=-JumpThreading",
            "-Zunstable-options",
            "-Cpanic=immediate-abort",
        ]
    );
}

#[test]
fn sm_80_gets_a_ptx_version_that_has_no_acquire_fence() {
    assert_eq!(flags(&plan_of(Backend::Llvm, Arch::Sm80, &[], true))[1], "-Ctarget-feature=+ptx82");
}

#[test]
fn ir_is_emitted_without_lines_and_apart_from_other_builds() {
    let plan = |ir| {
        let request = Request {
            manifest: Path::new("/k/Cargo.toml"),
            lib_name: "my_kernels",
            features: &[],
            default_features: true,
            target_dir: Path::new("/t"),
            jobs: None,
            arch: Arch::Sm90,
            bitcode: false,
            ir,
        };
        Plan::new(&toolchain(), &Backend::Llvm, &request)
    };
    let (plain, with) = (plan(false), plan(true));
    let file = with.ptx.with_extension("ll");
    let line = with.shell_line();
    assert!(line.contains(&format!("--emit=asm={},llvm-ir={}", with.ptx.display(), file.display())), "{line}");
    assert!(line.contains("-Cdebuginfo=none") && !plain.shell_line().contains("-Cdebuginfo=none"), "{line}");
    assert_eq!((plain.ir, with.ir), (None, Some(file)));
    assert_ne!(plain.ptx, with.ptx);
}

#[test]
fn bitcode_is_emitted_beside_the_ptx_under_a_name_of_its_own() {
    let (plain, with) = [false, true].map(|on| plan_with(Backend::Llvm, Arch::Sm90, &[], true, on)).into();
    let bitcode = with.ptx.with_extension("bc");
    let emit = format!("--emit=asm={},llvm-bc={}", with.ptx.display(), bitcode.display());
    assert!(with.shell_line().contains(&emit), "{}", with.shell_line());
    assert_eq!((plain.bitcode, with.bitcode), (None, Some(bitcode)));
    assert_ne!(plain.ptx, with.ptx);
}

#[test]
fn features_reach_cargo_and_give_the_ptx_another_name() {
    let plain = plan_of(Backend::Llvm, Arch::Sm90, &[], true);
    let with = plan_of(Backend::Llvm, Arch::Sm90, &["a", "b/c"], false);
    assert!(with.shell_line().contains(" --no-default-features --features a,b/c "), "{}", with.shell_line());
    assert_ne!(plain.ptx, with.ptx);
    assert_eq!(plain.ptx, plan_of(Backend::Llvm, Arch::Sm90, &[], true).ptx);
}

#[test]
fn the_command_for_rust_cuda_loads_its_code_generator_and_takes_the_ptx_from_its_linker() {
    let plan = plan_of(Backend::Nvvm("/rc/librustc_codegen_nvvm.so".into()), Arch::Sm90, &[], true);
    let flags = flags(&plan);
    assert_eq!(flags[0], "-Zcodegen-backend=/rc/librustc_codegen_nvvm.so");
    for flag in [
        "-Zcrate-attr=feature(register_tool)",
        "-Zcrate-attr=register_tool(nvvm_internal)",
        "-Zcrate-attr=no_std",
        "-Zsaturating_float_casts=false",
        "-Cpanic=immediate-abort",
        "-Cllvm-args=-arch=compute_90",
    ] {
        assert!(flags.iter().any(|present| present == flag), "{flag} is not in {flags:?}");
    }
    assert!(!flags.iter().any(|flag| flag.contains("target-cpu")), "that is an option of LLVM: {flags:?}");
    let line = plan.shell_line();
    assert!(line.contains("--crate-type cdylib -Zbuild-std=core,alloc"), "{line}");
    assert!(!line.contains("emit"), "{line}");
    assert_eq!(plan.ptx, Path::new("/t/sm_90/nvptx64-nvidia-cuda/release/my_kernels.ptx"));
}

#[test]
fn nothing_of_an_outer_cargo_is_passed_on_but_the_users_settings_of_cargo_are() {
    for name in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_RUSTFLAGS",
        "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
        "RUSTC",
        "RUSTC_WRAPPER",
        "RUSTUP_TOOLCHAIN",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "CARGO_MAKEFLAGS",
        "CARGO_PROFILE_RELEASE_DEBUG",
        "CARGO_MANIFEST_DIR",
        "CARGO",
        "OUT_DIR",
        "DEP_Z_INCLUDE",
        "__CARGO_TEST_ROOT",
    ] {
        assert!(is_of_an_outer_cargo(OsStr::new(name)), "{name} must not be passed on");
    }
    for name in ["PATH", "HOME", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_HTTP_PROXY", "CARGO_REGISTRIES_MY_INDEX"] {
        assert!(!is_of_an_outer_cargo(OsStr::new(name)), "{name} must be passed on");
    }
}

#[test]
fn a_word_with_a_space_or_a_quote_can_be_pasted_into_a_shell() {
    assert_eq!(quote("a b"), "'a b'");
    assert_eq!(quote("it's"), "'it'\\''s'");
    assert_eq!(quote(""), "''");
    assert_eq!(quote("--emit=asm=/a/b.s"), "--emit=asm=/a/b.s");
}
