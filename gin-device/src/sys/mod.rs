// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every instruction of the memory model.
//!
//! Kernels, CPUs and NICs share words of 64 bits. Each access to such a word is one of the operations below. The name
//! of an operation has its ordering and scope. No other access is allowed. (`core::sync::atomic` is wrong on this
//! target: LLVM 22 compiles its read-modify-writes without ordering and with GPU scope.)
//!
//! | name | PTX | SASS on sm_90 | cost |
//! | --- | --- | --- | --- |
//! | `load_relaxed_gpu` | `ld.relaxed.gpu.global.u64` | `LDG.E.64.STRONG.GPU` | one trip to L2 |
//! | `load_own` | `ld.global.u64` | `LDG.E.64` | L1 or L2; for words that one thread uses at a time |
//! | `load_relaxed_sys` | `ld.relaxed.sys.global.u64` | `LDG.E.64.STRONG.SYS` | L2, or PCIe when the word is in host memory |
//! | `load_acquire_sys` | `ld.acquire.sys.global.u64` | `LDG.E.64.STRONG.SYS`, `CCTL.IVALL` | the same, and the L1 is invalidated |
//! | `store_relaxed_gpu` | `st.relaxed.gpu.global.u64` | `STG.E.64.STRONG.GPU` | posted |
//! | `store_release_gpu` | `st.release.gpu.global.u64` | `MEMBAR.ALL.GPU`, `STG.E.64.STRONG.GPU` | waits for the thread's earlier writes to reach L2 |
//! | `store_relaxed_sys` | `st.relaxed.sys.global.u64` | `STG.E.64.STRONG.SYS` | posted |
//! | `store_release_sys` | `st.release.sys.global.u64` | `MEMBAR.ALL.SYS`, `STG.E.64.STRONG.SYS` | waits for all earlier writes of the thread, also those over PCIe and NVLink |
//! | `store_mmio` | `st.mmio.relaxed.sys.global.u64` | `STG.E.64.MMIO.SYS` | posted; for doorbells |
//! | `add_relaxed_cta` | `atom.relaxed.cta.global.add.u64` | `ATOMG.E.ADD.64.STRONG.SM` | one trip to L2 |
//! | `add_relaxed_gpu` | `atom.relaxed.gpu.global.add.u64` | `ATOMG.E.ADD.64.STRONG.GPU` | one trip to L2 |
//! | `add_relaxed_sys` | `atom.relaxed.sys.global.add.u64` | `ATOMG.E.ADD.64.STRONG.SYS` | one trip to the owner of the word |
//! | `add_release_sys` | `atom.release.sys.global.add.u64` | `MEMBAR.ALL.SYS`, `ATOMG.E.ADD.64.STRONG.SYS` | that, after all earlier writes |
//! | `max_relaxed_gpu` | `atom.relaxed.gpu.global.max.u64` | `ATOMG.E.MAX.64.STRONG.GPU` | one trip to L2 |
//! | `or_relaxed_gpu` | `atom.relaxed.gpu.global.or.b64` | `ATOMG.E.OR.64.STRONG.GPU` | one trip to L2 |
//! | `and_relaxed_gpu` | `atom.relaxed.gpu.global.and.b64` | `ATOMG.E.AND.64.STRONG.GPU` | one trip to L2 |
//! | `red_add_relaxed_gpu` | `red.relaxed.gpu.global.add.u64` | `REDG.E.ADD.64.STRONG.GPU` | posted; no later fence waits for a reply |
//! | `red_add_relaxed_sys` | `red.relaxed.sys.global.add.u64` | `REDG.E.ADD.64.STRONG.SYS` | posted |
//! | `red_max_relaxed_gpu` | `red.relaxed.gpu.global.max.u64` | `REDG.E.MAX.64.STRONG.GPU` | posted |
//! | `red_or_relaxed_gpu` | `red.relaxed.gpu.global.or.b64` | `REDG.E.OR.64.STRONG.GPU` | posted |
//! | `cas_relaxed_gpu` | `atom.relaxed.gpu.global.cas.b64` | `ATOMG.E.CAS.64.STRONG.GPU` | one trip to L2 |
//! | `cas_relaxed_sys` | `atom.relaxed.sys.global.cas.b64` | `ATOMG.E.CAS.64.STRONG.SYS` | one trip to the owner of the word |
//! | `fence_acquire_gpu` | `fence.acquire.gpu` | `CCTL.IVALL` | the L1 is invalidated |
//! | `fence_acquire_sys` | `fence.acquire.sys` | `CCTL.IVALL` | the L1 is invalidated |
//! | `fence_release_gpu` | `fence.release.gpu` | `MEMBAR.ALL.GPU` | waits for earlier writes to reach L2 |
//! | `fence_release_sys` | `fence.release.sys` | `MEMBAR.ALL.SYS` | waits for all earlier writes; about 0.6 us of a thread's time on an H200 |
//! | `fence_sc_sys` | `fence.sc.sys` | `MEMBAR.SC.SYS`, `CCTL.IVALL` | `fence_release_sys` and `fence_acquire_sys`, in one order of all such fences |
//! | `store_pair_relaxed_sys` | `st.relaxed.sys.global.v2.u64` | `STG.E.128.STRONG.SYS` | posted; two adjacent words, each atomic by itself |
//! | `read_word` | `ld.global.u64` | `LDG.E.64` | L1 or L2; for tables that are constant while a kernel runs |
//! | `read_pair` | `ld.global.v2.u64` | `LDG.E.128` | the same, two adjacent words |
//! | `add_relaxed_gpu_if` | `@gin_p atom.relaxed.gpu.global.add.u64` | `@P BRA`, `ATOMG.E.ADD.64.STRONG.GPU` | `add_relaxed_gpu`, or nothing; the assembler may predicate it or branch |
//! | `store_pair_relaxed_sys_if` | `@gin_p st.relaxed.sys.global.v2.u64` | `@P STG.E.128.STRONG.SYS` | `store_pair_relaxed_sys`, or nothing, without a branch |
//! | `spin` | `ld.relaxed.sys.global.u64` | `IADD3`, `IMAD.X`, `@P BRA`, `IMAD.MOV.U32`, `VIADD`, `YIELD`, `@P BRA`, `R2UR`, `R2UR`, `LDG.E.64.STRONG.SYS`, `IADD3`, `IMAD.X`, `@P BRA`, `IMAD.MOV.U32`, `IMAD.MOV.U32` | `load_relaxed_sys`, in a short loop that the assembler leaves as it is |
//! | `narrow` | `mov.u32` | | nothing; it hides a value's origin from the compiler |
//! | `pause` | `nanosleep.u32` | `NANOSLEEP` | between nothing and twice the time |
//! | `clock_ns` | `mov.u64 %globaltimer` | `CS2R SR_GLOBALTIMERLO` | tens of cycles |
//! | `cycles` | `mov.u64 %clock64` | `CS2R SR_CLOCKLO` | tens of cycles |
//! | `trap` | `trap` | `BPT.TRAP` | the grid |
//! | `wait_for_predecessor` | `griddepcontrol.wait` | `ACQBULK` | until the kernel before it on the stream has ended |
//! | `let_dependents_start` | `griddepcontrol.launch_dependents` | `ACQBULK`, `PREEXIT` | the same, as it waits first |
//!
//! The column SASS is the output of `ptxas` 13.0 for each line alone. `ptxas` adds `ERRBAR` and `CGAERRBAR` to every
//! `MEMBAR`. If an addition is the same in all lanes, it may let one lane add for the warp. A test compares the table
//! with the assembler's output.
//!
//! `fence.acquire` and `fence.release` need sm_90 and PTX 8.6. Elsewhere the `fence.acq_rel` of the same scope replaces
//! them. (`ptxas` accepts them for sm_80 too, but emits an illegal instruction.) `griddepcontrol` needs sm_90. For
//! earlier targets its two functions are empty, because no launch is dependent there.
//!
//! There are three implementations: PTX, CPU atomics (every access is a switch point of the executor, see `exec`) and,
//! with the feature `loom`, the atomics of a model checker. Protocols are written once, generic over [`Memory`].
//!
//! The accesses of [`data`] copy and reduce bulk data, which signals make visible. Those of [`shared`] are to the
//! shared memory of a block, and the copies of [`bulk`] are between both. [`convert`] has the conversions between
//! number formats. [`matrix`] has products of matrices by a warp, [`warpgroup`] has products by a warpgroup of a Hopper
//! GPU, and [`tensor`] copies their factors.

/// Passes the table of word operations to the macro `$emit`.
///
/// A row has shape, name, PTX without operands, and the ordering on a CPU.
macro_rules! word_operations {
    ($emit:ident) => {
        $emit! {
            load load_relaxed_gpu "ld.relaxed.gpu.global.u64" Relaxed
                "Loads, relaxed, at GPU scope.";
            load load_own "ld.global.u64" Relaxed
                "Loads a word that no other thread stores to at the same time; weak.";
            load load_relaxed_sys "ld.relaxed.sys.global.u64" Relaxed
                "Loads, relaxed, at system scope.";
            load load_acquire_sys "ld.acquire.sys.global.u64" Acquire
                "Loads, acquire, at system scope.";
            store store_relaxed_gpu "st.relaxed.gpu.global.u64" Relaxed
                "Stores, relaxed, at GPU scope.";
            store store_release_gpu "st.release.gpu.global.u64" Release
                "Stores, release, at GPU scope.";
            store store_relaxed_sys "st.relaxed.sys.global.u64" Relaxed
                "Stores, relaxed, at system scope.";
            store store_release_sys "st.release.sys.global.u64" Release
                "Stores, release, at system scope.";
            store store_mmio "st.mmio.relaxed.sys.global.u64" Relaxed
                "Stores to a register of a device, exactly once and whole; relaxed, at system scope.";
            rmw add_relaxed_cta "atom.relaxed.cta.global.add.u64" Relaxed fetch_add
                "Adds modulo 2^64 and returns what was there, relaxed, at block scope.";
            rmw add_relaxed_gpu "atom.relaxed.gpu.global.add.u64" Relaxed fetch_add
                "Adds modulo 2^64 and returns what was there, relaxed, at GPU scope.";
            rmw add_relaxed_sys "atom.relaxed.sys.global.add.u64" Relaxed fetch_add
                "Adds modulo 2^64 and returns what was there, relaxed, at system scope.";
            rmw add_release_sys "atom.release.sys.global.add.u64" Release fetch_add
                "Adds modulo 2^64 and returns what was there, release, at system scope.";
            rmw max_relaxed_gpu "atom.relaxed.gpu.global.max.u64" Relaxed fetch_max
                "Stores the larger of the present value and `value`; returns the value before. Relaxed, at GPU scope.";
            rmw or_relaxed_gpu "atom.relaxed.gpu.global.or.b64" Relaxed fetch_or
                "Sets bits and returns what was there, relaxed, at GPU scope.";
            rmw and_relaxed_gpu "atom.relaxed.gpu.global.and.b64" Relaxed fetch_and
                "Keeps bits and returns what was there, relaxed, at GPU scope.";
            red red_add_relaxed_gpu "red.relaxed.gpu.global.add.u64" Relaxed fetch_add
                "Adds modulo 2^64, relaxed, at GPU scope.";
            red red_add_relaxed_sys "red.relaxed.sys.global.add.u64" Relaxed fetch_add
                "Adds modulo 2^64, relaxed, at system scope.";
            red red_max_relaxed_gpu "red.relaxed.gpu.global.max.u64" Relaxed fetch_max
                "Stores the larger of the present value and `value`, relaxed, at GPU scope.";
            red red_or_relaxed_gpu "red.relaxed.gpu.global.or.b64" Relaxed fetch_or
                "Sets bits, relaxed, at GPU scope.";
            cas cas_relaxed_gpu "atom.relaxed.gpu.global.cas.b64" Relaxed
                "Stores `new` if `expected` is there; returns what was there. Relaxed, at GPU scope.";
            cas cas_relaxed_sys "atom.relaxed.sys.global.cas.b64" Relaxed
                "Stores `new` if `expected` is there; returns what was there. Relaxed, at system scope.";
            fence fence_acquire_gpu "fence.acquire.gpu" "fence.acq_rel.gpu" Acquire
                "Acquire fence at GPU scope.";
            fence fence_acquire_sys "fence.acquire.sys" "fence.acq_rel.sys" Acquire
                "Acquire fence at system scope.";
            fence fence_release_gpu "fence.release.gpu" "fence.acq_rel.gpu" Release
                "Release fence at GPU scope.";
            fence fence_release_sys "fence.release.sys" "fence.acq_rel.sys" Release
                "Release fence at system scope.";
            fence fence_sc_sys "fence.sc.sys" SeqCst
                "Sequentially consistent fence at system scope.";
        }
    };
}

/// Returns the statement of an operation for `asm!`: by shape and PTX for a row of the table above, by name for the
/// others. `{p}`, `{v}`, `{c}`, `{o}`, `{l}`, `{h}` and `{t}` are registers of 64 bits, `{i}`, `{n}`, `{w}` and `{s}`
/// of 32.
macro_rules! statement {
    (load $ptx:literal) => {
        concat!($ptx, " {v}, [{p}];")
    };
    (store $ptx:literal) => {
        concat!($ptx, " [{p}], {v};")
    };
    (rmw $ptx:literal) => {
        concat!($ptx, " {o}, [{p}], {v};")
    };
    (red $ptx:literal) => {
        concat!($ptx, " [{p}], {v};")
    };
    (cas $ptx:literal) => {
        concat!($ptx, " {o}, [{p}], {c}, {v};")
    };
    (fence $ptx:literal) => {
        concat!($ptx, ";")
    };
    (store_pair_relaxed_sys) => {
        "st.relaxed.sys.global.v2.u64 [{p}], {{{l}, {h}}};"
    };
    (read_word) => {
        "ld.global.u64 {v}, [{p}];"
    };
    (read_pair) => {
        "ld.global.v2.u64 {{{l}, {h}}}, [{p}];"
    };
    (add_relaxed_gpu_if) => {
        "{{ .reg .pred gin_p; setp.ne.u32 gin_p, {i}, 0; @gin_p atom.relaxed.gpu.global.add.u64 {o}, [{p}], {v}; }}"
    };
    (store_pair_relaxed_sys_if) => {
        "{{ .reg .pred gin_p; setp.ne.u32 gin_p, {i}, 0; @gin_p st.relaxed.sys.global.v2.u64 [{p}], {{{l}, {h}}}; }}"
    };
    (spin) => {
        "{{ .reg .pred gin_p; .reg .u32 gin_n; mov.u32 gin_n, {n}; GIN_POLL: .pragma \"nounroll\"; sub.s64 {o}, {v}, {c}; setp.ge.s64 gin_p, {o}, 0; @gin_p bra GIN_END; sub.u32 gin_n, gin_n, 1; setp.eq.u32 gin_p, gin_n, 0; @gin_p bra GIN_END; ld.relaxed.sys.global.u64 {v}, [{p}]; bra GIN_POLL; GIN_END: }}"
    };
    (narrow) => {
        "mov.u32 {s}, {w};"
    };
    (of_lane) => {
        "mov.u32 {s}, %lanemask_eq; popc.b32 {s}, {s};"
    };
    (rolled) => {
        ".pragma \"nounroll\";"
    };
    (stay_word) => {
        "mov.u64 {v}, {c};"
    };
    (pause) => {
        "nanosleep.u32 {n};"
    };
    (clock_ns) => {
        "mov.u64 {t}, %globaltimer;"
    };
    (cycles) => {
        "mov.u64 {t}, %clock64;"
    };
    (trap) => {
        "trap;"
    };
    (wait_for_predecessor) => {
        "griddepcontrol.wait;"
    };
    (let_dependents_start) => {
        "griddepcontrol.wait; griddepcontrol.launch_dependents;"
    };
}

pub mod bulk;
pub mod convert;
#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
pub mod data;
#[cfg(feature = "loom")]
pub mod loom;
pub mod matrix;
#[cfg(target_arch = "nvptx64")]
mod ptx;
pub mod shared;
mod table;
pub mod tensor;
pub mod warpgroup;

#[cfg(not(target_arch = "nvptx64"))]
use cpu as imp;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

pub use imp::{
    clock_ns, cycles, let_dependents_start, pause, peek_clock_ns, read_pair, read_word, trap, wait_for_predecessor,
};
pub(crate) use imp::{narrow, of_lane, rolled};
#[doc(hidden)]
pub use imp::{stay, stay_word};
#[cfg(not(target_arch = "nvptx64"))]
pub use table::{OPERATIONS, OperationRow};

// The rows end in a doc string. One macro arm per shape derives the traits below from the table.
macro_rules! declare {
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => { declare_traits! { [] [] $($shape $name $doc;)* } };
}

macro_rules! declare_traits {
    ([$($word:tt)*] [$($fence:tt)*] load $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)* #[doc = $doc] fn $name(self) -> u64;] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] store $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)* #[doc = $doc] fn $name(self, value: u64);] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] rmw $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)* #[doc = $doc] fn $name(self, value: u64) -> u64;] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] red $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)* #[doc = $doc] fn $name(self, value: u64);] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] cas $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)* #[doc = $doc] fn $name(self, expected: u64, new: u64) -> u64;] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] fence $name:ident $doc:literal; $($rest:tt)*) => {
        declare_traits! { [$($word)*] [$($fence)* #[doc = $doc] fn $name();] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*]) => {
        /// A handle to one shared word of 64 bits. Handles are `Copy` and do not own the word.
        ///
        /// Code that makes a handle promises (`unsafe`) that the word stays valid while the handle is used.
        pub trait Word: Copy + PartialEq + core::fmt::Debug {
            $($word)*

            /// Stores this word and the next, relaxed, at system scope, in one access of 16 bytes if the machine has
            /// one. Needs 16-byte alignment. Readers may see either word first.
            fn store_pair_relaxed_sys(self, low: u64, high: u64);

            /// Loads this word and the next, relaxed, at system scope, in one access of 16 bytes if the machine has
            /// one. Needs 16-byte alignment. Either word may be the older one.
            #[inline(always)]
            fn load_pair_relaxed_sys(self) -> (u64, u64) {
                (self.load_relaxed_sys(), self.at(1).load_relaxed_sys())
            }

            /// Loads as `load_relaxed_sys` until the value is at or past `least` on the circle of 2^64 values. Returns
            /// how far past `least` the last value is: less than 2^63 if it has come. `first` is the value of the
            /// first of at most `polls` loads, which the caller has made, so that other work can overlap it.
            #[inline(always)]
            fn spin(self, first: u64, least: u64, polls: u32) -> u64 {
                let (mut past, mut left) = (first.wrapping_sub(least), polls);
                loop {
                    left -= 1;
                    if past as i64 >= 0 || left == 0 {
                        return past;
                    }
                    past = self.load_relaxed_sys().wrapping_sub(least);
                }
            }

            /// Adds as `add_relaxed_gpu` if `condition`. Otherwise does nothing and returns 0.
            #[inline(always)]
            fn add_relaxed_gpu_if(self, condition: bool, value: u64) -> u64 {
                if condition { self.add_relaxed_gpu(value) } else { 0 }
            }

            /// Stores as `store_pair_relaxed_sys` if `condition`. Otherwise does nothing.
            #[inline(always)]
            fn store_pair_relaxed_sys_if(self, condition: bool, low: u64, high: u64) {
                if condition {
                    self.store_pair_relaxed_sys(low, high);
                }
            }

            /// Returns the word `index` words further on, in the same array.
            #[must_use]
            fn at(self, index: u64) -> Self;
        }

        /// A machine's shared memory: words, fences and time. Protocols are generic over it.
        pub trait Memory: Copy + core::fmt::Debug {
            /// The handle to a word.
            type Word: Word;

            /// Number of polls of a wait between two checks of the status words and the clock; a power of two.
            const POLLS_PER_CHECK: u32 = 64;

            /// Number of polls of a signal or counter between two calls that do the back end's work.
            const POLLS_PER_ATTEND: u32 = 8;

            /// Nanoseconds between two reads of the host's status word by the threads of a GPU, all together. A read
            /// takes about a microsecond. With 0 each thread reads it each time.
            const LOOK_NS: u64 = 20_000;

            /// log2 of the number of entries of a mailbox.
            const MAILBOX_LOG2: u32 = 6;

            $($fence)*

            /// Returns the handle to the word at `address`.
            ///
            /// # Safety
            /// - As [`GlobalWord::new`].
            unsafe fn word(address: u64) -> Self::Word;

            /// Stores the low `1 << width_log2` bytes of `value`, weak; `width_log2` is 0 to 3.
            ///
            /// # Safety
            /// - `address` is valid for a store of that width, and a multiple of it.
            unsafe fn store_value(address: u64, value: u64, width_log2: u32);

            /// Pauses for about `ns` nanoseconds.
            fn pause(ns: u32);

            /// Pauses between two reads of a word in host memory. On a GPU it does not pause, because a read takes ten
            /// times as long as a nap.
            #[inline(always)]
            fn pause_at_host_word() {
                Self::pause(NAP_NS);
            }

            /// Returns nanoseconds on the clock of deadlines.
            fn clock_ns() -> u64;

            /// Returns whether a mutation test swaps the two halves of the `ordered!` of this name.
            #[doc(hidden)]
            #[inline(always)]
            fn swapped(_name: &str) -> bool {
                false
            }
        }
    };
}

/// The nap of a waiting thread between two checks, in nanoseconds.
pub(crate) const NAP_NS: u32 = 64;

word_operations!(declare);

/// A word in this machine's memory: global memory on a GPU, ordinary memory on a CPU.
///
/// ```
/// use gin_device::sys::{GlobalWord, Word};
///
/// let mut memory = [5u64, 0];
/// // Safety: the array outlives the handle, and all accesses go through the handle.
/// let word = unsafe { GlobalWord::new(&raw mut memory as u64) };
/// assert_eq!(word.add_relaxed_gpu(2), 5);
/// word.at(1).store_release_sys(9);
/// assert_eq!((word.load_relaxed_gpu(), word.at(1).load_acquire_sys()), (7, 9));
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GlobalWord(*mut u64);

// Safety: the handle is an address, and every access through it is atomic.
unsafe impl Send for GlobalWord {}
// Safety: as above.
unsafe impl Sync for GlobalWord {}

impl GlobalWord {
    /// Returns the handle to the word at `address`.
    ///
    /// # Safety
    /// - `address` is a multiple of 8.
    /// - This machine can read and write the memory there, as long as the handle, or one made from it with `at`, is
    ///   used.
    /// - All concurrent accesses to it are atomic.
    #[inline(always)]
    pub const unsafe fn new(address: u64) -> Self {
        Self(address as usize as *mut u64)
    }

    /// Returns the address, for the detector of data races.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }
}

/// The memory of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Global;

macro_rules! implement {
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => { implement_traits! { [] [] $($shape $name;)* } };
}

macro_rules! implement_traits {
    ([$($word:tt)*] [$($fence:tt)*] load $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)* #[inline(always)] fn $name(self) -> u64 { imp::$name(self.0) }] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] store $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)* #[inline(always)] fn $name(self, value: u64) { imp::$name(self.0, value) }] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] rmw $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)* #[inline(always)] fn $name(self, value: u64) -> u64 { imp::$name(self.0, value) }] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] red $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)* #[inline(always)] fn $name(self, value: u64) { imp::$name(self.0, value) }] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] cas $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)* #[inline(always)] fn $name(self, expected: u64, new: u64) -> u64 { imp::$name(self.0, expected, new) }] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] fence $name:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*] [$($fence)* #[inline(always)] fn $name() { imp::$name() }] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*]) => {
        impl Word for GlobalWord {
            $($word)*

            #[inline(always)]
            fn store_pair_relaxed_sys(self, low: u64, high: u64) {
                imp::store_pair_relaxed_sys(self.0, low, high)
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn load_pair_relaxed_sys(self) -> (u64, u64) {
                // Safety: the words are valid for loads.
                unsafe { data::load_relaxed_sys_pair(self.0) }
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn store_pair_relaxed_sys_if(self, condition: bool, low: u64, high: u64) {
                imp::store_pair_relaxed_sys_if(self.0, condition, low, high)
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn spin(self, first: u64, least: u64, polls: u32) -> u64 {
                imp::spin(self.0, first, least, polls)
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn add_relaxed_gpu_if(self, condition: bool, value: u64) -> u64 {
                imp::add_relaxed_gpu_if(self.0, condition, value)
            }

            #[inline(always)]
            fn at(self, index: u64) -> Self {
                Self(self.0.wrapping_add(index as usize))
            }
        }

        impl Memory for Global {
            type Word = GlobalWord;

            $($fence)*

            #[inline(always)]
            unsafe fn word(address: u64) -> GlobalWord {
                // Safety: the caller's promise.
                unsafe { GlobalWord::new(address) }
            }

            #[inline(always)]
            unsafe fn store_value(address: u64, value: u64, width_log2: u32) {
                let at = address as usize;
                // Safety: the caller's promise.
                unsafe {
                    match width_log2 {
                        0 => data::store_weak_u8(at as *mut u8, value as u8),
                        1 => data::store_weak_u16(at as *mut u16, value as u16),
                        2 => data::store_weak_u32(at as *mut u32, value as u32),
                        _ => data::store_weak_u64(at as *mut u64, value),
                    }
                }
            }

            #[inline(always)]
            fn pause(ns: u32) {
                imp::pause(ns)
            }

            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn pause_at_host_word() {}

            #[inline(always)]
            fn clock_ns() -> u64 {
                imp::clock_ns()
            }
        }
    };
}

word_operations!(implement);
