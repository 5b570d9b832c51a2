/*
 * slim_dynamic: an MPI program whose processes meet while it runs, and that checks every word they exchange.
 *
 *   mpicc -O2 -o slim_dynamic slim_dynamic.c
 *   mpirun -n 2 ./slim_dynamic spawn SECONDS [FILE [HOST...]]
 *   mpirun -n 2 ./slim_dynamic halves SECONDS [FILE]
 *   mpirun -n 2 ./slim_dynamic accept PORT SECONDS [FILE]
 *   mpirun -n 2 ./slim_dynamic connect PORT
 *
 * All but connect work for SECONDS, and then for as long as there is a FILE.
 *
 *   spawn    each round spawns a process with MPI_Comm_spawn: on the first HOST, then on the next one
 *   halves   the ranks with even numbers accept those with odd numbers, once in each round
 *   accept   opens a port, writes its name into the file PORT, and accepts the other job once in each round
 *   connect  waits for the file PORT, and connects once in each round, until the other job says that it was the last one
 *
 * In each round every process sends to every process of the other side, and receives from it, messages of several sizes; both sides
 * merge into one communicator and reduce over it; and MPI_Comm_disconnect ends the round while the last messages are on their way.
 *
 * Rank 0 of all but connect prints the same lines as slim_pp. Exit status: 0 all data right, 2 bad usage, 3 wrong data.
 * MPI's errors end the job.
 */
#include <mpi.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

static const size_t sizes[] = {1, 500, 9000, 60000};
enum { SIZES = sizeof sizes / sizeof sizes[0], MAX_WORDS = 60000, LAST_WORDS = 4000, MAX_SIDE = 16 };

static int rank; /* in MPI_COMM_WORLD, or in the half of it */
static uint64_t wrong, moved;
static double started, step_ended, max_stall;

static uint64_t word(uint64_t round, int side, int from, int to, size_t at)
{
    uint64_t x = (round * 1000003 + (uint64_t)side * 524287 + (uint64_t)from * 8191 + (uint64_t)to) *
                     UINT64_C(0x9e3779b97f4a7c15) + at;
    x ^= x >> 31;
    return x * UINT64_C(0xbf58476d1ce4e5b9);
}

static uint64_t *buffer(size_t words)
{
    uint64_t *at = malloc(words * 8);
    if (!at)
        abort();
    return at;
}

static void fill(uint64_t *buf, size_t words, uint64_t round, int side, int from, int to)
{
    for (size_t i = 0; i < words; i++)
        buf[i] = word(round, side, from, to, i);
}

static void check(const uint64_t *buf, size_t words, uint64_t round, int side, int from, int to)
{
    for (size_t i = 0; i < words; i++)
        if (buf[i] != word(round, side, from, to, i) && ++wrong < 5)
            fprintf(stderr, "slim_dynamic: rank %d: round %" PRIu64 ": word %zu of %zu from %d is wrong\n", rank, round,
                    i, words, from);
}

/* Everybody with everybody of the other side. `side` is 0 or 1. */
static void exchange(MPI_Comm other, int side, uint64_t round)
{
    int others;
    MPI_Comm_remote_size(other, &others);
    if (others > MAX_SIDE)
        abort();
    uint64_t *out = buffer((size_t)others * MAX_WORDS), *in = buffer((size_t)others * MAX_WORDS);
    MPI_Request requests[2 * MAX_SIDE];
    for (int s = 0; s < SIZES; s++) {
        size_t words = sizes[s];
        memset(in, 0xa5, (size_t)others * MAX_WORDS * 8);
        for (int peer = 0; peer < others; peer++) {
            uint64_t *to = out + (size_t)peer * MAX_WORDS, *from = in + (size_t)peer * MAX_WORDS;
            fill(to, words, round + (uint64_t)s, side, rank, peer);
            MPI_Irecv(from, (int)words, MPI_UINT64_T, peer, s, other, &requests[2 * peer]);
            MPI_Isend(to, (int)words, MPI_UINT64_T, peer, s, other, &requests[2 * peer + 1]);
        }
        MPI_Waitall(2 * others, requests, MPI_STATUSES_IGNORE);
        for (int peer = 0; peer < others; peer++)
            check(in + (size_t)peer * MAX_WORDS, words, round + (uint64_t)s, 1 - side, peer, rank);
        moved += (uint64_t)others * words * 16;
    }
    free(out);
    free(in);
}

/* A reduction over both sides. */
static void reduce(MPI_Comm other, int side)
{
    MPI_Comm both;
    int all, me;
    MPI_Intercomm_merge(other, side, &both);
    MPI_Comm_size(both, &all);
    MPI_Comm_rank(both, &me);
    uint64_t mine = (uint64_t)me + 1, sum = 0;
    MPI_Allreduce(&mine, &sum, 1, MPI_UINT64_T, MPI_SUM, both);
    if (sum != (uint64_t)all * ((uint64_t)all + 1) / 2)
        wrong++;
    MPI_Comm_free(&both);
}

/* One round with the other side. Returns whether side 0 says that more rounds follow. */
static int meet(MPI_Comm *other, int side, uint64_t round, int more)
{
    int size, others;
    MPI_Comm_size(*other, &size);
    MPI_Comm_remote_size(*other, &others);
    if (rank == 0 && side == 0)
        MPI_Send(&more, 1, MPI_INT, 0, 100, *other);
    if (rank == 0 && side == 1)
        MPI_Recv(&more, 1, MPI_INT, 0, 100, *other, MPI_STATUS_IGNORE);
    exchange(*other, side, round);
    reduce(*other, side);
    /* Disconnecting completes what is under way: all of it is posted before. But MPI_Comm_disconnect of Open MPI 4.1 does not wait for
     * another job, so the last message may still be on its way when it returns: its buffer is never freed. */
    uint64_t *out = buffer(LAST_WORDS), *in = buffer(LAST_WORDS);
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    if (rank < others) {
        fill(out, LAST_WORDS, round, side, rank, rank);
        MPI_Irecv(in, LAST_WORDS, MPI_UINT64_T, rank, 101, *other, &requests[0]);
        MPI_Isend(out, LAST_WORDS, MPI_UINT64_T, rank, 101, *other, &requests[1]);
        MPI_Request_free(&requests[1]);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        check(in, LAST_WORDS, round, 1 - side, rank, rank);
    }
    MPI_Comm_disconnect(other);
    free(in);
    return more;
}

static void report(uint64_t round, long *printed)
{
    double now = MPI_Wtime();
    if (now - step_ended > max_stall)
        max_stall = now - step_ended;
    step_ended = now;
    if (rank == 0 && (long)(now - started) > *printed) {
        *printed = (long)(now - started);
        printf("t=%ld it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f\n", *printed, round, wrong, moved >> 20,
               max_stall);
        fflush(stdout);
    }
}

static int goes_on(double seconds, const char *file)
{
    int more = MPI_Wtime() - started < seconds || (file && access(file, F_OK) == 0);
    MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return more;
}

static uint64_t spawn(char *self, double seconds, const char *file, int hosts, char **host)
{
    uint64_t round = 0;
    long printed = 0;
    for (int more = 1; more; round++) {
        char number[24];
        snprintf(number, sizeof number, "%" PRIu64, round);
        char *args[] = {(char *)"spawned", number, NULL};
        MPI_Comm child;
        MPI_Info where = MPI_INFO_NULL;
        if (hosts > 0) {
            MPI_Info_create(&where);
            MPI_Info_set(where, "host", host[round % (uint64_t)hosts]);
        }
        MPI_Comm_spawn(self, args, 1, where, 0, MPI_COMM_WORLD, &child, MPI_ERRCODES_IGNORE);
        if (hosts > 0)
            MPI_Info_free(&where);
        more = goes_on(seconds, file);
        meet(&child, 0, round, more);
        report(round + 1, &printed);
    }
    return round;
}

static uint64_t accept_rounds(const char *path, double seconds, const char *file)
{
    char port[MPI_MAX_PORT_NAME] = "", fresh[4096];
    uint64_t round = 0;
    long printed = 0;
    if (rank == 0) {
        MPI_Open_port(MPI_INFO_NULL, port);
        snprintf(fresh, sizeof fresh, "%s.new", path);
        FILE *out = fopen(fresh, "w");
        if (!out || fputs(port, out) < 0 || fclose(out) != 0 || rename(fresh, path) != 0)
            abort();
    }
    for (int more = 1; more; round++) {
        MPI_Comm other;
        MPI_Comm_accept(port, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &other);
        more = goes_on(seconds, file);
        meet(&other, 0, round, more);
        report(round + 1, &printed);
    }
    if (rank == 0)
        MPI_Close_port(port);
    return round;
}

static void connect_rounds(const char *path)
{
    char port[MPI_MAX_PORT_NAME] = "";
    if (rank == 0) {
        FILE *in;
        while (!(in = fopen(path, "r")))
            usleep(10000);
        if (!fgets(port, sizeof port, in))
            abort();
        fclose(in);
    }
    uint64_t round = 0;
    for (int more = 1; more; round++) {
        MPI_Comm other;
        MPI_Comm_connect(port, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &other);
        more = meet(&other, 1, round, 0);
        MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
}

static uint64_t halves(double seconds, const char *file)
{
    char port[MPI_MAX_PORT_NAME] = "";
    int side = rank % 2, first = rank == 0;
    uint64_t round = 0;
    long printed = 0;
    MPI_Comm half;
    if (first)
        MPI_Open_port(MPI_INFO_NULL, port);
    MPI_Bcast(port, sizeof port, MPI_CHAR, 0, MPI_COMM_WORLD);
    MPI_Comm_split(MPI_COMM_WORLD, side, rank, &half);
    rank /= 2;
    for (int more = 1; more; round++) {
        MPI_Comm other;
        if (side == 0)
            MPI_Comm_accept(port, MPI_INFO_NULL, 0, half, &other);
        else
            MPI_Comm_connect(port, MPI_INFO_NULL, 0, half, &other);
        more = goes_on(seconds, file);
        meet(&other, side, round, more);
        if (first)
            report(round + 1, &printed);
    }
    MPI_Comm_free(&half);
    if (first)
        MPI_Close_port(port);
    else
        rank++;
    return round;
}

static int finish(uint64_t rounds, int prints)
{
    uint64_t all_wrong = 0;
    MPI_Allreduce(&wrong, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && prints) {
        struct timeval now;
        gettimeofday(&now, NULL);
        printf("DONE it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%ld.%03ld\n", rounds, all_wrong,
               moved >> 20, max_stall, (long)now.tv_sec, (long)now.tv_usec / 1000);
        fflush(stdout);
    }
    MPI_Finalize();
    return all_wrong ? 3 : 0;
}

int main(int argc, char **argv)
{
    MPI_Comm parent;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_get_parent(&parent);
    if (parent != MPI_COMM_NULL && argc > 2) {
        meet(&parent, 1, strtoull(argv[2], NULL, 10), 0);
        return finish(0, 0);
    }
    const char *kind = argc > 1 ? argv[1] : "";
    started = step_ended = MPI_Wtime();
    if (strcmp(kind, "spawn") == 0 && argc > 2)
        return finish(spawn(argv[0], atof(argv[2]), argc > 3 ? argv[3] : NULL, argc > 4 ? argc - 4 : 0, argv + 4), 1);
    if (strcmp(kind, "halves") == 0 && argc > 2)
        return finish(halves(atof(argv[2]), argc > 3 ? argv[3] : NULL), 1);
    if (strcmp(kind, "accept") == 0 && argc > 3)
        return finish(accept_rounds(argv[2], atof(argv[3]), argc > 4 ? argv[4] : NULL), 1);
    if (strcmp(kind, "connect") == 0 && argc > 2) {
        connect_rounds(argv[2]);
        return finish(0, 0);
    }
    fprintf(stderr, "usage: slim_dynamic spawn SECONDS [FILE [HOST...]] | halves SECONDS [FILE] |\n"
                    "       accept PORT SECONDS [FILE] | connect PORT\n");
    MPI_Finalize();
    return 2;
}
