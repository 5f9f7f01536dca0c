#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the command beside this script on the GPUs of this machine: `info`, `demo`, the test of the project that
# `gin new` writes, each example, and each workload with several numbers of ranks. Results are kept in $OUT, or in the
# folder out beside this script, and steps that succeeded are not run again. A step ends after GIN_STEP_SECONDS (120).
# The report is printed last. The exit status is 0 if all steps succeeded. GIN_ITERATIONS (10000) is the number of
# rounds of the longest runs.
#
# usage: run-command.sh [RANKS...]   (1 2 4 8 if none are given)

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
steps="$out/command"
mkdir -p "$steps"
limit="${GIN_STEP_SECONDS:-120}"
failed=0
names=""

# step NAME ARGUMENTS...: runs the command, or $program if it is set, with these arguments. Writes its output to
# NAME.out and its errors to NAME.err, and creates NAME.ok if it succeeded.
step() {
    local name="$1" status program="${program:-./gin}"
    shift
    names="$names $name"
    [ -e "$steps/$name.ok" ] && return
    echo "${program#./} $*" >"$steps/$name.cmd"
    timeout -k 10 "$limit" "$program" "$@" >"$steps/$name.out" 2>"$steps/$name.err" </dev/null
    status=$?
    if [ $status -eq 0 ]; then
        touch "$steps/$name.ok"
        return
    fi
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then echo "ended after $limit s" >>"$steps/$name.err"; fi
    echo "status $status" >>"$steps/$name.err"
    failed=$((failed + 1))
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')

step info info
step info-json info --format json
step demo demo
# One GPU by its number, by loads and stores alone.
step gpu-0 run ring --device cuda:0 --ranks 2 --route lsa --format json
step gpu-0-moe run moe --device cuda:0 --ranks 2 --format json
step sweep run alltoall --device cuda --ranks 2 -b 8 -e 16M -f 8 --plot "$out/sweep.svg"
step trace trace --output "$out/trace.json" run alltoall --device cuda --ranks 2 --stats
# The project as `gin new` writes it: three ranks on the GPUs of this machine, and virtual GPUs.
program=./first-hour-test step new-project-test
# Without arguments it lists its examples. Ranks that are processes follow below.
for example in $(./gin-examples 2>&1 | awk 'NR > 1 && $1 != "processes" { print $1 }'); do
    program=./gin-examples step "example-$example" "$example"
done
for ranks in ${*:-1 2 4 8}; do
    for workload in ring alltoall halo; do
        step "$workload-$ranks" run "$workload" --device cuda --ranks "$ranks" --format json
        # Larger, over several contexts, with more requests under way.
        step "$workload-$ranks-long" run "$workload" --device cuda --ranks "$ranks" --format json \
            --bytes 1MiB --blocks 8 --threads 256 --contexts 4 --iters 100
        # Many rounds, each of them checked (for `halo` the last one).
        step "$workload-$ranks-many" run "$workload" --device cuda --ranks "$ranks" --format json \
            --bytes 4KiB --warmup "${GIN_ITERATIONS:-10000}" --repeats 1
        # Kernels that find at run time that they drive NICs.
        step "$workload-$ranks-gdaki" run "$workload" --device cuda --ranks "$ranks" --format json \
            --backend gdaki --network software --bytes 64KiB --iters 20
        # By loads and stores, if ranks reach each other: two ranks and more.
        step "$workload-$ranks-lsa" run "$workload" --device cuda --ranks "$ranks" --format json --route auto \
            --bytes 1MiB --blocks 8 --threads 256 --contexts 4 --iters 100
        step "$workload-$ranks-lsa-many" run "$workload" --device cuda --ranks "$ranks" --format json --route auto \
            --bytes 4KiB --warmup "${GIN_ITERATIONS:-10000}" --repeats 1
    done
    # A mixture of experts, by loads and stores alone.
    step "moe-$ranks" run moe --device cuda --ranks "$ranks" --format json
    step "moe-$ranks-long" run moe --device cuda --ranks "$ranks" --format json \
        --bytes 1MiB --blocks 64 --threads 256 --iters 100
    step "moe-$ranks-many" run moe --device cuda --ranks "$ranks" --format json \
        --bytes 4KiB --iters "${GIN_ITERATIONS:-10000}" --repeats 1
    # One process for each rank, each with its own GPU.
    if [ "$ranks" -gt 1 ] && [ "$gpus" -ge "$ranks" ]; then
        step "moe-$ranks-processes" launch -n "$ranks" -- ./gin run moe --device cuda --stats --format json \
            --bytes 1MiB --blocks 64 --threads 256 --iters 100
        step "moe-$ranks-killed" run moe --device cuda --ranks "$ranks" --format json --kill-rank "$((ranks - 1))" --shrink
        for workload in ring alltoall halo; do
            for route in network auto; do
                step "$workload-$ranks-processes-$route" launch -n "$ranks" -- ./gin run "$workload" --device cuda \
                    --route "$route" --stats --format json --bytes 1MiB --blocks 8 --threads 256 --contexts 4 --iters 100
            done
        done
        step "example-processes-$ranks" launch -n "$ranks" -- ./gin-examples processes
        last=$((ranks - 1))
        for route in network auto; do
            step "alltoall-$ranks-killed-$route" run alltoall --device cuda --route "$route" --ranks "$ranks" \
                --format json --kill-rank "$last" --shrink
            step "alltoall-$ranks-stopped-$route" run alltoall --device cuda --route "$route" --ranks "$ranks" \
                --format json --stop-rank "$last" --shrink
        done
    fi
done

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit 2>/dev/null || echo unknown)"
    for name in $names; do
        result="FAILED"
        [ -e "$steps/$name.ok" ] && result="ok    "
        echo "$result  $(cat "$steps/$name.cmd")"
        cut -c1-600 "$steps/$name.out" | sed 's/^/    /'
        tail -15 "$steps/$name.err" | cut -c1-600 | sed 's/^/    error: /'
    done
    echo "$failed steps failed"
} >"$out/report-command.txt" 2>&1
cat "$out/report-command.txt"
[ "$failed" -eq 0 ]
