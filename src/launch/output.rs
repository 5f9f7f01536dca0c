// SPDX-License-Identifier: MIT OR Apache-2.0
//! The output of ranks, line by line, with the rank before it.

use std::io::{self, Write};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Where a rank prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stream {
    /// Its standard output.
    Output,
    /// Its standard error.
    Error,
}

/// A line that is longer is printed in parts.
const LONGEST: usize = 64 << 10;

/// Cuts what one rank prints into lines.
#[derive(Debug)]
struct Lines {
    prefix: Vec<u8>,
    /// Objects in JSON go through as they are: they are for programs.
    json: bool,
    rest: Vec<u8>,
}

impl Lines {
    fn new(rank: usize, stream: Stream) -> Self {
        let json = rank == 0 && stream == Stream::Output;
        Self { prefix: format!("[{rank}] ").into_bytes(), json, rest: Vec::new() }
    }

    /// Takes bytes, and gives the lines that they complete.
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

    /// The last line, if it has no end.
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

/// Any value of JSON.
type Ignored = serde::de::IgnoredAny;

/// Prints what comes from one rank until nothing comes any more.
///
/// # Errors
/// Output that cannot be written.
pub(super) async fn pump(mut from: impl AsyncRead + Unpin, rank: usize, stream: Stream) -> io::Result<()> {
    let mut lines = Lines::new(rank, stream);
    let mut bytes = vec![0; 8 << 10];
    loop {
        // A pipe that breaks has ended.
        let count = from.read(&mut bytes).await.unwrap_or(0);
        if count == 0 {
            return print(stream, &lines.end());
        }
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
        // Where nobody reads it there is nobody to tell.
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
