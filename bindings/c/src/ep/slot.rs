// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots, and a dispatch from its start to its end.

use super::group::Group;
use super::memory::{Given, Sums};
use super::state::Core;
use super::types::{
    gin_device_ep_received_t, gin_ep_combine_t, gin_ep_group_t, gin_ep_metadata_t, gin_ep_permuted_t, gin_ep_slot_t,
    gin_ep_tokens_t, gin_memory_t,
};
use super::{enter, no_dispatch, write_all};
use crate::launch::Stream;
use crate::status::{Failure, call, check_size, input, output};
use crate::table;
use crate::types::gin_status_t::{GIN_ERROR_HANDLE, GIN_ERROR_STATE};
use crate::types::{gin_status_t, gin_stream_t};
use gin_ep::{DispatchId, EpError, Received, Rows, Sent};
use gin_gpu::Stream as DeviceStream;
use std::sync::{Arc, Mutex};

/// A slot that a group has lent, and its last dispatch.
pub(crate) struct Lent {
    pub(crate) slot: gin_ep::Slot,
    number: u32,
    dispatch: Option<DispatchId>,
}

impl Lent {
    fn id(&self) -> Result<DispatchId, Failure> {
        self.dispatch.ok_or_else(|| Failure::new(GIN_ERROR_STATE, no_dispatch(self.number)))
    }

    /// Returns the dispatch that was sent and not received.
    pub(crate) fn sent(&mut self) -> Result<Sent<'_>, Failure> {
        let id = self.id()?;
        Ok(self.slot.sent(id)?)
    }

    /// Returns the dispatch that was received and has not ended.
    pub(crate) fn received(&mut self) -> Result<Received<'_>, Failure> {
        let id = self.id()?;
        Ok(self.slot.received(id)?)
    }

    /// Begins a dispatch by a call.
    fn begin(&mut self, work: impl FnOnce(&mut gin_ep::Slot) -> Result<DispatchId, EpError>) -> Result<(), Failure> {
        self.dispatch = Some(work(&mut self.slot)?);
        Ok(())
    }
}

/// A slot.
pub(crate) struct Slot {
    pub(crate) core: Arc<Core>,
    /// `None` after its end.
    inner: Mutex<Option<Lent>>,
}

impl table::Handled for Slot {
    const KIND: table::Kind = table::Kind::EpSlot;
}

impl Slot {
    fn with<T>(&self, work: impl FnOnce(&mut Lent) -> Result<T, Failure>) -> Result<T, Failure> {
        let mut inner = enter(&self.inner, "slot")?;
        let closed = || Failure::new(GIN_ERROR_HANDLE, "the slot is closed by another thread");
        work(inner.as_mut().ok_or_else(closed)?)
    }

    /// Makes a call that launches on a stream, while no thread destroys the communicator.
    pub(crate) fn launch<T>(
        &self,
        stream: gin_stream_t,
        work: impl FnOnce(&Arc<Core>, &mut Lent, &Arc<dyn DeviceStream>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let stream = table::get::<Stream>(stream.id)?;
        self.core.check_device(&*stream.inner.device())?;
        let _launching = self.core.comm.launching()?;
        self.with(|lent| work(&self.core, lent, &stream.inner))
    }
}

/// Opens a slot of the group, by its number. A slot can be open once. The caller closes the handle with
/// `gin_ep_slot_close`.
///
/// Calls of a slot take one stream, or streams that events order, and one thread makes them at a time. They launch
/// kernels and do not wait.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_slot_create(
    group: gin_ep_group_t,
    number: u32,
    slot: *mut gin_ep_slot_t,
) -> gin_status_t {
    call("gin_ep_slot_create", || {
        let (group, out) = (table::get::<Group>(group.id)?, output(slot, "slot")?);
        group.check_slot(number)?;
        let slot = group.with(|group| Ok(group.slot(number)?))?;
        let inner = Mutex::new(Some(Lent { slot, number, dispatch: None }));
        let slot = Slot { core: group.core.clone(), inner };
        out.write(gin_ep_slot_t { id: table::insert(Arc::new(slot))? });
        Ok(())
    })
}

/// Sends the rows of the tokens to the ranks of their experts, in the order of the stream. `gin_ep_receive` follows.
/// Work between the two calls overlaps with the transfer.
///
/// # Safety
/// - As the crate's docs say; the memory of the tokens is as `gin_ep_tokens_t` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_dispatch(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    tokens: *const gin_ep_tokens_t,
) -> gin_status_t {
    call("gin_ep_dispatch", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let given = Given::take(core, tokens)?;
            lent.begin(|slot| Ok(slot.dispatch(stream, &given.tokens())?.detach()))
        })
    })
}

/// Waits, in the order of the stream, for the rows of all ranks. After an error of the device the dispatch has ended.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_receive(slot: gin_ep_slot_t, stream: gin_stream_t) -> gin_status_t {
    call("gin_ep_receive", || {
        table::get::<Slot>(slot.id)?.launch(stream, |_, lent, stream| {
            lent.sent()?.receive(stream)?;
            Ok(())
        })
    })
}

/// Does the work of `gin_ep_dispatch` and `gin_ep_receive` in one kernel, which takes less time.
///
/// # Safety
/// - As the crate's docs say; the memory of the tokens is as `gin_ep_tokens_t` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_exchange(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    tokens: *const gin_ep_tokens_t,
) -> gin_status_t {
    call("gin_ep_exchange", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let given = Given::take(core, tokens)?;
            lent.begin(|slot| Ok(slot.exchange(stream, &given.tokens())?.detach()))
        })
    })
}

/// Does the work of `gin_ep_exchange` and `gin_ep_permute` in less time. All ranks call it for the same dispatch, each
/// with any layout. Refused if loads and stores do not reach all ranks.
///
/// # Safety
/// - As the crate's docs say; the memory of the tokens is as `gin_ep_tokens_t` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_exchange_into(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    tokens: *const gin_ep_tokens_t,
    permuted: gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_exchange_into", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let to = core.layout(permuted)?;
            let given = Given::take(core, tokens)?;
            lent.begin(|slot| Ok(slot.exchange_into(stream, &given.tokens(), &to.inner)?.0.detach()))
        })
    })
}

/// Copies the received rows into another layout, in the order of the stream.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_permute(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    permuted: gin_ep_permuted_t,
) -> gin_status_t {
    call("gin_ep_permute", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let to = core.layout(permuted)?;
            lent.received()?.permute(stream, &to.inner)?;
            Ok(())
        })
    })
}

/// Stores the metadata of rows in memory of the program, at their places in a layout, in the order of the stream. The
/// rows were put into the layout before, by `gin_ep_permute` or `gin_ep_exchange_into`. Places without a row keep their
/// bytes.
///
/// # Safety
/// - As the crate's docs say; the memory of `into` stays valid until the kernels have ended, and no other code uses it
///   until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_store_metadata(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    permuted: gin_ep_permuted_t,
    into: *const gin_ep_metadata_t,
) -> gin_status_t {
    call("gin_ep_store_metadata", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let (of, into) = (core.layout(permuted)?, input(into, "into")?);
            check_size::<gin_ep_metadata_t>(into.size, "into", "GIN_EP_METADATA_INIT")?;
            let take = |memory: &gin_memory_t, what| core.optional(memory, what);
            let (experts, weights) = (take(&into.experts, "into.experts")?, take(&into.weights, "into.weights")?);
            let (scales, tokens) = (take(&into.scales, "into.scales")?, take(&into.tokens, "into.tokens")?);
            let (counts, offsets) = (take(&into.counts, "into.counts")?, take(&into.offsets, "into.offsets")?);
            let (zones, total) = (take(&into.zones, "into.zones")?, take(&into.total, "into.total")?);
            if !matches!(into.id_bits, 32 | 64) {
                let text = format!("into.id_bits is {}: experts have 32 or 64 bits", into.id_bits);
                return Err(Failure::argument(text));
            }
            let memory = gin_ep::MetadataMemory {
                experts: experts.as_ref(),
                weights: weights.as_ref(),
                scales: scales.as_ref(),
                tokens: tokens.as_ref(),
                counts: counts.as_ref(),
                offsets: offsets.as_ref(),
                zones: zones.as_ref(),
                total: total.as_ref(),
                first_expert: into.first_expert,
                is_wide: into.id_bits == 64,
            };
            Ok(lent.received()?.store_metadata(stream, &of.inner, &memory)?)
        })
    })
}

/// Adds up, for each received row, the rows of its experts in an expert-major layout, each times its weight, in FP32
/// and rounded once. The sums replace the received rows, and `gin_ep_combine` returns them. The experts' rows are those
/// of the layout, or in `rows`, which may be null, in the same places.
///
/// # Safety
/// - As the crate's docs say; the memory of `rows` stays valid and unchanged until the sums are made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_reduce(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    permuted: gin_ep_permuted_t,
    rows: *const gin_memory_t,
) -> gin_status_t {
    call("gin_ep_reduce", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let (of, at) = (core.layout(permuted)?, core.rows_at(rows)?);
            let rows = at.as_ref().map_or(Rows::Permuted(&of.inner), |at| Rows::PermutedAt(&of.inner, at));
            Ok(lent.received()?.reduce(stream, rows)?)
        })
    })
}

/// Returns a row for each received row to its source, and stores the sums of the rows that return to this rank, one for
/// each of its tokens, in the order of the stream. A token without experts gets zeros, or bias and present output.
///
/// Ends the dispatch, also with an error of the rows, the sums or the device. Only a refused handle, pointer or `size`
/// leaves the dispatch as it was.
///
/// # Safety
/// - As the crate's docs say; the memory of `combine` stays valid until the kernels have ended, and no other code uses
///   it until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_combine(
    slot: gin_ep_slot_t,
    stream: gin_stream_t,
    combine: *const gin_ep_combine_t,
) -> gin_status_t {
    call("gin_ep_combine", || {
        table::get::<Slot>(slot.id)?.launch(stream, |core, lent, stream| {
            let sums = Sums::take(core, combine)?;
            let received = lent.received()?;
            if let Err(failure) = sums.check() {
                received.release();
                return Err(failure);
            }
            Ok(received.combine(stream, sums.rows(), &sums.combine())?)
        })
    })
}

/// Ends a received dispatch without a combine.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_release(slot: gin_ep_slot_t) -> gin_status_t {
    call("gin_ep_release", || {
        table::get::<Slot>(slot.id)?.with(|lent| {
            lent.received()?.release();
            Ok(())
        })
    })
}

/// Returns the bytes that pass the received rows to a kernel. They are the same for all dispatches of the slot, also in
/// a graph, and valid until the group ends. The dispatch was received.
///
/// Kernels use the rows after the receive and before the combine, in the order of the stream, and may overwrite them.
/// `gin_ep.cuh` has functions for kernels in C++.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_received_device(
    slot: gin_ep_slot_t,
    device: *mut gin_device_ep_received_t,
) -> gin_status_t {
    call("gin_ep_received_device", || {
        let (slot, out) = (table::get::<Slot>(slot.id)?, output(device, "device")?);
        let sizes = slot.core.sizes;
        out.write(slot.with(|lent| {
            let received = lent.received()?;
            let (arena, offsets) = received.offsets();
            let at = |offset: u64| arena.address() + offset;
            let [even, odd] = [0, 1].map(|buffer| offsets.in_buffer(buffer));
            Ok(gin_device_ep_received_t {
                last_use: at(even.last_use()),
                counts: [at(even.got(0)), at(odd.got(0))],
                rows: [at(even.rows(0)), at(odd.rows(0))],
                metadata: [at(even.meta(0)), at(odd.meta(0))],
                offsets: even.offset(0).map_or(0, at),
                source_bytes: even.rows(1) - even.rows(0),
                source_metadata_bytes: even.meta(1) - even.meta(0),
                row_pitch: sizes.pitch,
                metadata_pitch: sizes.meta_bytes,
                scales_at: sizes.scales_at(),
                topk: sizes.topk,
                ranks: sizes.ranks,
                reserved: 0,
            })
        })?);
        Ok(())
    })
}

/// Copies the number of rows from each of the first `capacity` sources to `counts`, and writes the number of sources to
/// `count`. The stream is done, and the dispatch was received.
///
/// # Safety
/// - As the crate's docs say; `counts` has space for `capacity` numbers, and may be null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_received_counts(
    slot: gin_ep_slot_t,
    counts: *mut u64,
    capacity: usize,
    count: *mut usize,
) -> gin_status_t {
    call("gin_ep_received_counts", || {
        let (slot, count) = (table::get::<Slot>(slot.id)?, output(count, "count")?);
        let mut all = vec![0u64; slot.core.sizes.ranks as usize];
        slot.with(|lent| {
            let received = lent.received()?;
            let (arena, offsets) = received.offsets();
            Ok(arena.read(offsets.got(0), &mut all)?)
        })?;
        write_all(&all, counts, capacity, count)
    })
}

/// Closes the slot. Waits for its kernels. Releases received rows. If a dispatch was not received, the slot takes no
/// other one until all ranks call `gin_ep_group_readmit`.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_slot_close(slot: gin_ep_slot_t) -> gin_status_t {
    call("gin_ep_slot_close", || {
        let found = table::get::<Slot>(slot.id)?;
        let last = enter(&found.inner, "slot")?.take();
        table::remove::<Slot>(slot.id)?;
        drop(last);
        Ok(())
    })
}
