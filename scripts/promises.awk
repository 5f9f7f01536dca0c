# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Checks a table of promises, for any awk. words.sh passes docs/promises.md, whose head says what a row has. A row is
# wrong if the document under whose heading it stands does not contain its words, or if a test is not in its file.
# A line break in the document counts as a space.

function report(word, advice) {
    findings++
    printf "%s:%d: found \"%s\": %s\n", FILENAME, FNR, word, advice
}

function trim(text) {
    sub(/^[ \t]+/, "", text); sub(/[ \t]+$/, "", text)
    return text
}

# Returns the words of a file, with one space between two.
function words_of(path,    line, all) {
    if (path in words) return words[path]
    all = " "
    while ((getline line < path) > 0) all = all line " "
    close(path)
    gsub(/[ \t]+/, " ", all)
    return words[path] = all
}

# Collects the names of the tests of a file: functions below `#[test]`, in `models!`, of Python, and of examples in
# comments, which run too; items of `#[cfg(doctest)]`; and the names of trials and cases, which are strings. `format!` may
# append to a name.
function read_tests(path,    line, is_test, has_models, name) {
    if (path in tests) return
    tests[path] = 0
    while ((getline line < path) > 0) {
        tests[path]++
        if (line ~ /^[ \t]*#\[(test|ignore|cfg\(doctest\))/) is_test = 1
        else if (line ~ /^models! *\{/) has_models = 1
        else if (line ~ /^[ \t]*($|#|\/\/\/? )/ && line !~ /^[ \t]*\/\/\/ /) continue
        else if (match(line, /(^|[ \t])(fn|def|struct)[ \t]+[A-Za-z0-9_]+/)) {
            name = substr(line, RSTART, RLENGTH)
            sub(/.*[ \t]/, "", name)
            if (is_test || has_models && line ~ /\(\) \{$/ || line ~ /^[ \t]*\/\/[\/!]/ || name ~ /^test_/) is[path, name] = 1
            is_test = 0
        }
        while (match(line, /"[a-z][a-z0-9]*_[a-z0-9_]*["{]/)) {
            name = substr(line, RSTART + 1, RLENGTH - 2)
            line = substr(line, RSTART + RLENGTH)
            sub(/_$/, "", name)
            is[path, name] = 1
        }
    }
    close(path)
}

function check_test(token,    at, path, name) {
    at = index(token, "::")
    path = substr(token, 1, at - 1); name = substr(token, at + 2)
    if (!at || name == "") { report(token, "write `PATH::NAME`"); return }
    read_tests(path)
    if (!tests[path]) report(path, "no such file")
    else if (!((path, name) in is)) report(name, "no test of this name in " path)
}

/^## / {
    document = ""
    if (match($0, /\([^)]*\.md\)/)) document = substr($0, RSTART + 1, RLENGTH - 2)
    if (document == "" || words_of(folder document) == " ") report(trim(substr($0, 3)), "name a document in docs by a link")
    next
}
!/^\|/ || /^\| (words|---) \|/ { next }
{
    rows++
    # The tests stand behind the last bar but one, so the words may contain bars.
    row = trim($0)
    sub(/^\|/, "", row); sub(/[ \t]*\|$/, "", row)
    if (document == "" || !match(row, / \| [^|]*$/)) { report(row, "write | words | tests | below the heading of a document"); next }
    text = trim(substr(row, 1, RSTART)); rest = substr(row, RSTART + 3)
    if (text == "" || !index(words_of(folder document), text)) report(text, "not in " document ": quote it as it is, or remove the row")
    if ((document, text) in seen) report(text, "a second row of these words")
    seen[document, text] = 1
    number = 0
    while (match(rest, /`[^`]+`/)) {
        number++
        token = substr(rest, RSTART + 1, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        check_test(token)
    }
    if (!number) report(text, "no test")
}
END {
    printf "promises: %d rows, %d findings\n", rows, findings
    exit findings > 0 || rows == 0
}
