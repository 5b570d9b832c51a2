/*
 * slim_coll: an MPI program that repeats one collective operation, checks every
 * word, and records the time of every call.
 *
 *   mpicc -O2 -o slim_coll slim_coll.c
 *   mpirun -n 4 ./slim_coll COLLECTIVE BYTES SECONDS [DIR [FILE]]
 *
 * COLLECTIVE: allreduce, bcast, alltoall, allgather or reduce_scatter.
 * BYTES: size of the whole vector at one rank; alltoall, allgather and
 * reduce_scatter divide it into one block for each rank.
 * It runs for SECONDS, and then for as long as FILE exists.
 *
 * Each rank writes DIR/calls.RANK with one line for each call, in seconds: when
 * the call began (since 1970), and how long it took.
 *
 * Rank 0 prints a line when the work has begun, one for each rank with the times
 * of its calls in milliseconds, and at the end:
 *
 *   t=0 it=16 errs=0 MB=4 maxstall=0.002
 *   rank=0 calls=1300 median=0.412 p99=1.830 longest=9.100 slow=3
 *   DONE it=1300 errs=0 MB=325 maxstall=0.009 at=1763694000.123
 *
 * slow: number of calls longer than twice the median and a millisecond; the other
 * words are those of slim_pp. Exit status: 0 all data right, 2 bad usage, 3 wrong
 * data, 4 MPI error.
 */
#include <mpi.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_REPORTS = 5, CALLS_BETWEEN_CHECKS = 16, MAX_RANKS = 64 };

struct call {
    double start, took;
};

static int rank, ranks;
static uint64_t wrong_words;
static struct call *calls;
static size_t n_calls, room_for_calls;

static void mpi_failed(int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    fprintf(stderr, "slim_coll: rank %d: %s: %.*s\n", rank, what, length, text);
    fflush(stderr);
    /* Not MPI_Abort: it contacts peers that may be out of reach. The launcher notices the exit anyway. */
    _exit(4);
}

#define CHECK(call_)                                \
    do {                                            \
        int code_ = (call_);                        \
        if (code_ != MPI_SUCCESS)                   \
            mpi_failed(code_, #call_);              \
    } while (0)

static void *must_have(void *p)
{
    if (!p) {
        fprintf(stderr, "slim_coll: rank %d: no memory\n", rank);
        _exit(4);
    }
    return p;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* splitmix64's finalizer: neighbours in any argument give unrelated words. */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Word `index` that rank `from` gives to rank `to` in call `round`. */
static uint64_t word(uint64_t round, int from, int to, size_t index)
{
    uint64_t k = mix(round + 1) ^ ((uint64_t)from << 32) ^ (uint64_t)(uint32_t)to;
    return mix(mix(k) + index * UINT64_C(0x9e3779b97f4a7c15));
}

/* The sum of what all ranks give, for reductions: word of rank 0, and the number of the rank. */
static uint64_t summand(uint64_t round, int from, size_t index)
{
    return word(round, 0, 0, index) + (uint64_t)from;
}

static uint64_t sum(uint64_t round, size_t index)
{
    uint64_t n = (uint64_t)ranks;
    return n * word(round, 0, 0, index) + n * (n - 1) / 2;
}

static void expect(const char *what, uint64_t round, size_t index, uint64_t got, uint64_t wanted)
{
    if (got != wanted && wrong_words++ < MAX_REPORTS)
        fprintf(stderr, "slim_coll: rank %d: wrong data in %s, call %" PRIu64 ", word %zu\n", rank,
                what, round, index);
}

static void record(double start)
{
    if (n_calls == room_for_calls) {
        room_for_calls = room_for_calls ? 2 * room_for_calls : 4096;
        calls = must_have(realloc(calls, room_for_calls * sizeof *calls));
    }
    calls[n_calls++] = (struct call){start, now() - start};
}

static void allreduce(uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    for (size_t i = 0; i < words; i++)
        out[i] = summand(round, rank, i);
    double start = now();
    CHECK(MPI_Allreduce(out, in, (int)words, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    record(start);
    for (size_t i = 0; i < words; i++)
        expect("allreduce", round, i, in[i], sum(round, i));
}

/* Each rank is the root in turn. */
static void bcast(uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    int root = (int)(round % (uint64_t)ranks);
    (void)out;
    for (size_t i = 0; i < words; i++)
        in[i] = rank == root ? word(round, root, 0, i) : 0;
    double start = now();
    CHECK(MPI_Bcast(in, (int)words, MPI_UINT64_T, root, MPI_COMM_WORLD));
    record(start);
    for (size_t i = 0; i < words; i++)
        expect("bcast", round, i, in[i], word(round, root, 0, i));
}

static void alltoall(uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    size_t block = words / (size_t)ranks;
    for (int to = 0; to < ranks; to++)
        for (size_t i = 0; i < block; i++)
            out[(size_t)to * block + i] = word(round, rank, to, i);
    double start = now();
    CHECK(MPI_Alltoall(out, (int)block, MPI_UINT64_T, in, (int)block, MPI_UINT64_T,
                       MPI_COMM_WORLD));
    record(start);
    for (int from = 0; from < ranks; from++)
        for (size_t i = 0; i < block; i++)
            expect("alltoall", round, i, in[(size_t)from * block + i], word(round, from, rank, i));
}

static void allgather(uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    size_t block = words / (size_t)ranks;
    for (size_t i = 0; i < block; i++)
        out[i] = word(round, rank, 0, i);
    double start = now();
    CHECK(MPI_Allgather(out, (int)block, MPI_UINT64_T, in, (int)block, MPI_UINT64_T,
                        MPI_COMM_WORLD));
    record(start);
    for (int from = 0; from < ranks; from++)
        for (size_t i = 0; i < block; i++)
            expect("allgather", round, i, in[(size_t)from * block + i], word(round, from, 0, i));
}

static void reduce_scatter(uint64_t *out, uint64_t *in, size_t words, uint64_t round)
{
    size_t block = words / (size_t)ranks;
    int counts[MAX_RANKS];
    for (int r = 0; r < ranks; r++)
        counts[r] = (int)block;
    for (size_t i = 0; i < block * (size_t)ranks; i++)
        out[i] = summand(round, rank, i);
    double start = now();
    CHECK(MPI_Reduce_scatter(out, in, counts, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    record(start);
    for (size_t i = 0; i < block; i++)
        expect("reduce_scatter", round, i, in[i], sum(round, (size_t)rank * block + i));
}

typedef void collective(uint64_t *, uint64_t *, size_t, uint64_t);

static collective *find(const char *name)
{
    static const struct {
        const char *name;
        collective *run;
    } known[] = {
        {"allreduce", allreduce}, {"bcast", bcast},
        {"alltoall", alltoall},   {"allgather", allgather},
        {"reduce_scatter", reduce_scatter},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(known[i].name, name) == 0)
            return known[i].run;
    return NULL;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the times of the calls of each rank; returns the longest at any rank. */
static double summarize(void)
{
    double *took = must_have(malloc((n_calls + 1) * sizeof *took));
    for (size_t i = 0; i < n_calls; i++)
        took[i] = calls[i].took * 1e3;
    qsort(took, n_calls, sizeof *took, by_size);
    double median = took[n_calls / 2], limit = median < 1 ? 1 + median : 2 * median;
    double own[5] = {(double)n_calls, median, took[n_calls * 99 / 100], took[n_calls - 1], 0};
    for (size_t i = 0; i < n_calls; i++)
        own[4] += took[i] > limit;
    free(took);
    double all[5 * MAX_RANKS], longest = 0;
    CHECK(MPI_Gather(own, 5, MPI_DOUBLE, all, 5, MPI_DOUBLE, 0, MPI_COMM_WORLD));
    for (int r = 0; rank == 0 && r < ranks; r++) {
        const double *a = &all[5 * r];
        printf("rank=%d calls=%.0f median=%.3f p99=%.3f longest=%.3f slow=%.0f\n", r, a[0], a[1],
               a[2], a[3], a[4]);
        longest = a[3] > longest ? a[3] : longest;
    }
    return longest;
}

static void write_calls(const char *dir)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/calls.%d", dir, rank);
    FILE *file = fopen(path, "w");
    for (size_t i = 0; file && i < n_calls; i++)
        fprintf(file, "%.6f %.6f\n", calls[i].start, calls[i].took);
    if (!file || fclose(file) != 0) {
        perror(path);
        _exit(4);
    }
}

int main(int argc, char **argv)
{
    collective *run = argc >= 4 && argc <= 6 ? find(argv[1]) : NULL;
    long bytes = run ? atol(argv[2]) : 0;
    double seconds = run ? atof(argv[3]) : 0;
    const char *dir = argc > 4 ? argv[4] : NULL, *file = argc > 5 ? argv[5] : NULL;
    if (!run || bytes < 8 || bytes > 1 << 30 || seconds <= 0) {
        fprintf(stderr, "usage: slim_coll COLLECTIVE BYTES SECONDS [DIR [FILE]]\n");
        return 2;
    }

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    size_t words = (size_t)bytes / 8;
    if (ranks < 2 || ranks > MAX_RANKS || words < (size_t)ranks) {
        fprintf(stderr, "slim_coll: needs 2 to %d ranks, and a word for each\n", MAX_RANKS);
        MPI_Finalize();
        return 2;
    }
    uint64_t *out = must_have(calloc(words, 8)), *in = must_have(calloc(words, 8));

    /* The first calls make connections; their times do not count. */
    uint64_t round = 0;
    for (; round < CALLS_BETWEEN_CHECKS; round++)
        run(out, in, words, round);
    n_calls = 0;
    CHECK(MPI_Barrier(MPI_COMM_WORLD));
    if (rank == 0) {
        printf("t=0 it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=0\n", round,
               wrong_words, round * (uint64_t)bytes >> 20);
        fflush(stdout);
    }

    double started = now();
    for (int stop = 0; !stop;) {
        for (int i = 0; i < CALLS_BETWEEN_CHECKS; i++)
            run(out, in, words, round++);
        /* Rank 0 decides when to stop, so that all ranks make the same number of calls. */
        stop = now() - started >= seconds && (!file || access(file, F_OK) != 0);
        CHECK(MPI_Bcast(&stop, 1, MPI_INT, 0, MPI_COMM_WORLD));
    }

    uint64_t all_wrong = 0;
    CHECK(MPI_Allreduce(&wrong_words, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    double at = now(), longest = summarize();
    if (dir)
        write_calls(dir);
    CHECK(MPI_Barrier(MPI_COMM_WORLD));
    if (rank == 0) {
        printf("DONE it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%.3f\n", round,
               all_wrong, round * (uint64_t)bytes >> 20, longest / 1e3, at);
        fflush(stdout);
    }
    free(out);
    free(in);
    free(calls);
    MPI_Finalize();
    return all_wrong ? 3 : 0;
}
