// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   unwind kernel|window|barrier
//
// Rank 0 throws while rank 1 waits for it: in a kernel without a deadline, in a collective call of the communicator, or
// in one of the job. The destructors of rank 0 wait for nobody, and rank 1 gets an error. The ranks are threads, or
// processes if a launcher has started this one.

#include "gin.hpp"
#include "gin_device.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

// Waits for a signal that nobody raises.
static void wait(gin::Comm comm) {
    gin::CoopThread one;
    comm.report(gin::Gin<>(comm, 0, gin::Deadline::none()).waitSignal(one, 0, 1));
}

static void rank(const gin::Job& job, const char* where) {
    gin::Communicator comm(job);
    gin::HostWindow<int> first(comm, 4);
    std::vector<gin::HostWindow<int>> windows;
    windows.emplace_back(comm, 8);
    gin::HostWindow<int> last = std::move(first);
    gin::Stream stream(job);
    gin::Kernel kernel = gin::Kernel::of<wait>("wait");
    job.barrier();
    if (std::strcmp(where, "kernel") == 0) stream.launch(kernel, gin::cooperative(1, 1), comm.device());
    if (job.rank() == 0) throw std::runtime_error("rank 0 gives up");
    if (std::strcmp(where, "window") == 0) windows.emplace_back(comm, 16);
    if (std::strcmp(where, "barrier") == 0) job.barrier();
    stream.synchronize();
    comm.check_fault();
}

// Returns 0 if the rank ends as it should. It leaves the job.
static int ends(gin::Job own, const char* where) {
    uint32_t number = own.rank();
    try {
        gin::Job job = std::move(own);
        rank(job, where);
        std::fprintf(stderr, "rank %u: no error\n", number);
    } catch (const gin::Error& error) {
        bool ended = error.status() == GIN_ERROR_ENDED || error.status() == GIN_ERROR_BOOTSTRAP;
        std::printf("rank %u: %s\n", number, error.what());
        return number == 0 || !ended;
    } catch (const std::runtime_error& error) {
        return number != 0 || std::strcmp(error.what(), "rank 0 gives up") != 0;
    }
    return 1;
}

int main(int count, char** words) try {
    const char* where = count > 1 ? words[1] : "kernel";
    alarm(60);  // A rank that waited for ever would end by this.
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    int failed[2] = {0, 0};
    if (std::getenv("GIN_RANK") != nullptr) {
        failed[0] = ends(gin::Job::from_env(config), where);
    } else {
        std::vector<gin::Job> jobs = gin::Job::local(2, config);
        std::thread other([&] { failed[1] = ends(std::move(jobs[1]), where); });
        failed[0] = ends(std::move(jobs[0]), where);
        other.join();
    }
    if (failed[0] || failed[1]) return 1;
    std::printf("passed\n");
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
