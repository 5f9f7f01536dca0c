// SPDX-License-Identifier: MIT OR Apache-2.0
// Calls of NCCL's device code for GDAKI, compiled for the CPU.
#include "gin/gdaki/gin_gdaki.h"

namespace {
struct OneThread {
    int thread_rank() const { return 0; }
    int size() const { return 1; }
    void sync() const {}
};

// The arguments of all calls. `nvidia.rs` has the same.
struct Call {
    void *handle;
    int rank, ranks, context, peer;
    void *to_window, *from_window;
    uint64_t to, from, bytes;
    int signal_type;
    uint32_t signal;
    void *signal_window;
    uint64_t signal_offset, amount;
    int has_counter;
    uint32_t counter;
    uint32_t flags;
    uint64_t value;
};
static_assert(sizeof(Call) == 120);

constexpr auto GDAKI = NCCL_NET_DEVICE_GIN_GDAKI;

// The first contexts are shared by the GPU, the next by a block, the next have one thread.
ncclGinCtx context(const Call &call) {
    return {call.rank, call.ranks, call.handle, call.context, uint8_t(call.context % 3)};
}

ncclGinSignalDescriptor signal(const Call &call) {
    ncclGinSignalDescriptor all{};
    all.type = ncclGinSignalType(call.signal_type);
    all.vaSignal.signalWindow = call.signal_window;
    all.vaSignal.signalOffset = call.signal_offset;
    all.indexedSignal.signalId = call.signal;
    return all;
}

template <typename T>
void put_value(const Call &call) {
    ncclGinApi_PutValue<GDAKI>::call(context(call), OneThread(), call.peer, call.to_window, call.to, T(call.value),
                                     signal(call), ncclGinSignalAdd, call.amount, false, nullptr,
                                     cuda::thread_scope_device, cuda::thread_scope_device, call.flags);
}
} // namespace

extern "C" {
void gin_nv_put(const Call *call) {
    ncclGinApi_Put<GDAKI>::call(context(*call), OneThread(), call->peer, call->to_window != nullptr, call->to_window,
                                call->to, call->from_window, call->from, call->bytes, signal(*call), ncclGinSignalAdd,
                                call->amount, call->has_counter != 0, call->counter, false, nullptr,
                                cuda::thread_scope_device, cuda::thread_scope_device, call->flags);
}

void gin_nv_put_value(const Call *call) {
    switch (call->bytes) {
    case 1: return put_value<uint8_t>(*call);
    case 2: return put_value<uint16_t>(*call);
    case 4: return put_value<uint32_t>(*call);
    default: return put_value<uint64_t>(*call);
    }
}

void gin_nv_get(const Call *call) {
    ncclGinApi_Get<GDAKI>::call(context(*call), OneThread(), call->peer, call->from_window, call->from, call->to_window,
                                call->to, call->bytes, false, nullptr, call->flags);
}

void gin_nv_flush(const Call *call) {
    ncclGinRequest_t request{};
    ncclGinApi_FlushAsync<GDAKI>::call(context(*call), call->peer, &request, false, nullptr, 0);
    ncclGinApi_Wait<GDAKI>::call(context(*call), request, false, nullptr, std::memory_order_acquire, nullptr);
}
}
