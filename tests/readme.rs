// SPDX-License-Identifier: MIT OR Apache-2.0
//! The README's examples are those of the repository.

/// Returns the first block of code below this heading.
fn code_below<'a>(text: &'a str, heading: &str) -> &'a str {
    let (_, below) = text.split_once(heading).unwrap_or_else(|| panic!("the document has no heading {heading:?}"));
    let (_, code) = below.split_once("```rust\n").unwrap_or_else(|| panic!("no code below {heading:?}"));
    code.split_once("```").unwrap_or_else(|| panic!("the code below {heading:?} does not end")).0
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[test]
fn the_kernel_in_the_readme_is_that_of_the_example() {
    let (readme, example) = (include_str!("../README.md"), include_str!("../examples/kernels/src/ring_round.rs"));
    let code = code_below(readme, "## A kernel");
    let (line, kernel) = code.split_once('\n').unwrap();
    assert!(example.lines().any(|other| other == line), "{line}");
    let (kernel, example) = (words(kernel), words(example));
    assert!(kernel.len() > 50, "{kernel:?}");
    assert!(example.windows(kernel.len()).any(|part| part == kernel), "the kernels differ");
}
