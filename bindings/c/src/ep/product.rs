// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of the experts' rows.

use super::group::Group;
use super::slot::Slot;
use super::state::Core;
use super::types::{
    gin_ep_experts_t, gin_ep_group_t, gin_ep_grouped_t, gin_ep_overlapped_t, gin_ep_slot_t, gin_memory_t,
};
use crate::status::{call, check_size, input, output};
use crate::table;
use crate::types::{gin_status_t, gin_stream_t};
use gin_ep::{Experts, GroupedMatmul, OverlappedMatmul, Products};
use std::sync::Arc;

/// The kernel of products of rows in a layout.
pub(crate) struct Grouped {
    core: Arc<Core>,
    inner: GroupedMatmul,
}

impl table::Handled for Grouped {
    const KIND: table::Kind = table::Kind::EpGrouped;
}

/// The kernel of products of rows as they arrive.
pub(crate) struct Overlapped {
    core: Arc<Core>,
    inner: OverlappedMatmul,
}

impl table::Handled for Overlapped {
    const KIND: table::Kind = table::Kind::EpOverlapped;
}

fn limit(blocks: u32) -> Option<u32> {
    (blocks != 0).then_some(blocks)
}

/// Prepares products of rows of `depth` elements, a multiple of 8, by at most `blocks` blocks; 0 for as many as run at
/// the same time. The group has `combine_at_source`, and BF16 return. Not collective. Refused if loads and stores do
/// not reach all ranks.
///
/// The caller closes the handle with `gin_ep_grouped_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_grouped_create(
    group: gin_ep_group_t,
    depth: u32,
    blocks: u32,
    grouped: *mut gin_ep_grouped_t,
) -> gin_status_t {
    call("gin_ep_grouped_create", || {
        let (group, out) = (table::get::<Group>(group.id)?, output(grouped, "grouped")?);
        let inner = group.with(|group| Ok(GroupedMatmul::new(group, depth, limit(blocks))?))?;
        let grouped = Grouped { core: group.core.clone(), inner };
        out.write(gin_ep_grouped_t { id: table::insert(Arc::new(grouped))? });
        Ok(())
    })
}

/// Closes the handle. Slots keep the memory until their kernels that use it have ended.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_grouped_close(grouped: gin_ep_grouped_t) -> gin_status_t {
    call("gin_ep_grouped_close", || table::remove::<Grouped>(grouped.id).map(drop))
}

/// Multiplies the rows of each expert by its weights, in the order of the stream. The rows were put into the layout
/// before. Products return to the ranks of their tokens, and `gin_ep_combine` with `returned` follows; or they are
/// stored in `products`, in the places of the rows, and the combine takes layout and memory. Both give the same bits.
///
/// # Safety
/// - As the crate's docs say; the memory of `experts` stays valid until the kernels have ended, and unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_multiply(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    grouped: gin_ep_grouped_t,
    experts: *const gin_ep_experts_t,
) -> gin_status_t {
    call("gin_ep_multiply", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let by = table::get::<Grouped>(grouped.id)?;
            core.check_own(&by.core, "grouped product", grouped.id)?;
            let experts = input(experts, "experts")?;
            check_size::<gin_ep_experts_t>(experts.size, "experts", "GIN_EP_EXPERTS_INIT")?;
            let of = core.layout(experts.permuted)?;
            let rows = core.memory(&experts.rows, "experts.rows")?;
            let weights = core.memory(&experts.weights, "experts.weights")?;
            let products = core.optional(&experts.products, "experts.products")?;
            let to = products.as_ref().map_or(Products::Return, Products::At);
            let factors = Experts::new(&of.inner, &rows, &weights);
            Ok(lent.received()?.multiply(stream, &by.inner, &factors, to)?)
        })
    })
}

/// Prepares products of the received rows themselves, by at most `blocks` blocks; 0 for as many as run at the same
/// time. The group has `combine_at_source`, and BF16 rows. Not collective. Refused if loads and stores do not reach all
/// ranks.
///
/// The caller closes the handle with `gin_ep_overlapped_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_overlapped_create(
    group: gin_ep_group_t,
    blocks: u32,
    overlapped: *mut gin_ep_overlapped_t,
) -> gin_status_t {
    call("gin_ep_overlapped_create", || {
        let (group, out) = (table::get::<Group>(group.id)?, output(overlapped, "overlapped")?);
        let inner = group.with(|group| Ok(OverlappedMatmul::new(group, limit(blocks))?))?;
        let overlapped = Overlapped { core: group.core.clone(), inner };
        out.write(gin_ep_overlapped_t { id: table::insert(Arc::new(overlapped))? });
        Ok(())
    })
}

/// Closes the handle. Slots keep the memory until their kernels that use it have ended.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_overlapped_close(overlapped: gin_ep_overlapped_t) -> gin_status_t {
    call("gin_ep_overlapped_close", || table::remove::<Overlapped>(overlapped.id).map(drop))
}

/// Waits, in the order of the stream, for the rows of all ranks after `gin_ep_dispatch`, and multiplies the rows of
/// each expert by its weights as they arrive. Products return to the ranks of their tokens as they are done, so
/// `gin_ep_combine` with `returned` follows. The bits are the same as by `gin_ep_receive`, `gin_ep_permute` and
/// `gin_ep_multiply`. `weights` has, for each expert of this rank, a row of inner elements for each element of a
/// product.
///
/// If gin refuses the weights, the rows are received and given up.
///
/// # Safety
/// - As the crate's docs say; the memory of `weights` stays valid until the kernels have ended, and unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_receive_multiply(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    overlapped: gin_ep_overlapped_t,
    weights: *const gin_memory_t,
) -> gin_status_t {
    call("gin_ep_receive_multiply", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let by = table::get::<Overlapped>(overlapped.id)?;
            core.check_own(&by.core, "overlapped product", overlapped.id)?;
            let weights = core.memory(input(weights, "weights")?, "weights")?;
            // The slot keeps the dispatch, which was detached.
            lent.sent()?.multiply(stream, &by.inner, &weights)?;
            Ok(())
        })
    })
}
