// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A part of gin_nccl_ep.h, which includes it: communicators by NCCL's names, errors, and tensors.

#pragma once

/// What an `ncclComm_t` of this header points to.
typedef struct ginNcclComm {
    uint64_t magic;
    gin_job_t job;
    gin_comm_t comm;
    uint32_t rank, ranks;
    /// A `gin_device_kind_t`.
    uint32_t device;
    /// 1 if loads and stores reach all ranks.
    uint32_t is_near;
    /// 1 if `ncclCommInitRank` made the job.
    uint32_t owns_job;
    /// The last error.
    char text[GIN_FAULT_TEXT_BYTES];
} ginNcclComm;

#define GIN_NCCL_COMM_MAGIC UINT64_C(0x67696e4e43434c31)

/// Returns the result for a status of gin.
static inline ncclResult_t ginNcclResult(gin_status_t status) {
    switch (status) {
    case GIN_OK: return ncclSuccess;
    case GIN_ERROR_ARGUMENT: return ncclInvalidArgument;
    case GIN_ERROR_HANDLE:
    case GIN_ERROR_STATE:
    case GIN_ERROR_BUSY: return ncclInvalidUsage;
    case GIN_ERROR_ENDED:
    case GIN_ERROR_TIMEOUT:
    case GIN_ERROR_BOOTSTRAP:
    case GIN_ERROR_OTHER_RANK: return ncclRemoteError;
    case GIN_ERROR_DEVICE: return ncclUnhandledCudaError;
    case GIN_ERROR_NO_JOB:
    case GIN_ERROR_NETWORK:
    case GIN_ERROR_MEMORY:
    case GIN_ERROR_FORK: return ncclSystemError;
    default: return ncclInternalError;
    }
}

/// Keeps the text of an error, and returns its result.
static inline ncclResult_t ginNcclFail(ginNcclComm* comm, ncclResult_t result, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(comm->text, sizeof(comm->text), format, arguments);
    va_end(arguments);
    return result;
}

/// Returns the result of a call of gin, and keeps the text of its error.
static inline ncclResult_t ginNcclCall(ginNcclComm* comm, gin_status_t status) {
    if (status == GIN_OK) return ncclSuccess;
    return ginNcclFail(comm, ginNcclResult(status), "%s", gin_last_error());
}

/// Returns the result of `call` from the calling function, if it is an error.
#define GIN_NCCL_TRY(call) \
    do { \
        ncclResult_t gin_nccl_result = (call); \
        if (gin_nccl_result != ncclSuccess) return gin_nccl_result; \
    } while (0)

/// Returns the communicator of gin that an `ncclComm_t` points to; null for a communicator of NCCL.
static inline ginNcclComm* ginNcclOf(ncclComm_t comm) {
    ginNcclComm* of_gin = (ginNcclComm*)(void*)comm;
    return of_gin != NULL && of_gin->magic == GIN_NCCL_COMM_MAGIC ? of_gin : NULL;
}

/// Returns the text of the last error of a communicator's calls; of the calling thread's last call of gin for null.
static inline const char* ginNcclLastError(ncclComm_t comm) {
    ginNcclComm* of_gin = ginNcclOf(comm);
    return of_gin != NULL ? of_gin->text : gin_last_error();
}

/// Makes a communicator of all ranks of a job, which stays the program's. `requirements` is null for the defaults.
/// Collective. `ginNcclCommFree` ends it.
static inline ncclResult_t ginNcclCommInit(ncclComm_t* comm, gin_job_t job, const gin_requirements_t* requirements) {
    gin_requirements_t defaults = GIN_REQUIREMENTS_INIT;
    gin_device_comm_t device;
    gin_status_t status = GIN_OK;
    ginNcclComm* made = (ginNcclComm*)calloc(1, sizeof(ginNcclComm));
    if (comm == NULL || made == NULL) {
        free(made);
        return comm == NULL ? ncclInvalidArgument : ncclSystemError;
    }
    made->magic = GIN_NCCL_COMM_MAGIC;
    made->job = job;
    status = gin_job_rank(job, &made->rank, &made->ranks);
    if (status == GIN_OK) status = gin_job_device(job, &made->device);
    if (status == GIN_OK) status = gin_comm_create(job, requirements != NULL ? requirements : &defaults, &made->comm);
    if (status == GIN_OK) status = gin_comm_device(made->comm, &device);
    if (status != GIN_OK) {
        free(made);
        return ginNcclResult(status);
    }
    made->is_near = device.lsa_size == made->ranks;
    *comm = (ncclComm_t)(void*)made;
    return ncclSuccess;
}

/// Ends the communicator: in an orderly way if `is_orderly`, which is collective, else by an abort. Frees it, also if
/// that fails.
static inline ncclResult_t ginNcclCommEnd(ncclComm_t comm, int is_orderly) {
    ginNcclComm* of_gin = ginNcclOf(comm);
    gin_status_t status = GIN_OK;
    if (of_gin == NULL) return ncclInvalidArgument;
    if (is_orderly) status = gin_comm_destroy(of_gin->comm);
    if (!is_orderly || status != GIN_OK) (void)gin_comm_release(of_gin->comm);
    if (of_gin->owns_job) (void)gin_job_close(of_gin->job);
    of_gin->magic = 0;
    free(of_gin);
    return ginNcclResult(status);
}

/// Ends a communicator of `ginNcclCommInit`. Collective.
static inline ncclResult_t ginNcclCommFree(ncclComm_t comm) { return ginNcclCommEnd(comm, 1); }

/// Returns a stream of gin as the argument of a call, on virtual GPUs.
static inline cudaStream_t ginNcclStream(gin_stream_t stream) { return (cudaStream_t)(void*)(uintptr_t)stream.id; }

#ifndef NCCL_MAJOR
/// Makes the name of a job, on rank 0, which then joins first.
static inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    gin_config_t config = GIN_CONFIG_INIT;
    return id == NULL ? ncclInvalidArgument
                      : ginNcclResult(gin_unique_id_create(&config, (gin_unique_id_t*)(void*)id->internal));
}

/// Joins the job as one rank, and makes a communicator. Collective. The GPU is the current device of CUDA's runtime, if
/// its header was included, else it follows from the rank's place on its host.
static inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    gin_config_t config = GIN_CONFIG_INIT;
    gin_unique_id_t name;
    gin_job_t job;
    if (comm == NULL || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
#ifdef CUDART_VERSION
    {
        int gpu = -1;
        if (cudaGetDevice(&gpu) == cudaSuccess) config.gpu = gpu;
    }
#endif
    memcpy(name.text, id.internal, sizeof(name.text));
    GIN_NCCL_TRY(ginNcclResult(gin_job_join(&config, &name, (uint32_t)rank, (uint32_t)ranks, &job)));
    ncclResult_t result = ginNcclCommInit(comm, job, NULL);
    if (result != ncclSuccess) (void)gin_job_close(job);
    if (result == ncclSuccess) ginNcclOf(*comm)->owns_job = 1;
    return result;
}

/// Ends the communicator. Collective.
static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ginNcclCommEnd(comm, 1); }
/// Ends every wait of the communicator, on all ranks, and frees it. Not collective.
static inline ncclResult_t ncclCommAbort(ncclComm_t comm) { return ginNcclCommEnd(comm, 0); }

static inline ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    ginNcclComm* of_gin = ginNcclOf(comm);
    if (of_gin == NULL || count == NULL) return ncclInvalidArgument;
    *count = (int)of_gin->ranks;
    return ncclSuccess;
}

static inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    ginNcclComm* of_gin = ginNcclOf(comm);
    if (of_gin == NULL || rank == NULL) return ncclInvalidArgument;
    *rank = (int)of_gin->rank;
    return ncclSuccess;
}

static inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "the device reports an error";
    case ncclSystemError: return "the system or the network reports an error";
    case ncclInvalidArgument: return "an argument is invalid";
    case ncclInvalidUsage: return "the call is not possible now, or not supported";
    case ncclRemoteError: return "another rank failed, or did not answer in time";
    default: return "internal error";
    }
}

static inline const char* ncclGetLastError(const ncclComm_t comm) { return ginNcclLastError(comm); }
#endif

/// Copies a struct of the program, which may be of an older or a newer version, and checks its first two fields.
static inline ncclResult_t ginNcclTake(ginNcclComm* comm, const char* what, const void* from, size_t least, void* to,
                                       size_t bytes, unsigned int magic) {
    unsigned int head[2] = {0, 0};
    memset(to, 0, bytes);
    if (from == NULL) return ncclSuccess;
    memcpy(head, from, sizeof(head));
    if (head[1] != magic || head[0] < least)
        return ginNcclFail(comm, ncclInvalidArgument,
                           "%s has size %u and magic 0x%x: initialise it by its macro NCCL_EP_..._INIT", what, head[0],
                           head[1]);
    memcpy(to, from, head[0] < bytes ? head[0] : bytes);
    return ncclSuccess;
}

/// Returns the bytes of an element; 0 for an unknown type.
static inline size_t ginNcclBytes(ncclDataType_t type) {
    switch ((int)type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
    case 12: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
    }
}

/// The shape that a tensor must have: `GIN_NCCL_ANY` is any length, and `type` -1 any type of `width` bytes; `width` 0
/// is any width.
#define GIN_NCCL_ANY SIZE_MAX
typedef struct ginNcclShape {
    int type;
    size_t width;
    unsigned int dimensions;
    size_t lengths[3];
} ginNcclShape;

static inline ginNcclShape ginNcclShapeOf(int type, unsigned int dimensions, size_t first, size_t second,
                                          size_t third) {
    ginNcclShape shape = {0, 0, 0, {0, 0, 0}};
    shape.type = type, shape.dimensions = dimensions;
    shape.lengths[0] = first, shape.lengths[1] = second, shape.lengths[2] = third;
    return shape;
}

/// Checks a tensor, and writes its memory. A null tensor is no memory, and an error if `is_required`.
static inline ncclResult_t ginNcclTensor(ginNcclComm* comm, const char* what, const ncclEpTensor_t* tensor,
                                         int is_required, ginNcclShape shape, gin_memory_t* memory) {
    gin_memory_t none = GIN_MEMORY_NULL;
    size_t bytes = 0;
    *memory = none;
    if (tensor == NULL)
        return is_required ? ginNcclFail(comm, ncclInvalidArgument, "%s is null: pass a tensor", what) : ncclSuccess;
    if (tensor->magic != NCCL_EP_TENSOR_MAGIC || tensor->size < NCCL_EP_TENSOR_V1_SIZE)
        return ginNcclFail(comm, ncclInvalidArgument, "%s is not initialised: use NCCL_EP_TENSOR_INIT", what);
    if (tensor->win_hdl != (ncclWindow_t)0)
        return ginNcclFail(comm, ncclInvalidUsage, "%s is in a window, which gin does not take: set `data`", what);
    if (tensor->ndim != shape.dimensions || tensor->sizes == NULL)
        return ginNcclFail(comm, ncclInvalidArgument, "%s has %u dimensions; %u are needed", what, tensor->ndim,
                           shape.dimensions);
    bytes = ginNcclBytes(tensor->datatype);
    if (bytes == 0 || (shape.type >= 0 && (int)tensor->datatype != shape.type) ||
        (shape.width != 0 && bytes != shape.width))
        return ginNcclFail(comm, ncclInvalidArgument, "%s has data type %d, which it cannot have here", what,
                           (int)tensor->datatype);
    for (unsigned int i = 0; i < shape.dimensions; i++) {
        if (shape.lengths[i] != GIN_NCCL_ANY && tensor->sizes[i] != shape.lengths[i])
            return ginNcclFail(comm, ncclInvalidArgument, "dimension %u of %s is %zu; %zu is needed", i, what,
                               tensor->sizes[i], shape.lengths[i]);
        bytes *= tensor->sizes[i];
    }
    if (tensor->data == NULL && bytes != 0)
        return ginNcclFail(comm, ncclInvalidArgument, "%s has no memory: set `data`", what);
    memory->data = tensor->data;
    memory->bytes = bytes;
    return ncclSuccess;
}
