// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of expert parallelism, under their names in C.
#![allow(non_camel_case_types)]

use crate::types::GIN_FAULT_TEXT_BYTES;
use std::ffi::{c_char, c_void};

/// The ranks of a communicator, with the memory for rows of tokens.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_group_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// Room for one dispatch at a time. The slots of a group are independent.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_slot_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// The routing of tokens, counted once for several dispatches of the same ids.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_plan_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// Memory for received rows in a layout.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_permuted_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// The kernel of products of rows in a layout.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_grouped_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// The kernel of products of rows as they arrive.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_ep_overlapped_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// The factors of the experts' products. `GIN_EP_EXPERTS_INIT` has the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_experts_t {
    /// `sizeof(gin_ep_experts_t)`.
    pub size: u32,
    /// Zero.
    pub reserved: u32,
    /// The layout of the rows: packed, expert-major, or indices.
    pub permuted: gin_ep_permuted_t,
    /// BF16 rows of inner elements, in the places of the layout. Aligned to 16 bytes.
    pub rows: gin_memory_t,
    /// BF16 weights of a linear layer for each expert of this rank: a row of inner elements for each element of a
    /// product. Aligned to 16 bytes.
    pub weights: gin_memory_t,
    /// Memory for the products, in the places of the layout; null if they return to the ranks of their tokens. Aligned
    /// to 16 bytes.
    pub products: gin_memory_t,
}

/// The elements of rows.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_ep_element_t {
    /// BF16, there and back.
    GIN_EP_BF16 = 0,
    /// IEEE's binary16, there and back.
    GIN_EP_F16 = 1,
    /// FP32, there and back.
    GIN_EP_F32 = 2,
    /// BF16, which the dispatch quantises to FP8 (E4M3) with an FP32 scale for each 128 elements. Returned rows are
    /// BF16.
    GIN_EP_E4M3_F32 = 3,
    /// The same with FP32 scales that are powers of two.
    GIN_EP_E4M3_F32_POWERS = 4,
    /// The same powers of two as UE8M0, one byte each.
    GIN_EP_E4M3_UE8M0 = 5,
    /// Rows of `row_bytes` bytes, which are copied, with scales of `scale_bytes` bytes. Returned rows are BF16.
    GIN_EP_OPAQUE = 6,
}

/// A layout of received rows.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_ep_layout_t {
    /// Rank-major: one row for each received row, by source and token, without gaps.
    GIN_EP_FLAT = 0,
    /// `[expert][source][token]`: one row for each id whose expert is on this rank, in zones with room for all tokens.
    GIN_EP_EXPERT_MAJOR_PADDED = 1,
    /// Zones of experts, one row for each id, by source, token and position of the id. A zone begins at a multiple of
    /// `align` rows; zeros fill the gaps.
    GIN_EP_EXPERT_MAJOR_PACKED = 2,
    /// The places of packed rows without gaps, and for each place its received row. No row is copied.
    GIN_EP_EXPERT_MAJOR_INDICES = 3,
    /// `[expert][row]`: one row for each id whose expert is on this rank, without gaps, by source, token and position
    /// of the id. The zone of an expert has room for all rows that a rank may receive. Scales are columns.
    GIN_EP_EXPERT_MAJOR_FIXED = 4,
    /// `[source][row]`: one row for each received row, by token, in zones with room for all tokens of a rank.
    GIN_EP_RANK_MAJOR_PADDED = 5,
}

/// The cause of a report of the kernels.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_ep_code_t {
    /// A rank did not send or return its rows in time. The group continues without it.
    GIN_EP_SILENT = 1,
    /// An id is not less than the number of experts. The token was dropped.
    GIN_EP_UNKNOWN_EXPERT = 2,
    /// A number in device memory is past the tokens of the group, or negative. The other tokens were dropped.
    GIN_EP_TOO_MANY_TOKENS = 3,
    /// The communicator was aborted, or has a fault.
    GIN_EP_STOPPED = 4,
    /// A layout has more rows than room. The other rows have no place.
    GIN_EP_TOO_MANY_ROWS = 5,
    /// Rows could not be posted to the network in time. The group continues without the rank.
    GIN_EP_UNSENT = 6,
    /// A rank receives more rows than `max_rows`. The other rows were not sent.
    GIN_EP_FULL = 7,
}

/// Memory of the program on the rank's device: of the GPU, or pinned; on a virtual GPU any memory of the process. A
/// null address is no memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gin_memory_t {
    /// The address.
    pub data: *mut c_void,
    /// The length in bytes.
    pub bytes: u64,
}

impl gin_memory_t {
    /// Makes no memory.
    pub(crate) const fn none() -> Self {
        Self { data: std::ptr::null_mut(), bytes: 0 }
    }
}

/// The sizes of a group. All ranks pass the same values. `GIN_EP_CONFIG_INIT` has the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_config_t {
    /// `sizeof(gin_ep_config_t)`.
    pub size: u32,
    /// The number of experts of all ranks, 1 to 65536. Each rank has `ceil(experts / ranks)` of them, in order.
    pub experts: u32,
    /// The number of elements of a row.
    pub hidden: u32,
    /// The number of ids of a token, 1 to 32.
    pub topk: u32,
    /// The maximum number of tokens of a rank's dispatch, 1 to 65536.
    pub tokens: u32,
    /// The number of slots, 1 to 64. Each has separate memory and at most its part of the GPU.
    pub slots: u32,
    /// A `gin_ep_element_t`.
    pub element: u32,
    /// The bytes of a row of `GIN_EP_OPAQUE`; 0 for other elements.
    pub row_bytes: u32,
    /// The bytes of the scales of such a row; 0 if it has none.
    pub scale_bytes: u32,
    /// 1 if one row returns for each id, which the source multiplies by weights and adds up; 0 if one row returns for
    /// each rank.
    pub combine_at_source: u32,
    /// 1 if the returned row of each rank has FP32 elements, in place of BF16.
    pub combine_f32: u32,
    /// The rows of the one region that all sources share; 0 if each source has a region for `tokens` rows.
    pub max_rows: u32,
    /// The maximum number of SMs that a kernel takes; 0 for all.
    pub sms: u32,
    /// The number of blocks of a kernel; 0 for as many as have work and are resident at once.
    pub grid: u32,
    /// The threads of a block, a multiple of 32; 0 for the default.
    pub threads: u32,
    /// The time in milliseconds that a rank waits for another before it continues without it. `GIN_FOREVER` for no
    /// limit but an abort or a fault.
    pub deadline_ms: u32,
}

/// The tokens of a rank's dispatch. `GIN_EP_TOKENS_INIT` has the defaults.
///
/// The kernels use the memory, so it stays valid and unchanged until the dispatch and its combine have run.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_tokens_t {
    /// `sizeof(gin_ep_tokens_t)`.
    pub size: u32,
    /// The number of tokens; 0 if `count_at` or `plan` has it.
    pub count: u32,
    /// The bits of an id: 32 or 64.
    pub id_bits: u32,
    /// Zero.
    pub reserved: u32,
    /// A row for each token: elements of the group, or BF16 if the dispatch quantises. Aligned to 16 bytes.
    pub rows: gin_memory_t,
    /// `topk` signed ids for each token. A negative id selects no expert.
    pub ids: gin_memory_t,
    /// An FP32 weight for each id, which the receiving ranks get with the rows; null if all are 1.
    pub weights: gin_memory_t,
    /// The scales of rows of `GIN_EP_OPAQUE`; null if the group's rows have none.
    pub scales: gin_memory_t,
    /// A word of 32 bits with the number of tokens, which the kernels read; null if `count` has the number.
    pub count_at: gin_memory_t,
    /// A plan of the same ids, with its number of tokens; null for none.
    pub plan: gin_ep_plan_t,
}

/// The rows that a combine returns, and their sums. `GIN_EP_COMBINE_INIT` has the defaults.
///
/// | `permuted` | `rows` | returned rows |
/// | --- | --- | --- |
/// | null | null | the received rows, which the experts have replaced; with `returned`, the products that have returned |
/// | null | memory | rows in the places of the received rows, one for each id with `combine_at_source` |
/// | layout | null | the rows of the layout, which the experts have replaced |
/// | layout | memory | a row in the place of each row of the layout |
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_combine_t {
    /// `sizeof(gin_ep_combine_t)`.
    pub size: u32,
    /// 1 to add to the present value of the output.
    pub accumulate: u32,
    /// The sums: a row for each token. Aligned to 16 bytes.
    pub output: gin_memory_t,
    /// An FP32 weight for each id, by which the rows of a group with `combine_at_source` are multiplied; null for sums
    /// without weights.
    pub weights: gin_memory_t,
    /// A row for each token, from which its sum starts; null for zeros. Aligned to 16 bytes.
    pub bias: gin_memory_t,
    /// Memory of the returned rows, as in the table. Aligned to 16 bytes.
    pub rows: gin_memory_t,
    /// The layout of the returned rows, as in the table.
    pub permuted: gin_ep_permuted_t,
    /// 1 if products have returned by `gin_ep_multiply` or `gin_ep_receive_multiply`, else 0.
    pub returned: u32,
    /// Zero.
    pub reserved: u32,
}

/// An error of a group's kernels. Group and communicator continue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_report_t {
    /// The slot.
    pub slot: u32,
    /// A `gin_ep_code_t`.
    pub code: u32,
    /// The rank that it concerns; `GIN_NONE` if there is none.
    pub rank: u32,
    /// Zero.
    pub reserved: u32,
    /// The id of the unknown expert, or the expert of a full zone; else 0.
    pub expert: u64,
    /// The value that the kernel saw.
    pub seen: u64,
    /// The value that it expected, or the limit.
    pub limit: u64,
    /// All of it as text that ends with a zero.
    pub text: [c_char; GIN_FAULT_TEXT_BYTES],
}

/// Memory of the program in which kernels store a layout, in place of gin's memory. `GIN_EP_PERMUTED_INTO_INIT` has the
/// defaults: all null, which keeps gin's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_permuted_into_t {
    /// `sizeof(gin_ep_permuted_into_t)`.
    pub size: u32,
    /// Zero.
    pub reserved: u32,
    /// The rows, aligned to 16 bytes.
    pub rows: gin_memory_t,
    /// The scales of fixed zones, aligned to 4 bytes.
    pub scales: gin_memory_t,
    /// The tokens of fixed zones, aligned to 4 bytes.
    pub tokens: gin_memory_t,
    /// The counts, aligned to 8 bytes.
    pub counts: gin_memory_t,
}

/// Memory of the program for the metadata of rows in a layout. Words have 32 bits. `GIN_EP_METADATA_INIT` has the
/// defaults: all null, which stores nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_metadata_t {
    /// `sizeof(gin_ep_metadata_t)`.
    pub size: u32,
    /// The number of this rank's first expert in `experts`.
    pub first_expert: u32,
    /// The bits of a word of `experts`: 32 or 64.
    pub id_bits: u32,
    /// Zero.
    pub reserved: u32,
    /// `[row][topk]` of a rank-major layout: the numbers of the row's experts, -1 for an expert of another rank.
    pub experts: gin_memory_t,
    /// The FP32 weights: `[row][topk]` of a rank-major layout, with 0 where the expert is -1; `[row]` of an
    /// expert-major one.
    pub weights: gin_memory_t,
    /// `[row][scale]`. The bytes of a row's scales are a multiple of 4.
    pub scales: gin_memory_t,
    /// `[row]`: the number of the row's token at its source.
    pub tokens: gin_memory_t,
    /// The number of rows from each source in a rank-major layout, of each expert of this rank in an expert-major one.
    pub counts: gin_memory_t,
    /// The number of the first row of each expert's zone, in a packed or fixed layout.
    pub offsets: gin_memory_t,
    /// The number of rows of each expert's zone with gaps, in a packed or fixed layout.
    pub zones: gin_memory_t,
    /// The number of rows with gaps: one word.
    pub total: gin_memory_t,
}

/// The memory of received rows in a layout. Kernels of the program use it after the call that fills it, in the order of
/// the stream.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_ep_permuted_memory_t {
    /// `capacity` rows; null if rows are not copied, or the layout has no memory for them.
    pub rows: gin_memory_t,
    /// `[expert][word][row]` of fixed zones: word `w` of 4 bytes of a row's scales; null if there are none.
    pub scales: gin_memory_t,
    /// A word of 32 bits for each row of fixed zones: the number of the row's token at its source; null if there is
    /// none.
    pub tokens: gin_memory_t,
    /// A word of 32 bits for each row: `source << 21 | row << 5 | k`, the source, the received row and the position of
    /// its id; all ones for a gap. In a padded or fixed layout only rows below the counts have it.
    pub source_info: gin_memory_t,
    /// The words of 32 bits that `gin_ep_permuted_counts` copies.
    pub counts: gin_memory_t,
    /// The maximum number of rows.
    pub capacity: u32,
    /// The bytes of a row.
    pub row_bytes: u32,
}

/// Received rows of a slot: a parameter of kernels, passed by value. `gin_ep.cuh` has functions that read it.
///
/// Each address is of device memory. Rows and metadata have two buffers: calls alternate, and a captured one keeps its
/// buffer.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gin_device_ep_received_t {
    /// Address of a word of 64 bits. Its lowest bit is the number of the last dispatch's buffer.
    pub last_use: u64,
    /// Address of the number of rows from each source: words of 64 bits, for each buffer.
    pub counts: [u64; 2],
    /// Address of the first row from source 0, for each buffer.
    pub rows: [u64; 2],
    /// Address of the first row's metadata: its token, `topk` experts, `topk` weights, scales. For each buffer.
    pub metadata: [u64; 2],
    /// Address of words of 64 bits, whose lower half is the number of the first row from each source. 0 if each
    /// source has a region.
    pub offsets: u64,
    /// Bytes from the region of a source to the next one; 0 if all sources share a region.
    pub source_bytes: u64,
    /// Bytes from the metadata of a source to the next one; 0 if all sources share a region.
    pub source_metadata_bytes: u64,
    /// Bytes from a row to the next one.
    pub row_pitch: u32,
    /// Bytes from the metadata of a row to the next one.
    pub metadata_pitch: u32,
    /// Offset of the scales in the metadata of a row.
    pub scales_at: u32,
    /// The number of ids of a token.
    pub topk: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// Zero.
    pub reserved: u32,
}
