/*
 * slim_bench: measures how fast MPI moves messages.
 *
 *   mpicc -O2 -o slim_bench slim_bench.c
 *   mpirun -n 2 ./slim_bench --turns SOCKET
 *   mpirun -n 2 ./slim_bench --count TRIPS BYTES
 *
 * With --turns, jobs take turns. Every rank connects to the Unix socket SOCKET, writes its number in a line,
 * and sleeps until it reads a line
 *
 *   TEST BYTES LEAD TIMES
 *
 * Then all ranks of the job run TEST, LEAD times unmeasured and TIMES times measured. Each answers with
 * its own time and value:
 *
 *   {"seconds":0.024871,"value":5.21,"unit":"us"}
 *
 * Ranks call MPI only during their turn, so a job uses no processor while it waits. The end of the stream ends
 * the program. Tests (collectives run on all ranks, the others on ranks 0 and 1 only):
 *
 *   latency    half of the round trip of a ping-pong, in microseconds
 *   bandwidth  windows of 16 messages, each answered by one short message, in MB/s (10^6 bytes)
 *   rate       as bandwidth, with windows of 64 messages, in messages a second
 *   allreduce  one MPI_Allreduce of doubles over all ranks, in microseconds
 *   alltoall   one MPI_Alltoall with BYTES for each rank, in microseconds
 *   exchange   the messages of that alltoall over plain TCP sockets, in microseconds: what the system calls alone
 *              cost, and so the limit for any transport that sends each message by itself.
 *
 * With --count it makes exactly TRIPS round trips and nothing else, for instruction counters.
 *
 * Rank i is pinned to the i-th core that it may use (modulo their number), so that a value does not depend on
 * where the scheduler places the ranks. Exit status: 0, or 2 for bad usage.
 */
#define _GNU_SOURCE
#include <mpi.h>

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BANDWIDTH_WINDOW = 16, RATE_WINDOW = 64, MAX_WINDOW = 64, TAG = 1, ANSWER = 2 };

/* Bytes of headers that an MPI message has on the line. */
enum { HEADERS = 32, MAX_RANKS = 64, CHUNK = 64 << 10 };

static int rank, ranks;
static char *out, *in;
static size_t room;

/* Makes room for messages of this size. The buffers are kept for later turns, which would otherwise pay for fresh pages. */
static void make_room(int bytes)
{
    size_t needed = ((size_t)bytes + HEADERS) * (size_t)ranks + sizeof(double);
    if (needed <= room)
        return;
    free(out);
    free(in);
    out = calloc(1, needed);
    in = calloc(1, needed);
    if (!out || !in)
        MPI_Abort(MPI_COMM_WORLD, 1);
    room = needed;
}

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

static int peers[MAX_RANKS], connected;
static long missing[MAX_RANKS];

static void fail(const char *what)
{
    fprintf(stderr, "slim_bench: rank %d: %s: %s\n", rank, what, strerror(errno));
    MPI_Abort(MPI_COMM_WORLD, 2);
}

/* The first IPv4 address of this host that is not loopback; loopback if there is none. */
static struct sockaddr_in own_address(void)
{
    struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct ifaddrs *all, *one;
    if (getifaddrs(&all) != 0)
        fail("no list of addresses");
    for (one = all; one; one = one->ifa_next)
        if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && !(one->ifa_flags & IFF_LOOPBACK)) {
            own.sin_addr = ((struct sockaddr_in *)one->ifa_addr)->sin_addr;
            break;
        }
    freeifaddrs(all);
    return own;
}

/* Connects all ranks with each other. A connector sends its rank first. */
static void connect_peers(void)
{
    struct sockaddr_in own = own_address(), all[MAX_RANKS];
    socklen_t length = sizeof own;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (ranks > MAX_RANKS || listener < 0 || bind(listener, (struct sockaddr *)&own, sizeof own) != 0 ||
        listen(listener, MAX_RANKS) != 0 || getsockname(listener, (struct sockaddr *)&own, &length) != 0)
        fail("cannot listen");
    MPI_Allgather(&own, sizeof own, MPI_BYTE, all, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    for (int i = 0; i < ranks; i++) {
        int peer = i, fd;
        if (i == rank)
            continue;
        if (i < rank) {
            fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (fd < 0 || connect(fd, (struct sockaddr *)&all[i], sizeof all[i]) != 0 ||
                send(fd, &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank)
                fail("cannot connect");
        } else {
            fd = accept(listener, NULL, NULL);
            if (fd < 0 || recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer)
                fail("cannot accept");
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        peers[peer] = fd;
    }
    close(listener);
    connected = 1;
}

/* Sends a message to each other rank, and receives one of each. No call waits, and nothing else calls the kernel. */
static void exchange(int bytes, long times)
{
    static char received[CHUNK];
    size_t size = (size_t)bytes + HEADERS;
    if (!connected)
        connect_peers();
    for (long i = 0; i < times; i++) {
        for (int step = 1; step < ranks; step++) {
            int peer = (rank + step) % ranks;
            for (size_t sent = 0; sent < size;) {
                ssize_t done = send(peers[peer], out + sent, size - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (done < 0 && errno != EAGAIN)
                    fail("cannot send");
                sent += done > 0 ? (size_t)done : 0;
            }
            missing[peer] += (long)size;
        }
        for (int waits = 1; waits;) {
            waits = 0;
            for (int step = 1; step < ranks; step++) {
                int peer = (rank + ranks - step) % ranks;
                if (missing[peer] <= 0)
                    continue;
                ssize_t got = recv(peers[peer], received, sizeof received, MSG_DONTWAIT);
                if (got == 0 || (got < 0 && errno != EAGAIN))
                    fail("cannot receive");
                missing[peer] -= got > 0 ? got : 0;
                waits |= missing[peer] > 0;
            }
            if (waits)
                sched_yield();
        }
    }
}

/* How a time is converted into the value of a test. */
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
    { "exchange", exchange, EACH, "us" },
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

/*
 * Returns this rank's time for `times` repetitions. The `lead` repetitions right before them restore what other
 * jobs' turns have displaced: caches, congestion windows. They also use up the burst that a rate-limited line
 * lets pass after a pause.
 */
static double timed(const struct test *test, int bytes, long lead, long times)
{
    MPI_Barrier(MPI_COMM_WORLD);
    test->run(bytes, lead);
    double start = MPI_Wtime();
    test->run(bytes, times);
    double took = MPI_Wtime() - start;
    /* No rank leaves before all have their messages: a rank that sleeps outside of MPI forwards nothing. */
    MPI_Barrier(MPI_COMM_WORLD);
    return took;
}

static const struct test *find(const char *name)
{
    for (size_t t = 0; t < sizeof tests / sizeof *tests; t++)
        if (strcmp(tests[t].name, name) == 0)
            return &tests[t];
    return NULL;
}

/* Runs turns until the stream ends. Returns an error message if it fails. */
static const char *take_turns(const char *path)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (strlen(path) >= sizeof at.sun_path)
        return "the socket's path is too long";
    strcpy(at.sun_path, path);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at) != 0)
        return "cannot connect to the socket";
    FILE *turns = fdopen(fd, "r");
    if (!turns || dprintf(fd, "%d\n", rank) < 0)
        return "cannot use the socket";
    char line[128], name[16];
    while (fgets(line, sizeof line, turns)) {
        int bytes;
        long lead, times;
        if (sscanf(line, "%15s %d %ld %ld", name, &bytes, &lead, &times) != 4)
            return "not a turn";
        const struct test *test = find(name);
        if (!test || bytes <= 0 || lead < 0 || times <= 0)
            return "no such turn";
        make_room(bytes);
        double seconds = timed(test, bytes, lead, times);
        if (dprintf(fd, "{\"seconds\":%.9f,\"value\":%.6f,\"unit\":\"%s\"}\n", seconds,
                    figure(test, bytes, times, seconds), test->unit) < 0)
            break;
    }
    fclose(turns);
    return NULL;
}

/* Pins the process to one core. Called before MPI_Init, so that every thread of the process inherits it. */
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

static int usage(void)
{
    fprintf(stderr, "usage: slim_bench --turns SOCKET\n"
                    "       slim_bench --count TRIPS BYTES\n");
    return 2;
}

int main(int argc, char **argv)
{
    int turns = argc == 3 && strcmp(argv[1], "--turns") == 0;
    int count = argc == 4 && strcmp(argv[1], "--count") == 0 && atol(argv[2]) > 0 && atoi(argv[3]) > 0;
    if (!turns && !count)
        return usage();
    pin();
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const char *complaint = ranks < 2 ? "needs 2 ranks or more" : NULL;
    if (!complaint && turns)
        complaint = take_turns(argv[2]);
    if (!complaint && count) {
        make_room(atoi(argv[3]));
        ping_pong(atoi(argv[3]), atol(argv[2]));
    }
    if (complaint) {
        fprintf(stderr, "slim_bench: rank %d: %s\n", rank, complaint);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    free(out);
    free(in);
    MPI_Finalize();
    return 0;
}
