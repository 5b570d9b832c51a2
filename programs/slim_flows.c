/*
 * slim_flows: plain TCP connections for measurements, without MPI.
 *
 *   slim_flows serve ADDRESS PORT            echoes what it receives, on any number of connections
 *   slim_flows sink ADDRESS PORT             accepts any number of connections and never reads
 *   slim_flows pairs ADDRESS PORT COUNT      one connection, COUNT times send and recv of 8 bytes
 *   slim_flows short ADDRESS PORT COUNT      COUNT connections one after the other, each with one byte there and
 *                                            back; first COUNT / 8 of them unmeasured
 *   slim_flows hold ADDRESS PORT COUNT       COUNT connections at once; then reads commands from standard input:
 *       go      sends a byte on each connection and waits until all have come back
 *       fill    writes on each connection until the kernel takes no more
 *       watch   waits until a connection reports an error or its end
 *
 * Servers print READY when they listen, the others when their connections are made. All times are of
 * CLOCK_MONOTONIC, in nanoseconds, so that another process can compare them with its own:
 *
 *   {"first":81234,"median":81300,"p99":81444,"last":81499}     go: when the bytes came back
 *   {"bytes":4194304}                                           fill: number of bytes written on all connections
 *   {"at":81234,"errno":104}                                    watch; also go, when it fails
 *   {"ns":123456789}                                            pairs: duration of all of them
 *   {"ns":123456789,"connect":15800}                            short: duration of all, and the median of connect
 *
 * Exit status: 0; 1 when a call fails whose failure is not measured; 2 for bad usage.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, SMALL = 8, PIECE = 64 * 1024 };

static struct sockaddr_in address;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static long long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void say(const char *line)
{
    puts(line);
    fflush(stdout);
}

static void watch_fd(int epoll, int fd, unsigned events, int operation, unsigned number)
{
    struct epoll_event event = { .events = events, .data.u32 = number };
    if (epoll_ctl(epoll, operation, fd, &event) != 0)
        die("epoll_ctl");
}

static int listener(void)
{
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0
        || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 4096) != 0)
        die("listen");
    say("READY");
    return fd;
}

static int connected(void)
{
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

/* Echoes the bytes that have arrived. A connection that has failed is closed; the client notices that. */
static void echo(int fd)
{
    static char buffer[PIECE];
    ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    for (ssize_t at = 0; at < n;) {
        ssize_t put = write(fd, buffer + at, (size_t)(n - at));
        if (put > 0)
            at += put;
        else if (errno != EAGAIN && errno != EINTR)
            n = -1;
    }
    if (n <= 0)
        close(fd);
}

static void serve(int reads)
{
    struct epoll_event ready[EVENTS];
    int one = 1, epoll = epoll_create1(0), from = listener();
    watch_fd(epoll, from, EPOLLIN, EPOLL_CTL_ADD, (unsigned)from);
    for (;;) {
        int n = epoll_wait(epoll, ready, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = (int)ready[i].data.u32;
            if (fd != from) {
                echo(fd);
                continue;
            }
            fd = accept4(from, NULL, NULL, SOCK_NONBLOCK);
            if (fd < 0)
                die("accept");
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            if (reads)
                watch_fd(epoll, fd, EPOLLIN, EPOLL_CTL_ADD, (unsigned)fd);
        }
    }
}

static void pairs(long count)
{
    char out[SMALL] = { 0 }, in[SMALL];
    int fd = connected();
    say("READY");
    long long start = now();
    for (long i = 0; i < count; i++) {
        if (send(fd, out, sizeof out, 0) != sizeof out)
            die("send");
        for (size_t got = 0; got < sizeof in;) {
            ssize_t n = recv(fd, in + got, sizeof in - got, 0);
            if (n <= 0)
                die("recv");
            got += (size_t)n;
        }
    }
    printf("{\"ns\":%lld}\n", now() - start);
}

static int by_value(const void *a, const void *b)
{
    long long x = *(const long long *)a, y = *(const long long *)b;
    return (x > y) - (x < y);
}

/* Makes one connection; returns the duration of connect. */
static long long short_one(void)
{
    char byte = 'x';
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    long long before = now();
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        die("connect");
    long long took = now() - before;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1)
        die("a short connection");
    close(fd);
    return took;
}

static void short_ones(long count)
{
    long long *connects = calloc((size_t)count + 1, sizeof *connects);
    if (!connects)
        die("short");
    say("READY");
    for (long i = 0; i < count / 8; i++)
        short_one();
    long long start = now();
    for (long i = 0; i < count; i++)
        connects[i] = short_one();
    long long took = now() - start;
    qsort(connects, (size_t)count, sizeof *connects, by_value);
    printf("{\"ns\":%lld,\"connect\":%lld}\n", took, connects[count / 2]);
}

static void report_failure(int error)
{
    printf("{\"at\":%lld,\"errno\":%d}\n", now(), error);
    fflush(stdout);
}

/* Sends a byte on each connection and waits until all have come back. */
static void go(int epoll, const int *fds, unsigned count, long long *times)
{
    struct epoll_event ready[EVENTS];
    unsigned back = 0;
    char byte = 'x';
    for (unsigned i = 0; i < count; i++) {
        if (write(fds[i], &byte, 1) == 1)
            continue;
        if (errno != EAGAIN)
            return report_failure(errno);
        watch_fd(epoll, fds[i], EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD, i);
    }
    while (back < count) {
        int n = epoll_wait(epoll, ready, EVENTS, -1);
        for (int e = 0; e < n; e++) {
            unsigned i = ready[e].data.u32;
            if (ready[e].events & EPOLLOUT && write(fds[i], &byte, 1) == 1)
                watch_fd(epoll, fds[i], EPOLLIN, EPOLL_CTL_MOD, i);
            if (!(ready[e].events & ~(unsigned)EPOLLOUT))
                continue;
            ssize_t got = read(fds[i], &byte, 1);
            if (got == 1)
                times[back++] = now();
            else if (got == 0 || (errno != EAGAIN && errno != EINTR))
                return report_failure(got == 0 ? 0 : errno);
        }
    }
    qsort(times, count, sizeof *times, by_value);
    printf("{\"first\":%lld,\"median\":%lld,\"p99\":%lld,\"last\":%lld}\n", times[0],
           times[count / 2], times[(count - 1) * 99 / 100], times[count - 1]);
    fflush(stdout);
}

static void fill(const int *fds, unsigned count)
{
    static char piece[PIECE];
    long long bytes = 0;
    for (unsigned i = 0; i < count; i++)
        for (ssize_t n; (n = write(fds[i], piece, sizeof piece)) > 0;)
            bytes += n;
    printf("{\"bytes\":%lld}\n", bytes);
    fflush(stdout);
}

static void watch(int epoll, const int *fds)
{
    struct epoll_event ready;
    char byte;
    for (;;) {
        if (epoll_wait(epoll, &ready, 1, -1) != 1)
            continue;
        ssize_t n = read(fds[ready.data.u32], &byte, 1);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        return report_failure(n < 0 ? errno : 0);
    }
}

static void hold(unsigned count)
{
    char line[64];
    int epoll = epoll_create1(0);
    int *fds = calloc(count + 1, sizeof *fds);
    long long *times = calloc(count + 1, sizeof *times);
    if (epoll < 0 || !fds || !times)
        die("hold");
    for (unsigned i = 0; i < count; i++) {
        fds[i] = connected();
        if (fcntl(fds[i], F_SETFL, O_NONBLOCK) != 0)
            die("fcntl");
        watch_fd(epoll, fds[i], EPOLLIN, EPOLL_CTL_ADD, i);
    }
    say("READY");
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strcmp(line, "go") == 0)
            go(epoll, fds, count, times);
        else if (strcmp(line, "fill") == 0)
            fill(fds, count);
        else if (strcmp(line, "watch") == 0)
            watch(epoll, fds);
        else
            exit(2);
    }
}

int main(int argc, char **argv)
{
    struct rlimit limit = { 1 << 20, 1 << 20 };
    const char *what = argc > 1 ? argv[1] : "";
    int server = strcmp(what, "serve") == 0 || strcmp(what, "sink") == 0;
    long count = argc > 4 ? atol(argv[4]) : -1;
    address.sin_family = AF_INET;
    if (argc != (server ? 4 : 5) || inet_pton(AF_INET, argv[2], &address.sin_addr) != 1
        || (!server && count < 0)) {
        fprintf(stderr, "usage: slim_flows serve|sink ADDRESS PORT\n"
                        "       slim_flows pairs|short|hold ADDRESS PORT COUNT\n");
        return 2;
    }
    address.sin_port = htons((unsigned short)atoi(argv[3]));
    /* Ten thousand connections exceed the usual limit. If it cannot be raised, opening them fails. */
    setrlimit(RLIMIT_NOFILE, &limit);
    if (server)
        serve(strcmp(what, "serve") == 0);
    else if (strcmp(what, "pairs") == 0)
        pairs(count);
    else if (strcmp(what, "short") == 0)
        short_ones(count);
    else if (strcmp(what, "hold") == 0)
        hold((unsigned)count);
    else
        return 2;
    return 0;
}
