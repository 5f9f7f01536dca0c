#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Packs what building and testing need on a machine without a network: the files of this checkout, a Rust toolchain that
# also compiles kernels, the sources of all dependencies, and Python's packages of the tests. Needs rustup, git, xz and
# a network. The result is a folder with unpack.sh, offline-bundle in the target folder or the first argument.
#
#   SPLIT=55M          splits the archive into files of at most this size
#   PYTHON=3.12        version of the other machine's Python; this machine's by default

set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
bundle=${1:-$target/offline-bundle}
# The first release that compiles kernels; it compiles the host's crates, too.
RUST=1.96.0
# The packages of bindings/python/tests/common/mod.rs
PACKAGES=('numpy>=2.1,<3' 'pytest>=8,<9')

command -v rustup >/dev/null || { echo "offline-bundle: rustup is missing; see https://rustup.rs" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/gin-offline.XXXXXX")
trap 'rm -rf "$work"' EXIT

# Its own home: the toolchain is for the other machine.
RUSTUP_HOME=$work/rustup rustup --quiet toolchain install "$RUST" --profile minimal --component rust-src --no-self-update
toolchain=$(echo "$work"/rustup/toolchains/*)
rm -rf "$work"/rustup/{downloads,tmp,update-hashes,settings.toml} "$toolchain/share"

mkdir "$work/gin"
git ls-files -z | tar --null --files-from - -c | tar -x -C "$work/gin"
git rev-parse HEAD >"$work/gin/COMMIT"

# Kernels compile `core` from its source, whose workspace has dependencies too.
mkdir "$work/cargo"
RUSTC_BOOTSTRAP=1 RUSTC=$toolchain/bin/rustc "$toolchain/bin/cargo" vendor --quiet --locked --versioned-dirs \
    --sync "$toolchain/lib/rustlib/src/rust/library/Cargo.toml" "$work/vendor" >/dev/null

version=${PYTHON:-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version "$version" \
    --dest "$work/wheels" "${PACKAGES[@]}" ||
    echo "offline-bundle: pip could not fetch packages for Python $version, so the tests of Python will be ignored" >&2

rm -rf "$bundle"
mkdir -p "$bundle"
tar -C "$work" -c . | xz -T0 -6 | split -d -b "${SPLIT:-1G}" - "$bundle/gin-offline.tar.xz."
cat >"$bundle/unpack.sh" <<'END'
#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Unpacks the archive beside this script into a folder, and writes the file env there, which sets the variables for
# building without a network.
#
# usage: unpack.sh FOLDER

set -euo pipefail
[ $# = 1 ] || { echo "usage: unpack.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
to=$(cd "$1" && pwd)
cat "$(dirname "$0")"/gin-offline.tar.xz.* | tar -xJ -C "$to"
cat >"$to/cargo/config.toml" <<TOML
[source.crates-io]
replace-with = "vendored"

[source.vendored]
directory = "$to/vendor"
TOML
toolchain=$(echo "$to"/rustup/toolchains/*)
cat >"$to/env" <<ENV
export RUSTUP_HOME="$to/rustup" CARGO_HOME="$to/cargo" PATH="$toolchain/bin:\$PATH"
export CARGO_NET_OFFLINE=true PIP_NO_INDEX=1 PIP_FIND_LINKS="$to/wheels"
ENV
echo "Next: . $to/env && cd $to/gin && make run"
END
chmod +x "$bundle/unpack.sh"
du -sh "$bundle" | awk '{ print $2 ": " $1 "B; copy it to the other machine, and run unpack.sh there" }'
