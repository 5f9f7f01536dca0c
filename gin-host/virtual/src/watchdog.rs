// SPDX-License-Identifier: MIT OR Apache-2.0
//! The watchdog. It names a coroutine that never yields and ends the process, because nothing else can take the
//! CPU from such a coroutine. It prints all waiters of a world without progress, and at SIGQUIT of all worlds.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use libc::{SIG_DFL, SIGQUIT, c_int};

use crate::end::WorldEnd;
use crate::error::WaitReport;
use crate::inbox::{Inbox, Mail};
use crate::lock::lock;
use crate::log::Code;

/// The heartbeat of an engine.
pub(crate) struct Heartbeat {
    limit: Option<Duration>,
    /// Time without progress in the whole world after which its waiters are printed.
    stall: Option<Duration>,
    seed: u64,
    world: Arc<WorldEnd>,
    inbox: Arc<Inbox>,
    /// Changes whenever there is progress.
    progress: AtomicU64,
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
    pub(crate) fn new(
        limit: Option<Duration>,
        stall: Option<Duration>,
        seed: u64,
        world: &Arc<WorldEnd>,
        inbox: &Arc<Inbox>,
    ) -> Arc<Self> {
        let beat = Arc::new(Heartbeat {
            limit,
            stall,
            seed,
            world: world.clone(),
            inbox: inbox.clone(),
            progress: AtomicU64::new(0),
            count: AtomicU64::new(0),
            code: AtomicU64::new(0),
            names: Mutex::default(),
            task: OnceLock::new(),
        });
        if limit.is_some() || stall.is_some() {
            engines().push(Arc::downgrade(&beat));
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                // Without the watchdog thread nothing is reported; everything else works.
                if std::thread::Builder::new().name("gin-virtual watchdog".into()).spawn(watch).is_ok() {
                    report_at_sigquit();
                }
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

    /// Records a number that changes whenever there is progress.
    pub(crate) fn note_progress(&self, progress: u64) {
        self.progress.store(progress, Ordering::Relaxed);
    }

    /// Returns the waiters of the engine, unless it does not answer: it has ended, or a coroutine computes.
    fn report(&self) -> Option<WaitReport> {
        let (to, from) = mpsc::channel();
        self.inbox.post(Mail::Report(to));
        from.recv_timeout(Duration::from_secs(1)).ok()
    }

    /// Returns the CPU time of the engine's thread; `None` if Linux does not provide it.
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
    /// CPU time of its thread when the record began.
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

/// The watchdog's record of a world of OS threads without progress.
struct Stall {
    world: Weak<WorldEnd>,
    /// The sum of all numbers that change when there is progress.
    progress: u64,
    /// Time for which the watchdog has watched it.
    watched: Duration,
    reported: bool,
}

impl Stall {
    /// Looks at the engines of the world after `passed`. Prints its waiters once if there was no progress for too long.
    fn look(&mut self, engines: &[Arc<Heartbeat>], world: &WorldEnd, passed: Duration) {
        let Some(limit) = engines.iter().filter_map(|beat| beat.stall).min() else { return };
        let sum = engines.iter().map(|beat| beat.progress.load(Ordering::Relaxed)).fold(0, u64::wrapping_add);
        let progress = sum.wrapping_add(world.waiting().1);
        // Names are those of grids that have not ended.
        if progress != self.progress || engines.iter().all(|beat| beat.names().is_empty()) {
            (self.progress, self.watched, self.reported) = (progress, Duration::ZERO, false);
            return;
        }
        self.watched += passed;
        if self.watched >= limit && !self.reported {
            self.reported = true;
            let reason = format!(
                "no progress for {limit:?}: no thread, barrier or exchange of lanes ended, no thread computed, and no wait \
                 of a host ended (`ThreadsConfig::stall_report` sets the time)"
            );
            print(&reason, engines, world);
        }
    }
}

/// Prints all waiters of a world on standard error.
fn print(reason: &str, engines: &[Arc<Heartbeat>], world: &WorldEnd) {
    let mut all = WaitReport { waiters: world.waiting().0, not_started: Vec::new() };
    for beat in engines {
        match beat.report() {
            Some(report) => {
                all.waiters.extend(report.waiters);
                all.not_started.extend(report.not_started);
            }
            None => {
                let code = beat.code.load(Ordering::Relaxed);
                if code != 0 {
                    say(&format!("{} runs, so the waiters of its device are not known", beat.describe(Code(code))));
                }
            }
        }
    }
    all.sort();
    say(&format!("{reason}{all}"));
}

/// Prints a line on standard error. Not by `eprintln!`, since a test harness captures what this thread prints with it.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "gin-virtual: {text}");
}

/// True once SIGQUIT has arrived.
static QUIT: AtomicBool = AtomicBool::new(false);

/// Has the watchdog print all waiters when SIGQUIT arrives, unless the program handles or ignores that signal itself.
fn report_at_sigquit() {
    extern "C" fn on_quit(_: c_int) {
        QUIT.store(true, Ordering::Relaxed);
    }
    // Safety: zeros are a valid action; the handler only stores a word.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(SIGQUIT, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == SIG_DFL {
            action.sa_sigaction = on_quit as extern "C" fn(c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(SIGQUIT, &action, std::ptr::null_mut());
        }
    }
}

/// Ends the process by SIGQUIT, as without the handler.
fn quit() {
    // Safety: the default action takes no handler.
    unsafe {
        libc::signal(SIGQUIT, SIG_DFL);
        libc::raise(SIGQUIT);
    }
}

fn watch() {
    let mut stalls: Vec<Stall> = Vec::new();
    let mut seen: Vec<(Weak<Heartbeat>, Silence)> = Vec::new();
    let (mut last, mut nap) = (Instant::now(), Duration::ZERO);
    loop {
        // Time in which this thread did not run either, as when the process was stopped, does not count.
        let passed = last.elapsed().min(2 * nap);
        last = Instant::now();
        nap = Duration::from_millis(250);
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
        let live: Vec<Arc<Heartbeat>> = seen.iter().filter_map(|(beat, _)| beat.upgrade()).collect();
        for beat in &live {
            if !stalls.iter().any(|stall| std::ptr::eq(stall.world.as_ptr(), &*beat.world)) {
                let world = Arc::downgrade(&beat.world);
                stalls.push(Stall { world, progress: 0, watched: Duration::ZERO, reported: false });
            }
        }
        stalls.retain(|stall| stall.world.strong_count() > 0);
        let quits = QUIT.load(Ordering::Relaxed);
        for stall in &mut stalls {
            let Some(world) = stall.world.upgrade() else { continue };
            let engines: Vec<_> = live.iter().filter(|beat| Arc::ptr_eq(&beat.world, &world)).cloned().collect();
            if quits {
                print("SIGQUIT", &engines, &world);
            } else {
                stall.look(&engines, &world, passed);
            }
        }
        if quits {
            quit();
        }
        drop(live);
        nap = nap.max(Duration::from_millis(5));
        std::thread::sleep(nap);
    }
}

fn end_process(beat: &Heartbeat, code: Code, limit: Duration) -> ! {
    say(&format!(
        "{} has not yielded for {limit:?} (seed {}): it loops without touching shared words, pausing or waiting. Ending \
         the process.",
        beat.describe(code),
        beat.seed,
    ));
    std::process::abort()
}
