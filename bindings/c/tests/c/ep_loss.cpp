// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   ep_loss [ID]
//
// A rank of expert parallelism is killed. The others learn of it by values, and continue with a new group. Three
// processes. Then rank 0 starts this program with the id of the job, which it joins as rank 2.

#include "ep.hpp"

#include <csignal>
#include <spawn.h>
#include <sys/wait.h>

/// Exchanges tokens of a group, which return as they are. Returns the report of the kernels.
static std::optional<gin_ep_report_t> exchange(const gin::Job& job, gin::ep::Group& group) {
    Elements<uint16_t> rows(ROOM * HIDDEN), output(ROOM * HIDDEN);
    Elements<int32_t> ids(ROOM * TOPK);
    gin::Stream stream(job);
    gin::ep::Slot slot(group, 0);
    gin_ep_tokens_t tokens = gin::ep::tokens();
    tokens.count = ROOM, tokens.rows = rows.memory(), tokens.ids = ids.memory();
    for (uint32_t i = 0; i < ROOM * HIDDEN; i++) rows.data()[i] = Bf16::narrow(float(i % 8));
    slot.exchange(stream, tokens);
    slot.combine(stream, gin::ep::combine(output.memory()));
    stream.synchronize();
    slot.close();
    std::optional<gin_ep_report_t> report = group.status();
    HOLDS(report || std::memcmp(output.data(), rows.data(), ROOM * HIDDEN * 2) == 0);
    return report;
}

/// Exchanges tokens of all ranks of a job.
static void serve(const gin::Job& job, const gin_ep_config_t& sizes) {
    gin::Communicator comm(job);
    gin::ep::Group group(comm, sizes);
    HOLDS(!exchange(job, group));
    group.destroy();
    comm.destroy();
}

/// Starts this program with the id of a job.
static pid_t start(char* program, gin_unique_id_t id) {
    char* arguments[] = {program, id.text, nullptr};
    pid_t process;
    HOLDS(posix_spawn(&process, program, nullptr, nullptr, arguments, environ) == 0);
    return process;
}

int main(int count, char** arguments) try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    gin_ep_config_t sizes = gin::ep::config(EXPERTS, HIDDEN, TOPK);
    // Only the loss ends the waits.
    sizes.tokens = ROOM, sizes.deadline_ms = GIN_FOREVER;
    if (count > 1) {
        gin_unique_id_t id{};
        std::strncpy(id.text, arguments[1], sizeof id.text - 1);
        serve(gin::Job::join_running(id, 2, 3, config), sizes);
        return 0;
    }
    gin::Job job = gin::Job::from_env(config), remaining;
    {
        gin::Communicator comm(job);
        gin::ep::Group group(comm, sizes);
        HOLDS(!exchange(job, group));
        job.barrier();
        if (job.rank() == 1) raise(SIGKILL);
        std::optional<gin_ep_report_t> report = exchange(job, group);
        HOLDS(report && report->code == GIN_EP_STOPPED);
        HOLDS(gin_comm_check(comm.raw()) == GIN_ERROR_ENDED);
        HOLDS(std::strstr(gin_last_error(), "rank 1") != nullptr);
        HOLDS(job.lost() == std::vector<uint32_t>{1});
        // It waits for nobody.
        group.destroy();
        gin_ep_group_t other;
        HOLDS(gin_ep_group_create(comm.raw(), &sizes, &other) == GIN_ERROR_BOOTSTRAP);
        remaining = job.without(job.lost(), 60000);
    }
    serve(remaining, sizes);
    gin_job_t none;
    uint32_t gap = 3;
    HOLDS(gin_job_grow(remaining.raw(), &gap, 1, 100, &none) == GIN_ERROR_ARGUMENT);
    int status = 0;
    pid_t process = remaining.rank() == 0 ? start(arguments[0], remaining.id()) : 0;
    serve(remaining.grow({2}, 60000), sizes);
    HOLDS(!process || (waitpid(process, &status, 0) == process && status == 0));
    // The old job goes on.
    remaining.barrier();
    std::printf("passed: %u ranks remain\n", remaining.ranks());
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
