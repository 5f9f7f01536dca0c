// SPDX-License-Identifier: MIT OR Apache-2.0

//! The result of a build in words, for the people who write the kernels.

use std::collections::BTreeSet;

use crate::check::{Finding, Rule};
use crate::ptxas::{Assembly, EntryReport};
use crate::{Arch, Built, Module};

/// Maximum number of findings of one rule that are listed.
const MAX: usize = 4;

/// The findings and figures of a build, one line for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildReport {
    /// Mistakes in device code: atomics of `core`, `.global` accesses to shared memory, formatting, panics with text,
    /// loads through the read-only cache. Each line has the source file and line, and the function, as far as they are
    /// known.
    pub findings: Vec<String>,
    /// For each kernel its registers, stack, spills and shared memory; or the reason why nothing was assembled.
    pub figures: Vec<String>,
}

impl Built {
    /// Returns the findings and figures of all modules in words.
    pub fn report(&self) -> BuildReport {
        BuildReport { findings: findings(&self.modules), figures: figures(&self.modules) }
    }
}

fn findings(modules: &[Module]) -> Vec<String> {
    let all = || modules.iter().flat_map(|module| &module.findings);
    let formats = all().any(|finding| finding.rule == Rule::Formatting);
    let rules: BTreeSet<Rule> = all().map(|finding| finding.rule).collect();
    let mut lines = Vec::new();
    // Formatting code reads its tables through the read-only cache.
    for rule in rules.into_iter().filter(|rule| !(formats && *rule == Rule::NonCoherentLoad)) {
        let Some(advice) = rule.advice() else { continue };
        // Code of other crates breaks a rule because the kernel crate calls it, so the crate's own lines say more.
        let of_rule = || all().filter(|finding| finding.rule == rule);
        let is_own = |finding: &Finding| {
            let of_core = finding.function.as_ref().is_some_and(|name| name.contains("core3fmt"));
            finding.place.is_some() && !of_core
        };
        let own = of_rule().any(is_own);
        let mut seen = BTreeSet::new();
        let found: Vec<&Finding> = of_rule()
            .filter(|finding| !own || is_own(finding))
            .filter(|finding| seen.insert((&finding.place, &finding.function)))
            .collect();
        lines.extend(found.iter().take(MAX).map(|finding| say(finding, advice)));
        if found.len() > MAX {
            lines.push(format!("{rule}: {} more", found.len() - MAX));
        }
    }
    lines
}

fn say(finding: &Finding, advice: &str) -> String {
    let place = finding.place.as_ref().map_or(String::new(), |place| format!("{place}: "));
    let function = finding.function.as_ref().map_or(String::new(), |name| format!("in `{name}`: "));
    // An instruction says nothing about formatting code: there are hundreds.
    let shows = finding.rule != Rule::Formatting;
    let text = finding.text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = if shows { format!(": `{text}`") } else { String::new() };
    format!("{place}{function}{}{text}; {advice}", finding.rule)
}

fn figures(modules: &[Module]) -> Vec<String> {
    let mut lines = grouped(modules.iter().filter_map(|module| match &module.assembly {
        Assembly::NotTried(reason) if !reason.is_empty() => {
            Some((module.arch, format!("nothing was assembled: {reason}")))
        }
        _ => None,
    }));
    let mut names: Vec<&str> = Vec::new();
    let reports = || modules.iter().filter_map(|module| Some((module.arch, module.assembly.report()?)));
    for entry in reports().flat_map(|(_, report)| &report.entries) {
        if !names.contains(&&*entry.name) {
            names.push(&entry.name);
        }
    }
    for name in names {
        lines.extend(grouped(reports().filter_map(|(arch, report)| Some((arch, resources(report.entry(name)?))))));
    }
    lines
}

/// Returns each text once, with the architectures that it is for.
fn grouped(texts: impl Iterator<Item = (Arch, String)>) -> Vec<String> {
    let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
    for (arch, text) in texts {
        match groups.iter_mut().find(|(other, _)| *other == text) {
            Some((_, archs)) => archs.push(arch.name()),
            None => groups.push((text, vec![arch.name()])),
        }
    }
    groups.into_iter().map(|(text, archs)| format!("{}: {text}", archs.join(", "))).collect()
}

fn resources(entry: &EntryReport) -> String {
    let bytes = |count: u32, of: &str| if count == 0 { format!("no {of}") } else { format!("{count} bytes of {of}") };
    let spills = entry.spill_stores.max(entry.spill_loads);
    let shared = if entry.shared == 0 { String::new() } else { format!(", {}", bytes(entry.shared, "shared memory")) };
    let (stack, spills) = (bytes(entry.stack, "stack"), bytes(spills, "spills"));
    format!("`{}`: {} registers, {stack}, {spills}{shared}", entry.name, entry.registers)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{Limits, Report, check};

    fn module(arch: Arch, body: &str, assembly: Assembly) -> Module {
        let text = format!(".version 8.6\n.target sm_90\n.visible .entry k()\n{{\n{body}\tret;\n}}\n");
        let findings = check(&text, &Limits::default());
        Module { arch, path: PathBuf::new(), text, bitcode: None, ir: None, findings, assembly, log: String::new() }
    }

    fn assembled(registers: u32) -> Assembly {
        let busy = EntryReport { name: "k".to_owned(), registers, stack: 32, spill_loads: 8, ..EntryReport::default() };
        let plain = EntryReport { name: "plain".to_owned(), registers: 8, shared: 768, ..EntryReport::default() };
        let (tool, cubin, output) = (PathBuf::new(), PathBuf::new(), String::new());
        Assembly::Done(Report { tool, entries: vec![busy, plain], cubin, output })
    }

    #[test]
    fn each_kernel_has_a_line_for_the_architectures_on_which_its_figures_are_equal() {
        let modules = [module(Arch::Sm80, "", assembled(40)), module(Arch::Sm90, "", assembled(42))];
        assert_eq!(
            figures(&modules),
            [
                "sm_80: `k`: 40 registers, 32 bytes of stack, 8 bytes of spills",
                "sm_90: `k`: 42 registers, 32 bytes of stack, 8 bytes of spills",
                "sm_80, sm_90: `plain`: 8 registers, no stack, no spills, 768 bytes of shared memory",
            ]
        );
        assert_eq!(findings(&modules), [""; 0]);
    }

    #[test]
    fn a_build_without_an_assembler_says_so_once() {
        let none = || Assembly::NotTried("no ptxas found".to_owned());
        let modules = [module(Arch::Sm80, "", none()), module(Arch::Sm90, "", none())];
        assert_eq!(figures(&modules), ["sm_80, sm_90: nothing was assembled: no ptxas found"]);
        assert_eq!(figures(&[module(Arch::Sm80, "", Assembly::NotTried(String::new()))]), [""; 0]);
    }

    #[test]
    fn a_mistake_is_said_once_with_its_function_and_with_advice() {
        let body = "\tatom.global.add.u32 \t%r1, [%rd2], 1;\n\tatom.global.add.u32 %r1, [%rd2], 2;\n";
        let found = findings(&[module(Arch::Sm80, body, assembled(8)), module(Arch::Sm90, body, assembled(8))]);
        assert_eq!(
            found,
            [
                "in `k`: an atomic without ordering and scope (core::sync::atomic): `atom.global.add.u32 %r1, [%rd2], 1;`; \
              LLVM drops its ordering: use signals, barriers, or the words of gin_device::sys"
            ]
        );
    }
}
