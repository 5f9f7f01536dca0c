// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers that go into command mailboxes.

#[cfg(doc)]
use super::mailbox::{HcaCap, Qpc};

/// Which commands there are.
pub mod opcode {
    /// Capabilities.
    pub const QUERY_HCA_CAP: u64 = 0x100;
    /// New completion queue.
    pub const CREATE_CQ: u64 = 0x400;
    /// Its end.
    pub const DESTROY_CQ: u64 = 0x401;
    /// Its context.
    pub const QUERY_CQ: u64 = 0x402;
    /// New queue pair.
    pub const CREATE_QP: u64 = 0x500;
    /// Its end.
    pub const DESTROY_QP: u64 = 0x501;
    /// Reset to init.
    pub const RST2INIT_QP: u64 = 0x502;
    /// Init to ready to receive.
    pub const INIT2RTR_QP: u64 = 0x503;
    /// Ready to receive to ready to send.
    pub const RTR2RTS_QP: u64 = 0x504;
    /// Any state to error.
    pub const TO_ERR_QP: u64 = 0x507;
    /// Any state to reset.
    pub const TO_RST_QP: u64 = 0x50a;
    /// Its context.
    pub const QUERY_QP: u64 = 0x50b;
    /// An entry of the table of GIDs.
    pub const QUERY_ROCE_ADDRESS: u64 = 0x760;
    /// New doorbell page.
    pub const ALLOC_UAR: u64 = 0x802;
    /// Its end.
    pub const DEALLOC_UAR: u64 = 0x803;
    /// New registered memory.
    pub const CREATE_UMEM: u64 = 0xa08;
    /// Its end.
    pub const DESTROY_UMEM: u64 = 0xa0a;
}

/// Variants of [`opcode::QUERY_HCA_CAP`]: twice the number of the table, plus 1 for what is in force.
pub mod capability {
    /// [`HcaCap`](super::super::mailbox::HcaCap)
    pub const GENERAL: u64 = 0x01;
    /// [`AtomicCap`](super::super::mailbox::AtomicCap)
    pub const ATOMIC: u64 = 0x07;
    /// [`RoceCap`](super::super::mailbox::RoceCap)
    pub const ROCE: u64 = 0x09;
    /// [`HcaCap2`](super::super::mailbox::HcaCap2)
    pub const GENERAL_2: u64 = 0x41;
}

/// Bits of `opt_param_mask`.
pub mod opt_param {
    /// `rre` counts.
    pub const RRE: u64 = 1 << 1;
    /// `rae` counts.
    pub const RAE: u64 = 1 << 2;
    /// `rwe` counts.
    pub const RWE: u64 = 1 << 3;
    /// `pkey_index` counts.
    pub const PKEY_INDEX: u64 = 1 << 4;
    /// `min_rnr_nak` counts.
    pub const RNR_TIMEOUT: u64 = 1 << 6;
}

/// Codes of RoCE versions.
pub mod roce_version {
    /// Over Ethernet.
    pub const V1: u64 = 0;
    /// Over UDP.
    pub const V2: u64 = 2;
}

/// [`Qpc::PM_STATE`] of a connection with one path.
pub const PM_MIGRATED: u64 = 3;
/// [`Qpc::RQ_TYPE`] of a queue pair without a receive queue.
pub const RQ_TYPE_NONE: u64 = 3;
/// [`HcaCap::PORT_TYPE`] of Ethernet.
pub const PORT_TYPE_ETHERNET: u64 = 1;

macro_rules! numbers {
    ($($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $code:literal, $text:literal;)* })*) => {$(
        $(#[$meta])*
        #[repr(u8)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
        pub enum $name { $($(#[$doc])* $variant = $code,)* }

        impl $name {
            /// Every one that there is.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The one with this code, if there is one.
            pub const fn from_code(code: u64) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// What stands for it in a mailbox.
            pub const fn code(self) -> u64 {
                self as u64
            }

            /// What it says, in words.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        #[cfg(not(target_arch = "nvptx64"))]
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.text())
            }
        }
    )*};
}

numbers! {
    /// How a command ended.
    Status {
        /// Done.
        Ok = 0x0, "done";
        /// The firmware failed.
        Internal = 0x1, "internal error";
        /// No such command.
        BadOperation = 0x2, "no such command or variant";
        /// A field that makes no sense.
        BadParameter = 0x3, "bad parameter";
        /// The device is not in a state for it.
        BadSystemState = 0x4, "bad state of the device";
        /// An object that it names is not there.
        BadResource = 0x5, "no such object";
        /// An object that it names is in use.
        ResourceBusy = 0x6, "object is in use";
        /// A limit is reached.
        Limit = 0x8, "limit exceeded";
        /// An object that it names is not in a state for it.
        BadResourceState = 0x9, "object is in the wrong state";
        /// An index past its table.
        Index = 0xa, "index out of range";
        /// No room for another object.
        NoResources = 0xf, "out of resources";
        /// A queue pair is not in a state for it.
        BadQpState = 0x10, "queue pair is in the wrong state";
        /// The command is too short or too long.
        BadInputLength = 0x50, "wrong length of the command";
        /// There is too little room for the answer.
        BadOutputLength = 0x51, "wrong length of the answer";
    }
    /// State of a queue pair.
    QpState {
        /// New.
        Reset = 0, "reset";
        /// It has a port.
        Init = 1, "init";
        /// It knows its peer, and answers it.
        ReadyToReceive = 2, "ready to receive";
        /// It sends.
        ReadyToSend = 3, "ready to send";
        /// Its send queue failed.
        SendError = 4, "send queue error";
        /// Its send queue is drained.
        Drained = 5, "drained";
        /// It failed.
        Error = 6, "error";
    }
    /// Most bytes of payload in a packet.
    Mtu {
        /// 256.
        B256 = 1, "256 bytes";
        /// 512.
        B512 = 2, "512 bytes";
        /// 1,024.
        B1024 = 3, "1024 bytes";
        /// 2,048.
        B2048 = 4, "2048 bytes";
        /// 4,096.
        B4096 = 5, "4096 bytes";
    }
    /// What atomics a queue pair answers.
    AtomicMode {
        /// Those of the InfiniBand specification, 8 bytes.
        Specification = 1, "as in the specification";
        /// Up to 8 bytes.
        EightBytes = 3, "up to 8 bytes";
    }
}

impl Mtu {
    /// In bytes.
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_codes() {
        for &status in Status::ALL {
            assert_eq!(Status::from_code(status.code()), Some(status));
        }
        assert_eq!(Mtu::ALL.iter().map(|mtu| mtu.bytes()).max(), Some(4096));
    }
}
