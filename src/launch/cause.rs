// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rank that caused the end of a job, and its error, from what the ranks wrote to standard error.

/// Number of bytes at the end of a rank's standard error in which its error is looked for.
const KEPT: usize = 8 << 10;
/// Maximum length of the text of an error, in characters.
const LONGEST: usize = 600;

/// The end of what a rank wrote to standard error.
#[derive(Debug, Default)]
pub(super) struct Tail(Vec<u8>);

impl Tail {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        self.0.drain(..self.0.len().saturating_sub(KEPT));
    }

    /// Returns the last error in these lines, on one line: a panic of Rust, an error that `main` returns, or an
    /// exception of Python with its message; else the last line. Empty if there are no lines.
    pub(super) fn error(&self) -> String {
        let text = String::from_utf8_lossy(&self.0);
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty() && !line.starts_with("note: ")).collect();
        let is_panic = |line: &str| line.starts_with("thread '") && line.contains(" panicked at ");
        let is_start = |line: &&str| line.starts_with("Error: ") || is_panic(line);
        let is_flush = |line: &&str| !line.starts_with(char::is_whitespace);
        let first = lines.iter().rposition(is_start).or_else(|| lines.iter().rposition(is_flush)).unwrap_or(0);
        let error = lines[first..].iter().take_while(|line| !line.eq_ignore_ascii_case("stack backtrace:"));
        let words: Vec<&str> = error.flat_map(|line| line.split_whitespace()).collect();
        words.join(" ").chars().take(LONGEST).collect()
    }
}

/// Returns the rank that an error of gin names as its cause: a rank that is lost or failed, else the one that reported
/// a fault.
fn named(error: &str) -> Option<usize> {
    let ranks = error.match_indices("rank ").filter_map(|(at, word)| {
        let rest = &error[at + word.len()..];
        let end = rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len());
        let after = rest[end..].strip_prefix(" on host ").and_then(|rest| rest.split_once(' '));
        Some((&error[..at], rest[..end].parse().ok()?, after.map_or(rest[end..].trim_start(), |(_, after)| after)))
    });
    let ended = ["is lost", "has left the job", "failed: ", "aborted the job", "did not come within"];
    let lost = ranks.clone().find(|(_, _, after)| ended.iter().any(|words| after.starts_with(words)));
    lost.or_else(|| ranks.clone().find(|(before, ..)| before.ends_with("reported by "))).map(|(_, rank, _)| rank)
}

/// Follows from the error of `rank` to the rank that it names, and so on. Returns the last one.
pub(super) fn cause(mut rank: usize, errors: &[String]) -> usize {
    let mut seen = vec![rank];
    while let Some(next) = named(&errors[rank]).filter(|next| *next < errors.len() && !seen.contains(next)) {
        seen.push(next);
        rank = next;
    }
    rank
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(written: &str) -> String {
        let mut tail = Tail::default();
        written.as_bytes().chunks(7).for_each(|bytes| tail.add(bytes));
        tail.error()
    }

    #[test]
    fn the_last_error_is_found_among_other_lines() {
        for (written, expected) in [
            ("", ""),
            ("one\ntwo\n", "two"),
            ("warning\nError: no such expert: 9\n", "Error: no such expert: 9"),
            ("Error: Parse {\n    line: 3,\n}\n", "Error: Parse { line: 3, }"),
            (
                "x\nthread 'main' (7) panicked at src/main.rs:3:5:\nboom\nnote: run with\nstack backtrace:\n   0: f\n",
                "thread 'main' (7) panicked at src/main.rs:3:5: boom",
            ),
            (
                "Traceback (most recent call last):\n  File \"a.py\", line 1\n    f()\nValueError: no 3\n",
                "ValueError: no 3",
            ),
        ] {
            assert_eq!(error(written), expected);
        }
        let long = error(&format!("{}Error: {}\n", "x\n".repeat(KEPT), "é".repeat(1000)));
        assert!(long.starts_with("Error: é") && long.chars().count() == LONGEST, "{long}");
    }

    #[test]
    fn ranks_that_name_each_other_lead_to_the_cause() {
        let errors = |errors: [&str; 3]| errors.map(str::to_owned);
        let aborted = "communicator was aborted: it ended (reported by rank 2 on host a; back end proxy over peer)";
        let lost =
            "rank 1 on host a is lost: nothing was heard of it for 9 ms (reported by rank 0 on host a; no back end)";
        assert_eq!(cause(0, &errors([aborted, aborted, "Error: mine"])), 2);
        assert_eq!(cause(2, &errors([lost, "", lost])), 1);
        assert_eq!(cause(0, &errors(["cannot connect: rank 2 failed: no memory", "", "no memory"])), 2);
        assert_eq!(cause(0, &errors(["rank 1 aborted the job", "rank 0 aborted the job", ""])), 1, "a circle ends");
        assert_eq!(cause(0, &errors(["rank 7 is lost", "", ""])), 0, "the job has no rank 7");
        assert_eq!(cause(1, &errors(["", "expert 3 has no rank 2", ""])), 1, "of another meaning");
    }
}
