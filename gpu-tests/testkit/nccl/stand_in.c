// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A stand-in for NCCL, for tests without GPUs: communicators whose ranks are threads of this process, in host memory.
// They do not block, as those of ncclConfig_t with blocking = 0: a broadcast is in progress until rank 0 has called it.
// The caller defines VERSION, the number that ncclGetVersion returns.

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7, UINT8 = 1 };

struct job {
    pthread_mutex_t lock;
    int ranks, is_sent, is_failed;
    size_t bytes;
    char sent[4096];
};

struct comm {
    struct job *job;
    int rank;
    char *to; // of a broadcast in progress
    const char *last;
};

struct window {
    void *memory;
};

// The functions of tests.

void *stand_in_job(int ranks) {
    struct job *job = calloc(1, sizeof *job);
    pthread_mutex_init(&job->lock, NULL);
    job->ranks = ranks;
    return job;
}

void *stand_in_comm(void *job, int rank) {
    struct comm *comm = calloc(1, sizeof *comm);
    comm->job = job;
    comm->rank = rank;
    comm->last = "";
    return comm;
}

// Makes the calls of all ranks fail from now on.
void stand_in_fail(void *job) { ((struct job *)job)->is_failed = 1; }

void *stand_in_window(void *memory) {
    struct window *window = malloc(sizeof *window);
    window->memory = memory;
    return window;
}

// The functions of NCCL.

int ncclGetVersion(int *version) { return *version = VERSION, SUCCESS; }

const char *ncclGetErrorString(int result) {
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "invalid argument";
}

const char *ncclGetLastError(void *comm) { return ((struct comm *)comm)->last; }

int ncclCommCount(void *comm, int *ranks) { return *ranks = ((struct comm *)comm)->job->ranks, SUCCESS; }

int ncclCommUserRank(void *comm, int *rank) { return *rank = ((struct comm *)comm)->rank, SUCCESS; }

int ncclCommCuDevice(void *comm, int *device) { return *device = ((struct comm *)comm)->rank, SUCCESS; }

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *handle, void *stream) {
    struct comm *comm = handle;
    struct job *job = comm->job;
    if (type != UINT8 || root != 0 || stream || count > sizeof job->sent) {
        comm->last = "ncclBroadcast: the stand-in sends bytes of rank 0, without a stream";
        return INVALID_ARGUMENT;
    }
    if (comm->rank == 0) {
        pthread_mutex_lock(&job->lock);
        memcpy(job->sent, from, job->bytes = count);
        job->is_sent = 1;
        pthread_mutex_unlock(&job->lock);
        return SUCCESS;
    }
    comm->to = to;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *handle, int *state) {
    struct comm *comm = handle;
    struct job *job = comm->job;
    pthread_mutex_lock(&job->lock);
    if (job->is_failed) {
        *state = REMOTE_ERROR;
        comm->last = "rank 0 is gone";
    } else if (comm->to && !job->is_sent) {
        *state = IN_PROGRESS;
    } else {
        if (comm->to) memcpy(comm->to, job->sent, job->bytes);
        comm->to = NULL;
        *state = SUCCESS;
    }
    pthread_mutex_unlock(&job->lock);
    return SUCCESS;
}

#if VERSION >= 22900
int ncclWinGetUserPtr(void *comm, void *window, void **memory) {
    if (!window) {
        ((struct comm *)comm)->last = "ncclWinGetUserPtr: the window is null";
        return INVALID_ARGUMENT;
    }
    return *memory = ((struct window *)window)->memory, SUCCESS;
}
#endif
