/*
 * slim_bench: how fast MPI moves messages, one line of JSON for each figure.
 *
 *   mpicc -O2 -o slim_bench slim_bench.c
 *   mpirun -n 2 ./slim_bench MILLISECONDS TEST:BYTES...
 *
 * Tests (all ranks take part in the collectives; ranks 0 and 1 alone in the others):
 *
 *   latency    half of the round trip of a ping-pong, in microseconds
 *   bandwidth  windows of 16 messages, each answered by one short message, in MB/s (10^6 bytes)
 *   rate       the same with windows of 64 messages, in messages a second
 *   allreduce  one MPI_Allreduce of doubles over all ranks, in microseconds
 *   alltoall   one MPI_Alltoall with BYTES for each rank, in microseconds
 *   count      exactly MILLISECONDS round trips without warm-up, for instruction counters
 *
 * Each test warms up first, then runs for about MILLISECONDS, in five parts; the figure is the median
 * of the parts. Rank i stays on the i-th core that it may use (counted around), so that a figure does
 * not depend on where the scheduler puts two ranks. Exit status: 0, or 2 for bad usage.
 *
 *   {"test":"latency","bytes":8,"value":5.21,"unit":"us","iterations":61234}
 */
#define _GNU_SOURCE
#include <mpi.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS = 5, BANDWIDTH_WINDOW = 16, RATE_WINDOW = 64, MAX_WINDOW = 64, TAG = 1, ANSWER = 2 };

static int rank, ranks;
static char *out, *in;

static void ping_pong(int bytes, long times)
{
    for (long i = 0; i < times; i++) {
        if (rank == 0) {
            MPI_Send(out, bytes, MPI_CHAR, 1, TAG, MPI_COMM_WORLD);
            MPI_Recv(in, bytes, MPI_CHAR, 1, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
            MPI_Recv(in, bytes, MPI_CHAR, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(out, bytes, MPI_CHAR, 0, TAG, MPI_COMM_WORLD);
        }
    }
}

static void window(int bytes, long times, int width)
{
    MPI_Request requests[MAX_WINDOW];
    if (rank > 1)
        return;
    for (long i = 0; i < times; i++) {
        for (int w = 0; w < width; w++) {
            if (rank == 0)
                MPI_Isend(out, bytes, MPI_CHAR, 1, TAG, MPI_COMM_WORLD, &requests[w]);
            else
                MPI_Irecv(in, bytes, MPI_CHAR, 0, TAG, MPI_COMM_WORLD, &requests[w]);
        }
        MPI_Waitall(width, requests, MPI_STATUSES_IGNORE);
        if (rank == 0)
            MPI_Recv(in, 1, MPI_CHAR, 1, ANSWER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(out, 1, MPI_CHAR, 0, ANSWER, MPI_COMM_WORLD);
    }
}

static void bandwidth(int bytes, long times)
{
    window(bytes, times, BANDWIDTH_WINDOW);
}

static void rate(int bytes, long times)
{
    window(bytes, times, RATE_WINDOW);
}

static void allreduce(int bytes, long times)
{
    int count = bytes / (int)sizeof(double);
    for (long i = 0; i < times; i++)
        MPI_Allreduce(out, in, count > 0 ? count : 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

static void alltoall(int bytes, long times)
{
    for (long i = 0; i < times; i++)
        MPI_Alltoall(out, bytes, MPI_CHAR, in, bytes, MPI_CHAR, MPI_COMM_WORLD);
}

/* What one second holds is turned into what the test is about. */
enum figure { HALF_TRIP, MEGABYTES, MESSAGES, EACH };

static const struct test {
    const char *name;
    void (*run)(int bytes, long times);
    enum figure figure;
    const char *unit;
} tests[] = {
    { "latency", ping_pong, HALF_TRIP, "us" },
    { "bandwidth", bandwidth, MEGABYTES, "MB/s" },
    { "rate", rate, MESSAGES, "1/s" },
    { "allreduce", allreduce, EACH, "us" },
    { "alltoall", alltoall, EACH, "us" },
    { "count", ping_pong, HALF_TRIP, "us" },
};

static double figure(const struct test *test, int bytes, long times, double seconds)
{
    double each = seconds / (double)times;
    switch (test->figure) {
    case HALF_TRIP:
        return each * 1e6 / 2;
    case MEGABYTES:
        return BANDWIDTH_WINDOW * (double)bytes / each / 1e6;
    case MESSAGES:
        return RATE_WINDOW / each;
    default:
        return each * 1e6;
    }
}

/* Rank 0's time for so many repetitions. */
static double timed(const struct test *test, int bytes, long times)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    test->run(bytes, times);
    return MPI_Wtime() - start;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How often to run it for so long; finding that out is the warm-up. */
static long calibrated(const struct test *test, int bytes, double seconds)
{
    long times = 1;
    for (;;) {
        double took = timed(test, bytes, times);
        long next = times;
        if (took < seconds / 2)
            next = took < seconds / 16 ? times * 8 : times * 2;
        MPI_Bcast(&next, 1, MPI_LONG, 0, MPI_COMM_WORLD);
        if (next == times)
            break;
        times = next;
    }
    return times;
}

static void measure(const struct test *test, int bytes, double seconds)
{
    double parts[PARTS];
    long times = calibrated(test, bytes, seconds / PARTS);
    for (int i = 0; i < PARTS; i++)
        parts[i] = timed(test, bytes, times);
    qsort(parts, PARTS, sizeof *parts, by_value);
    if (rank == 0) {
        printf("{\"test\":\"%s\",\"bytes\":%d,\"value\":%.4f,\"unit\":\"%s\",\"iterations\":%ld}\n",
               test->name, bytes, figure(test, bytes, times, parts[PARTS / 2]), test->unit,
               times * PARTS);
        fflush(stdout);
    }
}

/* Before MPI_Init, so that every thread of the process stays there too. */
static void pin(void)
{
    static const char *const names[] = { "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK" };
    const char *number = NULL;
    cpu_set_t may, one;
    for (size_t i = 0; !number && i < sizeof names / sizeof *names; i++)
        number = getenv(names[i]);
    if (!number || sched_getaffinity(0, sizeof may, &may) != 0)
        return;
    int skip = atoi(number) % CPU_COUNT(&may);
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &may) && skip-- == 0)
            CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static int usage(const char *what)
{
    fprintf(stderr, "slim_bench: %s\nusage: slim_bench MILLISECONDS TEST:BYTES...\n", what);
    return 2;
}

int main(int argc, char **argv)
{
    if (argc < 3 || atol(argv[1]) <= 0)
        return usage("needs a time and a test");
    pin();
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 2; i < argc; i++) {
        const struct test *test = NULL;
        const char *colon = strchr(argv[i], ':');
        for (size_t t = 0; colon && t < sizeof tests / sizeof *tests; t++)
            if (strlen(tests[t].name) == (size_t)(colon - argv[i])
                && strncmp(tests[t].name, argv[i], (size_t)(colon - argv[i])) == 0)
                test = &tests[t];
        int bytes = colon ? atoi(colon + 1) : 0;
        if (!test || bytes <= 0 || ranks < 2) {
            MPI_Finalize();
            return usage(ranks < 2 ? "needs 2 ranks or more" : argv[i]);
        }
        size_t room = (size_t)bytes * (size_t)ranks + sizeof(double);
        out = calloc(1, room);
        in = calloc(1, room);
        if (!out || !in)
            MPI_Abort(MPI_COMM_WORLD, 1);
        if (strcmp(test->name, "count") == 0)
            ping_pong(bytes, atol(argv[1]));
        else
            measure(test, bytes, atol(argv[1]) / 1000.0);
        free(out);
        free(in);
    }
    MPI_Finalize();
    return 0;
}
