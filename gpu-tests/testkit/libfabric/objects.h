// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The objects of the providers in double.c and offers.c. One mutex in double.c guards all of them.

#ifndef GIN_LIBFABRIC_DOUBLE_OBJECTS_H
#define GIN_LIBFABRIC_DOUBLE_OBJECTS_H

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <stdatomic.h>

// What a provider does with memory of GPUs.
enum gpus {
    NONE,    // offers no FI_HMEM
    NO_CUDA, // offers it, but there is no GPU
    COPIES,  // offers it by calls of CUDA
    DIRECT,  // its NIC reaches it
};

struct kind {
    const char *name;
    uint64_t mode;        // duties of the caller
    int mr_mode;          // demands on registration
    size_t key_bytes;
    int table;            // addresses are numbers in the order of insertion
    int ordered_sends;    // messages to one peer arrive in their order
    size_t operations, receives;
    size_t max_message;
    enum gpus gpus;
};

// Bytes that the NIC has written to a GPU and that are still on the bus.
struct delayed {
    char *to;
    size_t length;
    struct delayed *next;
    char bytes[];
};

// Returns the provider with this name, or NULL.
const struct kind *named(const char *name);

// Returns zeroed memory.
void *room(size_t bytes);

// Ends the process with a message.
__attribute__((noreturn, format(printf, 1, 2))) void mistake(const char *format, ...);

struct domain {
    struct fid_domain fid;
    const struct kind *kind;
    int reaches_gpus; // FI_HMEM was asked for
    struct delayed *delayed;
    int objects;
    atomic_int busy; // a thread is in a call
};

struct region {
    struct fid_mr fid;
    struct domain *domain;
    struct endpoint *endpoint; // once bound
    char *base;
    size_t length;
    uint64_t access;
    int in_gpu;
    int enabled, used; // pieces of operations that use its descriptor
    struct region *next;
};

struct entry {
    void *context;
    uint64_t flags;
    size_t length;
    int error;
};

struct queue {
    struct fid_cq fid;
    struct domain *domain;
    size_t size, taken, count; // `taken`: entries, and operations that will need one
    struct entry *entries;
};

struct vector {
    struct fid_av fid;
    struct domain *domain;
    size_t count;
    uint64_t *addresses;
};

enum operation_kind { WRITE, READ, SEND };

struct operation {
    enum operation_kind kind;
    void *context;
    char *local;
    size_t length;
    struct region *descriptor;
    uint64_t peer, remote, key;
    int silent; // its completion has been reported
    unsigned done;
};

struct receive {
    void *context;
    char *buffer;
    size_t length;
    struct region *descriptor;
};

struct endpoint {
    struct fid_ep fid;
    struct domain *domain;
    struct queue *queue;
    struct vector *vector;
    uint64_t address;
    int enabled, regions, forbids_cuda;
    size_t count, waiting;
    struct operation *operations;
    struct receive *receives;
    struct endpoint *next;
};

#endif
