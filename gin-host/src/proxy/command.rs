// SPDX-License-Identifier: MIT OR Apache-2.0
//! The commands of the communicator to its proxy, which owns the network and the table of windows.

use super::{Proxy, WindowInfo};
use gin_net::{Key, LocalWindow, NetError, Network};
use std::sync::mpsc::{SyncSender, TryRecvError};

/// A command of the communicator.
#[derive(Debug)]
pub(crate) enum Command {
    /// Registers a window with the network.
    Register { window: LocalWindow, to: SyncSender<Result<Key, NetError>> },
    /// Connects a window by the keys of all ranks. Requests may use the window from now on.
    Connect { window: u32, keys: Vec<Key>, info: WindowInfo, to: SyncSender<Result<(), NetError>> },
    /// Is answered later.
    Wait(Waiting),
    /// Ends the proxy.
    Stop,
}

/// A command whose answer must wait.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// Answers 0 once all requests below these indices are finished and the network is quiet, or the number of
    /// unfinished requests at this time.
    Drain { heads: Vec<u64>, until_ns: u64, to: SyncSender<u64> },
    /// Refuses requests that use the window from now on. Answers when the network no longer accesses the window.
    Close { window: u32, to: SyncSender<()> },
}

impl Proxy {
    /// Carries out the commands that have arrived.
    pub(super) fn command(&mut self) -> bool {
        let mut worked = false;
        loop {
            // The caller may have ended, and then no thread reads the answer.
            match self.parts.commands.try_recv() {
                Ok(Command::Register { window, to }) => drop(to.try_send(self.parts.network.register(&window))),
                Ok(Command::Connect { window, keys, info, to }) => {
                    let outcome = self.parts.network.connect(window, &keys);
                    if outcome.is_ok() {
                        self.parts.limits.windows[window as usize] = Some(info);
                    }
                    let _ = to.try_send(outcome);
                }
                Ok(Command::Wait(waiting)) => {
                    if let Waiting::Close { window, .. } = &waiting {
                        self.parts.limits.windows[*window as usize] = None;
                    }
                    self.waiting.push(waiting);
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                    self.finished = true;
                    return true;
                }
                Err(TryRecvError::Empty) => return worked,
            }
            worked = true;
        }
    }

    /// Answers the commands whose answers are known.
    pub(super) fn answer(&mut self) -> bool {
        let mut waiting = std::mem::take(&mut self.waiting);
        let before = waiting.len();
        waiting.retain(|waiting| !self.answers(waiting));
        self.waiting = waiting;
        self.waiting.len() != before
    }

    /// Answers a command if its answer is known.
    fn answers(&mut self, waiting: &Waiting) -> bool {
        match waiting {
            Waiting::Drain { heads, until_ns, to } => {
                let left = self.requests.left(heads);
                let done = left == 0 && self.parts.network.is_quiet();
                // After a fault the proxy does not wait for the network: a lost peer may never answer.
                let over = done || self.requests.over().is_some() || gin_boot::rt::clock_ns() >= *until_ns;
                if over {
                    let _ = to.try_send(if done { 0 } else { left.max(1) });
                }
                over
            }
            Waiting::Close { window, to } => {
                let closed = self.parts.network.deregister(*window);
                if closed {
                    let _ = to.try_send(());
                }
                closed
            }
        }
    }
}
