/*
 * slim_rsockets: one connection of rsockets (librdmacm), both ends in this process, for measurements.
 *
 *   slim_rsockets NEAR FAR PORT [BYTES]
 *
 * The connection goes from the address NEAR to FAR:PORT. With BYTES, both ends have send and receive buffers of that size; else those
 * of rsockets. Then it reads lines
 *
 *   TEST BYTES TIMES
 *
 * and answers each with the duration of the test in seconds:
 *
 *   latency         TIMES round trips of BYTES; one thread drives both ends, and no call waits
 *   stream          TIMES bytes in pieces of BYTES from NEAR to FAR, in the same way
 *   latency-sleep   the same as latency, by two threads, whose calls wait
 *   stream-sleep    the same as stream, by two threads, whose calls wait
 *
 * The library is loaded at run time, so nothing but its package (librdmacm1) is needed.
 * Exit status: 0 at the end of the input; 1 when a call fails; 2 for bad usage; 3 if there is no library.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { MOST = 4 << 20 };

/* Of rdma/rsocket.h. */
static struct {
    int (*rsocket)(int, int, int);
    int (*rbind)(int, const struct sockaddr *, socklen_t);
    int (*rlisten)(int, int);
    int (*raccept)(int, struct sockaddr *, socklen_t *);
    int (*rconnect)(int, const struct sockaddr *, socklen_t);
    ssize_t (*rsend)(int, const void *, size_t, int);
    ssize_t (*rrecv)(int, void *, size_t, int);
    int (*rsetsockopt)(int, int, int, const void *, socklen_t);
} lib;

static int nearer, farther, listener;
static char *out, *in[2];

static void die(const char *what)
{
    fprintf(stderr, "slim_rsockets: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void load(void)
{
    void *handle = dlopen("librdmacm.so.1", RTLD_NOW);
    const struct {
        const char *name;
        void *place;
    } all[] = {
        { "rsocket", &lib.rsocket },   { "rbind", &lib.rbind }, { "rlisten", &lib.rlisten }, { "raccept", &lib.raccept },
        { "rconnect", &lib.rconnect }, { "rsend", &lib.rsend }, { "rrecv", &lib.rrecv },     { "rsetsockopt", &lib.rsetsockopt },
    };
    for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
        void *found = handle ? dlsym(handle, all[n].name) : NULL;
        if (!found) {
            fprintf(stderr, "slim_rsockets: no librdmacm.so.1 with %s\n", all[n].name);
            exit(3);
        }
        memcpy(all[n].place, &found, sizeof found);
    }
}

static int fresh(const char *address, int port, int buffers)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((unsigned short)port) };
    int on = 1, fd = lib.rsocket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        die("rsocket");
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1 || lib.rbind(fd, (struct sockaddr *)&at, sizeof at) != 0)
        die(address);
    if (lib.rsetsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
        die("TCP_NODELAY");
    if (buffers && (lib.rsetsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffers, sizeof buffers) != 0 ||
                    lib.rsetsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffers, sizeof buffers) != 0))
        die("sizes of buffers");
    return fd;
}

static void *accept_one(void *unused)
{
    farther = lib.raccept(listener, NULL, NULL);
    return unused;
}

/* What a call has moved: none, if it was not to wait. */
static size_t moved(ssize_t done, const char *what)
{
    if (done == 0 || (done < 0 && errno != EAGAIN && errno != EWOULDBLOCK))
        die(what);
    return done > 0 ? (size_t)done : 0;
}

/* A test: in a stream, `times` is the number of all bytes. */
struct part {
    size_t bytes, times;
};

static void send_all(int fd, size_t bytes)
{
    for (size_t at = 0; at < bytes;)
        at += moved(lib.rsend(fd, out + at, bytes - at, 0), "rsend");
}

static void receive_all(int fd, char *into, size_t bytes)
{
    for (size_t at = 0; at < bytes;)
        at += moved(lib.rrecv(fd, into + at, bytes - at, 0), "rrecv");
}

static void *echoes(void *of)
{
    const struct part *part = of;
    for (size_t n = 0; n < part->times; n++) {
        receive_all(farther, in[1], part->bytes);
        send_all(farther, part->bytes);
    }
    return NULL;
}

static void *receives(void *of)
{
    const struct part *part = of;
    for (size_t got = 0; got < part->times; got += part->bytes)
        receive_all(farther, in[1], part->bytes);
    return NULL;
}

static void sleeping(const struct part *part, int stream)
{
    pthread_t other;
    if (pthread_create(&other, NULL, stream ? receives : echoes, (void *)part) != 0)
        die("no thread");
    for (size_t n = 0; n < part->times; n += stream ? part->bytes : 1) {
        send_all(nearer, part->bytes);
        if (!stream)
            receive_all(nearer, in[0], part->bytes);
    }
    pthread_join(other, NULL);
}

static void polled_latency(const struct part *part)
{
    for (size_t n = 0; n < 2 * part->times; n++) {
        int from = n % 2 ? farther : nearer, to = n % 2 ? nearer : farther;
        for (size_t at = 0; at < part->bytes;)
            at += moved(lib.rsend(from, out + at, part->bytes - at, MSG_DONTWAIT), "rsend");
        for (size_t at = 0; at < part->bytes;)
            at += moved(lib.rrecv(to, in[0] + at, part->bytes - at, MSG_DONTWAIT), "rrecv");
    }
}

static void polled_stream(const struct part *part)
{
    size_t sent = 0, got = 0;
    while (got < part->times) {
        size_t at = sent % part->bytes;
        if (sent < part->times)
            sent += moved(lib.rsend(nearer, out + at, part->bytes - at, MSG_DONTWAIT), "rsend");
        got += moved(lib.rrecv(farther, in[0], part->bytes, MSG_DONTWAIT), "rrecv");
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: slim_rsockets NEAR FAR PORT [BYTES]\n");
        return 2;
    }
    load();
    int port = atoi(argv[3]), buffers = argc > 4 ? atoi(argv[4]) : 0;
    struct sockaddr_in far = { .sin_family = AF_INET, .sin_port = htons((unsigned short)port) };
    inet_pton(AF_INET, argv[2], &far.sin_addr);
    listener = fresh(argv[2], port, buffers);
    nearer = fresh(argv[1], 0, buffers);
    pthread_t accepts;
    if (lib.rlisten(listener, 1) != 0 || pthread_create(&accepts, NULL, accept_one, NULL) != 0)
        die("cannot listen");
    if (lib.rconnect(nearer, (struct sockaddr *)&far, sizeof far) != 0)
        die("rconnect");
    pthread_join(accepts, NULL);
    if (farther < 0)
        die("raccept");
    out = calloc(3, MOST);
    if (!out)
        die("no memory");
    in[0] = out + MOST;
    in[1] = in[0] + MOST;
    char line[128], name[32];
    while (fgets(line, sizeof line, stdin)) {
        struct part part = { 0 };
        if (sscanf(line, "%31s %zu %zu", name, &part.bytes, &part.times) != 3 || part.bytes > MOST || !part.bytes)
            return 2;
        double start = now();
        if (strcmp(name, "latency") == 0)
            polled_latency(&part);
        else if (strcmp(name, "stream") == 0)
            polled_stream(&part);
        else if (strcmp(name, "latency-sleep") == 0)
            sleeping(&part, 0);
        else if (strcmp(name, "stream-sleep") == 0)
            sleeping(&part, 1);
        else
            return 2;
        printf("%.9f\n", now() - start);
        fflush(stdout);
    }
    return 0;
}
