// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts of the commands that bring a queue pair up. [`command`](super::command) has the numbers used in them.
//!
//! Names are those of Linux' `mlx5_ifc.h`. Every command begins like [`CommandIn`] and every answer like
//! [`CommandOut`].

use super::bits::layouts;
#[cfg(doc)]
use super::command::{
    AtomicMode, Mtu, PM_MIGRATED, QpState, RQ_TYPE_NONE, Status, capability, opcode, opt_param, roce_version,
};

layouts! {
    /// Common start of all commands.
    CommandIn: "destroy_qp_in", 16 {
        /// Command: one of [`opcode`].
        OPCODE: number "opcode", 0, 16;
        /// User context that owns the objects; the kernel's driver fills it in.
        UID: number "uid", 16, 16;
        /// Variant of the command.
        OP_MOD: number "op_mod", 48, 16;
        /// Number of the object, in commands that name one.
        NUMBER: number "qpn", 72, 24;
    }
    /// Common start of all answers.
    CommandOut: "create_qp_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// Number of the new object, in answers to commands that create one.
        NUMBER: number "qpn", 72, 24;
    }
    /// Context of a completion queue.
    Cqc: "cqc", 64 {
        /// State.
        STATUS: number "status", 0, 4;
        /// 1 if the doorbell record is in the memory that `DBR_UMEM_ID` names.
        DBR_UMEM_VALID: number "dbr_umem_valid", 6, 1;
        /// Size of a completion: 0 for 64 bytes.
        CQE_SZ: number "cqe_sz", 8, 3;
        /// 1 if collapsed: the device writes all completions to slot 0.
        CC: number "cc", 11, 1;
        /// 1 if the device ignores overruns: there is no consumer index.
        OI: number "oi", 14, 1;
        /// Number of the memory that holds the doorbell record.
        DBR_UMEM_ID: number "dbr_umem_id", 32, 32;
        /// log2 of the number of slots.
        LOG_CQ_SIZE: number "log_cq_size", 99, 5;
        /// Doorbell page.
        UAR_PAGE: number "uar_page", 104, 24;
        /// Event queue.
        C_EQN: number "c_eqn_or_apu_element", 160, 32;
        /// log2 of the page size in units of 4 KiB.
        LOG_PAGE_SIZE: number "log_page_size", 195, 5;
        /// Consumer index known to the device.
        CONSUMER_COUNTER: number "consumer_counter", 328, 24;
        /// Producer index: the number of completions written.
        PRODUCER_COUNTER: number "producer_counter", 360, 24;
        /// Offset of the doorbell record in its memory.
        DBR_ADDR: number "dbr_addr", 448, 64;
    }
    /// Command that creates a completion queue.
    CreateCqIn: "create_cq_in", 272 {
        /// [`opcode::CREATE_CQ`].
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The context.
        CQ_CONTEXT: part<Cqc> "cq_context", 128, 512;
        /// Offset of the ring in its memory.
        CQ_UMEM_OFFSET: number "cq_umem_offset", 640, 64;
        /// Number of the memory that holds the ring.
        CQ_UMEM_ID: number "cq_umem_id", 704, 32;
        /// 1 if the ring is in that memory.
        CQ_UMEM_VALID: number "cq_umem_valid", 736, 1;
    }
    /// Answer to [`CreateCqIn`].
    CreateCqOut: "create_cq_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// Number of the completion queue.
        CQN: number "cqn", 72, 24;
    }
    /// Path to the peer.
    Ads: "ads", 44 {
        /// Index in the partition key table.
        PKEY_INDEX: number "pkey_index", 16, 16;
        /// 1 if packets have a global route header.
        GRH: number "grh", 40, 1;
        /// Low bits of the local LID.
        MLID: number "mlid", 41, 7;
        /// LID of the peer.
        RLID: number "rlid", 48, 16;
        /// Time to wait for an acknowledgement: 4.096 us * 2^n; 0 waits for ever.
        ACK_TIMEOUT: number "ack_timeout", 64, 5;
        /// Index of the local GID.
        SRC_ADDR_INDEX: number "src_addr_index", 72, 8;
        /// Rate limit; 0 for none.
        STAT_RATE: number "stat_rate", 84, 4;
        /// Hop limit.
        HOP_LIMIT: number "hop_limit", 88, 8;
        /// Traffic class.
        TCLASS: number "tclass", 100, 8;
        /// Flow label.
        FLOW_LABEL: number "flow_label", 108, 20;
        /// GID of the peer, or its address.
        RGID_RIP: bytes "rgid_rip", 128, 128;
        /// DSCP service class of RoCE v2.
        DSCP: number "dscp", 266, 6;
        /// UDP source port of RoCE v2.
        UDP_SPORT: number "udp_sport", 272, 16;
        /// Ethernet priority.
        ETH_PRIO: number "eth_prio", 289, 3;
        /// Service level.
        SL: number "sl", 292, 4;
        /// Port, from 1.
        VHCA_PORT_NUM: number "vhca_port_num", 296, 8;
        /// First 16 bits of the peer's MAC address.
        RMAC_47_32: number "rmac_47_32", 304, 16;
        /// Remaining 32 bits of the MAC address.
        RMAC_31_0: number "rmac_31_0", 320, 32;
    }
    /// Context of a queue pair.
    Qpc: "qpc", 232 {
        /// A [`QpState`].
        STATE: number "state", 0, 4;
        /// Kind of service: 0 reliable connection.
        ST: number "st", 8, 8;
        /// Path migration: [`PM_MIGRATED`].
        PM_STATE: number "pm_state", 19, 2;
        /// Protection domain.
        PD: number "pd", 40, 24;
        /// An [`Mtu`].
        MTU: number "mtu", 64, 3;
        /// log2 of the longest message in bytes.
        LOG_MSG_MAX: number "log_msg_max", 67, 5;
        /// log2 of the slots of the receive queue.
        LOG_RQ_SIZE: number "log_rq_size", 73, 4;
        /// log2 of the bytes of a receive slot, less 4.
        LOG_RQ_STRIDE: number "log_rq_stride", 77, 3;
        /// 1 if there is no send queue.
        NO_SQ: number "no_sq", 80, 1;
        /// log2 of the slots of the send queue.
        LOG_SQ_SIZE: number "log_sq_size", 81, 4;
        /// Format of time stamps.
        TS_FORMAT: number "ts_format", 88, 2;
        /// Doorbell page.
        UAR_PAGE: number "uar_page", 104, 24;
        /// 0 if the send queue has a doorbell record.
        SEND_DBR_MODE: number "send_dbr_mode", 128, 2;
        /// User's number for the queue pair, reported in completions.
        USER_INDEX: number "user_index", 136, 24;
        /// log2 of the page size in units of 4 KiB.
        LOG_PAGE_SIZE: number "log_page_size", 163, 5;
        /// Queue pair of the peer.
        REMOTE_QPN: number "remote_qpn", 168, 24;
        /// Path to the peer.
        PRIMARY_ADDRESS_PATH: part<Ads> "primary_address_path", 192, 352;
        /// log2 of the number of packets per acknowledgement request.
        LOG_ACK_REQ_FREQ: number "log_ack_req_freq", 896, 4;
        /// log2 of the number of reads and atomics that may be outstanding.
        LOG_SRA_MAX: number "log_sra_max", 904, 3;
        /// Number of retries without an acknowledgement.
        RETRY_COUNT: number "retry_count", 909, 3;
        /// Number of retries while the peer is not ready; 7 retries for ever.
        RNR_RETRY: number "rnr_retry", 912, 3;
        /// Packet sequence number of the next packet sent.
        NEXT_SEND_PSN: number "next_send_psn", 968, 24;
        /// Completion queue of the send queue.
        CQN_SND: number "cqn_snd", 1000, 24;
        /// log2 of the number of reads and atomics that the peer may have outstanding.
        LOG_RRA_MAX: number "log_rra_max", 1160, 3;
        /// An [`AtomicMode`].
        ATOMIC_MODE: number "atomic_mode", 1164, 4;
        /// 1 if the peer may read.
        RRE: number "rre", 1168, 1;
        /// 1 if the peer may write.
        RWE: number "rwe", 1169, 1;
        /// 1 if the peer may execute atomics.
        RAE: number "rae", 1170, 1;
        /// 1 if entries of the receive queue wait for a master.
        CD_SLAVE_RECEIVE: number "cd_slave_receive", 1181, 1;
        /// 1 if entries of the send queue wait for a master.
        CD_SLAVE_SEND: number "cd_slave_send", 1182, 1;
        /// 1 if entries may wait for completions of other queues, and start entries of slaves.
        CD_MASTER: number "cd_master", 1183, 1;
        /// Time that a peer waits when this end is not ready.
        MIN_RNR_NAK: number "min_rnr_nak", 1187, 5;
        /// Packet sequence number of the next packet received.
        NEXT_RCV_PSN: number "next_rcv_psn", 1192, 24;
        /// Completion queue of the receive queue.
        CQN_RCV: number "cqn_rcv", 1256, 24;
        /// Offset of the doorbell record in its memory.
        DBR_ADDR: number "dbr_addr", 1280, 64;
        /// Kind of receive queue: [`RQ_TYPE_NONE`].
        RQ_TYPE: number "rq_type", 1381, 3;
        /// Index past the last entry that the device has begun.
        HW_SQ_WQEBB_COUNTER: number "hw_sq_wqebb_counter", 1440, 16;
        /// Index past the last entry that was posted.
        SW_SQ_WQEBB_COUNTER: number "sw_sq_wqebb_counter", 1456, 16;
        /// 1 if the doorbell record is in the memory that `DBR_UMEM_ID` names.
        DBR_UMEM_VALID: number "dbr_umem_valid", 1667, 1;
        /// Number of the memory that holds the doorbell record.
        DBR_UMEM_ID: number "dbr_umem_id", 1824, 32;
    }
    /// Command that creates a queue pair.
    CreateQpIn: "create_qp_in", 272 {
        /// [`opcode::CREATE_QP`].
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// Mask of the valid optional fields of the context.
        OPT_PARAM_MASK: number "opt_param_mask", 128, 32;
        /// The context.
        QPC: part<Qpc> "qpc", 192, 1856;
        /// Offset of the ring in its memory.
        WQ_UMEM_OFFSET: number "wq_umem_offset", 2048, 64;
        /// Number of the memory that holds the ring.
        WQ_UMEM_ID: number "wq_umem_id", 2112, 32;
        /// 1 if the ring is in that memory.
        WQ_UMEM_VALID: number "wq_umem_valid", 2144, 1;
    }
    /// Answer to [`CreateQpIn`].
    CreateQpOut: "create_qp_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// Number of the queue pair.
        QPN: number "qpn", 72, 24;
    }
    /// Command of the three state changes on the way up: [`opcode::RST2INIT_QP`], [`opcode::INIT2RTR_QP`],
    /// [`opcode::RTR2RTS_QP`].
    ModifyQpIn: "init2rtr_qp_in", 272 {
        /// One of those opcodes.
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The queue pair.
        QPN: number "qpn", 72, 24;
        /// Mask of the valid optional fields of the context: bits of [`opt_param`].
        OPT_PARAM_MASK: number "opt_param_mask", 128, 32;
        /// The context.
        QPC: part<Qpc> "qpc", 192, 1856;
    }
    /// Answer to a command that creates nothing.
    ModifyQpOut: "qp_2err_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
    }
    /// Command that moves a queue pair to error ([`opcode::TO_ERR_QP`]) or to reset ([`opcode::TO_RST_QP`]).
    StopQpIn: "qp_2err_in", 16 {
        /// One of those opcodes.
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The queue pair.
        QPN: number "qpn", 72, 24;
    }
    /// Command that returns the context of a queue pair.
    QueryQpIn: "query_qp_in", 16 {
        /// [`opcode::QUERY_QP`].
        OPCODE: number "opcode", 0, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The queue pair.
        QPN: number "qpn", 72, 24;
    }
    /// Answer to [`QueryQpIn`].
    QueryQpOut: "query_qp_out", 272 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// The context.
        QPC: part<Qpc> "qpc", 192, 1856;
    }
    /// Command that returns the context of a completion queue.
    QueryCqIn: "query_cq_in", 16 {
        /// [`opcode::QUERY_CQ`].
        OPCODE: number "opcode", 0, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The completion queue.
        CQN: number "cqn", 72, 24;
    }
    /// Answer to [`QueryCqIn`].
    QueryCqOut: "query_cq_out", 272 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// The context.
        CQ_CONTEXT: part<Cqc> "cq_context", 128, 512;
    }
    /// Registered memory; the addresses of its pages follow, 8 bytes each ([`Mtt`]).
    Umem: "umem", 32 {
        /// log2 of the page size in units of 4 KiB.
        LOG_PAGE_SIZE: number "log_page_size", 155, 5;
        /// Offset of the memory in its first page.
        PAGE_OFFSET: number "page_offset", 160, 32;
        /// Number of pages.
        NUM_OF_MTT: number "num_of_mtt", 192, 64;
    }
    /// Address of a page.
    Mtt: "mtt", 8 {
        /// First 32 bits.
        PTAG_63_32: number "ptag_63_32", 0, 32;
        /// Next 24 bits; the last 8 are zero.
        PTAG_31_8: number "ptag_31_8", 32, 24;
        /// 1 if the device may write.
        WR_EN: number "wr_en", 62, 1;
        /// 1 if the device may read.
        RD_EN: number "rd_en", 63, 1;
    }
    /// Command that registers memory for rings and doorbell records; the kernel's driver sends it.
    CreateUmemIn: "create_umem_in", 48 {
        /// [`opcode::CREATE_UMEM`].
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// The memory.
        UMEM: part<Umem> "umem", 128, 256;
    }
    /// Answer to [`CreateUmemIn`].
    CreateUmemOut: "create_umem_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// Number of the memory.
        UMEM_ID: number "umem_id", 72, 24;
    }
    /// Command that allocates a doorbell page; the kernel's driver sends it.
    AllocUarIn: "alloc_uar_in", 16 {
        /// [`opcode::ALLOC_UAR`].
        OPCODE: number "opcode", 0, 16;
        /// See [`CommandIn::UID`].
        UID: number "uid", 16, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
    }
    /// Answer to [`AllocUarIn`].
    AllocUarOut: "alloc_uar_out", 16 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// Number of the page.
        UAR: number "uar", 72, 24;
    }
    /// Command that returns capabilities.
    QueryHcaCapIn: "query_hca_cap_in", 16 {
        /// [`opcode::QUERY_HCA_CAP`].
        OPCODE: number "opcode", 0, 16;
        /// Table to return: one of [`capability`].
        OP_MOD: number "op_mod", 48, 16;
    }
    /// Answer to [`QueryHcaCapIn`]: a head, then 4,096 bytes that hold one of the tables below.
    QueryHcaCapOut: "query_hca_cap_out", 4112 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// The [`capability::GENERAL`] table.
        GENERAL: part<HcaCap> "capability.cmd_hca_cap", 128, 2048;
        /// The [`capability::GENERAL_2`] table.
        GENERAL_2: part<HcaCap2> "capability.cmd_hca_cap_2", 128, 2048;
        /// The [`capability::ROCE`] table.
        ROCE: part<RoceCap> "capability.roce_cap", 128, 2048;
        /// The [`capability::ATOMIC`] table.
        ATOMIC: part<AtomicCap> "capability.atomic_caps", 128, 2048;
    }
    /// General capabilities.
    HcaCap: "cmd_hca_cap", 256 {
        /// 1 if there is a second table.
        HCA_CAP_2: number "hca_cap_2", 32, 1;
        /// log2 of the largest number of slots of a queue.
        LOG_MAX_QP_SZ: number "log_max_qp_sz", 136, 8;
        /// log2 of the largest number of queue pairs.
        LOG_MAX_QP: number "log_max_qp", 155, 5;
        /// log2 of the largest number of slots of a completion queue.
        LOG_MAX_CQ_SZ: number "log_max_cq_sz", 200, 8;
        /// log2 of the largest number of completion queues.
        LOG_MAX_CQ: number "log_max_cq", 219, 5;
        /// 1 if writes to memory may have relaxed order.
        RELAXED_ORDERING_WRITE: number "relaxed_ordering_write", 232, 1;
        /// log2 of the largest number of reads and atomics that a queue pair may have outstanding.
        LOG_MAX_RA_REQ_QP: number "log_max_ra_req_qp", 330, 6;
        /// log2 of the largest number of reads and atomics that its peer may have outstanding.
        LOG_MAX_RA_RES_QP: number "log_max_ra_res_qp", 346, 6;
        /// Link layer: 0 InfiniBand, 1 Ethernet.
        PORT_TYPE: number "port_type", 438, 2;
        /// Number of ports.
        NUM_PORTS: number "num_ports", 440, 8;
        /// log2 of the longest message in bytes.
        LOG_MAX_MSG: number "log_max_msg", 451, 5;
        /// 1 if the device has RoCE.
        ROCE: number "roce", 541, 1;
        /// 1 if the device has atomics.
        ATOMIC: number "atomic", 542, 1;
        /// 1 if completion queues may ignore overruns.
        CQ_OI: number "cq_oi", 544, 1;
        /// 1 if entries may wait for completions of other queues.
        CD: number "cd", 556, 1;
        /// 1 if the device has reliable connections.
        RC: number "rc", 575, 1;
        /// log2 of the page size in bytes.
        LOG_PG_SZ: number "log_pg_sz", 600, 8;
        /// Largest size of a send queue entry in bytes.
        MAX_WQE_SZ_SQ: number "max_wqe_sz_sq", 656, 16;
        /// log2 of the largest number of registered memories for rings.
        LOG_MAX_UMEM: number "log_max_umem", 1131, 5;
        /// log2 of the page size of doorbell pages, in units of 4 KiB.
        LOG_UAR_PAGE_SZ: number "log_uar_page_sz", 1168, 16;
    }
    /// General capabilities, second table.
    HcaCap2: "cmd_hca_cap_2", 256 {
        /// 1 if send queues work without doorbell records.
        SEND_DBR_MODE_NO_DBR_EXT: number "send_dbr_mode_no_dbr_ext", 737, 1;
    }
    /// RoCE capabilities.
    RoceCap: "roce_cap", 256 {
        /// Bit n is set if the device has the RoCE version with code n of [`roce_version`].
        ROCE_VERSION: number "roce_version", 152, 8;
        /// Largest UDP source port.
        R_ROCE_MAX_SRC_UDP_PORT: number "r_roce_max_src_udp_port", 192, 16;
        /// Smallest UDP source port.
        R_ROCE_MIN_SRC_UDP_PORT: number "r_roce_min_src_udp_port", 208, 16;
        /// Number of GIDs.
        ROCE_ADDRESS_TABLE_SIZE: number "roce_address_table_size", 240, 16;
    }
    /// Atomic capabilities.
    AtomicCap: "atomic_caps", 256 {
        /// Byte order of 8-byte atomics: 1 for the host's.
        ENDIANNESS_MODE: number "atomic_req_8B_endianness_mode", 64, 2;
        /// Mask of operations: bit 1 is fetch and add.
        OPERATIONS: number "atomic_operations", 144, 16;
        /// Mask of sizes: bit n is 2^n bytes.
        SIZE_QP: number "atomic_size_qp", 176, 16;
    }
    /// Command that returns an entry of the GID table.
    QueryRoceAddressIn: "query_roce_address_in", 16 {
        /// [`opcode::QUERY_ROCE_ADDRESS`].
        OPCODE: number "opcode", 0, 16;
        /// Always 0.
        OP_MOD: number "op_mod", 48, 16;
        /// Index of the entry.
        ROCE_ADDRESS_INDEX: number "roce_address_index", 64, 16;
        /// Port, from 1.
        VHCA_PORT_NUM: number "vhca_port_num", 92, 4;
    }
    /// Answer to [`QueryRoceAddressIn`].
    QueryRoceAddressOut: "query_roce_address_out", 48 {
        /// A [`Status`].
        STATUS: number "status", 0, 8;
        /// Vendor's code of the cause.
        SYNDROME: number "syndrome", 32, 32;
        /// The entry.
        ROCE_ADDRESS: part<RoceAddress> "roce_address", 128, 256;
    }
    /// An entry of the GID table.
    RoceAddress: "roce_addr_layout", 32 {
        /// The GID.
        SOURCE_L3_ADDRESS: bytes "source_l3_address", 0, 128;
        /// 1 if the entry has a VLAN.
        VLAN_VALID: number "vlan_valid", 131, 1;
        /// VLAN id.
        VLAN_ID: number "vlan_id", 132, 12;
        /// First 16 bits of the local MAC address.
        SOURCE_MAC_47_32: number "source_mac_47_32", 144, 16;
        /// Remaining 32 bits of the MAC address.
        SOURCE_MAC_31_0: number "source_mac_31_0", 160, 32;
        /// Network layer: 0 IPv4, 1 IPv6.
        ROCE_L3_TYPE: number "roce_l3_type", 212, 4;
        /// One of [`roce_version`].
        ROCE_VERSION: number "roce_version", 216, 8;
    }
}

// The commands that create a queue pair, create a completion queue and change a state have one length.
const _: () = {
    use super::bits::Layout;
    assert!(CreateQpIn::LENGTH == 272 && ModifyQpIn::LENGTH == 272 && CreateCqIn::LENGTH == 272);
    assert!(Qpc::LENGTH == 232 && Cqc::LENGTH == 64 && Ads::LENGTH == 44);
};

#[cfg(test)]
mod tests {
    extern crate std;

    use super::super::bits::{Layout, Mailbox, RowKind, View};
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;
    use std::vec;
    use std::vec::Vec;

    /// Returns true for the views of a capability answer, which overlap.
    fn may_overlap(name: &str) -> bool {
        name.starts_with("capability.")
    }

    #[test]
    fn fields_are_within_their_tables_and_do_not_overlap() {
        for table in TABLES {
            let mut taken = vec![None; table.length * 8];
            for row in table.rows {
                let end = row.offset + row.width;
                assert!(end as usize <= taken.len(), "{}.{} ends at {end}", table.name, row.name);
                if may_overlap(row.name) {
                    continue;
                }
                for bit in &mut taken[row.offset as usize..end as usize] {
                    assert_eq!(*bit, None, "{}.{} overlaps another field", table.name, row.name);
                    *bit = Some(row.name);
                }
            }
        }
    }

    #[test]
    fn numbers_cross_no_word_that_the_device_does_not_take_whole() {
        for table in TABLES {
            for row in table.rows.iter().filter(|row| row.kind == RowKind::Number) {
                let word = if row.width > 32 { 64 } else { 32 };
                let (first, last) = (row.offset / word, (row.offset + row.width - 1) / word);
                assert_eq!(first, last, "{}.{}", table.name, row.name);
            }
        }
    }

    #[test]
    fn parts_have_the_length_of_their_tables() {
        for table in TABLES {
            for row in table.rows {
                if let RowKind::Part(name) = row.kind {
                    let part = TABLES.iter().find(|table| table.name == name).expect("a table of that name");
                    assert_eq!(part.length * 8, row.width as usize, "{}.{}", table.name, row.name);
                }
            }
        }
    }

    #[test]
    fn a_core_direct_master_is_one_bit_and_nothing_else() {
        let mut mailbox = Mailbox::<Qpc>::new();
        mailbox.set(Qpc::CD_MASTER, 1);
        let bytes = mailbox.bytes().unwrap();
        let set: Vec<_> = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).collect();
        assert_eq!(set, [(0x93, &1)]);
        assert_eq!(mailbox.get(Qpc::NEXT_RCV_PSN), 0);
    }

    #[test]
    fn the_first_number_that_does_not_fit_is_named() {
        let mut mailbox = Mailbox::<ModifyQpIn>::new();
        mailbox.set(ModifyQpIn::QPN, 5).set(ModifyQpIn::QPC.field(Qpc::CD_MASTER), 2).set(ModifyQpIn::QPN, 1 << 24);
        let error = mailbox.bytes().unwrap_err();
        assert_eq!((error.layout, error.field, error.value), ("init2rtr_qp_in", "cd_master", 2));
        assert!(error.to_string().contains("1 bits of cd_master"), "{error}");
        assert_eq!(mailbox.get(ModifyQpIn::QPN), 5);
    }

    #[test]
    fn a_view_of_too_few_bytes_is_none() {
        assert!(View::<Qpc>::new(&[0; 231]).is_none());
        assert_eq!(View::<Qpc>::new(&[0; 240]).map(|view| view.bytes().len()), Some(232));
    }

    proptest! {
        #[test]
        fn a_field_holds_what_was_set_and_no_other_field_changes(
            before in proptest::collection::vec(any::<u8>(), 272), value: u64, state: u8, byte: u8,
        ) {
            let path = CreateQpIn::QPC.part(Qpc::PRIMARY_ADDRESS_PATH);
            let fields = [
                CreateQpIn::OPCODE, CreateQpIn::WQ_UMEM_OFFSET, CreateQpIn::WQ_UMEM_VALID,
                CreateQpIn::QPC.field(Qpc::DBR_ADDR), CreateQpIn::QPC.field(Qpc::REMOTE_QPN), path.field(Ads::RLID),
                path.field(Ads::FLOW_LABEL), CreateQpIn::QPC.field(Qpc::CD_MASTER),
            ];
            let mut mailbox = Mailbox::<CreateQpIn>::new();
            mailbox.bytes_mut().copy_from_slice(&before);
            let field = fields[state as usize % fields.len()];
            let old = fields.map(|field| mailbox.get(field));
            let fits = value & field.max();
            mailbox.set(field, fits);
            for (other, old) in fields.iter().zip(old) {
                let expected = if other.offset() == field.offset() { fits } else { old };
                prop_assert_eq!(mailbox.get(*other), expected, "{:?}", other);
            }
            let gid = [byte; 16];
            mailbox.set_bytes(path.bytes(Ads::RGID_RIP), gid);
            prop_assert_eq!(mailbox.view().part(CreateQpIn::QPC).part(Qpc::PRIMARY_ADDRESS_PATH)
                .get_bytes(Ads::RGID_RIP), gid);
            prop_assert_eq!(mailbox.get(field), fits);
        }
    }

    #[test]
    fn a_part_is_set_whole() {
        let mut path = Mailbox::<Ads>::new();
        path.set(Ads::SL, 3).set(Ads::UDP_SPORT, 0xc001);
        let mut qpc = Mailbox::<Qpc>::new();
        qpc.set_part(Qpc::PRIMARY_ADDRESS_PATH, &path);
        assert_eq!(qpc.view().part(Qpc::PRIMARY_ADDRESS_PATH).get(Ads::UDP_SPORT), 0xc001);
        path.set(Ads::SL, 16);
        qpc.set_part(Qpc::PRIMARY_ADDRESS_PATH, &path);
        assert!(qpc.bytes().is_err(), "an error of the part is one of the whole");
        assert_eq!(Qpc::LENGTH, 232);
    }
}
