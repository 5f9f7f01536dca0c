// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trace of a run: records the events of requests, proxy steps and kernels, and writes them for Perfetto.

mod perfetto;

use crate::cli::Failure;
use gin_abi::descriptor::MAX_TIME;
use gin_virtual::peek_clock_ns;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The maximum number of spans of a trace: some hundred megabytes of file. Later ones are left out and counted.
const MAX: usize = 1 << 20;

/// Context and index of a request.
type Request = (u32, u64);

/// The place of a span in the trace, in the order of its tracks.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Track {
    Kernel,
    Proxy,
    /// The requests of a context to a peer.
    Requests {
        context: u32,
        peer: u32,
    },
}

/// A time between two events of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Span {
    rank: u32,
    track: Track,
    name: String,
    begin_ns: u64,
    end_ns: u64,
    /// Index and bytes of a request.
    request: Option<(u64, u64)>,
    /// Nanoseconds from a request's post by the device's clock until its acceptance by the host's, modulo
    /// [`MAX_TIME`]` + 1`; until the run has ended and `begin_ns` is the time of the post.
    waited_ns: Option<u64>,
    failed: bool,
}

/// The clock that kernels read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Clock {
    /// That of a virtual world, which begins anew with each run. The host reads it, too.
    Virtual,
    /// That of the host.
    #[default]
    Host,
    /// That of a GPU, which is ahead of the host's by an unknown time.
    Gpu,
}

/// The events of a rank whose end is not known yet.
#[derive(Debug, Default)]
struct Open {
    kernel: Option<Span>,
    step_ns: Option<u64>,
    requests: BTreeMap<Request, Span>,
}

#[derive(Debug, Default)]
struct Recorded {
    spans: Vec<Span>,
    open: BTreeMap<u32, Open>,
    left_out: u64,
    last_ns: u64,
    /// Nanoseconds to add: the clock of a virtual world begins anew with each run.
    shift_ns: u64,
    clock: Clock,
}

/// Records the events of [`TARGET`](gin_host::proxy::trace::TARGET), which it gets as a layer of the subscriber.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder(Arc<Mutex<Recorded>>);

/// The fields of an event.
#[derive(Debug, Default)]
struct Fields {
    rank: u32,
    context: u32,
    peer: u32,
    index: u64,
    bytes: u64,
    posted: Option<u64>,
    /// The operation or the kernel.
    name: String,
    signal: bool,
    failed: bool,
    worked: bool,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        // Ranks, contexts and peers come from values of 32 bits.
        match field.name() {
            "rank" => self.rank = value as u32,
            "context" => self.context = value as u32,
            "peer" => self.peer = value as u32,
            "index" => self.index = value,
            "bytes" => self.bytes = value,
            "posted" => self.posted = Some(value),
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        match field.name() {
            "signal" => self.signal = value,
            "failed" => self.failed = value,
            "worked" => self.worked = value,
            _ => {}
        }
    }

    fn record_str(&mut self, _: &Field, value: &str) {
        value.clone_into(&mut self.name);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl<S: Subscriber> Layer<S> for Recorder {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        // Before the lock: of two events that wait for it, the second may be the first in time.
        let now = peek_clock_ns();
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).add(event.metadata().name(), fields, now);
    }
}

impl Recorded {
    fn add(&mut self, event: &str, fields: Fields, now: u64) {
        let Fields { rank, context, peer, index, bytes, posted, mut name, signal, failed, worked } = fields;
        let waited_ns = posted.map(|posted| now.wrapping_sub(posted) & MAX_TIME);
        let now = now + self.shift_ns;
        self.last_ns = self.last_ns.max(now);
        let span = |track, name, request| Span {
            rank,
            track,
            name,
            begin_ns: now,
            end_ns: now,
            request,
            waited_ns: None,
            failed: false,
        };
        let open = self.open.entry(rank).or_default();
        let ended = match event {
            "kernel begins" => {
                open.kernel = Some(span(Track::Kernel, name, None));
                None
            }
            "kernel ends" => open.kernel.take(),
            "step begins" => {
                open.step_ns = Some(now);
                None
            }
            "step ends" => {
                let begin_ns = open.step_ns.take().filter(|_| worked);
                begin_ns.map(|begin_ns| Span { begin_ns, ..span(Track::Proxy, "step".to_owned(), None) })
            }
            "accepted" => {
                if signal && name != "signal" {
                    name.push_str(" and signal");
                }
                let span = span(Track::Requests { context, peer }, name, Some((index, bytes)));
                open.requests.insert((context, index), Span { waited_ns, ..span });
                None
            }
            "finished" => open.requests.remove(&(context, index)),
            _ => None,
        };
        if let Some(ended) = ended {
            self.push(Span { end_ns: now, failed, ..ended });
        }
    }

    fn push(&mut self, span: Span) {
        if self.spans.len() < MAX {
            self.spans.push(span);
        } else {
            self.left_out += 1;
        }
    }

    /// Ends what has begun and never ended, as failed, and moves the begin of requests to their posts.
    fn close(&mut self) {
        let end_ns = self.last_ns;
        for (_, open) in std::mem::take(&mut self.open) {
            for span in open.kernel.into_iter().chain(open.requests.into_values()) {
                self.push(Span { end_ns, failed: true, ..span });
            }
        }
        // Nobody accepts a request before its post, so the shortest of these times is the maximum that the clock of a
        // rank's GPU can be behind the host's.
        let mut behind: BTreeMap<u32, u64> = BTreeMap::new();
        if self.clock == Clock::Gpu {
            for (rank, waited) in self.spans.iter().filter_map(|span| Some((span.rank, span.waited_ns?))) {
                let least = behind.entry(rank).or_insert(waited);
                // The times lie on a circle.
                if waited.wrapping_sub(*least) & MAX_TIME > MAX_TIME / 2 {
                    *least = waited;
                }
            }
        }
        for span in &mut self.spans {
            if let Some(waited) = span.waited_ns.take() {
                let behind = behind.get(&span.rank).copied().unwrap_or(0);
                span.begin_ns = span.begin_ns.saturating_sub(waited.wrapping_sub(behind) & MAX_TIME);
            }
        }
    }
}

impl Recorder {
    /// Notes that a run begins. In a virtual world its clock begins at 0 again, so the run follows the earlier ones.
    pub(crate) fn begin_run(&self, clock: Clock) {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.close();
        recorded.clock = clock;
        if clock == Clock::Virtual {
            recorded.shift_ns = recorded.last_ns;
        }
    }

    /// Writes the trace to a file. If nothing ran, the file stays as it was before it was opened.
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn write(&self, to: TraceFile, quiet: bool) -> Result<(), Failure> {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.close();
        let TraceFile { path, file, is_new } = to;
        let failed = |error| format!("cannot write the trace {}: {error}", path.display());
        if recorded.spans.is_empty() {
            if is_new {
                std::fs::remove_file(&path).map_err(failed)?;
            }
            return Ok(());
        }
        file.set_len(0).map_err(failed)?;
        let mut out = BufWriter::new(file);
        perfetto::write(&recorded.spans, &mut out).and_then(|()| out.flush()).map_err(failed)?;
        if !quiet {
            let (path, spans, left_out) = (path.display(), recorded.spans.len(), recorded.left_out);
            let rest = if left_out == 0 { String::new() } else { format!(", the first; {left_out} are left out") };
            eprintln!("gin: wrote {path}: {spans} spans{rest}; open it in https://ui.perfetto.dev");
        }
        Ok(())
    }
}

/// The file of a trace, open for writing since before the run.
pub(crate) struct TraceFile {
    path: PathBuf,
    file: File,
    /// It did not exist before.
    is_new: bool,
}

impl TraceFile {
    /// Opens the file and leaves its content. A `rank` that is a process has its number in the name of its file.
    ///
    /// # Errors
    /// Returns the error of the file.
    pub(crate) fn open(path: &Path, rank: Option<u32>) -> Result<Self, Failure> {
        let path = rank.map_or_else(|| path.to_owned(), |rank| numbered(path, rank));
        let is_new = !path.exists();
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|error| format!("cannot write the trace {}: {error}", path.display()))?;
        Ok(Self { path, file, is_new })
    }
}

/// Returns the path with the number before its extension: `trace.json` becomes `trace.2.json`.
fn numbered(path: &Path, rank: u32) -> PathBuf {
    let number = rank.to_string();
    match path.extension() {
        Some(extension) => {
            let mut ending = std::ffi::OsString::from(number);
            ending.push(".");
            ending.push(extension);
            path.with_extension(ending)
        }
        None => path.with_extension(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(rank: u32, context: u32, index: u64) -> Fields {
        Fields { rank, context, index, peer: 7, bytes: 64, name: "put".to_owned(), signal: true, ..Fields::default() }
    }

    #[test]
    fn a_request_is_a_span_from_its_acceptance_to_its_end_and_what_never_ends_has_failed() {
        let mut recorded = Recorded::default();
        recorded.add("accepted", fields(1, 2, 5), 100);
        recorded.add("accepted", fields(1, 2, 6), 110);
        recorded.add("accepted", fields(0, 2, 5), 120);
        recorded.add("finished", fields(1, 2, 5), 150);
        recorded.add("finished", fields(1, 3, 6), 160);
        assert_eq!(recorded.spans.len(), 1, "{recorded:?}");
        let span = &recorded.spans[0];
        assert_eq!((span.rank, &span.track), (1, &Track::Requests { context: 2, peer: 7 }));
        assert_eq!((span.begin_ns, span.end_ns, span.failed), (100, 150, false));
        assert_eq!((&*span.name, span.request), ("put and signal", Some((5, 64))));
        recorded.close();
        let rest: Vec<_> = recorded.spans[1..].iter().map(|span| (span.rank, span.end_ns, span.failed)).collect();
        assert_eq!(rest, [(0, 160, true), (1, 160, true)]);
    }

    #[test]
    fn a_request_begins_at_its_post_by_whatever_clock() {
        // The clock of the GPU is 3 ahead of the host's, and has just begun its next round.
        for (clock, ahead) in [(Clock::Host, 0), (Clock::Gpu, 3)] {
            let mut recorded = Recorded { clock, ..Recorded::default() };
            for (index, post, accepted) in [(1, MAX_TIME - 9, MAX_TIME + 1), (2, MAX_TIME - 1, MAX_TIME + 11)] {
                let posted = Some((post + ahead) & MAX_TIME);
                recorded.add("accepted", Fields { posted, ..fields(0, 0, index) }, accepted);
                recorded.add("finished", fields(0, 0, index), accepted + 5);
            }
            recorded.close();
            let begins: Vec<_> = recorded.spans.iter().map(|span| span.begin_ns).collect();
            // The faster one of the two waited for nothing, as far as the host can know.
            let expected = if ahead == 0 { [MAX_TIME - 9, MAX_TIME - 1] } else { [MAX_TIME + 1, MAX_TIME + 9] };
            assert_eq!(begins, expected, "{clock:?}");
        }
    }

    #[test]
    fn steps_without_work_leave_no_span() {
        let mut recorded = Recorded::default();
        for (time, worked) in [(10, false), (20, true)] {
            recorded.add("step begins", fields(0, 0, 0), time);
            recorded.add("step ends", Fields { worked, ..fields(0, 0, 0) }, time + 3);
        }
        let spans: Vec<_> = recorded.spans.iter().map(|span| (span.begin_ns, span.end_ns)).collect();
        assert_eq!(spans, [(20, 23)]);
    }

    #[test]
    fn runs_in_virtual_time_follow_each_other() {
        let recorder = Recorder::default();
        for _ in 0..2 {
            recorder.begin_run(Clock::Virtual);
            let mut recorded = recorder.0.lock().unwrap();
            recorded.add("kernel begins", fields(0, 0, 0), 10);
            recorded.add("kernel ends", fields(0, 0, 0), 30);
        }
        let recorded = recorder.0.lock().unwrap();
        let spans: Vec<_> = recorded.spans.iter().map(|span| (span.begin_ns, span.end_ns)).collect();
        assert_eq!(spans, [(10, 30), (40, 60)]);
    }

    #[test]
    fn a_rank_that_is_a_process_has_its_number_in_the_name() {
        assert_eq!(numbered(Path::new("a/trace.json"), 2), Path::new("a/trace.2.json"));
        assert_eq!(numbered(Path::new("trace"), 0), Path::new("trace.0"));
    }
}
