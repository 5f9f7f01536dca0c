# SPDX-License-Identifier: MIT OR Apache-2.0

# Builds without a compiler for GPU kernels: make run FEATURES=--no-default-features
FEATURES ?=
CARGO ?= cargo
export FEATURES

# Duration of `make stress` and `make soak`
SECONDS_OF_STRESS ?= 300
SECONDS_OF_SOAK ?= 600
# Size of the searches of `make night`
PROGRAMS_OF_NIGHT ?= 3000
SEEDS_OF_NIGHT ?= 600

# Architectures of `make device-lib`
ARCHS ?= sm_80 sm_90 sm_100
# Folder of `make install`
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: help setup run test test-rdma test-torch stress soak night gpu-test gpu-bundle offline-bundle device-lib nccl-plugin nccl-device nccl-bench install release bench doc guide fmt lint clean clean-tools

help: ## Lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Installs the missing tools for building and testing
	@scripts/setup.sh

run: ## Runs the workloads on the devices of this machine and prints one table
	@scripts/run.sh $(FEATURES)

test: setup ## Runs all tests; a test without its GPU or tool is reported as ignored
	@scripts/test.sh $(FEATURES)

test-rdma: setup ## Runs the tests over RDMA in virtual machines with Soft-RoCE; SMOKE=smoke for a selection
	@scripts/test-rdma.sh $(SMOKE)

test-torch: setup ## Installs torch below the target folder and runs all tests of the Python package
	@GIN_PY_TORCH=1 $(CARGO) test -p gin-py $(FEATURES) --test python

stress: setup ## Runs random faults, then healthy jobs on a busy machine, SECONDS_OF_STRESS (300) each; GIN_SEED repeats
	@GIN_STRESS_SECONDS=$(SECONDS_OF_STRESS) $(CARGO) test -p gin-conformance $(FEATURES) --test faults -- random

soak: setup ## Runs random operations across processes for SECONDS_OF_SOAK (600): memory, descriptors, threads stay flat
	@GIN_SOAK_SECONDS=$(SECONDS_OF_SOAK) $(CARGO) test -p gin-conformance $(FEATURES) --test faults

night: setup ## Searches for hours: programs, seeds, all ways of the suite, deeper models, stress, soak, all of RDMA
	@PROGRAMS=$(PROGRAMS_OF_NIGHT) SEEDS=$(SEEDS_OF_NIGHT) MAKE="$(MAKE)" scripts/night.sh $(FEATURES)

gpu-test: setup ## Runs the tests that need GPUs
	@$(CARGO) test --release -p gpu-tests -p gin-examples $(FEATURES)

gpu-bundle: setup ## Builds the tests and the command into one folder for a GPU machine without Rust
	@scripts/gpu-bundle.sh

offline-bundle: ## Packs sources, compiler and dependencies for a machine without a network; SPLIT=55M splits it
	@scripts/offline-bundle.sh

device-lib: setup ## Makes the device functions for CUDA C++ in target/device-lib, for ARCHS (sm_80 sm_90 sm_100)
	@rm -rf "$${CARGO_TARGET_DIR:-target}/device-lib"
	@$(CARGO) run --quiet -p gin-build --example device_lib -- bindings/c/device gin_device \
		"$${CARGO_TARGET_DIR:-target}/device-lib" $(ARCHS)

nccl-plugin: ## Builds the plugin for NCCL, target/nccl/libnccl-rma-gin.so
	@$(CARGO) rustc --release -p gin-nccl --lib --crate-type cdylib $(FEATURES) -- -Cstrip=debuginfo
	@install -D -m 755 "$${CARGO_TARGET_DIR:-target}/release/libgin_nccl.so" \
		"$${CARGO_TARGET_DIR:-target}/nccl/libnccl-rma-gin.so"

nccl-device: ## Fetches NCCL's device functions and LLVM's programs, which kernels in Rust for NCCL are linked with
	@scripts/setup.sh nccl

nccl-bench: ## Builds gin-nccl-bench, which `gin bench nccl` runs, into target/release; needs make nccl-device
	@$(CARGO) build --release -p gin-nccl-bench --features nccl

install: ## Installs the libraries and headers for C and C++ below PREFIX (/usr/local) and DESTDIR
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" scripts/install.sh

release: setup ## Checks and builds the packages and the wheel of a release, and uploads nothing
	@scripts/release.sh

bench: setup ## Measures operations on this machine and counts instructions of the probe kernels
	@$(CARGO) run --release --quiet -p gin-bench $(FEATURES)
	@$(CARGO) run --release --quiet -p gin-bench $(FEATURES) -- sass

doc: setup ## Builds the documentation; a warning is an error
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps --workspace $(FEATURES)

guide: ## Builds the guide as a book in target/guide; needs mdbook
	@command -v mdbook >/dev/null || { echo "mdbook is missing; install it with: cargo install mdbook --locked"; exit 1; }
	mdbook build docs/guide

fmt: ## Formats the code
	$(CARGO) fmt --all

lint: setup ## Checks formatting and runs clippy, with and without the kernels for real GPUs
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings
	$(CARGO) clippy --workspace --all-targets --no-default-features -- -D warnings

clean: ## Removes build results, but not the CUDA tools
	$(CARGO) clean --profile dev
	$(CARGO) clean --release
	$(CARGO) clean --doc
	rm -rf "$${CARGO_TARGET_DIR:-target}/gin-build" "$${CARGO_TARGET_DIR:-target}/tmp"

clean-tools: ## Removes the CUDA tools and CMake as well
	rm -rf target/cuda-tools target/build-tools
