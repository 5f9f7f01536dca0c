#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs the libraries and headers for C and C++ below DESTDIR and PREFIX (/usr/local). The device functions are
# installed if `make device-lib` made them, and the plugin for NCCL if `make nccl-plugin` did. LIBRARIES names a folder
# with libgin_capi.so and libgin_capi.a to install instead of building them.

set -euo pipefail
cd "$(dirname "$0")/.."

prefix="${PREFIX:-/usr/local}"
target="${CARGO_TARGET_DIR:-target}"
case "$prefix" in
/*) ;;
*) echo "install: PREFIX=$prefix is not an absolute path; DESTDIR may come before it" >&2; exit 2 ;;
esac
root="${DESTDIR:-}$prefix"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
IFS=. read -r major minor _ <<<"$version"
# Before version 1.0 each minor number is an interface of its own.
soversion="$major.$minor"

libraries="${LIBRARIES:-}"
if [ -z "$libraries" ]; then
    libraries="$target/release"
    # The soname is not a setting of the package: cargo would pass it on to libraries that contain it.
    # shellcheck disable=SC2086
    "${CARGO:-cargo}" rustc --release -p gin-capi --lib --crate-type cdylib ${FEATURES:-} -- \
        -Clink-arg="-Wl,-soname,libgin.so.$soversion" -Cstrip=debuginfo
    # shellcheck disable=SC2086
    "${CARGO:-cargo}" rustc --release -p gin-capi --lib --crate-type staticlib ${FEATURES:-}
fi

# fill FROM TO: copies a template with its values
fill() {
    sed -e "s|@PREFIX@|$prefix|g; s|@VERSION@|$version|g; s|@SOVERSION@|$soversion|g" \
        -e "s|@MAJOR@|$major|g; s|@MINOR@|$minor|g" "bindings/c/install/$1" >"$2"
    chmod 644 "$2"
}

install -d "$root/include" "$root/lib/pkgconfig" "$root/lib/cmake/gin" "$root/share/gin"
install -m 644 bindings/c/include/* "$root/include"
install -m 755 "$libraries/libgin_capi.so" "$root/lib/libgin.so.$version"
ln -sf "libgin.so.$version" "$root/lib/libgin.so.$soversion"
ln -sf "libgin.so.$soversion" "$root/lib/libgin.so"
install -m 644 "$libraries/libgin_capi.a" "$root/lib/libgin.a"
fill gin.pc.in "$root/lib/pkgconfig/gin.pc"
fill ginConfig.cmake.in "$root/lib/cmake/gin/ginConfig.cmake"
fill ginConfigVersion.cmake.in "$root/lib/cmake/gin/ginConfigVersion.cmake"
if [ -e "$target/device-lib/libgin_device.a" ]; then
    # Those of an earlier installation may be of other architectures.
    rm -f "$root/share/gin"/gin_device.*
    install -m 644 "$target/device-lib/libgin_device.a" "$root/lib"
    install -m 644 "$target"/device-lib/gin_device.*.ptx "$target"/device-lib/gin_device.*.cubin \
        "$target"/device-lib/gin_device.*.bc \
        "$target/device-lib/gin_device.fatbin" "$root/share/gin"
else
    echo "install: no device functions for CUDA C++; make device-lib makes them"
fi
if [ -e "$target/nccl/libnccl-rma-gin.so" ]; then
    install -m 755 "$target/nccl/libnccl-rma-gin.so" "$root/lib"
else
    echo "install: no plugin for NCCL; make nccl-plugin makes it"
fi
echo "installed gin $version in $root"
