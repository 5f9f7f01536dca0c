#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Checks the words of the repository: retired names, habits of prose that are hard to read, lines that are too long, and
# paths and links of documents that do not exist. The patterns, their replacements and their exceptions are in
# words.txt. Also checks docs/promises.md: the words of each row stand in its document, and its tests in their files.
#
# usage: words.sh [--count] [FILE...]
#        words.sh --test
#
# Without files it checks all tracked files of the kinds that words.awk supports, and the promises. It prints one line
# for each finding: path:line: found "word": advice. With --count it prints the number of findings in each folder and of
# each rule instead. --test checks the samples at the end of this file: lines with findings and lines without.
# The exit status is 1 if there is a finding, and 2 if words.txt has an invalid line.

set -euo pipefail
cd "$(dirname "$0")/.."

count= test= promises=
case "${1:-}" in
--count) count=1; shift ;;
--test) test=1; shift ;;
esac

list=$(mktemp "${TMPDIR:-/tmp}/gin-words.XXXXXX")
tests=
trap 'rm -rf "$list" ${tests:+"$tests"}' EXIT
# Documents may name new files before they are added.
git ls-files --cached --others --exclude-standard >"$list"

if [ $# -eq 0 ]; then
    mapfile -t files < <(git ls-files -- '*.rs' '*.md' '*.sh' '*.toml' '*.yml' Makefile .ci/run ':!scripts/words.*')
    # A deleted file is listed until its deletion is committed.
    present=()
    for file in "${files[@]}"; do
        [ ! -f "$file" ] || present+=("$file")
    done
    set -- "${present[@]}"
    [ "$count" ] || promises=docs/promises.md
fi

# The locale C treats files as bytes, so that every awk can read every file. words.awk counts UTF-8 characters itself.
check() {
    LC_ALL=C awk -v count="$count" -v root="${tests:+$tests/}" -f scripts/words.awk scripts/words.txt "$list" "$@"
}

# Writes each sample below to a separate file and compares the found words with the expected ones.
self_test() {
    local kind wanted text found file number=0 failed=0
    tests=$(mktemp -d "${TMPDIR:-/tmp}/gin-words.XXXXXX")
    while IFS='|' read -r kind wanted text; do
        number=$((number + 1))
        file="$tests/$number.$kind"
        printf '%b\n' "$text" >"$file"
        echo "$number.$kind" >>"$list"
        found=$(check "$file" | sed -n 's/^[^ ]*: found "\([^"]*\)": .*/\1/p' | paste -sd, -) || true
        if [ "$found" != "$wanted" ]; then
            echo "sample $number: found \"$found\" instead of \"$wanted\" in: $text"
            failed=$((failed + 1))
        fi
    done < <(sed -e "1,/^# KIND.WANTED/d" "$0" | sed -n "s/^#| //p" | sed "s/LONG/$(printf 'x%.0s' {1..131})/")
    echo "words: $number samples, $failed failed"
    [ $number -gt 0 ] && [ $failed -eq 0 ]
}

# Checks a table of promises of the documents in a folder.
check_promises() {
    LC_ALL=C awk -v folder="$1/" -f scripts/promises.awk "$2"
}

# Checks tables with one row of the samples each. They are about a document and a file of tests that stand there, too.
test_promises() {
    local wanted text found number=0 failed=0
    part() { sed -n "s/^#$1 \{0,1\}//p" "$tests/source"; }
    sed -e "1,/^# PROMISES/d" "$0" >"$tests/source"
    part D >"$tests/document.md"
    part T >"$tests/tests.rs"
    while IFS='|' read -r wanted text; do
        number=$((number + 1))
        printf '%b\n' "${text//TESTS/$tests/tests.rs}" >"$tests/promises.md"
        found=$(check_promises "$tests" "$tests/promises.md" | sed -n 's/.*found "\([^"]*\)": .*/\1/p' | paste -sd, -) || true
        if [ "${found//$tests\//}" != "$wanted" ]; then
            echo "row $number: found \"$found\" instead of \"$wanted\" in: $text"
            failed=$((failed + 1))
        fi
    done < <(part '>')
    echo "promises: $number samples, $failed failed"
    [ $number -gt 0 ] && [ $failed -eq 0 ]
}

status=0
if [ "$test" ]; then
    self_test || status=1
    test_promises || status=1
else
    check "$@" || status=$?
    [ ! "$promises" ] || check_promises docs "$promises" || status=1
fi
exit $status

# KIND|WANTED (found words, separated by commas)|TEXT (\n is the end of a line)
#| rs||/// Returns the queue.\nfn queue() {}
#| rs|whoever|/// Rings for whoever has published.
#| rs|The|/// The queue.\n#[inline(always)]\npub(crate) const unsafe fn queue() {}
#| rs|See|/// See there.\n// Why.\nfn queue() {}
#| rs||/// The queue.\nstruct Queue;\nfn queue() {}
#| rs|is told|fn f() { panic!("it is told twice") } // fine
#| rs|is told|/// The host is\n/// told of it.
#| rs|is to be|/// A window that is to\n/// be freed.
#| rs||let is_told = told("a // b", '"'); // Counts.
#| rs|who|let x = r#"a " b"#; // one who waits
#| rs|who|let x = "a\n    who"; let y = "b";
#| rs||/// See `who` and `is told`.\n/// ```\n/// let whoever = 1;\n/// ```
#| rs|What|/// What a rank gives.
#| rs|Whether|x(); // Whether it is done.
#| rs|who,Who|/// - Who comes first.
#| rs||/// # What works\n///\n/// It works.
#| rs|what is|/// what is left
#| rs||/// Returns the number of\n/// what is left.
#| rs|Ledger|struct Ledger;
#| rs|first_packet|let first_packet = 1;
#| rs||/// accompany, rail team
#| rs|`taken`|/// stores `taken` with release
#| rs|Stop::Fault|return Err(Stop::Fault(x));
#| rs||send(Command::Stop);
#| rs|fn ranks_are_told,fn the_one_who_|fn ranks_are_told() {}\nfn the_one_who_rings() {}
#| rs|poll_far|self.status.poll_far(1); let so_far = 2;
#| rs|Told|/// Told of every post.
#| rs|135 characters|/// LONG
#| rs||let x = "LONG";
#| md||A link [to it](https://example.org/LONG).
#| md||| table | LONG |
#| md||```text\nLONG who\n```
#| md|131 characters|LONG
#| md|so many|There are so\nmany of them.
#| md|What|Text.\n\nWhat follows.
#| md||## What works on what
#| md||For people who write kernels.
#| md|README2.md|See [it](/README2.md).
#| md|scripts/no-such.sh|See `scripts/no-such.sh` and `scripts/words.sh`, `a/b`.
#| md|src/gone.rs,scripts/gone.sh|See `src/gone.rs:12`, `scripts/gone.sh --count`, `scripts/words.sh --count`, `cd src/gone`.
#| md|What|> What is quoted.
#| md||~~~\nwho\n~~~
#| md|#nowhere|## Some heading\n[a](#some-heading) [b](#nowhere)
#| md|gin-gone/src/lib.rs|See `gin-gone/src/lib.rs`.
#| sh|who|echo who\n# for one who waits
#| toml|Meetings|a = 1 # Meetings of ranks

# PROMISES: a document, a file of tests, then WANTED|TEXT as above; TESTS is the path of the file of tests
#D The first sentence ends
#D on the next line. A `call` returns.
#D
#D | input | result |
#D
#T #[test]
#T #[ignore = "reason"]
#T fn a_test_of_its_own() {}
#T fn a_helper() {}
#T /// fn example_that_does_not_compile() {}
#T list.case(&format!("a_case_for_each_{name}"), run);
#T ("a_trial_of_a_list", a_helper),
#T def test_of_python(tmp_path):
#T def not_of_python():
#T #[cfg(doctest)]
#T pub struct Shown;
#T pub struct Other;
#T models! {
#T     fn a_model() {
#T     fn a_helper_of_models(word: u64) {
#> |## [A](document.md)\n\n| words | tests |\n| --- | --- |\n| first sentence ends on the next line | `TESTS::a_test_of_its_own` |
#> |## [A](document.md)\n| A `call` returns | `TESTS::a_case_for_each` `TESTS::a_trial_of_a_list` |
#> |## [A](document.md)\n| input | result | `TESTS::example_that_does_not_compile` `TESTS::test_of_python` |
#> Other,a_helper_of_models|## [A](document.md)\n| A `call` | `TESTS::Shown` `TESTS::a_model` `TESTS::Other` `TESTS::a_helper_of_models` |
#> second sentence|## [A](document.md)\n| second sentence | `TESTS::a_test_of_its_own` |
#> a_helper|## [A](document.md)\n| A `call` | `TESTS::a_helper` |
#> a_test_of_its,not_of_python|## [A](document.md)\n| A `call` | `TESTS::a_test_of_its` `TESTS::not_of_python` |
#> tests.gone.rs|## [A](document.md)\n| A `call` | `tests.gone.rs::a_test_of_its_own` |
#> tests.rs|## [A](document.md)\n| A `call` | `TESTS` |
#> A `call`|## [A](document.md)\n| A `call` | - |
#> A `call`|## [A](document.md)\n| A `call` | `TESTS::a_trial_of_a_list` |\n| A `call` | `TESTS::a_trial_of_a_list` |
#> [A](gone.md),A `call`|## [A](gone.md)\n| A `call` | `TESTS::a_trial_of_a_list` |
