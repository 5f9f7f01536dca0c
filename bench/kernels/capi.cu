// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of `gin bench capi` in C++: each does what the kernel of the same name of src/ does in Rust. nvcc makes a
// cubin of them; a C++ compiler compiles them for the virtual GPU.

#include "gin_device.cuh"

#if defined(__CUDACC__)
#define BENCH_KERNEL extern "C" __global__ void
GIN_FN uint64_t clock_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
GIN_FN uint64_t cycles() { return static_cast<uint64_t>(clock64()); }
#else
#include <chrono>
#define BENCH_KERNEL static void
GIN_FN uint64_t clock_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
GIN_FN uint64_t cycles() { return clock_ns(); }
#endif

using Words = gin::Window<uint64_t>;

// The numbers of bench/kernels/src/lib.rs.
enum : uint32_t { START = 0, END = 1, WRONG = 2, PAYLOAD = 16, PAYLOAD_WORDS = 8, SOURCE = 32 };

struct Plan {
    uint64_t before, warm, timed, verify, limit_ns, stamps;

    GIN_FN gin::Deadline deadline() const { return gin::Deadline::after_ns(limit_ns); }
    GIN_FN void stamp(uint64_t number) const {
        if (stamps) reinterpret_cast<volatile uint64_t*>(stamps)[number] = cycles();
    }
    /// Calls `step` with the number of each round, until it returns false.
    template <class Step>
    GIN_FN void each(bool leads, volatile uint64_t* out, Step step) const {
        uint64_t first = before + warm, last = before + warm + timed;
        for (uint64_t round = before; round < last;) {
            if (leads && round == first) out[START] = clock_ns();
            if (leads && round >= first) stamp(round - first);
            round++;
            if (!step(round)) return;
        }
        if (leads) stamp(timed), out[END] = clock_ns();
    }
    /// Plays ping-pong.
    template <class Send, class Wait>
    GIN_FN void play(bool sends, bool leads, volatile uint64_t* out, Send send, Wait wait) const {
        uint64_t start = 2 * warm, last = 2 * (warm + timed);
        for (uint64_t half = 0; half < last; half++, sends = !sends) {
            if (leads && half == start) out[START] = clock_ns();
            if (leads && half >= start && half % 2 == 0) stamp((half - start) / 2);
            uint64_t round = before + half / 2 + 1;
            if (!(sends ? send(round) : wait(round))) return;
        }
        if (leads) stamp(timed), out[END] = clock_ns();
    }
};
static_assert(sizeof(Plan) == 48, "as in Rust");

GIN_FN uint64_t payload(uint64_t round, uint64_t index) { return (round * 0x9e3779b97f4a7c15) ^ index; }

GIN_FN bool succeeded(const gin::Comm& comm, gin::Fault fault) {
    comm.report(fault);
    return !fault;
}

GIN_FN void count(uint64_t* out, uint64_t wrong) {
    if (wrong) gin::detail::red_add_relaxed_gpu(reinterpret_cast<uint64_t>(out + WRONG), wrong);
}

template <class Coop>
GIN_FN void write(Coop coop, const Words& window, uint64_t words, uint64_t round) {
    for (uint64_t i = coop.thread_rank(); i < words; i += coop.size()) {
        *window.localPointer(SOURCE + i) = payload(round, i);
    }
}

template <class Coop>
GIN_FN void check(Coop coop, const Words& window, uint64_t words, uint64_t round, uint64_t* out) {
    for (uint64_t i = coop.thread_rank(); i < words; i += coop.size()) {
        count(out, *const_cast<volatile uint64_t*>(window.localPointer(PAYLOAD + i)) != payload(round, i));
    }
}

/// A put of 64 bytes with a signal.
template <class Backend, class Coop>
GIN_FN gin::Fault put(const gin::Gin<Backend>& net, const gin::Team& world, const Words& window, Coop coop) {
    return net.put(world, world.after(1), window, 8 * PAYLOAD, window, 8 * SOURCE, 8 * PAYLOAD_WORDS,
                   gin::StrongSignalInc{0}, gin::None{}, coop, gin::Scope::Thread, gin::Scope::System);
}

template <class Coop>
GIN_FN void ping(Coop coop, const gin::Comm& comm, const Words& window, const Plan& plan, uint64_t* out) {
    gin::Gin<> net(comm, 0, plan.deadline());
    gin::Team world = comm.world();
    plan.play(
        world.rank == 0, coop.thread_rank() == 0, out,
        [&](uint64_t round) {
            if (plan.verify) write(coop, window, PAYLOAD_WORDS, round);
            return succeeded(comm, put(net, world, window, coop));
        },
        [&](uint64_t round) {
            if (!succeeded(comm, net.waitSignal(coop, 0, round))) return false;
            if (plan.verify) check(coop, window, PAYLOAD_WORDS, round, out);
            return true;
        });
}

BENCH_KERNEL bench_lsa_ping_thread(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    if (gin::thread_in_block() == 0) ping(gin::CoopThread{}, comm, window, plan, out);
}

BENCH_KERNEL bench_lsa_ping_warp(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    ping(gin::CoopWarp{}, comm, window, plan, out);
}

BENCH_KERNEL bench_proxy_ping(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::Gin<gin::Proxy> net(comm, 0, plan.deadline());
    gin::Team world = comm.world();
    gin::CoopThread one;
    plan.play(
        world.rank == 0, true, out,
        [&](uint64_t round) {
            gin::Fault fault = net.putValue(world, world.after(1), window, 0, payload(round, 0),
                                            gin::StrongSignalInc{0}, one, gin::Scope::Thread, gin::Scope::System);
            return succeeded(comm, fault);
        },
        [&](uint64_t round) {
            if (!succeeded(comm, net.waitSignal(one, 0, round))) return false;
            if (plan.verify) count(out, *const_cast<volatile uint64_t*>(window.localPointer()) != payload(round, 0));
            return true;
        });
}

/// Makes one operation in each round. Afterwards waits for the peer's operations, and checks the words that arrived.
template <class Backend, class Coop, class Issue>
GIN_FN void raise(Coop coop, const gin::Comm& comm, const Words& window, const Plan& plan, uint64_t* out,
                  uint64_t words, Issue issue) {
    gin::Gin<Backend> net(comm, 0, plan.deadline());
    uint64_t last = plan.before + plan.warm + plan.timed;
    write(coop, window, words, last);
    (void)coop.sync();
    plan.each(coop.thread_rank() == 0, out, [&](uint64_t) { return succeeded(comm, issue(net, payload(last, 0))); });
    gin::Fault fault = net.waitSignal(coop, 0, last);
    if (!fault) fault = net.flush(coop);
    if (succeeded(comm, fault)) check(coop, window, words, last, out);
}

BENCH_KERNEL bench_issue_put_thread(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::CoopThread coop;
    raise<gin::Any>(coop, comm, window, plan, out, PAYLOAD_WORDS,
                    [&](const gin::Gin<>& net, uint64_t) { return put(net, comm.world(), window, coop); });
}

BENCH_KERNEL bench_issue_put_warp(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::CoopWarp coop;
    raise<gin::Any>(coop, comm, window, plan, out, PAYLOAD_WORDS,
                    [&](const gin::Gin<>& net, uint64_t) { return put(net, comm.world(), window, coop); });
}

BENCH_KERNEL bench_issue_value(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::CoopThread coop;
    raise<gin::Any>(coop, comm, window, plan, out, 1, [&](const gin::Gin<>& net, uint64_t value) {
        gin::Team world = comm.world();
        return net.putValue(world, world.after(1), window, 8 * PAYLOAD, value, gin::StrongSignalInc{0}, coop);
    });
}

BENCH_KERNEL bench_issue_signal(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::CoopThread coop;
    raise<gin::Any>(coop, comm, window, plan, out, 0, [&](const gin::Gin<>& net, uint64_t) {
        gin::Team world = comm.world();
        return net.signal(world, world.after(1), gin::StrongSignalInc{0}, coop);
    });
}

BENCH_KERNEL bench_issue_proxy(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    gin::CoopThread coop;
    raise<gin::Proxy>(coop, comm, window, plan, out, PAYLOAD_WORDS, [&](const gin::Gin<gin::Proxy>& net, uint64_t) {
        return put(net, comm.world(), window, coop);
    });
}

/// Reads in each round, and compares the value with the first one.
template <class Read>
GIN_FN void reads(const gin::Comm& comm, const Plan& plan, uint64_t* out, Read read) {
    gin::Gin<> net(comm, 0, plan.deadline());
    uint64_t first = read(net).value, wrong = 0;
    plan.each(true, out, [&](uint64_t) {
        gin::Result<uint64_t> value = read(net);
        wrong += value.value != first;
        return succeeded(comm, value.fault);
    });
    count(out, wrong);
}

BENCH_KERNEL bench_read_signal(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    reads(comm, plan, out, [](const gin::Gin<>& net) { return net.readSignal(0); });
}

BENCH_KERNEL bench_read_counter(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    reads(comm, plan, out, [](const gin::Gin<>& net) { return net.readCounter(0); });
}

/// Makes one call in each round.
template <class Call>
GIN_FN void calls(const gin::Comm& comm, const Plan& plan, uint64_t* out, Call call) {
    gin::Gin<> net(comm, 0, plan.deadline());
    plan.each(true, out, [&](uint64_t) { return succeeded(comm, call(net)); });
}

BENCH_KERNEL bench_call_get(gin::Comm comm, Words window, Plan plan, uint64_t* out) {
    calls(comm, plan, out, [&](const gin::Gin<>& net) {
        gin::Team world = comm.world();
        return net.get(world, world.after(1), window, 8 * PAYLOAD, window, 8 * SOURCE, 8 * PAYLOAD_WORDS);
    });
}

BENCH_KERNEL bench_call_flush(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    calls(comm, plan, out, [](const gin::Gin<>& net) { return net.flush(gin::CoopThread{}); });
}

BENCH_KERNEL bench_call_follow(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    calls(comm, plan, out, [&](const gin::Gin<>& net) {
        gin::CoopThread one;
        gin::Fault fault = net.signal(comm.world(), comm.rank(), gin::StrongSignalInc{1}, one);
        return fault ? fault : net.waitSignalFollowShadow(one, 1, 1);
    });
}

BENCH_KERNEL bench_call_reset(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    calls(comm, plan, out, [](const gin::Gin<>& net) { return net.resetCounter(0); });
}

BENCH_KERNEL bench_call_barrier(gin::Comm comm, Words, Plan plan, uint64_t* out) {
    calls(comm, plan, out, [](const gin::Gin<>& net) {
        return net.barrier(gin::CoopThread{}, gin::BarrierTeam::World, 0, gin::Fence::None);
    });
}
