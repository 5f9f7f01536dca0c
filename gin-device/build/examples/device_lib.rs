// SPDX-License-Identifier: MIT OR Apache-2.0

//! Makes a library for CUDA C++ of the device functions of a crate: `device_lib FOLDER NAME OUT [ARCH ...]`.
//!
//! `REGISTERS` limits the registers of each function; 128 by default.

use std::path::Path;
use std::process::ExitCode;

use gin_build::{Arch, KernelBuilder, UsePtxas};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: device_lib FOLDER NAME OUT [ARCH ...]";
    let (folder, name, out) = (args.next().ok_or(usage)?, args.next().ok_or(usage)?, args.next().ok_or(usage)?);
    let mut archs = args.map(|arch| arch.parse()).collect::<Result<Vec<Arch>, _>>()?;
    if archs.is_empty() {
        archs = vec![Arch::Sm80, Arch::Sm90, Arch::Sm100];
    }
    let built = KernelBuilder::new(folder).archs(archs).ptxas(UsePtxas::No).bitcode(true).build()?;
    let registers = std::env::var("REGISTERS").map_or(Ok(128), |registers| registers.parse())?;
    let library = built.write_device_library(Path::new(&out), &name, registers)?;
    println!("{}", library.archive.display());
    Ok(())
}
