/*
 * slim_sessions: an MPI-4 program without MPI_Init. It makes communicators out of a session, and sends on each at once.
 *
 *   mpicc -O2 -o slim_sessions slim_sessions.c
 *   mpirun -n 2 ./slim_sessions ROUNDS
 *
 * In each round all ranks make a communicator of all of them, rank 0 sends WORDS words to each other rank as the first message on it, and
 * the others check every word. The first messages of such a communicator are special: they tell its number.
 *
 * Rank 0 prints the closing line of slim_pp. Exit status: 0 all data right, 2 bad usage, 3 wrong data.
 */
#include <mpi.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

enum { WORDS = 131072 };

static uint64_t word(int round, int to, int at)
{
    return ((uint64_t)round * 1000003 + (uint64_t)to * 8191 + (uint64_t)at) * UINT64_C(0x9e3779b97f4a7c15);
}

static double now(void)
{
    struct timeval tv;
    gettimeofday(&tv, NULL);
    return (double)tv.tv_sec + (double)tv.tv_usec / 1e6;
}

int main(int argc, char **argv)
{
    int rounds = argc == 2 ? atoi(argv[1]) : 0, rank = 0, ranks = 0;
    uint64_t wrong = 0, all_wrong = 0, moved = 0;
    double longest = 0, before = now();
    uint64_t *data = malloc(WORDS * sizeof *data);
    MPI_Session session;
    MPI_Group group;

    if (rounds <= 0 || !data) {
        fprintf(stderr, "usage: slim_sessions ROUNDS\n");
        return 2;
    }
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
    MPI_Group_from_session_pset(session, "mpi://WORLD", &group);
    for (int round = 0; round < rounds; round++) {
        char name[32];
        MPI_Comm comm;
        uint64_t sum = 0;
        snprintf(name, sizeof name, "round-%d", round);
        MPI_Comm_create_from_group(group, name, MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &ranks);
        for (int to = 1; rank == 0 && to < ranks; to++) {
            for (int i = 0; i < WORDS; i++)
                data[i] = word(round, to, i);
            MPI_Send(data, WORDS, MPI_UINT64_T, to, 0, comm);
            moved += WORDS * sizeof *data;
        }
        if (rank > 0) {
            MPI_Recv(data, WORDS, MPI_UINT64_T, 0, 0, comm, MPI_STATUS_IGNORE);
            for (int i = 0; i < WORDS; i++)
                wrong += data[i] != word(round, rank, i);
        }
        MPI_Allreduce(&wrong, &sum, 1, MPI_UINT64_T, MPI_SUM, comm);
        all_wrong = sum;
        MPI_Comm_free(&comm);
        if (now() - before > longest)
            longest = now() - before;
        before = now();
    }
    if (rank == 0) {
        printf("DONE it=%d errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%.3f\n", rounds, all_wrong, moved >> 20,
               longest, before);
        fflush(stdout);
    }
    MPI_Group_free(&group);
    MPI_Session_finalize(&session);
    free(data);
    return all_wrong ? 3 : 0;
}
