// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A C program against the installed library, whose kernel is pass.cpp:
//
//   put                      one rank on a virtual GPU, which puts into its own memory
//   gin launch -n 4 -- ./put four processes

#include "gin.h"

#include <stdio.h>

enum { ELEMENTS = 1024 };

gin_status_t make_pass(gin_kernel_t *kernel);

// Joins the launcher's job; without a launcher, makes one of a single rank.
static gin_status_t join(gin_job_t *job) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = GIN_DEVICE_VIRTUAL;
    gin_status_t status = gin_job_from_env(&config, job);
    return status == GIN_ERROR_NO_JOB ? gin_job_local(&config, 1, job) : status;
}

static gin_status_t launch(gin_job_t job, gin_comm_t comm, gin_window_t recv, gin_window_t send) {
    gin_kernel_t kernel;
    gin_stream_t stream;
    gin_device_comm_t device;
    gin_device_window_t device_recv, device_send;
    uint64_t bytes = sizeof(float) * ELEMENTS;
    GIN_TRY(make_pass(&kernel));
    GIN_TRY(gin_stream_create(job, &stream));
    GIN_TRY(gin_comm_device(comm, &device));
    GIN_TRY(gin_window_device(recv, &device_recv));
    GIN_TRY(gin_window_device(send, &device_send));
    gin_arg_t arguments[] = {{&device, sizeof device},
                             {&device_recv, sizeof device_recv},
                             {&device_send, sizeof device_send},
                             {&bytes, sizeof bytes}};
    gin_shape_t shape = {{1, 1, 1}, {64, 1, 1}, 0, 1};
    GIN_TRY(gin_launch(stream, kernel, &shape, arguments, 4));
    GIN_TRY(gin_stream_synchronize(stream));
    GIN_TRY(gin_stream_close(stream));
    return gin_kernel_close(kernel);
}

static gin_status_t run(void) {
    gin_job_t job;
    gin_comm_t comm;
    gin_window_t recv, send;
    uint32_t rank, ranks;
    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    float elements[ELEMENTS];
    GIN_TRY(join(&job));
    GIN_TRY(gin_job_rank(job, &rank, &ranks));
    GIN_TRY(gin_comm_create(job, &requirements, &comm));
    GIN_TRY(gin_window_alloc(comm, sizeof elements, 0, &recv));
    GIN_TRY(gin_window_alloc(comm, sizeof elements, 0, &send));
    for (int i = 0; i < ELEMENTS; i++) elements[i] = (float)(rank + 1);
    GIN_TRY(gin_window_write(send, 0, elements, sizeof elements));
    GIN_TRY(launch(job, comm, recv, send));
    GIN_TRY(gin_comm_check(comm));
    GIN_TRY(gin_window_read(recv, 0, elements, sizeof elements));
    printf("rank %u of %u has received %g\n", rank, ranks, elements[ELEMENTS - 1]);
    GIN_TRY(gin_window_close(send));
    GIN_TRY(gin_window_close(recv));
    GIN_TRY(gin_comm_destroy(comm));
    return gin_job_close(job);
}

int main(void) {
    if (run() == GIN_OK) return 0;
    fprintf(stderr, "%s\n", gin_last_error());
    return 1;
}
