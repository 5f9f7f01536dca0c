#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs all tests of the workspace, also those of the command, with the arguments for `cargo test`. Ends with what the
# failed tests printed, the ten slowest test programs and the sum over all tests:
#
#   N passed, N failed, N skipped
#
# The exit status is not 0 if a test failed, if a crate did not compile, or if no test ran.

set -euo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp "${TMPDIR:-/tmp}/gin-test.XXXXXX")
trap 'rm -f "$log"' EXIT

# The pipe hides the terminal from cargo.
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-always}"
fi

status=0
# Every test binary runs, also after one that failed, so that the sum covers all of them.
"${CARGO:-cargo}" test --workspace --features gin/command --no-fail-fast "$@" </dev/null 2>&1 | tee "$log" || status=${PIPESTATUS[0]}

awk -v status="$status" '
    # Removes colours and carriage returns.
    { gsub(/\033\[[0-9;]*m|\r/, "") }
    /^ *Running / { program = $(NF - 1); sub(/.*\//, "", $NF); sub(/-[^-]*$/, "", $NF); program = $NF ": " program }
    # The outputs of failed tests begin with `---- NAME`, and end before the list of their names.
    /^---- / { shown = 0; printing = 1 }
    /^failures:$|^test result: / { printing = 0 }
    printing && shown++ < 40 { outputs = outputs $0 "\n" }
    / \.\.\. FAILED$/ { outputs = outputs "FAILED in " program ": " $0 "\n" }
    /^ *Doc-tests / { program = $NF ": examples of the docs" }
    # The closing line of libtest and of libtest-mimic:
    # test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) == "passed;") passed += $i
            if ($(i + 1) == "failed;") failed += $i
            if ($(i + 1) == "ignored;") skipped += $i
        }
        times = times sprintf("%9s  %s\n", $NF, program)
    }
    END {
        printf "%s", outputs
        fflush()
        if (status != 0 && failed == 0) print "cargo test ended with status " status
        if (passed + failed == 0) print "no test ran"
        slowest = "sort -rn | head -n 10"
        printf "%s", times | slowest
        close(slowest)
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0 || status != 0 || passed == 0
    }
' "$log"
