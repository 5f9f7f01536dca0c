# SPDX-License-Identifier: MIT OR Apache-2.0
#
# The check behind words.sh, for any awk. Arguments: words.txt, the list of the repository's files, then files to check.
# For each line it separates code from text (comments, strings, Markdown) and applies the rules that words.txt gives.

# Reads one line of words.txt.
function rule(line,    at, advice, kind, where, pattern) {
    if (line ~ /^[ \t]*(#|$)/) return
    at = index(line, " :: ")
    if (!at) bad(line)
    advice = substr(line, at + 4)
    line = substr(line, 1, at - 1)
    kind = word_of(line); line = rest_of(line)
    if (kind == "keep") {
        keeps = keeps (keeps == "" ? "" : "|") line
        return
    }
    where = word_of(line); pattern = rest_of(line)
    if (kind == "width") {
        width[where] = pattern + 0
        return
    }
    if (pattern == "") bad(line)
    if (kind == "allow") {
        allows++
        allow_path[allows] = where; allow_word[allows] = pattern
        return
    }
    if (kind !~ /^(part|word|text|open|start|verb|file)$/) bad(line)
    rules++
    rule_kind[rules] = kind; rule_advice[rules] = advice; rule_name[rules] = pattern
    at = index(where, "@")
    rule_in[rules] = at ? substr(where, 1, at - 1) : where
    rule_path[rules] = at ? substr(where, at + 1) : ""
    if (rule_in[rules] !~ /^(code|prose|both)$/) bad(line)
    if (kind == "word" || kind == "text") pattern = "(^|[^A-Za-z0-9_])(" pattern ")([^A-Za-z0-9_]|$)"
    if (kind == "open" || kind == "start" || kind == "verb") pattern = "^(" pattern ")([^A-Za-z0-9_]|$)"
    rule_regex[rules] = pattern
}

function bad(line) {
    print "words.txt:" FNR ": cannot be read: " line > "/dev/stderr"
    status = 2
    exit 2
}

function word_of(line) { return match(line, /^[^ \t]+/) ? substr(line, 1, RLENGTH) : "" }
function rest_of(line) { sub(/^[^ \t]+[ \t]*/, "", line); sub(/[ \t]+$/, "", line); return line }

# Starts a file: which rules and exceptions apply to it.
function begin(path,    i) {
    name = path
    sub(/^\.\//, "", name)
    if (root != "" && index(name, root) == 1) name = substr(name, length(root) + 1)
    read[name] = 1
    state = ""; fence = 0; block = ""; carry = ""; doc = ""
    lang = "sh"
    if (name ~ /\.rs$/) lang = "rs"
    if (name ~ /\.md$/) lang = "md"
    limit = lang == "md" ? width["markdown"] : width["comment"]
    active = 0
    for (i = 1; i <= rules; i++)
        if (rule_path[i] == "" || name ~ rule_path[i]) {
            if (rule_kind[i] == "file") {
                if (match(name, rule_regex[i])) found(i, substr(name, RSTART, RLENGTH), 1)
            } else on[++active] = i
        }
}

function found(i, word, line,    k, folder) {
    for (k = 1; k <= allows; k++)
        if (name ~ allow_path[k] && (allow_word[k] == "*" || rule_name[i] ~ allow_word[k] || word ~ allow_word[k])) return
    report(line, word, rule_advice[i], rule_name[i])
}

function report(line, word, advice, label,    folder) {
    findings++
    folder = name
    if (folder ~ /^[^\/]*\/(src|tests)\//) sub(/\//, "/\n", folder)
    else sub(/^[^\/]*\/([^\/]*\/)?/, "&\n", folder)
    sub(/\n.*/, "", folder)
    in_folder[folder]++; of_rule[label]++
    if (!count) printf "%s:%d: found \"%s\": %s\n", name, line, word, advice
}

# Divides a line of Rust into `code`, `strings` and `comment`; `kind` is the comment's mark. Strings may be continued.
function lex(line,    at, end) {
    code = ""; strings = ""; comment = ""; kind = ""
    while (line != "") {
        if (state == "string") {
            if (match(line, /^([^"\\]|\\.)*"/)) { end = RLENGTH; state = "" } else end = length(line) + 1
            strings = strings substr(line, 1, end - 1) " "
            line = substr(line, end + 1)
        } else if (state != "") {
            at = index(line, state)
            end = at ? at : length(line) + 1
            if (state == "*/") comment = comment substr(line, 1, end - 1) " "
            else strings = strings substr(line, 1, end - 1) " "
            line = substr(line, end + length(state))
            if (at) state = ""
        } else if (match(line, /\/\/|\/\*|r#+"|"|'"'|'\\"'/)) {
            code = code substr(line, 1, RSTART - 1)
            at = substr(line, RSTART, RLENGTH)
            line = substr(line, RSTART + RLENGTH)
            if (at == "//") {
                kind = "//"
                if (line ~ /^[\/!]/) { kind = kind substr(line, 1, 1); line = substr(line, 2) }
                comment = comment line
                line = ""
            } else if (at == "/*") state = "*/"
            else if (at == "\"") state = "string"
            else if (at ~ /^r/) { sub(/^r/, "", at); sub(/"$/, "", at); state = "\"" at }
        } else {
            code = code line
            line = ""
        }
    }
}

# Applies the rules to the parts of one line. `opens` says that the text begins a block.
function check(code, text, opens,    i, n, k, lower, plain, subject, joined) {
    if (keeps != "") { gsub(keeps, " ", text); gsub(keeps, " ", code) }
    plain = text
    gsub(/`[^`]*`/, "`_`", plain)
    lower = tolower(plain)
    gsub(/[ \t]+/, " ", lower); sub(/^ /, "", lower); sub(/ $/, "", lower)
    joined = opens ? lower : carry " " lower
    subject = plain
    sub(/^[ \t]*(([-*+>]|[0-9]+[.)])[ \t]+)?[*_]*/, "", subject)
    for (n = 1; n <= active; n++) {
        i = on[n]
        k = rule_kind[i]
        if (k == "part" || k == "word") {
            if (rule_in[i] != "prose" && match(code, rule_regex[i])) found(i, trim(substr(code, RSTART, RLENGTH)), FNR)
            else if (rule_in[i] != "code" && match(text, rule_regex[i])) found(i, trim(substr(text, RSTART, RLENGTH)), FNR)
        } else if (text == "") continue
        else if (k == "text") {
            # A phrase may begin in the last two words of the line before.
            if (match(joined, rule_regex[i]) && RSTART + RLENGTH - 1 > length(joined) - length(lower))
                found(i, trim(substr(joined, RSTART, RLENGTH)), FNR)
        } else if (k == "open" && !heading && match(subject, rule_regex[i])) found(i, trim(substr(subject, RSTART, RLENGTH)), FNR)
        else if (k == "start" && opens && !heading && match(subject, rule_regex[i])) found(i, trim(substr(subject, RSTART, RLENGTH)), FNR)
    }
    carry = match(lower, /[^ ]+ [^ ]+$/) ? substr(lower, RSTART) : lower
}

function trim(word) {
    gsub(/^[^A-Za-z0-9_`]+|[^A-Za-z0-9_`]+$/, "", word)
    return word
}

# Number of characters: bytes of UTF-8 that continue a character are not counted.
function characters(line) { gsub(/[\200-\277]/, "", line); return length(line) }

function too_long(line) {
    if (characters(line) > limit) report(FNR, characters(line) " characters", "break the line after at most " limit, "width")
}

# Paths in backquotes and links must exist. A name is a path if it begins with a folder of the repository, or with gin-.
# A line number or arguments may follow it.
function paths(line,    token, target, folder) {
    folder = name
    if (!sub(/[^\/]*$/, "", folder)) folder = ""
    token = line
    while (match(token, /`[^`]+`/)) {
        target = substr(token, RSTART + 1, RLENGTH - 2)
        token = substr(token, RSTART + RLENGTH)
        sub(/[: ].*/, "", target)
        if (target !~ /\// || target !~ /^[A-Za-z0-9_.\/-]+$/) continue
        sub(/\/$/, "", target)
        if ((top[first(target)] || target ~ /^gin-/) && !exists[target])
            report(FNR, target, "no such file or folder in the repository", "path")
    }
    token = line
    gsub(/`[^`]*`/, "", token)
    while (match(token, /\]\([^)]*\)/)) {
        target = substr(token, RSTART + 2, RLENGTH - 3)
        token = substr(token, RSTART + RLENGTH)
        if (target ~ /^[a-z]+:/) continue
        # A heading of this or another document.
        anchor = ""
        if (match(target, /#/)) { anchor = substr(target, RSTART + 1); target = substr(target, 1, RSTART - 1) }
        target = target == "" ? name : resolve(folder target)
        if (!exists[target]) report(FNR, target, "the link leads to no file of the repository", "link")
        else if (anchor != "") {
            wanted++
            wanted_in[wanted] = name; wanted_at[wanted] = FNR; wanted_file[wanted] = target; wanted_anchor[wanted] = anchor
        }
    }
}

function first(path) { sub(/\/.*/, "", path); return path }

function resolve(path) {
    while (sub(/(^|\/)\.\//, "/", path)) {}
    while (match(path, /[^\/]+\/\.\.\//)) path = substr(path, 1, RSTART - 1) substr(path, RSTART + RLENGTH)
    sub(/^\//, "", path); sub(/\/$/, "", path)
    return path
}

# Remembers a heading under the name that GitHub gives it.
function title(line,    slug) {
    sub(/^#+ +/, "", line)
    gsub(/\]\([^)]*\)/, "", line)
    slug = tolower(line)
    gsub(/[^a-z0-9 _-]/, "", slug)
    gsub(/ /, "-", slug)
    headings[name "#" slug] = 1
}

function markdown(line,    text, opens, bare) {
    heading = line ~ /^#+ /
    if (line ~ /^[ \t]*(```|~~~)/) { fence = !fence; block = ""; carry = ""; return }
    if (fence) { check(line, "", 0); return }
    if (heading) title(line)
    text = line
    # The text of a link is prose, its target is not.
    gsub(/\]\([^)]*\)/, "]", text)
    opens = block == "" || heading || line ~ /^[ \t]*([-*+]|[0-9]+[.)])[ \t]/
    check("", text, opens)
    block = line ~ /^[ \t]*$/ || heading ? "" : "text"
    bare = text
    gsub(/<?https?:[^ ]*/, "", bare)
    if (line !~ /^[ \t]*\|/) too_long(bare)
    paths(line)
}

# Checks the first line of a function's doc comment. `doc` is that line, up to the function's own line.
function verb(line,    n, i) {
    if (line ~ /^[ \t]*$/ && kind == "///") {
        if (doc == "") { doc = comment; doc_line = FNR; sub(/^ */, "", doc) }
        return
    }
    # A macro's doc comment may begin with the text of its caller.
    if (line ~ /^[ \t]*#\[doc = / && doc == "") doc = "Documents"
    # Attributes and comments may stand between doc comment and function.
    if (line ~ /^[ \t]*(#|[\])]|$)/ && (kind != "" || line !~ /^[ \t]*$/)) return
    if (doc != "" && line ~ /^[ \t]*(pub(\([a-z]+\))? +)?((const|async|unsafe|extern) +)*fn /)
        for (n = 1; n <= active; n++) {
            i = on[n]
            if (rule_kind[i] == "verb" && doc !~ rule_regex[i]) found(i, word_of(doc), doc_line)
        }
    doc = ""
}

function rust(line,    opens) {
    lex(line)
    verb(code)
    heading = comment ~ /^ *#+ /
    # A code block or table in a comment is not prose.
    if (kind ~ /^\/\/[\/!]$/ && comment ~ /^ *```/) { fence = !fence; block = kind; carry = ""; return }
    if (kind == "") fence = 0
    opens = kind != block || comment ~ /^ *$/ || blank || comment ~ /^ *([-*+]|[0-9]+[.)])[ \t]/
    if (fence) check(code comment, strings, 0)
    else if (comment != "" && strings != "") { check(code, strings, 1); check("", comment, opens) }
    else check(code, comment strings, opens && strings == "")
    blank = kind != "" && comment ~ /^ *$/
    block = code ~ /^[ \t]*$/ ? kind : ""
    if (kind != "" && comment !~ /^ *\|/ && comment !~ /https?:/) too_long(line)
}

function other(line,    at, text, opens) {
    text = ""; heading = 0
    if (match(line, /(^|[ \t])#+([ \t]|$)/)) { text = substr(line, RSTART + RLENGTH); line = substr(line, 1, RSTART - 1) }
    opens = block == "" || blank
    check(line, text, opens)
    blank = text == ""
    block = text != "" || line ~ /^#/ ? "#" : ""
    if (text != "" && characters($0) > limit && $0 !~ /https?:/) too_long($0)
}

FILENAME == ARGV[1] { rule($0); next }
FILENAME == ARGV[2] {
    path = $0
    exists[path] = 1
    top[first(path)] = 1
    while (sub(/\/[^\/]*$/, "", path)) exists[path] = 1
    next
}
FNR == 1 { begin(FILENAME); blank = 0 }
lang == "md" { markdown($0); next }
lang == "rs" { rust($0); next }
{ other($0) }

END {
    if (status == 2) exit 2
    for (i = 1; i <= wanted; i++) {
        # Documents that were not read in this run have no headings here.
        if (!(wanted_file[i] in read)) {
            read[wanted_file[i]] = 1
            name = wanted_file[i]
            fence = 0
            while ((getline line < name) > 0) {
                if (line ~ /^[ \t]*```/) fence = !fence
                else if (!fence && line ~ /^#+ /) title(line)
            }
            close(name)
        }
        if (!((wanted_file[i] "#" wanted_anchor[i]) in headings)) {
            name = wanted_in[i]
            report(wanted_at[i], "#" wanted_anchor[i], wanted_file[i] " has no such heading", "anchor")
        }
    }
    if (count) {
        for (folder in in_folder) printf "%6d  %s\n", in_folder[folder], folder | "sort -k2"
        close("sort -k2")
        print ""
        for (label in of_rule) printf "%6d  %s\n", of_rule[label], label | "sort -rn"
        close("sort -rn")
    }
    printf "words: %d findings\n", findings
    exit findings > 0
}
