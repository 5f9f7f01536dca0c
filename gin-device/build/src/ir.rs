// SPDX-License-Identifier: MIT OR Apache-2.0

//! LLVM's IR as text, for a compiler of another version of LLVM.
//!
//! Bitcode of a newer version is refused as a whole. Of the text, an older version refuses the names that it does not
//! know. Triton 3.6 has a state of LLVM from before the release of 22, which rustc 1.96 has. The functions of gin use
//! two names that this state does not know.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::BuildError;
use crate::sources;

/// A hint for the optimiser on declarations. The program means the same without it.
const HINT: &str = " nocreateundeforpoison";

/// The vote of a block at its barrier 0, by its name since LLVM 22.
const VOTE: &str = "@llvm.nvvm.barrier.cta.red.or.aligned.all(i32 0, i1 ";
const DECLARATION: &str = "declare i1 @llvm.nvvm.barrier.cta.red.or.aligned.all(i32, i1)";

/// The same by the name before, which later versions of LLVM replace when they read it. Convergent, so that LLVM
/// neither duplicates nor merges the barriers of two branches.
const OLDER_VOTE: &str = "@gin.vote(i1 ";
const OLDER_DECLARATION: &str = "declare i32 @llvm.nvvm.barrier0.or(i32) convergent nounwind

define internal i1 @gin.vote(i1 %bit) alwaysinline convergent nounwind {
  %word = zext i1 %bit to i32
  %any = call i32 @llvm.nvvm.barrier0.or(i32 %word) convergent
  %some = icmp ne i32 %any, 0
  ret i1 %some
}
";

/// Names that some versions of LLVM do not know and that have no replacement here: votes at named barriers.
const WITHOUT_REPLACEMENT: &str = "@llvm.nvvm.barrier.cta.red.";

/// Writes the text of a module for compilers of other versions.
pub(crate) fn write(from: &Path, to: PathBuf) -> Result<PathBuf, BuildError> {
    let text = fs::read_to_string(from).map_err(BuildError::io("read", from))?;
    let text = for_other_versions(&text).map_err(|name| BuildError::Ir { path: from.to_owned(), name })?;
    sources::replace(&to, &text)?;
    Ok(to)
}

/// Returns the text in names that older and newer versions of LLVM know. Functions take architecture and features from
/// the module that they are linked into.
///
/// # Errors
/// The line with a name that has no replacement.
fn for_other_versions(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        if line.starts_with(DECLARATION) {
            out.push_str(OLDER_DECLARATION);
        } else if line.starts_with("attributes ") {
            out.push_str(&without(&without(line, " \"target-cpu\"="), " \"target-features\"=").replace(HINT, ""));
        } else {
            out.push_str(&line.replace(VOTE, OLDER_VOTE));
        }
        out.push('\n');
    }
    match out.lines().find(|line| line.contains(WITHOUT_REPLACEMENT)) {
        Some(line) => Err(line.trim().to_owned()),
        None => Ok(out),
    }
}

/// Returns the line without an attribute and its value in quotes.
fn without(line: &str, name: &str) -> String {
    let parts = line.split_once(name).and_then(|(before, rest)| {
        let (_, after) = rest.strip_prefix('"')?.split_once('"')?;
        Some(format!("{before}{after}"))
    });
    parts.unwrap_or_else(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_version_are_replaced_and_the_target_is_left_to_the_caller() {
        let text = "  %a = tail call i1 @llvm.nvvm.barrier.cta.red.or.aligned.all(i32 0, i1 %b) #7\n\
                    declare i1 @llvm.nvvm.barrier.cta.red.or.aligned.all(i32, i1) unnamed_addr #7\n\
                    attributes #7 = { convergent \"target-cpu\"=\"sm_90\" \"target-features\"=\"+ptx85,+ptx86\" }\n\
                    attributes #8 = { nocallback nocreateundeforpoison nofree }\n";
        let out = for_other_versions(text).unwrap();
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines[0], "  %a = tail call i1 @gin.vote(i1 %b) #7");
        assert!(out.contains("define internal i1 @gin.vote(i1 %bit) alwaysinline convergent"), "{out}");
        assert!(lines.contains(&"attributes #7 = { convergent }"), "{out}");
        assert!(lines.contains(&"attributes #8 = { nocallback nofree }"), "{out}");
    }

    #[test]
    fn a_vote_at_a_named_barrier_is_refused_by_its_line() {
        for vote in ["all(i32 1, i1 %b)", "count(i32 0, i32 64, i1 %b)"] {
            let line = format!("%a = call i1 @llvm.nvvm.barrier.cta.red.or.aligned.{vote}");
            assert_eq!(for_other_versions(&format!("  {line}\n")).unwrap_err(), line);
        }
    }
}
