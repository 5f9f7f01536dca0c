// SPDX-License-Identifier: MIT OR Apache-2.0
//! The watchdog, which names a coroutine that never yields and ends the process. Nothing else can take the processor
//! from such a coroutine.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::lock::lock;
use crate::log::Code;

/// The heartbeat of an engine.
pub(crate) struct Heartbeat {
    limit: Option<Duration>,
    seed: u64,
    /// Changes whenever a coroutine is resumed.
    count: AtomicU64,
    /// The running coroutine; 0 while none runs.
    code: AtomicU64,
    /// Names of grids and services.
    names: Mutex<BTreeMap<u64, Arc<str>>>,
    /// The engine's thread in `/proc`, if Linux provides it.
    task: OnceLock<Option<PathBuf>>,
}

static ENGINES: Mutex<Vec<Weak<Heartbeat>>> = Mutex::new(Vec::new());

fn engines() -> MutexGuard<'static, Vec<Weak<Heartbeat>>> {
    lock(&ENGINES)
}

impl Heartbeat {
    pub(crate) fn new(limit: Option<Duration>, seed: u64) -> Arc<Self> {
        let (count, code, names) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::default());
        let beat = Arc::new(Heartbeat { limit, seed, count, code, names, task: OnceLock::new() });
        if limit.is_some() {
            engines().push(Arc::downgrade(&beat));
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                // Without the watchdog thread a coroutine that never yields is not named; everything else works.
                let _ = std::thread::Builder::new().name("gin-virtual watchdog".into()).spawn(watch);
            });
        }
        beat
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    fn names(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<str>>> {
        lock(&self.names)
    }

    /// Sets the name of a grid or a service in reports.
    pub(crate) fn name(&self, code: Code, name: Arc<str>) {
        self.names().insert(code.0, name);
    }

    pub(crate) fn forget(&self, code: Code) {
        self.names().remove(&code.0);
    }

    pub(crate) fn enter(&self, code: Code) {
        // There is one writer, so no read-modify-write is needed.
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.code.store(code.0, Ordering::Relaxed);
        self.task.get_or_init(|| std::fs::canonicalize("/proc/thread-self").ok());
    }

    /// Returns the processor time of the engine's thread; `None` if Linux does not provide it.
    fn ran(&self) -> Option<Duration> {
        let text = std::fs::read_to_string(self.task.get()?.as_ref()?.join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }

    pub(crate) fn leave(&self) {
        self.code.store(0, Ordering::Relaxed);
    }

    fn describe(&self, code: Code) -> String {
        let names = self.names();
        match names.get(&code.0).or_else(|| names.get(&code.grid().0)) {
            Some(name) => format!("{code} (`{name}`)"),
            None => code.to_string(),
        }
    }
}

/// The watchdog's record of an engine whose coroutine has not changed since.
#[derive(Default)]
struct Silence {
    count: u64,
    /// Time for which the watchdog has watched it.
    watched: Duration,
    /// Processor time of its thread when the record began.
    ran: Option<Duration>,
}

impl Silence {
    /// Returns true if the coroutine loops. Either its thread ran for half of the limit, so the cause is not a busy
    /// machine. Or it waits for something outside, for much longer than the limit.
    fn is_a_loop(&self, ran: Option<Duration>, limit: Duration) -> bool {
        const MUCH_LONGER: u32 = 12;
        match (self.ran, ran) {
            (Some(before), Some(now)) if self.watched < MUCH_LONGER * limit => now.saturating_sub(before) >= limit / 2,
            _ => true,
        }
    }
}

fn watch() {
    let mut seen: Vec<(Weak<Heartbeat>, Silence)> = Vec::new();
    let (mut last, mut nap) = (Instant::now(), Duration::ZERO);
    loop {
        // Time in which this thread did not run either, as when the process was stopped, does not count.
        let passed = last.elapsed().min(2 * nap);
        last = Instant::now();
        nap = Duration::from_secs(1);
        {
            let mut fresh = engines();
            fresh.retain(|beat| beat.strong_count() > 0);
            seen.retain(|(beat, ..)| beat.strong_count() > 0);
            for beat in fresh.iter() {
                if !seen.iter().any(|(known, ..)| known.ptr_eq(beat)) {
                    seen.push((beat.clone(), Silence::default()));
                }
            }
        }
        for (beat, silence) in &mut seen {
            let Some(beat) = beat.upgrade() else { continue };
            let Some(limit) = beat.limit else { continue };
            nap = nap.min(limit / 8);
            let (new_count, code) = (beat.count.load(Ordering::Relaxed), beat.code.load(Ordering::Relaxed));
            if code == 0 || new_count != silence.count {
                *silence = Silence { count: new_count, watched: Duration::ZERO, ran: beat.ran() };
                continue;
            }
            silence.watched += passed;
            if silence.watched >= limit && silence.is_a_loop(beat.ran(), limit) {
                end_process(&beat, Code(code), limit);
            }
        }
        nap = nap.max(Duration::from_millis(5));
        std::thread::sleep(nap);
    }
}

fn end_process(beat: &Heartbeat, code: Code, limit: Duration) -> ! {
    // Not `eprintln!`, since a test harness captures what this thread prints with it.
    let _ = writeln!(
        std::io::stderr(),
        "gin-virtual: {} has not yielded for {limit:?} (seed {}): it loops without touching shared words, pausing or \
         waiting. Ending the process.",
        beat.describe(code),
        beat.seed,
    );
    std::process::abort()
}
