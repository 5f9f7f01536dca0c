// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Every operation of gin_device.cuh by each kind of coop, and the faults of wrong arguments.
//
//   operations [automatic | network]            on virtual GPUs
//   operations (automatic | network) CUBIN      on GPUs; nvcc makes the cubin of this file

#include "ranks.hpp"
#include "gin_device.cuh"

#include <cstring>
#include <fstream>
#include <iterator>

using Words = gin::Window<uint64_t>;

#if defined(__CUDACC__)
#define KERNEL extern "C" __global__ void
#define FUNCTION __device__ static void
#else
#define KERNEL static void
#define FUNCTION static void
#endif

// Reports the line of a condition that does not hold.
#define HOLDS(condition)                                 \
    do {                                                 \
        if (!(condition)) return comm.report(__LINE__);  \
    } while (0)
#define OK(call) HOLDS(!(call))
#define FAILS(call, why) HOLDS((call).kind() == gin::FaultKind::why)

// Puts of all alignments and lengths, by a coop: header code if the peer is reached by loads and stores. The first half
// of `data` has the sources, the second the destinations. Signal `signal` rises.
template <class Coop>
FUNCTION lengths(gin::Comm comm, gin::Window<uint8_t> data, uint32_t signal, Coop coop, gin::Route route,
                 gin::Deadline deadline) {
    gin::Gin<> net(comm, 0, deadline, gin::Sharing::Gpu, route);
    gin::Team world = comm.world();
    uint32_t me = world.rank, peer = world.after(1), half = uint32_t(data.size() / 2), rank = coop.thread_rank();
    uint64_t raised = net.readSignal(signal).value;
    const uint32_t tos[] = {0, 1, 4, 17}, froms[] = {0, 1, 4, 16}, sizes[] = {0, 1, 15, 16, 64, 67, 259};
    for (uint32_t i = 0; i < 4 * 4 * 7; i++) {
        uint32_t to = tos[i % 4], from = froms[i / 4 % 4], bytes = sizes[i / 16];
        for (uint32_t k = rank; k < half; k += coop.size()) {
            *data.localPointer(k) = uint8_t(k * 7 + i + 100 * me);
            *data.localPointer(half + k) = 0xee;
        }
        OK(net.barrier(coop, gin::BarrierTeam::World, 0, gin::Fence::None));
        OK(net.put(world, peer, data, half + to, data, from, bytes, gin::StrongSignalInc{signal}, gin::None{}, coop));
        OK(net.waitSignal(coop, signal, ++raised));
        const volatile uint8_t* here = data.localPointer(half);
        for (uint32_t k = rank; k < half; k += coop.size()) {
            bool inside = k >= to && k < to + bytes;
            uint8_t sent = uint8_t((k - to + from) * 7 + i + 100 * peer);
            HOLDS(here[k] == (inside ? sent : 0xee));
        }
        OK(net.flush(coop));
        OK(net.barrier(coop, gin::BarrierTeam::World, 0, gin::Fence::None));
    }
}

// `data` takes signals and has 64 words; `foreign` is of another communicator; `closed` is closed.
KERNEL operations(gin::Comm comm, Words data, Words foreign, Words closed, gin::Window<uint8_t> bytes,
                  gin::Deadline deadline) {
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
        HOLDS(net.readSignal(4).value == 10 && net.readSignal(4, 3).value == 2);
    }
    if (thread < 8) {
        gin::CoopTile<8> tile;
        HOLDS(tile.size() == 8 && tile.thread_rank() == thread && tile.mask_here() == 0xff);
        OK(net.putValue(world, peer, data, 72, uint8_t(3 + me), gin::StrongSignalInc{9}, tile));
        OK(net.waitSignal(tile, 9, 1));
        HOLDS(*reinterpret_cast<volatile uint8_t*>(data.localPointer(9)) == 3 + peer);
        OK(net.putValue(world, peer, data, 74, uint16_t(0x1200 + me), gin::WeakSignalInc{9}, tile));
        OK(net.waitSignal(tile, 9, 2));
        HOLDS(words[9] >> 16 == 0x1200 + peer);
    }
    cta.sync();
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
    OK(net.putValue(world, peer, data, 248, uint64_t(60 + me), gin::None{}, cta));
    OK(net.quiet(cta, world, peer));
    OK(net.quietAll(cta));
    OK(net.signalAllContexts(world, peer, gin::StrongSignalInc{6}, cta));
    OK(net.waitSignal(cta, 6, 2));
    HOLDS(words[31] == 60 + peer);
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
    // Arrived, the rank does something else before it waits.
    for (uint32_t round = 0; round < 3; round++) {
        OK(net.putValue(world, peer, data, 80, uint64_t(round), gin::None{}, cta));
        OK(net.barrierArrive(cta, gin::BarrierTeam::World, 0, gin::Fence::Put));
        words[11] = round;
        OK(net.barrierWait(cta, gin::BarrierTeam::World, 0, gin::Fence::Put));
        HOLDS(words[10] == round && words[11] == round);
        OK(net.barrier(cta, gin::BarrierTeam::World, 0, gin::Fence::None));
    }
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
    FAILS(net.barrier(cta, gin::BarrierTeam::Lsa, GIN_NONE, gin::Fence::None), UnknownBarrier);
    FAILS(gin::Gin<>(comm, 1, deadline).flush(cta), UnknownContext);
    FAILS(gin::Gin<gin::Gdaki>(comm, 0, deadline).flush(cta), NoBackend);
    FAILS(gin::Gin<>(comm, 0, gin::Deadline::after_us(50)).waitSignal(cta, 7, 1), Timeout);
    gin_device_comm_t old = comm.handle();
    old.abi--;
    FAILS(gin::Gin<>(gin::Comm(old), 0, deadline).flush(cta), AbiMismatch);
    FAILS(net.put(world, peer, closed, 0, data, 0, 8, gin::None{}, gin::None{}, cta), UnknownWindow);
    FAILS(net.put(world, peer, data, 0, closed, 0, 8, gin::None{}, gin::None{}, cta), UnknownWindow);
    FAILS(net.putValue(world, peer, closed, 0, 1ull, gin::None{}, cta), UnknownWindow);
    FAILS(net.get(world, peer, data, 0, closed, 0, 8, cta), UnknownWindow);
    FAILS(net.put(world, peer, data, ~0ull, data, 0, 8, gin::None{}, gin::None{}, cta), OutOfRange);
    FAILS(net.put(world, peer, data, 0, data, 504, 16, gin::None{}, gin::None{}, cta), OutOfRange);
    FAILS(net.put(world, peer, data, 0, data, 8, 8, gin::None{}, gin::CounterInc{9999}, cta), UnknownCounter);
    FAILS(net.readSignal(9999).fault, UnknownSignal);
    FAILS(net.readSignal(0, 65).fault, BadWidth);
    FAILS(net.readCounter(9999).fault, UnknownCounter);
    FAILS(net.readCounter(0, 0).fault, BadWidth);
    FAILS(net.signalShadow(9999).fault, UnknownSignal);
    FAILS(net.increaseSignalShadow(9999, 1), UnknownSignal);
    FAILS(gin::Gin<>(comm, 1, deadline).readSignal(0).fault, UnknownContext);

    // Loads and stores alone: no call is behind these.
    gin::Gin<> stores(comm, 0, deadline, gin::Sharing::Gpu, gin::Route::Lsa);
    if (comm.handle().lsa_reach != 0) {
        FAILS(stores.put(world, peer, data, 504, data, 0, 16, gin::None{}, gin::None{}, cta), OutOfRange);
        FAILS(stores.put(world, peer, foreign, 0, data, 0, 16, gin::None{}, gin::None{}, cta), UnknownWindow);
        FAILS(stores.put(world, peer, closed, 0, data, 0, 16, gin::None{}, gin::None{}, cta), UnknownWindow);
        FAILS(stores.put(world, 2, data, 0, data, 0, 16, gin::None{}, gin::None{}, cta), UnknownRank);
        FAILS(stores.put(world, peer, data, 0, data, 8, 8, gin::None{}, gin::CounterInc{9999}, cta), UnknownCounter);
        FAILS(stores.putValue(world, peer, data, 3, uint64_t(1), gin::None{}, cta), Misaligned);
        FAILS(stores.signal(world, peer, gin::StrongSignalInc{9999}, cta), UnknownSignal);
        FAILS(stores.signal(world, peer, gin::StrongSignalInc{0}, gin::CoopWarpSpan{0, 3, 1}), BadDescriptor);
        FAILS(stores.readCounter(9999).fault, UnknownCounter);
        gin::Fault fault = gin::Gin<>(comm, 7, deadline, gin::Sharing::Gpu, gin::Route::Lsa)
                               .signal(world, peer, gin::StrongSignalInc{0}, cta);
        HOLDS(fault.kind() == gin::FaultKind::UnknownContext && fault.context() == 7 && fault.peer() == peer);
        lengths(comm, bytes, 10, cta, gin::Route::Lsa, deadline);
    } else {
        FAILS(stores.put(world, peer, data, 0, data, 0, 16, gin::None{}, gin::None{}, cta), NotReachable);
        FAILS(stores.putValue(world, peer, data, 0, uint64_t(1), gin::None{}, cta), NotReachable);
        FAILS(stores.signal(world, peer, gin::StrongSignalInc{0}, cta), NotReachable);
    }
    HOLDS(stores.readSignal(10).value == net.readSignal(10).value && net.signalShadow(10).value == 0);
    cta.sync();
    if (thread < 32) lengths(comm, bytes, 11, warp, gin::Route::Auto, deadline);
    cta.sync();
    if (thread == 0) lengths(comm, bytes, 12, one, gin::Route::Auto, deadline);
    cta.sync();

    // The proxy alone.
    gin::Gin<gin::Proxy> proxy(comm, 0, deadline);
    OK(proxy.put(world, peer, data, 0, data, 0, 8, gin::StrongSignalInc{8}, gin::None{}, cta));
    OK(proxy.waitSignal(cta, 8, 1));
    OK(proxy.flush(cta));
    HOLDS(!comm.fault());
}

// Waits for what is there already, without a call, until one of the waits notices an abort.
KERNEL circles(gin::Comm comm, Words out) {
    gin::Gin<> net(comm, 0, gin::Deadline::none());
    gin::Fault fault;
    for (uint32_t i = 0; !fault && i < 1 << 22; i++) fault = net.waitSignal(gin::CoopThread{}, 0, 0);
    *out.localPointer() = uint64_t(fault.kind());
}

// Puts by the proxy alone. When the put of the other rank has come, rank 0 gives up its next wait and reports that, and
// rank 1 waits without a deadline.
KERNEL reports(gin::Comm comm, Words data) {
    gin::CoopThread one;
    gin::Team world = comm.world();
    gin::Gin<gin::Proxy> proxy(comm, 0, gin::Deadline::after_ms(20000));
    gin::Fault fault = proxy.putValue(world, world.after(1), data, 0, uint64_t(1), gin::StrongSignalInc{0}, one);
    if (!fault) fault = proxy.flush(one);
    // A rank that gave up earlier would end the other before its put.
    if (!fault) fault = gin::Gin<>(comm, 0, gin::Deadline::after_ms(20000)).waitSignal(one, 0, 1);
    comm.report(fault);
    gin::Deadline deadline = world.rank == 0 ? gin::Deadline::after_us(50) : gin::Deadline::none();
    comm.report(gin::Gin<>(comm, 0, deadline).waitSignal(one, 0, 2));
}

#if !defined(__CUDACC__)

int main(int count, char** words) try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    std::vector<char> cubin;
    if (count > 2) {
        std::ifstream file(words[2], std::ios::binary);
        cubin.assign(std::istreambuf_iterator<char>(file), {});
        if (cubin.empty()) throw std::runtime_error(std::string("cannot read ") + words[2]);
        config.device = GIN_DEVICE_CUDA;
    }
    config.network_only = count > 1 && std::strcmp(words[1], "network") == 0;
    auto rank = [&cubin](const gin::Job& job) {
        gin_requirements_t requirements = gin::default_requirements();
        requirements.world_barriers = 1;
        gin::Communicator comm(job, requirements), other(job, requirements);
        gin::HostWindow<uint64_t> data(comm, 64, GIN_WINDOW_SIGNALS), foreign(other, 64), closed(comm, 64);
        gin::HostWindow<uint8_t> bytes(comm, 600);
        Words gone(closed.device());
        closed.close();
        gin::Kernel all = gin::Kernel::of<operations>("operations"), around = gin::Kernel::of<circles>("circles");
        gin::Kernel giving_up = gin::Kernel::of<reports>("reports");
        if (!cubin.empty()) {
            gin::Module module(job, cubin.data(), cubin.size());
            all = module.kernel("operations"), around = module.kernel("circles");
            giving_up = module.kernel("reports");
        }
        gin::Stream stream(job);
        stream.launch(all, gin::cooperative(1, 64), comm.device(), data.device(), foreign.device(), gone,
                      bytes.device(), gin::Deadline::after_ms(20000));
        stream.synchronize();
        comm.check_fault();
        job.barrier();
        data.close();
        bytes.close();
        comm.destroy();
        gin::Communicator third(job);
        gin::HostWindow<uint64_t> words(third, 1);
        stream.launch(giving_up, gin::cooperative(1, 1), third.device(), words.device());
        stream.synchronize();
        gin_stats_t stats;
        gin::check(gin_comm_stats(third.raw(), 0, &stats));
        if (stats.accepted != 1) throw std::runtime_error("the proxy did not carry out the put alone");
        bool ended = false;
        try {
            third.check_fault();
        } catch (const gin::Error& error) {
            ended = error.status() == GIN_ERROR_ENDED && std::strstr(error.what(), "rank 0") != nullptr;
        }
        if (!ended) throw std::runtime_error("the fault that rank 0 reports does not end both ranks");
        job.barrier();
        if (other.device().lsa_reach == 0) return;
        stream.launch(around, gin::cooperative(1, 1), other.device(), foreign.device());
        job.barrier();
        other.abort();
        stream.synchronize();
        bool noticed = gin::FaultKind(foreign.read()[0]) == gin::FaultKind::Aborted;
        if (!noticed) throw std::runtime_error("no wait noticed the abort");
    };
    int failed = on_ranks(2, config, rank);
    if (failed == 0) std::printf("passed\n");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}

#endif
