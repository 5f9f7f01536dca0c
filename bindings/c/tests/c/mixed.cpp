// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Ranks with kernels in C++ and ranks with kernels in Rust meet in one ring: each round of `ring_round` of gin's
// examples, in C++ on even ranks. Puts and signals that inline are waited for in Rust, and the other way round.

#include "ranks.hpp"
#include "gin_device.cuh"

#include <cstring>
#include <string>

using Floats = gin::Window<float>;

// As examples/kernels/src/ring_round.rs.
static void ring_round(gin::Comm comm, Floats recv, Floats send, uint64_t len, uint64_t round, gin::Deadline deadline) {
    gin::CoopCta cta;
    gin::Gin<> net(comm, 0, deadline);
    gin::Team world = comm.world();
    gin::Fault fault = net.waitSignal(cta, 1, round - 1);
    if (!fault) {
        fault = net.put(world, world.after(1), recv, 0, send, 0, len * sizeof(float), gin::StrongSignalInc{0},
                        gin::CounterInc{0}, cta);
    }
    if (!fault) fault = net.waitSignal(cta, 0, round);
    if (!fault) fault = net.waitCounter(cta, 0, round);
    if (fault) return comm.report(fault);
    for (uint64_t i = cta.thread_rank(); i < len; i += cta.size()) *send.localPointer(i) += *recv.localPointer(i);
    comm.report(net.signal(world, world.after(world.nRanks - 1), gin::StrongSignalInc{1}, cta));
}

static float value(uint32_t rank, uint64_t i) { return float(rank + 1 + i % 5); }

// A kernel in Rust is not launched with argument `which`, which is closed. `arguments` are a communicator and windows.
static void refused(const gin::Stream& stream, const gin::Kernel& kernel, const gin_arg_t* arguments, int which) {
    gin_shape_t shape = gin::cooperative(1, 32);
    gin_status_t status = gin_launch(stream.raw(), kernel.raw(), &shape, arguments, 3);
    std::string text = gin_last_error(), argument = "argument " + std::to_string(which) + " is no ";
    if (status != GIN_ERROR_HANDLE || text.find(argument) == text.npos) throw std::runtime_error(text);
}

static void rank(const gin::Job& job) {
    const uint64_t lengths[] = {64, 63, 1};
    const uint64_t max = 64;
    uint32_t rank = job.rank(), ranks = job.ranks();
    gin::Communicator comm(job);
    gin::HostWindow<float> recv(comm, max), send(comm, max);
    bool cpp = rank % 2 == 0;
    gin::Kernel kernel = cpp ? gin::Kernel::of<ring_round>("ring_round_cpp") : gin::Module(job).kernel("ring_round");
    gin::Stream stream(job);
    std::vector<float> own(max);
    // The values of all ranks' `send`, as they should be.
    std::vector<std::vector<float>> all(ranks, own);
    for (uint32_t r = 0; r < ranks; r++)
        for (uint64_t i = 0; i < max; i++) all[r][i] = value(r, i);
    send.write(all[rank]);
    job.barrier();
    uint64_t round = 0;
    for (uint64_t len : lengths) {
        round++;
        stream.launch(kernel, gin::cooperative(1, 32), comm.device(), recv.device(), send.device(), len, round,
                      gin::Deadline::after_ms(20000));
        std::vector<std::vector<float>> before = all;
        for (uint32_t r = 0; r < ranks; r++)
            for (uint64_t i = 0; i < len; i++) all[r][i] += before[(r + ranks - 1) % ranks][i];
    }
    stream.synchronize();
    comm.check_fault();
    if (send.read() != all[rank]) throw std::runtime_error("wrong sums");
    job.barrier();
    gin_device_comm_t device = comm.device();
    gin_device_window_t to = recv.device(), from = send.device();
    const gin_arg_t arguments[] = {{&device, sizeof device}, {&to, sizeof to}, {&from, sizeof from}};
    // `gin::Stream::launch` refuses closed ones for kernels in C++, too.
    auto launch_is_refused = [&] {
        try {
            stream.launch(kernel, gin::cooperative(1, 32), device, to, from, uint64_t(0), round, gin::Deadline::none());
        } catch (const gin::Error& error) {
            if (error.status() == GIN_ERROR_HANDLE) return;
        }
        throw std::runtime_error("a closed argument is launched");
    };
    recv.close();
    if (!cpp) refused(stream, kernel, arguments, 1);
    launch_is_refused();
    send.close();
    comm.destroy();
    if (!cpp) refused(stream, kernel, arguments, 0);
    launch_is_refused();
}

int main(int count, char** words) try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    config.network_only = count > 1 && std::strcmp(words[1], "network") == 0;
    int failed = on_ranks(4, config, rank);
    if (failed == 0) std::printf("passed\n");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
