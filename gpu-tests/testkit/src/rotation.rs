// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cases that take turns.

/// Returns the number in an environment variable, if it is set.
///
/// # Panics
/// If the variable's value is not a number.
#[must_use]
pub fn number_from_env(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} must be a number, not {text:?}")))
}

/// The runs among which cases take turns.
const TURNS: usize = 3;

/// Returns whether this run includes a case in a way to run it: always, unless `GIN_ROTATION=n` makes the run a third.
/// Then each way has every third case, and each case every third way; the numbers n to n + 2 together include all.
///
/// # Panics
/// If the variable's value is not a number.
#[must_use]
pub fn in_rotation(way: usize, case: usize) -> bool {
    number_from_env("GIN_ROTATION").is_none_or(|number| (way + case + number as usize).is_multiple_of(TURNS))
}

/// Returns the cases that this run includes in a way to run them: the cases for which [`in_rotation`] returns `true`.
///
/// # Panics
/// If `GIN_ROTATION` is not a number.
pub fn rotation<T>(way: usize, cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    cases.into_iter().enumerate().filter(move |(case, _)| in_rotation(way, *case)).map(|(_, case)| case)
}
