// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of this machine as text.

use super::rdma::{Rdma, Way};
use super::{Cuda, Info};
use std::io::{self, Write};

/// The columns of the list of kernels.
const COLUMNS: usize = 100;

pub(super) fn print(info: &Info, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "gin {}, shared layouts version {}", info.version, info.abi_version)?;
    writeln!(out, "\ndevices")?;
    writeln!(out, "  virtual: this machine's CPU")?;
    cuda(&info.cuda, out)?;
    writeln!(out, "\nback ends")?;
    for back_end in &info.back_ends {
        writeln!(out, "  {}: {}", back_end.name, back_end.refusal.as_deref().unwrap_or("available"))?;
        for nic in &back_end.nics {
            writeln!(out, "    {nic}")?;
        }
        if back_end.name == "gdaki" {
            let text = "rung by kernels where the driver maps the NIC's pages, else by the host (relay)";
            writeln!(out, "    doorbells of GPUs: {text}")?;
            for found in &back_end.doorbells {
                let answer = match &found.rung_by {
                    Ok(engine) => format!("rung by {engine}"),
                    Err(reason) => format!("unknown: {reason}"),
                };
                writeln!(out, "      {} by GPU {}: {answer}", found.nic, found.gpu)?;
            }
            writeln!(out, "    virtual GPUs: drive software NICs, with `--backend gdaki`")?;
            writeln!(out, "    `gin nic-check` checks a NIC of this machine, `gin nic-check --soft` a software NIC")?;
        }
    }
    writeln!(out, "  multimem (NVLink SHARP): {}", info.multimem)?;
    rdma(&info.rdma, out)?;
    info.fabric.print(out)?;
    writeln!(out, "\nlimits")?;
    for limit in &info.limits {
        writeln!(out, "  {}: {}", limit.what, limit.limit)?;
    }
    writeln!(out, "\nkernels")?;
    for image in &info.images {
        writeln!(out, "  {} for {}: {} bytes", image.form, image.arch, image.bytes)?;
    }
    if info.images.is_empty() {
        writeln!(out, "  no PTX: built without the feature `cuda`")?;
    }
    write!(out, "  linked for the virtual GPU:")?;
    let mut column = COLUMNS;
    for name in &info.kernels {
        if column + 1 + name.len() > COLUMNS {
            write!(out, "\n   ")?;
            column = 3;
        }
        write!(out, " {name}")?;
        column += 1 + name.len();
    }
    writeln!(out)?;
    Ok(())
}

fn cuda(cuda: &Cuda, out: &mut impl Write) -> io::Result<()> {
    if let Some(reason) = &cuda.none {
        return writeln!(out, "  cuda: none: {reason}");
    }
    let module = cuda.kernel_module.as_ref().map_or(String::new(), |version| format!(", {version}"));
    writeln!(out, "  cuda: driver of CUDA {}{module}", cuda.driver.as_deref().unwrap_or_default())?;
    for gpu in &cuda.gpus {
        let node = gpu.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
        writeln!(
            out,
            "    GPU {}: {}, {}, {} SMs, {} MiB, PCI {}, NUMA node {node}",
            gpu.number,
            gpu.name,
            gpu.arch,
            gpu.sms,
            gpu.memory_bytes >> 20,
            gpu.pci_address,
        )?;
        writeln!(out, "      progress threads: {}", gpu.progress_threads)?;
        if let Some(error) = &gpu.unusable {
            writeln!(out, "      {error}")?;
        }
    }
    Ok(())
}

fn rdma(rdma: &Rdma, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\nRDMA (network `verbs` of the proxy)")?;
    if let Some(reason) = &rdma.none {
        return writeln!(out, "  {reason}");
    }
    writeln!(out, "  libibverbs: {}", rdma.library.as_deref().unwrap_or_default())?;
    for device in &rdma.devices {
        let device = match device {
            Ok(device) => device,
            Err(error) => {
                writeln!(out, "  {error}")?;
                continue;
            }
        };
        let place = match &device.pci_address {
            Some(address) => {
                let node = device.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
                format!("PCI {address}, NUMA node {node}")
            }
            None => "not on the PCI bus".to_owned(),
        };
        let atomics = if device.has_atomics { "atomics" } else { "no atomics" };
        writeln!(out, "  {}: {place}, {atomics}", device.name)?;
        for port in &device.ports {
            writeln!(out, "    {}", port.line())?;
        }
    }
    match &rdma.used {
        Err(error) => writeln!(out, "  none can be used: {error}"),
        Ok(used) => {
            writeln!(out, "  virtual GPU: rank 0 uses {}", used.by_virtual_gpu)?;
            for gpu in &used.by_gpus {
                writeln!(out, "  GPU {}: rank {} uses {}", gpu.gpu, gpu.gpu, gpu.ports)?;
                for Way { port, way } in &gpu.memory {
                    writeln!(out, "    its memory, for {port}: {way}")?;
                }
            }
            Ok(())
        }
    }
}
