// SPDX-License-Identifier: MIT OR Apache-2.0
//! The exit statuses of the command.

/// The outcome of the command. Each outcome has its own exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// All results were right.
    Right,
    /// A result was wrong and was printed, or a check failed.
    Wrong,
    /// An argument or a variable was invalid, or this machine lacks what it names.
    Refused,
    /// The run failed.
    Failed,
    /// A launched program ended with this status.
    Code(u8),
}

impl End {
    /// Returns the exit status.
    pub(crate) const fn status(self) -> u8 {
        match self {
            Self::Right => 0,
            Self::Wrong => 1,
            Self::Refused => 2,
            Self::Failed => 3,
            Self::Code(code) => code,
        }
    }
}

/// All exit statuses with their causes: the end of every help, and a section of the man page. `docs/command.md` has the
/// same list.
pub(super) const STATUSES: [(&str, &str); 7] = [
    ("0", "all results were right"),
    ("1", "a result was wrong, or a check failed"),
    ("2", "an argument or a variable is invalid, or this machine lacks what it names"),
    ("3", "the run failed: a fault, a passed deadline, a lost rank, an error of the system"),
    ("126", "gin launch: the program cannot be started"),
    ("127", "gin launch: the program does not exist"),
    ("N", "gin launch: the status of the first rank that failed, 128 plus the signal's number if a signal ended it"),
];

/// Returns the list of exit statuses as text.
pub(super) fn list() -> String {
    let lines: Vec<String> = STATUSES.iter().map(|(status, cause)| format!("  {status:<4} {cause}")).collect();
    format!("Exit status:\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_each_outcome_and_the_document_has_the_list() {
        for end in [End::Right, End::Wrong, End::Refused, End::Failed] {
            assert!(STATUSES.iter().any(|(status, _)| *status == end.status().to_string()), "{end:?}");
        }
        let document = include_str!("../../docs/command.md");
        for (status, cause) in STATUSES {
            assert!(
                document.contains(&format!("| {status} | {} |", cause.replace("gin launch", "`gin launch`"))),
                "{cause}"
            );
        }
    }
}
