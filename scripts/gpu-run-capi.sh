#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the programs in C and CUDA C++ beside this script on the GPUs of this machine: kernels that are linked with gin's
# device functions by nvcc, and by nvJitLink while the program runs; every operation of the device API; a C program that
# launches a kernel from PTX; programs for NCCL EP; kernels in C++ timed beside those in Rust. If the machine has nvcc,
# compiles the first anew. Output is kept in $OUT/capi, or in out/capi beside this script. The report is printed last.
# The exit status is 0 if all steps succeeded.
#
# usage: run-capi.sh [RANKS...]   (1 2 if none are given)

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}/capi"
mkdir -p "$out"
report="$out/report.txt"
failed=0
: >"$report"

# The programs find libgin beside them, and nvJitLink of version 13 in one of the usual places.
folders=$(ls -d "${CUDA_HOME:-/usr/local/cuda}"/lib64 /usr/local/cuda*/lib64 2>/dev/null | paste -sd:)
wheels=$(python3 -c 'import nvidia, os; print(":".join(os.path.join(r, p, "lib") for r in nvidia.__path__ for p in os.listdir(r)))' 2>/dev/null)
export LD_LIBRARY_PATH="$PWD/capi:$folders:$wheels:${LD_LIBRARY_PATH:-}"

# step NAME COMMAND...: runs a command, and notes whether it succeeded
step() {
    local name="$1" status
    shift
    timeout -k 10 "${GIN_STEP_SECONDS:-120}" "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    if [ $status -eq 0 ]; then
        echo "ok      $name: $(tail -1 "$out/$name.log")" >>"$report"
    else
        failed=$((failed + 1))
        { echo "FAILED  $name, status $status: $*"; tail -15 "$out/$name.log" | cut -c1-500; } >>"$report"
    fi
    return $status
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ $# -gt 0 ] || set -- 1 2
step virtual capi/virtual 4
for ranks in "$@"; do
    step "linked-by-nvcc-$ranks" capi/main "$ranks"
    step "linked-by-nvcc-network-$ranks" capi/main "$ranks" network
    step "linked-by-nvcc-caller-$ranks" capi/main "$ranks" caller
    step "linked-by-nvjitlink-$ranks" capi/jit capi/kernels.cubin capi/gin_device.sm_90.ptx "$ranks"
    # Ranks that are processes have a GPU each, and ranks that free memory of CUDA's runtime while others wait.
    if [ "$ranks" -le "$gpus" ]; then
        step "c-program-$ranks" ./gin launch -n "$ranks" -- capi/ring capi/ring.ptx
        step "nccl-ep-$ranks" capi/nccl_ep "$ranks"
        step "nccl-ep-modes-$ranks" capi/nccl_ep_modes "$ranks"
        rm -f "$out/id-$ranks"
        step "nccl-ep-processes-$ranks" ./gin launch -n "$ranks" -- capi/nccl_ep "$out/id-$ranks"
    fi
done
step operations capi/operations automatic capi/operations.cubin
step operations-network capi/operations network capi/operations.cubin
step bench ./gin bench capi --device cuda --module capi/bench.cubin --all
nvcc=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -1)
if [ -n "$nvcc" ]; then
    if step compile "$nvcc" -std=c++17 -arch=sm_90 -rdc=true -Icapi/include capi/source/main.cu -o "$out/main" \
        -Lcapi -lgin_device -Xlinker capi/libgin.so.*; then
        step compiled-here "$out/main" 1
    fi
else
    echo "no nvcc on this machine: nothing was compiled here" >>"$report"
fi
{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit)"
    cat "$report"
    cut -c1-400 "$out/bench.log"
    echo "$failed failed"
} >"$out/report-capi.txt"
cat "$out/report-capi.txt"
[ "$failed" -eq 0 ]
