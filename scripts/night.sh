#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Searches for hours, with the arguments for `cargo test`. PROGRAMS is the number of random programs. SEEDS is the
# number of seeds for each case in which threads post and flush at once. A search that fails does not stop the others.
# The exit status is then not 0, and the last line names the failed searches.

set -uo pipefail
cd "$(dirname "$0")/.."

arguments=("$@")
found=()

# search COMMAND...
search() {
    echo "== $*"
    "$@" || found+=("$*")
}

# tests VARIABLE=VALUE PACKAGE TEST [FILTER]
tests() {
    local variable=$1 package=$2 test=$3
    shift 3
    search env "$variable" "${CARGO:-cargo}" test "${arguments[@]}" -p "$package" --test "$test" -- "$@"
}

ptx=("${CARGO:-cargo}" run --quiet -p gin-build --example ptx --)
for crate in gin-kernels bench/kernels; do
    search "${ptx[@]}" --check "$crate" sm_80 sm_100
done
search "${ptx[@]}" --check --features gdaki-any gin-kernels sm_80 sm_100
# The engine of software NICs has a stack, so it is only assembled. The test of expert parallelism has its own limits.
search "${ptx[@]}" gin-host/soft-nic sm_80 sm_100
tests GIN_ARCHS=sm_80,sm_90,sm_100 gin-ep machine_code
tests GIN_ARCHS=sm_80,sm_90,sm_100 gin-build nested
tests GIN_ALL_WAYS=1 gin-conformance ptx
search "${MAKE:-make}" lint
tests GIN_PROGRAMS="${PROGRAMS:-3000}" gin-conformance random_programs
for case in \
    warps_with_and_without_signals_and_more lanes_that_post_with_more \
    gets_have_arrived_after_a_flush_while sources_may_change_after_a_flush_while \
    blocks_of_many_threads_post_together; do
    tests GIN_SEEDS="${SEEDS:-600}" gin-conformance virtual_gpu "$case"
done
tests GIN_ALL_WAYS=1 gin-conformance virtual_gpu
tests GIN_ALL_WAYS=1 gin-conformance processes
tests GIN_ALL_WAYS=1 gin-conformance determinism
tests GIN_ALL_WAYS=1 gin-conformance fabric
tests GIN_EP_CASES="${PROGRAMS:-3000}" gin-ep oracle
tests GIN_SEEDS="${SEEDS:-600}" gin-ep late
# Of these .ci/run has every third case.
search "${CARGO:-cargo}" test "${arguments[@]}" -p gin-ep --test matmul --test shared --test faults
search "${CARGO:-cargo}" test "${arguments[@]}" -p gpu-tests --lib
search scripts/ep-mutations.sh
tests GIN_KILLS=50 gin-py python a_killed_rank_in_a_loop
tests GIN_ALL_WAYS=1 gin-device mutations
tests GIN_CAPI_SEEDS="${PROGRAMS:-3000}" gin-capi sanitizer fuzz
# The C interface with Rust's address sanitizer, which the stable compiler has behind this variable.
host=$(rustc -vV | sed -n 's/^host: //p')
search env RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address GIN_CAPI_CASES="${PROGRAMS:-3000}" "${CARGO:-cargo}" test \
    -p gin-capi --no-default-features --test handles --target "$host" --target-dir "${CARGO_TARGET_DIR:-target}/asan"
search env GIN_ALL_INPUTS=1 "${CARGO:-cargo}" test --release -p gin-device --test float
tests GIN_MODEL_MORE_PREEMPTIONS=1 gin-device loom_models
# Without NCCL's device library `make test` skips these.
search "${MAKE:-make}" nccl-device
search "${CARGO:-cargo}" test "${arguments[@]}" -p gin-nccl-kernels -p gin-nccl-host
search "${CARGO:-cargo}" test "${arguments[@]}" -p gin-build --lib
search "${CARGO:-cargo}" test "${arguments[@]}" -p gin-cli --test documented_crate nccl
search "${MAKE:-make}" stress
search "${MAKE:-make}" soak
search scripts/test-rdma.sh

[ ${#found[@]} -eq 0 ] || { printf 'failed:'; printf ' [%s]' "${found[@]}"; echo; exit 1; }
