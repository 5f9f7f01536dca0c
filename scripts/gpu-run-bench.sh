#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the benchmarks of the command beside this script on the GPUs of this machine. Tables are written to $OUT/bench,
# or to out/bench beside this script, as text (NAME.out) and as JSON (NAME.json). Parts that succeeded are not run
# again. A part ends after GIN_STEP_SECONDS (120). The report is printed last. The exit status is 0 if all parts
# succeeded.
#
# usage: run-bench.sh [PART...]   (lsa proxy post if none are given)

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
parts="$out/bench"
mkdir -p "$parts"
limit="${GIN_STEP_SECONDS:-120}"
failed=0

for part in ${*:-lsa proxy post}; do
    [ -e "$parts/$part.ok" ] && continue
    right=yes
    # One run for people and one for programs; differences between the two are noise.
    for format in table json; do
        result="$parts/$part.out"
        all=--all
        [ $format = json ] && result="$parts/$part.json" all=
        timeout -k 10 "$limit" ./gin bench "$part" --device cuda --format $format $all >"$result" 2>"$parts/$part.err" </dev/null
        status=$?
        if [ $status -ne 0 ]; then
            echo "status $status" >>"$parts/$part.err"
            right=no
            break
        fi
    done
    if [ $right = yes ]; then touch "$parts/$part.ok"; else failed=$((failed + 1)); fi
done

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit 2>/dev/null || echo unknown)"
    for part in ${*:-lsa proxy post}; do
        cut -c1-400 "$parts/$part.out"
        tail -15 "$parts/$part.err" | cut -c1-600 | sed 's/^/error: /'
    done
    echo "$failed parts failed"
} >"$out/report-bench.txt" 2>&1
cat "$out/report-bench.txt"
[ "$failed" -eq 0 ]
