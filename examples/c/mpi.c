// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The processes of an MPI program form a job of gin:
//
//   mpicc mpi.c -o mpi $(pkg-config --cflags --libs gin)
//   mpirun -n 4 ./mpi [ADDRESS]
//
// ADDRESS is the IP address at which this rank listens, if not that of the default route.

#include "gin.h"

#include <mpi.h>
#include <stdio.h>

static int gather(void *comm, const void *own, size_t bytes, void *all) {
    return MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, *(MPI_Comm *)comm);
}

static gin_status_t run(MPI_Comm comm, int rank, int ranks, const char *address) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.address = address;
    gin_job_t job;
    GIN_TRY(gin_job_over(&config, (uint32_t)rank, (uint32_t)ranks, gather, &comm, &job));
    GIN_TRY(gin_job_barrier(job));
    printf("rank %d of %d: passed\n", rank, ranks);
    return gin_job_close(job);
}

int main(int count, char **words) {
    int rank = 0, ranks = 1;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (run(MPI_COMM_WORLD, rank, ranks, count > 1 ? words[1] : NULL) != GIN_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, gin_last_error());
        return MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
