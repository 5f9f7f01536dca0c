// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two ranks, as threads, put and check on the virtual GPU; the kernel is in C. The program's signal handlers stay.

#define _POSIX_C_SOURCE 200809L

#include "gin.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The device functions that this kernel calls. C++ kernels include gin_device.cuh instead.
extern uint64_t gin_put(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t peer,
                        uint32_t counter, uint64_t to, uint64_t to_offset, uint64_t from, uint64_t from_offset,
                        uint64_t bytes, uint64_t signal_window, uint64_t signal, uint64_t amount, uint64_t deadline);
extern uint64_t gin_wait_signal(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop,
                                uint64_t signal_window, uint64_t signal, uint64_t least, uint32_t bits,
                                uint64_t deadline);
extern uint64_t gin_flush(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint64_t deadline);
extern void gin_report(uint64_t comm, uint64_t fault);

enum { RANKS = 2, WORDS = 1000, BLOCK = 2, SIGNAL = 1 << 10, ABI_MISMATCH = 22, SIGNALS = 32 };

#define CHECK(call)                                                                                      \
    do {                                                                                                 \
        gin_status_t status = (call);                                                                    \
        if (status != GIN_OK) {                                                                          \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, gin_status_name(status), gin_last_error());   \
            exit(1);                                                                                     \
        }                                                                                                \
    } while (0)

// Sends the own window to the next rank, and waits for the one before.
static void pass(const void *const *params) {
    gin_device_comm_t comm;
    gin_device_window_t to, from;
    memcpy(&comm, params[0], sizeof comm);
    memcpy(&to, params[1], sizeof to);
    memcpy(&from, params[2], sizeof from);
    uint64_t deadline = 20000000000ull;
    uint32_t next = (comm.rank + 1) % comm.ranks;
    uint64_t fault =
        gin_put(comm.copy, 0, SIGNAL, BLOCK, next, 0, to.data, 0, from.data, 0, 4 * WORDS, 0, 3, 1, deadline);
    if (fault == 0) fault = gin_wait_signal(comm.copy, 0, 0, BLOCK, 0, 3, 1, 64, deadline);
    gin_report(comm.copy, fault);
    // A function compares itself with the host.
    for (int by = -1; by <= 1; by += 2) {
        gin_device_comm_t other = comm;
        other.abi = comm.abi + (uint32_t)by;
        assert((gin_flush((uintptr_t)&other, 0, 0, BLOCK, deadline) & 63) == ABI_MISMATCH);
    }
}

static gin_window_t stale;

// The program carries out the requests of its kernels.
static int manual;

static void *rank_main(void *argument) {
    gin_job_t job = *(gin_job_t *)argument;
    uint32_t rank, ranks, kind;
    CHECK(gin_job_rank(job, &rank, &ranks));
    CHECK(gin_job_device(job, &kind));
    assert(ranks == RANKS && kind == GIN_DEVICE_VIRTUAL);

    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    gin_comm_t comm;
    CHECK(gin_comm_create(job, &requirements, &comm));
    gin_window_t to, from;
    CHECK(gin_window_alloc(comm, 4 * WORDS, 0, &to));
    // Memory of the program itself.
    uint32_t *own = malloc(4 * WORDS);
    for (uint32_t i = 0; i < WORDS; i++) own[i] = 1000 * rank + i;
    CHECK(gin_window_register(comm, own, 4 * WORDS, 0, &from));
    uint64_t bytes;
    void *memory;
    CHECK(gin_window_memory(from, &memory, &bytes));
    assert(memory == (void *)own && bytes == 4 * WORDS);

    gin_device_comm_t device;
    gin_device_window_t device_to, device_from;
    CHECK(gin_comm_device(comm, &device));
    CHECK(gin_window_device(to, &device_to));
    CHECK(gin_window_device(from, &device_from));
    assert(device.rank == rank && device.ranks == RANKS && device.abi == GIN_ABI_VERSION);

    size_t sizes[3] = {sizeof device, sizeof device_to, sizeof device_from};
    gin_kernel_t kernel;
    CHECK(gin_kernel_of_function(pass, "pass", sizes, 3, &kernel));
    gin_stream_t stream;
    CHECK(gin_stream_create(job, &stream));
    gin_arg_t arguments[3] = {
        {&device, sizeof device}, {&device_to, sizeof device_to}, {&device_from, sizeof device_from}};
    gin_shape_t shape = {{1, 1, 1}, {64, 1, 1}, 0, 1};
    assert(gin_launch(stream, kernel, &shape, arguments, 2) == GIN_ERROR_ARGUMENT);
    CHECK(gin_launch(stream, kernel, &shape, arguments, 3));
    gin_stats_t stats;
    uint32_t worked, often = 0;
    if (manual)
        for (stats.finished = 0; stats.finished == 0; often += worked) {
            CHECK(gin_comm_progress(comm, &worked));
            CHECK(gin_comm_stats(comm, 0, &stats));
        }
    assert(!manual || often > 0);
    CHECK(gin_comm_progress(comm, NULL));
    CHECK(gin_stream_synchronize(stream));
    CHECK(gin_comm_check(comm));

    uint32_t arrived[WORDS];
    CHECK(gin_window_read(to, 0, arrived, sizeof arrived));
    for (uint32_t i = 0; i < WORDS; i++) assert(arrived[i] == 1000 * (1 - rank) + i);
    assert(gin_window_read(to, 4, arrived, sizeof arrived) == GIN_ERROR_ARGUMENT);
    assert(strstr(gin_last_error(), "4004"));

    CHECK(gin_comm_stats(comm, 0, &stats));
    assert(gin_comm_stats(comm, 1, &stats) == GIN_ERROR_ARGUMENT);

    CHECK(gin_window_close(from));
    free(own);
    CHECK(gin_stream_close(stream));
    CHECK(gin_kernel_close(kernel));
    CHECK(gin_comm_destroy(comm));
    // The window outlives its communicator as a handle that can only be closed.
    assert(gin_window_read(to, 0, arrived, 4) == GIN_ERROR_STATE);
    CHECK(gin_window_close(to));
    assert(gin_window_close(to) == GIN_ERROR_HANDLE && strstr(gin_last_error(), "closed"));
    if (rank == 0) stale = to;

    // An abort of one rank ends both, with text.
    CHECK(gin_comm_create(job, &requirements, &comm));
    if (rank == 1) CHECK(gin_comm_abort(comm));
    gin_fault_t fault;
    uint32_t found = 0;
    while (!found) CHECK(gin_comm_fault(comm, &found, &fault));
    assert(fault.rank == 1 && strstr(fault.text, "aborted"));
    assert(gin_comm_check(comm) == GIN_ERROR_ENDED && strstr(gin_last_error(), "aborted"));
    CHECK(gin_comm_destroy(comm));
    CHECK(gin_job_barrier(job));
    CHECK(gin_job_close(job));
    return NULL;
}

static volatile sig_atomic_t faults;

static void on_fault(int number) { faults = number; }

// Reads what happens on each signal, and which this thread blocks.
static void read_signals(struct sigaction actions[SIGNALS], sigset_t *blocked) {
    for (int number = 1; number < SIGNALS; number++) assert(sigaction(number, NULL, &actions[number]) == 0);
    assert(pthread_sigmask(SIG_SETMASK, NULL, blocked) == 0);
}

// The ranks meet over libfabric, if there is one.
static int over_libfabric(void) {
    gin_config_t config = GIN_CONFIG_INIT;
    gin_job_t jobs[RANKS];
    config.device = GIN_DEVICE_VIRTUAL;
    config.network = GIN_NETWORK_FABRIC;
    config.network_only = 1;
    gin_status_t status = gin_job_local(&config, RANKS, jobs);
    if (status != GIN_OK) {
        printf("%s: %s\n", gin_status_name(status), gin_last_error());
        return 0;
    }
    pthread_t threads[RANKS];
    for (int i = 0; i < RANKS; i++) assert(pthread_create(&threads[i], NULL, rank_main, &jobs[i]) == 0);
    for (int i = 0; i < RANKS; i++) assert(pthread_join(threads[i], NULL) == 0);
    puts("passed over libfabric");
    return 0;
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "fabric") == 0) return over_libfabric();
    static struct sigaction before[SIGNALS], after[SIGNALS];
    sigset_t blocked_before, blocked_after;
    signal(SIGQUIT, SIG_IGN);
    signal(SIGSEGV, on_fault);
    read_signals(before, &blocked_before);
    assert(gin_abi() == GIN_ABI_VERSION && gin_check_abi(GIN_ABI_VERSION) == GIN_OK);
    assert(gin_check_abi(1) == GIN_ERROR_ABI && strstr(gin_last_error(), "compile again"));
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = GIN_DEVICE_VIRTUAL;
    gin_job_t jobs[RANKS];
    // A thread for each communicator, one for all, none.
    const uint32_t progress[] = {0, 1, GIN_PROGRESS_MANUAL};
    for (int way = 0; way < 3; way++) {
        config.progress_threads = progress[way];
        config.network_only = manual = way == 2;
        CHECK(gin_job_local(&config, RANKS, jobs));
        pthread_t threads[RANKS];
        for (int i = 0; i < RANKS; i++) assert(pthread_create(&threads[i], NULL, rank_main, &jobs[i]) == 0);
        for (int i = 0; i < RANKS; i++) assert(pthread_join(threads[i], NULL) == 0);
    }
    config.progress_threads = 257;
    assert(gin_job_local(&config, 1, jobs) == GIN_ERROR_ARGUMENT && strstr(gin_last_error(), "0 to 256, and"));
    config.progress_threads = config.network_only = 0;

    // Wrong handles and arguments are errors with text.
    gin_comm_t comm = GIN_NULL;
    assert(gin_comm_abort(comm) == GIN_ERROR_HANDLE && strstr(gin_last_error(), "null"));
    comm.id = stale.id;
    assert(gin_comm_abort(comm) == GIN_ERROR_HANDLE && strstr(gin_last_error(), "is a window, not a communicator"));
    assert(gin_comm_progress(comm, NULL) == GIN_ERROR_HANDLE);
    assert(gin_job_local(NULL, 1, jobs) == GIN_ERROR_ARGUMENT);
    config.abi++;
    assert(gin_job_local(&config, 1, jobs) == GIN_ERROR_ABI);
    gin_config_t env = GIN_CONFIG_INIT;
    assert(gin_job_from_env(&env, jobs) == GIN_ERROR_NO_JOB);

    read_signals(after, &blocked_after);
    for (int number = 1; number < SIGNALS; number++) {
        assert(sigismember(&blocked_before, number) == sigismember(&blocked_after, number));
        if (number == SIGSEGV) continue;
        assert(before[number].sa_handler == after[number].sa_handler);
        assert(before[number].sa_flags == after[number].sa_flags);
    }
    // The virtual GPU passes on what is no overflow of a kernel's stack.
    raise(SIGSEGV);
    assert(faults == SIGSEGV);
    printf("gin %s: passed\n", gin_version());
    return 0;
}
