// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two processes form a job over the program's own all-gather, a pair of pipes; then a child of a fork is refused.

#define _POSIX_C_SOURCE 200809L

#include "gin.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct pipes {
    uint32_t rank;
    int in, out, calls;
};

// All parts are short, so a pipe takes a whole one.
static int all_gather(void *user, const void *own, size_t bytes, void *all) {
    struct pipes *pipes = user;
    char *to = all;
    pipes->calls++;
    if (write(pipes->out, own, bytes) != (ssize_t)bytes) return 1;
    memcpy(to + pipes->rank * bytes, own, bytes);
    to += (1 - pipes->rank) * bytes;
    for (size_t got = 0; got < bytes;) {
        ssize_t more = read(pipes->in, to + got, bytes - got);
        if (more <= 0) return 2;
        got += (size_t)more;
    }
    return 0;
}

static int fails(void *user, const void *own, size_t bytes, void *all) {
    (void)user, (void)own, (void)bytes, (void)all;
    return 7;
}

static int member(struct pipes pipes) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = GIN_DEVICE_VIRTUAL;
    config.address = "127.0.0.1";
    gin_job_t job;
    gin_status_t status = gin_job_over(&config, pipes.rank, 2, all_gather, &pipes, &job);
    if (status != GIN_OK) {
        fprintf(stderr, "rank %u: %s\n", pipes.rank, gin_last_error());
        return 1;
    }
    uint32_t own = 10 + pipes.rank, all[2] = {0, 0};
    assert(gin_job_all_gather(job, &own, sizeof own, all) == GIN_OK);
    assert(all[0] == 10 && all[1] == 11 && pipes.calls == 1);
    assert(gin_job_over(&config, 0, 2, fails, NULL, &job) == GIN_ERROR_BOOTSTRAP && strstr(gin_last_error(), "7"));
    config.address = "nowhere";
    assert(gin_job_over(&config, 0, 2, all_gather, &pipes, &job) == GIN_ERROR_ARGUMENT);

    // The same by an id, which rank 0 makes and the job hands out.
    config.address = "127.0.0.1";
    gin_unique_id_t id, ids[2];
    memset(&id, 0, sizeof id);
    if (pipes.rank == 0) assert(gin_unique_id_create(&config, &id) == GIN_OK);
    assert(gin_job_all_gather(job, &id, sizeof id, ids) == GIN_OK);
    gin_job_t second;
    uint32_t rank, ranks;
    assert(gin_job_join(&config, &ids[0], pipes.rank, 2, &second) == GIN_OK);
    assert(gin_job_rank(second, &rank, &ranks) == GIN_OK && rank == pipes.rank && ranks == 2);
    assert(gin_job_barrier(second) == GIN_OK && gin_job_close(second) == GIN_OK);
    assert(gin_job_join(&config, &ids[0], 0, 2, &second) == GIN_ERROR_ARGUMENT && strstr(gin_last_error(), "once"));
    memset(&id, 'x', sizeof id);
    assert(gin_job_join(&config, &id, 1, 2, &second) == GIN_ERROR_ARGUMENT && strstr(gin_last_error(), "no end"));
    id.text[5] = 0;
    assert(gin_job_join(&config, &id, 1, 2, &second) == GIN_ERROR_ARGUMENT && strstr(gin_last_error(), "gin1:"));

    // What the other process passes to its kernels is not for kernels of this one.
    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    gin_comm_t comm;
    gin_window_t window;
    struct {
        gin_device_comm_t comm;
        gin_device_window_t window;
    } mine, of_all[2];
    assert(gin_comm_create(job, &requirements, &comm) == GIN_OK);
    assert(gin_window_alloc(comm, 64, 0, &window) == GIN_OK);
    memset(&mine, 0, sizeof mine);
    assert(gin_comm_device(comm, &mine.comm) == GIN_OK && gin_window_device(window, &mine.window) == GIN_OK);
    assert(gin_job_all_gather(job, &mine, sizeof mine, of_all) == GIN_OK);
    for (uint32_t of = 0; of < 2; of++) {
        gin_status_t expected = of == pipes.rank ? GIN_OK : GIN_ERROR_HANDLE;
        assert(gin_device_comm_check(&of_all[of].comm) == expected);
        assert(expected == GIN_OK || strstr(gin_last_error(), "of another process"));
        assert(gin_device_window_check(&of_all[of].window) == expected);
    }
    assert(gin_device_comm_check(NULL) == GIN_ERROR_ARGUMENT);
    assert(gin_device_comm_check((const gin_device_comm_t *)((const char *)&mine.comm + 1)) == GIN_ERROR_ARGUMENT);
    assert(gin_window_close(window) == GIN_OK && gin_device_window_check(&mine.window) == GIN_ERROR_HANDLE);
    assert(gin_comm_destroy(comm) == GIN_OK && gin_device_comm_check(&mine.comm) == GIN_ERROR_HANDLE);

    // A process that uses gin forks: the child has none of gin's threads.
    pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        int refused = gin_job_barrier(job) == GIN_ERROR_FORK && strstr(gin_last_error(), "exec") != NULL;
        gin_stream_t stream;
        gin_module_t module;
        refused += gin_job_rank(job, &rank, &ranks) == GIN_ERROR_FORK;
        refused += gin_job_abort(job) == GIN_ERROR_FORK;
        refused += gin_unique_id_create(&config, &id) == GIN_ERROR_FORK;
        refused += gin_job_from_env(&config, &second) == GIN_ERROR_FORK;
        refused += gin_job_local(&config, 1, &second) == GIN_ERROR_FORK;
        refused += gin_comm_create(job, &requirements, &comm) == GIN_ERROR_FORK;
        refused += gin_stream_create(job, &stream) == GIN_ERROR_FORK;
        refused += gin_module_load(job, NULL, 0, &module) == GIN_ERROR_FORK;
        refused += gin_job_close(job) == GIN_ERROR_FORK;
        _exit(refused == 10 ? 0 : 1);
    }
    int outcome;
    assert(waitpid(child, &outcome, 0) == child && outcome == 0);
    assert(gin_job_barrier(job) == GIN_OK);
    return gin_job_close(job) != GIN_OK;
}

int main(void) {
    int forth[2], back[2];
    assert(pipe(forth) == 0 && pipe(back) == 0);
    // Before the first call of gin.
    pid_t other = fork();
    assert(other >= 0);
    if (other == 0) return member((struct pipes){1, forth[0], back[1], 0});
    int own = member((struct pipes){0, back[0], forth[1], 0}), outcome;
    assert(waitpid(other, &outcome, 0) == other);
    if (own == 0 && outcome == 0) printf("passed\n");
    return own;
}
