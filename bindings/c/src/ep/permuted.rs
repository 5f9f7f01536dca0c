// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts of received rows, and plans.

use super::group::Group;
use super::memory::Given;
use super::slot::Slot;
use super::state::{Core, Permuted, Plan};
use super::types::{
    gin_ep_group_t, gin_ep_permuted_into_t, gin_ep_permuted_memory_t, gin_ep_permuted_t, gin_ep_plan_t, gin_ep_slot_t,
    gin_ep_tokens_t, gin_memory_t,
};
use super::write_all;
use crate::status::{Failure, call, check_size, input, output};
use crate::table;
use crate::types::gin_status_t::GIN_ERROR_STATE;
use crate::types::{gin_status_t, gin_stream_t};
use gin_ep::Layout;
use gin_gpu::MemorySlice;
use std::mem::MaybeUninit;
use std::sync::Arc;

fn layout(kind: u32, align: u32) -> Result<Layout, Failure> {
    let layout = match kind {
        0 => Layout::Flat,
        1 => Layout::ExpertMajorPadded,
        2 => Layout::ExpertMajorPacked { align },
        3 => Layout::ExpertMajorIndices,
        4 => Layout::ExpertMajorFixed,
        5 => Layout::RankMajorPadded,
        other => return Err(Failure::argument(format!("layout is {other}: there are 0 to 5"))),
    };
    if align > 1 && kind != 2 {
        let text = format!("align is {align}: leave it 0, or use GIN_EP_EXPERT_MAJOR_PACKED");
        return Err(Failure::argument(text));
    }
    Ok(layout)
}

/// Allocates memory for at most `rows` received rows in a layout, a `gin_ep_layout_t`. A padded or fixed layout has
/// room for all rows that may arrive, whatever `rows` is. Packed zones begin at multiples of `align` rows, a power of
/// two; `align` is 0 for other layouts. Not collective.
///
/// If more rows arrive, the first ones have places, and the status has `GIN_EP_TOO_MANY_ROWS`. The caller closes the
/// handle with `gin_ep_permuted_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_create(
    group: gin_ep_group_t,
    layout: u32,
    rows: u32,
    align: u32,
    permuted: *mut gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_permuted_create", || {
        create(group, (layout, align), permuted, |group, layout| gin_ep::Permuted::new(group, layout, rows))
    })
}

/// Allocates memory as `gin_ep_permuted_create`, but for rows, scales and tokens: kernels store counts, source infos
/// and the places of rows, and copy no row, unless `gin_ep_permuted_with_memory` adds memory. Not collective.
///
/// The caller closes the handle with `gin_ep_permuted_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_create_without_rows(
    group: gin_ep_group_t,
    layout: u32,
    rows: u32,
    align: u32,
    permuted: *mut gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_permuted_create_without_rows", || {
        create(group, (layout, align), permuted, |group, layout| gin_ep::Permuted::without_rows(group, layout, rows))
    })
}

/// Returns the same layout in memory of the program, by a handle of its own. The places of rows are in memory that both
/// share, so a combine takes either, after the dispatch into any of them. Allocates nothing on the device.
///
/// The caller closes the handle with `gin_ep_permuted_close`.
///
/// # Safety
/// - As the crate's docs say; the memory stays valid as long as the handle is open, and until the kernels of its slots
///   that use it have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_with_memory(
    permuted: gin_ep_permuted_t,
    into: *const gin_ep_permuted_into_t,
    same: *mut gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_permuted_with_memory", || {
        let (of, out) = (table::get::<Permuted>(permuted.id)?, output(same, "same")?);
        let into = input(into, "into")?;
        check_size::<gin_ep_permuted_into_t>(into.size, "into", "GIN_EP_PERMUTED_INTO_INIT")?;
        let core = &of.core;
        let (rows, scales) = (core.optional(&into.rows, "into.rows")?, core.optional(&into.scales, "into.scales")?);
        let (tokens, counts) =
            (core.optional(&into.tokens, "into.tokens")?, core.optional(&into.counts, "into.counts")?);
        let memory = gin_ep::PermutedMemory {
            rows: rows.as_ref(),
            scales: scales.as_ref(),
            tokens: tokens.as_ref(),
            counts: counts.as_ref(),
        };
        add(core, of.inner.with_memory(&memory)?, out)
    })
}

/// Returns the same layout for at most `rows` rows, by a handle of its own, so that memory of the program may have as
/// few. Refused for a padded or fixed layout. Allocates nothing on the device.
///
/// The caller closes the handle with `gin_ep_permuted_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_with_capacity(
    permuted: gin_ep_permuted_t,
    rows: u32,
    same: *mut gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_permuted_with_capacity", || {
        let (of, out) = (table::get::<Permuted>(permuted.id)?, output(same, "same")?);
        add(&of.core, of.inner.with_capacity(rows)?, out)
    })
}

/// Makes a layout, and writes its handle.
fn create(
    group: gin_ep_group_t,
    (layout, align): (u32, u32),
    permuted: *mut gin_ep_permuted_t,
    make: impl FnOnce(&gin_ep::Group, gin_ep::Layout) -> Result<gin_ep::Permuted, gin_ep::EpError>,
) -> Result<(), Failure> {
    let (group, out) = (table::get::<Group>(group.id)?, output(permuted, "permuted")?);
    let layout = self::layout(layout, align)?;
    let inner = group.with(|group| Ok(make(group, layout)?))?;
    add(&group.core, inner, out)
}

/// Adds a layout to the table, and writes its handle.
fn add(core: &Arc<Core>, inner: gin_ep::Permuted, out: &mut MaybeUninit<gin_ep_permuted_t>) -> Result<(), Failure> {
    let permuted = Permuted { core: core.clone(), inner };
    out.write(gin_ep_permuted_t { id: table::insert(Arc::new(permuted))? });
    Ok(())
}

fn in_c(memory: &MemorySlice) -> gin_memory_t {
    gin_memory_t { data: std::ptr::with_exposed_provenance_mut(memory.address() as usize), bytes: memory.bytes() }
}

/// Returns the memory of the layout, for kernels. It is valid until the handle is closed.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_memory(
    permuted: gin_ep_permuted_t,
    memory: *mut gin_ep_permuted_memory_t,
) -> gin_status_t {
    call("gin_ep_permuted_memory", || {
        let (permuted, out) = (table::get::<Permuted>(permuted.id)?, output(memory, "memory")?);
        let inner = &permuted.inner;
        out.write(gin_ep_permuted_memory_t {
            rows: inner.rows().map_or(gin_memory_t::none(), in_c),
            scales: inner.scales().map_or(gin_memory_t::none(), in_c),
            tokens: inner.tokens().map_or(gin_memory_t::none(), in_c),
            source_info: in_c(inner.source_info()),
            counts: in_c(inner.counts()),
            capacity: inner.capacity(),
            row_bytes: permuted.core.sizes.row_bytes,
        });
        Ok(())
    })
}

/// Copies the first `capacity` counts of the layout to `counts`, and writes the number of all counts to `count`. The
/// stream that filled the layout is done.
///
/// The first count is the number of rows with gaps. Expert-major layouts have then the number of rows of each expert of
/// this rank, if padded from each source; packed and fixed layouts and indices have then the number of each expert's
/// first row. A rank-major padded layout has after the first count the number of rows from each source. Fixed zones
/// have more counts, as `docs/ep.md` says.
///
/// # Safety
/// - As the crate's docs say; `counts` has space for `capacity` numbers, and may be null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_permuted_counts(
    permuted: gin_ep_permuted_t,
    counts: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> gin_status_t {
    call("gin_ep_permuted_counts", || {
        let (permuted, count) = (table::get::<Permuted>(permuted.id)?, output(count, "count")?);
        write_all(&permuted.inner.fetch_counts()?, counts, capacity, count)
    })
}

/// Closes the handle. Slots keep the memory until their kernels that use it have ended.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_permuted_close(permuted: gin_ep_permuted_t) -> gin_status_t {
    call("gin_ep_permuted_close", || table::remove::<Permuted>(permuted.id).map(drop))
}

/// Counts the tokens for each rank once, for dispatches of the same ids. Such a dispatch does not count, and does not
/// report dropped tokens. Not in a capture, because it allocates memory.
///
/// The caller closes the handle with `gin_ep_plan_close`.
///
/// # Safety
/// - As the crate's docs say; the memory of the tokens is as `gin_ep_tokens_t` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_plan_create(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    tokens: *const gin_ep_tokens_t,
    plan: *mut gin_ep_plan_t,
) -> gin_status_t {
    call("gin_ep_plan_create", || {
        let (slot, out) = (table::get::<Slot>(slot.id)?, output(plan, "plan")?);
        let inner = slot.launch(stream, |core, lent, stream| {
            if stream.is_capturing()? {
                let text = "a plan allocates memory, which a capture does not allow: make it before the capture";
                return Err(Failure::new(GIN_ERROR_STATE, text));
            }
            let given = Given::take(core, tokens)?;
            Ok(lent.slot.plan(stream, &given.tokens())?)
        })?;
        let plan = Plan { core: slot.core.clone(), inner };
        out.write(gin_ep_plan_t { id: table::insert(Arc::new(plan))? });
        Ok(())
    })
}

/// Closes the handle. Slots keep the memory until their kernels that use it have ended.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_plan_close(plan: gin_ep_plan_t) -> gin_status_t {
    call("gin_ep_plan_close", || table::remove::<Plan>(plan.id).map(drop))
}
