#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Measures and tests gin with one rank for each GPU of this machine, two or more: workloads beside NCCL, expert
# parallelism, products, barriers, the loss of a rank, and a selection of the tests with ranks in one process and in
# processes. Results are kept in $OUT, or in the folder out beside this script. Steps that succeeded are not run again.
# A step ends after GIN_STEP_SECONDS (150). Tests that have not begun within GIN_GPU_SECONDS (60) of their step are
# reported as ignored. The report is printed last. The exit status is 0 if all steps succeeded.
#
# usage: run-many.sh [STEP...]   (a step is a part of its name; all if none are given)

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
out=$(cd "$out" && pwd)
steps="$out/many"
mkdir -p "$steps"
limit="${GIN_STEP_SECONDS:-150}"
export GIN_GPU_SECONDS="${GIN_GPU_SECONDS:-60}"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -lt 2 ]; then
    echo "run-many: this machine has $gpus GPUs, and two are needed" >&2
    exit 1
fi
# NCCL of PyTorch, if the system has none.
torch=$(python3 -c 'import nvidia.nccl as nccl; print(list(nccl.__path__)[0] + "/lib")' 2>/dev/null)
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}${torch:+:$torch}"
wanted=("$@") failed=0 names=()

# step NAME COMMAND...: runs the command unless other steps are wanted
step() {
    local name=$1 status start=$SECONDS part
    shift
    for part in "${wanted[@]}"; do
        case $name in *"$part"*) break ;; *) part= ;; esac
    done
    [ ${#wanted[@]} -eq 0 ] || [ -n "$part" ] || return
    names+=("$name")
    [ -e "$steps/$name.ok" ] && return
    timeout -k 10 "$limit" "$@" >"$steps/$name.out" 2>&1 </dev/null
    status=$?
    echo "${*}: status $status, $((SECONDS - start)) s" >"$steps/$name.end"
    if [ $status -eq 0 ]; then touch "$steps/$name.ok"; else failed=$((failed + 1)); fi
}

last=$((gpus - 1))
job=(./gin launch -n "$gpus" --)
for route in lsa network; do
    step "alltoall-$route" ./gin run alltoall --device cuda -g "$gpus" --route "$route" -b 1K -e 1G -f 4 --beside nccl
    step "ring-$route" env NCCL_ALGO=Ring ./gin run ring --device cuda -g "$gpus" --route "$route" -b 1K -e 1G -f 4 --beside nccl
done
step moe ./gin run moe --device cuda -g "$gpus" -b 1K -e 16M -f 4
step bench-ep "${job[@]}" ./gin-bench ep --device cuda
step bench-layouts "${job[@]}" ./gin-bench layouts --device cuda
step bench-lsa "${job[@]}" ./gin-bench lsa --device cuda
step bench-matmul "${job[@]}" ./gin-bench matmul --device cuda
for route in lsa network; do
    step "killed-$route" ./gin run alltoall --device cuda -g "$gpus" --route "${route/lsa/auto}" --kill-rank "$last" --shrink
    step "stopped-$route" ./gin run alltoall --device cuda -g "$gpus" --route "${route/lsa/auto}" --stop-rank "$last" --shrink
done
step moe-processes "${job[@]}" ./gin run moe --device cuda --bytes 1MiB
step tests-ep ./gpu-tests "cuda/${gpus}_gpu/ep/"
step tests-matmul ./gpu-tests "cuda/${gpus}_gpu/matmul/"
step tests-threads ./gpu-tests "cuda/${gpus}_gpu/lsa"
step tests-processes ./gpu-tests "cuda/${gpus}_processes/"

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit 2>/dev/null || echo unknown)"
    for name in "${names[@]}"; do
        [ -e "$steps/$name.ok" ] && echo "ok $name" || echo "FAILED $name"
        sed 's/^/    /' "$steps/$name.end"
        grep -vE '^test .*\.\.\. (ok|ignored)' "$steps/$name.out" | tail -n 60 | cut -c1-220 | sed 's/^/    /'
    done
    echo "$failed of ${#names[@]} steps failed"
} >"$out/report-many.txt" 2>&1
cat "$out/report-many.txt"
[ "$failed" -eq 0 ]
