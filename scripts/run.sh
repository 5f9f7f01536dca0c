#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs the workloads on the devices of this machine, with the arguments for `cargo run`. Without a GPU it compiles no
# kernels to PTX; otherwise only those of the machine's first GPU.

set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh run

if [ ! -e /dev/nvidiactl ]; then
    [ $# -gt 0 ] || set -- --no-default-features
elif [ -z "${GIN_ARCHS:-}" ]; then
    # A GPU runs the PTX of a lower architecture, too. Without a known one the build compiles all.
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1) || true
    case ${capability%.*} in
        8) export GIN_ARCHS=sm_80 ;;
        9) export GIN_ARCHS=sm_90 ;;
        1?) export GIN_ARCHS=sm_100 ;;
    esac
fi
exec "${CARGO:-cargo}" run --release --quiet "$@" -- demo
