// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traces in the JSON format that Perfetto and Chrome read ("Trace Event Format").
//!
//! A rank is a process. Its tracks are its kernels, its proxy, and for each context and peer as many as there were
//! requests outstanding at a time, because spans of one track may not overlap.

use super::{Span, Track};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// A span, as Perfetto reads it.
#[derive(Serialize)]
struct Complete<'a> {
    name: &'a str,
    cat: &'a str,
    ph: &'a str,
    /// Microseconds.
    ts: f64,
    dur: f64,
    pid: u32,
    tid: usize,
    args: Arguments,
}

#[derive(Serialize)]
struct Arguments {
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
}

/// The name or the place of a process or a track.
#[derive(Serialize)]
struct Named<'a> {
    name: &'a str,
    ph: &'a str,
    pid: u32,
    tid: usize,
    args: BTreeMap<&'a str, serde_json::Value>,
}

/// Returns the lane of each span within its rank and track, so that no two spans of a lane overlap.
fn lanes(spans: &[&Span]) -> Vec<usize> {
    let mut ends: BTreeMap<(u32, &Track), Vec<u64>> = BTreeMap::new();
    let mut lanes = Vec::with_capacity(spans.len());
    for span in spans {
        let ends = ends.entry((span.rank, &span.track)).or_default();
        let free = ends.iter().position(|&end| end <= span.begin_ns).unwrap_or(ends.len());
        ends.resize(ends.len().max(free + 1), 0);
        ends[free] = span.end_ns;
        lanes.push(free);
    }
    lanes
}

fn title(track: &Track, lane: usize) -> String {
    let title = match track {
        Track::Kernel => "kernels".to_owned(),
        Track::Proxy => "proxy".to_owned(),
        Track::Requests { context, peer } => format!("context {context} to rank {peer}"),
    };
    if lane == 0 { title } else { format!("{title} ({})", lane + 1) }
}

/// Writes an event after the separator from the one before it.
fn event(event: &impl Serialize, separator: &mut &str, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{}", std::mem::replace(separator, ",\n"))?;
    Ok(serde_json::to_writer(out, event)?)
}

/// Writes a trace.
///
/// # Errors
/// Returns the error of the writer.
pub(super) fn write(spans: &[Span], out: &mut impl Write) -> io::Result<()> {
    let mut ordered: Vec<&Span> = spans.iter().collect();
    ordered.sort_by_key(|span| (span.begin_ns, span.rank, span.end_ns));
    let lanes = lanes(&ordered);
    // Tracks of a rank, numbered in their order. 0 is no number of a thread.
    let mut tracks: BTreeMap<(u32, &Track, usize), usize> =
        ordered.iter().zip(&lanes).map(|(span, &lane)| ((span.rank, &span.track, lane), 0)).collect();
    for (number, place) in tracks.values_mut().enumerate() {
        *place = number + 1;
    }
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut separator = "\n";
    let mut named = None;
    for (&(rank, track, lane), &tid) in &tracks {
        let name =
            |name, key, value: serde_json::Value| Named { name, ph: "M", pid: rank, tid, args: [(key, value)].into() };
        if named.replace(rank) != Some(rank) {
            event(&name("process_name", "name", format!("rank {rank}").into()), &mut separator, out)?;
            event(&name("process_sort_index", "sort_index", rank.into()), &mut separator, out)?;
        }
        event(&name("thread_name", "name", title(track, lane).into()), &mut separator, out)?;
        event(&name("thread_sort_index", "sort_index", tid.into()), &mut separator, out)?;
    }
    for (span, &lane) in ordered.iter().zip(&lanes) {
        let (context, peer, cat) = match span.track {
            Track::Kernel => (None, None, "kernel"),
            Track::Proxy => (None, None, "proxy"),
            Track::Requests { context, peer } => (Some(context), Some(peer), "request"),
        };
        let (index, bytes) = span.request.unzip();
        let complete = Complete {
            name: &span.name,
            cat,
            ph: "X",
            ts: span.begin_ns as f64 / 1e3,
            dur: (span.end_ns - span.begin_ns) as f64 / 1e3,
            pid: span.rank,
            tid: tracks[&(span.rank, &span.track, lane)],
            args: Arguments { context, peer, index, bytes, failed: span.failed },
        };
        event(&complete, &mut separator, out)?;
    }
    writeln!(out, "\n]}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(rank: u32, peer: u32, begin_ns: u64, end_ns: u64) -> Span {
        let (track, request) = (Track::Requests { context: 0, peer }, Some((begin_ns, 8)));
        Span { rank, track, name: "put".to_owned(), begin_ns, end_ns, request, waited_ns: None, failed: false }
    }

    #[test]
    fn spans_that_overlap_are_in_separate_tracks_and_all_tracks_have_names() {
        let kernel = Span { track: Track::Kernel, request: None, failed: true, ..span(0, 0, 0, 90) };
        let spans = [
            span(0, 1, 10, 30),
            span(0, 1, 20, 40),
            span(0, 1, 30, 50),
            span(0, 2, 10, 20),
            span(1, 1, 10, 20),
            kernel,
        ];
        let mut out = Vec::new();
        write(&spans, &mut out).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let title = |event: &serde_json::Value| {
            let is_name = |name: &&serde_json::Value| name["name"] == "thread_name" && name["tid"] == event["tid"];
            events.iter().find(is_name).unwrap()["args"]["name"].as_str().unwrap().to_owned()
        };
        let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        let titles: Vec<String> = complete.iter().map(|event| title(event)).collect();
        let first = "context 0 to rank 1";
        let second = "context 0 to rank 1 (2)";
        assert_eq!(titles, ["kernels", "context 0 to rank 2", first, first, second, first]);
        assert_eq!((&complete[0]["dur"], &complete[0]["args"]["failed"]), (&0.09.into(), &true.into()));
        assert_eq!(complete[4]["args"], serde_json::json!({"context": 0, "peer": 1, "index": 20, "bytes": 8}));
        let ranks = events.iter().filter(|event| event["name"] == "process_name").count();
        assert_eq!(ranks, 2);
    }
}
