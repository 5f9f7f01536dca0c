// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   fuzz SEED STEPS
//
// Kernels of two ranks call the device functions with random arguments: windows that are closed, foreign, null or
// damaged, and offsets, sizes, ids, peers and widths of any value. Each call returns, and nothing outside of the
// windows changes. The memory of the windows is the program's, between guards.

#include "ranks.hpp"
#include "gin_device.cuh"

#include <cstdlib>

using Bytes = gin::Window<uint8_t>;

constexpr uint64_t BYTES = 512, GUARD = 4096;
constexpr uint8_t GUARDED = 0xa5;

// xorshift64*.
struct Random {
    uint64_t state;
    uint64_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1d;
    }
    uint64_t below(uint64_t end) { return next() % end; }
    // A number that is often small, at the end of a window, or next to a power of two.
    uint64_t number() {
        switch (below(16)) {
        case 0: return BYTES - 8 + below(17);
        case 1: return (1ull << below(64)) + below(3) - 1;
        case 2: return next();
        case 3: return below(BYTES);
        default: return 8 * below(BYTES / 8);
        }
    }
    uint32_t small() { return uint32_t(below(16) == 0 ? number() : below(2)); }
    // A number of bits, mostly 1 to 64.
    uint32_t width() { return uint32_t(below(8) == 0 ? number() : 1 + below(64)); }
};

// A window of the handles, sometimes damaged in a field that calls check.
static Bytes window(Random& random, const gin_device_window_t* all, uint32_t count) {
    gin_device_window_t handle = all[random.below(16) == 0 ? random.below(count) : random.below(2)];
    if (random.below(24) == 0) {
        uint64_t bit = 1ull << random.below(64);
        switch (random.below(4)) {
        case 0: handle.data ^= bit; break;
        case 1: handle.id ^= uint32_t(bit) | uint32_t(bit >> 32); break;
        case 2: handle.base ^= bit; break;
        default: handle.own_length ^= bit; break;
        }
    }
    return handle;
}

struct Windows {
    gin_device_window_t all[5];
};

template <class Backend>
static uint64_t step(Random& r, const gin::Gin<Backend>& net, const gin::Team& world, const Windows& windows) {
    auto pick = [&] { return window(r, windows.all, 5); };
    gin::CoopThread one;
    uint32_t peer = r.small();
    gin::Request request;
    request.position = r.small(), request.peer = r.small();
    gin::None none;
    gin::StrongSignalInc raise{r.small()};
    gin::CounterInc counts{r.small()};
    // Arguments are evaluated in any order: these are not part of calls.
    Bytes to = pick(), from = pick(), at = pick();
    uint64_t there = r.number(), here = r.number(), word = r.number(), least = r.number();
    uint32_t id = r.small(), bits = r.width();
    gin::StrongVASignalAdd<uint8_t> add{at, word, 3};
    gin::WeakVASignalInc<uint8_t> weak{at, word};
    switch (r.below(22)) {
    case 0: return net.put(world, peer, to, there, from, here, r.below(BYTES), none, none, one).word();
    case 1: return net.put(world, peer, to, there % 256, from, here % 256, r.below(256), raise, counts, one).word();
    case 2: return net.put(world, peer, to, there, from, here, r.below(64), add, counts, one).word();
    case 3: return net.putValue(world, peer, to, there, uint8_t(word), gin::WeakSignalInc{id}, one).word();
    case 4: return net.putValue(world, peer, to, there, uint16_t(word), none, one).word();
    case 5: return net.putValue(world, peer, to, there, uint32_t(word), gin::StrongSignalAdd{id, 2}, one).word();
    case 6: return net.putValue(world, peer, to, there, least, add, one).word();
    case 7: return net.get(world, peer, to, there, from, here, r.number(), one).word();
    case 8: return net.signal(world, peer, raise, one).word();
    case 9: return net.signal(world, peer, weak, one).word();
    case 10: return net.signalAllRoutes(world, peer, raise, one).word();
    case 11: return net.flush(one, gin::Order(r.below(2))).word();
    case 12: return net.flushAsync(world, peer, &request).word();
    case 13: return net.wait(request, one).word();
    case 14: return net.waitSignal(one, id, least, bits).word();
    case 15: return net.waitSignal(one, at, word, least).word();
    case 16: return net.readSignal(id, bits).fault.word() | net.readSignal(at, word).fault.word();
    case 17: return net.readCounter(id, bits).fault.word() | net.waitCounter(one, id, least).word();
    case 18: return net.signalShadow(id).fault.word() | net.increaseSignalShadow(id, least).word();
    case 19: return net.quiet(one, world, peer).word() | net.quietAll(one).word();
    case 20: return net.signalAllContexts(world, peer, raise, one).word();
    default: return net.barrier(one, gin::BarrierTeam(r.below(4)), id, gin::Fence(r.below(4))).word();
    }
}

// Counts the calls that returned no fault in `*succeeded`.
static void fuzz(gin::Comm comm, Windows windows, uint64_t seed, uint64_t steps, uint64_t* succeeded) {
    Random random{seed * 2 + comm.rank() + 1};
    for (uint64_t i = 0; i < steps; i++) {
        uint32_t context = random.below(16) == 0 ? random.small() : uint32_t(random.below(2));
        gin::Deadline deadline = gin::Deadline::after_us(random.below(300));
        gin::Route route = gin::Route(random.below(3));
        uint64_t fault = 0;
        gin::Team world = comm.world();
        switch (random.below(8)) {
        case 0: fault = step(random, gin::Gin<gin::Proxy>(comm, context, deadline), world, windows); break;
        case 1: fault = step(random, gin::Gin<gin::Gdaki>(comm, context, deadline), world, windows); break;
        default: fault = step(random, gin::Gin<>(comm, context, deadline, gin::Sharing::Gpu, route), world, windows);
        }
        *succeeded += fault == 0;
    }
}

struct Guarded {
    uint64_t bytes = BYTES;
    std::vector<uint8_t> memory = std::vector<uint8_t>(BYTES + 2 * GUARD, GUARDED);
    // A multiple of 16.
    uint8_t* begin() { return memory.data() + (GUARD - reinterpret_cast<uintptr_t>(memory.data()) % 16); }
    void check() {
        for (uint8_t& byte : memory)
            if (byte != GUARDED && (&byte < begin() || &byte >= begin() + bytes))
                throw std::runtime_error("a guard has changed");
    }
};

static void rank(const gin::Job& job, uint64_t seed, uint64_t steps, uint64_t& succeeded) {
    gin_requirements_t requirements = gin::default_requirements();
    requirements.contexts = 2, requirements.signals = 3, requirements.counters = 2, requirements.world_barriers = 1;
    Guarded memory[4];
    gin::Communicator comm(job, requirements), other(job, requirements);
    // Ranks have parts of different lengths.
    memory[0].bytes = BYTES / (1 + job.rank());
    gin::HostWindow<uint8_t> plain(comm, memory[0].begin(), memory[0].bytes);
    gin::HostWindow<uint8_t> raised(comm, memory[1].begin(), BYTES, GIN_WINDOW_SIGNALS);
    gin::HostWindow<uint8_t> foreign(other, memory[2].begin(), BYTES), closed(comm, memory[3].begin(), BYTES);
    Windows windows{{plain.device(), raised.device(), foreign.device(), closed.device(), {}}};
    closed.close();
    gin::Kernel kernel = gin::Kernel::of<fuzz>("fuzz");
    gin::Stream stream(job);
    uint64_t* out = &succeeded;
    stream.launch(kernel, gin::cooperative(1, 1), comm.device(), windows, seed, steps, out);
    stream.synchronize();
    job.barrier();
    for (Guarded& one : memory) one.check();
    // The kernels may have ended the communicator by a deadline in the middle of a post.
    if (gin_comm_destroy(comm.raw()) != GIN_OK) (void)gin_comm_release(comm.raw());
    (void)comm.release();
    other.destroy();
    for (gin::HostWindow<uint8_t>* window : {&plain, &raised, &foreign}) (void)gin_window_close(window->release());
    for (Guarded& one : memory) one.check();
}

int main(int count, char** words) try {
    uint64_t seed = count > 1 ? std::strtoull(words[1], nullptr, 10) : 1;
    uint64_t steps = count > 2 ? std::strtoull(words[2], nullptr, 10) : 500;
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    config.network_only = seed % 3 == 0;
    uint64_t succeeded[2] = {0, 0};
    int failed =
        on_ranks(2, config, [&](const gin::Job& job) { rank(job, seed, steps, succeeded[job.rank()]); });
    // Random calls that all fail would try nothing.
    if (succeeded[0] + succeeded[1] < steps / 8) failed = 1;
    std::printf("%s: seed %llu, %llu of %llu calls had no fault\n", failed ? "failed" : "passed",
                (unsigned long long)seed, (unsigned long long)(succeeded[0] + succeeded[1]),
                (unsigned long long)(2 * steps));
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
