#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs missing requirements of building and testing. If nothing is missing, it only checks and prints nothing.
#
#   host tools      cargo, a C++ compiler
#   kernel compiler a Rust compiler that can build `core` for nvptx64-nvidia-cuda (not with
#                   FEATURES=--no-default-features)
#   CUDA tools      ptxas, nvcc, nvdisasm, cuobjdump as Python wheels in target/cuda-tools; without them, the tests that
#                   need them report themselves as ignored
#   headers         mlx5 headers of rdma-core and of the Linux kernel, with which tests compare gin's formats; without
#                   them, the tests that need them report themselves as ignored
#
# As root on Debian it installs packages; otherwise it prints which packages to install.

set -euo pipefail
cd "$(dirname "$0")/.."

# The versions of CUDA 13.0: every driver from 580 on accepts its PTX and cubins. Of the two disassemblers there are
# only later versions.
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
# Not in CARGO_TARGET_DIR: the tools belong to the checkout, regardless of its target folder.
TOOLS=target/cuda-tools
# The first version that marks GPU functions convergent.
MIN_RUSTC_MINOR=96
KERNEL_PACKAGES=(rustc-web rust-web-src cargo-web)
# The fallback without these packages. It has a date, because installing `nightly` would update an existing nightly.
KERNEL_TOOLCHAIN=nightly-2026-05-20

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_updated=
apt_update() {
    [ -z "$apt_updated" ] || return 0
    apt-get update -qq </dev/null >&2 || say "apt-get update failed; continuing with the present package lists"
    apt_updated=1
}

apt_install() {
    say "installing Debian packages: $*"
    apt_update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >&2
}

host_tools() {
    command -v cargo >/dev/null || fail "cargo is missing; install Rust from https://rustup.rs and run make setup again"
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

# is_new_enough RUSTC: succeeds if the compiler is 1.96 or later
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
    # Adds a toolchain to the root account of a container, but not to a person's account.
    if can_apt && command -v rustup >/dev/null; then
        say "no packages of a kernel compiler; adding the toolchain $KERNEL_TOOLCHAIN"
        rustup toolchain install "$KERNEL_TOOLCHAIN" --profile minimal --component rust-src --no-self-update \
            </dev/null >&2 || true
        has_kernel_compiler && return 0
    fi
    fail "the compiler for GPU kernels is missing. Install it with
    rustup toolchain install nightly --component rust-src
or, on Debian, as root
    apt-get install ${KERNEL_PACKAGES[*]}
or build without the kernels for real GPUs:
    make run FEATURES=--no-default-features"
}

cuda_tools() {
    local wanted="${WHEELS[*]}"
    [ "$(cat "$TOOLS/.wheels" 2>/dev/null)" != "$wanted" ] || return 0
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        say "no CUDA tools for $(uname -sm); the tests that need them will be ignored"
        return 0
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        if can_apt; then
            apt_install python3 python3-pip || true
        fi
        if ! python3 -m pip --version >/dev/null 2>&1; then
            say "python3 with pip is missing (on Debian: apt-get install python3-pip), so ptxas cannot be installed;" \
                "the tests that need it will be ignored"
            return 0
        fi
    fi
    say "fetching CUDA tools (ptxas, nvcc, nvdisasm; about 370 MB) into $TOOLS"
    local unfinished="$TOOLS.$$"
    rm -rf "$unfinished"
    mkdir -p "$unfinished"
    if ! python3 -m pip install --quiet --disable-pip-version-check --no-input --root-user-action=ignore \
        --no-deps --target "$unfinished" "${WHEELS[@]}" </dev/null >&2; then
        rm -rf "$unfinished"
        say "the CUDA tools could not be fetched; the tests that need them will be ignored"
        return 0
    fi
    chmod -R u+rwX "$unfinished"
    chmod +x "$unfinished"/nvidia/cu13/bin/* 2>/dev/null || true
    printf '%s\n' "$wanted" >"$unfinished/.wheels"
    rm -rf "$TOOLS"
    mv "$unfinished" "$TOOLS"
    say "CUDA tools are ready"
}

# Installs the headers with which tests compare the NIC's formats: rdma-core's in /usr/include/infiniband, and the
# kernel's in /usr/src.
oracle_headers() {
    local missing=() kernel
    [ -e /usr/include/infiniband/mlx5dv.h ] || missing+=(libibverbs-dev)
    compgen -G '/usr/src/linux-headers-*/include/linux/mlx5/mlx5_ifc.h' >/dev/null || missing+=(linux-headers-common)
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! can_apt; then
        say "rdma-core's or the kernel's headers are missing; the tests that need them will be ignored" \
            "(on Debian: apt-get install libibverbs-dev linux-headers-amd64)"
        return 0
    fi
    if [ "${missing[-1]}" = linux-headers-common ]; then
        # The package of the kernel's headers has the kernel's version in its name and is the same for all
        # architectures. apt may have to fetch its package lists first.
        unset 'missing[-1]'
        kernel=$(kernel_headers)
        if [ -z "$kernel" ]; then
            apt_update
            kernel=$(kernel_headers)
        fi
        if [ -n "$kernel" ]; then
            missing+=("$kernel")
        else
            say "apt knows no package with the kernel's headers; the tests that need them will be ignored"
        fi
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    apt_install "${missing[@]}" ||
        say "${missing[*]} could not be installed; the tests that need them will be ignored"
}

# Prints the name of the package with the headers of the newest kernel.
kernel_headers() {
    apt-cache search --names-only '^linux-headers-[0-9].*-common$' | cut -d' ' -f1 | sort -V | tail -n 1
}

mkdir -p target
# Cargo's mark of a target folder: backups skip the folder, and gin-build recognises it by the mark.
[ -e target/CACHEDIR.TAG ] || printf 'Signature: 8a477f597d28d172789f06886806bc55\n' >target/CACHEDIR.TAG
# Without the lock, two concurrent runs of make would install the same packages twice.
if command -v flock >/dev/null; then
    exec 9>target/.setup-lock
    flock 9
fi
host_tools
kernel_compiler
cuda_tools
oracle_headers
