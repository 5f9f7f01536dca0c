#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs the missing tools for building and testing. If none is missing, it prints nothing.
#
# usage: setup.sh [run | nccl]
#
#   run    only what `make run` needs: host tools, and the kernel compiler if the machine has a GPU
#   nccl   only what linking kernels with NCCL's device functions needs: NVIDIA's package below target/nccl-device, and
#          LLVM's programs as a component of rustup's default toolchain
#
#   host tools      cargo, a C++ compiler
#   kernel compiler a rustc that can build `core` for nvptx64-nvidia-cuda (not with FEATURES=--no-default-features)
#   CUDA tools      ptxas, nvcc, nvdisasm, cuobjdump as Python wheels in target/cuda-tools; without them the tests that
#                   need them are reported as ignored
#   CMake           as a Python wheel in target/build-tools, if the machine has none
#   clang           a second C++ compiler for the headers of C++; without it that test is reported as ignored
#   headers         rdma-core's, libfabric's and the kernel's for mlx5, with which the tests compare gin's formats;
#                   without them those tests are reported as ignored
#   libfabric       the library; without it the tests of networks over it are reported as ignored
#
# As root on Debian it installs packages; otherwise it prints which packages to install. With CARGO_NET_OFFLINE=true it
# fetches nothing.

set -euo pipefail
cd "$(dirname "$0")/.."

# All of CUDA 13.0, whose PTX and cubins every driver from 580 on accepts. The two disassemblers exist in later versions
# only.
WHEELS=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85
    nvidia-nvjitlink==13.0.88
    nvidia-cuda-cuobjdump==13.5.37
    nvidia-cuda-nvdisasm==13.5.37
)
CMAKE=cmake==3.31.10
# The version that gin_build's functions for kernels were tested with.
NCCL=nvidia-nccl-cu13==2.30.7
# Not below CARGO_TARGET_DIR, because the tools belong to the checkout, wherever its builds are stored.
TOOLS=target/cuda-tools
# The first version that marks GPU functions convergent.
MIN_RUSTC_MINOR=96
KERNEL_PACKAGES=(rustc-web rust-web-src cargo-web)
# For systems without such packages. It has a date, because installing `nightly` would update an existing nightly.
KERNEL_TOOLCHAIN=nightly-2026-05-20

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

offline() { [ "${CARGO_NET_OFFLINE:-}" = true ]; }

can_apt() { ! offline && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_updated=
apt_update() {
    [ -z "$apt_updated" ] || return 0
    apt-get update -qq </dev/null >&2 || say "apt-get update failed; continuing with the existing package lists"
    apt_updated=1
}

apt_install() {
    say "installing Debian packages: $*"
    apt_update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >&2
}

host_tools() {
    command -v cargo >/dev/null || fail "cargo is missing; install Rust from https://rustup.rs and try again"
    local missing=()
    command -v c++ >/dev/null || missing+=(g++)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v make >/dev/null || missing+=(make)
    [ ${#missing[@]} -gt 0 ] || return 0
    if can_apt; then
        apt_install "${missing[@]}"
    else
        fail "missing: ${missing[*]}; install them (on Debian: apt-get install ${missing[*]})"
    fi
}

# is_new_enough RUSTC: succeeds if the version is 1.96 or later
is_new_enough() {
    local version minor
    version=$("$1" -V 2>/dev/null) || return 1
    minor=$(sed -n 's/^rustc 1\.\([0-9]*\).*/\1/p' <<<"$version")
    [ -n "$minor" ] && [ "$minor" -ge "$MIN_RUSTC_MINOR" ]
}

has_kernel_compiler() {
    [ -z "${GIN_RUSTC:-}${GIN_CARGO:-}" ] || return 0
    local root
    for root in "${RUSTUP_HOME:-$HOME/.rustup}"/toolchains/* /usr; do
        [ -e "$root/lib/rustlib/src/rust/library/core/src/lib.rs" ] || continue
        [ -x "$root/bin/rustc" ] && [ -x "$root/bin/cargo" ] && is_new_enough "$root/bin/rustc" && return 0
    done
    return 1
}

kernel_compiler() {
    case " ${FEATURES:-} " in *--no-default-features*) return 0 ;; esac
    has_kernel_compiler && return 0
    if can_apt && apt_install "${KERNEL_PACKAGES[@]}" && has_kernel_compiler; then
        return 0
    fi
    # Only root's account, as in a container, gets another toolchain; a user's account does not.
    if can_apt && command -v rustup >/dev/null; then
        say "this system has no packages with a kernel compiler; adding the toolchain $KERNEL_TOOLCHAIN to the installed ones"
        rustup toolchain install "$KERNEL_TOOLCHAIN" --profile minimal --component rust-src --no-self-update \
            </dev/null >&2 || true
        has_kernel_compiler && return 0
    fi
    fail "a compiler for GPU kernels is missing. Install one with
    rustup toolchain install nightly --component rust-src
or, on Debian, as root
    apt-get install ${KERNEL_PACKAGES[*]}
or leave the kernels for real GPUs out:
    make run FEATURES=--no-default-features"
}

# fetch FOLDER WHAT WHEEL...: installs Python wheels in a folder, unless it has them
fetch() {
    local folder=$1 what=$2 unfinished="$1.$$"
    shift 2
    [ "$(cat "$folder/.wheels" 2>/dev/null)" != "$*" ] || return 0
    if offline; then
        say "CARGO_NET_OFFLINE is true, so $what is not fetched"
        return 0
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        if can_apt; then
            apt_install python3 python3-pip || true
        fi
        if ! python3 -m pip --version >/dev/null 2>&1; then
            say "python3 with pip is missing (on Debian: apt-get install python3-pip), so there is no $what;" \
                "the tests that need it will be ignored"
            return 0
        fi
    fi
    say "fetching $what into $folder"
    rm -rf "$unfinished"
    mkdir -p "$unfinished"
    if ! python3 -m pip install --quiet --disable-pip-version-check --no-input --root-user-action=ignore \
        --no-deps --target "$unfinished" "$@" </dev/null >&2; then
        rm -rf "$unfinished"
        say "pip could not fetch $what; the tests that need it will be ignored"
        return 0
    fi
    chmod -R u+rwX "$unfinished"
    chmod +x "$unfinished"/nvidia/cu13/bin/* 2>/dev/null || true
    printf '%s\n' "$*" >"$unfinished/.wheels"
    rm -rf "$folder"
    mv "$unfinished" "$folder"
}

cuda_tools() {
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
        fetch "$TOOLS" "CUDA tools (ptxas, nvcc, nvdisasm; about 370 MB)" "${WHEELS[@]}"
    else
        say "no CUDA tools for $(uname -sm); the tests that need them will be ignored"
    fi
}

# A CMake for the test of the CMake package, where the machine has none.
cmake_tool() {
    command -v cmake >/dev/null || fetch target/build-tools "CMake" "$CMAKE"
}

second_compiler() {
    ! command -v clang++ >/dev/null || return 0
    can_apt && apt_install clang && return 0
    say "clang++ is missing (on Debian: apt-get install clang); the test that needs it will be ignored"
}

# Installs libfabric, and the headers with which tests compare formats: /usr/include/infiniband, /usr/include/rdma, and
# the kernel's below /usr/src.
oracle_headers() {
    local missing=() kernel
    [ -e /usr/include/infiniband/mlx5dv.h ] || missing+=(libibverbs-dev)
    # Brings the library, too.
    [ -e /usr/include/rdma/fabric.h ] || missing+=(libfabric-dev)
    compgen -G '/usr/src/linux-headers-*/include/linux/mlx5/mlx5_ifc.h' >/dev/null || missing+=(linux-headers-common)
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! can_apt; then
        say "headers of rdma-core, libfabric or the kernel are missing; the tests that need them will be ignored" \
            "(on Debian: apt-get install libibverbs-dev libfabric-dev linux-headers-amd64)"
        return 0
    fi
    if [ "${missing[-1]}" = linux-headers-common ]; then
        # The package for all architectures is named after the kernel's version. The list of packages may have to be
        # fetched first.
        unset 'missing[-1]'
        kernel=$(kernel_headers)
        if [ -z "$kernel" ]; then
            apt_update
            kernel=$(kernel_headers)
        fi
        if [ -n "$kernel" ]; then
            missing+=("$kernel")
        else
            say "apt has no package with the kernel's headers; the tests that need them will be ignored"
        fi
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    apt_install "${missing[@]}" ||
        say "apt could not install ${missing[*]}; the tests that need them will be ignored"
}

# Prints the name of the package with the headers of the newest kernel.
kernel_headers() {
    apt-cache search --names-only '^linux-headers-[0-9].*-common$' | cut -d' ' -f1 | sort -V | tail -n 1
}

# NCCL's bitcode, headers and library, and LLVM's programs.
nccl_device() {
    fetch target/nccl-device "NCCL's device library (about 216 MB)" "$NCCL"
    local bin
    for bin in "${RUSTUP_HOME:-$HOME/.rustup}"/toolchains/*/lib/rustlib/*/bin; do
        [ ! -x "$bin/llvm-link" ] || return 0
    done
    if ! offline && command -v rustup >/dev/null && rustup component add llvm-tools </dev/null >&2; then
        return 0
    fi
    say "LLVM's programs are missing; install them (rustup component add llvm-tools), or name the folder of llvm-link," \
        "opt and llc with GIN_LLVM_BIN"
}

mkdir -p target
# Cargo's mark of a target folder: backups skip the folder, and gin-build recognises it by this file.
[ -e target/CACHEDIR.TAG ] || printf 'Signature: 8a477f597d28d172789f06886806bc55\n' >target/CACHEDIR.TAG
# The lock keeps two parallel runs of make from installing the same packages twice.
if command -v flock >/dev/null; then
    exec 9>target/.setup-lock
    flock 9
fi
if [ "${1:-}" = nccl ]; then
    nccl_device
    exit
fi
host_tools
if [ "${1:-}" = run ]; then
    [ ! -e /dev/nvidiactl ] || kernel_compiler
    exit
fi
kernel_compiler
cuda_tools
cmake_tool
second_compiler
oracle_headers
