// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A libfabric for tests: providers whose endpoints are all in this process. `offers.c` has their properties. Each keeps
// no more than its manual promises (fi_efa(7), fi_cxi(7), fi_opx(7)); `cxi` closes endpoints as its source does.
// `strange` keeps no more than fi_endpoint(3) and fi_mr(3) promise anyone.
//
// Writes and reads happen late, in pieces, in any order; completions come in any order; posting fails with FI_EAGAIN
// now and then; keys are invalid once their memory is closed. A caller's mistake that a real provider need not notice
// ends the process with a message.

#include "objects.h"

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of libfabric 1.18; older headers lack it.
enum { CUDA_API_PERMITTED = FI_OPT_XPU_TRIGGER + 1 };
enum { PIECES = 4 };

// Everything below is shared by the threads of the process.
static pthread_mutex_t everything = PTHREAD_MUTEX_INITIALIZER;
static struct endpoint *endpoints;
static struct region *regions;
static uint64_t last_address, state = 0x9e3779b97f4a7c15;

static uint64_t any(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 11;
}

static int one_in(uint64_t n) { return any() % n == 0; }

void mistake(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("libfabric double: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    abort();
}

void *room(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) mistake("no memory");
    return memory;
}

// Each call of the interface: one thread at a time uses a domain (FI_THREAD_DOMAIN).
static void enter(struct domain *domain) {
    if (atomic_exchange(&domain->busy, 1)) mistake("two threads use one domain at once");
    pthread_mutex_lock(&everything);
}

static void leave(struct domain *domain) {
    pthread_mutex_unlock(&everything);
    atomic_store(&domain->busy, 0);
}

static void close_object(struct domain *domain, void *object) {
    domain->objects--;
    leave(domain);
    free(object);
}

// Completions.

static void push(struct queue *queue, struct entry entry) {
    if (queue->count == queue->taken) mistake("a completion without an operation");
    queue->entries[queue->count++] = entry;
}

static struct entry pop(struct queue *queue, size_t index) {
    struct entry entry = queue->entries[index];
    queue->entries[index] = queue->entries[--queue->count];
    queue->taken--;
    return entry;
}

// Marks the caller's structure, or checks that nobody has changed it.
static void mark(const struct kind *kind, void *context, int check) {
    if (!(kind->mode & FI_CONTEXT2)) return;
    struct fi_context2 *memory = context;
    for (size_t i = 0; i < 8; i++) {
        void *value = (char *)context + 0x5a5a + i;
        if (check && memory->internal[i] != value) mistake("an operation's context was changed");
        memory->internal[i] = value;
    }
}

static void ended(struct endpoint *endpoint, size_t index, int error) {
    struct operation *operation = &endpoint->operations[index];
    static const uint64_t flags[] = {FI_RMA | FI_WRITE, FI_RMA | FI_READ, FI_MSG | FI_SEND};
    if (!operation->silent) {
        mark(endpoint->domain->kind, operation->context, 1);
        push(endpoint->queue, (struct entry){operation->context, flags[operation->kind], 0, error});
    }
    if (operation->descriptor) operation->descriptor->used--;
    memmove(operation, operation + 1, (--endpoint->count - index) * sizeof *operation);
}

// Operations.

static struct endpoint *at(uint64_t address) {
    struct endpoint *endpoint = endpoints;
    while (endpoint && endpoint->address != address) endpoint = endpoint->next;
    return endpoint;
}

// Returns where an operation's remote range is, and its region, or NULL and an error.
static char *remote(const struct operation *operation, struct region **found, int *error) {
    struct endpoint *peer = at(operation->peer);
    uint64_t access = operation->kind == WRITE ? FI_REMOTE_WRITE : FI_REMOTE_READ;
    *error = FI_EHOSTUNREACH;
    if (!peer) return NULL;
    *error = FI_EACCES;
    const struct kind *kind = peer->domain->kind;
    for (struct region *region = regions; region; region = region->next) {
        int reached = kind->mr_mode & FI_MR_ENDPOINT ? region->endpoint == peer && region->enabled
                                                     : region->domain == peer->domain;
        if (!reached || region->fid.key != operation->key || !(region->access & access)) continue;
        uint64_t offset = operation->remote - (kind->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)region->base : 0);
        if (offset > region->length || operation->length > region->length - offset) return NULL;
        *found = region;
        return region->base + offset;
    }
    return NULL;
}

// The GPU's memory has all that the NIC of this domain has written.
static void arrive(struct domain *domain) {
    for (struct delayed *next, *delayed = domain->delayed; delayed; delayed = next) {
        next = delayed->next;
        memcpy(delayed->to, delayed->bytes, delayed->length);
        free(delayed);
    }
    domain->delayed = NULL;
}

// A NIC writes: to a GPU later, and behind what it has written there before.
static void store(struct region *region, char *to, const char *from, size_t length) {
    if (!region || !region->in_gpu) {
        memcpy(to, from, length);
        return;
    }
    struct delayed *delayed = room(sizeof *delayed + length), **end = &region->domain->delayed;
    delayed->to = to, delayed->length = length;
    memcpy(delayed->bytes, from, length);
    while (*end) end = &(*end)->next;
    *end = delayed;
}

// Copies one more piece of a range. Returns whether all have been copied.
static int copy_piece(struct operation *operation, char *other, struct region *region) {
    unsigned piece = any() % PIECES;
    while (operation->done >> piece & 1) piece = (piece + 1) % PIECES;
    size_t first = operation->length * piece / PIECES, end = operation->length * (piece + 1) / PIECES;
    char *local = operation->local + first;
    // A read does not overtake writes to the same GPU.
    struct region *read = operation->kind == WRITE ? operation->descriptor : region;
    if (read && read->in_gpu) arrive(read->domain);
    if (operation->kind == WRITE) store(region, other + first, local, end - first);
    else store(operation->descriptor, local, other + first, end - first);
    operation->done |= 1u << piece;
    return operation->done == (1u << PIECES) - 1;
}

static void deliver(struct endpoint *endpoint, size_t index) {
    if (endpoint->domain->kind->ordered_sends) {
        for (size_t i = 0; i < index; i++) {
            struct operation *earlier = &endpoint->operations[i];
            if (earlier->kind == SEND && earlier->peer == endpoint->operations[index].peer) index = i;
        }
    }
    struct operation *operation = &endpoint->operations[index];
    struct endpoint *peer = at(operation->peer);
    if (!peer) {
        ended(endpoint, index, FI_EHOSTUNREACH);
        return;
    }
    if (!peer->waiting) return; // until a buffer is posted
    struct receive receive = peer->receives[0];
    memmove(peer->receives, peer->receives + 1, --peer->waiting * sizeof receive);
    int error = operation->length > receive.length ? FI_ETRUNC : 0;
    if (!error) memcpy(receive.buffer, operation->local, operation->length);
    if (receive.descriptor) receive.descriptor->used--;
    mark(peer->domain->kind, receive.context, 1);
    push(peer->queue, (struct entry){receive.context, FI_MSG | FI_RECV, operation->length, error});
    ended(endpoint, index, 0);
}

static void progress(struct endpoint *endpoint) {
    for (uint64_t steps = any() % 16; steps && endpoint->count; steps--) {
        size_t index = any() % endpoint->count;
        struct operation *operation = &endpoint->operations[index];
        if (operation->kind == SEND) {
            deliver(endpoint, index);
            continue;
        }
        int error;
        struct region *region;
        char *other = remote(operation, &region, &error);
        if (!other) ended(endpoint, index, error);
        else if (copy_piece(operation, other, region)) ended(endpoint, index, 0);
    }
}

// Checks the descriptor of a range of the caller's.
static struct region *local(struct endpoint *endpoint, const void *buffer, size_t length, void *descriptor,
                            uint64_t access) {
    struct region *region = regions;
    if (!(endpoint->domain->kind->mr_mode & FI_MR_LOCAL) && !descriptor) {
        for (; region; region = region->next)
            if (region->in_gpu && (const char *)buffer < region->base + region->length &&
                (const char *)buffer + length > region->base)
                mistake("memory of a GPU has no descriptor, so the CPU would touch it");
        return NULL;
    }
    while (region && region != descriptor) region = region->next;
    if (!region) mistake("a buffer has no descriptor (FI_MR_LOCAL)");
    if ((const char *)buffer < region->base || (const char *)buffer + length > region->base + region->length)
        mistake("a buffer is outside of the memory that its descriptor stands for");
    if ((region->access & access) != access) mistake("memory is registered without the access that is used");
    if (!region->enabled) mistake("memory is used before it is enabled (FI_MR_ENDPOINT)");
    region->used++;
    return region;
}

static uint64_t number(const struct kind *kind, size_t index) {
    return kind->table ? index : 0x7f0000001000 + 0x140 * index;
}

static ssize_t post(struct endpoint *endpoint, struct operation operation, void *descriptor, int delivery) {
    static const uint64_t access[] = {FI_WRITE, FI_READ, FI_SEND};
    const struct kind *kind = endpoint->domain->kind;
    enter(endpoint->domain);
    if (!endpoint->enabled) mistake("an operation is posted before the endpoint is enabled");
    ssize_t result = -FI_EAGAIN;
    if (operation.length > kind->max_message) {
        result = -FI_EMSGSIZE;
    } else if (endpoint->count < kind->operations && endpoint->queue->taken < endpoint->queue->size && !one_in(16)) {
        size_t index = 0;
        while (index < endpoint->vector->count && number(kind, index) != operation.peer) index++;
        if (index == endpoint->vector->count) mistake("no peer has the address %#lx", operation.peer);
        operation.peer = endpoint->vector->addresses[index];
        operation.descriptor = local(endpoint, operation.local, operation.length, descriptor, access[operation.kind]);
        mark(kind, operation.context, 0);
        endpoint->queue->taken++;
        endpoint->operations[endpoint->count++] = operation;
        if (operation.kind == WRITE && !delivery) {
            // Complete, but not arrived.
            push(endpoint->queue, (struct entry){operation.context, FI_RMA | FI_WRITE, 0, 0});
            endpoint->operations[endpoint->count - 1].silent = 1;
        }
        result = 0;
    }
    leave(endpoint->domain);
    return result;
}

static ssize_t ep_read(struct fid_ep *fid, void *buffer, size_t length, void *descriptor, fi_addr_t peer,
                       uint64_t address, uint64_t key, void *context) {
    struct operation operation = {READ, context, buffer, length, NULL, peer, address, key, 0, 0};
    return post((struct endpoint *)fid, operation, descriptor, 1);
}

static ssize_t ep_writemsg(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
    if (message->iov_count != 1 || message->rma_iov_count != 1) mistake("a write of several ranges");
    const struct iovec *from = message->msg_iov;
    const struct fi_rma_iov *to = message->rma_iov;
    if (from->iov_len != to->len) mistake("a write has ranges of %zu and %zu bytes", from->iov_len, to->len);
    struct operation operation = {WRITE,    message->context, from->iov_base, from->iov_len, NULL, message->addr,
                                  to->addr, to->key,          0,              0};
    return post((struct endpoint *)fid, operation, message->desc ? message->desc[0] : NULL,
                (flags & FI_DELIVERY_COMPLETE) != 0);
}

static ssize_t ep_send(struct fid_ep *fid, const void *buffer, size_t length, void *descriptor, fi_addr_t peer,
                       void *context) {
    struct operation operation = {SEND, context, (char *)buffer, length, NULL, peer, 0, 0, 0, 0};
    return post((struct endpoint *)fid, operation, descriptor, 1);
}

static ssize_t ep_recv(struct fid_ep *fid, void *buffer, size_t length, void *descriptor, fi_addr_t peer,
                       void *context) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    const struct kind *kind = endpoint->domain->kind;
    if (peer != FI_ADDR_UNSPEC) mistake("a receive from one peer, without FI_DIRECTED_RECV");
    enter(endpoint->domain);
    if (!endpoint->enabled) mistake("a receive is posted before the endpoint is enabled");
    ssize_t result = -FI_EAGAIN;
    if (endpoint->waiting < kind->receives && endpoint->queue->taken < endpoint->queue->size && !one_in(16)) {
        struct region *region = local(endpoint, buffer, length, descriptor, FI_RECV);
        mark(kind, context, 0);
        endpoint->queue->taken++;
        endpoint->receives[endpoint->waiting++] = (struct receive){context, buffer, length, region};
        result = 0;
    }
    leave(endpoint->domain);
    return result;
}

static ssize_t cq_read(struct fid_cq *fid, void *buffer, size_t count) {
    struct queue *queue = (struct queue *)fid;
    struct fi_cq_msg_entry *out = buffer;
    enter(queue->domain);
    for (struct endpoint *endpoint = endpoints; endpoint; endpoint = endpoint->next)
        if (endpoint->queue == queue && endpoint->enabled) progress(endpoint);
    ssize_t result = -FI_EAGAIN;
    if (!one_in(5)) {
        size_t made = 0, failed = 0;
        for (size_t i = 0; i < queue->count; i++) failed += queue->entries[i].error != 0;
        while (made < count && queue->count > failed && (made == 0 || !one_in(4))) {
            size_t index = any() % queue->count;
            while (queue->entries[index].error) index = (index + 1) % queue->count;
            struct entry entry = pop(queue, index);
            out[made++] = (struct fi_cq_msg_entry){entry.context, entry.flags, entry.length};
        }
        if (made) result = (ssize_t)made;
        else if (failed) result = -FI_EAVAIL;
    }
    leave(queue->domain);
    return result;
}

static ssize_t cq_readerr(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags) {
    struct queue *queue = (struct queue *)fid;
    (void)flags;
    enter(queue->domain);
    ssize_t result = -FI_EAGAIN;
    for (size_t i = 0; i < queue->count && result < 0; i++) {
        if (!queue->entries[i].error) continue;
        struct entry entry = pop(queue, i);
        memset(out, 0, sizeof *out);
        out->op_context = entry.context;
        out->flags = entry.flags;
        out->err = entry.error;
        result = 1;
    }
    leave(queue->domain);
    return result;
}

// Objects.

static int mr_close(struct fid *fid) {
    struct region *region = (struct region *)fid;
    struct domain *domain = region->domain;
    enter(domain);
    if (region->used) mistake("memory is closed while %d operations use it", region->used);
    if (region->endpoint) region->endpoint->regions--;
    if (region->in_gpu) arrive(domain);
    struct region **place = &regions;
    while (*place != region) place = &(*place)->next;
    *place = region->next;
    close_object(domain, region);
    return 0;
}

static int mr_bind(struct fid *fid, struct fid *other, uint64_t flags) {
    struct region *region = (struct region *)fid;
    (void)flags;
    enter(region->domain);
    if (region->endpoint) mistake("memory is bound twice");
    region->endpoint = (struct endpoint *)other;
    if (!region->endpoint->enabled) mistake("memory is bound to an endpoint that is not enabled");
    region->endpoint->regions++;
    leave(region->domain);
    return 0;
}

static int mr_control(struct fid *fid, int command, void *argument) {
    struct region *region = (struct region *)fid;
    (void)argument;
    enter(region->domain);
    if (command != FI_ENABLE || !region->endpoint) mistake("memory is enabled before it is bound (FI_MR_ENDPOINT)");
    region->enabled = 1;
    leave(region->domain);
    return 0;
}

static struct fi_ops mr_ops = {.size = sizeof mr_ops, .close = mr_close, .bind = mr_bind, .control = mr_control};

static int mr_regattr(struct fid *fid, const struct fi_mr_attr *attributes, uint64_t flags, struct fid_mr **made) {
    struct domain *domain = (struct domain *)fid;
    const struct kind *kind = domain->kind;
    uint64_t mask = kind->key_bytes == 8 ? UINT64_MAX : (1ull << 8 * kind->key_bytes) - 1;
    uint64_t asked = attributes->requested_key, access = attributes->access;
    int in_gpu = attributes->iface == FI_HMEM_CUDA, is_window = (access & (FI_REMOTE_READ | FI_REMOTE_WRITE)) != 0;
    (void)flags;
    enter(domain);
    if (attributes->offset) mistake("memory is registered with an offset");
    if (attributes->iov_count != 1) mistake("memory of %zu ranges is registered", attributes->iov_count);
    if (in_gpu && !domain->reaches_gpus) mistake("memory of a GPU is registered without FI_HMEM");
    int result = asked & ~mask ? -FI_EKEYREJECTED : 0;
    if (domain->reaches_gpus && (in_gpu != is_window || (in_gpu && attributes->device.cuda != 0))) result = -FI_EFAULT;
    for (struct region *other = regions; other && !(kind->mr_mode & FI_MR_PROV_KEY); other = other->next)
        if (other->domain == domain && other->fid.key == asked) result = -FI_ENOKEY;
    if (!result) {
        struct region *region = room(sizeof *region);
        region->fid.fid = (struct fid){FI_CLASS_MR, attributes->context, &mr_ops};
        region->fid.mem_desc = region;
        region->fid.key = kind->mr_mode & FI_MR_PROV_KEY ? (any() << 40 ^ any() << 20 ^ any()) & mask : asked;
        region->domain = domain;
        region->base = attributes->mr_iov->iov_base;
        region->length = attributes->mr_iov->iov_len;
        region->access = access;
        region->in_gpu = in_gpu;
        region->enabled = !(kind->mr_mode & FI_MR_ENDPOINT);
        region->next = regions;
        regions = region;
        domain->objects++;
        *made = &region->fid;
    }
    leave(domain);
    return result;
}

static int mr_reg(struct fid *fid, const void *buffer, size_t length, uint64_t access, uint64_t offset,
                  uint64_t asked, uint64_t flags, struct fid_mr **made, void *context) {
    struct iovec range = {(void *)buffer, length};
    struct fi_mr_attr attributes = {
        .mr_iov = &range, .iov_count = 1, .access = access, .offset = offset, .requested_key = asked, .context = context};
    return mr_regattr(fid, &attributes, flags, made);
}

static int ep_close(struct fid *fid) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    struct domain *domain = endpoint->domain;
    enter(domain);
    if (endpoint->regions) {
        leave(domain);
        return -FI_EBUSY;
    }
    // Operations that are not complete end without a completion, and touch no memory any more.
    while (endpoint->count) {
        struct operation *operation = &endpoint->operations[--endpoint->count];
        if (operation->descriptor) operation->descriptor->used--;
        if (!operation->silent) endpoint->queue->taken--;
    }
    while (endpoint->waiting) {
        struct receive *receive = &endpoint->receives[--endpoint->waiting];
        if (receive->descriptor) receive->descriptor->used--;
        endpoint->queue->taken--;
    }
    struct endpoint **place = &endpoints;
    while (*place != endpoint) place = &(*place)->next;
    *place = endpoint->next;
    free(endpoint->operations);
    free(endpoint->receives);
    close_object(domain, endpoint);
    return 0;
}

static int ep_bind(struct fid *fid, struct fid *other, uint64_t flags) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    enter(endpoint->domain);
    if (other->fclass == FI_CLASS_AV) endpoint->vector = (struct vector *)other;
    else if (other->fclass == FI_CLASS_CQ && flags == (FI_TRANSMIT | FI_RECV)) endpoint->queue = (struct queue *)other;
    else mistake("an endpoint is bound to an object of class %zu with flags %#lx", other->fclass, flags);
    leave(endpoint->domain);
    return 0;
}

static int ep_control(struct fid *fid, int command, void *argument) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    (void)argument;
    enter(endpoint->domain);
    if (command != FI_ENABLE || !endpoint->queue || !endpoint->vector) mistake("an endpoint lacks its queue or vector");
    if (endpoint->domain->reaches_gpus && !endpoint->forbids_cuda) mistake("an endpoint may call CUDA");
    endpoint->enabled = 1;
    leave(endpoint->domain);
    return 0;
}

static int ep_setopt(struct fid *fid, int level, int option, const void *value, size_t bytes) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (level != FI_OPT_ENDPOINT || option != CUDA_API_PERMITTED) return -FI_ENOPROTOOPT;
    if (bytes != 1 || *(const char *)value != 0) mistake("calls of CUDA are permitted");
    if (endpoint->enabled) mistake("an option is set after the endpoint is enabled");
    switch (endpoint->domain->kind->gpus) {
    case DIRECT: return endpoint->forbids_cuda = 1, 0;
    case NO_CUDA: return -FI_EINVAL;
    default: return -FI_EOPNOTSUPP;
    }
}

static int ep_getname(struct fid *fid, void *name, size_t *length) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (*length < sizeof endpoint->address) return *length = sizeof endpoint->address, -FI_ETOOSMALL;
    memcpy(name, &endpoint->address, *length = sizeof endpoint->address);
    return 0;
}

static struct fi_ops ep_ops = {.size = sizeof ep_ops, .close = ep_close, .bind = ep_bind, .control = ep_control};
static struct fi_ops_ep ep_options = {.size = sizeof ep_options, .setopt = ep_setopt};
static struct fi_ops_cm cm_ops = {.size = sizeof cm_ops, .getname = ep_getname};
static struct fi_ops_msg msg_ops = {.size = sizeof msg_ops, .recv = ep_recv, .send = ep_send};
static struct fi_ops_rma rma_ops = {.size = sizeof rma_ops, .read = ep_read, .writemsg = ep_writemsg};

static int domain_endpoint(struct fid_domain *fid, struct fi_info *info, struct fid_ep **made, void *context) {
    struct domain *domain = (struct domain *)fid;
    (void)info;
    struct endpoint *endpoint = room(sizeof *endpoint);
    endpoint->fid.fid = (struct fid){FI_CLASS_EP, context, &ep_ops};
    endpoint->fid.ops = &ep_options;
    endpoint->fid.cm = &cm_ops;
    endpoint->fid.msg = &msg_ops;
    endpoint->fid.rma = &rma_ops;
    endpoint->domain = domain;
    endpoint->operations = room(domain->kind->operations * sizeof *endpoint->operations);
    endpoint->receives = room(domain->kind->receives * sizeof *endpoint->receives);
    enter(domain);
    endpoint->address = ++last_address << 8 | 0xa5;
    endpoint->next = endpoints;
    endpoints = endpoint;
    domain->objects++;
    leave(domain);
    *made = &endpoint->fid;
    return 0;
}

static int cq_close(struct fid *fid) {
    struct queue *queue = (struct queue *)fid;
    enter(queue->domain);
    for (struct endpoint *endpoint = endpoints; endpoint; endpoint = endpoint->next)
        if (endpoint->queue == queue) mistake("a queue is closed before its endpoint");
    free(queue->entries);
    close_object(queue->domain, queue);
    return 0;
}

static struct fi_ops cq_fid_ops = {.size = sizeof cq_fid_ops, .close = cq_close};
static struct fi_ops_cq cq_ops = {.size = sizeof cq_ops, .read = cq_read, .readerr = cq_readerr};

static int domain_queue(struct fid_domain *fid, struct fi_cq_attr *attributes, struct fid_cq **made, void *context) {
    struct domain *domain = (struct domain *)fid;
    if (attributes->format != FI_CQ_FORMAT_MSG || attributes->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
    struct queue *queue = room(sizeof *queue);
    queue->fid.fid = (struct fid){FI_CLASS_CQ, context, &cq_fid_ops};
    queue->fid.ops = &cq_ops;
    queue->domain = domain;
    queue->size = attributes->size;
    queue->entries = room((queue->size + 1) * sizeof *queue->entries);
    enter(domain);
    domain->objects++;
    leave(domain);
    *made = &queue->fid;
    return 0;
}

static int av_close(struct fid *fid) {
    struct vector *vector = (struct vector *)fid;
    enter(vector->domain);
    for (struct endpoint *endpoint = endpoints; endpoint; endpoint = endpoint->next)
        if (endpoint->vector == vector) mistake("an address vector is closed before its endpoint");
    free(vector->addresses);
    close_object(vector->domain, vector);
    return 0;
}

static int av_insert(struct fid_av *fid, const void *addresses, size_t count, fi_addr_t *made, uint64_t flags,
                     void *context) {
    struct vector *vector = (struct vector *)fid;
    (void)flags, (void)context;
    if (count != 1) mistake("%zu addresses are inserted at once", count);
    uint64_t address;
    memcpy(&address, addresses, sizeof address);
    if ((address & 0xff) != 0xa5) return *made = FI_ADDR_NOTAVAIL, 0;
    enter(vector->domain);
    vector->addresses = realloc(vector->addresses, (vector->count + 1) * sizeof address);
    if (!vector->addresses) mistake("no memory");
    *made = number(vector->domain->kind, vector->count);
    vector->addresses[vector->count++] = address;
    leave(vector->domain);
    return 1;
}

static struct fi_ops av_fid_ops = {.size = sizeof av_fid_ops, .close = av_close};
static struct fi_ops_av av_ops = {.size = sizeof av_ops, .insert = av_insert};

static int domain_vector(struct fid_domain *fid, struct fi_av_attr *attributes, struct fid_av **made, void *context) {
    struct domain *domain = (struct domain *)fid;
    if (attributes->type != (domain->kind->table ? FI_AV_TABLE : FI_AV_MAP)) return -FI_ENOSYS;
    struct vector *vector = room(sizeof *vector);
    vector->fid.fid = (struct fid){FI_CLASS_AV, context, &av_fid_ops};
    vector->fid.ops = &av_ops;
    vector->domain = domain;
    enter(domain);
    domain->objects++;
    leave(domain);
    *made = &vector->fid;
    return 0;
}

static int domain_close(struct fid *fid) {
    struct domain *domain = (struct domain *)fid;
    if (domain->objects) mistake("a domain is closed before %d of its objects", domain->objects);
    free(domain);
    return 0;
}

static struct fi_ops domain_fid_ops = {.size = sizeof domain_fid_ops, .close = domain_close};
static struct fi_ops_mr domain_mr_ops = {.size = sizeof domain_mr_ops, .reg = mr_reg, .regattr = mr_regattr};
static struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops, .av_open = domain_vector, .cq_open = domain_queue, .endpoint = domain_endpoint};

static int fabric_domain(struct fid_fabric *fid, struct fi_info *info, struct fid_domain **made, void *context) {
    (void)fid;
    struct domain *domain = room(sizeof *domain);
    domain->fid.fid = (struct fid){FI_CLASS_DOMAIN, context, &domain_fid_ops};
    domain->fid.ops = &domain_ops;
    domain->fid.mr = &domain_mr_ops;
    domain->kind = named(info->fabric_attr->prov_name);
    domain->reaches_gpus = (info->caps & FI_HMEM) != 0;
    *made = &domain->fid;
    return 0;
}

static int fabric_close(struct fid *fid) {
    free(fid);
    return 0;
}

static struct fi_ops fabric_fid_ops = {.size = sizeof fabric_fid_ops, .close = fabric_close};
static struct fi_ops_fabric fabric_ops = {.size = sizeof fabric_ops, .domain = fabric_domain};

// The library's own functions.

uint32_t fi_version(void) { return FI_VERSION(1, 18); }

const char *fi_strerror(int error) { return strerror(error); }

int fi_fabric(struct fi_fabric_attr *attributes, struct fid_fabric **made, void *context) {
    (void)attributes;
    struct fid_fabric *fabric = room(sizeof *fabric);
    fabric->fid = (struct fid){FI_CLASS_FABRIC, context, &fabric_fid_ops};
    fabric->ops = &fabric_ops;
    *made = fabric;
    return 0;
}
