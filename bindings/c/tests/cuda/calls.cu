// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Calls every device function. A test links it and compares the parameters of all functions; nothing runs it.

#include "gin_device.cuh"

using namespace gin;

template <class Backend>
__device__ void operations(const Comm& comm, const Window<float>& a, const Window<uint64_t>& b, uint64_t* out) {
    Gin<Backend> net(comm, 1, Deadline::after_ms(5), Sharing::Cta, Route::Network);
    Team world = comm.world();
    Request request;
    CoopCta cta;
    comm.report(net.put(world, 1, a, 4, b, 8, 16, StrongVASignalAdd<uint64_t>{b, 8, 3}, CounterInc{2}, cta, Scope::Block,
                        Scope::System, OptAggregateRequests));
    comm.report(net.put(comm.rail(), 0, SymPtr<float>{a}, SymPtr<float>{a} + 4, 7, WeakSignalAdd{1, 2}));
    comm.report(net.putValue(world, 1, a, 4, 1.5f, WeakVASignalInc<uint64_t>{b, 8}, CoopWarp{}));
    comm.report(net.get(world, 1, a, 0, a, 64, 64, CoopLanes{0xff}));
    comm.report(net.signal(world, 1, WeakSignalInc{4}, CoopWarpSpan{0, 2, 3}));
    comm.report(net.signalAllRoutes(world, 1, WeakVASignalAdd<uint64_t>{b, 16, 2}));
    comm.report(net.flush(cta, Order::Relaxed));
    comm.report(net.flushAsync(world, 1, &request));
    comm.report(net.wait(request));
    comm.report(net.quiet(cta, world, 1));
    comm.report(net.quietAll(CoopThread{}));
    comm.report(net.signalAllContexts(world, 1, WeakVASignalAdd<uint64_t>{b, 16, 2}, cta));
    comm.report(net.waitSignal(cta, 3, 4));
    comm.report(net.waitSignal(cta, b, 8, 4, 32));
    comm.report(net.waitSignalMeetShadow(cta, 3));
    comm.report(net.waitSignalFollowShadow(cta, 3, 1, out, out + 1));
    comm.report(net.waitCounter(cta, 3, 4));
    Result<uint64_t> values[] = {net.readSignal(3), net.readSignal(b, 8), net.readCounter(3), net.signalShadow(3)};
    for (auto& value : values) {
        comm.report(value.fault);
        *out += value.value;
    }
    comm.report(net.increaseSignalShadow(3, 1));
    comm.report(net.resetSignal(3));
    comm.report(net.resetSignal(b, 8));
    comm.report(net.resetCounter(3));
    comm.report(net.barrier(cta, BarrierTeam::Lsa, 0, Fence::PutGet, true));
    comm.report(net.barrierArrive(cta, BarrierTeam::Rail, 0, Fence::Put));
    comm.report(net.barrierWait(cta, BarrierTeam::Rail, 0, Fence::Put));
}

__global__ void calls(Comm comm, Window<float> a, Window<uint64_t> b, uint64_t* out) {
    operations<Any>(comm, a, b, out);
    operations<Proxy>(comm, a, b, out);
    operations<Gdaki>(comm, a, b, out);
    gin_value_t pointer = gin_peer_pointer(comm.handle().copy, a.handle().data, 8, 1);
    *reinterpret_cast<uint64_t*>(pointer.value) = pointer.fault + gin_device_abi();
    CoopWarp{}.sync();
    CoopTile<8>{}.sync();
    (void)gin_coop_sync(CoopWarp{}.word());
    comm.report(CoopWarpSpan{0, 2, 3}.sync());
    if (comm.fault().kind() == FaultKind::Aborted) comm.report(7u);
    if (float* peer = a.peerPointer(comm.lsa(), 0, 3)) *peer = *a.localPointer(3);
}

int main() { return 0; }
