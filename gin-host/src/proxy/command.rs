// SPDX-License-Identifier: MIT OR Apache-2.0
//! The commands of the communicator to its proxy, which owns the network and the table of windows.

use super::{Proxy, WindowInfo};
use gin_net::{Key, LocalWindow, NetError, Network};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

/// The receiver of an answer.
#[derive(Debug)]
pub(crate) struct Answer<T>(Receiver<T>);

impl<T> Answer<T> {
    /// Returns the answer if it has arrived; `Err` if none will arrive.
    pub(crate) fn get(&self) -> Result<Option<T>, ()> {
        match self.0.try_recv() {
            Ok(value) => Ok(Some(value)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(()),
        }
    }
}

/// Makes a sender and a receiver for one answer.
pub(crate) fn answer<T>() -> (SyncSender<T>, Answer<T>) {
    let (sender, receiver) = sync_channel(1);
    (sender, Answer(receiver))
}

/// A command of the communicator.
#[derive(Debug)]
pub(crate) enum Command {
    /// Registers a window with the network.
    Register { window: LocalWindow, to: SyncSender<Result<Key, NetError>> },
    /// Connects a window by the keys of all ranks. Requests may use the window from now on.
    Connect { window: u32, keys: Vec<Key>, info: WindowInfo, to: SyncSender<Result<(), NetError>> },
    /// Answers 0 once all requests below these indices are finished and the network is quiet, or the number of
    /// unfinished requests at this time.
    Drain { heads: Vec<u64>, until_ns: u64, to: SyncSender<u64> },
    /// Refuses requests that use the window from now on. Answers when the network no longer accesses the window.
    Close { window: u32, to: SyncSender<()> },
    /// Ends the proxy.
    Stop,
}

/// A command without an answer yet.
#[derive(Debug)]
pub(super) enum Waiting {
    Drain { heads: Vec<u64>, until_ns: u64, to: SyncSender<u64> },
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
                Ok(Command::Drain { heads, until_ns, to }) => self.waiting.push(Waiting::Drain { heads, until_ns, to }),
                Ok(Command::Close { window, to }) => {
                    self.parts.limits.windows[window as usize] = None;
                    self.waiting.push(Waiting::Close { window, to });
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
        let before = self.waiting.len();
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Drain { heads, until_ns, to } => {
                    let left: u64 = (self.contexts.iter().zip(&heads))
                        .map(|(context, &head)| head.saturating_sub(context.lists.completion_index()))
                        .sum();
                    if left == 0 && self.parts.network.is_quiet() {
                        let _ = to.try_send(0);
                    } else if self.over.is_some() || gin_boot::rt::clock_ns() >= until_ns {
                        // After a fault the proxy does not wait for the network: a lost peer may never answer.
                        let _ = to.try_send(left.max(1));
                    } else {
                        self.waiting.push(Waiting::Drain { heads, until_ns, to });
                    }
                }
                Waiting::Close { window, to } => {
                    if self.parts.network.deregister(window) {
                        let _ = to.try_send(());
                    } else {
                        self.waiting.push(Waiting::Close { window, to });
                    }
                }
            }
        }
        self.waiting.len() != before
    }
}
