#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Tests the network `verbs` on Soft-RoCE, in virtual machines (soft-roce.sh).
#
# usage: test-rdma.sh [smoke]
#
#   smoke    the network by itself, also over a wire that loses, delays and is cut, and the conformance suite's cases for
#            warps: about five minutes on two processors
#   (none)   the same, the whole suite with ranks as threads over three networks, as two processes, and on two hosts: an
#            hour or more
#
# Ends with the sum over all: N passed, N failed, N skipped. A stage that fails does not keep the others from running.

set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp "${TMPDIR:-/tmp}/gin-rdma.XXXXXX")
trap 'rm -f "$log"' EXIT
failed=0

# Builds the tests that are named rdma, of the whole workspace: `make test` has built the same. A line each: package, program.
built() {
    "${CARGO:-cargo}" test --workspace --test rdma --no-run --message-format=json-render-diagnostics |
        sed -n 's/.*"package_id":"[^"]*\/\([a-z-]*\)#.*"executable":"\([^"]*\)".*/\1 \2/p'
}

# stage NAME COMMAND...
stage() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    "$@" </dev/null 2>&1 | tee -a "$log" || status=${PIPESTATUS[0]}
    printf '== %s: status %d after %d s\n' "$name" "$status" $((SECONDS - start))
    [ "$status" = 0 ] || failed=1
}

programs=$(built)
network=$(sed -n 's/^gin-host //p' <<<"$programs")
suite=$(sed -n 's/^gin-conformance //p' <<<"$programs")
if [ -z "$network" ] || [ -z "$suite" ]; then
    echo "test-rdma: cargo named no test binary" >&2
    exit 1
fi
guest=scripts/soft-roce.sh
wire=(--env GIN_VERBS_DEVICES=rxe1,rxe2 --env GIN_VERBS_WIRE=v1,v2)

stage network "$guest" --seconds 400 "${wire[@]}" -- "$network" --nocapture
if [ "${1:-}" = smoke ]; then
    stage suite "$guest" --seconds 400 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$suite" --test-threads 2 rdma/smoke/
else
    stage loopback "$guest" --seconds 300 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$network" --nocapture
    for way in plain withhold worst processes; do
        stage "$way" "$guest" --seconds 3000 --no-facts --env GIN_VERBS_DEVICES=rxe0 -- "$suite" --test-threads 2 "rdma/$way/"
    done
    stage hosts env GIN_RDMA_HOSTS=1 "$suite" rdma/hosts/
fi

awk -v failed="$failed" '
    # Lines of a machine end as those of a terminal do.
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
        if (failed && wrong == 0) print "a stage ended badly"
        printf "%d passed, %d failed, %d skipped\n", passed, wrong, skipped
        exit failed || passed == 0
    }
' "$log"
