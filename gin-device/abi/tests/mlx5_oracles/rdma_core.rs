// SPDX-License-Identifier: MIT OR Apache-2.0
//! Comparisons with rdma-core's `infiniband/mlx5dv.h` and `infiniband/verbs.h`.

use super::{compiler, needing};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::bits::RowKind;
use gin_abi::mlx5::command::Mtu;
use gin_abi::mlx5::cqe::{self, Completion, Outcome, Syndrome, Tail};
use gin_abi::mlx5::doorbell::SEND_OFFSET;
use gin_abi::mlx5::mailbox::TABLES;
use gin_abi::mlx5::wqe::{self, Flags, Local, Post, QueueNumber, Remote, Segment, Slot, opcode};
use libloading::Library;
use libtest_mimic::{Failed, Trial};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;

pub(crate) fn trials() -> Vec<Trial> {
    let missing = compiler::missing("infiniband/mlx5dv.h");
    [
        ("entries_are_those_that_rdma_core_builds", entries as fn() -> Result<(), Failed>),
        ("rdma_core_reads_the_completions_that_are_written", completions_written),
        ("completions_that_rdma_core_builds_are_read", completions_read),
        ("mailbox_fields_are_set_and_read_as_devx_does", fields),
        ("numbers_are_those_of_rdma_core", numbers),
    ]
    .map(|(name, run)| needing(name, missing.clone(), run))
    .into()
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Entry {
    kind: u32,
    index: u32,
    queue: u32,
    flags: u32,
    remote: u64,
    local: u64,
    amount: u64,
    rkey: u32,
    lkey: u32,
    bytes: u32,
    pad: u32,
    data: [u8; 28],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    opcode: u32,
    owner: u32,
    index: u32,
    operation: u32,
    queue: u32,
    bytes: u32,
    syndrome: u32,
    vendor: u32,
}

#[repr(C)]
struct Constant {
    name: *const c_char,
    value: u64,
}

/// The functions of `rdma_core.c`.
struct Oracle {
    entry: unsafe extern "C" fn(*mut Slot, *const Entry) -> u32,
    write_completion: unsafe extern "C" fn(*mut Completion, *const Seen),
    read_completion: unsafe extern "C" fn(*const Completion, *mut Seen),
    set: unsafe extern "C" fn(*mut c_void, u64, usize, usize),
    get: unsafe extern "C" fn(*const c_void, usize, usize) -> u64,
    constants: BTreeMap<String, u64>,
    _library: Library,
}

fn oracle() -> Result<&'static Oracle, Failed> {
    static ORACLE: OnceLock<Result<Oracle, String>> = OnceLock::new();
    Ok(ORACLE.get_or_init(load).as_ref()?)
}

fn load() -> Result<Oracle, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mlx5_oracles/rdma_core.c");
    let object = compiler::compile(&source, &folder.path().join("oracle.so"), &["-shared", "-fPIC"])?;
    // Safety: the library was just compiled and has no initialisers.
    let library = unsafe { Library::new(object) }.map_err(|error| error.to_string())?;
    macro_rules! function {
        ($name:literal) => {
            // Safety: the type matches the function in `rdma_core.c`, and the library stays loaded.
            *unsafe { library.get($name) }.map_err(|error| error.to_string())?
        };
    }
    let list: unsafe extern "C" fn(*mut usize) -> *const Constant = function!(b"oracle_constants");
    let mut count = 0;
    // Safety: `count` is writable.
    let first = unsafe { list(&raw mut count) };
    // Safety: the function returns their number, and they are static.
    let constants = unsafe { std::slice::from_raw_parts(first, count) };
    // Safety: names are static strings.
    let named =
        |constant: &Constant| (unsafe { CStr::from_ptr(constant.name) }.to_string_lossy().into(), constant.value);
    Ok(Oracle {
        entry: function!(b"oracle_entry"),
        write_completion: function!(b"oracle_write_completion"),
        read_completion: function!(b"oracle_read_completion"),
        set: function!(b"oracle_set"),
        get: function!(b"oracle_get"),
        constants: constants.iter().map(named).collect(),
        _library: library,
    })
}

/// Runs a property with a fixed seed, since a failure here does not depend on luck.
fn property<S: Strategy>(inputs: S, check: impl Fn(S::Value) -> Result<(), TestCaseError>) -> Result<(), Failed> {
    let config = Config { cases: 4096, failure_persistence: None, ..Config::default() };
    TestRunner::new(config).run(&inputs, check).map_err(|error| error.to_string().into())
}

fn edges64() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>()]
}

fn entry() -> impl Strategy<Value = Entry> {
    let numbers = (0u32..6, 0..1u32 << 24, prop_oneof![Just(0u32), Just(8), Just(0x88), Just(0x20)]);
    let keys = (any::<u32>(), any::<u32>(), 1..=wqe::MAX_DATA_BYTES);
    (numbers, edges64(), edges64(), edges64(), edges64(), keys, any::<[u8; 28]>()).prop_map(
        |((kind, queue, flags), index, remote, local, amount, (rkey, lkey, bytes), data)| {
            // Inline data has 1 to 28 bytes, an atomic 8.
            let bytes = [bytes, bytes, bytes % 28 + 1, bytes, 8, bytes][kind as usize];
            let index = index as u32 & 0xffff;
            Entry { kind, index, queue, flags, remote, local, amount, rkey, lkey, bytes, pad: 0, data }
        },
    )
}

fn ours(entry: &Entry) -> Vec<Segment> {
    let (queue, flags) = (QueueNumber::new(entry.queue), Flags(entry.flags as u8));
    // A queue's index has 64 bits; the entry holds the low 16.
    let post = Post { index: u64::from(entry.index) | 0xabcd << 16, queue, flags };
    let remote = Remote { address: entry.remote, key: Be32::new(entry.rkey) };
    let local = Local { address: entry.local, key: Be32::new(entry.lkey), bytes: entry.bytes };
    match entry.kind {
        0 => wqe::nop(post).to_vec(),
        1 => wqe::write(post, remote, local).to_vec(),
        2 => {
            let mut data = [0; 28];
            data[..entry.bytes as usize].copy_from_slice(&entry.data[..entry.bytes as usize]);
            let words: [u32; 7] = bytemuck::cast(data);
            if entry.bytes <= 8 {
                // The value has more bytes than are sent; the others must not show.
                let value = u64::from_le_bytes(std::array::from_fn(|at| entry.data[at]));
                wqe::write_value(post, remote, value, entry.bytes).to_vec()
            } else {
                let segments = wqe::write_words(post, remote, words, entry.bytes).to_vec();
                if entry.bytes <= 12 { segments[..3].to_vec() } else { segments }
            }
        }
        3 => wqe::read(post, remote, local).to_vec(),
        4 => wqe::fetch_add(post, remote, entry.amount, local).to_vec(),
        _ => wqe::dump(post, local).to_vec(),
    }
}

fn entries() -> Result<(), Failed> {
    let oracle = oracle()?;
    property(entry(), |entry| {
        let mut theirs = Slot::default();
        // Safety: both pointers have the types that the function takes.
        let count = unsafe { (oracle.entry)(&raw mut theirs, &raw const entry) } as usize;
        let mut ours = ours(&entry);
        // `write_words` always announces four segments.
        if entry.kind == 2 && (9..=12).contains(&entry.bytes) {
            ours[0].words[0] = ours[0].words[0] & !(0xff << 56) | 3 << 56;
        }
        prop_assert_eq!(&ours, &theirs[..count]);
        Ok(())
    })
}

fn completion() -> impl Strategy<Value = (u64, u32, Seen)> {
    let numbers = (any::<u64>(), 0u32..24, any::<bool>(), any::<u16>());
    (numbers, 0u32..256, 0..1u32 << 24, any::<u32>(), 0..Syndrome::ALL.len(), any::<u8>()).prop_map(
        |((number, log_size, failed, index), operation, queue, bytes, syndrome, vendor)| {
            let seen = Seen {
                opcode: u32::from(if failed { cqe::opcode::REQUEST_ERROR } else { cqe::opcode::REQUEST }),
                owner: (number >> log_size) as u32 & 1,
                index: u32::from(index),
                operation,
                queue,
                bytes: if failed { 0 } else { bytes },
                syndrome: if failed { u32::from(Syndrome::ALL[syndrome].code()) } else { 0 },
                vendor: if failed { u32::from(vendor) } else { 0 },
            };
            (number, log_size, seen)
        },
    )
}

fn written(number: u64, log_size: u32, seen: &Seen) -> Completion {
    let tail = Tail::new(seen.opcode as u8, seen.operation, seen.queue, u64::from(seen.index), number, log_size);
    match Syndrome::from_code(seen.syndrome as u8) {
        Some(syndrome) => Completion::error(tail, syndrome, seen.vendor as u8),
        None => Completion::good(tail, seen.bytes),
    }
}

fn completions_written() -> Result<(), Failed> {
    let oracle = oracle()?;
    property(completion(), |(number, log_size, expected)| {
        let ours = written(number, log_size, &expected);
        let mut seen = Seen::default();
        // Safety: both pointers have the types that the function takes.
        unsafe { (oracle.read_completion)(&raw const ours, &raw mut seen) };
        prop_assert_eq!(seen, expected);
        Ok(())
    })
}

fn completions_read() -> Result<(), Failed> {
    let oracle = oracle()?;
    property(completion(), |(number, log_size, expected)| {
        let mut theirs = Completion { words: [u64::MAX; 8] };
        // Safety: both pointers have the types that the function takes.
        unsafe { (oracle.write_completion)(&raw mut theirs, &raw const expected) };
        prop_assert_eq!(theirs, written(number, log_size, &expected), "byte for byte");
        let result = match expected.opcode as u8 {
            cqe::opcode::REQUEST => Ok(expected.bytes),
            _ => Err(cqe::Failure { syndrome: expected.syndrome as u8, vendor: expected.vendor as u8 }),
        };
        let outcome =
            Outcome { queue: expected.queue, index: expected.index as u16, operation: expected.operation, result };
        prop_assert_eq!(theirs.read(number, log_size), Ok(outcome));
        prop_assert!(theirs.read(number ^ 1 << log_size, log_size).is_err(), "of the other round");
        Ok(())
    })
}

/// Room for the longest table, aligned as devx requires.
type Room = [u64; 1024];

fn fields() -> Result<(), Failed> {
    let oracle = oracle()?;
    let rows: Vec<_> = TABLES
        .iter()
        .flat_map(|table| table.rows.iter().map(move |row| (table.name, table.length, row)))
        .filter(|(_, _, row)| row.kind == RowKind::Number)
        .collect();
    for (table, length, row) in rows {
        if length > size_of::<Room>() {
            return Err(format!("{table} is longer than the room for it").into());
        }
        for (background, value) in [(0u64, u64::MAX), (u64::MAX, 0), (0x5a5a_1234_5678_9abc, 0x0123_4567_89ab_cdef)] {
            let (mut ours, mut theirs): (Room, Room) = ([background; 1024], [background; 1024]);
            let value = value & gin_abi::mask(row.width);
            row.set(bytemuck::bytes_of_mut(&mut ours), value);
            // Safety: the field is within the room.
            let read = unsafe {
                (oracle.set)(theirs.as_mut_ptr().cast(), value, row.offset as usize, row.width as usize);
                (oracle.get)(ours.as_ptr().cast(), row.offset as usize, row.width as usize)
            };
            if ours != theirs || read != value || row.get(bytemuck::bytes_of(&theirs)) != value {
                return Err(format!("{table}.{}: value {value:#x}", row.name).into());
            }
        }
    }
    Ok(())
}

fn numbers() -> Result<(), Failed> {
    let mut theirs = oracle()?.constants.clone();
    let (record, send) = (SEND_OFFSET / 4, u64::from(Flags::COMPLETION.0));
    let mut ours: Vec<(&str, u64)> = vec![
        ("MLX5_OPCODE_NOP", opcode::NOP.into()),
        ("MLX5_OPCODE_RDMA_WRITE", opcode::WRITE.into()),
        ("MLX5_OPCODE_RDMA_READ", opcode::READ.into()),
        ("MLX5_OPCODE_ATOMIC_FA", opcode::FETCH_ADD.into()),
        ("MLX5_INLINE_SEG", 1 << 31),
        ("MLX5_WQE_CTRL_CQ_UPDATE", send),
        ("MLX5_WQE_CTRL_FENCE", Flags::FENCE.0.into()),
        ("MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE", Flags::LOCAL_FENCE.0.into()),
        ("MLX5_SEND_WQE_BB", wqe::SLOT_BYTES),
        ("MLX5_SND_DBR", record),
        ("MLX5_RCV_DBR", 0),
        ("MLX5_CQE_REQ", cqe::opcode::REQUEST.into()),
        ("MLX5_CQE_REQ_ERR", cqe::opcode::REQUEST_ERROR.into()),
        ("MLX5_CQE_RESP_ERR", cqe::opcode::RESPONSE_ERROR.into()),
        ("MLX5_CQE_INVALID", cqe::opcode::INVALID.into()),
        ("sizeof(struct mlx5_cqe64)", cqe::BYTES),
        ("offsetof(struct mlx5_err_cqe, syndrome)", 8 * cqe::SYNDROME_WORD as u64 + 7),
        ("offsetof(struct mlx5_cqe64, wqe_counter)", 8 * cqe::TAIL_WORD as u64 + 4),
        ("offsetof(struct mlx5_cqe64, op_own)", 8 * cqe::TAIL_WORD as u64 + 7),
    ];
    let syndromes = [
        ("LOCAL_LENGTH", Syndrome::LocalLength),
        ("LOCAL_QP_OP", Syndrome::LocalOperation),
        ("LOCAL_PROT", Syndrome::LocalProtection),
        ("WR_FLUSH", Syndrome::Flushed),
        ("MW_BIND", Syndrome::WindowBind),
        ("BAD_RESP", Syndrome::BadResponse),
        ("LOCAL_ACCESS", Syndrome::LocalAccess),
        ("REMOTE_INVAL_REQ", Syndrome::RemoteInvalidRequest),
        ("REMOTE_ACCESS", Syndrome::RemoteAccess),
        ("REMOTE_OP", Syndrome::RemoteOperation),
        ("TRANSPORT_RETRY_EXC", Syndrome::RetryExceeded),
        ("RNR_RETRY_EXC", Syndrome::NotReadyExceeded),
        ("REMOTE_ABORTED", Syndrome::RemoteAborted),
    ]
    .map(|(name, syndrome)| (format!("MLX5_CQE_SYNDROME_{name}_ERR"), u64::from(syndrome.code())));
    let mtus: Vec<_> = Mtu::ALL.iter().map(|mtu| (format!("IBV_MTU_{}", mtu.bytes()), mtu.code())).collect();
    ours.extend(syndromes.iter().chain(&mtus).map(|(name, value)| (name.as_str(), *value)));
    for (name, value) in ours {
        let found = theirs.remove(name);
        if found != Some(value) {
            return Err(format!("{name} is {found:x?} there and {value:#x} here").into());
        }
    }
    if theirs.is_empty() { Ok(()) } else { Err(format!("not compared: {:?}", theirs.keys()).into()) }
}
