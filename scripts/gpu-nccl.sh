#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Builds what runs NCCL's device functions from Rust on a GPU machine without Rust: kernels in Rust and in CUDA C++, the
# programs nccl_ring, gin-bench and gin-nccl-bench, gin's plugin for NCCL, and run.sh. The folder is gpu-nccl in the
# target folder, or the first argument. NCCL's library is that of the machine.

set -euo pipefail
cd "$(dirname "$0")/.."

target="${CARGO_TARGET_DIR:-target}"
to="${1:-$target/gpu-nccl}"
nvcc=target/cuda-tools/nvidia/cu13/bin/nvcc
headers=target/nccl-device/nvidia/nccl/include
[ -x "$nvcc" ] || { echo "gpu-nccl: no $nvcc; make setup fetches it" >&2; exit 1; }
[ -d "$headers" ] || { echo "gpu-nccl: no $headers; make nccl-device fetches them" >&2; exit 1; }

rm -rf "$to"
mkdir -p "$to"
"${CARGO:-cargo}" run --release -p gin-build --example ptx -- --check --nccl --to "$to" --features nccl \
    bindings/nccl/kernels sm_90 | tee "$to/registers.txt"
"$nvcc" -std=c++17 -arch=sm_90 -I"$headers" -cubin -Xptxas -v bindings/nccl/host/examples/peer.cu -o "$to/peer.cubin" \
    2>&1 | grep -E 'Compiling|Used|stack' | tee -a "$to/registers.txt"
"${CARGO:-cargo}" build --release -p gin-nccl-host --example nccl_ring
strip -o "$to/nccl_ring" "$target/release/examples/nccl_ring"
"${CARGO:-cargo}" rustc --release -p gin-nccl --lib --crate-type cdylib -- -Cstrip=debuginfo
strip -o "$to/libnccl-rma-gin.so" "$target/release/libgin_nccl.so"
"${CARGO:-cargo}" build --release -p gin-nccl-bench --features nccl
"${CARGO:-cargo}" build --release -p gin-bench
strip -o "$to/gin-nccl-bench" "$target/release/gin-nccl-bench"
strip -o "$to/gin-bench" "$target/release/gin-bench"
rm -f "$to"/*.ptxas
git rev-parse HEAD >"$to/commit" 2>/dev/null || echo unknown >"$to/commit"

cat >"$to/run.sh" <<'EOF'
#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs nccl_ring with one rank for each GPU of this machine, with two ranks on its only GPU, or with $RANKS ranks that
# share the GPUs: over gin's plugin, with NVLink teams and without, and on each further library of NCCL that an argument
# names (its version must be given as GIN_NCCL_NEWEST). Then it times NCCL's proxy beside gin's, and NCCL's GDAKI over
# gin's software NIC. Logs are in $OUT, or in the folder out.

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
wheel=$(python3 -c 'import nvidia.nccl as nccl; print(list(nccl.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null)
libraries=("${GIN_NCCL_LIBRARY:-${wheel:-libnccl.so.2}}" "$@")
export NCCL_RMA_PLUGIN="${NCCL_RMA_PLUGIN:-$PWD/libnccl-rma-gin.so}" NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
failed=0
for library in "${libraries[@]}"; do
    for team in all 1; do
        log="$out/$(basename "$(dirname "$library")")-$team.log"
        echo "== $library, NCCL_LSA_TEAM_SIZE=$team"
        [ "$team" = all ] && unset NCCL_LSA_TEAM_SIZE || export NCCL_LSA_TEAM_SIZE=$team
        GIN_NCCL_LIBRARY=$library timeout 300 ./nccl_ring gin-nccl-kernels.sm_90.cubin peer.cubin ${RANKS:-} \
            >"$log" 2>&1 || failed=1
        tail -n 12 "$log"
    done
done
unset NCCL_LSA_TEAM_SIZE
export GIN_NCCL_LIBRARY=${libraries[0]}
bench() { # NAME ARGUMENTS...
    local name=$1
    shift
    echo "== gin bench nccl, $name"
    timeout 600 ./gin-bench nccl "$@" 2>"$out/$name.log" | tee "$out/$name.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || { tail -n 3 "$out/$name.log"; failed=1; }
}
bench proxy
NCCL_GIN_PLUGIN="$PWD/libnccl-rma-gin.so" NCCL_GIN_TYPE=3 bench gdaki --repeats 3
# Without a network NCCL must refuse, with the remedy.
NCCL_RMA_PLUGIN=none timeout 60 ./nccl_ring gin-nccl-kernels.sm_90.cubin >"$out/none.log" 2>&1
echo "== without a plugin: $(tail -n 1 "$out/none.log")"
exit "$failed"
EOF
chmod +x "$to/run.sh"
du -sh "$to"
