// Many connections end in every order, and are killed in their first milliseconds. Both ends check every byte and the end of
// the stream. One program with processes for both ends; T_ARGS has settings as name=number.
//   count     connections of each client thread
//   clients, threads    client processes, threads in each
//   workers   server processes; 0: a single one, which makes the listener itself
//   reuse     1: each worker has its own listener (SO_REUSEPORT)
//   ports     first of the fixed ports that clients bind; 0: clients do not bind
//   kill      how many of 1000 connections are killed
//   us        latest moment of a kill, in microseconds after connect
//   ways      bit mask of the ways to end; 0: all
//   large     largest size of an answer, in bytes
//   seed      seed of the random numbers
#include "t.h"
#include <sys/prctl.h>

// Ways in which a connection ends. From GREETS on the server sends first; it knows the way by the client's port.
enum { SERVER_CLOSES, CLIENT_HALF, SERVER_HALF, CLIENT_CLOSES, HARD, UNREAD, GREETS, SILENT, GREETS_HALF, WAYS };
static const char *const names[] = {"server-closes", "client-half", "server-half", "client-closes", "hard",
                                    "unread",        "greets",      "silent",      "greets-half"};
// Ways in which the server may see a reset.
enum { MAY_RESET = 1 << HARD | 1 << UNREAD };

enum { ACCEPTORS = 12, MOST = 300000 };
static long count = 200, clients = 2, threads = 4, workers, reuse, ports, kills, us = 300, ways, large = 2000, seed = 1, gap;

static struct {
    _Atomic long begun, served, ok[2], bad[2], killed, busy, refused;
    _Atomic int ready;
    int port;
} *shared;

static void settings(void) {
    char all[500], *save = NULL;
    const struct {
        const char *name;
        long *value;
    } known[] = {{"count", &count}, {"clients", &clients}, {"threads", &threads}, {"workers", &workers}, {"reuse", &reuse},
                 {"ports", &ports}, {"kill", &kills},      {"us", &us},           {"ways", &ways},       {"large", &large},
                 {"seed", &seed},   {"gap", &gap}};
    snprintf(all, sizeof all, "%s", getenv("T_ARGS") ? getenv("T_ARGS") : "");
    for (char *w = strtok_r(all, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        char *is = strchr(w, '=');
        int found = 0;
        for (unsigned i = 0; is && i < sizeof known / sizeof *known; i++)
            if (!strncmp(known[i].name, w, is - w) && !known[i].name[is - w]) *known[i].value = atol(is + 1), found = 1;
        if (!found) exit(90);
    }
    if (!ways) ways = (1 << WAYS) - 1;
    // The end that closes first keeps the port for a while, so fixed ports allow only some of the ways.
    if (ports) ways &= 1 << SERVER_CLOSES | 1 << CLIENT_HALF | 1 << HARD | 1 << GREETS | 1 << SILENT;
}

// Both ends derive the plan of a connection from the client's port and the first bytes.
struct plan {
    uint32_t way, ask, answer, key;
};

static struct plan planned(int port, uint64_t n) {
    uint64_t z = t_word(seed, n * 65536 + port);
    struct plan p = {z % WAYS, (z >> 8) % 3 ? 16 + (z >> 16) % 100 : 16 + (z >> 16) % (large + 1), 1 + (z >> 32) % large, z >> 40};
    while (!(ways >> p.way & 1)) p.way = (p.way + 1) % WAYS;
    return p;
}

// The plan by the port alone: whether the server sends first, and in which way.
static struct plan by_port(int port) { return planned(port, 0); }

struct end {
    int fd, server, port;
    struct plan p;
    double begun;
    _Atomic int *hit;
    char why[200];
    char *buf;
};

static int bad(struct end *e, const char *doing, long got, long want) {
    int error = errno;
    snprintf(e->why, sizeof e->why, "%s %s %s: %s, got %ld of %ld (%s), after %.1f ms, port %d", e->server ? "server" : "client", names[e->p.way],
             e->hit && *e->hit ? "killed" : "", doing, got, want, ename(error), (now_s() - e->begun) * 1e3, e->port);
    return -1;
}

static int says(struct end *e, size_t n, uint64_t stream) {
    fill(e->buf, 0, n, stream);
    errno = 0;
    if (full_send(e->fd, e->buf, n)) return bad(e, "send", -1, n);
    return 0;
}

static int hears_from(struct end *e, size_t from, size_t n, uint64_t stream) {
    errno = 0;
    ssize_t got = full_recv(e->fd, e->buf, n);
    if (got != (ssize_t)n) return bad(e, "recv", got, n);
    if (!verify(e->buf, from, n, stream)) return bad(e, "WRONG BYTES", 0, n);
    return 0;
}

static int hears(struct end *e, size_t n, uint64_t stream) { return hears_from(e, 0, n, stream); }

static int ends(struct end *e) {
    errno = 0;
    ssize_t n = recv(e->fd, e->buf, 1, 0);
    return n ? bad(e, "end", n, 0) : 0;
}

static int half(struct end *e) {
    errno = 0;
    return shutdown(e->fd, SHUT_WR) ? bad(e, "shutdown", -1, 0) : 0;
}

// The request begins with the plan.
static int asks(struct end *e) {
    fill(e->buf, 0, e->p.ask, e->p.key);
    memcpy(e->buf, &e->p, sizeof e->p);
    errno = 0;
    return full_send(e->fd, e->buf, e->p.ask) ? bad(e, "ask", -1, e->p.ask) : 0;
}

static int asked(struct end *e) {
    errno = 0;
    ssize_t got = full_recv(e->fd, e->buf, sizeof e->p);
    if (got != sizeof e->p) return bad(e, "hear the plan", got, sizeof e->p);
    memcpy(&e->p, e->buf, sizeof e->p);
    if (e->p.way >= GREETS || e->p.ask < sizeof e->p || e->p.ask > 10000000) return bad(e, "WRONG PLAN", 0, 0);
    return hears_from(e, sizeof e->p, e->p.ask - sizeof e->p, e->p.key);
}

static int serve(struct end *e) {
    struct plan p = by_port(e->port);
    if (p.way >= GREETS) {
        e->p = p;
        if (p.way == SILENT) return 0;
        if (says(e, p.answer, p.key)) return -1;
        if (p.way == GREETS) return 0;
        return half(e) || hears(e, p.ask, p.key + 1) || ends(e) ? -1 : 0;
    }
    if (asked(e)) return -1;
    p = e->p;
    switch (p.way) {
    case SERVER_CLOSES: return says(e, p.answer, p.key);
    case CLIENT_HALF: return ends(e) || says(e, p.answer, p.key) ? -1 : 0;
    case SERVER_HALF: return says(e, p.answer, p.key) || half(e) || hears(e, p.ask, p.key + 1) || ends(e) ? -1 : 0;
    case CLIENT_CLOSES: return ends(e);
    default: // HARD, UNREAD
        if (says(e, p.answer, p.key)) return -1;
        recv(e->fd, e->buf, 1, 0);
        return 0;
    }
}

static int use(struct end *e) {
    struct plan p = e->p;
    struct linger hard = {1, 0};
    if (p.way < GREETS && asks(e)) return -1;
    switch (p.way) {
    case SERVER_CLOSES:
    case GREETS: return hears(e, p.answer, p.key) || ends(e) ? -1 : 0;
    case CLIENT_HALF: return half(e) || hears(e, p.answer, p.key) || ends(e) ? -1 : 0;
    case SERVER_HALF:
    case GREETS_HALF: return hears(e, p.answer, p.key) || ends(e) || says(e, p.ask, p.key + 1) ? -1 : 0;
    case CLIENT_CLOSES: return 0;
    case SILENT: return ends(e);
    case HARD:
        if (hears(e, p.answer, p.key)) return -1;
        setsockopt(e->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        return 0;
    default: return hears(e, 1, p.key); // UNREAD
    }
}

static void over(struct end *e, int r) {
    if (r < 0 && e->server && (MAY_RESET >> e->p.way & 1)) r = 0;
    if (r < 0) line("%s", e->why), shared->bad[e->server]++;
    else shared->ok[e->server]++;
}

// ---- the server ----

static void *accepts(void *arg) {
    int l = (int)(long)arg;
    struct end e = {.server = 1, .buf = malloc(large + 10000)};
    for (;;) {
        struct sockaddr_in from;
        socklen_t n = sizeof from;
        if ((e.fd = accept(l, (void *)&from, &n)) < 0) {
            if (errno == ECONNABORTED) continue;
            line("accept: %s", ename(errno));
            return NULL;
        }
        e.begun = now_s();
        e.port = ntohs(from.sin_port);
        e.p = (struct plan){0};
        over(&e, serve(&e));
        close(e.fd);
        shared->served++;
    }
}

static void acceptors(int l) {
    pthread_t t;
    for (long i = 0; i < ACCEPTORS; i++) pthread_create(&t, NULL, accepts, (void *)(long)l);
    shared->ready++;
    pause();
}

static int at(int port) {
    int l = MUST(socket(AF_INET, SOCK_STREAM, 0)), one = 1;
    struct sockaddr_in a = v4(port);
    if (reuse) MUST(setsockopt(l, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one));
    MUST(bind(l, (void *)&a, sizeof a));
    MUST(listen(l, 1024));
    return l;
}

static void server(void) {
    int l = reuse ? -1 : at(0);
    if (l >= 0) shared->port = port_of(l);
    if (!workers) acceptors(l);
    for (long i = 0; i < workers; i++) {
        pid_t p = MUST(fork());
        if (!p) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (reuse) {
                l = at(shared->port);
                if (!shared->port) shared->port = port_of(l);
            }
            acceptors(l);
        }
        // The first worker chooses the port.
        while (reuse && !shared->port) ms(1);
    }
    pause();
}

// ---- clients ----

struct kill {
    int port, which;
    long after_us;
    _Atomic int go, hit;
};

// Looks the connection up before it destroys it: once it is gone, the kernel's lookup finds the listener instead.
static void destroy(int nl, int from, int to) {
    struct {
        struct nlmsghdr h;
        struct inet_diag_req_v2 r;
    } q = {.h = {sizeof q, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0},
           .r = {.sdiag_family = AF_INET,
                 .sdiag_protocol = IPPROTO_TCP,
                 .idiag_states = ~0u,
                 .id = {.idiag_sport = htons(from),
                        .idiag_dport = htons(to),
                        .idiag_src = {htonl(INADDR_LOOPBACK)},
                        .idiag_dst = {htonl(INADDR_LOOPBACK)},
                        .idiag_cookie = {INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE}}}};
    char b[4096] __attribute__((aligned(8)));
    struct nlmsghdr *h = (void *)b;
    if (send(nl, &q, sizeof q, 0) < 0 || recv(nl, b, sizeof b, 0) < (ssize_t)NLMSG_LENGTH(sizeof(struct inet_diag_msg))) return;
    struct inet_diag_msg *found = NLMSG_DATA(h);
    if (h->nlmsg_type != SOCK_DIAG_BY_FAMILY || found->id.idiag_dport != htons(to)) return;
    q.h.nlmsg_type = SOCK_DESTROY;
    q.h.nlmsg_flags |= NLM_F_ACK;
    q.r.id = found->id;
    if (send(nl, &q, sizeof q, 0) >= 0) recv(nl, b, sizeof b, 0);
}

static void *kills_at(void *arg) {
    struct kill *k = arg;
    prctl(PR_SET_TIMERSLACK, 1);
    int nl = MUST(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
    for (;;) {
        while (k->go != 1) {
            if (k->go == 2) return close(nl), NULL;
            struct timespec t = {0, 20000};
            nanosleep(&t, NULL);
        }
        struct timespec t = {k->after_us / 1000000, k->after_us % 1000000 * 1000};
        nanosleep(&t, NULL);
        k->hit = 1;
        if (k->which & 1) destroy(nl, k->port, shared->port);
        if (k->which & 2) destroy(nl, shared->port, k->port);
        shared->killed++;
        k->go = 0;
    }
}

static int connects(int own) {
    int c = MUST(socket(AF_INET, SOCK_STREAM, 0)), one = 1;
    struct sockaddr_in to = v4(shared->port), from = v4(own);
    if (own) {
        MUST(setsockopt(c, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
        if (bind(c, (void *)&from, sizeof from)) return close(c), errno = EADDRNOTAVAIL, -1;
    }
    errno = 0;
    if (!connect(c, (void *)&to, sizeof to)) return c;
    int error = errno;
    close(c);
    errno = error;
    return -1;
}

static void *client(void *arg) {
    long id = (long)arg;
    uint64_t z = t_word(seed + 1, id);
    struct kill k = {0};
    pthread_t killer;
    if (kills) pthread_create(&killer, NULL, kills_at, &k);
    struct end e = {.hit = &k.hit, .buf = malloc(large + 10000)};
    for (long n = 0; n < count; n++) {
        z = t_word(z, n);
        k.hit = 0;
        // With fixed ports each thread uses the same port for all of its connections.
        e.fd = connects(ports ? ports + id : 0);
        if (e.fd < 0) {
            if (errno == EADDRNOTAVAIL) {
                shared->busy++;
                ms(20);
            } else {
                line("connect: %s", ename(errno));
                shared->refused++;
            }
            continue;
        }
        shared->begun++;
        e.begun = now_s();
        e.port = port_of(e.fd);
        e.p = by_port(e.port);
        if (e.p.way < GREETS) {
            e.p = planned(e.port, 1 + z % 1000000);
            while (e.p.way >= GREETS || !(ways >> e.p.way & 1)) e.p.way = (e.p.way + 1) % WAYS;
        }
        if ((long)(z % 1000) < kills) {
            k.port = e.port;
            k.which = 1 + (z >> 12) % 3;
            k.after_us = (z >> 20) % (us + 1);
            k.go = 1;
        }
        over(&e, use(&e));
        close(e.fd);
        while (k.go) usleep(50);
        if (gap) usleep((z >> 30) % gap);
    }
    if (kills) {
        k.go = 2;
        pthread_join(killer, NULL);
    }
    return NULL;
}

static void a_client(long first) {
    pthread_t t[100];
    for (long i = 0; i < threads; i++) pthread_create(&t[i], NULL, client, (void *)(first + i));
    for (long i = 0; i < threads; i++) pthread_join(t[i], NULL);
    exit(0);
}

static pid_t start(void (*f)(long), long arg) {
    pid_t p = MUST(fork());
    if (!p) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        f(arg);
        _exit(1);
    }
    return p;
}

static void a_server(long none UNUSED) { server(); }

int main(void) {
    begin(140);
    settings();
    if (kills && !getenv("T_OWN_NETWORK")) return 91;
    if (threads > 100) return 90;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t s = start(a_server, 0), c[100];
    while (shared->ready < (workers ? workers : 1)) ms(1);
    for (long i = 0; i < clients; i++) c[i] = start(a_client, i * threads);
    int failed = 0, status;
    for (long i = 0; i < clients; i++) MUST(waitpid(c[i], &status, 0)), failed |= status;
    for (int i = 0; i < 10000 && shared->served < shared->begun; i++) ms(1);
    line("%ld connections, %ld killed, %ld ports in use; clients %ld good, %ld bad; servers %ld good, %ld bad, %ld missing; %ld refused", shared->begun,
         shared->killed, shared->busy, shared->ok[0], shared->bad[0], shared->ok[1], shared->bad[1], shared->begun - shared->served, shared->refused);
    kill(s, SIGKILL);
    return failed || shared->bad[0] || shared->bad[1] || shared->refused || shared->served != shared->begun;
}
