#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs all tests of the workspace, also those of the command, with the arguments for `cargo test`. Ends with what the
# failed tests printed, the ten slowest test programs and the sum over all tests:
#
#   N passed, N failed, N skipped
#
# The exit status is not 0 if a test failed, if a crate did not compile, or if no test ran. test-times.txt in the target
# folder has the time of each program. GIN_TEST_ALSO is a command of the shell that runs concurrently and must succeed.
#
# Programs run concurrently. Cargo compiles them and calls this script as the runner of each, which only records folder,
# environment and arguments in a file. The scheduler below runs these files while cargo tests the examples of the docs.
# cargo-nextest is not used: it would have to be installed, and it starts a process for each test, so the suites that
# share processes and kernels would set them up for each test.

set -euo pipefail

# The runner. It records test programs only; examples of the docs run at once. The variable, which rustdoc sets where it
# has no runner, lets each of them run in its own process.
if [ -n "${GIN_TEST_QUEUE:-}" ]; then
    queue=$GIN_TEST_QUEUE
    unset GIN_TEST_QUEUE
    case $1 in */deps/*) ;; *) RUSTDOC_DOCTEST_BIN_PATH=$1 exec "$@" ;; esac
    job=$CARGO_PKG_NAME:${1##*/}
    { export -p; printf 'cd %q\nexec' "$PWD"; printf ' %q' "$@"; echo; } >"$queue/$job.part"
    # The scheduler must not see half a file.
    mv "$queue/$job.part" "$queue/$job.new"
    exit
fi

cd "$(dirname "$0")/.."

# The programs in the order of their start, the long ones first, with their class:
#   cpu      takes a slot
#   kernels  takes a slot, one of them at a time, because they compile kernels in one folder, which cargo locks
#   gpu      runs on the GPUs of this machine, beside the others but one of them at a time; without a GPU it is `cpu`
#   alone    takes all slots, because its ranks count as lost if they get no CPU for seconds
# A program without a line is `cpu` and has the place of `others`.
order=(
    'cpu gin-conformance:virtual_gpu'
    'kernels gin-conformance:ptx'
    'kernels gin-capi:nvcc'
    'kernels gin-kernels:sass'
    'cpu gin-ep:oracle'
    'gpu gpu-tests:gpu'
    'cpu gpu-tests:gpu_tests'
    'gpu gin-examples:examples'
    'cpu gin-ep:matmul'
    'cpu gin-conformance:determinism'
    'cpu gin-device:loom_models'
    'kernels gin-cli:packages'
    'kernels gin-cli:documented_crate'
    'kernels gin-build:nested'
    'kernels gin-kernels:choice'
    'cpu gin-cli:cli'
    'cpu gin-ep:shared'
    'cpu gin-ep:machine_code'
    'cpu others'
    'alone gin-conformance:processes'
    'alone gin-conformance:faults'
    'alone gin-boot:boot'
    'alone gin-boot:boot_processes'
    'alone gin-boot:job'
    'alone gin-capi:programs'
    'alone gin-ep:faults'
    'alone gin-py:python'
    'alone gin-bench:cli'
    'alone gin-cli:job'
    'alone gin-cli:launch'
)
declare -A place=() group=() class=()
for index in "${!order[@]}"; do place[${order[index]#* }]=$index; done

# A program keeps about two CPUs busy.
slots=$(($(nproc) / 2))
[ "$slots" -ge 2 ] || slots=2
[ -e /dev/nvidiactl ] || order=("${order[@]/#gpu /cpu }")
free=$slots compiling=0 on_gpu=0

queue=$(mktemp -d "${TMPDIR:-/tmp}/gin-test.XXXXXX")
# A byte in it wakes the scheduler.
mkfifo "$queue/wake"
exec 3<>"$queue/wake"
times=${CARGO_TARGET_DIR:-target}/test-times.txt
mkdir -p "${times%/*}"
: >"$times"

# start CLASS JOB COMMAND...: runs the command in the background
start() {
    local job=$2
    class[$job]=$1
    case $1 in
        cpu) free=$((free - 1)) ;;
        kernels) free=$((free - 1)) compiling=1 ;;
        gpu) on_gpu=1 ;;
        alone) free=0 ;;
    esac
    shift 2
    # With job control the job gets its own process group, which can be ended as a whole, and does not ignore Ctrl-C.
    set -m
    {
        status=0 TIMEFORMAT='%R %U %S'
        { time "$@" >"$queue/$job.log" 2>&1 </dev/null 3>&-; } 2>"$queue/$job.time" || status=$?
        # The shell's message about a signal stands before the line of times.
        sed '$d' "$queue/$job.time" >>"$queue/$job.log"
        echo "$status $(tail -n 1 "$queue/$job.time")" >"$queue/$job.status"
        mv "$queue/$job.status" "$queue/$job.end"
        echo >&3
    } &
    set +m
    group[$job]=$!
}

# Starts the programs that may run now, once cargo has recorded all.
start_all() {
    local file job name index kind next next_index
    [ -e "$queue/cargo.end" ] || grep -qs 'Doc-tests' "$queue/cargo.log" || return 0
    while :; do
        next=
        for file in "$queue"/*.new; do
            [ -e "$file" ] || return 0
            job=${file##*/} job=${job%.new} name=${job%-*}
            index=${place[$name]:-${place[others]}}
            kind=${order[index]%% *}
            [ -n "$next" ] && [ "$index" -ge "$next_index" ] && continue
            case $kind in
                cpu) [ "$free" -gt 0 ] || continue ;;
                kernels) [ "$free" -gt 0 ] && [ "$compiling" = 0 ] || continue ;;
                gpu) [ "$on_gpu" = 0 ] || continue ;;
                alone) [ "$free" = "$slots" ] || continue ;;
            esac
            next=$job next_index=$index
        done
        [ -n "$next" ] || return 0
        mv "$queue/$next.new" "$queue/$next.job"
        start "${order[next_index]%% *}" "$next" bash "$queue/$next.job"
    done
}

# Prints what cargo has written since the last call, without the lines of programs that it has only recorded.
shown=0
show_cargo() {
    local size
    size=$(stat -c %s "$queue/cargo.log" 2>/dev/null) || return 0
    [ "$size" -gt "$shown" ] || return 0
    tail -c "+$((shown + 1))" "$queue/cargo.log" | head -c $((size - shown)) | sed '/ Running.*deps/d'
    shown=$size
}

# Ends what still runs: first as Ctrl-C does, so that tests can end their own processes.
end_all() {
    trap '' INT TERM HUP
    if [ ${#group[@]} -gt 0 ]; then
        echo "ended while these ran: ${!group[*]}" >&2
        kill -INT -- "${group[@]/#/-}" 2>/dev/null || true
        sleep 1
        kill -KILL -- "${group[@]/#/-}" 2>/dev/null || true
    fi
    rm -rf "$queue"
}
trap end_all EXIT
trap 'exit 130' INT TERM HUP

# The file hides the terminal from cargo.
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-always}"
fi

[ -z "${GIN_TEST_ALSO:-}" ] || echo "$GIN_TEST_ALSO" >"$queue/also-.new"
# Every program runs, also after one that failed, so that the sum covers all of them.
start cpu cargo env GIN_TEST_QUEUE="$queue" "${CARGO:-cargo}" test --workspace --no-fail-fast \
    --config "target.'cfg(all())'.runner=['$PWD/scripts/test.sh']" "$@"
failures=()
while [ ${#group[@]} -gt 0 ]; do
    read -r -t 0.3 <&3 || true
    show_cargo
    for job in "${!group[@]}"; do
        [ -e "$queue/$job.end" ] || continue
        read -r status wall user system <"$queue/$job.end"
        name=${job%-*}
        if [ "$job" != cargo ]; then
            printf '     Running %s\n' "$name"
            cat "$queue/$job.log"
        fi
        echo "$wall $user $system $name" >>"$times"
        [ "$status" = 0 ] || failures+=("$name ended with status $status")
        case ${class[$job]} in
            cpu) free=$((free + 1)) ;;
            kernels) free=$((free + 1)) compiling=0 ;;
            gpu) on_gpu=0 ;;
            alone) free=$slots ;;
        esac
        unset "group[$job]"
    done
    start_all
done

# A renamed program would lose its class.
if [ $# = 0 ] && [ ${#failures[@]} -eq 0 ]; then
    for name in "${order[@]#* }"; do
        [ "$name" = others ] || grep -q " $name\$" "$times" || failures+=("scripts/test.sh lists $name, which did not run")
    done
fi
sort -rn -o "$times" "$times"
awk -v failures="$(printf '%s\n' "${failures[@]}")" '
    # Removes colours and carriage returns.
    { gsub(/\033\[[0-9;]*m|\r/, "") }
    FNR == 1 { program = FILENAME; sub(/.*\//, "", program); sub(/-[^-]*$/, "", program) }
    /^ *Doc-tests / { program = $NF ": examples of the docs" }
    # The outputs of failed tests begin with `---- NAME`, and end before the list of their names.
    /^---- / { shown = 0; printing = 1 }
    /^failures:$|^test result: / { printing = 0 }
    printing && shown++ < 40 { outputs = outputs $0 "\n" }
    / \.\.\. FAILED$/ { outputs = outputs "FAILED in " program ": " $0 "\n" }
    # The closing line of libtest and of libtest-mimic:
    # test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) == "passed;") passed += $i
            if ($(i + 1) == "failed;") failed += $i
            if ($(i + 1) == "ignored;") skipped += $i
        }
    }
    END {
        printf "%s", outputs
        if (failures) print failures
        if (passed + failed == 0) print "no test ran"
        print "     wall      user    system  program, in seconds"
        for (i = 1; i <= 10 && (getline < times) > 0; i++) printf "%9s %9s %9s  %s\n", $1, $2, $3, $4
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0 || failures || passed == 0
    }
' times="$times" "$queue"/*.log
