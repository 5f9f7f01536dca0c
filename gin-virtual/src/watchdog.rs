// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names a coroutine that never yields, and ends the process: nothing else can get the processor back from it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::log::Code;

/// The heartbeat of an engine.
pub(crate) struct Beat {
    limit: Option<Duration>,
    seed: u64,
    /// Changes whenever a coroutine is resumed.
    count: AtomicU64,
    /// The coroutine that runs; 0 while none does.
    code: AtomicU64,
    /// Of grids and services.
    names: Mutex<BTreeMap<u64, Arc<str>>>,
    /// Its thread, where Linux tells of it.
    task: OnceLock<Option<PathBuf>>,
}

static ENGINES: Mutex<Vec<Weak<Beat>>> = Mutex::new(Vec::new());

fn engines() -> MutexGuard<'static, Vec<Weak<Beat>>> {
    ENGINES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Beat {
    pub(crate) fn new(limit: Option<Duration>, seed: u64) -> Arc<Self> {
        let (count, code, names) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::default());
        let beat = Arc::new(Beat { limit, seed, count, code, names, task: OnceLock::new() });
        if limit.is_some() {
            engines().push(Arc::downgrade(&beat));
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                // Without the thread a coroutine that never yields goes unnamed; everything else works.
                let _ = std::thread::Builder::new().name("gin-virtual watchdog".into()).spawn(watch);
            });
        }
        beat
    }

    fn names(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<str>>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a grid or a service a name in reports.
    pub(crate) fn name(&self, code: Code, name: Arc<str>) {
        self.names().insert(code.0, name);
    }

    pub(crate) fn forget(&self, code: Code) {
        self.names().remove(&code.0);
    }

    pub(crate) fn enter(&self, code: Code) {
        // One writer: no read-modify-write is needed.
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.code.store(code.0, Ordering::Relaxed);
        self.task.get_or_init(|| std::fs::canonicalize("/proc/thread-self").ok());
    }

    /// How long its thread has had a processor; `None` where Linux does not tell.
    fn ran(&self) -> Option<Duration> {
        let told = std::fs::read_to_string(self.task.get()?.as_ref()?.join("schedstat")).ok()?;
        told.split(' ').next()?.parse().ok().map(Duration::from_nanos)
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

/// What was seen of an engine whose coroutine has not changed since.
#[derive(Default)]
struct Silence {
    count: u64,
    /// For how long.
    watched: Duration,
    /// How long its thread had run by then.
    ran: Option<Duration>,
}

impl Silence {
    /// Whether its thread ran for half of the limit, so that it is not the machine that is busy; or waits for something
    /// outside, and has for much longer.
    fn is_a_loop(&self, ran: Option<Duration>, limit: Duration) -> bool {
        const MUCH_LONGER: u32 = 12;
        match (self.ran, ran) {
            (Some(before), Some(now)) if self.watched < MUCH_LONGER * limit => now.saturating_sub(before) >= limit / 2,
            _ => true,
        }
    }
}

fn watch() {
    let mut seen: Vec<(Weak<Beat>, Silence)> = Vec::new();
    let (mut last, mut nap) = (Instant::now(), Duration::ZERO);
    loop {
        // Time in which this thread did not run either, as of a process that was stopped, is nobody's silence.
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

fn end_process(beat: &Beat, code: Code, limit: Duration) -> ! {
    // Not `eprintln!`: a test harness would swallow what this thread prints.
    let _ = writeln!(
        std::io::stderr(),
        "gin-virtual: {} has not yielded for {limit:?} (seed {}): it loops without touching shared words, pausing or \
         waiting. Ending the process.",
        beat.describe(code),
        beat.seed,
    );
    std::process::abort()
}
