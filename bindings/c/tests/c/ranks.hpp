// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Ranks of tests that are threads of one process.

#pragma once

#include "gin.hpp"

#include <atomic>
#include <cstdio>
#include <functional>
#include <thread>

/// Runs `body` for each rank of a job. A rank that throws says why, and ends the job. Returns 1 if one did, else 0.
inline int on_ranks(uint32_t ranks, const gin_config_t& config, const std::function<void(const gin::Job&)>& body) {
    std::vector<gin::Job> jobs = gin::Job::local(ranks, config);
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (const gin::Job& job : jobs) {
        threads.emplace_back([&failed, &job, &body] {
            try {
                body(job);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "rank %u: %s\n", job.rank(), error.what());
                failed = 1;
                gin_job_abort(job.raw());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return failed;
}
