// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

const CLEAN: &str = "\
.version 8.6
.target sm_90
.visible .entry k(
\t.param .u64 p
)
{
\tld.relaxed.sys.global.u64 %rd1, [%rd0];
\tatom.acq_rel.sys.global.add.u64 %rd2, [%rd0], %rd1;
\tatom.shared.add.u32 %r1, [%r0], 1;
\tred.async.relaxed.cluster.global.mbarrier::complete_tx::bytes.add.u64 [%rd0], 1;
\tret; // a call to nobody, ld.global.nc
}
";

fn rules(text: &str, limits: &Limits) -> Vec<(Rule, usize)> {
    check(text, limits).into_iter().map(|finding| (finding.rule, finding.line)).collect()
}

fn with(line: &str) -> String {
    CLEAN.replace("\tret;", &format!("\t{line}\n\tret;"))
}

#[test]
fn code_that_keeps_the_rules_gives_no_finding() {
    assert_eq!(check(CLEAN, &Limits::default()), []);
}

#[test]
fn each_broken_rule_is_found_at_its_line() {
    for (line, rule) in [
        ("ld.global.nc.b64 %rd3, [%rd0];", Rule::NonCoherentLoad),
        ("@%p1 ld.global.L1::no_allocate.nc.v2.u64 {%rd3, %rd4}, [%rd0];", Rule::NonCoherentLoad),
        ("{ call.uni (r), f, (p); }", Rule::Call),
        ("$L1: call (r), %rd3, (p), proto;", Rule::Call),
        ("atom.global.add.u64 %rd3, [%rd0], 1;", Rule::UnscopedAtomic),
        ("atom.relaxed.add.u64 %rd3, [%rd0], 1;", Rule::UnscopedAtomic),
        ("red.gpu.global.add.u64 [%rd0], 1;", Rule::UnscopedAtomic),
        ("mov.u64 %rd3, _RNvNtCs1_4core3fmt5write;", Rule::Formatting),
        ("mov.u64 %rd3, _RNvNtCs1_4core9panicking5panic;", Rule::Panic),
    ] {
        assert_eq!(rules(&with(line), &Limits::default()), [(rule, 11)], "{line}");
    }
}

#[test]
fn bulk_copies_are_refused_before_sm_90_only() {
    for line in [
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;",
        "@%p1 cp.async.bulk.wait_group.read 0;",
        "fence.proxy.async.global;",
        "fence.mbarrier_init.release.cluster;",
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], 0; }",
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], 64;",
    ] {
        for (target, found) in
            [("sm_80", true), ("sm_89", true), ("sm_90", false), ("sm_90a", false), ("sm_100", false)]
        {
            let text = with(line).replace(".target sm_90", &format!(".target {target}"));
            let expected = if found { vec![(Rule::BulkCopy, 11)] } else { Vec::new() };
            assert_eq!(rules(&text, &Limits::default()), expected, "{target}: {line}");
        }
    }
    let old = with("cp.async.cg.shared.global [%r1], [%rd1], 16; mbarrier.arrive.shared.b64 %rd2, [%r1];");
    assert_eq!(rules(&old.replace(".target sm_90", ".target sm_80"), &Limits::default()), []);
}

#[test]
fn a_global_access_is_found_where_its_address_comes_from_shared_memory() {
    let asks = "{ .reg .u64 t; mov.u64 t, tile; cvta.shared.u64 %rd5, t; }\n\tadd.s64 %rd6, %rd5, %rd9;";
    for (line, found) in [
        ("red.relaxed.gpu.global.add.u64 [%rd6], %rd1;", true),
        ("cvta.to.global.u64 %rd7, %rd6; ld.global.b32 %r1, [%rd7+8];", true),
        ("ld.b32 %r1, [%rd6];", false),
        ("ld.global.b32 %r1, [%rd9];", false),
        ("cp.async.ca.shared.global [%rd6], [%rd9], 16;", false),
        ("sub.s64 %rd7, %rd6, %rd5; add.s64 %rd8, %rd9, %rd7; ld.global.b32 %r1, [%rd8];", false),
    ] {
        let text = with(&format!("{asks}\n\t{line}"));
        let expected = if found { vec![(Rule::GlobalAccessToShared, 13)] } else { Vec::new() };
        assert_eq!(rules(&text, &Limits::default()), expected, "{line}");
        // An address of another function has nothing to do with it.
        let apart = text.replace(&format!("\t{line}"), &format!("}}\n.visible .entry l()\n{{\t{line}"));
        assert_eq!(rules(&apart, &Limits::default()), [], "{line}");
    }
}

#[test]
fn a_constant_of_the_module_may_be_read_through_the_read_only_cache() {
    for line in ["ld.global.nc.b32 %r1, [TABLE+4];", "mov.b64 %rd5, TABLE; ld.global.nc.b32 %r1, [%rd5];"] {
        assert_eq!(rules(&with(line), &Limits::default()), [], "{line}");
    }
}

#[test]
fn constant_loads_are_allowed_by_their_names_only() {
    for name in ["load_constant_u32", "load_constant_pair"] {
        // Where the instructions are written, not in the table of operations.
        assert!(include_str!("../../src/sys/data/ptx.rs").contains(&format!("; // {name}\"")), "{name}");
        assert_eq!(
            rules(&with(&format!("ld.global.nc.v2.u64 {{%rd3, %rd4}}, [%rd0]; // {name}")), &Limits::default()),
            []
        );
    }
    for line in [
        "ld.global.nc.u32 %r1, [%rd0]; // load_constant",
        "ld.global.nc.u32 %r1, [%rd0]; // a load_constant_u32",
        "ld.global.nc.u32 %r1, [%rd0]; // load_constant_u64",
        "// load_constant_u32\n\tld.global.nc.u32 %r1, [%rd0];",
    ] {
        let found: Vec<Rule> = rules(&with(line), &Limits::default()).into_iter().map(|(rule, _)| rule).collect();
        assert_eq!(found, [Rule::NonCoherentLoad], "{line}");
    }
}

#[test]
fn a_finding_names_the_function_and_a_message_the_code_that_uses_it() {
    let bytes: Vec<String> = "src/kernels.rs".bytes().map(|byte| byte.to_string()).collect();
    let array = format!(".global .align 1 .b8 alloc_1[{}] = {{{}}};", bytes.len(), bytes.join(", "));
    let text = with("atom.global.add.u64 %rd3, [%rd0], 1; mov.b64 %rd4, alloc_1;");
    let text = text.replace(".visible .entry", &format!("{array}\n.visible .entry"));
    let found = check(&text, &Limits::default());
    let functions: Vec<_> = found.iter().map(|finding| (finding.rule, finding.function.as_deref())).collect();
    assert_eq!(functions, [(Rule::Panic, Some("k")), (Rule::UnscopedAtomic, Some("k"))]);
}

#[test]
fn functions_of_a_back_end_that_is_too_long_to_be_inlined_may_be_called() {
    let name = "_RNvNtNtCsk_10gin_device7backend8outlined4post";
    let function = format!(".func {name}(\n\t.param .b64 p\n)\n{{\n\tret;\n}}\n.visible .entry");
    let text = with(&format!("call.uni {name}, (p);")).replace(".visible .entry", &function);
    assert_eq!(check(&text, &Limits::default()), []);
    assert_eq!(rules(&text.replace("8outlined", "7another"), &Limits::default()).len(), 2);
}

#[test]
fn panic_messages_are_found_in_the_bytes_that_spell_them() {
    let bytes: Vec<String> = "src/kernels.rs".bytes().map(|byte| byte.to_string()).collect();
    let array = format!(".global .align 1 .b8 alloc_1[{}] = {{{}}};", bytes.len(), bytes.join(", "));
    let text = CLEAN.replace(".visible .entry", &format!("{array}\n.visible .entry"));
    let findings = check(&text, &Limits::default());
    assert_eq!(findings.len(), 1);
    assert_eq!((findings[0].rule, findings[0].line), (Rule::Panic, 3));
    assert_eq!(findings[0].to_string(), "line 3: panic machinery: src/kernels.rs");
}

#[test]
fn a_device_function_is_a_finding_unless_it_is_exported_and_defined() {
    let defined = format!("{CLEAN}.visible .func f(\n\t.param .b64 p\n)\n{{\n\tret;\n}}\n");
    assert_eq!(rules(&defined, &Limits::default()), [(Rule::Function, 13)]);
    assert_eq!(rules(&defined, &Limits::default().export("f")), []);
    let declared = format!("{CLEAN}.extern .func f\n(\n\t.param .b64 p\n)\n;\n");
    assert_eq!(rules(&declared, &Limits::default().export("f")), [(Rule::Function, 13)]);
}

#[test]
fn text_past_the_limit_is_found_at_the_line_that_passes_it() {
    assert_eq!(rules(CLEAN, &Limits::default().max_bytes(CLEAN.len())), []);
    assert_eq!(rules(CLEAN, &Limits::default().max_bytes(20)), [(Rule::Size, 2)]);
}

#[test]
fn a_version_that_drivers_may_not_take_or_none_at_all_is_found() {
    assert_eq!(rules(&CLEAN.replace("8.6", "9.0"), &Limits::default()), []);
    assert_eq!(rules(&CLEAN.replace("8.6", "9.1"), &Limits::default()), [(Rule::Version, 1)]);
    assert_eq!(rules("", &Limits::default()), [(Rule::Version, 1)]);
}
