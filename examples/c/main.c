// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A C program with a kernel in Rust: one round of a ring. Each rank passes its elements on, and adds those of its left
// neighbour.
//
//   main                              one rank on a virtual GPU
//   gin launch -n 4 -- ./main         four processes
//   gin launch -n 2 -- ./main X.ptx   on GPUs: the kernels as PTX

#include "gin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENTS = 1024, THREADS = 128 };

static float value(uint32_t rank, uint32_t i) { return (float)(100 * rank + i % 7); }

// Joins the launcher's job; without a launcher, makes one of a single rank.
static gin_status_t join(const gin_config_t *config, gin_job_t *job) {
    gin_status_t status = gin_job_from_env(config, job);
    return status == GIN_ERROR_NO_JOB ? gin_job_local(config, 1, job) : status;
}

// Reads a whole file of text.
static char *text_of(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    char *text = NULL;
    *bytes = 0;
    for (size_t got = 1; got > 0; *bytes += got) {
        text = realloc(text, *bytes + 65536);
        got = fread(text + *bytes, 1, 65536, file);
    }
    fclose(file);
    return text;
}

static gin_status_t launch(gin_job_t job, gin_comm_t comm, gin_window_t recv, gin_window_t send, const char *ptx) {
    size_t bytes = 0;
    char *image = ptx ? text_of(ptx, &bytes) : NULL;
    gin_module_t module;
    gin_kernel_t kernel;
    gin_stream_t stream;
    // No image: the kernels that are linked into the library.
    GIN_TRY(gin_module_load(job, image, bytes, &module));
    free(image);
    GIN_TRY(gin_module_kernel(module, "ring_round", &kernel));
    GIN_TRY(gin_stream_create(job, &stream));

    gin_device_comm_t device;
    gin_device_window_t device_recv, device_send;
    GIN_TRY(gin_comm_device(comm, &device));
    GIN_TRY(gin_window_device(recv, &device_recv));
    GIN_TRY(gin_window_device(send, &device_send));
    // The parameters of `ring_round`: comm, recv, send, len, round, deadline in nanoseconds.
    uint64_t len = ELEMENTS, round = 1, deadline = 5000000000;
    gin_arg_t arguments[] = {{&device, sizeof device}, {&device_recv, sizeof device_recv},
                             {&device_send, sizeof device_send}, {&len, sizeof len},
                             {&round, sizeof round}, {&deadline, sizeof deadline}};
    gin_shape_t shape = {{1, 1, 1}, {THREADS, 1, 1}, 0, 1};
    GIN_TRY(gin_launch(stream, kernel, &shape, arguments, 6));
    GIN_TRY(gin_stream_synchronize(stream));
    GIN_TRY(gin_stream_close(stream));
    GIN_TRY(gin_kernel_close(kernel));
    return gin_module_close(module);
}

static gin_status_t run(const char *ptx, int *right) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = ptx ? GIN_DEVICE_CUDA : GIN_DEVICE_VIRTUAL;
    gin_job_t job;
    uint32_t rank, ranks;
    GIN_TRY(join(&config, &job));
    GIN_TRY(gin_job_rank(job, &rank, &ranks));

    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    gin_comm_t comm;
    gin_window_t recv, send;
    GIN_TRY(gin_comm_create(job, &requirements, &comm));
    GIN_TRY(gin_window_alloc(comm, sizeof(float) * ELEMENTS, 0, &recv));
    GIN_TRY(gin_window_alloc(comm, sizeof(float) * ELEMENTS, 0, &send));

    float elements[ELEMENTS];
    for (uint32_t i = 0; i < ELEMENTS; i++) elements[i] = value(rank, i);
    GIN_TRY(gin_window_write(send, 0, elements, sizeof elements));
    GIN_TRY(launch(job, comm, recv, send, ptx));
    GIN_TRY(gin_comm_check(comm));
    GIN_TRY(gin_window_read(send, 0, elements, sizeof elements));
    uint32_t left = (rank + ranks - 1) % ranks;
    for (uint32_t i = 0; i < ELEMENTS; i++) *right &= elements[i] == value(rank, i) + value(left, i);

    GIN_TRY(gin_window_close(send));
    GIN_TRY(gin_window_close(recv));
    GIN_TRY(gin_comm_destroy(comm));
    printf("rank %u of %u: %s\n", rank, ranks, *right ? "passed" : "wrong");
    return gin_job_close(job);
}

int main(int count, char **words) {
    int right = 1;
    if (run(count > 1 ? words[1] : NULL, &right) != GIN_OK) {
        fprintf(stderr, "%s\n", gin_last_error());
        return 1;
    }
    return !right;
}
