#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs small trials under NVIDIA's compute-sanitizer, with the binaries beside this script: memcheck, synccheck, and
# racecheck, which checks shared memory only. Prints one line for each tool and set of trials. The trials have one rank
# and one kernel at a time. Others would hang, because the sanitizer runs the kernels of a process one after another
# while ranks wait for each other. Two processes, each with its own GPU, exchange rows as well, if there are two GPUs.
# A tool ends after GIN_STEP_SECONDS (90). Results are written to $OUT, or to the folder out beside this script.
#
# usage: sanitize.sh [SET...]
#   one_rank_   expert parallelism in all its layouts, and bulk copies
#   TRIAL       the trial cuda/1_gpu/TRIAL
#   moe         a mixture of experts of two processes
# Without arguments all of them, with three trials of the conformance suite.
# `GIN_STEP_SECONDS=55 ./sanitize.sh one_rank_` takes three minutes at most.

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
limit="${GIN_STEP_SECONDS:-90}"
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is missing; it is part of the CUDA toolkit" >&2; exit 2; }

sets="$*"
if [ -z "$sets" ]; then
    sets="one_rank_ a_rank_puts_to_itself a_single_rank_passes_every_barrier an_unknown_pointer_is_in_no_window_and_a_known_one_is_found"
    [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ] || sets="$sets moe"
fi
failed=0
for tool in memcheck racecheck synccheck; do
    checked=(compute-sanitizer --tool "$tool" --error-exitcode 9)
    # gin counts the parameters of a kernel by asking for them until the driver returns an error.
    [ "$tool" = memcheck ] && checked+=(--report-api-errors no)
    for set in $sets; do
        log="$out/sanitize-$tool-${set//\//-}.log"
        # A set must also have run trials, all of which passed.
        passed='^test result: ok\. [1-9][0-9]* passed'
        case "$set" in
            one_rank_) run=(env CUDA_VISIBLE_DEVICES=0 "${checked[@]}" ./gpu-tests one_rank_) ;;
            moe)
                run=("${checked[@]}" --target-processes all ./gin launch -n 2 -- ./gin run moe --device cuda
                    --bytes 16KiB --blocks 2 --threads 64 --iters 1 --repeats 1 --format json)
                passed='"verified":true'
                ;;
            *) run=("${checked[@]}" ./gpu-tests --exact "cuda/1_gpu/$set") ;;
        esac
        start=$SECONDS
        timeout -k 5 "$limit" "${run[@]}" >"$log" 2>&1 </dev/null
        status=$?
        if [ $status -eq 0 ] && grep -q "$passed" "$log"; then
            echo "$tool $set: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/^=* *//' | sort -u | paste -sd ',') ($((SECONDS - start)) s)"
        else
            echo "$tool $set: failed with status $status after $((SECONDS - start)) s; see $log"
            tail -15 "$log"
            failed=$((failed + 1))
        fi
    done
done
[ "$failed" -eq 0 ]
