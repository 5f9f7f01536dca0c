// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares structures and constants with the installed headers of rdma-core and libfabric: the C compiler refuses a
//! `_Static_assert` that does not hold.
//!
//! Ignored without the headers or a C compiler; `scripts/setup.sh` installs them.

#[path = "common/c.rs"]
mod c;

use bitflags::Flags;
use gin_verbs::fabric;
use gin_verbs::{mlx5dv::*, verbs::*};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fs;
use std::mem::{MaybeUninit, offset_of};

// Headers before rdma-core 45 lack the newest kind of doorbell page.
const HEAD: &str = "#include <infiniband/mlx5dv.h>\n#include <infiniband/verbs.h>\n#include <stddef.h>\n\
                    #ifndef MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED\n\
                    #define MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED (1u << 31)\n#endif\n";

/// Lists conditions on fields: each one's path in Rust and, where it differs, its path in C.
macro_rules! fields {
    ($($structure:ident = $c:literal { $($($field:ident).+ $(= $c_field:literal)?),* $(,)? })*) => {{
        let mut statements = Vec::new();
        $($(
            let name = [$($c_field,)? &stringify!($($field).+).replace(' ', "")][0].to_owned();
            let offset = offset_of!($structure, $($field).+);
            let value = MaybeUninit::<$structure>::uninit();
            // Safety: takes an address only.
            let size = size_of_pointee(unsafe { &raw const (*value.as_ptr()).$($field).+ });
            statements.push(format!("offsetof({}, {name}) == {offset}", $c));
            statements.push(format!("sizeof((({} *)0)->{name}) == {size}", $c));
        )*)*
        statements
    }};
}

fn main() {
    let trials = vec![
        Trial::ignorable_test("structures_and_constants_are_those_of_the_headers", headers),
        Trial::ignorable_test("structures_and_constants_of_libfabric_are_those_of_its_headers", of_libfabric),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn compile(body: &str) -> Result<(), String> {
    compile_with(HEAD, body)
}

fn compile_with(head: &str, body: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let source = folder.path().join("headers.c");
    fs::write(&source, format!("{head}{body}")).map_err(|error| error.to_string())?;
    c::compile(&source, &folder.path().join("headers.o"), &["-c"])
}

fn headers() -> Result<Completion, Failed> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) || compile("").is_err() {
        return Ok(Completion::ignored_with("no infiniband/mlx5dv.h, or no C compiler: run scripts/setup.sh"));
    }
    let statements = [fields(), sizes(), numbers()].concat();
    // Each comparison by itself detects a wrong number.
    for (right, wrong) in [
        ("offsetof(struct ibv_sge, lkey) == 12", "offsetof(struct ibv_sge, lkey) == 11"),
        ("sizeof(struct ibv_wc) == 48", "sizeof(struct ibv_wc) == 47"),
        ("IBV_QPT_RC == 2u", "IBV_QPT_RC == 3u"),
    ] {
        assert!(statements.iter().any(|statement| statement == right), "{right} is not compared");
        match compile(&assertions(&[wrong.to_owned()])) {
            Err(error) if error.contains(wrong) => {}
            other => return Err(format!("{wrong} is accepted: {other:?}").into()),
        }
    }
    compile(&assertions(&statements))?;
    Ok(Completion::Completed)
}

const LIBFABRIC: &str = "#include <rdma/fabric.h>\n#include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n\
                         #include <rdma/fi_cm.h>\n#include <rdma/fi_rma.h>\n#include <rdma/fi_errno.h>\n\
                         #include <sys/uio.h>\n#include <stddef.h>\n";

fn of_libfabric() -> Result<Completion, Failed> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) || compile_with(LIBFABRIC, "").is_err() {
        return Ok(Completion::ignored_with("no rdma/fabric.h, or no C compiler: run scripts/setup.sh"));
    }
    let statements = libfabric();
    for (right, wrong) in [
        ("offsetof(struct fid_mr, key) == 32", "offsetof(struct fid_mr, key) == 24"),
        ("FI_ORDER_SAW == 128ull", "FI_ORDER_SAW == 64ull"),
    ] {
        assert!(statements.iter().any(|statement| statement == right), "{right} is not compared");
        match compile_with(LIBFABRIC, &assertions(&[wrong.to_owned()])) {
            Err(error) if error.contains(wrong) => {}
            other => return Err(format!("{wrong} is accepted: {other:?}").into()),
        }
    }
    compile_with(LIBFABRIC, &assertions(&statements))?;
    Ok(Completion::Completed)
}

/// Lists the conditions on libfabric's structures and constants.
fn libfabric() -> Vec<String> {
    use fabric::*;
    let mut statements = fields! {
        TransmitAttributes = "struct fi_tx_attr" { caps, mode, op_flags, msg_order, comp_order, inject_size, size }
        ReceiveAttributes = "struct fi_rx_attr" { caps, mode, op_flags, msg_order, comp_order, size }
        EndpointAttributes = "struct fi_ep_attr" { r#type = "type", protocol, protocol_version, max_msg_size }
        DomainAttributes = "struct fi_domain_attr" {
            name, threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode, mr_key_size,
        }
        FabricAttributes = "struct fi_fabric_attr" { name, prov_name, prov_version }
        Info = "struct fi_info" {
            next, caps, mode, addr_format, src_addrlen, src_addr, tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr,
        }
        Object = "struct fid" { ops }
        ObjectOperations = "struct fi_ops" { close, bind, control }
        FabricObject = "struct fid_fabric" { fid, ops }
        FabricOperations = "struct fi_ops_fabric" { domain }
        DomainObject = "struct fid_domain" { fid, ops, mr }
        DomainOperations = "struct fi_ops_domain" { av_open, cq_open, endpoint }
        MemoryOperations = "struct fi_ops_mr" { reg, regattr }
        MemoryAttributes = "struct fi_mr_attr" {
            mr_iov, iov_count, access, offset, requested_key, iface, cuda = "device.cuda",
        }
        MemoryObject = "struct fid_mr" { fid, mem_desc, key }
        VectorAttributes = "struct fi_av_attr" { r#type = "type", rx_ctx_bits, count }
        VectorObject = "struct fid_av" { fid, ops }
        VectorOperations = "struct fi_ops_av" { insert }
        QueueAttributes = "struct fi_cq_attr" { size, format, wait_obj }
        QueueObject = "struct fid_cq" { fid, ops }
        QueueOperations = "struct fi_ops_cq" { read, readerr }
        Completion = "struct fi_cq_msg_entry" { op_context, flags, len }
        ErrorCompletion = "struct fi_cq_err_entry" { op_context, flags, err, prov_errno }
        EndpointObject = "struct fid_ep" { fid, ops, cm, msg, rma }
        EndpointOperations = "struct fi_ops_ep" { setopt }
        AddressOperations = "struct fi_ops_cm" { getname }
        MessageOperations = "struct fi_ops_msg" { recv, send }
        RemoteOperations = "struct fi_ops_rma" { read, writemsg }
        Range = "struct iovec" { base = "iov_base", len = "iov_len" }
        RemoteRange = "struct fi_rma_iov" { addr, len, key }
        RemoteMessage = "struct fi_msg_rma" {
            msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, context, data,
        }
    };
    macro_rules! sizes {
        ($($c:literal $compare:tt $structure:ident;)*) => {
            statements.extend([$(format!("sizeof({}) {} {}", $c, stringify!($compare), size_of::<$structure>())),*])
        };
    }
    // The library writes errors of completions, and may append fields.
    sizes! {
        "struct fi_av_attr" == VectorAttributes;
        "struct fi_cq_attr" == QueueAttributes;
        "struct fi_cq_msg_entry" == Completion;
        "struct fi_cq_err_entry" <= ErrorCompletion;
        "struct fi_msg_rma" == RemoteMessage;
        "struct fi_rma_iov" == RemoteRange;
        "struct iovec" == Range;
        "struct fi_mr_attr" <= MemoryAttributes;
    }
    macro_rules! numbers {
        ($($name:ident)*) => { statements.extend([$(format!("{} == {}ull", stringify!($name), $name)),*]) };
    }
    numbers! {
        FI_MSG FI_RMA FI_READ FI_WRITE FI_RECV FI_TRANSMIT FI_REMOTE_READ FI_REMOTE_WRITE FI_DELIVERY_COMPLETE FI_CONTEXT
        FI_CONTEXT2 FI_ORDER_SAW FI_ADDR_UNSPEC FI_EP_RDM FI_AV_MAP FI_AV_TABLE FI_THREAD_DOMAIN FI_RM_ENABLED
        FI_CQ_FORMAT_MSG FI_WAIT_NONE FI_MR_LOCAL FI_MR_VIRT_ADDR FI_MR_ALLOCATED FI_MR_PROV_KEY FI_MR_ENDPOINT FI_ENABLE
        FI_SOCKADDR_IN FI_SOCKADDR_IN6 FI_EAGAIN FI_ENODATA FI_EAVAIL FI_HMEM FI_MR_HMEM
        FI_HMEM_CUDA FI_OPT_ENDPOINT
    }
    // Headers before 1.18 end with the option before it.
    statements.push(format!("FI_OPT_XPU_TRIGGER + 1 == {FI_OPT_CUDA_API_PERMITTED}"));
    statements
}

fn assertions(statements: &[String]) -> String {
    statements.iter().map(|statement| format!("_Static_assert({statement}, \"{statement}\");\n")).collect()
}

fn size_of_pointee<T>(_: *const T) -> usize {
    size_of::<T>()
}

fn fields() -> Vec<String> {
    fields! {
        DeviceContext = "struct ibv_context" { ops }
        ContextOperations = "struct ibv_context_ops" { poll_cq, post_send, post_recv }
        QueuePair = "struct ibv_qp" { qp_num }
        MemoryRegion = "struct ibv_mr" { lkey, rkey }
        DeviceAttributes = "struct ibv_device_attr" {
            max_qp_wr, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap, phys_port_cnt,
        }
        PortAttributes = "struct ibv_port_attr" { state, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer }
        AddressHandleAttributes = "struct ibv_ah_attr" {
            dgid = "grh.dgid", flow_label = "grh.flow_label", sgid_index = "grh.sgid_index",
            hop_limit = "grh.hop_limit", traffic_class = "grh.traffic_class",
            dlid, sl, src_path_bits, static_rate, is_global, port_num,
        }
        QueuePairCapabilities = "struct ibv_qp_cap" {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data,
        }
        QueuePairInitAttributes = "struct ibv_qp_init_attr" {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all,
        }
        QueuePairAttributes = "struct ibv_qp_attr" {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
            ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit,
        }
        ScatterGatherEntry = "struct ibv_sge" { addr, length, lkey }
        SendWorkRequest = "struct ibv_send_wr" {
            wr_id, next, sg_list, num_sge, opcode, send_flags, wr, wr.rdma.remote_addr, wr.rdma.rkey,
            wr.atomic.remote_addr, wr.atomic.compare_add, wr.atomic.swap, wr.atomic.rkey,
        }
        ReceiveWorkRequest = "struct ibv_recv_wr" { wr_id, next, sg_list, num_sge }
        WorkCompletion = "struct ibv_wc" { wr_id, status, opcode, vendor_err, byte_len }
        DvContextAttributes = "struct mlx5dv_context_attr" { flags, comp_mask }
        DevxUmem = "struct mlx5dv_devx_umem" { umem_id }
        DevxUmemIn = "struct mlx5dv_devx_umem_in" { addr, size, access, pgsz_bitmap, comp_mask, dmabuf_fd }
        DevxUar = "struct mlx5dv_devx_uar" { reg_addr, page_id }
        DvProtectionDomain = "struct mlx5dv_pd" { pdn, comp_mask }
        DvAddressHandle = "struct mlx5dv_ah" { av, comp_mask }
        WqeAddressVector = "struct mlx5_wqe_av" { rmac }
        DvObject = "struct mlx5dv_obj" {
            qp, cq, srq, rwq, dm, ah, pd, ah.input = "ah.in", ah.output = "ah.out",
        }
    }
}

/// Lists conditions on sizes of structures that the library reads or writes whole. A structure that only the library
/// writes may be larger than C's (`<=`).
fn sizes() -> Vec<String> {
    macro_rules! sizes {
        ($($c:literal $compare:tt $structure:ident;)*) => {
            vec![$(format!("sizeof({}) {} {}", $c, stringify!($compare), size_of::<$structure>())),*]
        };
    }
    sizes! {
        "struct ibv_device_attr" <= DeviceAttributes;
        "struct ibv_port_attr" <= PortAttributes;
        "struct ibv_ah_attr" == AddressHandleAttributes;
        "struct ibv_qp_cap" == QueuePairCapabilities;
        "struct ibv_qp_init_attr" == QueuePairInitAttributes;
        "struct ibv_qp_attr" == QueuePairAttributes;
        "struct ibv_sge" == ScatterGatherEntry;
        "struct ibv_send_wr" == SendWorkRequest;
        "struct ibv_recv_wr" == ReceiveWorkRequest;
        "struct ibv_wc" == WorkCompletion;
        "struct mlx5dv_context_attr" == DvContextAttributes;
        "struct mlx5dv_devx_umem_in" == DevxUmemIn;
        "struct mlx5dv_pd" == DvProtectionDomain;
        "struct mlx5dv_ah" == DvAddressHandle;
        "struct mlx5dv_obj" == DvObject;
    }
}

/// Lists conditions on constants, which have the names of the headers.
fn numbers() -> Vec<String> {
    macro_rules! numbers {
        ($($name:ident)*) => { vec![$(format!("{} == {}u", stringify!($name), $name)),*] };
    }
    let flags = Access::FLAGS.iter().filter(|flag| flag.value().bits().is_power_of_two() && flag.name() != "RINGS");
    let access = flags.map(|flag| format!("IBV_ACCESS_{} == {}u", flag.name(), flag.value().bits()));
    let numbers = numbers! {
        IBV_PORT_ACTIVE IBV_LINK_LAYER_ETHERNET
        IBV_ATOMIC_NONE
        IBV_QPT_RC IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_ERR
        IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN
        IBV_WR_RDMA_WRITE IBV_WR_SEND IBV_WR_RDMA_READ IBV_WR_ATOMIC_FETCH_AND_ADD
        IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_INLINE
        IBV_WC_SUCCESS IBV_WC_WR_FLUSH_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_RESP_TIMEOUT_ERR
        MLX5DV_OBJ_AH MLX5DV_OBJ_PD MLX5DV_CONTEXT_FLAGS_DEVX MLX5DV_UMEM_MASK_DMABUF
        MLX5DV_UAR_ALLOC_TYPE_BF MLX5DV_UAR_ALLOC_TYPE_NC MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED
    };
    numbers.into_iter().chain(access).collect()
}
