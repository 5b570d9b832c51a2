/*
 * slim_pp: an MPI program that checks every byte it receives.
 *
 *   mpicc -O2 -o slim_pp slim_pp.c
 *   mpirun -n 2 ./slim_pp SECONDS [FILE]
 *
 * It runs for SECONDS, and then for as long as FILE exists.
 *
 * Every round uses the next message size (8 B to 4 MiB, some of them odd) for
 * ping-pongs, a non-blocking exchange, a broadcast, an allreduce and an
 * alltoall among any number of ranks >= 2. The content of each message is a
 * function of (round, step, repetition, sender, receiver), so data that is lost,
 * repeated, moved or left over from an earlier message is found.
 *
 * Rank 0 prints once a second, and at the end with DONE in front:
 *
 *   t=3 it=120 errs=0 MB=512 maxstall=0.012
 *   DONE it=310 errs=0 MB=1300 maxstall=0.012 at=1763694000.123
 *
 * t: seconds, it: rounds, errs: wrong words seen (by rank 0; in the DONE line
 * by all ranks), MB: MiB moved by rank 0, maxstall: longest time in seconds
 * that one step took at rank 0, at: the wall clock when all ranks had all
 * their data (after that they only leave MPI).
 *
 * Exit status: 0 all data right, 2 bad usage, 3 wrong data, 4 MPI error.
 */
#include <mpi.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WORD = 8, GUARD = 64, MAX_REPORTS = 5 };
enum { TAG_PING = 11, TAG_PONG = 12, TAG_EXCHANGE = 13 };

/* Steps of a round; part of the key of a message. */
enum step { PING = 1, PONG, EXCHANGE_FAR, EXCHANGE_NEAR, BCAST, ALLREDUCE, ALLTOALL };

static const size_t sizes[] = {
    8, 999, 4096, 16391, 65536, 262147, 1u << 20, 4u << 20,
};
#define N_SIZES (sizeof sizes / sizeof sizes[0])
#define MAX_BYTES ((size_t)4 << 20)
/* Collectives with one block for each rank use smaller blocks. */
#define MAX_REDUCE_BYTES ((size_t)1 << 20)
#define MAX_BLOCK_BYTES ((size_t)64 << 10)

static int rank, ranks;
static double started, step_ended, max_stall;
static uint64_t wrong_words, bytes_moved;

static void mpi_failed(int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    fprintf(stderr, "slim_pp: rank %d: t=%.2f: %s: %.*s\n", rank, MPI_Wtime() - started, what,
            length, text);
    fflush(stderr);
    /* Not MPI_Abort: it contacts peers that may be out of reach. The launcher notices the exit anyway. */
    _exit(4);
}

#define CHECK(call)                                 \
    do {                                            \
        int code_ = (call);                         \
        if (code_ != MPI_SUCCESS)                   \
            mpi_failed(code_, #call);               \
    } while (0)

static void *must_alloc(size_t bytes)
{
    void *p = malloc(bytes);
    if (!p) {
        fprintf(stderr, "slim_pp: rank %d: no memory for %zu bytes\n", rank, bytes);
        _exit(4);
    }
    return p;
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

static uint64_t key_of(uint64_t round, enum step step, uint64_t repeat, int from, int to)
{
    uint64_t k = mix(round + 1);
    k = mix(k ^ ((uint64_t)step << 56) ^ repeat);
    return mix(k ^ ((uint64_t)from << 32) ^ (uint64_t)(uint32_t)to);
}

static uint64_t word_at(uint64_t key, size_t index)
{
    return mix(key + index * UINT64_C(0x9e3779b97f4a7c15));
}

static void fill(unsigned char *buf, size_t bytes, uint64_t key)
{
    size_t i, words = bytes / WORD;
    for (i = 0; i < words; i++) {
        uint64_t w = word_at(key, i);
        memcpy(buf + i * WORD, &w, WORD);
    }
    if (bytes % WORD) {
        uint64_t w = word_at(key, words);
        memcpy(buf + words * WORD, &w, bytes % WORD);
    }
}

static void report(const char *what, size_t offset)
{
    if (wrong_words++ < MAX_REPORTS)
        fprintf(stderr, "slim_pp: rank %d: t=%.2f: wrong data in %s at byte %zu\n", rank,
                MPI_Wtime() - started, what, offset);
}

static void verify(const char *what, const unsigned char *buf, size_t bytes, uint64_t key)
{
    size_t at;
    for (at = 0; at < bytes; at += WORD) {
        size_t n = bytes - at < WORD ? bytes - at : WORD;
        uint64_t w = word_at(key, at / WORD);
        if (memcmp(buf + at, &w, n) != 0)
            report(what, at);
    }
}

/* The bytes behind a received message must not change. */
static void arm_guard(unsigned char *buf, size_t bytes)
{
    memset(buf + bytes, 0xa5, GUARD);
}

static void verify_guard(const char *what, const unsigned char *buf, size_t bytes)
{
    size_t i;
    for (i = 0; i < GUARD; i++)
        if (buf[bytes + i] != 0xa5) {
            report(what, bytes + i);
            return;
        }
}

static void verify_count(const char *what, const MPI_Status *status, size_t bytes)
{
    int got = -1;
    CHECK(MPI_Get_count(status, MPI_BYTE, &got));
    if (got < 0 || (size_t)got != bytes)
        report(what, bytes);
}

/* Called after each step: records the longest time between two calls. */
static void step_done(uint64_t bytes)
{
    double now = MPI_Wtime();
    if (now - step_ended > max_stall)
        max_stall = now - step_ended;
    step_ended = now;
    bytes_moved += bytes;
}

static void send_checked(unsigned char *buf, size_t bytes, int to, int tag, uint64_t key)
{
    fill(buf, bytes, key);
    CHECK(MPI_Send(buf, (int)bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD));
}

static void recv_checked(const char *what, unsigned char *buf, size_t bytes, int from, int tag,
                         uint64_t key)
{
    MPI_Status status;
    arm_guard(buf, bytes);
    CHECK(MPI_Recv(buf, (int)bytes, MPI_BYTE, from, tag, MPI_COMM_WORLD, &status));
    verify_count(what, &status, bytes);
    verify(what, buf, bytes, key);
    verify_guard(what, buf, bytes);
}

/* Rank i of the lower half with rank i + half. If the number of ranks is odd, the last one is idle. */
static void ping_pong(unsigned char *out, unsigned char *in, size_t bytes, uint64_t round)
{
    int half = ranks / 2;
    uint64_t repeat, repeats = bytes <= 1024 ? 20 : 1;
    if (rank >= 2 * half)
        return;
    for (repeat = 0; repeat < repeats; repeat++) {
        if (rank < half) {
            int peer = rank + half;
            send_checked(out, bytes, peer, TAG_PING, key_of(round, PING, repeat, rank, peer));
            recv_checked("pong", in, bytes, peer, TAG_PONG,
                         key_of(round, PONG, repeat, peer, rank));
        } else {
            int peer = rank - half;
            recv_checked("ping", in, bytes, peer, TAG_PING,
                         key_of(round, PING, repeat, peer, rank));
            send_checked(out, bytes, peer, TAG_PONG, key_of(round, PONG, repeat, rank, peer));
        }
        step_done(2 * (uint64_t)bytes);
    }
}

/* Every rank sends to rank + shift and receives from rank - shift at the same time. */
static void exchange(unsigned char *out, unsigned char *in, size_t bytes, uint64_t round, int shift,
                     enum step step)
{
    int to = (rank + shift) % ranks, from = (rank - shift + ranks) % ranks;
    MPI_Request requests[2];
    MPI_Status statuses[2];
    fill(out, bytes, key_of(round, step, 0, rank, to));
    arm_guard(in, bytes);
    CHECK(MPI_Irecv(in, (int)bytes, MPI_BYTE, from, TAG_EXCHANGE, MPI_COMM_WORLD, &requests[0]));
    CHECK(MPI_Isend(out, (int)bytes, MPI_BYTE, to, TAG_EXCHANGE, MPI_COMM_WORLD, &requests[1]));
    CHECK(MPI_Waitall(2, requests, statuses));
    verify_count("exchange", &statuses[0], bytes);
    verify("exchange", in, bytes, key_of(round, step, 0, from, rank));
    verify_guard("exchange", in, bytes);
    step_done(2 * (uint64_t)bytes);
}

static void broadcast(unsigned char *buf, size_t bytes, uint64_t round)
{
    int root = (int)(round % (uint64_t)ranks);
    uint64_t key = key_of(round, BCAST, 0, root, -1);
    if (rank == root)
        fill(buf, bytes, key);
    arm_guard(buf, bytes);
    CHECK(MPI_Bcast(buf, (int)bytes, MPI_BYTE, root, MPI_COMM_WORLD));
    verify("broadcast", buf, bytes, key);
    verify_guard("broadcast", buf, bytes);
    step_done(bytes);
}

/* Each rank gives base[i] + rank, so the sum (modulo 2^64) is known without a second message. */
static void allreduce(unsigned char *out, unsigned char *in, size_t bytes, uint64_t round)
{
    size_t i, words = (bytes < MAX_REDUCE_BYTES ? bytes : MAX_REDUCE_BYTES) / WORD;
    uint64_t key = key_of(round, ALLREDUCE, 0, -1, -1);
    uint64_t n = (uint64_t)ranks, ranks_sum = n * (n - 1) / 2;
    for (i = 0; i < words; i++) {
        uint64_t w = word_at(key, i) + (uint64_t)rank;
        memcpy(out + i * WORD, &w, WORD);
    }
    arm_guard(in, words * WORD);
    CHECK(MPI_Allreduce(out, in, (int)words, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    for (i = 0; i < words; i++) {
        uint64_t got;
        memcpy(&got, in + i * WORD, WORD);
        if (got != n * word_at(key, i) + ranks_sum)
            report("allreduce", i * WORD);
    }
    verify_guard("allreduce", in, words * WORD);
    step_done(2 * (uint64_t)words * WORD);
}

static void alltoall(unsigned char *out, unsigned char *in, size_t bytes, uint64_t round)
{
    size_t block = bytes < MAX_BLOCK_BYTES ? bytes : MAX_BLOCK_BYTES;
    int r;
    for (r = 0; r < ranks; r++)
        fill(out + (size_t)r * block, block, key_of(round, ALLTOALL, 0, rank, r));
    arm_guard(in, (size_t)ranks * block);
    CHECK(MPI_Alltoall(out, (int)block, MPI_BYTE, in, (int)block, MPI_BYTE, MPI_COMM_WORLD));
    for (r = 0; r < ranks; r++)
        verify("alltoall", in + (size_t)r * block, block, key_of(round, ALLTOALL, 0, r, rank));
    verify_guard("alltoall", in, (size_t)ranks * block);
    step_done(2 * (uint64_t)ranks * block);
}

/* Rank 0 decides when to stop, so that all ranks do the same number of rounds. */
static int time_is_up(double seconds, const char *file)
{
    int stop = MPI_Wtime() - started >= seconds && (!file || access(file, F_OK) != 0);
    CHECK(MPI_Bcast(&stop, 1, MPI_INT, 0, MPI_COMM_WORLD));
    step_done(0);
    return stop;
}

int main(int argc, char **argv)
{
    char *end = NULL;
    int usage = argc == 2 || argc == 3;
    double seconds = usage ? strtod(argv[1], &end) : -1.0;
    if (!usage || end == argv[1] || *end != '\0' || !(seconds > 0.0)) {
        fprintf(stderr, "usage: slim_pp SECONDS [FILE]\n");
        return 2;
    }
    const char *file = argc == 3 ? argv[2] : NULL;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (ranks < 2) {
        fprintf(stderr, "slim_pp: needs 2 ranks or more\n");
        MPI_Finalize();
        return 2;
    }

    size_t room = MAX_BYTES > (size_t)ranks * MAX_BLOCK_BYTES ? MAX_BYTES
                                                               : (size_t)ranks * MAX_BLOCK_BYTES;
    unsigned char *out = must_alloc(room + GUARD), *in = must_alloc(room + GUARD);
    int half = ranks / 2;

    /* All ranks start together, so that the launch of the slowest one does not count as a stall. */
    started = MPI_Wtime();
    CHECK(MPI_Barrier(MPI_COMM_WORLD));
    started = step_ended = MPI_Wtime();

    uint64_t round = 0;
    long printed = 0;
    for (int stop = 0; !stop; round++) {
        size_t bytes = sizes[round % N_SIZES];
        ping_pong(out, in, bytes, round);
        exchange(out, in, bytes, round, half, EXCHANGE_FAR);
        exchange(out, in, bytes, round, 1, EXCHANGE_NEAR);
        broadcast(in, bytes, round);
        allreduce(out, in, bytes, round);
        alltoall(out, in, bytes, round);
        stop = time_is_up(seconds, file);
        long t = (long)(MPI_Wtime() - started);
        if (rank == 0 && t != printed) {
            printed = t;
            printf("t=%ld it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f\n", t,
                   round + 1, wrong_words, bytes_moved >> 20, max_stall);
            fflush(stdout);
        }
    }

    uint64_t all_wrong = 0;
    CHECK(MPI_Allreduce(&wrong_words, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
    step_done(0);
    if (rank == 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        printf("DONE it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%lld.%03ld\n",
               round, all_wrong, bytes_moved >> 20, max_stall, (long long)now.tv_sec,
               now.tv_nsec / 1000000);
        fflush(stdout);
    }
    free(out);
    free(in);
    MPI_Finalize();
    return all_wrong ? 3 : 0;
}
