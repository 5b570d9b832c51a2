/*
 * slim_ulfm: an MPI program that checks every word it receives, and goes on without ranks that have failed (ULFM).
 *
 *   mpicc -O2 -o slim_ulfm slim_ulfm.c
 *   mpirun --with-ft ulfm -n 4 ./slim_ulfm SECONDS [WORDS [spawn|replace HOST]]
 *
 * It works for SECONDS. Each round moves messages of a size of its own, at most WORDS (131072), around a ring of all ranks, and adds up
 * numbers of all ranks. When a call fails, the ranks that are left revoke the communicator, make one without the
 * failed ranks (shrink), agree on the round, and go on. With "spawn", the ranks first spawn one more on HOST, and merge with it. With
 * "replace", the ranks that are left spawn a new rank on HOST for each that has failed, and merge with them.
 *
 * Rank 0 of the communicator prints the same lines as slim_pp; the closing line also has ranks=N. Each rank prints
 *   FAILED rank=R class=C at=T    when a call has failed: C is PROC_FAILED or REVOKED, T is in seconds since 1970
 *   SHRUNK rank=R ranks=N at=T    when it has the communicator without failed ranks
 *   GROWN rank=R ranks=N at=T     when it has the communicator with the spawned ranks; R of a spawned rank is -1
 * Exit status: 0 all data right, 2 bad usage, 3 wrong data, 4 an error that is no failure of a rank.
 */
#include <mpi.h>
#include <mpi-ext.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

static const size_t sizes[] = {1, 64, 1000, 8192, 20000, 131072};
#define N_SIZES (sizeof sizes / sizeof sizes[0])
enum { MAX_WORDS = 131072 };

static int world_rank;
static char *program, *host;
static uint64_t wrong;
static size_t most = MAX_WORDS;

static double now(void)
{
    struct timeval tv;
    gettimeofday(&tv, NULL);
    return (double)tv.tv_sec + (double)tv.tv_usec * 1e-6;
}

static uint64_t word(uint64_t round, int from, size_t at)
{
    uint64_t x = (round * 1000003 + (uint64_t)from) * UINT64_C(0x9e3779b97f4a7c15) + at;
    x ^= x >> 31;
    return x * UINT64_C(0xbf58476d1ce4e5b9);
}

/* One round; the first error. */
static int work(MPI_Comm comm, uint64_t round, uint64_t *out, uint64_t *in, int want_stop, int *stop)
{
    int rank, ranks, rc;
    size_t words = sizes[round % N_SIZES] < most ? sizes[round % N_SIZES] : most;
    uint64_t sums[2], mine[2];

    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    for (size_t i = 0; i < words; i++)
        out[i] = word(round, rank, i);
    memset(in, 0xa5, words * 8);
    rc = MPI_Sendrecv(out, (int)words, MPI_UINT64_T, to, 1, in, (int)words, MPI_UINT64_T, from, 1, comm,
                      MPI_STATUS_IGNORE);
    if (rc != MPI_SUCCESS)
        return rc;
    for (size_t i = 0; i < words; i++)
        if (in[i] != word(round, from, i) && wrong++ < 5)
            fprintf(stderr, "slim_ulfm: rank %d: round %" PRIu64 ": word %zu from %d is wrong\n", world_rank, round, i,
                    from);
    mine[0] = round * (uint64_t)(rank + 1);
    mine[1] = rank == 0 && want_stop;
    rc = MPI_Allreduce(mine, sums, 2, MPI_UINT64_T, MPI_SUM, comm);
    if (rc != MPI_SUCCESS)
        return rc;
    if (sums[0] != round * (uint64_t)ranks * (uint64_t)(ranks + 1) / 2)
        wrong++;
    *stop = sums[1] != 0;
    return MPI_SUCCESS;
}

/* An error that is no failure of a rank. */
static void give_up(int rc)
{
    char text[MPI_MAX_ERROR_STRING];
    int len;
    MPI_Error_string(rc, text, &len);
    fprintf(stderr, "slim_ulfm: rank %d: %s\n", world_rank, text);
    _exit(4);
}

/* The communicator of both sides of a spawn, and the round that all begin with. */
static int merge(MPI_Comm other, int spawned, MPI_Comm *both, uint64_t *round)
{
    uint64_t mine = *round;
    int ranks, rc = MPI_Intercomm_merge(other, spawned, both);
    if (rc != MPI_SUCCESS)
        return rc;
    MPI_Comm_set_errhandler(*both, MPI_ERRORS_RETURN);
    rc = MPI_Allreduce(&mine, round, 1, MPI_UINT64_T, MPI_MAX, *both);
    if (rc != MPI_SUCCESS) {
        *round = mine;
        return rc;
    }
    MPI_Comm_size(*both, &ranks);
    printf("GROWN rank=%d ranks=%d at=%.6f\n", world_rank, ranks, now());
    fflush(stdout);
    return MPI_SUCCESS;
}

/* All ranks spawn that many, and merge with them. */
static int grow(int count, MPI_Comm *comm, uint64_t *round)
{
    char words[24];
    char *args[] = {(char *)"1", words, NULL};
    MPI_Comm other, both;
    MPI_Info where;
    snprintf(words, sizeof words, "%zu", most);
    MPI_Info_create(&where);
    MPI_Info_set(where, "host", host);
    int rc = MPI_Comm_spawn(program, args, count, where, 0, *comm, &other, MPI_ERRCODES_IGNORE);
    MPI_Info_free(&where);
    if (rc == MPI_SUCCESS) {
        MPI_Comm_set_errhandler(other, MPI_ERRORS_RETURN);
        rc = merge(other, 0, &both, round);
    }
    if (rc == MPI_SUCCESS)
        *comm = both;
    return rc;
}

/* Goes on without the failed ranks: the new communicator, and the round that all begin with. */
static MPI_Comm recover(MPI_Comm comm, int rc, uint64_t *round, int replace)
{
    int before;
    MPI_Comm_size(comm, &before);
    for (;;) {
        int class, ranks;
        MPI_Comm next;

        MPI_Error_class(rc, &class);
        if (class != MPIX_ERR_PROC_FAILED && class != MPIX_ERR_PROC_FAILED_PENDING && class != MPIX_ERR_REVOKED)
            give_up(rc);
        printf("FAILED rank=%d class=%s at=%.6f\n", world_rank, class == MPIX_ERR_REVOKED ? "REVOKED" : "PROC_FAILED",
               now());
        fflush(stdout);
        MPIX_Comm_revoke(comm);
        rc = MPIX_Comm_shrink(comm, &next);
        if (rc == MPI_SUCCESS) {
            uint64_t mine = *round;
            MPI_Comm_set_errhandler(next, MPI_ERRORS_RETURN);
            rc = MPI_Allreduce(&mine, round, 1, MPI_UINT64_T, MPI_MIN, next);
            MPI_Comm_size(next, &ranks);
            if (rc == MPI_SUCCESS) {
                printf("SHRUNK rank=%d ranks=%d at=%.6f\n", world_rank, ranks, now());
                fflush(stdout);
                if (replace)
                    rc = grow(before - ranks, &next, round);
                if (rc == MPI_SUCCESS)
                    return next;
            } else {
                *round = mine;
            }
            comm = next;
        }
    }
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0;
    if (argc > 2)
        most = (size_t)atol(argv[2]);
    int spawn = argc > 4 && strcmp(argv[3], "spawn") == 0, replace = argc > 4 && strcmp(argv[3], "replace") == 0;
    uint64_t *out = malloc(MAX_WORDS * 8), *in = malloc(MAX_WORDS * 8);
    MPI_Comm comm, parent;
    uint64_t round = 0, rounds = 0, moved = 0, all_wrong = 0;

    program = argv[0];
    host = argc > 4 ? argv[4] : NULL;
    MPI_Init(&argc, &argv);
    if (!(seconds > 0) || !out || !in || argc > 5 || (argc > 3 && !spawn && !replace)) {
        fprintf(stderr, "usage: slim_ulfm SECONDS [WORDS [spawn|replace HOST]]\n");
        MPI_Finalize();
        return 2;
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_get_parent(&parent);
    int rc = MPI_SUCCESS;
    if (parent != MPI_COMM_NULL) {
        world_rank = -1;
        MPI_Comm_set_errhandler(parent, MPI_ERRORS_RETURN);
        rc = merge(parent, 1, &comm, &round);
    } else {
        MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
        MPI_Comm_dup(MPI_COMM_WORLD, &comm);
        MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        if (spawn)
            rc = grow(1, &comm, &round);
    }
    if (rc != MPI_SUCCESS)
        give_up(rc);

    double started = now(), step_ended = started, max_stall = 0;
    long printed = 0;
    int rank, ranks, stop = 0;
    while (!stop) {
        double t = now() - started;
        rc = work(comm, round, out, in, t >= seconds, &stop);
        if (rc != MPI_SUCCESS) {
            comm = recover(comm, rc, &round, replace);
            stop = 0;
            continue;
        }
        size_t words = sizes[round++ % N_SIZES];
        moved += (words < most ? words : most) * 16;
        rounds++;
        double end = now();
        if (end - step_ended > max_stall)
            max_stall = end - step_ended;
        step_ended = end;
        MPI_Comm_rank(comm, &rank);
        if (rank == 0 && (long)t > printed) {
            printed = (long)t;
            printf("t=%ld it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f\n", printed, rounds, wrong,
                   moved >> 20, max_stall);
            fflush(stdout);
        }
    }
    MPI_Allreduce(&wrong, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    if (rank == 0) {
        printf("DONE it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%.3f ranks=%d\n", rounds, all_wrong,
               moved >> 20, max_stall, now(), ranks);
        fflush(stdout);
    }
    MPI_Finalize();
    return all_wrong ? 3 : 0;
}
