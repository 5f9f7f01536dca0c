// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A layer of experts in C, whose kernel is experts.cpp: each rank sends its tokens to the ranks of their experts, and
// gets the weighted sums of the results.
//
//   ep                       one rank on a virtual GPU
//   gin launch -n 4 -- ./ep  four processes

#include "gin.h"

#include <stdio.h>

enum { EXPERTS = 8, HIDDEN = 16, TOPK = 2, TOKENS = 6 };

gin_status_t make_experts(gin_kernel_t *kernel);

// The memory of a rank's tokens. Rows begin at multiples of 16 bytes.
static struct {
    _Alignas(16) float rows[TOKENS][HIDDEN];
    _Alignas(16) float sums[TOKENS][HIDDEN];
    int32_t ids[TOKENS][TOPK];
    float weights[TOKENS][TOPK];
} tokens;

// Joins the launcher's job; without a launcher, makes one of a single rank.
static gin_status_t join(gin_job_t *job) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = GIN_DEVICE_VIRTUAL;
    gin_status_t status = gin_job_from_env(&config, job);
    return status == GIN_ERROR_NO_JOB ? gin_job_local(&config, 1, job) : status;
}

// Routes each token to two experts.
static void route(uint32_t rank) {
    for (int token = 0; token < TOKENS; token++) {
        for (int i = 0; i < HIDDEN; i++) tokens.rows[token][i] = (float)(10 * (int)rank + token + i);
        for (int k = 0; k < TOPK; k++) {
            tokens.ids[token][k] = ((int)rank + token * 3 + k * 5) % EXPERTS;
            tokens.weights[token][k] = k == 0 ? 0.75f : 0.25f;
        }
    }
}

static gin_status_t layer(gin_ep_slot_t slot, gin_stream_t stream, uint32_t first_expert) {
    gin_ep_tokens_t sent = GIN_EP_TOKENS_INIT;
    sent.count = TOKENS;
    sent.rows = (gin_memory_t){tokens.rows, sizeof tokens.rows};
    sent.ids = (gin_memory_t){tokens.ids, sizeof tokens.ids};
    sent.weights = (gin_memory_t){tokens.weights, sizeof tokens.weights};
    GIN_TRY(gin_ep_exchange(slot, stream, &sent));

    // The experts replace the received rows.
    gin_device_ep_received_t received;
    gin_kernel_t kernel;
    GIN_TRY(gin_ep_received_device(slot, &received));
    GIN_TRY(make_experts(&kernel));
    uint32_t hidden = HIDDEN;
    gin_arg_t arguments[] = {
        {&received, sizeof received}, {&first_expert, sizeof first_expert}, {&hidden, sizeof hidden}};
    gin_shape_t shape = {{4, 1, 1}, {32, 1, 1}, 0, 0};
    GIN_TRY(gin_launch(stream, kernel, &shape, arguments, 3));
    GIN_TRY(gin_kernel_close(kernel));

    gin_ep_combine_t combine = GIN_EP_COMBINE_INIT;
    combine.output = (gin_memory_t){tokens.sums, sizeof tokens.sums};
    GIN_TRY(gin_ep_combine(slot, stream, &combine));
    return gin_stream_synchronize(stream);
}

// Prints what the kernels report. Group and communicator continue after a report.
static gin_status_t check(gin_ep_group_t group) {
    uint32_t found;
    gin_ep_report_t report;
    GIN_TRY(gin_ep_group_status(group, &found, &report));
    if (found) fprintf(stderr, "%s\n", report.text);
    return GIN_OK;
}

static int is_right(void) {
    int right = 1;
    for (int token = 0; token < TOKENS; token++) {
        float factor = 0;
        for (int k = 0; k < TOPK; k++) factor += tokens.weights[token][k] * (float)(tokens.ids[token][k] + 1);
        for (int i = 0; i < HIDDEN; i++) right &= tokens.sums[token][i] == factor * tokens.rows[token][i];
    }
    return right;
}

static gin_status_t run(int *right) {
    gin_job_t job;
    gin_comm_t comm;
    gin_ep_group_t group;
    gin_ep_slot_t slot;
    gin_stream_t stream;
    uint32_t rank, ranks;
    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    gin_ep_config_t config = GIN_EP_CONFIG_INIT;
    config.experts = EXPERTS;
    config.hidden = HIDDEN;
    config.topk = TOPK;
    config.tokens = TOKENS;
    config.element = GIN_EP_F32;
    GIN_TRY(join(&job));
    GIN_TRY(gin_job_rank(job, &rank, &ranks));
    GIN_TRY(gin_comm_create(job, &requirements, &comm));
    GIN_TRY(gin_ep_group_create(comm, &config, &group));
    GIN_TRY(gin_ep_slot_create(group, 0, &slot));
    GIN_TRY(gin_stream_create(job, &stream));

    route(rank);
    uint32_t experts_of_rank = (EXPERTS + ranks - 1) / ranks;
    GIN_TRY(layer(slot, stream, rank * experts_of_rank));
    GIN_TRY(check(group));
    *right = is_right();
    printf("rank %u of %u: %s\n", rank, ranks, *right ? "passed" : "wrong");

    GIN_TRY(gin_stream_close(stream));
    GIN_TRY(gin_ep_slot_close(slot));
    GIN_TRY(gin_ep_group_destroy(group));
    GIN_TRY(gin_comm_destroy(comm));
    return gin_job_close(job);
}

int main(void) {
    int right = 0;
    if (run(&right) == GIN_OK) return !right;
    fprintf(stderr, "%s\n", gin_last_error());
    return 1;
}
