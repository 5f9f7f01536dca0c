// SPDX-License-Identifier: MIT OR Apache-2.0
//! A deliberate mistake of a proxy, to prove that tests notice it.

use super::Proxy;
use gin_device::internal::host_word;
use gin_device::sys::Word;
use std::collections::HashMap;

/// The resets that the proxy has seen, by context and signal: the word at that time, and the number of looks since.
pub(super) type Resets = HashMap<(u32, u32), (u64, u32)>;

impl Proxy {
    /// Makes the mistake: resets a signal by a store of 0 to its word. The store is late: it follows the next raise, if
    /// that comes soon.
    pub(super) fn reset_by_store(&mut self) {
        for (context, part) in (0u32..).zip(&self.contexts) {
            let (Some(near), Some(signals)) = (part.part.signal_near, part.part.signals) else { continue };
            for id in 0..self.parts.limits.signals {
                let base = near.at(host_word::WORDS * u64::from(id) + host_word::SPARE);
                let word = signals.at(u64::from(id));
                if base.load_relaxed_gpu() == 0 {
                    continue;
                }
                let value = word.load_relaxed_sys();
                let (before, looks) = self.resets.entry((context, id)).or_insert((value, 0));
                *looks += 1;
                if *before != value || *looks > 200 {
                    self.resets.remove(&(context, id));
                    word.store_relaxed_sys(0);
                    base.store_relaxed_gpu(0);
                }
            }
        }
    }
}
