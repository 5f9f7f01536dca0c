// SPDX-License-Identifier: MIT OR Apache-2.0
// The declarations of NCCL's device headers on which `gin_gdaki.h` depends.
#pragma once

#include "cuda_on_cpu.hpp"

#define NCCL_DEVICE_INLINE inline

typedef void *ncclGinWindow_t;
typedef void *ncclWindow_t;
typedef uint32_t ncclGinSignal_t;
typedef uint32_t ncclGinCounter_t;
struct ncclGinRequest_t {
    uint64_t words[4];
};
enum ncclGinSignalOp_t { ncclGinSignalInc, ncclGinSignalAdd };
enum ncclNetDeviceType { NCCL_NET_DEVICE_GIN_GDAKI = 3 };
enum { ncclGinOptFlagsDefault = 0, ncclGinOptFlagsMaySkipCreditCheck = 1, ncclGinOptFlagsAggregateRequests = 2 };
enum ncclGinResourceSharingMode : uint8_t {
    NCCL_GIN_RESOURCE_SHARING_GPU,
    NCCL_GIN_RESOURCE_SHARING_CTA,
    NCCL_GIN_RESOURCE_SHARING_THREAD,
};
enum ncclGinSignalType { NCCL_GIN_SIGNAL_TYPE_NONE, NCCL_GIN_SIGNAL_TYPE_VA, NCCL_GIN_SIGNAL_TYPE_INDEXED };

struct ncclGinCtx {
    int rank;
    int nRanks;
    void *handle;
    int contextId;
    uint8_t resourceSharingMode;
};

struct ncclGinDescriptorSmem {
    char space[64];
};

struct ncclGinSignalDescriptor {
    ncclGinSignalType type;
    struct {
        ncclGinWindow_t signalWindow;
        size_t signalOffset;
        ncclWindow_t ncclWindow;
    } vaSignal;
    struct {
        ncclGinSignal_t signalId;
    } indexedSignal;
};

struct ncclGinOffsetPtr {
    uint64_t *ptr;
    uint64_t offset;
};

inline void *ncclGetLocalPointer(ncclWindow_t window, size_t offset) { return static_cast<char *>(window) + offset; }

template <ncclNetDeviceType> struct ncclGinApi_Wait;
template <ncclNetDeviceType> struct ncclGinApi_FlushAsync;
template <ncclNetDeviceType> struct ncclGinApi_Get;
template <ncclNetDeviceType> struct ncclGinApi_Put;
template <ncclNetDeviceType> struct ncclGinApi_PutValue;
template <ncclNetDeviceType> struct ncclGinApi_GetSignalPtr;
template <ncclNetDeviceType> struct ncclGinApi_GetCounterPtr;
template <ncclNetDeviceType> struct ncclGinApi_ResetSignal;
template <ncclNetDeviceType> struct ncclGinApi_ResetCounter;
template <ncclNetDeviceType> struct ncclGinApi_Flush;

namespace nccl::utility {
template <typename T>
inline T loadConst(const T *at) {
    return *at;
}
inline bool testAbort(uint32_t *flag, uint32_t &) { return __ldg(flag) != 0; }
} // namespace nccl::utility
