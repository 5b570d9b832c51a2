// Helpers for all test programs: a transcript, connections on loopback, a verified byte stream, a way to break connections. A
// program's transcript has all results that it sees (return values, errno, poll bits, signals), and nothing that may differ
// between two correct runs (ports, addresses of memory, exact times). It must be the same with and without the preload.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/close_range.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED __attribute__((unused))

// ---- transcript ----

static char t_last[256];

// One write per line, so that the lines of a forked child and its parent never mix.
UNUSED __attribute__((format(printf, 1, 2))) static void line(const char *fmt, ...) {
    int saved = errno;
    char b[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(b, sizeof b - 1, fmt, ap);
    va_end(ap);
    if (n > (int)sizeof b - 2) n = sizeof b - 2;
    memcpy(t_last, b, n < 255 ? n : 255);
    t_last[n < 255 ? n : 255] = 0;
    b[n++] = '\n';
    if (write(1, b, n) != n) _exit(98);
    errno = saved;
}

UNUSED static const char *ename(int e) {
    const char *n = strerrorname_np(e);
    return n ? n : "?";
}

enum { UNTOUCHED = 7777 };

UNUSED static long t_result(const char *what, long r, int e) {
    if (r < 0)
        line("%s = %ld %s", what, r, ename(e));
    else if (e != UNTOUCHED)
        line("%s = %ld but errno changed to %s", what, r, ename(e));
    else
        line("%s = %ld", what, r);
    errno = e;
    return r;
}

// Runs a call, and prints its text, result and errno. A call that succeeds must not change errno.
#define R(e)                                                                                                       \
    ({                                                                                                             \
        errno = UNTOUCHED;                                                                                         \
        long r_ = (long)(e);                                                                                       \
        t_result(#e, r_, errno);                                                                                   \
    })

// Runs a step of the test's own scaffolding, which must succeed.
#define MUST(e)                                                                                                    \
    ({                                                                                                             \
        long r_ = (long)(e);                                                                                       \
        if (r_ < 0) {                                                                                              \
            line("%s:%d: %s: %s", __FILE__, __LINE__, #e, ename(errno));                                           \
            _exit(97);                                                                                             \
        }                                                                                                          \
        r_;                                                                                                        \
    })

UNUSED static const char *bits(unsigned v) {
    static __thread char b[4][128];
    static __thread int i;
    char *o = b[i = (i + 1) % 4];
    static const struct {
        unsigned bit;
        const char *name;
    } names[] = {{0x1, "IN"}, {0x2, "PRI"}, {0x4, "OUT"}, {0x8, "ERR"}, {0x10, "HUP"}, {0x20, "NVAL"}, {0x2000, "RDHUP"}};
    o[0] = 0;
    // RDNORM and WRNORM always come with IN and OUT, so they are left out.
    v &= ~0x3c0u;
    for (unsigned k = 0; k < sizeof names / sizeof *names; k++)
        if (v & names[k].bit) {
            if (o[0]) strcat(o, "|");
            strcat(o, names[k].name);
            v &= ~names[k].bit;
        }
    if (v) sprintf(o + strlen(o), "|%#x", v);
    if (!o[0]) strcpy(o, "-");
    return o;
}

static volatile sig_atomic_t t_pipes, t_usr1;
UNUSED static void t_on_pipe(int s UNUSED) { t_pipes++; }
UNUSED static void t_on_usr1(int s UNUSED) { t_usr1++; }

// The number of SIGPIPEs since the last call.
UNUSED static int pipes(void) {
    int n = t_pipes;
    t_pipes = 0;
    return n;
}

UNUSED static void t_on_alarm(int s UNUSED) {
    static const char m[] = "TIME LIMIT, the last line before it was: ";
    if (write(1, m, sizeof m - 1) < 0 || write(1, t_last, strlen(t_last)) < 0 || write(1, "\n", 1) < 0) _exit(96);
    _exit(95);
}

UNUSED static void handle(int sig, void (*f)(int), int flags) {
    struct sigaction sa = {.sa_handler = f, .sa_flags = flags};
    sigaction(sig, &sa, NULL);
}

// The first call of every program: sets a time limit for the whole run, and counts SIGPIPEs instead of dying by them.
UNUSED static void begin(unsigned limit_s) {
    const char *scale = getenv("T_LIMIT_SCALE");
    handle(SIGALRM, t_on_alarm, SA_RESTART);
    handle(SIGPIPE, t_on_pipe, SA_RESTART);
    alarm(limit_s * (scale ? atoi(scale) : 1));
}

// ---- time ----

UNUSED static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

// The begin of a wait that `took` measures, for the time limits of sockets. The kernel counts these in ticks. On a machine that
// has stalled the last tick may be long ago, and the limit ends earlier by that much. So this returns the time of the last tick.
UNUSED static double tick_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

UNUSED static void ms(int n) {
    struct timespec t = {n / 1000, n % 1000 * 1000000L};
    while (nanosleep(&t, &t) < 0 && errno == EINTR) {}
}

// "in time" if a wait took about the `want` milliseconds that it should. Much longer is accepted, because machines are loaded.
UNUSED static const char *took(double since, int want) {
    double d = (now_s() - since) * 1000;
    static __thread char b[64];
    if (d >= want - 2 && d < want + 900) return "in time";
    snprintf(b, sizeof b, "%.0f ms instead of %d", d, want);
    return b;
}

// ---- connections on loopback ----

// The host address of both ends.
static uint32_t t_host = INADDR_LOOPBACK;

UNUSED static struct sockaddr_in v4(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(t_host)}};
    return a;
}

UNUSED static struct sockaddr_in6 v6(int port) {
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    return a;
}

UNUSED static int port_of(int fd) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    MUST(getsockname(fd, (void *)&a, &n));
    return ntohs(a.ss_family == AF_INET ? ((struct sockaddr_in *)&a)->sin_port : ((struct sockaddr_in6 *)&a)->sin6_port);
}

UNUSED static int peer_port_of(int fd) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    MUST(getpeername(fd, (void *)&a, &n));
    return ntohs(a.ss_family == AF_INET ? ((struct sockaddr_in *)&a)->sin_port : ((struct sockaddr_in6 *)&a)->sin6_port);
}

UNUSED static int listener(void) {
    int l = MUST(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in a = v4(0);
    MUST(bind(l, (void *)&a, sizeof a));
    MUST(listen(l, 1024));
    return l;
}

UNUSED static int dial(int port) {
    int c = MUST(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in a = v4(port);
    MUST(connect(c, (void *)&a, sizeof a));
    return c;
}

// Waits until the negotiation has ended, if T_NEGOTIATION_MS says so: the harness runs each program without and with this wait.
UNUSED static void await_negotiation(void) {
    const char *s = getenv("T_NEGOTIATION_MS");
    if (s && atoi(s)) ms(atoi(s));
}

struct conn {
    int l, c, s;
};

// Makes a listener, a client end and a server end. It always opens three descriptors in this order.
UNUSED static struct conn connection(void) {
    struct conn x;
    x.l = listener();
    x.c = dial(port_of(x.l));
    x.s = MUST(accept(x.l, NULL, NULL));
    await_negotiation();
    return x;
}

UNUSED static void hang_up(struct conn x) {
    close(x.c);
    close(x.s);
    close(x.l);
}

// A TCP port without a listener.
UNUSED static int dead_port(void) {
    int l = listener(), p = port_of(l);
    close(l);
    return p;
}

UNUSED static int wait_for(int fd, short events, int limit_ms) {
    struct pollfd p = {.fd = fd, .events = events};
    int r;
    do r = poll(&p, 1, limit_ms);
    while (r < 0 && errno == EINTR);
    if (r <= 0) return 0;
    // The kernel sets the bits of an end or a reset one after the other, and poll may look in between.
    int first = p.revents;
    ms(1);
    MUST(poll(&p, 1, 0));
    return first | p.revents;
}

// Waits until the peer has acknowledged everything, so that later results do not depend on timing.
UNUSED static void acked(int fd) {
    for (int i = 0, n = 1; i < 2000 && n; i++) {
        MUST(ioctl(fd, SIOCOUTQ, &n));
        if (n) ms(1);
    }
}

// Waits until `want` bytes can be read.
UNUSED static void arrived(int fd, int want) {
    for (int i = 0, n = 0; i < 5000 && n < want; i++) {
        MUST(ioctl(fd, FIONREAD, &n));
        if (n < want) ms(1);
    }
}

// ---- bytes that can be verified ----

UNUSED static uint64_t t_word(uint64_t seed, uint64_t i) {
    uint64_t z = seed * 0x9e3779b97f4a7c15ull + i * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 29);
}

// Fills `buf` with the bytes [off, off+n) of the endless stream `seed`.
UNUSED static void fill(void *buf, uint64_t off, size_t n, uint64_t seed) {
    unsigned char *b = buf;
    size_t i = 0;
    while (i < n) {
        uint64_t w = t_word(seed, (off + i) / 8);
        unsigned k = (off + i) % 8;
        if (k == 0 && n - i >= 8) {
            memcpy(b + i, &w, 8);
            i += 8;
        } else {
            b[i++] = (unsigned char)(w >> (8 * k));
        }
    }
}

// Whether `buf` has the bytes [off, off+n) of the stream `seed`. Prints the first wrong byte.
UNUSED static int verify(const void *buf, uint64_t off, size_t n, uint64_t seed) {
    unsigned char w[4096];
    const unsigned char *b = buf;
    for (size_t i = 0; i < n;) {
        size_t k = n - i < sizeof w ? n - i : sizeof w;
        fill(w, off + i, k, seed);
        if (memcmp(w, b + i, k)) {
            size_t j = 0;
            while (w[j] == b[i + j]) j++;
            line("WRONG BYTE at %" PRIu64 " of stream %" PRIu64 ": %02x instead of %02x", off + i + j, seed, b[i + j], w[j]);
            return 0;
        }
        i += k;
    }
    return 1;
}

UNUSED static void quote(const void *p, long n) {
    char b[600];
    const unsigned char *s = p;
    int o = 0;
    for (long i = 0; i < n && o < 560; i++)
        o += s[i] >= 32 && s[i] < 127 ? sprintf(b + o, "%c", s[i]) : sprintf(b + o, "\\%02x", s[i]);
    b[o] = 0;
    line("  \"%s\"", b);
}

UNUSED static int full_send(int fd, const void *buf, size_t n) {
    const char *b = buf;
    while (n) {
        ssize_t r = send(fd, b, n, MSG_NOSIGNAL);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return -1;
        b += r;
        n -= r;
    }
    return 0;
}

// Reads n bytes, or to the end of the stream. Returns the number of bytes read, or -1.
UNUSED static ssize_t full_recv(int fd, void *buf, size_t n) {
    size_t got = 0;
    while (got < n) {
        ssize_t r = recv(fd, (char *)buf + got, n - got, 0);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return -1;
        if (!r) break;
        got += r;
    }
    return got;
}

// Sends without blocking until nothing has fitted for a while. Returns the number of bytes sent.
UNUSED static uint64_t send_till_full(int fd, void *buf, size_t size, uint64_t seed) {
    uint64_t off = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (int quiet = 0; quiet < 3; quiet++) {
        ssize_t r;
        while (fill(buf, off, size, seed), (r = send(fd, buf, size, 0)) > 0) off += r, quiet = 0;
        ms(20);
    }
    return off;
}

// Reads to the end of the stream, which has `n` bytes, and prints whether all came and how it ended.
UNUSED static void recv_to_end(int fd, void *buf, size_t size, uint64_t n, uint64_t seed) {
    uint64_t off = 0;
    ssize_t r;
    while ((r = recv(fd, buf, size, 0)) > 0) {
        if (!verify(buf, off, r, seed)) return;
        off += r;
    }
    line("%s, then %zd %s", off == n ? "all" : "not all", r, r ? ename(errno) : "");
}

// Sends a request and an answer over a connection within this process, and prints whether both directions work.
UNUSED static void ping(int a, int b, const char *what) {
    char m[4] = "", n[4] = "";
    int ok = full_send(a, "ping", 4) == 0 && full_recv(b, m, 4) == 4 && !memcmp(m, "ping", 4) && full_send(b, "pong", 4) == 0 &&
             full_recv(a, n, 4) == 4 && !memcmp(n, "pong", 4);
    line("%s: %s", what, ok ? "ping, pong" : ename(errno));
}

// ---- two programs ----
// With T_SYNC the harness runs the program twice, as "server" and as "client". T_SYNC is the number of a Unix stream socket
// between the two.

static int t_sync = -1;
static char t_role = 's';

UNUSED static void begin_pair(int argc, char **argv, unsigned limit_s) {
    const char *s = getenv("T_SYNC");
    begin(limit_s);
    if (argc < 2 || !s) _exit(94);
    t_role = argv[1][0];
    t_sync = atoi(s);
    fcntl(t_sync, F_SETFD, FD_CLOEXEC);
}

UNUSED static int is_server(void) { return t_role == 's'; }

UNUSED static void tell(long v) {
    if (write(t_sync, &v, sizeof v) != sizeof v) _exit(93);
}

UNUSED static long hear(void) {
    long v;
    size_t got = 0;
    while (got < sizeof v) {
        ssize_t r = read(t_sync, (char *)&v + got, sizeof v - got);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0) {
            line("the other program is gone");
            _exit(92);
        }
        got += r;
    }
    return v;
}

// Waits until both programs have reached this call.
UNUSED static void meet(void) {
    tell(1);
    hear();
}

// Makes a connection between the two programs. The listener stays open in *l of the server.
UNUSED static int pair_up(int *l) {
    int fd;
    if (is_server()) {
        if (*l < 0) *l = listener();
        tell(port_of(*l));
        fd = MUST(accept(*l, NULL, NULL));
    } else {
        fd = dial(hear());
    }
    meet();
    await_negotiation();
    meet();
    return fd;
}

// ---- breaking connections ----

// All states of TCP but LISTEN, TIME_WAIT, NEW_SYN_RECV and CLOSE; and the two of an end that is closed, while its peer is not.
enum { ALL_STATES = 0xfff & ~(1u << 10 | 1u << 6 | 1u << 7 | 1u << 0), CLOSED_FIRST = 1u << 4 | 1u << 5 };

// Destroys all ends of TCP connections of this network namespace, or those of one port, that are in one of these states. Returns their
// number. Needs CAP_NET_ADMIN. The harness runs each such program in a new namespace, and says so by T_OWN_NETWORK; without it nothing is
// destroyed.
UNUSED static int break_ends(int port, unsigned states) {
    if (!getenv("T_OWN_NETWORK")) return errno = EPERM, -1;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG), killed = 0;
    if (fd < 0) return -1;
    for (int fam = 0; fam < 2; fam++) {
        struct {
            struct nlmsghdr h;
            struct inet_diag_req_v2 r;
        } q = {.h = {sizeof q, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0},
               .r = {.sdiag_family = fam ? AF_INET6 : AF_INET,
                     .sdiag_protocol = IPPROTO_TCP,
                     .idiag_states = states}};
        if (send(fd, &q, sizeof q, 0) < 0) break;
        struct inet_diag_sockid *ids = malloc(8192 * sizeof *ids);
        int n = 0, done = 0;
        while (!done) {
            char b[1 << 15] __attribute__((aligned(8)));
            ssize_t r = recv(fd, b, sizeof b, 0);
            if (r <= 0) break;
            for (struct nlmsghdr *h = (void *)b; NLMSG_OK(h, r); h = NLMSG_NEXT(h, r)) {
                if (h->nlmsg_type == NLMSG_DONE || h->nlmsg_type == NLMSG_ERROR)
                    done = 1;
                else if (n < 8192)
                    ids[n++] = ((struct inet_diag_msg *)NLMSG_DATA(h))->id;
                int p = htons(port);
                if (n && port && ids[n - 1].idiag_sport != p && ids[n - 1].idiag_dport != p) n--;
            }
        }
        for (int i = 0; i < n; i++) {
            q.h.nlmsg_type = SOCK_DESTROY;
            q.h.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK;
            q.r.id = ids[i];
            char b[4096];
            if (send(fd, &q, sizeof q, 0) < 0) continue;
            ssize_t r = recv(fd, b, sizeof b, 0);
            struct nlmsghdr *h = (void *)b;
            if (r > 0 && h->nlmsg_type == NLMSG_ERROR && ((struct nlmsgerr *)NLMSG_DATA(h))->error == 0) killed++;
        }
        free(ids);
    }
    close(fd);
    return killed;
}

UNUSED static int break_those(int port) { return break_ends(port, ALL_STATES); }

UNUSED static int break_connections(void) { return break_those(0); }

// Whether T_BREAKS says that connections are to break.
UNUSED static int breaks_wanted(void) {
    const char *b = getenv("T_BREAKS");
    return b && atoi(b);
}

// Destroys all connections if they are to break.
UNUSED static void break_if_wanted(void) {
    if (breaks_wanted() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
}
