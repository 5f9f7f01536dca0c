// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries, completions and mailbox fields as rdma-core's own headers build and read them.

#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { NOP, WRITE, WRITE_INLINE, READ, FETCH_ADD, DUMP };

struct entry {
	uint32_t kind, index, queue, flags;
	uint64_t remote, local, amount;
	uint32_t rkey, lkey, bytes, pad;
	uint8_t data[28];
};

static uint8_t *remote(uint8_t *at, const struct entry *entry)
{
	struct mlx5_wqe_raddr_seg *segment = (void *)at;

	segment->raddr = htobe64(entry->remote);
	segment->rkey = htobe32(entry->rkey);
	return at + sizeof(*segment);
}

static uint8_t *local(uint8_t *at, const struct entry *entry)
{
	mlx5dv_set_data_seg((void *)at, entry->bytes, entry->lkey, entry->local);
	return at + sizeof(struct mlx5_wqe_data_seg);
}

// Fills a slot of zeros and returns its number of segments.
uint32_t oracle_entry(uint8_t *out, const struct entry *entry)
{
	static const uint8_t opcodes[] = {
		MLX5_OPCODE_NOP, MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_READ,
		MLX5_OPCODE_ATOMIC_FA, 0x23, /* that one is in the kernel's headers only */
	};
	uint8_t *at = out + sizeof(struct mlx5_wqe_ctrl_seg);
	uint32_t segments;

	memset(out, 0, MLX5_SEND_WQE_BB);
	switch (entry->kind) {
	case WRITE:
	case READ:
		at = local(remote(at, entry), entry);
		break;
	case WRITE_INLINE: {
		struct mlx5_wqe_inl_data_seg *segment = (void *)(at = remote(at, entry));

		segment->byte_count = htobe32(entry->bytes | MLX5_INLINE_SEG);
		memcpy(segment + 1, entry->data, entry->bytes);
		at += sizeof(*segment) + entry->bytes;
		break;
	}
	case FETCH_ADD: {
		struct mlx5_wqe_atomic_seg *segment = (void *)(at = remote(at, entry));

		segment->swap_add = htobe64(entry->amount);
		at = local(at + sizeof(*segment), entry);
		break;
	}
	case DUMP:
		at = local(at, entry);
		break;
	}
	segments = (at - out + 15) / 16;
	mlx5dv_set_ctrl_seg((void *)out, entry->index, opcodes[entry->kind], 0, entry->queue, entry->flags, segments, 0,
			    0);
	return segments;
}

struct completion {
	uint32_t opcode, owner, index, operation, queue, bytes, syndrome, vendor;
};

void oracle_write_completion(struct mlx5_cqe64 *out, const struct completion *in)
{
	memset(out, 0, sizeof(*out));
	if (in->opcode == MLX5_CQE_REQ) {
		out->byte_cnt = htobe32(in->bytes);
	} else {
		struct mlx5_err_cqe *error = (void *)out;

		error->syndrome = in->syndrome;
		error->vendor_err_synd = in->vendor;
	}
	out->sop_drop_qpn = htobe32(in->operation << 24 | in->queue);
	out->wqe_counter = htobe16(in->index);
	out->op_own = in->opcode << 4;
	mlx5dv_set_cqe_owner(out, in->owner);
}

void oracle_read_completion(struct mlx5_cqe64 *in, struct completion *out)
{
	const struct mlx5_err_cqe *error = (void *)in;

	memset(out, 0, sizeof(*out));
	out->opcode = mlx5dv_get_cqe_opcode(in);
	out->owner = mlx5dv_get_cqe_owner(in);
	out->index = be16toh(in->wqe_counter);
	out->operation = be32toh(in->sop_drop_qpn) >> 24;
	out->queue = be32toh(in->sop_drop_qpn) & 0xffffff;
	if (out->opcode == MLX5_CQE_REQ) {
		out->bytes = be32toh(in->byte_cnt);
	} else {
		out->syndrome = error->syndrome;
		out->vendor = error->vendor_err_synd;
	}
}

void oracle_set(void *mailbox, uint64_t value, size_t offset, size_t width)
{
	if (width == 64)
		_devx_set64(mailbox, value, offset);
	else
		_devx_set(mailbox, value, offset, width);
}

uint64_t oracle_get(const void *mailbox, size_t offset, size_t width)
{
	return width == 64 ? _devx_get64(mailbox, offset) : _devx_get(mailbox, offset, width);
}

struct constant {
	const char *name;
	uint64_t value;
};

#define NAMED(name) { #name, (uint64_t)(name) }

static const struct constant constants[] = {
	NAMED(MLX5_OPCODE_NOP),
	NAMED(MLX5_OPCODE_RDMA_WRITE),
	NAMED(MLX5_OPCODE_RDMA_READ),
	NAMED(MLX5_OPCODE_ATOMIC_FA),
	NAMED(MLX5_INLINE_SEG),
	NAMED(MLX5_WQE_CTRL_CQ_UPDATE),
	NAMED(MLX5_WQE_CTRL_FENCE),
	NAMED(MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE),
	NAMED(MLX5_SEND_WQE_BB),
	NAMED(MLX5_SND_DBR),
	NAMED(MLX5_RCV_DBR),
	NAMED(MLX5_CQE_REQ),
	NAMED(MLX5_CQE_REQ_ERR),
	NAMED(MLX5_CQE_RESP_ERR),
	NAMED(MLX5_CQE_INVALID),
	NAMED(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR),
	NAMED(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR),
	NAMED(MLX5_CQE_SYNDROME_LOCAL_PROT_ERR),
	NAMED(MLX5_CQE_SYNDROME_WR_FLUSH_ERR),
	NAMED(MLX5_CQE_SYNDROME_MW_BIND_ERR),
	NAMED(MLX5_CQE_SYNDROME_BAD_RESP_ERR),
	NAMED(MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR),
	NAMED(MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR),
	NAMED(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR),
	NAMED(MLX5_CQE_SYNDROME_REMOTE_OP_ERR),
	NAMED(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR),
	NAMED(MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR),
	NAMED(MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR),
	NAMED(IBV_MTU_256),
	NAMED(IBV_MTU_512),
	NAMED(IBV_MTU_1024),
	NAMED(IBV_MTU_2048),
	NAMED(IBV_MTU_4096),
	{ "sizeof(struct mlx5_cqe64)", sizeof(struct mlx5_cqe64) },
	{ "offsetof(struct mlx5_err_cqe, syndrome)", offsetof(struct mlx5_err_cqe, syndrome) },
	{ "offsetof(struct mlx5_cqe64, wqe_counter)", offsetof(struct mlx5_cqe64, wqe_counter) },
	{ "offsetof(struct mlx5_cqe64, op_own)", offsetof(struct mlx5_cqe64, op_own) },
};

const struct constant *oracle_constants(size_t *count)
{
	*count = COUNT(constants);
	return constants;
}
