/*
 * slim_kinds: an MPI program that moves data of many kinds and checks every word of it.
 *
 *   mpicc -O2 -pthread -o slim_kinds slim_kinds.c
 *   mpirun -n 2 ./slim_kinds sizes|long|threads|spawn|compute SECONDS [FILE]
 *
 * It works for SECONDS, and then for as long as there is a FILE.
 *
 *   sizes    0 B to 16 MiB between neighbours in both directions; every other word of a vector; reductions, all-to-all
 *   long     128 KiB to 16 MiB between neighbours, in memory that is mapped for this round and unmapped after it, often at the same place, or lies
 *            at the end of the heap, which shrinks after the round; with another content a second time, while there may be a child of a fork; received as every other word of a vector
 *   threads  MPI_THREAD_MULTIPLE: four threads of each rank, each with messages and collectives of its own
 *   compute  each rank sends three messages to the next one at once, and then computes for a while without calling MPI. The
 *            next one must have them all long before that ends: otherwise they count as wrong
 *   spawn    each round spawns a process, exchanges data with it over the intercommunicator, and disconnects
 *
 * Rank 0 prints the same lines as slim_pp. Exit status: 0 all data right, 2 bad usage, 3 wrong data.
 * MPI's errors end the job.
 */
#include <mpi.h>

#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, SPAWNED_WORDS = 40000 };

static const size_t sizes[] = {
    0, 8, 64, 4096, 65528, 65536, 131072, 1u << 20, 16u << 20,
};
#define N_SIZES (sizeof sizes / sizeof sizes[0])
#define MAX_WORDS (((size_t)16 << 20) / 8)

static int rank, ranks;
static uint64_t wrong, moved;
static double started, step_ended, max_stall;

static uint64_t word(uint64_t round, int from, int to, size_t at)
{
    uint64_t x = (round * 1000003 + (uint64_t)from * 8191 + (uint64_t)to) * UINT64_C(0x9e3779b97f4a7c15) + at;
    x ^= x >> 31;
    return x * UINT64_C(0xbf58476d1ce4e5b9);
}

static void fill(uint64_t *buf, size_t words, uint64_t round, int from, int to)
{
    for (size_t i = 0; i < words; i++)
        buf[i] = word(round, from, to, i);
}

static void check(const uint64_t *buf, size_t words, size_t stride, uint64_t round, int from, int to)
{
    for (size_t i = 0; i < words; i++)
        if (buf[i * stride] != word(round, from, to, i) && __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED) < 5)
            fprintf(stderr, "slim_kinds: rank %d: round %" PRIu64 ": word %zu of %zu from %d is wrong\n", rank, round,
                    i, words, from);
}

static void step_done(size_t bytes)
{
    double now = MPI_Wtime();
    if (now - step_ended > max_stall)
        max_stall = now - step_ended;
    step_ended = now;
    moved += bytes;
}

/* Everybody to the next and from the one before, as a whole and as every other word of a vector. */
static void neighbours(MPI_Comm comm, uint64_t *out, uint64_t *in, size_t bytes, uint64_t round)
{
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    size_t words = bytes / 8, strided = words / 2;
    MPI_Datatype every_other;
    MPI_Status status;
    int got;

    fill(out, words, round, rank, to);
    memset(in, 0xa5, bytes);
    MPI_Sendrecv(out, (int)words, MPI_UINT64_T, to, 1, in, (int)words, MPI_UINT64_T, from, 1, comm, &status);
    MPI_Get_count(&status, MPI_UINT64_T, &got);
    if ((size_t)got != words)
        wrong++;
    check(in, words, 1, round, from, rank);
    step_done(2 * bytes);

    MPI_Type_vector((int)strided, 1, 2, MPI_UINT64_T, &every_other);
    MPI_Type_commit(&every_other);
    memset(out, 0x5a, bytes);
    for (size_t i = 0; i < strided; i++)
        out[2 * i] = word(round + 7, rank, to, i);
    memset(in, 0xa5, bytes);
    MPI_Sendrecv(out, 1, every_other, to, 2, in, 1, every_other, from, 2, comm, &status);
    check(in, strided, 2, round + 7, from, rank);
    for (size_t i = 0; i < strided; i++)
        if (in[2 * i + 1] != UINT64_C(0xa5a5a5a5a5a5a5a5))
            wrong++;
    MPI_Type_free(&every_other);
    step_done(bytes);
}

static void collectives(MPI_Comm comm, uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    for (size_t i = 0; i < words; i++)
        out[i] = word(round, 0, 0, i) + (uint64_t)rank;
    MPI_Allreduce(out, in, (int)words, MPI_UINT64_T, MPI_SUM, comm);
    for (size_t i = 0; i < words; i++)
        if (in[i] != (uint64_t)ranks * word(round, 0, 0, i) + (uint64_t)(ranks * (ranks - 1) / 2))
            __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
    for (int r = 0; r < ranks; r++)
        fill(out + (size_t)r * words, words, round, rank, r);
    MPI_Alltoall(out, (int)words, MPI_UINT64_T, in, (int)words, MPI_UINT64_T, comm);
    for (int r = 0; r < ranks; r++)
        check(in + (size_t)r * words, words, 1, round, r, rank);
}

struct lane {
    MPI_Comm comm;
    uint64_t round, bytes;
    int number;
};

static uint64_t *mapped(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        abort();
    return at;
}

/* Memory that is gone after the round: in odd rounds at the end of the heap. */
static uint64_t *passing(uint64_t round, size_t bytes)
{
    if (round % 2 == 0)
        return mapped(bytes);
    uint64_t *at = malloc(bytes);
    if (!at)
        abort();
    return at;
}

static void pass(uint64_t round, uint64_t *at, size_t bytes)
{
    if (round % 2 == 0)
        munmap(at, bytes);
    else
        free(at);
}

/* Long messages in memory that comes and goes, and that a child of a fork shares for a while. */
static void long_messages(uint64_t round)
{
    static const size_t lengths[] = {131072, 1u << 20, 200000 * 8, 16u << 20};
    size_t bytes = lengths[round % 4], words = bytes / 8;
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    uint64_t *out = passing(round, bytes), *in = passing(round, 2 * bytes);
    MPI_Datatype every_other;
    pid_t child = -1;

    for (uint64_t part = 0; part < 3; part++) {
        uint64_t key = round * 4 + part;
        fill(out, words, key, rank, to);
        memset(in, 0xa5, 2 * bytes);
        if (part < 2) {
            MPI_Sendrecv(out, (int)words, MPI_UINT64_T, to, 3, in, (int)words, MPI_UINT64_T, from, 3, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);
            check(in, words, 1, key, from, rank);
        } else {
            MPI_Type_vector((int)words, 1, 2, MPI_UINT64_T, &every_other);
            MPI_Type_commit(&every_other);
            MPI_Sendrecv(out, (int)words, MPI_UINT64_T, to, 4, in, 1, every_other, from, 4, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);
            MPI_Type_free(&every_other);
            check(in, words, 2, key, from, rank);
        }
        step_done(2 * bytes);
        if (part == 0 && round % 3 == 0) {
            child = fork();
            if (child == 0) {
                pause();
                _exit(0);
            }
        }
    }
    if (child > 0) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    pass(round, in, 2 * bytes);
    pass(round, out, bytes);
}

/* One thread's messages of a round: several at a time, of all sizes up to the rendezvous protocol. */
static void *run_lane(void *arg)
{
    struct lane *lane = arg;
    enum { AT_ONCE = 4 };
    static const size_t words[AT_ONCE] = {1, 500, 9000, 60000};
    int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    uint64_t *out[AT_ONCE], *in[AT_ONCE];
    MPI_Request requests[2 * AT_ONCE];

    for (int i = 0; i < AT_ONCE; i++) {
        uint64_t key = lane->round * 64 + (uint64_t)lane->number * AT_ONCE + (uint64_t)i;
        out[i] = malloc(words[i] * 8);
        in[i] = calloc(words[i], 8);
        fill(out[i], words[i], key, rank, to);
        MPI_Irecv(in[i], (int)words[i], MPI_UINT64_T, from, 10 + i, lane->comm, &requests[2 * i]);
        MPI_Isend(out[i], (int)words[i], MPI_UINT64_T, to, 10 + i, lane->comm, &requests[2 * i + 1]);
    }
    MPI_Waitall(2 * AT_ONCE, requests, MPI_STATUSES_IGNORE);
    for (int i = 0; i < AT_ONCE; i++) {
        uint64_t key = lane->round * 64 + (uint64_t)lane->number * AT_ONCE + (uint64_t)i;
        check(in[i], words[i], 1, key, from, rank);
        lane->bytes += words[i] * 16;
        free(in[i]);
        free(out[i]);
    }
    uint64_t *a = malloc((size_t)ranks * 4000), *b = malloc((size_t)ranks * 4000);
    collectives(lane->comm, a, b, 500, lane->round * 64 + (uint64_t)lane->number);
    free(a);
    free(b);
    return NULL;
}

static void threads(MPI_Comm comms[THREADS], uint64_t round)
{
    pthread_t ids[THREADS];
    struct lane lanes[THREADS];
    for (int t = 0; t < THREADS; t++) {
        lanes[t] = (struct lane){.comm = comms[t], .round = round, .number = t};
        if (pthread_create(&ids[t], NULL, run_lane, &lanes[t]) != 0)
            abort();
    }
    size_t bytes = 0;
    for (int t = 0; t < THREADS; t++) {
        pthread_join(ids[t], NULL);
        bytes += lanes[t].bytes;
    }
    step_done(bytes);
}

/* The first half of the ranks computes after its sends, the other half waits for the messages; in the next round the other way round. */
static void compute(uint64_t *out, uint64_t *in, uint64_t round)
{
    enum { MESSAGES = 3 };
    static const size_t words[MESSAGES] = {4, 4, 2000};
    const double busy = 0.3, late = 0.15;
    int peer = (rank + ranks / 2) % ranks, computes = (rank < ranks / 2) == (round % 2 == 0);
    MPI_Request requests[MESSAGES];

    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    for (int m = 0; m < MESSAGES; m++) {
        uint64_t *at = (computes ? out : in) + m * 4000;
        if (computes) {
            fill(at, words[m], round + (uint64_t)m, rank, peer);
            MPI_Isend(at, (int)words[m], MPI_UINT64_T, peer, 5, MPI_COMM_WORLD, &requests[m]);
        } else {
            MPI_Recv(at, (int)words[m], MPI_UINT64_T, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            check(at, words[m], 1, round + (uint64_t)m, peer, rank);
        }
    }
    if (computes) {
        usleep((useconds_t)(busy * 1e6));
        MPI_Waitall(MESSAGES, requests, MPI_STATUSES_IGNORE);
    } else if (MPI_Wtime() - begun > late) {
        fprintf(stderr, "slim_kinds: rank %d: the messages came only after %.3f s\n", rank, MPI_Wtime() - begun);
        wrong++;
    }
    step_done(8 * (4 + 4 + 2000));
}

/* Everybody of the parents sends to the spawned process, which sends it back. */
static void spawn(char *self, uint64_t *out, uint64_t *in, uint64_t round)
{
    char *args[] = {(char *)"spawned", NULL};
    MPI_Comm child;
    MPI_Comm_spawn(self, args, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &child, MPI_ERRCODES_IGNORE);
    fill(out, SPAWNED_WORDS, round, rank, 99);
    MPI_Sendrecv(out, SPAWNED_WORDS, MPI_UINT64_T, 0, 3, in, SPAWNED_WORDS, MPI_UINT64_T, 0, 4, child,
                 MPI_STATUS_IGNORE);
    check(in, SPAWNED_WORDS, 1, round, rank, 99);
    MPI_Comm_disconnect(&child);
    step_done(SPAWNED_WORDS * 16);
}

static int be_spawned(MPI_Comm parent)
{
    int parents;
    uint64_t *buf = malloc(SPAWNED_WORDS * 8);
    MPI_Comm_remote_size(parent, &parents);
    for (int r = 0; r < parents; r++) {
        MPI_Recv(buf, SPAWNED_WORDS, MPI_UINT64_T, r, 3, parent, MPI_STATUS_IGNORE);
        MPI_Send(buf, SPAWNED_WORDS, MPI_UINT64_T, r, 4, parent);
    }
    free(buf);
    MPI_Comm_disconnect(&parent);
    MPI_Finalize();
    return 0;
}

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "";
    const char *file = argc > 3 ? argv[3] : NULL;
    int provided, is_threads = strcmp(kind, "threads") == 0, is_spawn = strcmp(kind, "spawn") == 0,
                  is_compute = strcmp(kind, "compute") == 0, is_long = strcmp(kind, "long") == 0;
    MPI_Comm parent, comms[THREADS];

    MPI_Init_thread(&argc, &argv, is_threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_get_parent(&parent);
    if (parent != MPI_COMM_NULL)
        return be_spawned(parent);
    double seconds = argc > 2 ? atof(argv[2]) : 0;
    if (!(seconds > 0) || (is_threads && provided < MPI_THREAD_MULTIPLE) ||
        (!is_threads && !is_spawn && !is_compute && !is_long && strcmp(kind, "sizes") != 0)) {
        fprintf(stderr, "usage: slim_kinds sizes|long|threads|spawn|compute SECONDS [FILE]\n");
        MPI_Finalize();
        return 2;
    }
    uint64_t *out = malloc(MAX_WORDS * 8), *in = malloc(MAX_WORDS * 8);
    if (!out || !in)
        return 2;
    if (is_long) {
        /* All but the longest memory is of the heap, and what is free at its end goes back to the kernel at once. */
        mallopt(M_MMAP_THRESHOLD, 32 << 20);
        mallopt(M_TRIM_THRESHOLD, 0);
    }
    for (int t = 0; t < THREADS; t++)
        MPI_Comm_dup(MPI_COMM_WORLD, &comms[t]);
    MPI_Barrier(MPI_COMM_WORLD);
    started = step_ended = MPI_Wtime();

    uint64_t round = 0;
    long printed = 0;
    for (int stop = 0; !stop; round++) {
        if (is_threads) {
            threads(comms, round);
        } else if (is_spawn) {
            spawn(argv[0], out, in, round);
        } else if (is_compute) {
            compute(out, in, round);
        } else if (is_long) {
            long_messages(round);
        } else {
            size_t bytes = sizes[round % N_SIZES];
            neighbours(MPI_COMM_WORLD, out, in, bytes, round);
            collectives(MPI_COMM_WORLD, out, in, bytes < 65536 ? bytes / 8 : 8192, round);
            step_done(2 * bytes);
        }
        double t = MPI_Wtime() - started;
        stop = t >= seconds && (!file || access(file, F_OK) != 0);
        MPI_Bcast(&stop, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (rank == 0 && (long)t > printed) {
            printed = (long)t;
            printf("t=%ld it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f\n", printed, round + 1, wrong,
                   moved >> 20, max_stall);
            fflush(stdout);
        }
    }
    uint64_t all_wrong = 0;
    MPI_Allreduce(&wrong, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        struct timeval now;
        gettimeofday(&now, NULL);
        printf("DONE it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%ld.%03ld\n", round, all_wrong,
               moved >> 20, max_stall, (long)now.tv_sec, (long)now.tv_usec / 1000);
        fflush(stdout);
    }
    for (int t = 0; t < THREADS; t++)
        MPI_Comm_free(&comms[t]);
    MPI_Finalize();
    return all_wrong ? 3 : 0;
}
