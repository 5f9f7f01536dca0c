// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels by name: the linked ones, and the kernels of PTX that the program loads.

use crate::error::{OrRaise, Raised};
use crate::guard::{Guarded, check_process};
use gin_gpu::{Device, EmbeddedModules, Function, GpuError, ModuleSource};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::Arc;

#[cfg(feature = "cuda")]
#[expect(unreachable_pub, reason = "gin-build writes the table for every crate")]
mod shipped {
    include!(concat!(env!("OUT_DIR"), "/shipped.rs"));
}

#[cfg(feature = "cuda")]
#[expect(unreachable_pub, reason = "as above")]
mod examples {
    include!(concat!(env!("OUT_DIR"), "/examples.rs"));
}

/// The crate of the kernels that `gincomm.ep` launches.
const EP: &str = "gin_ep_kernels";

/// The linked kernels as PTX, by crate.
#[cfg(feature = "cuda")]
pub(crate) const TABLES: &[(&str, EmbeddedModules)] =
    &[("gin_kernels", shipped::PTX), ("gin_examples_kernels", examples::PTX), (EP, gin_ep::PTX)];
#[cfg(not(feature = "cuda"))]
pub(crate) const TABLES: &[(&str, EmbeddedModules)] = &[];

/// A kernel that can be launched.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Kernel(pub(crate) Arc<Function>);

#[pymethods]
impl Kernel {
    /// Returns its name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns its parameters, in order: name, type, bytes. PTX of another program has only the bytes.
    #[getter]
    fn parameters(&self) -> Vec<(&str, &str, usize)> {
        self.0.parameters.iter().map(|each| (each.name.as_str(), each.type_name.as_str(), each.size)).collect()
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.Kernel: {}>", signature(&self.0))
    }
}

/// Returns a kernel's name and parameters.
fn signature(function: &Function) -> String {
    let parameters = function.parameters.iter().map(|each| match each.name.as_str() {
        "" => format!("{} bytes", each.size),
        name => format!("{name}: {}", each.type_name),
    });
    format!("{}({})", function.name, parameters.collect::<Vec<_>>().join(", "))
}

/// Kernels of PTX that the program has loaded.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Module(pub(crate) Guarded<Loaded>);

/// Owner of a module.
#[derive(Debug)]
pub(crate) struct Loaded(Box<dyn gin_gpu::Module>);

#[pymethods]
impl Module {
    /// Returns the names of its kernels.
    #[getter]
    fn names(&self) -> PyResult<Vec<String>> {
        Ok(self.0.get()?.0.names())
    }

    /// Returns the kernel with this name.
    fn kernel(&self, py: Python<'_>, name: &str) -> PyResult<Kernel> {
        Ok(Kernel(Arc::new(self.0.get()?.0.function(name).or_raise(py)?)))
    }
}

/// Loads PTX: a text, a path, or bytes of PTX or of a cubin.
pub(crate) fn load(device: &Arc<dyn Device>, source: &Bound<'_, PyAny>) -> PyResult<Module> {
    let py = source.py();
    check_process()?;
    let bytes: Vec<u8> = if let Ok(bytes) = source.extract::<Vec<u8>>() {
        bytes
    } else if let Ok(text) = source.extract::<String>()
        && text.contains(".version")
    {
        text.into_bytes()
    } else {
        let path: std::path::PathBuf = source.extract().map_err(|_| {
            PyTypeError::new_err("load takes the text or the bytes of PTX or of a cubin, or a path to one")
        })?;
        std::fs::read(&path).map_err(|error| {
            let text = format!("cannot read the kernels in {}: {error}", path.display());
            pyo3::exceptions::PyOSError::new_err(text)
        })?
    };
    let loaded = py.detach(|| match std::str::from_utf8(&bytes) {
        Ok(text) => device.load(ModuleSource::Ptx(text)),
        Err(_) => device.load(ModuleSource::Cubin(&bytes)),
    });
    Ok(Module(Guarded::new(Arc::new(Loaded(loaded.or_raise(py)?)))))
}

/// Returns the linked kernels of a device, with their crates.
fn linked(device: &dyn Device) -> Result<Vec<(String, Function)>, GpuError> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(device) {
        let mut all = Vec::new();
        for (of, table) in TABLES.iter().filter(|(of, _)| *of != EP) {
            let module = gin_gpu::cuda::CudaDevice::new(gpu.ordinal(), &[table])?.load(ModuleSource::Linked)?;
            for name in module.names() {
                all.push(((*of).to_owned(), module.function(&name)?));
            }
        }
        return Ok(all);
    }
    let _ = device;
    let of = |module: &str| module.split("::").next().unwrap_or(module).to_owned();
    let entries = gin_device::kernel::KERNELS.iter();
    let mut all: Vec<_> = entries.map(|entry| (of(entry.module), gin_gpu::virt::function(entry))).collect();
    // gin itself launches these: the engine of software NICs, and dispatch and combine.
    all.retain(|(of, _)| of != "gin_soft_nic" && of != EP);
    Ok(all)
}

/// Returns the linked kernel of this name, which a crate's name and `::` may precede.
pub(crate) fn find(py: Python<'_>, device: &Arc<dyn Device>, name: &str) -> PyResult<Arc<Function>> {
    let (of, short) = name.split_once("::").map_or((None, name), |(of, short)| (Some(of), short));
    let all = py.detach(|| linked(&**device)).or_raise(py)?;
    let mut fitting: Vec<_> =
        all.into_iter().filter(|(its, each)| each.name == short && of.is_none_or(|of| of == its)).collect();
    fitting.sort_by(|(one, _), (other, _)| one.cmp(other));
    match fitting.len() {
        1 => Ok(Arc::new(fitting.remove(0).1)),
        0 => {
            // It lists similar names.
            let function = py.detach(|| device.load(ModuleSource::Linked)?.function(name));
            Ok(Arc::new(function.or_raise(py)?))
        }
        _ => {
            let modules = fitting.iter().map(|(its, each)| format!("{its}::{}", each.name)).collect();
            Err(GpuError::AmbiguousKernel { name: name.to_owned(), modules }.raised(py))
        }
    }
}

/// Returns the names and parameters of all linked kernels.
pub(crate) fn names(py: Python<'_>, device: &Arc<dyn Device>) -> PyResult<Vec<String>> {
    let all = py.detach(|| linked(&**device)).or_raise(py)?;
    let mut names: Vec<String> = all.iter().map(|(of, each)| format!("{of}::{}", signature(each))).collect();
    names.sort_unstable();
    Ok(names)
}
