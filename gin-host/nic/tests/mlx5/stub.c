// SPDX-License-Identifier: MIT OR Apache-2.0
// Stands in for libibverbs and libmlx5 at once: a NIC that does nothing, but counts its objects and fails on demand.

#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

enum mode {
	WORKS,
	NO_KERNEL,
	NO_DEVICE,
	OTHER_DEVICE,
	NO_PERMISSION,
	NO_DEVX,
	PORT_DOWN,
	REFUSES,      /* the firmware refuses to make queues */
	NO_DMA_BUF,
	NO_DEDICATED, /* doorbell pages of the newest kind are not known */
};

static int mode;
static int objects;
static uint32_t last_access, last_uar;
static struct ibv_device device;
static struct ibv_device *list[2] = { &device, NULL };
static struct ibv_context context;
static struct mlx5_wqe_av vector = { .rmac = { 2, 4, 6, 8, 10, 12 } };

void stub_mode(int new_mode) { mode = new_mode; }
int stub_objects(void) { return objects; }
uint32_t stub_access(void) { return last_access; }
uint32_t stub_uar(void) { return last_uar; }

static void *make(size_t size)
{
	objects++;
	return calloc(1, size);
}

static int end(void *object)
{
	objects--;
	free(object);
	return 0;
}

static void *fail(int error)
{
	errno = error;
	return NULL;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	if (mode == NO_KERNEL)
		return fail(ENOSYS);
	*count = mode != NO_DEVICE;
	return list;
}

void ibv_free_device_list(struct ibv_device **devices) {}
const char *ibv_get_device_name(struct ibv_device *it) { return mode == OTHER_DEVICE ? "rxe0" : "mlx5_0"; }
bool mlx5dv_is_supported(struct ibv_device *it) { return mode != OTHER_DEVICE; }

// gin-verbs looks these up; gin-nic does not call them.
struct ibv_context *ibv_open_device(struct ibv_device *it) { return fail(ENOSYS); }
int ibv_query_device(struct ibv_context *it, struct ibv_device_attr *out) { return ENOSYS; }
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) { return fail(ENOSYS); }
struct ibv_cq *ibv_create_cq(struct ibv_context *it, int entries, void *user, struct ibv_comp_channel *channel,
			     int vector_number)
{
	return fail(ENOSYS);
}
int ibv_destroy_cq(struct ibv_cq *cq) { return ENOSYS; }
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes) { return fail(ENOSYS); }
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask) { return ENOSYS; }
int ibv_destroy_qp(struct ibv_qp *qp) { return ENOSYS; }

struct ibv_context *mlx5dv_open_device(struct ibv_device *it, struct mlx5dv_context_attr *attributes)
{
	if (mode == NO_PERMISSION)
		return fail(EACCES);
	if (mode == NO_DEVX || attributes->flags != MLX5DV_CONTEXT_FLAGS_DEVX || attributes->comp_mask)
		return fail(EOPNOTSUPP);
	objects++;
	return &context;
}

int ibv_close_device(struct ibv_context *it)
{
	objects--;
	return it == &context ? 0 : EINVAL;
}

int ibv_query_port(struct ibv_context *it, uint8_t port, struct _compat_ibv_port_attr *out)
{
	struct ibv_port_attr *attributes = (void *)out;

	attributes->state = mode == PORT_DOWN ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
	attributes->active_mtu = IBV_MTU_2048;
	attributes->gid_tbl_len = 2;
	attributes->lid = 0;
	attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
	return port == 1 ? 0 : EINVAL;
}

int ibv_query_gid(struct ibv_context *it, uint8_t port, int index, union ibv_gid *gid)
{
	memset(gid, index, sizeof(*gid));
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *it) { return make(sizeof(struct ibv_pd)); }
int ibv_dealloc_pd(struct ibv_pd *pd) { return objects == 2 ? end(pd) : EBUSY; }

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
	struct ibv_mr *region = make(sizeof(*region));

	last_access = access;
	region->lkey = 0x1100 + (uint32_t)iova;
	region->rkey = 0x2200 + (uint32_t)length;
	return region;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	struct ibv_mr *region;

	if (mode == NO_DMA_BUF)
		return fail(EOPNOTSUPP);
	region = make(sizeof(*region));
	region->lkey = (uint32_t)offset;
	region->rkey = fd;
	return region;
}

int ibv_dereg_mr(struct ibv_mr *region) { return end(region); }

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attributes)
{
	if (!attributes->is_global || attributes->port_num != 1 || !attributes->grh.hop_limit)
		return fail(EINVAL);
	if (attributes->grh.dgid.raw[0] == 0xee)
		return fail(EHOSTUNREACH);
	return make(sizeof(struct ibv_ah));
}

int ibv_destroy_ah(struct ibv_ah *address) { return end(address); }

int mlx5dv_init_obj(struct mlx5dv_obj *object, uint64_t type)
{
	if (type == MLX5DV_OBJ_PD)
		object->pd.out->pdn = 0x55;
	else if (type == MLX5DV_OBJ_AH)
		object->ah.out->av = &vector;
	else
		return EINVAL;
	return 0;
}

// Bits of capabilities, from the beginning of their table; their answer has 16 bytes before it.
static void capability(void *out, size_t bit, size_t width, uint32_t value) { _devx_set(out, value, 128 + bit, width); }

int mlx5dv_devx_general_cmd(struct ibv_context *it, const void *in, size_t inlen, void *out, size_t outlen)
{
	uint32_t opcode = _devx_get(in, 0, 16), variant = _devx_get(in, 48, 16);

	if (opcode == 0x100 && outlen == 4112) {
		if (variant == 1) {
			capability(out, 136, 8, 15);  /* log_max_qp_sz */
			capability(out, 200, 8, 22);  /* log_max_cq_sz */
			capability(out, 330, 6, 4);   /* log_max_ra_req_qp */
			capability(out, 346, 6, 4);   /* log_max_ra_res_qp */
			capability(out, 438, 2, 1);   /* port_type */
			capability(out, 440, 8, 1);   /* num_ports */
			capability(out, 451, 5, 30);  /* log_max_msg */
			capability(out, 542, 1, 1);   /* atomic */
			capability(out, 544, 1, 1);   /* cq_oi */
			capability(out, 556, 1, 1);   /* cd */
			capability(out, 575, 1, 1);   /* rc */
		} else if (variant == 7) {
			capability(out, 64, 2, 1);    /* atomic_req_8B_endianness_mode */
			capability(out, 144, 16, 2);  /* atomic_operations */
			capability(out, 176, 16, 8);  /* atomic_size_qp */
		} else if (variant == 9) {
			capability(out, 152, 8, 4);   /* roce_version */
			capability(out, 192, 16, 0xffff);
			capability(out, 208, 16, 0xc000);
		}
		return 0;
	}
	if (opcode == 0x760 && outlen == 48) {
		uint32_t index = _devx_get(in, 64, 16);

		memset((uint8_t *)out + 16, 0xab, 16);
		capability(out, 216, 8, index == 1 ? 2 : 0); /* roce_version of that entry */
		return 0;
	}
	return EINVAL;
}

struct mlx5dv_devx_obj *mlx5dv_devx_obj_create(struct ibv_context *it, const void *in, size_t inlen, void *out,
					       size_t outlen)
{
	static uint32_t number = 0x100;

	if (mode == REFUSES) {
		_devx_set(out, 0x3, 0, 8);
		_devx_set(out, 0xabcdef, 32, 32);
		return fail(EREMOTEIO);
	}
	if (inlen != 272)
		return fail(EINVAL);
	_devx_set(out, ++number, 72, 24);
	return make(64);
}

int mlx5dv_devx_obj_modify(struct mlx5dv_devx_obj *object, const void *in, size_t inlen, void *out, size_t outlen)
{
	return inlen == 272 || inlen == 16 ? 0 : EINVAL;
}

int mlx5dv_devx_obj_query(struct mlx5dv_devx_obj *object, const void *in, size_t inlen, void *out, size_t outlen)
{
	_devx_set(out, 3, 192, 4); /* state: ready to send */
	return 0;
}

int mlx5dv_devx_obj_destroy(struct mlx5dv_devx_obj *object) { return end(object); }

struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg(struct ibv_context *it, void *address, size_t size, uint32_t access)
{
	struct mlx5dv_devx_umem *umem = make(sizeof(*umem));

	last_access = access;
	umem->umem_id = 0x77;
	return umem;
}

struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg_ex(struct ibv_context *it, struct mlx5dv_devx_umem_in *in)
{
	struct mlx5dv_devx_umem *umem;

	if (mode == NO_DMA_BUF)
		return fail(EOPNOTSUPP);
	if (in->comp_mask != MLX5DV_UMEM_MASK_DMABUF || in->pgsz_bitmap & (in->pgsz_bitmap - 1))
		return fail(EINVAL);
	umem = make(sizeof(*umem));
	umem->umem_id = in->dmabuf_fd;
	return umem;
}

int mlx5dv_devx_umem_dereg(struct mlx5dv_devx_umem *umem) { return end(umem); }

struct mlx5dv_devx_uar *mlx5dv_devx_alloc_uar(struct ibv_context *it, uint32_t flags)
{
	struct mlx5dv_devx_uar *uar;

	if (mode == NO_DEDICATED && flags >> 31)
		return fail(EOPNOTSUPP);
	last_uar = flags;
	uar = make(sizeof(*uar));
	uar->page_id = 0x33;
	uar->reg_addr = uar;
	return uar;
}

void mlx5dv_devx_free_uar(struct mlx5dv_devx_uar *uar) { end(uar); }

int mlx5dv_devx_query_eqn(struct ibv_context *it, uint32_t vector_number, uint32_t *eqn)
{
	*eqn = 9;
	return vector_number ? EINVAL : 0;
}
