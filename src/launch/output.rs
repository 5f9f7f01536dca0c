// SPDX-License-Identifier: MIT OR Apache-2.0
//! The output of ranks, line by line, with the number of the rank before each line.

use std::io::{self, Write};
use tokio::io::{AsyncRead, AsyncReadExt};

/// An output stream of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// Maximum length of a line, in bytes. A longer line is printed in parts.
const LONGEST: usize = 64 << 10;

/// Splits the output of one rank into lines.
#[derive(Debug)]
struct Lines {
    prefix: Vec<u8>,
    /// Prints JSON objects without a prefix: they are for programs.
    json: bool,
    rest: Vec<u8>,
}

impl Lines {
    fn new(rank: usize, stream: Stream) -> Self {
        let json = rank == 0 && stream == Stream::Output;
        Self { prefix: format!("[{rank}] ").into_bytes(), json, rest: Vec::new() }
    }

    /// Appends bytes and returns the lines that they complete.
    fn take(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut lines = Vec::new();
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.rest.extend_from_slice(&bytes[..end]);
            self.flush(&mut lines);
            bytes = &bytes[end + 1..];
        }
        self.rest.extend_from_slice(bytes);
        if self.rest.len() >= LONGEST {
            self.flush(&mut lines);
        }
        lines
    }

    /// Returns the last line, if it lacks its line end.
    fn end(mut self) -> Vec<u8> {
        let mut lines = Vec::new();
        if !self.rest.is_empty() {
            self.flush(&mut lines);
        }
        lines
    }

    fn flush(&mut self, lines: &mut Vec<u8>) {
        let object = |line: &[u8]| line.first() == Some(&b'{') && serde_json::from_slice::<Ignored>(line).is_ok();
        if !(self.json && object(&self.rest)) {
            lines.extend_from_slice(&self.prefix);
        }
        lines.append(&mut self.rest);
        lines.push(b'\n');
    }
}

/// Any JSON value.
type Ignored = serde::de::IgnoredAny;

/// Prints the output of one rank until its end. Calls `seen` with the bytes before it prints them.
///
/// # Errors
/// Returns the error of a write to standard output.
pub(super) async fn pump(
    mut from: impl AsyncRead + Unpin,
    rank: usize,
    stream: Stream,
    seen: impl Fn(&[u8]),
) -> io::Result<()> {
    let mut lines = Lines::new(rank, stream);
    let mut bytes = vec![0; 8 << 10];
    loop {
        // A read error counts as the end of the pipe.
        let count = from.read(&mut bytes).await.unwrap_or(0);
        if count == 0 {
            return print(stream, &lines.end());
        }
        seen(&bytes[..count]);
        print(stream, &lines.take(&bytes[..count]))?;
    }
}

fn print(stream: Stream, lines: &[u8]) -> io::Result<()> {
    match stream {
        Stream::Output => {
            let mut to = io::stdout().lock();
            to.write_all(lines)?;
            to.flush()
        }
        // Ignores write errors: standard error is where this command would report them.
        Stream::Error => {
            let _ = io::stderr().lock().write_all(lines);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(rank: usize, stream: Stream, parts: &[&str]) -> String {
        let mut lines = Lines::new(rank, stream);
        let mut all: Vec<u8> = parts.iter().flat_map(|part| lines.take(part.as_bytes())).collect();
        all.extend(lines.end());
        String::from_utf8(all).unwrap()
    }

    #[test]
    fn every_line_begins_with_its_rank_however_it_arrives() {
        assert_eq!(printed(3, Stream::Output, &["one\ntwo\n"]), "[3] one\n[3] two\n");
        assert_eq!(printed(3, Stream::Output, &["o", "ne\n\nt", "wo"]), "[3] one\n[3] \n[3] two\n");
        assert_eq!(printed(12, Stream::Error, &["x"]), "[12] x\n");
        assert_eq!(printed(1, Stream::Output, &[]), "");
    }

    #[test]
    fn objects_of_rank_0_go_through_as_they_are() {
        assert_eq!(printed(0, Stream::Output, &["{\"a\":", "1}\n{no\n"]), "{\"a\":1}\n[0] {no\n");
        assert_eq!(printed(0, Stream::Error, &["{}\n"]), "[0] {}\n");
        assert_eq!(printed(1, Stream::Output, &["{}\n"]), "[1] {}\n");
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory_without_an_end() {
        let mut lines = Lines::new(1, Stream::Output);
        let mut count = 0;
        for _ in 0..100 {
            count += lines.take(&[b'x'; 8 << 10]).len();
            assert!(lines.rest.len() < LONGEST);
        }
        assert!(count >= 700 << 10);
    }
}
