// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers used in command mailboxes.

use crate::codes::codes;

#[cfg(doc)]
use super::mailbox::{HcaCap, Qpc};

/// Opcodes of commands.
pub mod opcode {
    /// Returns capabilities.
    pub const QUERY_HCA_CAP: u64 = 0x100;
    /// Creates a completion queue.
    pub const CREATE_CQ: u64 = 0x400;
    /// Destroys a completion queue.
    pub const DESTROY_CQ: u64 = 0x401;
    /// Returns the context of a completion queue.
    pub const QUERY_CQ: u64 = 0x402;
    /// Creates a queue pair.
    pub const CREATE_QP: u64 = 0x500;
    /// Destroys a queue pair.
    pub const DESTROY_QP: u64 = 0x501;
    /// Moves a queue pair from reset to init.
    pub const RST2INIT_QP: u64 = 0x502;
    /// Moves a queue pair from init to ready to receive.
    pub const INIT2RTR_QP: u64 = 0x503;
    /// Moves a queue pair from ready to receive to ready to send.
    pub const RTR2RTS_QP: u64 = 0x504;
    /// Moves a queue pair from any state to error.
    pub const TO_ERR_QP: u64 = 0x507;
    /// Moves a queue pair from any state to reset.
    pub const TO_RST_QP: u64 = 0x50a;
    /// Returns the context of a queue pair.
    pub const QUERY_QP: u64 = 0x50b;
    /// Returns an entry of the GID table.
    pub const QUERY_ROCE_ADDRESS: u64 = 0x760;
    /// Allocates a doorbell page.
    pub const ALLOC_UAR: u64 = 0x802;
    /// Frees a doorbell page.
    pub const DEALLOC_UAR: u64 = 0x803;
    /// Registers memory.
    pub const CREATE_UMEM: u64 = 0xa08;
    /// Deregisters memory.
    pub const DESTROY_UMEM: u64 = 0xa0a;
}

/// Variants of [`opcode::QUERY_HCA_CAP`]: twice the table's number, plus 1 for the values in force.
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

/// Bits of `opt_param_mask`, which say that a field is valid.
pub mod opt_param {
    /// `rre` is valid.
    pub const RRE: u64 = 1 << 1;
    /// `rae` is valid.
    pub const RAE: u64 = 1 << 2;
    /// `rwe` is valid.
    pub const RWE: u64 = 1 << 3;
    /// `pkey_index` is valid.
    pub const PKEY_INDEX: u64 = 1 << 4;
    /// `min_rnr_nak` is valid.
    pub const RNR_TIMEOUT: u64 = 1 << 6;
}

/// Codes of RoCE versions.
pub mod roce_version {
    /// RoCE v1, over Ethernet.
    pub const V1: u64 = 0;
    /// RoCE v2, over UDP.
    pub const V2: u64 = 2;
}

/// [`Qpc::PM_STATE`] of a connection with one path.
pub const PM_MIGRATED: u64 = 3;
/// [`Qpc::RQ_TYPE`] of a queue pair without a receive queue.
pub const RQ_TYPE_NONE: u64 = 3;
/// [`HcaCap::PORT_TYPE`] of Ethernet.
pub const PORT_TYPE_ETHERNET: u64 = 1;

codes! {
    /// Status of a finished command.
    #[derive(PartialOrd, Ord)]
    Status: u8 as u64 {
        /// The command succeeded.
        Ok = 0x0, "done";
        /// The firmware failed.
        Internal = 0x1, "internal error";
        /// The command or variant does not exist.
        BadOperation = 0x2, "no such command or variant";
        /// A field has an invalid value.
        BadParameter = 0x3, "bad parameter";
        /// The device is in the wrong state.
        BadSystemState = 0x4, "device is in the wrong state";
        /// An object that the command names does not exist.
        BadResource = 0x5, "no such object";
        /// An object that the command names is in use.
        ResourceBusy = 0x6, "object is in use";
        /// A limit is reached.
        Limit = 0x8, "limit exceeded";
        /// An object that the command names is in the wrong state.
        BadResourceState = 0x9, "object is in the wrong state";
        /// An index exceeds its table.
        Index = 0xa, "index out of range";
        /// The device has no room for another object.
        NoResources = 0xf, "out of resources";
        /// A queue pair is in the wrong state.
        BadQpState = 0x10, "queue pair is in the wrong state";
        /// The command is too short or too long.
        BadInputLength = 0x50, "wrong length of the command";
        /// The buffer for the answer has the wrong length.
        BadOutputLength = 0x51, "wrong length of the answer";
    }
    /// State of a queue pair.
    #[derive(PartialOrd, Ord)]
    QpState: u8 as u64 {
        /// New.
        Reset = 0, "reset";
        /// Assigned to a port.
        Init = 1, "init";
        /// Connected to its peer, and answers it.
        ReadyToReceive = 2, "ready to receive";
        /// Sends.
        ReadyToSend = 3, "ready to send";
        /// The send queue failed.
        SendError = 4, "send queue error";
        /// The send queue is drained.
        Drained = 5, "drained";
        /// The queue pair failed.
        Error = 6, "error";
    }
    /// Largest payload of a packet.
    #[derive(PartialOrd, Ord)]
    Mtu: u8 as u64 {
        /// 256 bytes.
        B256 = 1, "256 bytes";
        /// 512 bytes.
        B512 = 2, "512 bytes";
        /// 1,024 bytes.
        B1024 = 3, "1024 bytes";
        /// 2,048 bytes.
        B2048 = 4, "2048 bytes";
        /// 4,096 bytes.
        B4096 = 5, "4096 bytes";
    }
    /// Atomics that a queue pair executes for its peer.
    #[derive(PartialOrd, Ord)]
    AtomicMode: u8 as u64 {
        /// Those of the InfiniBand specification, 8 bytes.
        Specification = 1, "as in the specification";
        /// Operands of up to 8 bytes.
        EightBytes = 3, "up to 8 bytes";
    }
}

impl Mtu {
    /// Returns the payload in bytes.
    ///
    /// ```
    /// use gin_abi::mlx5::command::Mtu;
    /// assert_eq!(Mtu::B1024.bytes(), 1024);
    /// ```
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
