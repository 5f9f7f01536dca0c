// SPDX-License-Identifier: MIT OR Apache-2.0

//! Builds kernel crates of other workspaces, links one to CUDA C++, and checks the shipped kernels.
//!
//! Trials that need a compiler for kernels, `ptxas` or `nvcc` report as ignored if it is missing.

mod shipped;
mod support;

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use gin_build::{Arch, Assembly, BuildError, BuildReport, Built, Limits, Module, UsePtxas, check, ptx};
use libtest_mimic::{Arguments, Failed, Trial};
use support::{Workspace, archs, builder, contains, ensure, needs_compiler, needs_nvcc, needs_ptxas};

fn main() {
    let args = Arguments::from_args();
    support::spoil_environment();
    support::name_ptxas();
    let mut trials = shipped::trials();
    for arch in archs() {
        trials.push(needs_compiler(format!("a_crate_of_another_workspace_becomes_a_module::{arch}"), move || {
            becomes_a_module(arch)
        }));
        trials.push(needs_compiler(format!("launch_bounds_reach_their_kernel_alone::{arch}"), move || {
            launch_bounds(bare(arch)?)
        }));
        trials.push(needs_compiler(format!("shared_memory_of_any_crate_survives::{arch}"), move || {
            shared_memory(bare(arch)?)
        }));
        trials.push(needs_compiler(format!("a_panic_leaves_neither_message_nor_function::{arch}"), move || {
            let findings = check(&bare(arch)?.text, &Limits::default().export("bare_add"));
            ensure(findings.is_empty(), format!("{findings:#?}"))
        }));
        trials.push(needs_ptxas(format!("ptxas_takes_the_module_without_stack_or_spills::{arch}"), move || {
            assembled(bare(arch)?)
        }));
        trials.push(needs_compiler(format!("a_crate_that_uses_gin_needs_no_settings::{arch}"), move || {
            users_crate(arch)
        }));
    }
    trials.extend([
        needs_compiler("sources_and_manifests_of_the_crate_and_its_path_dependencies_are_listed", sources),
        needs_compiler("a_second_build_changes_no_file_and_a_change_of_source_is_seen", rebuilds),
        needs_compiler("features_give_another_module_beside_the_first", features),
        needs_compiler("ptx_goes_where_copy_to_says_and_the_table_embeds_it", copies),
        needs_compiler("an_error_in_a_kernel_is_reported_in_the_compilers_words", broken_kernel),
        needs_compiler("mistakes_are_found_with_their_file_and_kernel", mistakes),
        needs_compiler("a_feature_removes_all_prints_from_the_ptx", prints),
        needs_compiler("source_lines_reach_the_machine_code_on_request_and_change_no_instruction", lines_of_sources),
        needs_compiler("a_marker_for_no_kernel_is_refused", broken_marker),
        needs_ptxas("invalid_assembly_is_refused_by_ptxas_in_its_words", broken_assembly),
        needs_ptxas("puts_in_functions_closures_loops_and_branches_need_no_stack", many_puts),
        needs_nvcc("a_device_function_links_into_a_cuda_program", links),
        needs_nvcc("a_cuda_program_without_our_object_does_not_link", does_not_link),
    ]);
    trials.extend([
        Trial::test("a_folder_without_a_crate_is_refused", || {
            let built = builder(Path::new("/nowhere")).arch(Arch::Sm90).build();
            ensure(matches!(built, Err(BuildError::NoManifest { .. })), format!("{built:?}"))
        }),
        Trial::test("a_build_for_no_architecture_is_refused", || {
            let built = builder(Path::new("/nowhere")).build();
            ensure(matches!(built, Err(BuildError::NoArch)), format!("{built:?}"))
        }),
        Trial::test("one_file_for_two_architectures_is_refused", || {
            let two = [Arch::Sm80, Arch::Sm90];
            let built = builder(Path::new("/nowhere")).archs(two).copy_to("/nowhere/a.ptx").build();
            ensure(matches!(built, Err(BuildError::OneFileForMany { archs: 2, .. })), format!("{built:?}"))
        }),
    ]);
    libtest_mimic::run(&args, trials).exit();
}

/// Returns the crate without gin, built once for all trials.
fn bare_built() -> Result<&'static Built, Failed> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    let build = || {
        let workspace = Workspace::new("bare-shared");
        builder(&workspace.bare()).archs(archs()).build().map_err(|error| error.to_string())
    };
    BUILT.get_or_init(build).as_ref().map_err(|error| error.into())
}

fn bare(arch: Arch) -> Result<&'static Module, Failed> {
    bare_built()?.module(arch).ok_or_else(|| format!("no module for {arch}").into())
}

fn becomes_a_module(arch: Arch) -> Result<(), Failed> {
    let module = bare(arch)?;
    let read = ptx::Module::parse(&module.text);
    let version = if arch == Arch::Sm80 { (8, 2) } else { (8, 6) };
    ensure(read.version == Some(version), format!("PTX version {:?}, not {version:?}", read.version))?;
    ensure(read.target.as_deref() == Some(arch.name()), format!("target {:?}", read.target))?;
    let mut names: Vec<&str> = read.entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    ensure(names == ["plain", "scale"], format!("{names:?}"))?;
    let on_disk = fs::read_to_string(&module.path)?;
    ensure(on_disk == module.text, "the file holds a different text".to_owned())
}

fn launch_bounds(module: &Module) -> Result<(), Failed> {
    let read = ptx::Module::parse(&module.text);
    let bounds = |name| read.entry(name).and_then(|entry| entry.launch_bounds);
    let expected = ptx::LaunchBounds { max_threads: 256, min_blocks: 2 };
    ensure(bounds("scale") == Some(expected), format!("scale: {:?}", bounds("scale")))?;
    ensure(bounds("plain").is_none(), format!("plain: {:?}", bounds("plain")))
}

fn shared_memory(module: &Module) -> Result<(), Failed> {
    let read = ptx::Module::parse(&module.text);
    for (name, bytes) in [("helper_dynamic", None), ("helper_static", Some(256)), ("bare_static", Some(512))] {
        let found = read.shared(name).map(|shared| shared.bytes);
        ensure(found == Some(bytes), format!("{name}: {found:?}"))?;
    }
    Ok(())
}

fn assembled(module: &Module) -> Result<(), Failed> {
    let Assembly::Done(report) = &module.assembly else {
        return Err(format!("{:?}", module.assembly).into());
    };
    let scale = report.entry("scale").ok_or("no figures for `scale`")?;
    ensure(scale.shared == 256 + 512, format!("{scale:?}"))?;
    // Two blocks of 256 threads leave 128 registers each.
    ensure((1..=128).contains(&scale.registers), format!("{scale:?}"))?;
    for entry in &report.entries {
        ensure(entry.stack + entry.spill_stores + entry.spill_loads == 0, format!("{entry:?}"))?;
    }
    let cubin = fs::read(&report.cubin)?;
    ensure(cubin.starts_with(b"\x7fELF"), "the cubin is no ELF file".to_owned())
}

fn users_crate(arch: Arch) -> Result<(), Failed> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    let build = || {
        let workspace = Workspace::new("user");
        builder(&workspace.user()).archs(archs()).build().map_err(|error| error.to_string())
    };
    let built = BUILT.get_or_init(build).as_ref()?;
    let module = built.module(arch).ok_or("no module")?;
    let read = ptx::Module::parse(&module.text);
    let entry = read.entry("pass_on").ok_or("no kernel `pass_on`")?;
    let expected = ptx::LaunchBounds { max_threads: 128, min_blocks: 4 };
    ensure(entry.launch_bounds == Some(expected), format!("{entry:?}"))?;
    let scratch = read.shared.iter().find(|shared| shared.name.contains("SCRATCH"));
    ensure(scratch.is_some_and(|shared| shared.bytes == Some(128)), format!("{:?}", read.shared))?;
    let findings = check(&module.text, &Limits::default());
    ensure(findings.is_empty(), format!("{findings:#?}"))
}

fn sources() -> Result<(), Failed> {
    let built = bare_built()?;
    let listed = |end: &str| built.sources.iter().any(|source| source.ends_with(end));
    for end in ["bare/src/lib.rs", "bare/Cargo.toml", "bare/Cargo.lock", "helper/src/lib.rs", "helper/Cargo.toml"] {
        ensure(listed(end), format!("{end} is not in {:#?}", built.sources))?;
    }
    Ok(())
}

fn rebuilds() -> Result<(), Failed> {
    let workspace = Workspace::new("rebuilds");
    let build = || builder(&workspace.bare()).arch(Arch::Sm90).build();
    let first = build()?;
    let path = &first.modules[0].path;
    let written = fs::metadata(path)?.modified()?;
    let second = build()?;
    ensure(second.modules[0].text == first.modules[0].text, "another text".to_owned())?;
    ensure(fs::metadata(path)?.modified()? == written, "the file was written again".to_owned())?;

    workspace.edit("bare/src/lib.rs", "values[3] = 2;", "values[3] = 77;");
    let third = build()?;
    ensure(third.modules[0].text.contains("77;"), third.modules[0].text.clone())?;

    // Files that cargo does not track may get lost.
    fs::remove_file(path)?;
    fs::remove_file(path.with_extension("").with_extension("s"))?;
    let fourth = build()?;
    ensure(fourth.modules[0].text == third.modules[0].text, "another text".to_owned())
}

fn features() -> Result<(), Failed> {
    let workspace = Workspace::new("features");
    let build = |features: &[&str]| builder(&workspace.bare()).arch(Arch::Sm90).features(features.to_vec()).build();
    let has_more = |built: &Built| ptx::Module::parse(&built.modules[0].text).entry("more").is_some();
    let (without, with, again) = (build(&[])?, build(&["more"])?, build(&[])?);
    ensure(!has_more(&without) && has_more(&with), "the feature did not reach the crate".to_owned())?;
    ensure(!has_more(&again), "the module with the feature was taken for the one without".to_owned())
}

fn copies() -> Result<(), Failed> {
    let workspace = Workspace::new("copies");
    let out = workspace.path().join("out");
    let build = |to: &Path| builder(&workspace.bare()).ptxas(UsePtxas::No).copy_to(to);
    // The build of expert parallelism needs `core` for both.
    let built = build(&out).archs([Arch::Sm90a, Arch::Sm90]).build()?;
    for arch in ["sm_90", "sm_90a"] {
        let text = fs::read_to_string(out.join(format!("bare.{arch}.ptx")))?;
        contains(&text, &format!(".target {arch}\n"))?;
    }
    built.write_table(&out.join("ptx.rs"))?;
    let table = fs::read_to_string(out.join("ptx.rs"))?;
    contains(&table, "pub static PTX: &[(&str, &[u8])] = &[\n    (\"sm_90\", include_bytes!(\"")?;
    contains(&table, "bare.sm_90a.ptx\")),\n];\n")?;

    let file = out.join("one.ptx");
    build(&file).arch(Arch::Sm90).build()?;
    contains(&fs::read_to_string(file)?, ".maxntid 256, 1, 1")
}

fn broken_kernel() -> Result<(), Failed> {
    let workspace = Workspace::new("broken-kernel");
    workspace.edit("bare/src/lib.rs", "values[3] = 2;", "values[3] = \"two\";");
    let Err(error @ BuildError::Compile { .. }) = builder(&workspace.bare()).arch(Arch::Sm90).build() else {
        return Err("it was not refused".into());
    };
    let text = error.to_string();
    ensure(text.starts_with("compiling the kernels for sm_90 failed. The command was\n"), text.clone())?;
    // Nothing stands between the command and the error, no warning either.
    contains(&text, "\n\nerror[E0308]: mismatched types")?;
    contains(&text, "RUSTFLAGS='-Ctarget-cpu=sm_90 ")?;
    contains(&text, "mismatched types")?;
    contains(&text, "src/lib.rs:")
}

fn mistakes() -> Result<(), Failed> {
    let workspace = Workspace::new("mistakes");
    let built = builder(&workspace.mistakes()).arch(Arch::Sm90).build()?;
    let BuildReport { findings, figures } = built.report();
    // The kernel copies its parameter to the stack of each thread.
    let copies = "registers, 128 bytes of stack, no spills";
    let copied = figures.iter().any(|line| line.contains("`indexes_by_value`: ") && line.ends_with(copies));
    ensure(copied || built.modules[0].assembly.report().is_none(), format!("{figures:#?}"))?;
    documented(copies)?;
    documented("an atomic without ordering and scope (core::sync::atomic)")?;
    for (line, kernel, mistake) in [
        (17, "counts_by_core", "an atomic without ordering and scope (core::sync::atomic): `atom.global.add.u32 "),
        (25, "takes_shared_for_global", "a .global access to shared memory: `red.relaxed.gpu.global.add.u64 "),
        (36, "formats", "formatting code (core::fmt); "),
    ] {
        let part = format!("mistakes/src/lib.rs:{line}: in `{kernel}`: {mistake}");
        ensure(findings.iter().any(|finding| finding.contains(&part)), format!("{part} is not in {findings:#?}"))?;
    }
    ensure(findings.len() == 3, format!("{findings:#?}"))?;
    // Directives for the places of findings do not reach the PTX.
    ensure(!built.modules[0].text.contains(".loc\t"), "the PTX has .loc directives".to_owned())
}

fn prints() -> Result<(), Failed> {
    let workspace = Workspace::new("prints");
    let build = |features: &[&str]| builder(&workspace.user()).arch(Arch::Sm90).features(features.to_vec()).build();
    let (loud, quiet) = (build(&[])?, build(&["quiet"])?);
    let (loud, quiet) = (&loud.modules[0], &quiet.modules[0]);
    contains(&loud.text, "gin_device5print8outlined5claim")?;
    if let Some(entry) = loud.assembly.report().and_then(|report| report.entry("prints")) {
        ensure((entry.stack, entry.spill_stores) == (0, 0), format!("{entry:?}"))?;
    }
    ensure(!quiet.text.contains("5print"), "a function that prints is left".to_owned())?;
    let body = |module: &Module| -> Option<String> {
        let (_, rest) = module.text.split_once(".entry prints(")?;
        let (body, _) = rest.split_once("\n}")?;
        Some(body.split_once('{')?.1.to_owned())
    };
    let body = body(quiet).ok_or("no kernel `prints`")?;
    let code: Vec<&str> = body.lines().map(str::trim).filter(|line| line.ends_with(';')).collect();
    ensure(code == ["ret;"], format!("{code:#?}"))
}

/// Largest registers of kernels of many puts: the figures of 2026-11-27 by ptxas 13.0, and a few more.
const MANY_PUTS: [(&str, [(&str, u32); 4]); 2] = [
    (
        "many-puts",
        [("five_puts_any", 132), ("five_puts_proxy", 114), ("spread_puts_any", 158), ("spread_puts_proxy", 142)],
    ),
    (
        "gdaki-any,many-puts",
        [("five_puts_any", 166), ("five_puts_proxy", 114), ("spread_puts_any", 186), ("spread_puts_proxy", 142)],
    ),
];

fn many_puts() -> Result<(), Failed> {
    let workspace = Workspace::new("many-puts");
    let mut wrong = Vec::new();
    for (features, kernels) in MANY_PUTS {
        let built = builder(&workspace.user()).arch(Arch::Sm90).features(features.split(',')).build()?;
        let report = built.modules[0].assembly.report().ok_or("not assembled")?;
        for (kernel, registers) in kernels {
            let entry = report.entry(kernel).ok_or_else(|| format!("no kernel {kernel}"))?;
            if entry.stack + entry.spill_stores + entry.spill_loads > 0 || entry.registers > registers {
                wrong.push(format!("features `{features}`, at most {registers} registers: {entry:?}"));
            }
        }
    }
    ensure(wrong.is_empty(), wrong.join("\n"))
}

/// Checks that the list of traps in docs/kernels.md has this text.
fn documented(text: &str) -> Result<(), Failed> {
    let docs = include_str!("../../../../docs/kernels.md").split_whitespace().collect::<Vec<_>>().join(" ");
    contains(docs.split_once("## Traps").ok_or("no list of traps")?.1, text)
}

fn broken_marker() -> Result<(), Failed> {
    let workspace = Workspace::new("broken-marker");
    workspace.edit("bare/src/lib.rs", "gin.launch_bounds scale", "gin.launch_bounds scael");
    let built = builder(&workspace.bare()).arch(Arch::Sm90).build();
    let Err(error @ BuildError::Marker { .. }) = built else {
        return Err(format!("{built:?}").into());
    };
    contains(&error.to_string(), "`// gin.launch_bounds scael 256 2`: the module has no kernel of that name")
}

fn broken_assembly() -> Result<(), Failed> {
    let workspace = Workspace::new("broken-assembly");
    workspace.edit(
        "helper/src/lib.rs",
        "cvta.shared.u64 {0}, t; }}\", out(reg64) address,",
        "cvta.shard.u64 {0}, t; }}\", out(reg64) address,",
    );
    let built = builder(&workspace.bare()).arch(Arch::Sm90).build();
    let Err(error @ BuildError::Assemble { .. }) = built else {
        return Err(format!("{built:?}").into());
    };
    contains(&error.to_string(), ".shard")
}

fn links() -> Result<(), Failed> {
    let workspace = Workspace::new("links");
    let program = support::link(workspace.path(), Some(&bare(Arch::Sm90)?.path))?;
    let sass = support::disassemble(&program)?;
    contains(&sass, "Function : bare_add")?;
    // The kernel that nvcc compiled is in the same image and calls it.
    contains(&sass, "Function : _Z4callPm")
}

fn does_not_link() -> Result<(), Failed> {
    let workspace = Workspace::new("does-not-link");
    match support::link(workspace.path(), None) {
        Ok(_) => Err("it was linked".into()),
        Err(error) => contains(error.message().unwrap_or_default(), "bare_add"),
    }
}

fn lines_of_sources() -> Result<(), Failed> {
    let workspace = Workspace::new("lines");
    let build = |on| builder(&workspace.bare()).arch(Arch::Sm90).line_info(on).build();
    let (without, with) = (build(false)?, build(true)?);
    let (plain, lined) = (&without.modules[0].text, &with.modules[0].text);
    ensure(!plain.contains(".loc"), "a build that did not ask for lines has some".to_owned())?;
    contains(lined, "bare/src/lib.rs\"")?;
    // The same instructions, whatever the labels.
    let code = |text: &str| -> Vec<String> {
        let is_code = |line: &&str| line.starts_with('\t') && line.ends_with(';');
        text.lines().filter(is_code).map(str::to_owned).collect()
    };
    ensure(code(plain) == code(lined), "lines changed instructions".to_owned())?;
    let Assembly::Done(report) = &with.modules[0].assembly else {
        return Ok(());
    };
    let source = fs::read_to_string(workspace.bare().join("src/lib.rs"))?;
    let line = source.lines().position(|line| line.contains("values[3] = 2;")).ok_or("no such line")? + 1;
    let listing = support::disassemble_with_lines(report)?;
    contains(&listing, &format!("bare/src/lib.rs\", line {line}"))
}
