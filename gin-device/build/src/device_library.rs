// SPDX-License-Identifier: MIT OR Apache-2.0

//! Device functions of a crate as files that CUDA C++ programs link.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Built;
use crate::arch::Arch;
use crate::error::BuildError;
use crate::ptx;
use crate::ptxas::Ptxas;
use crate::sources;

/// Device functions of a crate as files that CUDA C++ programs link. [`Built::write_device_library`] writes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLibrary {
    /// PTX for `nvJitLinkAddData`, for each architecture.
    pub ptx: Vec<(Arch, PathBuf)>,
    /// Relocatable machine code, for each architecture.
    pub cubins: Vec<(Arch, PathBuf)>,
    /// LLVM's bitcode for clang as a compiler of CUDA C++, for each architecture of which the build kept it.
    pub bitcode: Vec<(Arch, PathBuf)>,
    /// The machine code of all architectures and the newest PTX in one file.
    pub fat_binary: PathBuf,
    /// The same as an object of the host, for `nvcc -rdc=true`.
    pub object: PathBuf,
    /// The same as a library of that object.
    pub archive: PathBuf,
}

/// Runs a tool of CUDA or of the host.
fn run<S: AsRef<OsStr>>(tool: &Path, arguments: impl IntoIterator<Item = S>) -> Result<String, BuildError> {
    let output = Command::new(tool).args(arguments).output().map_err(BuildError::io("run", tool))?;
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(said) } else { Err(BuildError::Link { tool: tool.to_owned(), output: said }) }
}

impl Built {
    /// Writes the modules as a library `NAME` for programs in CUDA C++: `NAME.ARCH.ptx`, `NAME.ARCH.cubin`,
    /// `NAME.fatbin`, `NAME.o` and `libNAME.a` in `folder`; `NAME.ARCH.bc` if the build kept
    /// [bitcode](crate::KernelBuilder::bitcode).
    ///
    /// The crate exports functions by `#[unsafe(no_mangle)] pub extern "C" fn`. All its other symbols are local or
    /// weak, so several such libraries link into one program.
    ///
    /// `registers` limits the registers of each function. A kernel that calls one takes at least as many, and so has
    /// blocks of 65536 / `registers` threads at most.
    ///
    /// Needs `ptxas`, `fatbinary` beside it, and `c++` and `ar` of the host.
    ///
    /// # Errors
    /// [`BuildError::NoPtxas`]; [`BuildError::Link`] with the output of the tool that failed; [`BuildError::Io`].
    pub fn write_device_library(&self, folder: &Path, name: &str, registers: u32) -> Result<DeviceLibrary, BuildError> {
        let ptxas = Ptxas::find(folder).map_err(|reason| BuildError::NoPtxas { reason })?;
        let (ptxas, bin) = (ptxas.path(), ptxas.path().parent().unwrap_or(Path::new("")));
        fs::create_dir_all(folder).map_err(BuildError::io("create", folder))?;
        // Included by its path, from another folder.
        let folder = &fs::canonicalize(folder).map_err(BuildError::io("find", folder))?;
        let file = |end: &str| folder.join(format!("{name}.{end}"));
        let mut modules: Vec<_> = self.modules.iter().collect();
        modules.sort_by_key(|module| module.arch);
        let (mut all_ptx, mut cubins, mut bitcode, mut images) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for module in modules {
            let (text, cubin) = (file(&format!("{}.ptx", module.arch)), file(&format!("{}.cubin", module.arch)));
            sources::replace(&text, &ptx::for_linking(&module.text))?;
            let (arch, max) = (format!("-arch={}", module.arch), format!("-maxrregcount={registers}"));
            let options = [&arch, &max, "--compile-only", "-o"].map(OsStr::new);
            run(ptxas, options.into_iter().chain([cubin.as_os_str(), text.as_os_str()]))?;
            images.push(format!("--image3=kind=elf,sm={},file={}", number(module.arch), cubin.display()));
            if let Some(kept) = &module.bitcode {
                let to = file(&format!("{}.bc", module.arch));
                fs::copy(kept, &to).map_err(BuildError::io("copy", kept))?;
                bitcode.push((module.arch, to));
            }
            all_ptx.push((module.arch, text));
            cubins.push((module.arch, cubin));
        }
        if let Some((arch, text)) = all_ptx.last() {
            images.push(format!("--image3=kind=ptx,sm={},file={}", number(*arch), text.display()));
        }
        let (fat_binary, embedded, object) = (file("fatbin"), file("fatbin.c"), file("o"));
        let archive = folder.join(format!("lib{name}.a"));
        let mut arguments = vec!["-64".to_owned(), "--cmdline=--compile-only".to_owned(), "--device-c".to_owned()];
        arguments.extend(images);
        arguments.push(format!("--create={}", fat_binary.display()));
        arguments.push(format!("--embedded-fatbin={}", embedded.display()));
        run(&bin.join("fatbinary"), arguments)?;
        // As `nvcc -dc` makes an object of a fat binary. The identifier tells objects of a program apart.
        let root = bin.parent().unwrap_or(Path::new(""));
        let id: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let arguments = [
            "-c".to_owned(),
            "-fPIC".to_owned(),
            "-x".to_owned(),
            "c++".to_owned(),
            format!("-DFATBINFILE={:?}", embedded.display().to_string()),
            "-D__CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__".to_owned(),
            format!("-D__NV_MODULE_ID=_{id}_device_library"),
            "-Wno-psabi".to_owned(),
            format!("-I{}", root.join("include").display()),
            bin.join("crt/prelink.stub").display().to_string(),
            "-o".to_owned(),
            object.display().to_string(),
        ];
        run(Path::new("c++"), arguments)?;
        // The object holds what this file says.
        fs::remove_file(&embedded).map_err(BuildError::io("remove", &embedded))?;
        let _ = fs::remove_file(&archive);
        run(Path::new("ar"), ["rcs".as_ref(), archive.as_os_str(), object.as_os_str()])?;
        Ok(DeviceLibrary { ptx: all_ptx, cubins, bitcode, fat_binary, object, archive })
    }
}

/// Returns the number of an architecture, as `fatbinary` writes it.
fn number(arch: Arch) -> &'static str {
    arch.name().trim_start_matches("sm_")
}
