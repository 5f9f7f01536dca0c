#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs the Python package and pytest from the files beside this script, and runs the package's tests: on one GPU,
# then on all GPUs of this machine. It needs Python 3.10 or later with torch, and no network. PYTHON names the
# interpreter. Arguments are those of pytest. Results are kept in $OUT, or in the folder out beside this script. The
# sums are printed last.
#
# gpu-bundle.sh copies this script, as run-python.sh, into the folder that it builds.

set -uo pipefail
cd "$(dirname "$0")"
out="${OUT:-out}"
mkdir -p "$out"
out=$(cd "$out" && pwd)
python="${PYTHON:-python3}"
packages="$out/python-packages"

if ! "$python" -c 'import torch; print("torch", torch.__version__, "with", torch.cuda.device_count(), "GPUs")'; then
    echo "run-python: torch cannot be imported by $python; PYTHON names another interpreter" >&2
    exit 1
fi
rm -rf "$packages"
"$python" -m pip install --quiet --no-index --no-warn-script-location --root-user-action=ignore --find-links python/wheels \
    --target "$packages" python/wheels/gincomm-*.whl pytest || exit 1
tests=(python/tests)
if ! "$python" -c 'import numpy' 2>/dev/null; then
    echo "run-python: NumPy is missing, so only the tests of torch run"
    tests=(python/tests/test_torch*.py)
fi
export PYTHONPATH="$packages" PYTHONDONTWRITEBYTECODE=1
export GIN_PY_EXAMPLES="$PWD/python/examples" GIN_PY_PTX="$PWD/python/ptx/linked.ptx" GIN_PY_OTHER_PTX="$PWD/python/ptx/other.ptx"

status=0
sums=()
# run NAME GPUS: runs the tests with these GPUs
run() {
    local name=$1 gpus=$2
    shift 2
    # A test that hangs prints the places of all threads after two minutes.
    CUDA_VISIBLE_DEVICES=$gpus timeout -k 10 900 "$python" -m pytest -p no:cacheprovider -rfE -o faulthandler_timeout=120 \
        "${tests[@]}" "$@" >"$out/python-$name.txt" 2>&1 </dev/null || status=$?
    sed -n '/short test summary/,$p' "$out/python-$name.txt" | cut -c1-600 | head -60
    sums+=("$name: $(tail -n 1 "$out/python-$name.txt")")
}
all="${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
run 1-gpu "${all%%,*}" "$@"
case "$all" in *,*) run all-gpus "$all" "$@" ;; *) sums+=("all-gpus: this machine shows one GPU only") ;; esac

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
    echo "commit $(cat commit 2>/dev/null)"
    "$python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)'
    printf '%s\n' "${sums[@]}"
} | tee "$out/report-python.txt"
exit "$status"
