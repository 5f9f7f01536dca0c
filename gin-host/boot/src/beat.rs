// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread that sends a rank's heartbeats and receives those of its neighbours.
//!
//! It moves frames between sockets and queues and does nothing else: it handles no message, takes no lock of the rank,
//! and logs nothing. So a rank still sends heartbeats while it is busy with its messages, or while its log is full. The
//! thread has a higher priority than others where the system allows that.
//!
//! # Silent ranks
//!
//! Time in which this thread itself did not run does not count as silence of a neighbour. The thread looks at the clock
//! sixteen times within [`TcpConfig::silence`](crate::TcpConfig::silence), and a pause between two looks counts for two
//! of them at most. So no rank is silent because a machine stands still, a process is stopped or a CPU is busy.
//!
//! When the time is over and the neighbour's thread is on this system, `/proc` decides:
//!
//! | its thread | the neighbour |
//! | --- | --- |
//! | waits for a CPU, or runs | is late, and not lost as long as that lasts |
//! | is stopped, traced, or there no more | is lost |
//! | sleeps, say for a page or in a frozen container | is lost after the same time once more |
//!
//! A neighbour of another host, or of another PID or network namespace, is lost when the time is over.

use crate::link::Inbound;
use crate::message::Message;
use crate::seat::{Seat, ThreadState};
use crate::{LossCause, millis};
use rustix::process::setpriority_process;
use std::io;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// The number of looks at the clock within the silence.
const LOOKS: u32 = 16;

/// The margin after the silence, for messages that have arrived but were not read.
const LATE: Duration = Duration::from_millis(100);

/// The maximum number of frames that wait for the rank. Further frames of the neighbour wait in the sockets.
pub(super) const AHEAD: usize = 4;

/// The thread and the runtime that serve a rank's edges.
#[derive(Clone, Debug)]
pub(super) struct Beats {
    pub(super) runtime: Handle,
    pub(super) seat: Seat,
}

impl Beats {
    /// Returns the calling thread and its runtime.
    pub(super) fn here() -> Self {
        Self { runtime: Handle::current(), seat: Seat::own() }
    }
}

/// Starts a thread that serves a rank's edges. It ends when the runtime is dropped. Its tasks wait only for sockets and
/// queues, so it ends at once.
pub(super) fn start(rank: u32) -> io::Result<(Beats, Runtime)> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name(format!("gin-beat-{rank}"))
        .on_thread_start(raise_priority)
        .enable_all()
        .build()?;
    let (to, from) = std::sync::mpsc::channel();
    // The receiver is gone only if the starter has ended.
    runtime.spawn(async move { drop(to.send(Beats::here())) });
    Ok((from.recv().map_err(io::Error::other)?, runtime))
}

/// Gives this thread the highest priority that the system permits. Without privileges that is its present priority,
/// which does no harm on a machine that is not overloaded.
fn raise_priority() {
    let _ = [-20, -15, -10, -5].into_iter().find(|&nice| setpriority_process(None, nice).is_ok());
}

/// The reason for which this rank or a neighbour is late.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Late {
    /// This rank's thread did not run for this time.
    Own(Duration),
    /// The neighbour's thread waits for a CPU.
    Neighbour,
}

/// Detects the silence of a neighbour.
#[derive(Debug)]
pub(super) struct Watch {
    silence: Duration,
    /// The neighbour's thread, if it is on this system.
    beside: Option<Seat>,
}

impl Watch {
    /// Watches a neighbour. `local`: it is on this system.
    pub(super) fn new(silence: Duration, own: &Seat, neighbour: Seat, local: bool) -> Self {
        Self { silence, beside: Some(neighbour).filter(|seat| local && seat.is_beside(own)) }
    }

    /// Returns the next message; `None` if the neighbour is silent before it arrives.
    async fn heard<T>(&self, next: impl Future<Output = T>, mut late: impl FnMut(Late)) -> Option<T> {
        let mut next = pin!(next);
        let step = self.silence / LOOKS;
        let (mut listened, mut asleep) = (Duration::ZERO, Duration::ZERO);
        let mut reported = false;
        loop {
            let begun = Instant::now();
            if let Ok(heard) = timeout(step, &mut next).await {
                return Some(heard);
            }
            let passed = begun.elapsed();
            if passed >= step + self.silence / 4 {
                late(Late::Own(passed - step));
            }
            let counts = passed.min(2 * step);
            listened += counts;
            if listened < self.silence {
                continue;
            }
            match self.beside.map_or(ThreadState::Stopped, |seat| seat.state()) {
                ThreadState::Runnable => {
                    if !std::mem::replace(&mut reported, true) {
                        late(Late::Neighbour);
                    }
                    continue;
                }
                ThreadState::Asleep => {
                    asleep += counts;
                    if asleep < self.silence {
                        continue;
                    }
                }
                ThreadState::Stopped => {}
            }
            return timeout(LATE.min(step), next).await.ok();
        }
    }
}

/// An event of an edge.
#[derive(Debug)]
pub(super) enum Event {
    Frame(Vec<u8>),
    Late(Late),
    /// The edge has ended.
    Ended(LossCause),
}

/// Passes on the frames of an edge until it ends. While the receiver takes no frame, the neighbour does not count as
/// silent.
pub(super) async fn read(mut link: Inbound, watch: Watch, to: mpsc::Sender<Event>) {
    let cause = loop {
        // If the queue is full, the report is left out.
        let late = |late| drop(to.try_send(Event::Late(late)));
        let frame = match watch.heard(link.frame(), late).await {
            Some(Ok(Some(frame))) => frame,
            Some(Ok(None)) => break LossCause::Closed,
            Some(Err(error)) => break error.into(),
            None => break LossCause::Silent { ms: millis(watch.silence) },
        };
        if !Message::is_ping(frame) && to.send(Event::Frame(frame.to_vec())).await.is_err() {
            return;
        }
    };
    // If the receiver is gone, it has ended the edge.
    let _ = to.send(Event::Ended(cause)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seat::look;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::{Child, Command, Stdio};
    use std::thread;
    use tokio::time::sleep;

    const SILENCE: Duration = Duration::from_millis(400);

    fn run<T>(work: impl Future<Output = T>) -> T {
        Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    /// A process, and its only thread as its neighbour knows it.
    struct Process(Child, Seat);

    impl Process {
        fn start(script: &str) -> Self {
            let child = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
            let began = look(child.id() as i32).unwrap().1;
            let seat = Seat { thread: child.id(), began, ..Seat::own() };
            Self(child, seat)
        }

        fn signal(&self, signal: Signal) {
            kill_process(Pid::from_child(&self.0), signal).unwrap();
        }

        fn is_in(&self, state: ThreadState) {
            let begun = Instant::now();
            while self.1.state() != state {
                assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.1.state());
                thread::yield_now();
            }
        }

        /// Counts the late messages of a neighbour that listens for nothing, until this one is lost.
        fn is_lost(&self) -> usize {
            let mut late = 0;
            let watch = Watch::new(SILENCE, &Seat::own(), self.1, true);
            assert_eq!(watch.beside, Some(self.1));
            let heard = watch.heard(std::future::pending::<()>(), |now| late += usize::from(now == Late::Neighbour));
            assert_eq!(run(heard), None);
            late
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn time_in_which_the_own_thread_did_not_run_is_nobodys_silence() {
        let watch = Watch { silence: SILENCE, beside: None };
        let mut late = Vec::new();
        let heard = run(async {
            let word = async {
                // Nothing else runs here meanwhile.
                thread::sleep(3 * SILENCE);
                sleep(SILENCE / 2).await;
            };
            watch.heard(word, |now| late.push(now)).await
        });
        assert_eq!(heard, Some(()));
        assert!(matches!(late[..], [Late::Own(time), ..] if time > 2 * SILENCE), "{late:?}");
    }

    #[test]
    fn a_neighbour_that_is_not_seen_is_lost_after_the_silence() {
        let watch = Watch { silence: SILENCE, beside: None };
        let begun = Instant::now();
        assert_eq!(run(watch.heard(std::future::pending::<()>(), |_| ())), None);
        assert!(begun.elapsed() >= SILENCE);
    }

    #[test]
    fn a_neighbour_that_is_stopped_is_lost_and_one_that_sleeps_after_as_much_again() {
        let process = Process::start("exec sleep 600");
        process.is_in(ThreadState::Asleep);
        let begun = Instant::now();
        assert_eq!(process.is_lost(), 0);
        assert!(begun.elapsed() >= 2 * SILENCE);
        process.signal(Signal::STOP);
        process.is_in(ThreadState::Stopped);
        let watch = Watch { silence: SILENCE, beside: Some(process.1) };
        assert_eq!(run(async { watch.heard(sleep(3 * SILENCE), |_| ()).await }), None);
    }

    #[test]
    fn a_neighbour_that_waits_for_a_processor_is_lost_when_it_ends() {
        let process = Process::start("while :; do :; done");
        process.is_in(ThreadState::Runnable);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(3 * SILENCE);
                process.signal(Signal::KILL);
            });
            let begun = Instant::now();
            assert_eq!(process.is_lost(), 1);
            assert!(begun.elapsed() >= 3 * SILENCE);
        });
    }

    #[test]
    fn numbers_of_other_namespaces_and_systems_and_of_threads_that_ended_are_not_trusted() {
        let own = Seat::own();
        assert_ne!(own, Seat::default());
        let beside = |seat, local| Watch::new(SILENCE, &own, seat, local).beside;
        assert_eq!(beside(own, true), Some(own));
        assert_eq!(beside(own, false), None);
        assert_eq!(beside(Seat { namespace: own.namespace + 1, ..own }, true), None);
        assert_eq!(beside(Seat { began: own.began + 1, ..own }, true), None);
        assert_eq!(Watch::new(SILENCE, &Seat::default(), Seat::default(), true).beside, None);
        // The kernel lists a thread for some time after it was joined.
        let ended = thread::spawn(Seat::own).join().unwrap();
        let begun = Instant::now();
        while beside(ended, true).is_some() {
            assert!(begun.elapsed() < Duration::from_secs(10), "a thread that ended is trusted");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
