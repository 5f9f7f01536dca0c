// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices that send and receive while they multiply.

use crate::EpError;
use crate::config_exchange::exchange_config;
use crate::group::check_usable;
use crate::keep_alive::KeepAlive;
use crate::multiplier::{Instructions, Multiplier};
use crate::tokens::address;
use gin_abi::Deadline;
use gin_ep_kernels::SCALED;
use gin_ep_kernels::matmul::{EXCHANGE, MULTIPLY, Product, ScaleTables};
use gin_gpu::{KernelArg, MemorySlice, Plain, Stream};
use gin_host::comm::{Communicator, DeviceComm, Window, WindowFlags};
use std::sync::{Arc, Mutex};

/// Sizes of a [`Matmul`]. All ranks pass the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatmulConfig {
    rows: u32,
    columns: u32,
    depth: u32,
    blocks: Option<u32>,
    deadline: Deadline,
    is_e4m3: bool,
    instructions: Instructions,
}

impl MatmulConfig {
    /// Makes the sizes of a product: `rows` rows of each rank, `columns` columns, `depth` inner elements, all of BF16.
    /// A rank waits for another for 1 s.
    #[must_use]
    pub const fn new(rows: u32, columns: u32, depth: u32) -> Self {
        let (deadline, instructions) = (Deadline::after_ms(1000), Instructions::Warpgroups);
        Self { rows, columns, depth, blocks: None, deadline, is_e4m3: false, instructions }
    }

    /// Sets factors of FP8 (E4M3) with FP32 scales: [`Operands::scales`]. The result is BF16. `depth` is a multiple of
    /// 128. One rank multiplies them, on an H100, an H200 or a virtual GPU.
    #[must_use]
    pub const fn e4m3(mut self) -> Self {
        self.is_e4m3 = true;
        self
    }

    /// Sets the maximum number of blocks of a launch. Without it there are as many as the GPU runs at the same time.
    #[must_use]
    pub const fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Sets how long a rank waits for another.
    #[must_use]
    pub const fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the instructions of the kernels, for tests.
    #[doc(hidden)]
    #[must_use]
    pub const fn instructions(mut self, instructions: Instructions) -> Self {
        self.instructions = instructions;
        self
    }

    /// Returns the values that all ranks pass alike.
    fn values(&self, kernel: &str) -> [(&'static str, String); 6] {
        let Self { rows, columns, depth, blocks, deadline, is_e4m3: _, instructions: _ } = self;
        let blocks = blocks.map_or_else(|| "not set".to_owned(), |blocks| blocks.to_string());
        let (kernel, deadline) = (kernel.to_owned(), deadline.to_string());
        let [rows, columns, depth] = [rows, columns, depth].map(u32::to_string);
        [
            ("kernel", kernel),
            ("rows", rows),
            ("columns", columns),
            ("depth", depth),
            ("blocks", blocks),
            ("deadline", deadline),
        ]
    }

    fn check(&self, ranks: u32) -> Result<Product, EpError> {
        let &Self { rows, columns, depth, .. } = self;
        for (what, given, multiple) in [
            ("the number of rows of a rank", rows, 1),
            ("the number of columns", columns, 8),
            ("the number of inner elements", depth, if self.is_e4m3 { SCALED } else { 8 }),
        ] {
            if given == 0 || given > MAX || !given.is_multiple_of(multiple) {
                let limit = if multiple == 1 { String::new() } else { format!("a multiple of {multiple}, ") };
                let limit = format!("{limit}1 to {MAX}");
                return Err(EpError::Limit { what, given: given.into(), limit });
            }
        }
        if self.blocks == Some(0) {
            return Err(EpError::Limit { what: "the number of blocks", given: 0, limit: "at least 1".to_owned() });
        }
        let deadline = self.deadline;
        let scales = ScaleTables::default();
        let product =
            Product { a: 0, b: 0, c: 0, partial: 0, maps: 0, scales, rows, columns, depth, parts: 0, deadline };
        let tiles = u64::from(ranks + 1) * u64::from(product.row_tiles()) * u64::from(product.column_tiles());
        if tiles > u64::from(u32::MAX) {
            let limit = format!("at most {}", u32::MAX);
            return Err(EpError::Limit { what: "the number of tiles of all ranks", given: tiles, limit });
        }
        Ok(product)
    }
}

/// The maximum number of rows, columns or inner elements.
const MAX: u32 = 1 << 20;

/// The memory of a product, on this rank. A row follows the one before without a gap.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    a: &'a MemorySlice,
    b: &'a MemorySlice,
    c: &'a MemorySlice,
    partial: Option<&'a MemorySlice>,
    scales: Option<[&'a MemorySlice; 2]>,
}

impl<'a> Operands<'a> {
    /// Makes them of the left factor, the right factor as its transpose, and the result. So `b` has a row of `depth`
    /// elements for each column, as the weights of a linear layer have.
    #[must_use]
    pub const fn new(a: &'a MemorySlice, b: &'a MemorySlice, c: &'a MemorySlice) -> Self {
        Self { a, b, c, partial: None, scales: None }
    }

    /// Sets the FP32 scales of factors of [E4M3](MatmulConfig::e4m3). `a` has a row of `depth / 128` scales for each
    /// row of the left factor. `b` has such a row for each 128 columns, also for the rest: a scale for each 128 times
    /// 128 elements.
    #[must_use]
    pub const fn scales(mut self, a: &'a MemorySlice, b: &'a MemorySlice) -> Self {
        self.scales = Some([a, b]);
        self
    }

    /// Sets memory for this rank's products before they are sent: `ranks * rows` rows of `columns` elements. A product
    /// in two launches, [`Part::Multiply`] and [`Part::Exchange`], needs it if the exchange is a reduce-scatter.
    #[must_use]
    pub const fn partial(mut self, partial: &'a MemorySlice) -> Self {
        self.partial = Some(partial);
        self
    }
}

/// Memory with scales, and its number of rows of scales.
pub(crate) type ScaleRows<'a> = (&'a MemorySlice, u64);

/// Returns the addresses of the scales of rows and of weights with `depth` inner elements. Factors of BF16 have no
/// scales. The address for rows is 0 if their scales are elsewhere.
pub(crate) fn scale_tables(
    is_e4m3: bool,
    scales: Option<(Option<ScaleRows<'_>>, ScaleRows<'_>)>,
    depth: u32,
) -> Result<ScaleTables, EpError> {
    let bytes = |rows: u64| rows * ScaleTables::row_bytes(depth);
    match (is_e4m3, scales) {
        (false, None) => Ok(ScaleTables::default()),
        (true, Some((of_rows, (of_weights, number)))) => {
            let rows = match of_rows {
                Some((memory, number)) => address("the memory of the scales of rows", memory, bytes(number), 4)?,
                None => 0,
            };
            let weights = address("the memory of the scales of weights", of_weights, bytes(number), 4)?;
            Ok(ScaleTables { rows, weights })
        }
        (true, None) => {
            let remedy = "pass the scales of both factors by `scales`";
            Err(EpError::Unsuited { what: "a product of E4M3 without scales", remedy })
        }
        (false, Some(_)) => {
            let remedy = "leave out the scales, or prepare a product of E4M3";
            Err(EpError::Unsuited { what: "a product of BF16 with scales", remedy })
        }
    }
}

/// The part of a product that a launch does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// All of it.
    Fused,
    /// The all-gather, before the products; or the reduce-scatter, after them.
    Exchange,
    /// The products.
    Multiply,
}

/// A product of matrices whose rows are spread over the ranks of a communicator.
///
/// | made by | left factor | result |
/// | --- | --- | --- |
/// | [`all_gather`](Self::all_gather) | `rows` rows on each rank | all `ranks * rows` rows times this rank's right factor |
/// | [`reduce_scatter`](Self::reduce_scatter) | `ranks * rows` rows, with this rank's part of the inner index | `rows` rows of the sum over ranks |
///
/// Sums are in FP32 and rounded to BF16 once; those over ranks add up products that were rounded, in the order of
/// ranks. So the result has the same bits for each number of blocks, in one launch or two.
///
/// Calls launch kernels in the order of the stream. Those of one value follow each other, on one stream or by events,
/// and all ranks make the same.
///
/// ```
/// use gin_ep::{EpError, Matmul, MatmulConfig, Operands, Part};
/// use gin_gpu::{Memory, MemoryKind};
/// use gin_host::comm::Requirements;
/// use gin_host::world::{WorldConfig, launch};
///
/// let results = launch(WorldConfig::seeded(2, 7), |rank| -> Result<Vec<u16>, EpError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     // One row of each rank, eight columns, eight inner elements.
///     let matmul = Matmul::all_gather(&comm, &MatmulConfig::new(1, 8, 8).blocks(1))?;
///     let memory = |bytes| Memory::new(rank.device(), MemoryKind::Device, bytes).map(|memory| memory.whole());
///     let (a, b, c) = (memory(16)?, memory(128)?, memory(32)?);
///     a.write(0, &[if rank.rank() == 0 { 0x3f80u16 } else { 0x4000 }; 8])?; // 1 or 2, eight times
///     b.write(0, &[0x3f80u16; 64])?;
///     let stream = rank.stream()?;
///     matmul.run(&stream, Part::Fused, &Operands::new(&a, &b, &c))?;
///     stream.synchronize()?;
///     comm.check("matmul")?;
///     let mut values = vec![0u16; 16];
///     c.read(0, &mut values)?;
///     matmul.destroy()?;
///     comm.destroy()?;
///     Ok(values)
/// });
/// // 8 and 16.
/// assert_eq!(results.unwrap()[0], [vec![0x4100u16; 8], vec![0x4180; 8]].concat());
/// ```
#[derive(Debug)]
pub struct Matmul {
    device: DeviceComm,
    window: Window<u64>,
    product: Product,
    scatters: bool,
    is_e4m3: bool,
    /// The kernel of parts that multiply, and that of the exchange alone.
    multiplier: Multiplier,
    exchange: Multiplier,
    keep_alive: Mutex<KeepAlive>,
    /// Ends after the memory, which is a part of it.
    comm: Communicator,
}

impl Drop for Matmul {
    fn drop(&mut self) {
        gin_gpu::lock(&self.keep_alive).settle();
    }
}

impl Matmul {
    /// Makes a product of the rows of all ranks, which are gathered. Collective.
    ///
    /// # Errors
    /// [`EpError::Limit`], [`EpError::Differs`], [`EpError::NotReachable`], or an error of communicator or device.
    pub fn all_gather(comm: &Communicator, config: &MatmulConfig) -> Result<Self, EpError> {
        Self::new(comm, config, false)
    }

    /// Makes a product whose sums over the ranks are scattered. Collective.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(comm: &Communicator, config: &MatmulConfig) -> Result<Self, EpError> {
        Self::new(comm, config, true)
    }

    fn new(comm: &Communicator, config: &MatmulConfig, scatters: bool) -> Result<Self, EpError> {
        let ranks = comm.ranks();
        let product = config.check(ranks)?;
        let name = if scatters { "ep_matmul_reduce_scatter" } else { "ep_all_gather_matmul" };
        let by = if config.is_e4m3 { "ep_matmul_e4m3" } else { name };
        let (device, sharing) = exchange_config(comm, &config.values(by))?;
        if config.is_e4m3 && (scatters || ranks > 1) {
            let what = "a product of E4M3 that sends and receives";
            return Err(EpError::Unsuited { what, remedy: "call `Matmul::all_gather` on one rank, or multiply BF16" });
        }
        let reached = device.handle().lsa_size;
        if reached != ranks {
            return Err(EpError::NotReachable { reached, ranks });
        }
        let row_bytes = 2 * u64::from(if scatters { product.columns } else { product.depth });
        let bytes = product.window_bytes(ranks, row_bytes);
        let window = comm.alloc_window::<u64>((bytes / 8) as usize, WindowFlags::NONE)?.named("gin-ep matmul");
        let load = |name, instructions| Multiplier::new(comm.gpu(), name, instructions, (config.blocks, sharing, 1));
        let (multiplier, exchange) = (load(by, config.instructions)?, load(name, Instructions::Warps)?);
        let (is_e4m3, keep_alive, comm) = (config.is_e4m3, Mutex::default(), comm.clone());
        Ok(Self { device, window, product, scatters, is_e4m3, multiplier, exchange, keep_alive, comm })
    }

    /// Launches the product, or a part of it. The memory is kept until the kernels have ended.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] if `partial` or scales are
    /// missing or too much, an error of communicator or device.
    pub fn run(&self, stream: &Arc<dyn Stream>, part: Part, operands: &Operands<'_>) -> Result<(), EpError> {
        let Product { rows, columns, depth, .. } = self.product;
        let (one, all) = (u64::from(rows), u64::from(rows) * u64::from(self.comm.ranks()));
        let (a_rows, c_rows) = if self.scatters { (all, one) } else { (one, all) };
        let bytes = |rows: u64, elements: u32| 2 * rows * u64::from(elements);
        let factor = |rows: u64| bytes(rows, depth) / if self.is_e4m3 { 2 } else { 1 };
        let scales = operands.scales.map(|[a, b]| (Some((a, a_rows)), (b, columns.div_ceil(SCALED).into())));
        let multiplier = if part == Part::Exchange { &self.exchange } else { &self.multiplier };
        let mut product = Product {
            a: address("the memory of the left factor", operands.a, factor(a_rows), 16)?,
            b: address("the memory of the right factor", operands.b, factor(columns.into()), 16)?,
            c: address("the memory of the result", operands.c, bytes(c_rows, columns), 16)?,
            maps: multiplier.maps(0),
            scales: scale_tables(self.is_e4m3, scales, depth)?,
            parts: match part {
                Part::Fused => EXCHANGE | MULTIPLY,
                Part::Exchange => EXCHANGE,
                Part::Multiply => MULTIPLY,
            },
            ..self.product
        };
        let mut used = vec![operands.a, operands.b, operands.c];
        used.extend(multiplier.used().into_iter().chain(operands.scales.into_iter().flatten()));
        if self.scatters && part != Part::Fused {
            let Some(partial) = operands.partial else {
                let remedy = "pass it by `Operands::partial`";
                return Err(EpError::Unsuited { what: "a reduce-scatter without memory for its products", remedy });
            };
            product.partial = address("the memory of the products", partial, bytes(all, columns), 16)?;
            used.push(partial);
        }
        check_usable(&self.comm, "multiply")?;
        gin_gpu::lock(&self.keep_alive).begin(stream, &used)?;
        let arguments: [&dyn KernelArg; 3] = [&self.device, &self.window, &Plain(product)];
        // Safety: communicator and window were made for these sizes, and the memory was checked and is kept.
        unsafe { stream.launch(&multiplier.kernel, multiplier.shape, &arguments)? };
        Ok(())
    }

    /// Returns the number of blocks of a launch.
    pub fn blocks(&self) -> u64 {
        self.multiplier.shape.blocks()
    }

    /// Frees the memory. Collective. Waits for this rank's kernels of the product.
    ///
    /// # Errors
    /// An error of the communicator.
    pub fn destroy(self) -> Result<(), EpError> {
        gin_gpu::lock(&self.keep_alive).settle();
        Ok(self.comm.deregister(&self.window)?)
    }
}
