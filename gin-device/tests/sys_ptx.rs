// SPDX-License-Identifier: MIT OR Apache-2.0
//! Assembles every line of PTX of `sys` alone. The assembler must accept it for each architecture, and its output must
//! match the table in the module's docs.
//!
//! The statements come from the same table as the code. Without `ptxas` and `nvdisasm` the trials report as ignored.

use gin_build::{Arch, Assembly, BuildError, Ptxas};
use gin_device::sys::bulk::BULK_OPERATIONS;
use gin_device::sys::convert::CONVERSIONS;
use gin_device::sys::data::DATA_OPERATIONS;
use gin_device::sys::shared::SHARED_OPERATIONS;
use gin_device::sys::{OPERATIONS, OperationRow};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// An architecture, the PTX version of its kernels, and whether they have `fence.acquire` and `fence.release`.
type Target = (Arch, &'static str, bool);

const TARGETS: [Target; 3] = [(Arch::Sm80, "8.2", false), (Arch::Sm90, "8.6", true), (Arch::Sm100, "8.6", true)];

/// The assembler whose output the docs show.
const DOCUMENTED: &str = "release 13.0";

const DOCS: &str = include_str!("../src/sys/mod.rs");

/// A module of operations whose docs show their machine code.
#[derive(Clone, Copy)]
struct Table {
    name: &'static str,
    docs: &'static str,
    rows: fn() -> Vec<OperationRow>,
    /// The memory of the frame that [`module`] puts around a statement.
    frame: &'static str,
    /// The instructions that the docs show; all but those of the frame if there are none.
    shown: &'static [&'static str],
}

const TABLES: [Table; 4] = [
    Table { name: "sys", docs: DOCS, rows: || OPERATIONS.to_vec(), frame: "shared", shown: &[] },
    Table {
        name: "shared",
        docs: include_str!("../src/sys/shared/mod.rs"),
        rows: || SHARED_OPERATIONS.to_vec(),
        frame: "global",
        shown: &["ATOMS", "LDS", "STS"],
    },
    Table {
        name: "convert",
        docs: include_str!("../src/sys/convert/mod.rs"),
        rows: || CONVERSIONS.iter().map(|conversion| conversion.row).collect(),
        frame: "shared",
        shown: &["F2F", "F2FP", "HADD2"],
    },
    Table {
        name: "bulk",
        docs: include_str!("../src/sys/bulk/mod.rs"),
        rows: || BULK_OPERATIONS.to_vec(),
        frame: "global",
        shown: &["DEPBAR", "FENCE", "SYNCS", "UBLKCP", "UTMACMDFLUSH"],
    },
];

/// The registers of 64 bits, of 32 and of 16 that statements name.
const REGISTERS: [(&str, &str); 3] = [("b64", "pvcolht"), ("b32", "ainws"), ("b16", "jk")];

/// The letters of output registers.
const RESULTS: &str = "otsk";

/// The instructions of the frame that [`module`] puts around a statement.
const FRAME: [&str; 13] =
    ["LDC", "ULDC", "LDS", "STS", "S2R", "S2UR", "UMOV", "ULEA", "LEA", "MOV", "ISETP", "BSSY", "BSYNC"];

/// Returns the statement with registers in its places, and their names.
fn with_registers(statement: &str) -> (String, BTreeSet<char>) {
    let (mut code, mut used) = (String::new(), BTreeSet::new());
    let mut rest = statement.chars();
    while let Some(c) = rest.next() {
        let ahead = rest.clone().next();
        match (c, ahead) {
            ('{', Some('{')) | ('}', Some('}')) => {
                rest.next();
                code.push(c);
            }
            ('{', Some(name)) => {
                // The name, and the closing brace.
                rest.nth(1);
                used.insert(name);
                code.extend(['%', name]);
            }
            _ => code.push(c),
        }
    }
    (code, used)
}

/// Returns a module with a kernel for each statement, of the statement's name. Inputs come from memory of the kind
/// `space` and outputs are stored there, at a place of each thread's own. So the assembler can neither guess the
/// operands nor leave the statement out.
fn module((arch, version, _): Target, statements: &[(&str, &str)], space: &str) -> String {
    let mut text =
        format!(".version {version}\n.target {arch}\n.address_size 64\n.{space} .align 16 .b8 frame[4096];\n");
    let (bits, width) = if space == "shared" { (32, "lo") } else { (64, "wide") };
    for (kernel, statement) in statements {
        let (mut declare, mut load, mut store) = (String::new(), String::new(), String::new());
        let (code, used) = with_registers(statement);
        let registers = REGISTERS.iter().flat_map(|(kind, names)| names.chars().map(move |name| (kind, name)));
        for (index, (kind, name)) in registers.enumerate().filter(|(_, (_, name))| used.contains(name)) {
            declare += &format!(".reg .{kind} %{name};\n");
            if !RESULTS.contains(name) {
                load += &format!("ld.volatile.{space}.{kind} %{name}, [%own+{}];\n", 8 * index);
            }
            store += &format!("st.volatile.{space}.{kind} [%own+{}], %{name};\n", 8 * index);
        }
        text += &format!(
            ".visible .entry {kernel}()\n{{\n.reg .b32 %thread;\n.reg .b{bits} %own, %frame;\n{declare}\
             mov.u{bits} %frame, frame;\nmov.u32 %thread, %tid.x;\nmad.{width}.u32 %own, %thread, 128, %frame;\n\
             {load}{code}\n{store}ret;\n}}\n"
        );
    }
    text
}

/// A folder for this run's files, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sys-ptx-{process}-{number}"));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A file that cannot be removed stays in `target`.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Assembles kernels of these statements. The machine code is in the folder as long as that exists.
fn assemble(
    tools: &Tools,
    target: Target,
    statements: &[(&str, &str)],
    space: &str,
) -> Result<(Result<Assembly, BuildError>, Folder), Failed> {
    let folder = Folder::new()?;
    let ptx = folder.0.join("module.ptx");
    std::fs::write(&ptx, module(target, statements, space))?;
    Ok((tools.ptxas.assemble(target.0, &ptx, &folder.0.join("module.cubin")), folder))
}

/// Returns the listing of the machine code, or the disassembler's error, which it reports for an illegal instruction.
fn disassemble(tools: &Tools, folder: &Folder) -> Result<String, String> {
    let listing = Command::new(&tools.nvdisasm).arg("-c").arg(folder.0.join("module.cubin")).output();
    let listing = listing.map_err(|error| format!("{}: {error}", tools.nvdisasm.display()))?;
    if listing.status.success() {
        Ok(String::from_utf8_lossy(&listing.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&listing.stderr).into_owned())
    }
}

/// Returns whether a target has the instruction of a row, or one in its place.
fn is_there(row: &OperationRow, (_, _, modern): Target) -> bool {
    let is_new = CONVERSIONS.iter().any(|conversion| conversion.row.name == row.name && !conversion.everywhere);
    modern || !(is_new || BULK_OPERATIONS.contains(row))
}

/// Returns the statement of a row for this target.
fn statement(row: &OperationRow, (_, _, modern): Target) -> (&'static str, &'static str) {
    (row.name, row.fallback.filter(|_| !modern).unwrap_or(row.statement))
}

/// Checks that the assembler accepts the statement alone.
fn taken(tools: &Tools, row: OperationRow, target: Target) -> Result<Completion, Failed> {
    match assemble(tools, target, &[statement(&row, target)], "shared")?.0? {
        Assembly::Done(_) => Ok(Completion::Completed),
        Assembly::NotTried(reason) => Ok(Completion::ignored_with(reason)),
    }
}

/// Checks that the assembler's output has no illegal instruction. `ptxas` 13.0 accepts instructions that sm_80 lacks,
/// so its acceptance alone proves little.
fn legal(tools: &Tools, table: Table, target: Target) -> Result<Completion, Failed> {
    let rows: Vec<_> = (table.rows)().into_iter().filter(|row| is_there(row, target)).collect();
    let statements: Vec<_> = rows.iter().map(|row| statement(row, target)).collect();
    let (assembly, folder) = assemble(tools, target, &statements, table.frame)?;
    if let Assembly::NotTried(reason) = assembly? {
        return Ok(Completion::ignored_with(reason));
    }
    let listing = disassemble(tools, &folder)?;
    match rows.iter().find(|row| part(&listing, row.name).is_none()) {
        None => Ok(Completion::Completed),
        Some(row) => Err(format!("{} is not in the listing", row.name).into()),
    }
}

/// Checks that the fallback is needed, because sm_80 lacks the statement's instruction. If `ptxas` accepts the
/// statement, it emits an illegal instruction.
fn refused(tools: &Tools, row: OperationRow) -> Result<Completion, Failed> {
    let (assembly, folder) = assemble(tools, TARGETS[0], &[(row.name, row.statement)], "shared")?;
    match assembly {
        Err(BuildError::Assemble { .. }) => Ok(Completion::Completed),
        Ok(Assembly::NotTried(reason)) => Ok(Completion::ignored_with(reason)),
        Ok(Assembly::Done(_)) => match disassemble(tools, &folder) {
            Err(said) if said.contains("Illegal instruction") => Ok(Completion::Completed),
            other => Err(format!("sm_80 has it: {other:?}").into()),
        },
        Err(other) => Err(other.to_string().into()),
    }
}

/// Returns the part of a listing that belongs to a kernel.
fn part<'a>(listing: &'a str, kernel: &str) -> Option<&'a str> {
    let (_, from) = listing.split_once(&format!("\n.text.{kernel}:"))?;
    Some(from.split("//--------").next().unwrap_or(from))
}

/// Returns the instructions of a listing that the docs show: the name, after `@P` if it is predicated, and before the
/// special register that it reads.
fn instructions(listing: &str, shown: &[&str]) -> Result<Vec<String>, String> {
    let mut found: Vec<String> = Vec::new();
    // After `EXIT`, or the end of the grid, there is only padding.
    for line in listing.lines() {
        let Some(code) = line.trim_start().strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else { continue };
        let mut words = code.1.split([' ', ';', ',']).filter(|word| !word.is_empty()).peekable();
        let predicated = words.next_if(|word| word.starts_with('@')).is_some();
        let Some(name) = words.next() else { continue };
        if name.starts_with('.') {
            continue;
        }
        let family = name.split('.').next().unwrap_or_default();
        if !predicated && (name == "EXIT" || name == "BRA") {
            break;
        }
        match family {
            "ERRBAR" | "CGAERRBAR" => {
                if !found.last().is_some_and(|last| last.contains("MEMBAR")) {
                    return Err(format!("{name} without a MEMBAR: {listing}"));
                }
            }
            family if if shown.is_empty() { FRAME.contains(&family) } else { !shown.contains(&family) } => {}
            _ => {
                let special = words.find(|word| word.starts_with("SR_")).map_or(String::new(), |sr| format!(" {sr}"));
                found.push(format!("{}{name}{special}", if predicated { "@P " } else { "" }));
            }
        }
    }
    Ok(found)
}

/// A row of the table in the docs: name, PTX, SASS.
fn documented(docs: &str) -> Vec<(&str, &str, Vec<&str>)> {
    let rows = docs.lines().filter_map(|line| line.strip_prefix("//! | `"));
    rows.map(|line| {
        let mut cells = line.split('|').map(str::trim);
        let mut next = || cells.next().unwrap_or_default();
        let (name, ptx, sass) = (next().trim_matches('`'), next().trim_matches('`'), next());
        (name, ptx, sass.split('`').filter(|word| !matches!(word.trim(), "" | ",")).collect())
    })
    .collect()
}

/// Returns the listing for sm_90 of all operations of a table, made once.
fn listing(tools: &Tools, table: Table) -> Result<&'static str, Failed> {
    static LISTINGS: [OnceLock<Result<String, String>>; TABLES.len()] = [const { OnceLock::new() }; TABLES.len()];
    let make = || {
        let rows = (table.rows)();
        let statements: Vec<_> = rows.iter().map(|row| (row.name, row.statement)).collect();
        let made = assemble(tools, TARGETS[1], &statements, table.frame);
        let (assembly, folder) = made.map_err(|error| format!("{error:?}"))?;
        assembly.map_err(|error| error.to_string())?;
        disassemble(tools, &folder)
    };
    let index = TABLES.iter().position(|other| other.name == table.name).ok_or("no such table")?;
    Ok(LISTINGS[index].get_or_init(make).as_ref()?)
}

/// Checks that the assembler's output for a row is the SASS of that name in the docs.
fn as_documented(tools: &Tools, name: &str, table: Table, docs: &str) -> Result<Completion, Failed> {
    let version = Command::new(tools.ptxas.path()).arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    if !version.contains(DOCUMENTED) {
        let line = version.lines().find(|line| line.contains("release")).unwrap_or("one without a version");
        return Ok(Completion::ignored_with(format!("the docs show the work of {DOCUMENTED}, this is {line}")));
    }
    let rows = documented(docs);
    let Some((_, _, sass)) = rows.iter().find(|(other, ..)| *other == name) else {
        return Err("it is not in the docs".into());
    };
    let part = part(listing(tools, table)?, name).ok_or("it is not in the listing")?;
    let made = instructions(part, table.shown)?;
    if made == *sass { Ok(Completion::Completed) } else { Err(format!("docs {sass:?}, made {made:?}\n{part}").into()) }
}

/// Checks that docs and code list the same operations with the same PTX, each once.
fn same_rows(table: Table) -> Result<Completion, Failed> {
    let (rows, operations) = (documented(table.docs), (table.rows)());
    let docs: BTreeSet<_> = rows.iter().map(|(name, ptx, _)| (*name, *ptx)).collect();
    let code: BTreeSet<_> = operations.iter().map(|row| (row.name, row.ptx)).collect();
    if rows.len() != docs.len() || operations.len() != code.len() {
        return Err("a row is there twice".into());
    }
    if docs != code {
        let (docs, code): (Vec<_>, Vec<_>) = (docs.difference(&code).collect(), code.difference(&docs).collect());
        return Err(format!("only in the docs: {docs:?}; only in the code: {code:?}").into());
    }
    for row in &operations {
        // The docs have the PTX of the statement.
        if let Some(word) = row.ptx.split(' ').find(|word| !row.statement.contains(word)) {
            return Err(format!("{}: {word} is not in {:?}", row.name, row.statement).into());
        }
    }
    Ok(Completion::Completed)
}

/// Checks that the file `ptx.rs` has no statement of its own.
fn one_source() -> Result<Completion, Failed> {
    let text = include_str!("../src/sys/ptx.rs");
    let words: String = text.split_whitespace().collect();
    let blocks: Vec<_> = words.split("asm!(").skip(1).collect();
    match blocks.iter().find(|block| !block.starts_with("statement!(")) {
        None if blocks.len() >= OPERATIONS.len() / 2 => Ok(Completion::Completed),
        None => Err(format!("only {} blocks were found", blocks.len()).into()),
        Some(block) => Err(format!("not from the table: {}", &block[..block.len().min(60)]).into()),
    }
}

/// Checks that a statement that is not PTX is refused, and that different docs are found.
fn mistakes(tools: &Tools) -> Result<Completion, Failed> {
    let wrong = OperationRow { name: "wrong", ptx: "", statement: "ld.relaxed.u64 {v}, {p};", fallback: None };
    if taken(tools, wrong, TARGETS[1]).is_ok() {
        return Err("no PTX, and yet the assembler took it".into());
    }
    let docs = DOCS.replace("`MEMBAR.ALL.SYS`, `STG.E.64.STRONG.SYS`", "`STG.E.64.STRONG.SYS`");
    match as_documented(tools, "store_release_sys", TABLES[0], &docs) {
        Ok(Completion::Completed) => Err("docs without the MEMBAR went unnoticed".into()),
        _ => Ok(Completion::Completed),
    }
}

#[derive(Clone)]
struct Tools {
    ptxas: Ptxas,
    nvdisasm: PathBuf,
}

impl Tools {
    /// `ptxas`, and `nvdisasm` beside it or in `PATH`.
    fn find() -> Result<Self, String> {
        let ptxas = Ptxas::find(Path::new(env!("CARGO_MANIFEST_DIR")))?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = ptxas.path().parent().map(Path::to_path_buf).into_iter().chain(std::env::split_paths(&path));
        let nvdisasm = folders.map(|folder| folder.join("nvdisasm")).find(|file| file.is_file());
        let nvdisasm = nvdisasm.ok_or_else(|| format!("no nvdisasm beside {ptxas} or in PATH"))?;
        Ok(Self { ptxas, nvdisasm })
    }
}

/// The function of a trial, for a machine with the tools.
type Run = Box<dyn FnOnce(&Tools) -> Result<Completion, Failed> + Send>;

fn main() {
    let tools = Tools::find();
    let mut trials = vec![Trial::ignorable_test("every_asm_of_sys_is_a_statement_of_the_table", one_source)];
    for table in TABLES {
        let name = format!("the_docs_list_exactly_the_operations_that_there_are::{}", table.name);
        trials.push(Trial::ignorable_test(name, move || same_rows(table)));
    }
    let mut trial = |name: String, run: Run| {
        let tools = tools.clone();
        trials.push(Trial::ignorable_test(name, move || match tools {
            Ok(tools) => run(&tools),
            Err(reason) => Ok(Completion::ignored_with(reason)),
        }));
    };
    for row in TABLES.iter().flat_map(|table| (table.rows)()).chain(DATA_OPERATIONS.iter().copied()) {
        for target in TARGETS {
            if is_there(&row, target) {
                let name = format!("ptxas_takes_{}_alone::{}", row.name, target.0);
                trial(name, Box::new(move |tools| taken(tools, row, target)));
            }
        }
        // sm_80 has mbarriers, for copies that threads carry out.
        if row.fallback.is_some() || !is_there(&row, TARGETS[0]) && !row.ptx.starts_with("mbarrier") {
            trial(format!("{}_needs_its_fallback::sm_80", row.name), Box::new(move |tools| refused(tools, row)));
        }
    }
    for table in TABLES {
        for row in (table.rows)() {
            let name = format!("{}_becomes_what_the_docs_say::sm_90", row.name);
            trial(name, Box::new(move |tools| as_documented(tools, row.name, table, table.docs)));
        }
        for target in TARGETS {
            let name = format!("no_line_becomes_an_illegal_instruction::{}::{}", table.name, target.0);
            trial(name, Box::new(move |tools| legal(tools, table, target)));
        }
    }
    trial("mistakes_in_statements_are_noticed".into(), Box::new(mistakes));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
