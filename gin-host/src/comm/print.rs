// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lines that kernels print with `gin_println!`.

use gin_abi::print::{
    ARGUMENT_WORDS, ARGUMENTS, DECIMALS, HEX, MAX_ARGUMENTS, MAX_DECIMALS, PREFIXED_HEX, TEXT, TEXT_BYTES, codes,
};
use gin_boot::rt;
use gin_device::internal::print::Ring;
use gin_device::sys::{Global, Word};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// A function that takes the lines of kernels, without line ends. It must not wait.
pub type PrintTo = Arc<dyn Fn(&str) + Send + Sync>;

/// Returns the function that prints lines on standard output.
pub(super) fn to_stdout() -> PrintTo {
    Arc::new(|line| {
        // A reader that has gone is no reason to fail.
        let _ = writeln!(std::io::stdout(), "{line}");
    })
}

/// The host's end of the ring of a communicator's lines.
#[derive(derive_more::Debug)]
pub(crate) struct Printer {
    ring: Ring<Global>,
    rank: u32,
    #[debug(skip)]
    to: PrintTo,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The index of the next line.
    next: u64,
    /// The number of dropped lines that was printed last.
    dropped: u64,
}

impl Printer {
    pub(super) fn new(ring: Ring<Global>, rank: u32, to: PrintTo) -> Self {
        Self { ring, rank, to, state: Mutex::default() }
    }

    /// Prints all whole lines. Returns whether there were any. Does nothing while another thread prints.
    pub(crate) fn drain(&self) -> bool {
        self.try_lock().is_some_and(|mut state| self.print(&mut state))
    }

    /// Prints all whole lines, then tells how many were dropped, which `dropped` returns. For a thread that may wait.
    pub(super) fn finish(&self, dropped: impl FnOnce() -> Option<u64>) {
        // The thread that prints may be a coroutine that waits for this one.
        let Some(mut state) = rt::wait_for("the printing of lines", || self.try_lock()) else { return };
        self.print(&mut state);
        // Only a full ring drops lines, so some were printed.
        if let Some(dropped) = (state.next > 0).then(dropped).flatten() {
            self.tell(&mut state, dropped);
        }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            // A function that panicked has not printed its line.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn print(&self, state: &mut State) -> bool {
        let first = state.next;
        // As many as the ring has room for, so that a kernel that always prints does not keep the caller.
        while state.next - first <= self.ring.mask && self.ring.is_whole(state.next) {
            let slot = self.ring.slot(state.next);
            let line = text(self.rank, |index| slot.at(index).load_relaxed_sys());
            self.tell(state, slot.at(3).load_relaxed_sys());
            state.next += 1;
            self.ring.take(state.next);
            (self.to)(&line);
        }
        state.next != first
    }

    /// Tells how many lines were dropped since the last time.
    fn tell(&self, state: &mut State, dropped: u64) {
        // Lines may read the number in another order than they have.
        if dropped > state.dropped {
            let (rank, lines, room) = (self.rank, dropped - state.dropped, self.ring.mask + 1);
            (self.to)(&format!(
                "rank {rank}: {lines} lines of kernels were dropped, because there was room for {room}; raise \
                 `Requirements::print_lines`"
            ));
            state.dropped = dropped;
        }
    }
}

/// Returns the text of a line whose words `word` returns.
fn text(rank: u32, word: impl Fn(u64) -> u64) -> String {
    let (place, kinds) = (word(1), word(2));
    let (block, thread) = (place as u32, place >> 32);
    let mut line = format!("rank {rank}, block {block}, thread {thread}: ");
    let mut bytes = Vec::new();
    let mut arguments = (0..MAX_ARGUMENTS as u64).map(|number| {
        let at = ARGUMENTS + ARGUMENT_WORDS * number;
        Argument { kind: kinds >> (8 * (number + 1)) & 0xff, words: [word(at), word(at + 1)] }
    });
    let text = (0..TEXT_BYTES as u64 / 8).flat_map(|index| word(TEXT + index).to_le_bytes());
    for byte in text.take_while(|&byte| byte != 0) {
        if byte >= b' ' || byte == b'\n' || byte == b'\t' {
            bytes.push(byte);
        } else if let Some(argument) = arguments.next() {
            bytes.extend(argument.text(byte).bytes());
        }
    }
    line.push_str(&String::from_utf8_lossy(&bytes));
    line
}

/// One argument of a line.
struct Argument {
    kind: u64,
    words: [u64; 2],
}

impl Argument {
    fn text(&self, form: u8) -> String {
        let word = self.words[0];
        // A signed number of fewer bits has no more digits than its bits.
        let narrow = match self.kind {
            kind if kind == codes::SIGNED + 1 => word & 0xffff_ffff,
            kind if kind == codes::SIGNED + 2 => word & 0xffff,
            kind if kind == codes::SIGNED + 3 => word & 0xff,
            _ => word,
        };
        let decimals = form.checked_sub(DECIMALS).filter(|&decimals| decimals <= MAX_DECIMALS);
        let mut text = String::new();
        let written = match (form, decimals, self.kind) {
            (HEX, ..) => write!(text, "{narrow:x}"),
            (PREFIXED_HEX, ..) => write!(text, "{narrow:#x}"),
            (_, Some(decimals), codes::F32) => {
                write!(text, "{:.*}", usize::from(decimals), f32::from_bits(word as u32))
            }
            (_, Some(decimals), codes::F64) => write!(text, "{:.*}", usize::from(decimals), f64::from_bits(word)),
            (_, _, codes::UNSIGNED) => write!(text, "{word}"),
            (_, _, codes::F32) => write!(text, "{}", f32::from_bits(word as u32)),
            (_, _, codes::F64) => write!(text, "{}", f64::from_bits(word)),
            (_, _, codes::BOOL) => write!(text, "{}", word != 0),
            (_, _, codes::CHAR) => {
                write!(text, "{}", char::from_u32(word as u32).unwrap_or(char::REPLACEMENT_CHARACTER))
            }
            (_, _, codes::ADDRESS) => write!(text, "{word:#x}"),
            (_, _, codes::TEXT) => {
                let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
                let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
                write!(text, "{}", String::from_utf8_lossy(&bytes[..end]))
            }
            _ => write!(text, "{}", word as i64),
        };
        debug_assert!(written.is_ok());
        text
    }
}
