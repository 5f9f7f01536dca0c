// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Inputs and checks of the example, and its job: one thread for each rank.

#pragma once

#include "gin.hpp"

#include <cstdio>
#include <exception>
#include <thread>

constexpr uint64_t ELEMENTS = 1000;
constexpr uint32_t BLOCKS = 4, THREADS = 64;

inline float value(uint32_t from, uint32_t to, uint64_t i) { return float(1000 * from + 100 * to + i % 97); }

inline std::vector<float> inputs(uint32_t rank, uint32_t ranks) {
    std::vector<float> all;
    for (uint32_t to = 0; to < ranks; to++)
        for (uint64_t i = 0; i < ELEMENTS; i++) all.push_back(value(rank, to, i));
    return all;
}

inline void expect(bool right, const char* what, uint64_t i) {
    if (!right) throw std::runtime_error(std::string(what) + ": element " + std::to_string(i) + " is wrong");
}

inline void check_all_to_all(const std::vector<float>& recv, uint32_t rank, uint32_t ranks) {
    for (uint64_t i = 0; i < ranks * ELEMENTS; i++)
        expect(recv[i] == value(uint32_t(i / ELEMENTS), rank, i % ELEMENTS), "all_to_all", i);
}

inline void check_ring(const std::vector<float>& sums, uint32_t ranks) {
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        float sum = 0;
        for (uint32_t rank = 0; rank < ranks; rank++) sum += value(rank, 0, i);
        expect(sums[i] == sum, "ring_sum", i);
    }
}

/// Runs `body(job)` as each rank, in a thread. An error of one rank ends the others. Returns the exit status.
template <class Body>
int run(uint32_t ranks, const gin_config_t& config, Body body) {
    std::vector<gin::Job> jobs = gin::Job::local(ranks, config);
    std::vector<std::thread> threads;
    std::vector<int> failed(ranks, 0);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        threads.emplace_back([&, rank] {
            try {
                body(jobs[rank]);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
                failed[rank] = 1;
                gin_job_abort(jobs[rank].raw());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (int bad : failed)
        if (bad) return 1;
    std::printf("passed: %u ranks\n", ranks);
    return 0;
}

/// Runs both kernels and checks their results. `launch` launches a kernel with five arguments, and waits for it.
template <class Launch>
void both(const gin::Job& job, Launch launch) {
    uint32_t rank = job.rank(), ranks = job.ranks();
    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    requirements.world_barriers = BLOCKS;
    gin::Communicator comm(job, requirements);
    gin::HostWindow<float> recv(comm, ranks * ELEMENTS), send(comm, ranks * ELEMENTS), sums(comm, ELEMENTS);

    send.write(inputs(rank, ranks));
    job.barrier();
    launch("all_to_all", BLOCKS, comm, recv, send);
    comm.check_fault();
    check_all_to_all(recv.read(), rank, ranks);

    std::vector<float> own = inputs(rank, ranks);
    own.resize(ELEMENTS);
    recv.write(own, rank * ELEMENTS);
    job.barrier();
    launch("ring_sum", 1, comm, recv, sums);
    comm.check_fault();
    check_ring(sums.read(), ranks);

    job.barrier();
    recv.close();
    send.close();
    sums.close();
    comm.destroy();
}
