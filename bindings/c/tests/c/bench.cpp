// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of `gin bench capi` in C++ on virtual GPUs: they move what they say, and mark their times.

#include "ranks.hpp"
#include "../../../../bench/kernels/capi.cu"

static void rank(const gin::Job& job) {
    gin_requirements_t requirements = gin::default_requirements();
    requirements.world_barriers = 1;
    gin::Communicator comm(job, requirements);
    gin::HostWindow<uint64_t> window(comm, 64);
    gin::Stream stream(job);
    const std::pair<gin::Kernel, uint32_t> kernels[] = {
        {gin::Kernel::of<bench_lsa_ping_thread>("bench_lsa_ping_thread"), 32},
        {gin::Kernel::of<bench_lsa_ping_warp>("bench_lsa_ping_warp"), 32},
        {gin::Kernel::of<bench_proxy_ping>("bench_proxy_ping"), 1},
        {gin::Kernel::of<bench_issue_put_thread>("bench_issue_put_thread"), 1},
        {gin::Kernel::of<bench_issue_put_warp>("bench_issue_put_warp"), 32},
        {gin::Kernel::of<bench_issue_value>("bench_issue_value"), 1},
        {gin::Kernel::of<bench_issue_signal>("bench_issue_signal"), 1},
        {gin::Kernel::of<bench_issue_proxy>("bench_issue_proxy"), 1},
        {gin::Kernel::of<bench_read_signal>("bench_read_signal"), 1},
        {gin::Kernel::of<bench_read_counter>("bench_read_counter"), 1},
        {gin::Kernel::of<bench_call_get>("bench_call_get"), 1},
        {gin::Kernel::of<bench_call_flush>("bench_call_flush"), 1},
        {gin::Kernel::of<bench_call_follow>("bench_call_follow"), 1},
        {gin::Kernel::of<bench_call_reset>("bench_call_reset"), 1},
        {gin::Kernel::of<bench_call_barrier>("bench_call_barrier"), 1},
    };
    const uint64_t rounds = 5;
    uint64_t before = 0;
    for (const auto& [kernel, threads] : kernels) {
        uint64_t marks[4] = {}, stamps[rounds + 1] = {};
        Plan plan{before, 1, rounds, 1, 10000000000, reinterpret_cast<uint64_t>(stamps)};
        before += 1 + rounds;
        job.barrier();
        uint64_t* out = marks;
        stream.launch(kernel, gin::cooperative(1, threads), comm.device(), window.device(), plan, out);
        stream.synchronize();
        comm.check_fault();
        bool timed = marks[0] != 0 && marks[1] >= marks[0];
        for (uint64_t i = 0; i < rounds; i++) timed = timed && stamps[i] != 0 && stamps[i + 1] >= stamps[i];
        std::string name = "kernel " + std::to_string(before / (1 + rounds));
        if (!timed || marks[2] != 0) throw std::runtime_error(name + " is wrong");
    }
    job.barrier();
    window.close();
    comm.destroy();
}

int main() try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    int failed = on_ranks(2, config, rank);
    if (failed == 0) std::printf("passed\n");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
