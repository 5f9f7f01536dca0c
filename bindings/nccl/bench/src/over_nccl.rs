// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranks of NCCL.

use gin_gpu::cuda::CudaDevice;
use gin_gpu::{Device, EmbeddedModules, KernelArg, LaunchConfig, ModuleSource, Stream};
use gin_nccl_bench::{Barrier, Fallible, Figures, KERNELS, Plan, RANKS, Side};
use gin_nccl_host::{DeviceComm, Kernel, Library, RawComm, Requirements, UniqueId, Window};
use gin_nccl_kernels::timed::SIGNALS;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

/// The bit of GDAKI in the handle of a communicator: `1 << NCCL_GIN_TYPE_GDAKI`.
const GDAKI: u32 = 1 << 3;
/// Puts of a launch over GDAKI, whose NIC may be one in software.
const PUTS_OF_GDAKI: u64 = 20;

/// A rank of NCCL.
struct OverNccl<'a> {
    comm: &'a DeviceComm,
    to: Window<'a>,
    from: Window<'a>,
    kernels: Vec<Kernel>,
    stream: Arc<dyn Stream>,
}

impl Side for OverNccl<'_> {
    fn launch(&self, kernel: &'static str, arguments: &[&dyn KernelArg]) -> Fallible<()> {
        let index = KERNELS.iter().position(|&name| name == kernel).ok_or("no such kernel")?;
        // Safety: the kernel's parameters, on both ranks; the windows live until the stream is synchronised.
        unsafe { self.kernels[index].launch(&*self.stream, LaunchConfig::new(1, 1), arguments)? };
        self.stream.synchronize()?;
        match self.comm.check()? {
            None => Ok(()),
            Some(fault) => Err(format!("{kernel} over NCCL: {fault}").into()),
        }
    }

    fn parameters(&self) -> [&dyn KernelArg; 3] {
        [self.comm, &self.to, &self.from]
    }

    fn write(&self, words: &[u64]) -> Fallible<()> {
        Ok(self.from.write(0, words)?)
    }

    fn read(&self, words: &mut [u64]) -> Fallible<()> {
        Ok(self.to.read(0, words)?)
    }
}

/// The figures of NCCL, the name of its back end, and the plan for this back end.
type Measured = (Figures, &'static str, Plan);

/// Measures NCCL between two ranks. If one fails, the other may go on waiting in NCCL until the process ends.
pub(crate) fn measure(
    library: &Arc<Library>,
    kernels: EmbeddedModules,
    gpus: [usize; RANKS as usize],
    plan: Plan,
) -> Fallible<Measured> {
    let (id, barrier) = (library.unique_id()?, Arc::new(Barrier::new(plan.limit)));
    let (done, results) = channel();
    for (rank, gpu) in (0..).zip(gpus) {
        let (library, barrier, done) = (library.clone(), barrier.clone(), done.clone());
        thread::spawn(move || {
            let result = on_rank(&library, kernels, (rank, gpu), id, plan, &barrier);
            // Nobody receives after the first error.
            _ = done.send((rank, result.map_err(|error| format!("rank {rank}: {error}"))));
        });
    }
    drop(done);
    let mut all: [Option<Measured>; RANKS as usize] = Default::default();
    for (rank, result) in results.iter().take(gpus.len()) {
        all[rank as usize] = Some(result?);
    }
    match all {
        [Some((first, backend, plan)), Some((second, ..))] => Ok((first.with(&second), backend, plan)),
        _ => Err("a rank of NCCL panicked".into()),
    }
}

fn on_rank(
    library: &Arc<Library>,
    kernels: EmbeddedModules,
    (rank, gpu): (u32, usize),
    id: UniqueId,
    plan: Plan,
    barrier: &Barrier,
) -> Fallible<Measured> {
    let device = CudaDevice::with_limit(gpu, &[kernels], Some(plan.limit * 2))?;
    let comm = library.init_rank(&device, id, rank, RANKS)?;
    let figures = on_comm(library, &device, comm, plan, barrier);
    if figures.is_ok() {
        // Safety: all that was made of it is gone. After an error it stays, because the other rank may not come.
        unsafe { library.destroy(comm)? };
    }
    figures
}

fn on_comm(
    library: &Arc<Library>,
    device: &Arc<CudaDevice>,
    comm: RawComm,
    plan: Plan,
    barrier: &Barrier,
) -> Fallible<Measured> {
    let requirements = Requirements { signals: SIGNALS, ..Requirements::default() };
    // Safety: the communicator is of this GPU, and lives longer.
    let comm = unsafe { DeviceComm::create(library, device, comm, &requirements)? };
    let (plan, backend) = match comm.handle().backend {
        GDAKI => (Plan { puts: PUTS_OF_GDAKI, ..plan }, "GDAKI"),
        _ => (plan, "proxy"),
    };
    let window = || Window::new(&comm, 8 * plan.window() as u64);
    let (to, from) = (window()?, window()?);
    let module = device.load(ModuleSource::Linked)?;
    // All kernels are loaded now, because a later load would wait for kernels that run.
    let kernels = KERNELS.iter().map(|name| Kernel::of(device, &*module, name)).collect::<Result<_, _>>()?;
    let side = OverNccl { comm: &comm, to, from, kernels, stream: device.stream()? };
    let any: Arc<dyn Device> = device.clone();
    let figures = gin_nccl_bench::measure(&side, &any, comm.rank().0, plan, barrier);
    if figures.is_err() {
        // Ranks free them together, and the other rank may not come.
        std::mem::forget(side);
        std::mem::forget(comm);
    }
    Ok((figures?, backend, plan))
}
