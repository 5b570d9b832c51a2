/*
 * slim_stream: an MPI program that streams messages one way without a pause, checks every word, and measures the throughput.
 *
 *   mpicc -O2 -o slim_stream slim_stream.c
 *   mpirun -n 2 ./slim_stream SECONDS [FILE]
 *
 * Rank 1 sends messages of 1 MiB to rank 0 for SECONDS, and then for as long as there is a FILE. DEPTH messages are under
 * way at any time.
 *
 * Rank 0 prints the same lines as slim_pp, with one more word: rate=R, MB/s (10^6 bytes) since the line before, or of the
 * whole run in the closing line. A step is the time between the arrivals of two messages.
 * Exit status: 0 all data right, 2 bad usage, 3 wrong data. MPI's errors end the job.
 */
#include <mpi.h>

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { DEPTH = 8, WORDS = 1 << 17, DATA = 1, STOP = 2 };

/* The number of a message that is not one of the stream, but its end. */
static const uint64_t END = UINT64_MAX;

static uint64_t words[DEPTH][WORDS];
static MPI_Request requests[DEPTH];

static uint64_t word(uint64_t message, size_t at)
{
    return (message * UINT64_C(0x9e3779b97f4a7c15) ^ at) * UINT64_C(0xbf58476d1ce4e5b9);
}

/* The first word of a message is its number. */
static void send_message(uint64_t message, int slot)
{
    words[slot][0] = message;
    for (size_t i = 1; i < WORDS; i++)
        words[slot][i] = word(message, i);
    MPI_Isend(words[slot], WORDS, MPI_UINT64_T, 0, DATA, MPI_COMM_WORLD, &requests[slot]);
}

static void send_all(void)
{
    MPI_Request stop;
    int stopped = 0;
    uint64_t message = 0;
    MPI_Irecv(NULL, 0, MPI_CHAR, 0, STOP, MPI_COMM_WORLD, &stop);
    for (; !stopped; message++) {
        int slot = (int)(message % DEPTH);
        MPI_Wait(&requests[slot], MPI_STATUS_IGNORE);
        send_message(message, slot);
        MPI_Test(&stop, &stopped, MPI_STATUS_IGNORE);
    }
    /* One for each receive that rank 0 has posted. */
    for (int i = 0; i < DEPTH; i++, message++) {
        int slot = (int)(message % DEPTH);
        MPI_Wait(&requests[slot], MPI_STATUS_IGNORE);
        send_message(END, slot);
    }
    MPI_Waitall(DEPTH, requests, MPI_STATUSES_IGNORE);
}

static void receive_message(int slot)
{
    words[slot][0] = 0;
    words[slot][WORDS - 1] = 0;
    MPI_Irecv(words[slot], WORDS, MPI_UINT64_T, 1, DATA, MPI_COMM_WORLD, &requests[slot]);
}

static void print(const char *head, uint64_t messages, uint64_t wrong, double longest, double rate)
{
    struct timeval now;
    gettimeofday(&now, NULL);
    printf("%s it=%" PRIu64 " errs=%" PRIu64 " MB=%" PRIu64 " maxstall=%.3f at=%ld.%03ld rate=%.1f\n", head, messages, wrong,
           messages, longest, (long)now.tv_sec, (long)now.tv_usec / 1000, rate);
    fflush(stdout);
}

static uint64_t receive_all(double seconds, const char *file)
{
    const double megabytes = sizeof words[0] / 1e6;
    uint64_t message = 0, printed = 0, wrong = 0;
    double longest = 0;
    int told = 0;
    for (int slot = 0; slot < DEPTH; slot++)
        receive_message(slot);
    double started = MPI_Wtime(), last = started, line = started;
    for (;; message++) {
        int slot = (int)(message % DEPTH);
        MPI_Wait(&requests[slot], MPI_STATUS_IGNORE);
        double now = MPI_Wtime();
        if (words[slot][0] == END)
            break;
        if (now - last > longest)
            longest = now - last;
        last = now;
        if (words[slot][0] != message)
            wrong++;
        for (size_t i = 1; i < WORDS; i++)
            if (words[slot][i] != word(message, i) && wrong++ < 5)
                fprintf(stderr, "slim_stream: message %" PRIu64 ": word %zu is wrong\n", message, i);
        receive_message(slot);
        if (!told && now - started >= seconds && (!file || access(file, F_OK) != 0)) {
            MPI_Send(NULL, 0, MPI_CHAR, 1, STOP, MPI_COMM_WORLD);
            told = 1;
        }
        if (now - line >= 1) {
            char head[32];
            snprintf(head, sizeof head, "t=%d", (int)(now - started));
            print(head, message, wrong, longest, (double)(message - printed) * megabytes / (now - line));
            printed = message;
            line = now;
        }
    }
    MPI_Waitall(DEPTH, requests, MPI_STATUSES_IGNORE);
    print("DONE", message, wrong, longest, (double)message * megabytes / (last - started));
    return wrong;
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    double seconds = argc > 1 ? atof(argv[1]) : 0;
    if (ranks != 2 || !(seconds > 0)) {
        fprintf(stderr, "usage: mpirun -n 2 slim_stream SECONDS [FILE]\n");
        MPI_Finalize();
        return 2;
    }
    for (int slot = 0; slot < DEPTH; slot++)
        requests[slot] = MPI_REQUEST_NULL;
    MPI_Barrier(MPI_COMM_WORLD);
    uint64_t wrong = 0;
    if (rank == 0)
        wrong = receive_all(seconds, argc > 2 ? argv[2] : NULL);
    else
        send_all();
    MPI_Finalize();
    return wrong ? 3 : 0;
}
