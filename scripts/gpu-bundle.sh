#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Builds the tests for real GPUs, the command, the examples, the Python package, the libraries for C and CUDA C++, and
# the test that `gin new` writes, into one folder that runs on a GPU machine without Rust. The folder is gpu-bundle in
# the target folder, or the first argument. In it, run.sh runs the tests, run-command.sh the rest, run-bench.sh the
# benchmarks, run-python.sh the tests of the Python package, and run-capi.sh the programs in C and CUDA C++. GIN_ARCHS
# gives the architectures of the kernels (sm_90 by default).

set -euo pipefail
cd "$(dirname "$0")/.."

target="${CARGO_TARGET_DIR:-target}"
bundle="${1:-$target/gpu-bundle}"
limit_mib=160
export GIN_ARCHS="${GIN_ARCHS:-sm_90}"

# Prints the path of the program that a cargo command builds last.
built() {
    "${CARGO:-cargo}" "$@" --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1
}
tests=$(built test --release --no-run -p gpu-tests --test gpu)
[ -n "$tests" ] || { echo "gpu-bundle: cargo printed no path of a test binary" >&2; exit 1; }
command=$(built build --release -p gin-cli --bin gin)
[ -n "$command" ] || { echo "gpu-bundle: cargo printed no path of the command" >&2; exit 1; }
bench=$(built build --release -p gin-bench --bin gin-bench)
[ -n "$bench" ] || { echo "gpu-bundle: cargo printed no path of the benchmarks" >&2; exit 1; }

examples=$(built build --release -p gin-examples --bin gin-examples)
[ -n "$examples" ] || { echo "gpu-bundle: cargo printed no path of the examples" >&2; exit 1; }

# A project as a user writes it, with the versions of this workspace. Its test runs what its program runs.
project="$target/gpu-project/first-hour"
rm -rf "$project"
"$command" new "$project" >/dev/null
cp Cargo.lock "$project/"
program_test=$(built test --no-run --release --target-dir "$target" --manifest-path "$project/Cargo.toml" --bin first-hour)
[ -n "$program_test" ] || { echo "gpu-bundle: cargo printed no path of the new project's test" >&2; exit 1; }

# The wheel, and pytest with what it needs, for a machine without a network.
wheels="$target/gpu-python-wheels"
rm -rf "$wheels"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$wheels" ./bindings/python
python3 -m pip download --quiet --only-binary=:all: --python-version 3.12 --dest "$wheels" pytest==8.4.2

# ptx CRATE NAME: prints the path of the newest PTX that the build of this crate has made for a table
ptx() {
    local found
    found=$(ls -t "$target"/release/build/"$1"-*/out/"$2"/*."${GIN_ARCHS%%,*}".ptx 2>/dev/null | head -n 1)
    [ -n "$found" ] || { echo "gpu-bundle: the build of $1 has left no PTX of $2" >&2; exit 1; }
    echo "$found"
}

rm -rf "$bundle"
mkdir -p "$bundle"
strip -o "$bundle/gpu-tests" "$tests"
strip -o "$bundle/gin" "$command"
strip -o "$bundle/gin-bench" "$bench"
strip -o "$bundle/gin-examples" "$examples"
strip -o "$bundle/first-hour-test" "$program_test"
cp scripts/gpu-run-command.sh "$bundle/run-command.sh"
cp scripts/gpu-sanitize.sh "$bundle/sanitize.sh"
cp scripts/gpu-run-bench.sh "$bundle/run-bench.sh"
cp scripts/gpu-run-many.sh "$bundle/run-many.sh"
cp scripts/gpu-python.sh "$bundle/run-python.sh"
mkdir -p "$bundle/python/ptx"
mv "$wheels" "$bundle/python/wheels"
cp -r bindings/python/tests "$bundle/python/tests"
rm -f "$bundle/python/tests/python.rs"
cp -r examples/python "$bundle/python/examples"
cp "$(ptx gin-py examples)" "$bundle/python/ptx/linked.ptx"
cp "$(ptx gpu-tests hardware)" "$bundle/python/ptx/other.ptx"

# Programs in C and CUDA C++, with the host library and the device functions.
capi() {
    local tools="$PWD/target/cuda-tools/nvidia/cu13" to="$bundle/capi" ring soname
    # As scripts/install.sh names it.
    soname=libgin.so.$(sed -n 's/^version = "\([0-9]*\.[0-9]*\)\..*/\1/p' Cargo.toml | head -1)
    mkdir -p "$to/include" "$to/source"
    "${CARGO:-cargo}" rustc --release -p gin-capi --lib --crate-type cdylib -- -Clink-arg=-Wl,-soname,"$soname"
    "${CARGO:-cargo}" run --release -p gin-build --example device_lib -- bindings/c/device gin_device "$to" sm_90
    "${CARGO:-cargo}" run --release -p gin-build --example ptx -- examples/kernels sm_90 >"$to/ptx.log"
    ring=$(sed -n 's/^sm_90 \(.*\) ([0-9]* bytes)$/\1/p' "$to/ptx.log")
    cp "$ring" "$to/ring.ptx"
    strip -o "$to/$soname" "$target/release/libgin_capi.so"
    cp bindings/c/include/* "$to/include"
    cp examples/cuda-cpp/*.cu examples/cuda-cpp/*.cuh examples/cuda-cpp/*.hpp "$to/source"
    local host=(-Ibindings/c/include "$to/$soname") nvcc=("$tools/bin/nvcc" -std=c++17 -arch=sm_90 -rdc=true)
    cc -std=c11 -O2 examples/c/main.c -o "$to/ring" "${host[@]}"
    c++ -std=c++17 -O2 examples/cuda-cpp/virtual.cpp -o "$to/virtual" "${host[@]}" -pthread
    c++ -std=c++17 -O2 examples/cuda-cpp/jit.cpp -o "$to/jit" "${host[@]}" -I"$tools/include" -pthread \
        "$tools/lib/libnvJitLink.so.13"
    "${nvcc[@]}" -cubin examples/cuda-cpp/kernels.cu -Ibindings/c/include -o "$to/kernels.cubin"
    # nvcc knows libraries by their names alone.
    "${nvcc[@]}" examples/cuda-cpp/main.cu -o "$to/main" -Ibindings/c/include -L"$to" -lgin_device \
        -Xlinker "$to/$soname" -L"$tools/lib"
    # Every operation, and the kernels of gin bench capi.
    c++ -std=c++17 -O2 bindings/c/tests/c/operations.cpp -o "$to/operations" "${host[@]}" -pthread
    "${nvcc[@]}" -x cu bindings/c/tests/c/operations.cpp -dc -Ibindings/c/include -o "$to/operations.o"
    "${nvcc[@]}" -dlink -cubin "$to/operations.o" -o "$to/operations.cubin" -L"$to" -lgin_device
    "${nvcc[@]}" -dc bench/kernels/capi.cu -Ibindings/c/include -o "$to/bench.o"
    "${nvcc[@]}" -dlink -cubin "$to/bench.o" -o "$to/bench.cubin" -L"$to" -lgin_device
    # Programs for NCCL EP, with memory and streams of CUDA's runtime.
    for program in nccl_ep nccl_ep_modes; do
        c++ -std=c++17 -O2 "bindings/c/tests/c/$program.cpp" -o "$to/$program" "${host[@]}" -I"$tools/include" -pthread \
            "$tools/lib/libcudart_static.a" -ldl -lrt
    done
    rm -f "$to"/operations.o "$to"/bench.o "$to"/gin_device.o "$to"/gin_device.fatbin "$to"/gin_device.*.cubin "$to"/*.bc "$to"/*.log
    cp scripts/gpu-run-capi.sh "$bundle/run-capi.sh"
}
if [ -x target/cuda-tools/nvidia/cu13/bin/nvcc ]; then
    capi
else
    echo "gpu-bundle: no nvcc in target/cuda-tools, so the bundle has no programs in C and CUDA C++" >&2
fi
git rev-parse HEAD >"$bundle/commit" 2>/dev/null || echo unknown >"$bundle/commit"

cat >"$bundle/run.sh" <<'EOF'
#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the tests on the GPUs of this machine. Arguments are those of the test binary (a filter, --list). Results are
# kept in $OUT, or in the folder out beside this script, so that the next run continues where this one was ended. The
# report is printed last.

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
# Trials write their tables to this folder.
export OUT="$out"
export GIN_GPU_JOURNAL="$out/journal"
report="$out/report.txt"

# A trial that hangs, or breaks the GPU's context, ends the process. The next run continues after it.
start=$SECONDS
limit="${GIN_GPU_SECONDS:-}"
for ((run = 1; run <= 40; run++)); do
    if [ -n "$limit" ]; then
        left=$((limit - (SECONDS - start)))
        export GIN_GPU_SECONDS=$((left > 0 ? left : 0))
    fi
    ./gpu-tests "$@" >"$out/log" 2>&1
    status=$?
    [ $status -eq 0 ] || cp "$out/log" "$out/log-failed"
    # 0: all passed; 101: some failed, and the run is complete.
    if [ $status -eq 0 ] || [ $status -eq 101 ]; then break; fi
    echo "run $run ended with status $status:"
    tail -25 "$out/log"
done

case " $* " in *" --list "*) cat "$out/log"; exit "$status" ;; esac
{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit)"
    head -3 "$out/log"
    sed -n '/^failures:/,$p' "$out/log" | grep -v '^test result' | cut -c1-1500 | head -300
    grep -E '^test .* (FAILED|failed)' "$out/log"
    grep '^test result' "$out/log"
    cat "$out"/driver-calls-*.txt 2>/dev/null
} >"$report"
cat "$report"
exit "$status"
EOF
chmod +x "$bundle/run.sh"

size=$(du -sm "$bundle" | cut -f1)
echo "$bundle: $size MiB; copy it to a machine with GPUs, and run the scripts run*.sh and sanitize.sh there"
[ "$size" -lt "$limit_mib" ] || { echo "gpu-bundle: $bundle has $size MiB, the limit is $limit_mib MiB" >&2; exit 1; }
