#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Checks and builds what a release uploads: the packages in target/package, the wheel in target/wheels. Uploads nothing.
# docs/releasing.md has the other steps.

set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

fail() { echo "release: $*" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || fail "the checkout has changes: commit them"
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
grep -qE "^## ${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
    fail "CHANGELOG.md has no heading for $version with its date"

# Compiles each crate from its package, but no kernels: their own build would look for gin's other crates on crates.io,
# where this version is not yet. The test of packages compiles kernels.
${CARGO:-cargo} publish --workspace --dry-run --no-default-features
# A dry run leaves the packages there.
cp "$target"/package/tmp-registry/*-"$version".crate "$target/package"
# All architectures that ship. A wheel with symbols of a newer glibc than the tag allows is an error.
unset GIN_ARCHS
python3 -m pip wheel --quiet --no-deps --wheel-dir "$target/wheels" ./bindings/python \
    --config-settings=build-args='--compatibility manylinux_2_34'
ls "$target"/package/*-"$version".crate "$target"/wheels/gincomm-"$version"-*.whl
