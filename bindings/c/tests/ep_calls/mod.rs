// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random calls of expert parallelism and of graphs.

use super::{Handles, OTHERS};
use gin_capi::ep::{group::*, permuted::*, product::*, slot::*, types::*};
use gin_capi::graph::*;
use gin_capi::types::gin_status_t::GIN_OK;
use gin_capi::types::*;
use std::ptr::{null, null_mut};

/// The number of calls.
pub(crate) const CALLS: u8 = 39;
pub(crate) const PERMUTED_CLOSE: u8 = 15;
pub(crate) const PLAN_CLOSE: u8 = 17;
pub(crate) const GROUP_RELEASE: u8 = 22;
pub(crate) const SLOT_CLOSE: u8 = 23;
pub(crate) const GRAPH_CLOSE: u8 = 27;
pub(crate) const GROUPED_CLOSE: u8 = 33;
pub(crate) const OVERLAPPED_CLOSE: u8 = 36;

/// The kinds of handles, as the library numbers them.
const STREAM: u8 = 4;
const COMM: u8 = 2;
const GRAPH: u8 = 7;
const GROUP: u8 = 8;
const SLOT: u8 = 9;
const PLAN: u8 = 10;
const PERMUTED: u8 = 11;
const GROUPED: u8 = 12;
const OVERLAPPED: u8 = 13;

/// A sequence in which all calls succeed: (call, choice, number).
pub(crate) fn one_dispatch() -> Vec<(u8, u64, u64)> {
    let ep = |which: u8, number| (OTHERS + which, 1 | 1 << 21, number);
    // A job, a stream, a communicator.
    let objects = [(0, 0, 1), (3, 3, 100), (1, 3, 0x101)];
    // A group, a slot and a layout; one token, which goes to a layout and back, and its metadata to memory.
    let dispatch = [ep(0, 9), ep(1, 0), ep(12, 100), ep(4, 8), ep(6, 0), ep(31, 1), ep(10, 0), ep(11, 4), ep(8, 8)];
    objects.into_iter().chain(dispatch).collect()
}

/// The number of bytes of memory that kernels of random calls may use: more than the largest group needs.
const BYTES: usize = 1 << 16;

/// Memory of the program, which is never freed, because kernels use it after a call.
#[repr(align(16))]
struct Space(std::cell::UnsafeCell<[u8; BYTES]>);

// Safety: only kernels and the library access it, and no value of it matters.
unsafe impl Sync for Space {}
static SPACE: Space = Space(std::cell::UnsafeCell::new([0; BYTES]));

/// Returns memory that is long enough, or, for some numbers, null, misaligned, short or longer than an address space.
fn memory(number: u64) -> gin_memory_t {
    let data = SPACE.0.get().cast::<std::ffi::c_void>();
    match number % 16 {
        0 => gin_memory_t { data: null_mut(), bytes: number >> 4 & 1 },
        1 => gin_memory_t { data: data.wrapping_byte_add(2), bytes: (BYTES - 2) as u64 },
        2 => gin_memory_t { data, bytes: number >> 8 & 63 },
        3 => gin_memory_t { data, bytes: u64::MAX },
        _ => gin_memory_t { data, bytes: BYTES as u64 },
    }
}

/// Returns memory for most numbers, else none.
fn optional(number: u64) -> gin_memory_t {
    if number & 3 == 3 { memory(number >> 2) } else { gin_memory_t { data: null_mut(), bytes: 0 } }
}

/// Returns a configuration, of which one member may be wrong.
fn config(number: u64) -> gin_ep_config_t {
    let some = (number >> 8) as u32;
    let good = gin_ep_config_t {
        size: size_of::<gin_ep_config_t>() as u32,
        experts: 1 + (number >> 40) as u32 % 3,
        hidden: 8,
        topk: 1 + (number >> 42) as u32 % 2,
        tokens: 4,
        slots: 1 + (number >> 44) as u32 % 2,
        element: (number >> 48) as u32 % 3,
        row_bytes: 0,
        scale_bytes: 0,
        combine_at_source: (number >> 52) as u32 & 1,
        combine_f32: 0,
        max_rows: 0,
        sms: 1,
        grid: 0,
        threads: 32,
        deadline_ms: 20,
    };
    match number % 16 {
        0 => gin_ep_config_t { size: some, ..good },
        1 => gin_ep_config_t { experts: some, ..good },
        2 => gin_ep_config_t { hidden: some, ..good },
        3 => gin_ep_config_t { topk: 33 + some % 9, ..good },
        5 => gin_ep_config_t { element: 3 + some % 9, row_bytes: 16, ..good },
        6 => gin_ep_config_t { threads: some, ..good },
        7 => gin_ep_config_t { max_rows: some % 9, combine_f32: some >> 4 & 1, ..good },
        8 => gin_ep_config_t { slots: 65 + some % 9, ..good },
        _ => good,
    }
}

/// Returns tokens, of which one member may be wrong.
fn tokens(handles: &Handles, choice: u64, number: u64) -> gin_ep_tokens_t {
    let shifted = |bits: u32| number.rotate_right(bits);
    gin_ep_tokens_t {
        size: size_of::<gin_ep_tokens_t>() as u32 + u32::from(shifted(2).is_multiple_of(17)),
        count: (number >> 3) as u32 % 6 % 5,
        id_bits: if shifted(5).is_multiple_of(9) { shifted(9) as u32 } else { 32 },
        reserved: 0,
        rows: memory(shifted(4).wrapping_add(9)),
        ids: memory(shifted(8).wrapping_add(9)),
        weights: optional(shifted(12)),
        scales: gin_memory_t { data: null_mut(), bytes: shifted(16) & 1 & shifted(17) },
        count_at: if shifted(20) & 7 == 7 { memory(shifted(23)) } else { gin_memory_t { data: null_mut(), bytes: 0 } },
        plan: gin_ep_plan_t { id: if shifted(26) & 3 == 3 { handles.of_kind(PLAN, choice >> 9) } else { 0 } },
    }
}

/// Returns a combine, of which one member may be wrong.
fn combine(handles: &Handles, choice: u64, number: u64) -> gin_ep_combine_t {
    let shifted = |bits: u32| number.rotate_right(bits);
    gin_ep_combine_t {
        size: size_of::<gin_ep_combine_t>() as u32 + u32::from(shifted(2).is_multiple_of(17)),
        accumulate: (number >> 3) as u32 & 1,
        output: memory(shifted(4).wrapping_add(9)),
        weights: optional(shifted(8)),
        bias: optional(shifted(12)),
        rows: optional(shifted(16)),
        permuted: gin_ep_permuted_t {
            id: if shifted(20) & 3 == 3 { handles.of_kind(PERMUTED, choice >> 9) } else { 0 },
        },
        returned: u32::from(shifted(24).is_multiple_of(5)),
        reserved: 0,
    }
}

/// Returns factors of products, of which one member may be wrong.
fn experts(handles: &Handles, choice: u64, number: u64) -> gin_ep_experts_t {
    let shifted = |bits: u32| number.rotate_right(bits);
    gin_ep_experts_t {
        size: size_of::<gin_ep_experts_t>() as u32 + u32::from(shifted(2).is_multiple_of(17)),
        reserved: 0,
        permuted: gin_ep_permuted_t { id: handles.of_kind(PERMUTED, choice >> 9) },
        rows: memory(shifted(4).wrapping_add(9)),
        weights: memory(shifted(8).wrapping_add(9)),
        products: optional(shifted(12)),
    }
}

/// Returns memory for a layout, of which one member may be wrong.
fn into(number: u64) -> gin_ep_permuted_into_t {
    let shifted = |bits: u32| number.rotate_right(bits);
    gin_ep_permuted_into_t {
        size: size_of::<gin_ep_permuted_into_t>() as u32 + u32::from(shifted(2).is_multiple_of(17)),
        reserved: 0,
        rows: optional(shifted(4)),
        scales: optional(shifted(8) & shifted(24)),
        tokens: optional(shifted(12)),
        counts: optional(shifted(16)),
    }
}

/// Returns memory for metadata, of which one member may be wrong.
fn metadata(number: u64) -> gin_ep_metadata_t {
    let shifted = |bits: u32| number.rotate_right(bits);
    gin_ep_metadata_t {
        size: size_of::<gin_ep_metadata_t>() as u32 + u32::from(shifted(2).is_multiple_of(17)),
        first_expert: (number >> 3) as u32,
        id_bits: [32, 64, 32, 64, 8][shifted(24) as usize % 5],
        reserved: 0,
        experts: optional(shifted(4) & shifted(40)),
        weights: optional(shifted(8)),
        scales: optional(shifted(12) & shifted(44)),
        tokens: optional(shifted(16)),
        counts: optional(shifted(20)),
        offsets: optional(shifted(28) & shifted(48)),
        zones: optional(shifted(32) & shifted(48)),
        total: optional(shifted(36)),
    }
}

/// Makes one call. Returns its status.
pub(crate) fn call(handles: &mut Handles, which: u8, choice: u64, number: u64) -> gin_status_t {
    let of = |kind: u8| handles.of_kind(kind, choice);
    let (group, slot) = (gin_ep_group_t { id: of(GROUP) }, gin_ep_slot_t { id: of(SLOT) });
    let (plan, permuted) = (gin_ep_plan_t { id: of(PLAN) }, gin_ep_permuted_t { id: of(PERMUTED) });
    let stream = gin_stream_t { id: handles.of_kind(STREAM, choice.rotate_right(21)) };
    let graph = gin_graph_t { id: of(GRAPH) };
    let (tokens, combine) = (tokens(handles, choice, number), combine(handles, choice, number));
    let rows = memory(number >> 1);
    let tokens = if number % 13 == 12 { null() } else { &raw const tokens };
    let mut made = 0u64;
    // Safety: pointers are null, or to values of these types that live during the call. Kernels use memory that is
    // never freed.
    let status = unsafe {
        match which {
            0 => gin_ep_group_create(gin_comm_t { id: of(COMM) }, &config(number), (&raw mut made).cast()),
            1 => gin_ep_slot_create(group, (number >> 7) as u32 & 1, (&raw mut made).cast()),
            2 => gin_ep_dispatch(slot, stream, tokens),
            3 => gin_ep_receive(slot, stream),
            4 => gin_ep_exchange(slot, stream, tokens),
            5 => gin_ep_exchange_into(slot, stream, tokens, permuted),
            6 => gin_ep_permute(slot, stream, permuted),
            7 => gin_ep_reduce(slot, stream, permuted, if number & 1 == 0 { null() } else { &rows }),
            8 => gin_ep_combine(slot, stream, if number % 13 == 12 { null() } else { &combine }),
            9 => gin_ep_release(slot),
            10 => {
                let mut device = std::mem::zeroed();
                gin_ep_received_device(slot, &mut device)
            }
            11 => {
                let (mut counts, mut count) = ([0u64; 4], 0);
                gin_ep_received_counts(slot, counts.as_mut_ptr(), (number % 5) as usize, &mut count)
            }
            12 => gin_ep_permuted_create(
                group,
                (number >> 8) as u32 % 7,
                number as u32 % 129,
                (number >> 16) as u32 % 5,
                (&raw mut made).cast(),
            ),
            13 => {
                let mut memory = std::mem::zeroed();
                gin_ep_permuted_memory(permuted, &mut memory)
            }
            14 => {
                let (mut counts, mut count) = ([0u32; 4], 0);
                gin_ep_permuted_counts(permuted, counts.as_mut_ptr(), (number % 5) as usize, &mut count)
            }
            PERMUTED_CLOSE => gin_ep_permuted_close(permuted),
            16 => gin_ep_plan_create(slot, stream, tokens, (&raw mut made).cast()),
            PLAN_CLOSE => gin_ep_plan_close(plan),
            18 => {
                let (mut found, mut report) = (0, std::mem::zeroed());
                gin_ep_group_status(group, &mut found, &mut report)
            }
            19 => {
                let mut ranks = 0;
                gin_ep_group_masked(group, number as u32 % 3, &mut ranks)
            }
            20 => gin_ep_group_readmit(group),
            21 => gin_ep_group_destroy(group),
            GROUP_RELEASE => gin_ep_group_release(group),
            SLOT_CLOSE => gin_ep_slot_close(slot),
            // Calls in a capture would use objects that later calls end: graphs here are empty.
            24 => match gin_stream_begin_capture(stream) {
                GIN_OK => gin_stream_end_capture(stream, (&raw mut made).cast()),
                error => error,
            },
            25 => gin_stream_end_capture(stream, (&raw mut made).cast()),
            26 => gin_graph_launch(graph, stream),
            GRAPH_CLOSE => gin_graph_close(graph),
            28 => gin_ep_permuted_create_without_rows(
                group,
                (number >> 8) as u32 % 7,
                number as u32 % 129,
                (number >> 16) as u32 % 5,
                (&raw mut made).cast(),
            ),
            29 => gin_ep_permuted_with_memory(permuted, &into(number), (&raw mut made).cast()),
            30 => gin_ep_permuted_with_capacity(permuted, number as u32 % 129, (&raw mut made).cast()),
            31 => gin_ep_store_metadata(slot, stream, permuted, &metadata(number)),
            32 => gin_ep_grouped_create(group, (number >> 8) as u32 % 9 * 4, number as u32 % 3, (&raw mut made).cast()),
            GROUPED_CLOSE => gin_ep_grouped_close(gin_ep_grouped_t { id: of(GROUPED) }),
            34 => {
                gin_ep_multiply(slot, stream, gin_ep_grouped_t { id: of(GROUPED) }, &experts(handles, choice, number))
            }
            35 => gin_ep_overlapped_create(group, number as u32 % 3, (&raw mut made).cast()),
            OVERLAPPED_CLOSE => gin_ep_overlapped_close(gin_ep_overlapped_t { id: of(OVERLAPPED) }),
            37 => gin_ep_receive_multiply(slot, stream, gin_ep_overlapped_t { id: of(OVERLAPPED) }, &rows),
            _ => {
                let mut bytes = 0;
                gin_ep_footprint(&config(number), (number >> 16) as u32 % 70, (number >> 24) as u32 % 5, &mut bytes)
            }
        }
    };
    if made != 0 {
        handles.0.push(made);
    }
    status
}
