// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expert parallelism: the calls of `gin-ep` with handles.
//!
//! | module | holds |
//! | --- | --- |
//! | [`types`] | the types of the header |
//! | [`group`] | groups, their configuration and status |
//! | [`slot`] | slots, and a dispatch from its start to its end |
//! | [`permuted`] | layouts of received rows, plans |
//! | [`product`] | products of the experts' rows |
//! | `state` | private: groups, layouts and plans, which the calls share |
//! | `memory` | private: tokens and sums of a call, checked |
//!
//! A dispatch of `gin-ep` borrows its slot. A slot of C keeps the id of its detached dispatch instead, and `gin-ep`
//! refuses calls in another order.

pub mod group;
mod memory;
pub mod permuted;
pub mod product;
pub mod slot;
mod state;
pub mod types;

use crate::status::{Failure, outputs};
use crate::types::gin_status_t::{GIN_ERROR_ARGUMENT, GIN_ERROR_BUSY, GIN_ERROR_NETWORK, GIN_ERROR_STATE};
use gin_ep::EpError;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, TryLockError};

impl From<EpError> for Failure {
    fn from(error: EpError) -> Self {
        let (status, text) = match error {
            EpError::Comm(error) => return error.into(),
            EpError::Gpu(error) => return error.into(),
            EpError::Slot { slot, .. } => {
                (GIN_ERROR_STATE, format!("slot {slot} is open: close it by gin_ep_slot_close first"))
            }
            EpError::NotReceived { slot } => {
                let text = format!(
                    "the last dispatch of slot {slot} was not received: call gin_ep_receive; if the slot was closed \
                     since, all ranks call gin_ep_group_readmit"
                );
                (GIN_ERROR_STATE, text)
            }
            EpError::NotEnded { slot } => {
                (GIN_ERROR_STATE, format!("slot {slot} has received rows: call gin_ep_combine or gin_ep_release first"))
            }
            EpError::Ended { slot } => (GIN_ERROR_STATE, no_dispatch(slot)),
            EpError::Unread(report) => {
                let text = format!("an earlier call has left a report: {report}; read it by gin_ep_group_status");
                (GIN_ERROR_STATE, text)
            }
            error @ EpError::NotReachable { .. } => (GIN_ERROR_NETWORK, error.to_string()),
            error => (GIN_ERROR_ARGUMENT, in_c(&error.to_string())),
        };
        Self::new(status, text)
    }
}

/// Returns the text of a call that finds no dispatch in the state that it needs.
fn no_dispatch(slot: u32) -> String {
    format!("slot {slot} has no dispatch for this call: begin one by gin_ep_dispatch or gin_ep_exchange")
}

/// Returns a text of `gin-ep` with the names that C has.
fn in_c(text: &str) -> String {
    let names = [
        ("`Element::Opaque` with `scale_bytes` takes", "GIN_EP_OPAQUE with `scale_bytes` takes"),
        ("`Tokens::scales`", "`tokens.scales`"),
        ("`Rows::PermutedAt`", "`permuted` and `rows`"),
        ("`Rows::Permuted`", "`permuted`"),
        ("`Rows::At`", "`rows`"),
        (", or use `Combine::reduced`", ", or leave `weights` out"),
        ("`Layout::ExpertMajorPacked`", "GIN_EP_EXPERT_MAJOR_PACKED"),
        ("`Layout::ExpertMajorPadded`", "GIN_EP_EXPERT_MAJOR_PADDED"),
        ("or configure an `Element` with scales", "or configure an `element` with scales"),
        ("`Layout::ExpertMajorIndices`", "GIN_EP_EXPERT_MAJOR_INDICES"),
        ("pass `Rows::At`", "pass `rows`"),
        ("make `Permuted` and products", "make layout and products"),
        ("use `GroupedMatmul`", "use gin_ep_grouped_create"),
        ("`exchange` and `Received::permute`", "gin_ep_exchange and gin_ep_permute"),
        ("`dispatch` and `combine`", "gin_ep_dispatch and gin_ep_combine"),
        ("call `combine`", "call gin_ep_combine"),
        ("`deadline` is", "`deadline_ms` is"),
    ];
    names.iter().fold(text.to_owned(), |text, (rust, c)| text.replace(rust, c))
}

/// Writes the first `capacity` counts, and the number of all. A call comes here when nothing else can fail.
fn write_all<T: Copy + Default>(
    all: &[T],
    counts: *mut T,
    capacity: usize,
    count: &mut MaybeUninit<usize>,
) -> Result<(), Failure> {
    outputs(counts, capacity, "counts")?.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
    count.write(all.len());
    Ok(())
}

/// Locks the state of an object, unless another call has it.
fn enter<'l, T>(state: &'l Mutex<T>, what: &str) -> Result<MutexGuard<'l, T>, Failure> {
    match state.try_lock() {
        Ok(guard) => Ok(guard),
        // The state is whole: a panic was reported, and each field is set in one step.
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            let text = format!("another thread calls the {what} at the same time: let one thread at a time call it");
            Err(Failure::new(GIN_ERROR_BUSY, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{enter, in_c};
    use crate::types::gin_status_t::GIN_ERROR_BUSY;
    use std::sync::Mutex;

    #[test]
    fn an_object_that_another_call_has_is_busy() {
        let state = Mutex::new(());
        let other = enter(&state, "slot").expect("no call has it");
        let failure = enter(&state, "slot").expect_err("a call has it");
        assert_eq!(failure.status, GIN_ERROR_BUSY);
        assert!(failure.text.starts_with("another thread calls the slot at the same time"), "{}", failure.text);
        drop(other);
        assert!(enter(&state, "slot").is_ok());
    }

    /// Returns the string literals of a source that name an item of Rust.
    fn texts(source: &str) -> Vec<&str> {
        let lines = source.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let literals = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
        literals.filter(|text| text.split('`').skip(1).step_by(2).any(|name| name.contains("::"))).collect()
    }

    #[test]
    fn no_error_of_gin_ep_names_an_item_of_rust_in_c() {
        let mut found = 0;
        for name in
            ["combine", "config", "group", "grouped", "layout", "metadata", "overlapped", "received", "slot", "tokens"]
        {
            let path = format!("{}/../../gin-ep/src/{name}.rs", env!("CARGO_MANIFEST_DIR"));
            let source = std::fs::read_to_string(&path).expect("read a source of gin-ep");
            // A slot of C chooses the terms of sums by the group.
            for text in texts(&source).into_iter().filter(|text| !text.contains("`Combine::weighted`")) {
                assert!(!in_c(text).contains("::"), "{path}: {text}");
                found += 1;
            }
        }
        assert!(found > 5, "{found} texts");
    }
}
