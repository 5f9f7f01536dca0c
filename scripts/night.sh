#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs long searches for faults, with its arguments for `cargo test`. PROGRAMS is the number of random programs. SEEDS
# is the number of seeds of each case of threads that post and flush at once. Runs every search, even after one failed.
# If a search failed, the exit status is not 0, and the last line names the failed searches.

set -uo pipefail
cd "$(dirname "$0")/.."

arguments=("$@")
found=()

# search VARIABLE=VALUE PACKAGE TEST [FILTER...]: runs a test with an environment variable.
search() {
    local variable=$1 package=$2 test=$3
    shift 3
    echo "== $variable $test $*"
    env "$variable" "${CARGO:-cargo}" test "${arguments[@]}" -p "$package" --test "$test" -- "$@" || found+=("$test $*")
}

search GIN_PROGRAMS="${PROGRAMS:-3000}" gin-conformance random_programs
for case in \
    warps_with_and_without_signals_and_more lanes_that_post_with_more \
    gets_have_arrived_after_a_flush_while sources_may_change_after_a_flush_while \
    blocks_of_many_threads_post_together; do
    search GIN_SEEDS="${SEEDS:-600}" gin-conformance virtual_gpu "$case"
done
search GIN_ALL_WAYS=1 gin-conformance virtual_gpu
search GIN_ALL_WAYS=1 gin-device mutations
search GIN_MODEL_MORE_PREEMPTIONS=1 gin-device loom_models

[ ${#found[@]} -eq 0 ] || { printf 'failed:'; printf ' [%s]' "${found[@]}"; echo; exit 1; }
