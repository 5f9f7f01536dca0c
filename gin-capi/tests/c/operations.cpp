// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every operation of gin_device.cuh on the virtual GPU, by each kind of coop, and the faults of wrong arguments.

#include "gin.hpp"
#include "gin_device.cuh"

#include <cstdio>
#include <cstring>
#include <thread>

using Words = gin::Window<uint64_t>;

// Reports the line of a condition that does not hold.
#define HOLDS(condition)                                 \
    do {                                                 \
        if (!(condition)) return comm.report(__LINE__);  \
    } while (0)
#define OK(call) HOLDS(!(call))
#define FAILS(call, why) HOLDS((call).kind() == gin::FaultKind::why)

// `data` takes signals and has 64 words; `foreign` is of another communicator.
static void operations(gin::Comm comm, Words data, Words foreign, gin::Deadline deadline) {
    gin::CoopCta cta;
    gin::CoopThread one;
    gin::CoopWarp warp;
    gin::CoopLanes lanes{0xf};
    gin::CoopWarpSpan span{0, 2, 1};
    gin::Gin<> net(comm, 0, deadline);
    gin::Team world = comm.world();
    uint32_t me = world.rank, peer = world.after(1), thread = cta.thread_rank();
    volatile uint64_t* words = data.localPointer();
    HOLDS(cta.size() == 64 && warp.size() == 32 && span.size() == 64 && data.size() == 64 && comm.matches());
    HOLDS(data.holds(60, 4) && !data.holds(60, 5) && !data.holds(65, 0));

    OK(net.putValue(world, peer, data, 0, uint64_t(100 + me), gin::StrongSignalInc{0}, cta));
    OK(net.waitSignal(cta, 0, 1));
    HOLDS(words[0] == 100 + peer);
    if (thread == 0) {
        OK(net.putValue(world, peer, data, 12, uint32_t(7), gin::WeakSignalAdd{1, 5}));
        OK(net.waitSignal(one, 1, 5));
        gin::Result<uint64_t> five = net.readSignal(1);
        HOLDS(five && five.value == 5 && words[1] == 7ull << 32);
    }
    OK(net.barrier(cta, gin::BarrierTeam::World, 0, gin::Fence::PutGet));
    OK(net.get(world, peer, data, 0, data, 64, 8, cta));
    OK(net.flush(cta));
    HOLDS(words[8] == 100 + me);
    if (thread < 32) {
        gin::SymPtr<uint64_t> to{data, 16}, from{data, 0};
        OK(net.put(world, peer, to, from + 0, 4, gin::StrongSignalInc{2}, gin::CounterInc{3}, warp));
        OK(net.waitCounter(warp, 3, 1));
        OK(net.waitSignal(warp, 2, 1));
        HOLDS(words[16] == 100 + me && net.readCounter(3).value == 1);
    }
    if (thread < 4) {
        OK(net.signal(world, peer, gin::StrongSignalAdd{4, 10}, lanes));
        OK(net.waitSignal(lanes, 4, 10));
    }
    OK(net.signal(world, peer, gin::WeakSignalInc{5}, span));
    OK(net.waitSignal(span, 5, 1));
    OK(span.sync());
    uint64_t before = 9, delta = 9;
    OK(net.waitSignalFollowShadow(cta, 5, 1, &before, &delta));
    HOLDS(before == 0 && delta == 1 && net.signalShadow(5).value == 1);
    if (thread == 0) OK(net.increaseSignalShadow(0, 1));
    cta.sync();
    OK(net.waitSignalMeetShadow(cta, 0));
    OK(net.signal(world, peer, gin::StrongVASignalAdd<uint64_t>{data, 240, 3}, cta));
    OK(net.waitSignal(cta, data, 240, 3));
    HOLDS(net.readSignal(data, 240).value == 3);
    OK(net.signalAllRoutes(world, peer, gin::StrongSignalInc{6}, cta));
    OK(net.waitSignal(cta, 6, 1));
    if (thread == 0) {
        gin::Request request;
        OK(net.flushAsync(world, peer, &request));
        OK(net.wait(request));
        // The same word by loads, if the peer is reached so.
        uint64_t* there = data.peerPointer(world, peer, 16);
        gin_value_t asked = gin_peer_pointer(comm.handle().copy, data.handle().data, 128, peer);
        HOLDS((asked.fault == 0) == (there != nullptr) && (!there || reinterpret_cast<uint64_t>(there) == asked.value));
        HOLDS(data.peerPointer(world, 2) == nullptr);
    }
    OK(net.barrier(cta, gin::BarrierTeam::World, 0, gin::Fence::None));
    OK(net.resetSignal(6));
    OK(net.resetSignal(data, 240));
    OK(net.resetCounter(3));
    cta.sync();
    HOLDS(net.readSignal(6).value == 0 && net.readSignal(data, 240).value == 0 && net.readCounter(3).value == 0);

    gin_device_window_t nothing{};
    FAILS(net.put(world, peer, data, 504, data, 0, 16, gin::None{}, gin::None{}, cta), OutOfRange);
    FAILS(net.put(world, peer, data, 0, foreign, 0, 8, gin::None{}, gin::None{}, cta), UnknownWindow);
    FAILS(net.put(world, peer, Words(nothing), 0, data, 0, 8, gin::None{}, gin::None{}, cta), UnknownWindow);
    FAILS(net.put(world, 2, data, 0, data, 0, 8, gin::None{}, gin::None{}, cta), UnknownRank);
    FAILS(net.putValue(world, peer, data, 3, uint64_t(1), gin::None{}, cta), Misaligned);
    FAILS(net.signal(world, peer, gin::StrongSignalInc{9999}, cta), UnknownSignal);
    FAILS(net.signal(world, peer, gin::StrongSignalInc{0}, gin::CoopWarpSpan{0, 3, 1}), BadDescriptor);
    FAILS(net.waitCounter(cta, 3, 1, 57), BadWidth);
    FAILS(net.barrier(cta, gin::BarrierTeam::World, 1, gin::Fence::None), UnknownBarrier);
    FAILS(gin::Gin<>(comm, 1, deadline).flush(cta), UnknownContext);
    FAILS(gin::Gin<gin::Gdaki>(comm, 0, deadline).flush(cta), NoBackend);
    FAILS(gin::Gin<>(comm, 0, gin::Deadline::after_us(50)).waitSignal(cta, 7, 1), Timeout);
    gin_device_comm_t old = comm.handle();
    old.abi--;
    FAILS(gin::Gin<>(gin::Comm(old), 0, deadline).flush(cta), AbiMismatch);
    // The proxy alone.
    gin::Gin<gin::Proxy> proxy(comm, 0, deadline);
    OK(proxy.put(world, peer, data, 0, data, 0, 8, gin::StrongSignalInc{8}, gin::None{}, cta));
    OK(proxy.waitSignal(cta, 8, 1));
    OK(proxy.flush(cta));
    HOLDS(!comm.fault());
}

int main(int count, char** words) try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    config.network_only = count > 1 && std::strcmp(words[1], "network") == 0;
    std::vector<gin::Job> jobs = gin::Job::local(2, config);
    int failed = 0;
    auto rank = [&failed](const gin::Job& job) {
        try {
            gin_requirements_t requirements = gin::default_requirements();
            requirements.world_barriers = 1;
            gin::Communicator comm(job, requirements), other(job, requirements);
            gin::HostWindow<uint64_t> data(comm, 64, GIN_WINDOW_SIGNALS), foreign(other, 64);
            gin::Kernel kernel = gin::Kernel::of<operations>("operations");
            gin::Stream stream(job);
            stream.launch(kernel, gin::cooperative(1, 64), comm.device(), data.device(), foreign.device(),
                          gin::Deadline::after_ms(20000));
            stream.synchronize();
            comm.check_fault();
            job.barrier();
            data.close();
            foreign.close();
            other.destroy();
            comm.destroy();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "rank %u: %s\n", job.rank(), error.what());
            failed = 1;
            gin_job_abort(job.raw());
        }
    };
    std::thread first(rank, std::cref(jobs[0])), second(rank, std::cref(jobs[1]));
    first.join();
    second.join();
    if (failed == 0) std::printf("passed\n");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
