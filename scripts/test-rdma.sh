#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Tests the network `verbs` on Soft-RoCE, in virtual machines (soft-roce.sh).
#
# usage: test-rdma.sh [smoke | STAGE...]
#
#   smoke    the network by itself, also over a wire that loses and delays packets and is cut, and the conformance
#            suite's cases for warps: about five minutes on two CPUs
#   (none)   also faults between processes and between hosts, `gin run` and Python on two hosts, and the whole suite
#            with ranks as threads over three networks, as two processes, and on two hosts; and its cases for warps
#            over two ports, with signals raised by the NIC, and with device memory staged through host memory: an hour
#   STAGE... these stages of the long run only
#
# FEATURES has arguments for cargo, as in the Makefile: with --no-default-features no kernels for GPUs are compiled.
#
# The last line is the sum over all tests: N passed, N failed, N skipped. A stage that fails does not stop the others.

set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp "${TMPDIR:-/tmp}/gin-rdma.XXXXXX")
trap 'rm -f "$log"' EXIT
failed=0

# Builds the tests named rdma of the whole workspace, which `make test` builds in the same way. Prints a line for each:
# package, program.
built() {
    # shellcheck disable=SC2086 # several words
    "${CARGO:-cargo}" test --workspace ${FEATURES:-} --test rdma --no-run --message-format=json-render-diagnostics |
        sed -n -e '/"kind":\["test"\]/!d' \
            -e 's/.*"package_id":"[^"]*#\([a-z-]*\)@[^"]*".*"executable":"\([^"]*\)".*/\1 \2/p' \
            -e 's/.*"package_id":"[^"]*\/\([a-z-]*\)#[^"@]*".*"executable":"\([^"]*\)".*/\1 \2/p'
}

# stage NAME COMMAND...: runs the command, unless the arguments name other stages only
stage() {
    local name=$1 start=$SECONDS status=0
    shift
    case $wanted in *" $name "*) ;; ?*) return 0 ;; esac
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" </dev/null 2>&1 | tee -a "$log" || status=${PIPESTATUS[0]}
    printf '== %s: status %d after %d s\n' "$name" "$status" $((SECONDS - start))
    [ "$status" = 0 ] || failed=1
}

# The wanted stages with a space around each; empty for all.
wanted=
[ $# = 0 ] || [ "$1" = smoke ] || wanted=" $* "
programs=$(built)
network=$(sed -n 's/^gin-host //p' <<<"$programs")
suite=$(sed -n 's/^gin-conformance //p' <<<"$programs")
command=$(sed -n 's/^gin-cli //p' <<<"$programs")
python=$(sed -n 's/^gin-py //p' <<<"$programs")
if [ -z "$network" ] || [ -z "$suite" ] || [ -z "$command" ] || [ -z "$python" ]; then
    echo "test-rdma: cargo printed no path of a test binary" >&2
    exit 1
fi
guest=scripts/soft-roce.sh
wire=(--env GIN_VERBS_DEVICES=rxe1,rxe2 --env GIN_VERBS_WIRE=v1,v2)

stage network "$guest" --seconds 400 "${wire[@]}" -- "$network" --nocapture --skip faults/
if [ "${1:-}" = smoke ]; then
    stage suite "$guest" --seconds 400 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$suite" --test-threads 2 rdma/smoke/
else
    stage loopback "$guest" --seconds 300 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$network" --nocapture --skip faults/
    stage faults "$guest" --seconds 1200 --no-facts "${wire[@]}" -- "$network" --nocapture faults/
    stage hosts-faults env GIN_RDMA_HOSTS=1 "$network" --nocapture
    stage command env GIN_RDMA_HOSTS=1 "$command" --nocapture
    stage python env GIN_RDMA_HOSTS=1 "$python" --nocapture
    for way in plain withhold worst processes; do
        stage "$way" "$guest" --seconds 3000 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$suite" --test-threads 2 "rdma/$way/"
    done
    stage ports "$guest" --seconds 900 --no-facts --env GIN_VERBS_DEVICES=rxe1,rxe2 -- "$suite" --test-threads 2 rdma/smoke/
    stage signals "$guest" --seconds 900 --no-facts --env GIN_VERBS_DEVICES=rxe0 --env GIN_VERBS_SIGNALS=nic -- \
        "$suite" --test-threads 2 rdma/smoke/
    stage staged "$guest" --seconds 900 --no-facts --env GIN_VERBS_DEVICES=rxe0 --env GIN_VERBS_GPU_MEMORY=host -- \
        "$suite" --test-threads 2 rdma/smoke/
    stage hosts env GIN_RDMA_HOSTS=1 "$suite" rdma/hosts/
fi

awk -v failed="$failed" '
    # Removes colours, and the carriage returns of the virtual machines.
    { gsub(/\033\[[0-9;]*m|\r/, "") }
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) == "passed;") passed += $i
            if ($(i + 1) == "failed;") wrong += $i
            if ($(i + 1) == "ignored;") skipped += $i
        }
    }
    END {
        if (passed + wrong == 0) print "no test ran"
        if (failed && wrong == 0) print "a stage failed"
        printf "%d passed, %d failed, %d skipped\n", passed, wrong, skipped
        exit failed || passed == 0
    }
' "$log"
