#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs small trials of one rank and one kernel at a time under NVIDIA's compute-sanitizer, with the test binary beside
# this script: memcheck, synccheck, and racecheck, which checks shared memory only. Other trials would hang, because the
# sanitizer runs kernels one after another while ranks wait for each other. Results are written to $OUT, or to the
# folder out beside this script.

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is missing; it is part of the CUDA toolkit" >&2; exit 2; }

trials="ep/one_rank_sends_rows_to_itself a_rank_puts_to_itself a_single_rank_passes_every_barrier an_unknown_pointer_is_in_no_window_and_a_known_one_is_found"
failed=0
for tool in memcheck racecheck synccheck; do
    options=""
    # gin counts the parameters of a kernel by asking for them until the driver returns an error.
    [ "$tool" = memcheck ] && options="--report-api-errors no"
    for trial in $trials; do
        log="$out/sanitize-$tool-${trial//\//-}.log"
        # shellcheck disable=SC2086
        timeout -k 5 "${GIN_STEP_SECONDS:-90}" compute-sanitizer --tool "$tool" $options --error-exitcode 9 ./gpu-tests --exact "cuda/1_gpu/$trial" >"$log" 2>&1 </dev/null
        status=$?
        # The trial itself must also have run and passed.
        if [ $status -eq 0 ] && grep -q '^test result: ok. 1 passed' "$log"; then
            echo "$tool $trial: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/^=* *//')"
        else
            echo "$tool $trial: failed with status $status"
            tail -15 "$log"
            failed=$((failed + 1))
        fi
    done
done
[ "$failed" -eq 0 ]
