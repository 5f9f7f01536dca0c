// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The providers of double.c, and how a caller finds them.
//
// The models whose names end in `-gpu` reach memory of GPUs: all memory that peers access is a GPU's there, and must be
// registered as such. What a NIC writes to a GPU stays on the bus until a NIC reads memory of that GPU (fi_cq(3),
// memory domains). Of the others, one offers no FI_HMEM, two find no GPU, and one would call CUDA.

#include "objects.h"

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>
#include <stdlib.h>
#include <string.h>

static const struct kind kinds[] = {
    {"efa", 0, FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY, 4, 1, 1, 128, 128, 1ul << 40, NO_CUDA},
    {"cxi", 0, FI_MR_ENDPOINT, 8, 0, 1, 256, 256, 1ul << 30, NONE},
    {"opx", FI_CONTEXT2, 0, 8, 0, 1, 64, 64, 1ul << 22, NO_CUDA},
    {"strange", FI_CONTEXT2, FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY, 8, 1, 0, 8, 16, 1 << 22, COPIES},
    {"efa-gpu", 0, FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_HMEM, 4, 1, 1, 128, 128, 1ul << 40,
     DIRECT},
    {"cxi-gpu", 0, FI_MR_ENDPOINT, 8, 0, 1, 256, 256, 1ul << 30, DIRECT},
    {"opx-gpu", FI_CONTEXT2, FI_MR_HMEM, 8, 0, 1, 64, 64, 1ul << 22, DIRECT},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

const struct kind *named(const char *name) {
    for (size_t i = 0; i < KINDS; i++)
        if (!strcmp(kinds[i].name, name)) return &kinds[i];
    return NULL;
}

struct fi_info *fi_dupinfo(const struct fi_info *info) {
    struct fi_info *copy = room(sizeof *copy);
    if (info) *copy = *info;
    copy->next = NULL;
#define PART(name) \
    copy->name = room(sizeof *copy->name); \
    if (info && info->name) *copy->name = *info->name;
    PART(tx_attr) PART(rx_attr) PART(ep_attr) PART(domain_attr) PART(fabric_attr)
#undef PART
    char **texts[] = {&copy->domain_attr->name, &copy->fabric_attr->name, &copy->fabric_attr->prov_name};
    for (size_t i = 0; i < 3; i++) *texts[i] = *texts[i] ? strdup(*texts[i]) : NULL;
    return copy;
}

void fi_freeinfo(struct fi_info *info) {
    while (info) {
        struct fi_info *next = info->next;
        free(info->domain_attr->name), free(info->fabric_attr->name), free(info->fabric_attr->prov_name);
        free(info->tx_attr), free(info->rx_attr), free(info->ep_attr), free(info->domain_attr);
        free(info->fabric_attr), free(info);
        info = next;
    }
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **found) {
    struct fi_info **end = found;
    (void)node, (void)service, (void)flags;
    *found = NULL;
    int gpus = (hints->caps & FI_HMEM) != 0;
    if (gpus && version < FI_VERSION(1, 18)) mistake("FI_HMEM without an interface that can forbid calls of CUDA");
    for (size_t i = 0; i < KINDS; i++) {
        const struct kind *kind = &kinds[i];
        const char *name = hints->fabric_attr->prov_name;
        if (name && strcmp(name, kind->name)) continue;
        if (gpus ? kind->gpus == NONE : kind->gpus == DIRECT) continue;
        // An offer must not demand what the caller does not know.
        if (kind->mode & ~hints->mode || kind->mr_mode & ~hints->domain_attr->mr_mode) continue;
        struct fi_info *info = fi_dupinfo(NULL);
        info->caps = FI_MSG | FI_RMA | (hints->caps & FI_HMEM);
        info->mode = kind->mode;
        info->tx_attr->size = kind->operations;
        info->rx_attr->size = kind->receives;
        info->tx_attr->msg_order = info->rx_attr->msg_order = kind->ordered_sends ? FI_ORDER_SAS : 0;
        info->ep_attr->type = FI_EP_RDM;
        info->ep_attr->max_msg_size = kind->max_message;
        info->domain_attr->name = strdup("double0");
        info->domain_attr->av_type = kind->table ? FI_AV_TABLE : FI_AV_MAP;
        info->domain_attr->mr_mode = kind->mr_mode;
        info->domain_attr->mr_key_size = kind->key_bytes;
        info->fabric_attr->name = strdup("double");
        info->fabric_attr->prov_name = strdup(kind->name);
        *end = info;
        end = &info->next;
    }
    return *found ? 0 : -FI_ENODATA;
}
