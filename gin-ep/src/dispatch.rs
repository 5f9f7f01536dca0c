// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls of a slot that begin a dispatch, or return one that was detached.

use crate::received::{Received, Sent};
use crate::slot::{Detached, DispatchId, Slot};
use crate::{EpError, Permuted, Tokens, View};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{RECEIVE, SEND};
use gin_gpu::{KernelArg, Plain, Stream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Slot {
    /// Returns a detached dispatch that was not received.
    ///
    /// # Errors
    /// [`EpError::Ended`] if it was received, or is not one of this slot.
    pub fn sent(&mut self, id: DispatchId) -> Result<Sent<'_>, EpError> {
        match self.detached {
            Some(Detached { id: own, is_received: false, tokens }) if own == id => Ok(Sent { slot: self, tokens }),
            _ => Err(EpError::Ended { slot: self.number }),
        }
    }

    /// Returns a detached dispatch that was received.
    ///
    /// # Errors
    /// [`EpError::NotReceived`]; [`EpError::Ended`] if it was combined or released, or is not one of this slot.
    pub fn received(&mut self, id: DispatchId) -> Result<Received<'_>, EpError> {
        match self.detached {
            Some(Detached { id: own, is_received, tokens }) if own == id => match is_received {
                true => Ok(Received { slot: self, tokens }),
                false => Err(EpError::NotReceived { slot: self.number }),
            },
            _ => Err(EpError::Ended { slot: self.number }),
        }
    }

    /// Sends the rows. They are read in the order of the stream; the call returns at once.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Limit`] for more tokens than the group has
    /// room for, [`EpError::NotReceived`], [`EpError::NotEnded`], [`EpError::Unread`], an error of communicator or
    /// device.
    pub fn dispatch(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Sent<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND)?;
        self.state().is_unheard.store(true, Ordering::Relaxed);
        Ok(Sent { slot: self, tokens })
    }

    /// Sends the rows and waits for the rows of all ranks, in one kernel. It takes less time than two.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn exchange(&mut self, stream: &Arc<dyn Stream>, tokens: &Tokens<'_>) -> Result<Received<'_>, EpError> {
        let tokens = self.start(stream, tokens, SEND | RECEIVE)?;
        Ok(Received { slot: self, tokens })
    }

    /// Sends the rows, waits for the rows of all ranks, and puts them into another layout as they arrive. Returns the
    /// parameter by which kernels find them there, too. All ranks call it, each with any layout.
    ///
    /// The result is that of [`exchange`](Self::exchange) and [`Received::permute`], in less time. Where a rank has
    /// room for at most 4096 received rows, one kernel exchanges them into an expert-major layout. Otherwise the ranks
    /// tell each other the ids of their rows first, and copy the rows that have arrived while they wait for others.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`EpError::Unsuited`] for permuted rows of another group, or if loads and
    /// stores do not reach all ranks.
    pub fn exchange_into(
        &mut self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        to: &Permuted,
    ) -> Result<(Received<'_>, View<kernels::PermutedRows>), EpError> {
        let group = &self.group;
        if !group.is_near() {
            let what = "an exchange into a layout in a group with ranks that loads and stores do not reach";
            return Err(EpError::Unsuited { what, remedy: "call `exchange` and `Received::permute`" });
        }
        to.check(&group.sizes())?;
        let tokens = self.prepare(stream, tokens)?;
        // The dispatch has begun, so this is in its buffer.
        let view = self.permuted(to)?;
        if group.expands() {
            if to.is_expert_major() {
                self.extend(stream, &to.used())?;
                let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &Plain(tokens), &View(view)];
                // Safety: as for a dispatch, and the memory is that of the permuted rows and is kept.
                unsafe { stream.launch(&group.dispatch_into, group.following(group.shape_into), &arguments)? };
            } else {
                self.launch_dispatch(stream, &group.dispatch, group.following(group.shape), tokens, SEND | RECEIVE)?;
                self.launch_permute(stream, to, view, None)?;
            }
            return Ok((Received { slot: self, tokens }, View(view)));
        }
        let slot = Plain(self.state().params());
        let arguments: [&dyn KernelArg; 4] = [&group.device, &group.arena, &slot, &Plain(tokens)];
        // Safety: as for a dispatch.
        unsafe { stream.launch(&group.send_metadata, group.following(group.shape), &arguments)? };
        self.launch_permute(stream, to, view, Some(tokens))?;
        Ok((Received { slot: self, tokens }, View(view)))
    }

    fn start(
        &self,
        stream: &Arc<dyn Stream>,
        tokens: &Tokens<'_>,
        phases: u32,
    ) -> Result<kernels::TokenParams, EpError> {
        let group = &self.group;
        let reserves = self.state().params().sizes.reserves();
        let params = if reserves { self.check(stream, tokens)? } else { self.prepare(stream, tokens)? };
        let (kernel, shape) =
            if reserves { (&group.dispatch_shared, group.shape_into) } else { (&group.dispatch, group.shape) };
        self.launch_dispatch(stream, kernel, group.following(shape), params, phases)?;
        Ok(params)
    }
}
