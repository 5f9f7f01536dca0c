// SPDX-License-Identifier: MIT OR Apache-2.0
//! Comparisons with the kernel's `linux/mlx5/mlx5_ifc.h`, and with numbers that only the headers beside it have.

use super::{compiler, needing};
use gin_abi::mlx5::bits::Row;
use gin_abi::mlx5::command::{
    AtomicMode, PM_MIGRATED, QpState, RQ_TYPE_NONE, Status, capability, opcode, opt_param, roce_version,
};
use gin_abi::mlx5::mailbox::{TABLES, Table};
use gin_abi::mlx5::wqe;
use libtest_mimic::{Failed, Trial};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Fields that the header of Linux 6.1 does not name, with the reason. They must be in its reserved bits.
const UNNAMED: [(&str, &str, &str); 9] = [
    ("cqc", "dbr_umem_id", "the kernel itself never puts a doorbell record into registered memory"),
    ("qpc", "dbr_umem_id", "the same"),
    ("create_cq_in", "cq_umem_offset", "the kernel itself never puts a ring into registered memory"),
    ("create_cq_in", "cq_umem_id", "the same"),
    ("create_qp_in", "wq_umem_offset", "the same"),
    ("create_qp_in", "wq_umem_id", "the same"),
    ("qpc", "send_dbr_mode", "the kernel uses no send queue without a doorbell record"),
    ("cmd_hca_cap_2", "send_dbr_mode_no_dbr_ext", "the same"),
    // The union of all tables; each table is compared separately.
    ("query_hca_cap_out", "capability.", "a union, whose members are compared by themselves"),
];

/// Headers with further numbers, too entangled with the kernel to be compiled.
///
/// No header has `wqe::opcode::WAIT` or the segment of that entry. They follow NCCL's GIN and DOCA GPUNetIO.
const SOURCES: [&str; 3] = ["device.h", "driver.h", "qp.h"];

type Check = fn(&Path) -> Result<(), Failed>;

/// Returns each check, once per installed kernel's headers.
pub(crate) fn trials() -> Vec<Trial> {
    let folders = headers();
    let compiler = compiler::missing("stdint.h");
    let checks: [(&str, Check); 3] = [
        ("fields_lie_where_the_kernel_has_them", fields),
        ("fields_that_the_kernel_does_not_name_lie_in_reserved_bits", reserved),
        ("numbers_are_those_of_the_kernel", numbers),
    ];
    let mut trials = Vec::new();
    for (name, check) in checks {
        if folders.is_empty() {
            let reason = "linux/mlx5/mlx5_ifc.h is not installed below /usr/src: run scripts/setup.sh".to_owned();
            trials.push(needing(name, Some(reason), || Ok(())));
        }
        for folder in &folders {
            let kernel = folder.components().nth(3).map(|part| part.as_os_str().to_string_lossy().into_owned());
            let name = format!("{name}::{}", kernel.unwrap_or_default());
            let folder = folder.clone();
            trials.push(needing(&name, compiler.clone(), move || check(&folder)));
        }
    }
    trials
}

/// Returns the folders with the kernel's headers for mlx5.
fn headers() -> Vec<PathBuf> {
    let installed = fs::read_dir("/usr/src").into_iter().flatten().flatten();
    let folders = installed.map(|entry| entry.path().join("include/linux/mlx5"));
    let mut found: Vec<_> = folders.filter(|folder| folder.join("mlx5_ifc.h").exists()).collect();
    found.sort();
    found
}

/// Compiles and runs a program that includes the header. Returns the lines it prints, keyed by their first word.
fn ask(headers: &Path, body: &str) -> Result<BTreeMap<String, Vec<u64>>, Failed> {
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("ask.c");
    let header = headers.join("mlx5_ifc.h");
    fs::write(
        &source,
        format!(
            "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n\
             typedef uint8_t u8;\ntypedef uint16_t u16;\ntypedef uint32_t u32;\ntypedef uint64_t u64;\n\
             #define BIT(n) (1U << (n))\n#define BIT_ULL(n) (1ULL << (n))\n\
             #define DECLARE_FLEX_ARRAY(type, name) struct {{ struct {{}} name##_none; type name[]; }}\n\
             #include \"{}\"\n\
             #define BITS(type, field) offsetof(struct mlx5_ifc_##type##_bits, field), \
             sizeof(((struct mlx5_ifc_##type##_bits *)0)->field)\n\
             int main(void)\n{{\n{body}\treturn 0;\n}}\n",
            header.display()
        ),
    )?;
    let program = compiler::compile(&source, &folder.path().join("ask"), &[])?;
    let output = Command::new(program).output()?;
    let line = |line: &str| {
        let mut words = line.split(' ');
        let name = words.next()?.to_owned();
        Some((name, words.map_while(|word| word.parse().ok()).collect()))
    };
    Ok(String::from_utf8(output.stdout)?.lines().filter_map(line).collect())
}

fn unnamed(table: &Table, row: &Row) -> bool {
    UNNAMED.iter().any(|(layout, field, _)| {
        *layout == table.name && (*field == row.name || field.ends_with('.') && row.name.starts_with(field))
    })
}

fn rows() -> impl Iterator<Item = (&'static Table, &'static Row)> {
    TABLES.iter().flat_map(|table| table.rows.iter().map(move |row| (table, row)))
}

fn fields(headers: &Path) -> Result<(), Failed> {
    let mut body = String::new();
    for table in TABLES {
        let name = table.name;
        writeln!(body, "\tprintf(\"{name} %zu\\n\", sizeof(struct mlx5_ifc_{name}_bits));")?;
    }
    for (table, row) in rows().filter(|(table, row)| !unnamed(table, row)) {
        let (table, field) = (table.name, row.name);
        writeln!(body, "\tprintf(\"{table}.{field} %zu %zu\\n\", BITS({table}, {field}));")?;
    }
    let theirs = ask(headers, &body)?;
    let mut wrong = Vec::new();
    for table in TABLES {
        let (ours, theirs) = (table.length as u64 * 8, theirs.get(table.name).map_or(0, |found| found[0]));
        // Answers grow from kernel to kernel. A device fills in as much as there is room for.
        if theirs != ours && !(table.name.ends_with("_out") && theirs > ours) {
            wrong.push(format!("{} has {ours} bits here, {theirs} there", table.name));
        }
    }
    for (table, row) in rows().filter(|(table, row)| !unnamed(table, row)) {
        let name = format!("{}.{}", table.name, row.name);
        let expected = vec![u64::from(row.offset), u64::from(row.width)];
        if theirs.get(&name) != Some(&expected) {
            wrong.push(format!("{name} is {expected:?} here, {:?} there", theirs.get(&name)));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Returns the names of a structure's fields, as the header spells them.
fn names(header: &str, table: &str) -> Vec<String> {
    let start = format!("struct mlx5_ifc_{table}_bits {{");
    let body = header.split(&start).nth(1).and_then(|rest| rest.split("\n};").next()).unwrap_or("");
    let name = |line: &str| line.trim().strip_prefix("u8")?.trim().split('[').next().map(str::to_owned);
    body.lines().filter_map(name).collect()
}

fn reserved(headers: &Path) -> Result<(), Failed> {
    let header = fs::read_to_string(headers.join("mlx5_ifc.h"))?;
    let mut wrong = Vec::new();
    for (table, field, reason) in UNNAMED.iter().filter(|(_, field, _)| !field.ends_with('.')) {
        let (_, row) = rows()
            .find(|(known, row)| known.name == *table && row.name == *field)
            .ok_or_else(|| format!("{table}.{field} is listed ({reason}) but there is none"))?;
        let mut body = String::new();
        let names = names(&header, table);
        // A newer kernel may name the field.
        let named = names.iter().any(|name| name == field);
        for name in names.iter().filter(|name| if named { name == field } else { name.starts_with("reserved_at_") }) {
            writeln!(body, "\tprintf(\"{name} %zu %zu\\n\", BITS({table}, {name}));")?;
        }
        let within = ask(headers, &body)?.values().any(|place| {
            let [offset, width] = place[..] else { return false };
            let (first, end) = (u64::from(row.offset), u64::from(row.offset + row.width));
            first >= offset && end <= offset + width && (!named || (first == offset && end == offset + width))
        });
        if !within {
            wrong.push(format!("{table}.{field} is elsewhere, or overlaps a field of the kernel's"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Returns the number that a header beside `mlx5_ifc.h` assigns to a name, by `NAME = number` or `NAME = 1 << number`.
fn in_text(folder: &Path, name: &str) -> Option<u64> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    SOURCES.iter().find_map(|file| {
        let text = fs::read_to_string(folder.join(file)).ok()?;
        text.lines().find_map(|line| {
            let (left, right) = line.split_once('=')?;
            let right = right.trim().split(['/', ',']).next()?.trim();
            let value = match right.split_once("<<") {
                Some((one, shift)) => number(one.trim())? << number(shift.trim())?,
                None => number(right)?,
            };
            (left.trim() == name).then_some(value)
        })
    })
}

/// Returns the values of the enumeration of capability tables, which counts implicitly.
fn capability_tables(folder: &Path) -> Result<BTreeMap<String, u64>, Failed> {
    let text = fs::read_to_string(folder.join("device.h"))?;
    let body = text.split("enum mlx5_cap_type {").nth(1).and_then(|rest| rest.split("};").next());
    let mut next = 0;
    let mut tables = BTreeMap::new();
    for line in body.ok_or("the header has no list of capabilities")?.lines() {
        let Some(item) = line.trim().strip_suffix(',') else { continue };
        let (name, code) = item.split_once('=').map_or((item, None), |(name, code)| (name, Some(code.trim())));
        if let Some(code) = code {
            next = u64::from_str_radix(code.trim_start_matches("0x"), 16)?;
        }
        tables.insert(name.trim().to_owned(), next);
        next += 1;
    }
    Ok(tables)
}

fn numbers(headers: &Path) -> Result<(), Failed> {
    let commands = [
        ("QUERY_HCA_CAP", opcode::QUERY_HCA_CAP),
        ("CREATE_CQ", opcode::CREATE_CQ),
        ("DESTROY_CQ", opcode::DESTROY_CQ),
        ("QUERY_CQ", opcode::QUERY_CQ),
        ("CREATE_QP", opcode::CREATE_QP),
        ("DESTROY_QP", opcode::DESTROY_QP),
        ("RST2INIT_QP", opcode::RST2INIT_QP),
        ("INIT2RTR_QP", opcode::INIT2RTR_QP),
        ("RTR2RTS_QP", opcode::RTR2RTS_QP),
        ("2ERR_QP", opcode::TO_ERR_QP),
        ("2RST_QP", opcode::TO_RST_QP),
        ("QUERY_QP", opcode::QUERY_QP),
        ("QUERY_ROCE_ADDRESS", opcode::QUERY_ROCE_ADDRESS),
        ("ALLOC_UAR", opcode::ALLOC_UAR),
        ("DEALLOC_UAR", opcode::DEALLOC_UAR),
        ("CREATE_UMEM", opcode::CREATE_UMEM),
        ("DESTROY_UMEM", opcode::DESTROY_UMEM),
    ];
    let mut body = String::new();
    for (name, _) in commands {
        writeln!(body, "\tprintf(\"{name} %d\\n\", MLX5_CMD_OP_{name});")?;
    }
    let theirs = ask(headers, &body)?;
    let mut wrong = Vec::new();
    for (name, code) in commands {
        if theirs.get(name) != Some(&vec![code]) {
            wrong.push(format!("MLX5_CMD_OP_{name} is {:x?} there, {code:#x} here", theirs.get(name)));
        }
    }
    for (name, code) in [
        ("MLX5_OPCODE_DUMP", u64::from(wqe::opcode::DUMP)),
        ("MLX5_CMD_STAT_OK", Status::Ok.code()),
        ("MLX5_CMD_STAT_INT_ERR", Status::Internal.code()),
        ("MLX5_CMD_STAT_BAD_OP_ERR", Status::BadOperation.code()),
        ("MLX5_CMD_STAT_BAD_PARAM_ERR", Status::BadParameter.code()),
        ("MLX5_CMD_STAT_BAD_SYS_STATE_ERR", Status::BadSystemState.code()),
        ("MLX5_CMD_STAT_BAD_RES_ERR", Status::BadResource.code()),
        ("MLX5_CMD_STAT_RES_BUSY", Status::ResourceBusy.code()),
        ("MLX5_CMD_STAT_LIM_ERR", Status::Limit.code()),
        ("MLX5_CMD_STAT_BAD_RES_STATE_ERR", Status::BadResourceState.code()),
        ("MLX5_CMD_STAT_IX_ERR", Status::Index.code()),
        ("MLX5_CMD_STAT_NO_RES_ERR", Status::NoResources.code()),
        ("MLX5_CMD_STAT_BAD_QP_STATE_ERR", Status::BadQpState.code()),
        ("MLX5_CMD_STAT_BAD_INP_LEN_ERR", Status::BadInputLength.code()),
        ("MLX5_CMD_STAT_BAD_OUTP_LEN_ERR", Status::BadOutputLength.code()),
        ("MLX5_QP_STATE_RST", QpState::Reset.code()),
        ("MLX5_QP_STATE_INIT", QpState::Init.code()),
        ("MLX5_QP_STATE_RTR", QpState::ReadyToReceive.code()),
        ("MLX5_QP_STATE_RTS", QpState::ReadyToSend.code()),
        ("MLX5_QP_STATE_SQER", QpState::SendError.code()),
        ("MLX5_QP_STATE_SQD", QpState::Drained.code()),
        ("MLX5_QP_STATE_ERR", QpState::Error.code()),
        ("MLX5_QP_PM_MIGRATED", PM_MIGRATED),
        ("MLX5_ZERO_LEN_RQ", RQ_TYPE_NONE),
        ("MLX5_QP_OPTPAR_RRE", opt_param::RRE),
        ("MLX5_QP_OPTPAR_RAE", opt_param::RAE),
        ("MLX5_QP_OPTPAR_RWE", opt_param::RWE),
        ("MLX5_QP_OPTPAR_PKEY_INDEX", opt_param::PKEY_INDEX),
        ("MLX5_QP_OPTPAR_RNR_TIMEOUT", opt_param::RNR_TIMEOUT),
        ("MLX5_ATOMIC_MODE_IB_COMP", AtomicMode::Specification.code()),
        ("MLX5_ATOMIC_MODE_8B", AtomicMode::EightBytes.code()),
        ("MLX5_ROCE_VERSION_1", roce_version::V1),
        ("MLX5_ROCE_VERSION_2", roce_version::V2),
    ] {
        let found = in_text(headers, name);
        if found != Some(code) {
            wrong.push(format!("{name} is {found:x?} there, {code:#x} here"));
        }
    }
    let tables = capability_tables(headers)?;
    for (name, code) in [
        ("MLX5_CAP_GENERAL", capability::GENERAL),
        ("MLX5_CAP_ATOMIC", capability::ATOMIC),
        ("MLX5_CAP_ROCE", capability::ROCE),
        ("MLX5_CAP_GENERAL_2", capability::GENERAL_2),
    ] {
        // The lowest bit requests the values in force.
        let found = tables.get(name).map(|table| table << 1 | 1);
        if found != Some(code) {
            wrong.push(format!("{name} has code {found:x?} there, {code:#x} here"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}
