// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The back ends that a program may choose, and the texts of the choices that are refused.

#include "gin.h"

#include <stdio.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, gin_last_error()); \
            return 1; \
        } \
    } while (0)

static gin_config_t with(uint32_t backend) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.device = GIN_DEVICE_VIRTUAL;
    config.backend = backend;
    return config;
}

// Makes a communicator of one rank, and writes its back end: 1 for the proxy, 2 for GDAKI.
static gin_status_t make(gin_config_t config, uint32_t *backend) {
    gin_job_t job;
    gin_comm_t comm;
    gin_requirements_t requirements = GIN_REQUIREMENTS_INIT;
    gin_device_comm_t device;
    GIN_TRY(gin_job_local(&config, 1, &job));
    gin_status_t status = gin_comm_create(job, &requirements, &comm);
    if (status != GIN_OK) {
        // The text of the error stays.
        (void)gin_job_close(job);
        return status;
    }
    GIN_TRY(gin_job_close(job));
    GIN_TRY(gin_comm_device(comm, &device));
    *backend = device.backend;
    return gin_comm_destroy(comm);
}

static int refused(gin_config_t config, gin_status_t status, const char *text) {
    uint32_t backend;
    return make(config, &backend) == status && strstr(gin_last_error(), text) != NULL;
}

int main(void) {
    uint32_t automatic = 0, proxy = 0, gdaki = 0;
    CHECK(make(with(GIN_BACKEND_AUTO), &automatic) == GIN_OK);
    CHECK(make(with(GIN_BACKEND_PROXY), &proxy) == GIN_OK);
    CHECK(make(with(GIN_BACKEND_GDAKI_SOFT), &gdaki) == GIN_OK);
    CHECK(automatic == proxy && proxy != gdaki);

    CHECK(refused(with(4), GIN_ERROR_ARGUMENT, "config.backend is 4: there are 0 to 3"));
    gin_config_t config = with(GIN_BACKEND_GDAKI);
    config.network = GIN_NETWORK_VERBS;
    CHECK(refused(config, GIN_ERROR_ARGUMENT, "leave GIN_NETWORK_VERBS out"));
    config.network = GIN_NETWORK_FABRIC;
    CHECK(refused(config, GIN_ERROR_ARGUMENT, "leave GIN_NETWORK_FABRIC out"));
    config.network = 3;
    CHECK(refused(config, GIN_ERROR_ARGUMENT, "config.network is 3: there are 0 to 2"));
    config.network = GIN_NETWORK_PEER;
    config.nic = "no_such_nic";
    CHECK(refused(config, GIN_ERROR_NETWORK, "back end Gdaki is not available: NIC no_such_nic: "));
    for (uint32_t other = GIN_BACKEND_PROXY; other <= GIN_BACKEND_GDAKI_SOFT; other += 2) {
        config.backend = other;
        CHECK(refused(config, GIN_ERROR_ARGUMENT, "config.nic names the NIC that kernels drive"));
    }
    config.backend = GIN_BACKEND_AUTO;
    CHECK(make(config, &automatic) == GIN_OK && automatic == proxy);

    gin_job_t job;
    config = with(GIN_BACKEND_GDAKI_SOFT);
    CHECK(gin_job_from_env(&config, &job) == GIN_ERROR_ARGUMENT);
    CHECK(strstr(gin_last_error(), "GIN_BACKEND_GDAKI_SOFT serves the ranks of gin_job_local on virtual GPUs"));
    puts("passed");
    return 0;
}
