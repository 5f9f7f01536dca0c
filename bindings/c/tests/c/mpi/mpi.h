// SPDX-License-Identifier: MIT OR Apache-2.0
//
// As much of MPI as examples/c/mpi.c uses, for one rank.

#pragma once

#include <stddef.h>
#include <string.h>

typedef int MPI_Comm;
typedef int MPI_Datatype;
#define MPI_COMM_WORLD 1
#define MPI_BYTE 2
#define MPI_SUCCESS 0

static inline int MPI_Init(int *count, char ***words) {
    return count != NULL && words != NULL ? MPI_SUCCESS : 1;
}

static inline int MPI_Comm_rank(MPI_Comm comm, int *rank) {
    *rank = 0;
    return comm == MPI_COMM_WORLD ? MPI_SUCCESS : 1;
}

static inline int MPI_Comm_size(MPI_Comm comm, int *ranks) {
    *ranks = 1;
    return comm == MPI_COMM_WORLD ? MPI_SUCCESS : 1;
}

static inline int MPI_Allgather(const void *own, int count, MPI_Datatype type, void *all, int parts, MPI_Datatype of_parts,
                                MPI_Comm comm) {
    if (type != MPI_BYTE || of_parts != MPI_BYTE || parts != count || comm != MPI_COMM_WORLD) return 1;
    memcpy(all, own, (size_t)count);
    return MPI_SUCCESS;
}

static inline int MPI_Abort(MPI_Comm comm, int code) { return comm == MPI_COMM_WORLD ? code : 1; }

static inline int MPI_Finalize(void) { return MPI_SUCCESS; }
