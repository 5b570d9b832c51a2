// Two programs make random calls on the connections between them, which break at random points. Every byte must arrive once,
// and the end of the stream after all bytes. There must be no error that no program has caused. No call may wait for ever, or
// return before its time. T_ARGS: the first seed, the number of seeds, whether connections break, and the rounds per seed.
#include "t.h"
#include <sys/prctl.h>

enum { CONNECTIONS = 3, STEPS = 40, BUF = 1 << 16, HUNG_S = 20 };

struct side {
    int fd, l;
    uint64_t sent, got;
    // The calls of this end, in a form that can be sent to the other program.
    int write_ended, read_shut, closed;
    // `read_end`: how reading ended: -1 not yet, 0 the end of the stream, or an errno. `error`: the errno of a failed send, or
    // the one from SO_ERROR, since the kernel reports an error only once.
    int read_end, error;
    // The events for which it is registered with the epoll instance, edge-triggered and one-shot included.
    unsigned events;
    int reader;
    pthread_t thread;
};

static struct side sides[CONNECTIONS];
static char buf[BUF], see[BUF];
static unsigned seed, round_seed;
static int breaks, strict, epfd, bad;

static unsigned dice(unsigned n) { return rand_r(&seed) / 7 % n; }

__attribute__((format(printf, 1, 2))) static void wrong(const char *fmt, ...) {
    char b[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(b, sizeof b, fmt, ap);
    va_end(ap);
    line("round %u%s, %s: %s", round_seed, strict ? " (nobody closes early)" : "", is_server() ? "server" : "client", b);
    bad++;
}

static uint64_t stream(int i, int ours) { return round_seed * 16ull + i * 2 + (ours == is_server()); }

// Notes the current step, which is printed if the time limit is reached.
static void now_at(const char *what, int n) { snprintf(t_last, sizeof t_last, "round %u, %s %d", round_seed, what, n); }

static void maybe_break(void) {
    if (breaks && dice(12) == 0) break_connections();
}

// ---- bytes ----

static void sent(int i, ssize_t r) {
    struct side *s = &sides[i];
    if (r >= 0) {
        s->sent += r;
    } else if (errno != EAGAIN && errno != EINTR) {
        s->error = errno;
    }
}

static void step_send(int i) {
    struct side *s = &sides[i];
    size_t n = dice(4) ? 1 + dice(2000) : 1 + dice(BUF - 1);
    if (s->write_ended || s->error) return;
    fill(buf, s->sent, n, stream(i, 1));
    struct iovec v[2] = {{buf, n / 3}, {buf + n / 3, n - n / 3}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    switch (dice(3)) {
    case 0: return sent(i, send(s->fd, buf, n, MSG_DONTWAIT | MSG_NOSIGNAL));
    case 1: return sent(i, sendmsg(s->fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL));
    // Only one of the programs waits for room, so that they never wait for each other.
    default: return sent(i, is_server() && wait_for(s->fd, POLLOUT, 5) ? write(s->fd, buf, n < 2000 ? n : 2000) : send(s->fd, buf, n, MSG_DONTWAIT));
    }
}

// Checks and counts the bytes that a call has read.
static int has_read(struct side *s, char *b, ssize_t r, int i, int peek) {
    if (r < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (r <= 0) {
        if (!peek) s->read_end = r < 0 ? errno : 0;
        return 0;
    }
    if (!verify(b, s->got, r, stream(i, 0))) wrong("connection %d, wrong bytes", i);
    if (!peek) s->got += r;
    return 1;
}

static int read_once(int i, int flags) {
    struct side *s = &sides[i];
    size_t n = dice(3) ? 1 + dice(3000) : BUF;
    struct iovec v[2] = {{see, n / 2}, {see + n / 2, n - n / 2}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    return has_read(s, see, dice(2) ? recv(s->fd, see, n, flags) : recvmsg(s->fd, &h, flags), i, flags & MSG_PEEK);
}

static void step_read(int i) {
    if (sides[i].reader || sides[i].read_end >= 0) return;
    read_once(i, MSG_DONTWAIT | (dice(4) ? 0 : MSG_PEEK));
}

static void *reads(void *p) {
    struct side *s = p;
    char b[3000];
    while (s->read_end < 0) has_read(s, b, recv(s->fd, b, sizeof b, 0), s - sides, 0);
    return NULL;
}

static void step_reader(int i) {
    struct side *s = &sides[i];
    if (s->reader || s->read_end >= 0 || s->events) return;
    s->reader = 1;
    pthread_create(&s->thread, NULL, reads, s);
}

// ---- waits ----

static void in_time(const char *what, double begun, int want_ms, int ready) {
    double took_ms = (now_s() - begun) * 1000;
    if (!ready && took_ms < want_ms - 2) wrong("%s ended after %.1f of %d ms with nothing", what, took_ms, want_ms);
    if (took_ms > want_ms + 3000) wrong("%s took %.0f ms instead of %d", what, took_ms, want_ms);
}

static void step_wait(void) {
    struct pollfd p[CONNECTIONS];
    struct epoll_event e[CONNECTIONS];
    fd_set r;
    int n = 0, most = -1, limit = dice(8), ready;
    FD_ZERO(&r);
    for (int i = 0; i < CONNECTIONS; i++) {
        if (sides[i].closed || sides[i].reader) continue;
        p[n++] = (struct pollfd){sides[i].fd, dice(2) ? POLLIN : POLLRDHUP | POLLPRI, 0};
        FD_SET(sides[i].fd, &r);
        if (sides[i].fd > most) most = sides[i].fd;
    }
    struct timeval tv = {0, limit * 1000};
    struct timespec ts = {0, limit * 1000000};
    double begun = now_s();
    switch (dice(5)) {
    case 0: ready = poll(p, n, limit), in_time("poll", begun, limit, ready); break;
    case 1: ready = ppoll(p, n, &ts, NULL), in_time("ppoll", begun, limit, ready); break;
    case 2: ready = select(most + 1, &r, NULL, NULL, &tv), in_time("select", begun, limit, ready); break;
    case 3: ready = pselect(most + 1, &r, NULL, NULL, &ts, NULL), in_time("pselect", begun, limit, ready); break;
    default:
        // Edge-triggered and one-shot events are not repeated, so their bytes are read now.
        ready = epoll_wait(epfd, e, CONNECTIONS, limit), in_time("epoll_wait", begun, limit, ready);
        for (int k = 0; k < ready; k++) {
            struct side *s = &sides[e[k].data.u32];
            while (s->read_end < 0 && read_once(s - sides, MSG_DONTWAIT)) {}
            if (s->events & EPOLLONESHOT) epoll_ctl(epfd, EPOLL_CTL_MOD, s->fd, &(struct epoll_event){s->events, {.u32 = s - sides}});
        }
    }
    if (ready < 0) wrong("a wait: %s", ename(errno));
}

static void step_register(int i) {
    struct side *s = &sides[i];
    if (s->reader || s->read_end >= 0) return;
    static const unsigned kinds[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLRDHUP | EPOLLET};
    unsigned events = kinds[dice(4)];
    struct epoll_event e = {events, {.u32 = i}};
    if (s->events && dice(2)) {
        if (epoll_ctl(epfd, EPOLL_CTL_DEL, s->fd, NULL)) wrong("EPOLL_CTL_DEL: %s", ename(errno));
        s->events = 0;
        return;
    }
    if (epoll_ctl(epfd, s->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &e)) wrong("epoll_ctl: %s", ename(errno));
    s->events = events;
}

// ---- numbers, processes, ends ----

static void step_number(int i) {
    struct side *s = &sides[i];
    // A reader thread or the epoll instance uses the number, so it must not change.
    if (s->reader || s->events) return;
    int d = MUST(dup(s->fd));
    maybe_break();
    if (dice(2)) {
        close(s->fd);
        s->fd = d;
    } else {
        MUST(dup2(d, s->fd));
        close(d);
    }
}

static void step_child(void) {
    unsigned way = dice(4), wait_us = dice(3000);
    if (way == 3) {
        if (system("true")) wrong("system");
        return;
    }
    pid_t pid = MUST(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; way == 1 && i < CONNECTIONS; i++)
            if (!sides[i].closed) close(sides[i].fd);
        if (way == 2) usleep(wait_us);
        _exit(0);
    }
    maybe_break();
    int status;
    MUST(waitpid(pid, &status, 0));
    if (status) wrong("a child ended with %x", status);
}

static void step_options(int i) {
    int v = dice(2), fd = sides[i].fd;
    socklen_t n = sizeof v;
    struct sockaddr_in a;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &v, sizeof v) && strict) wrong("TCP_NODELAY: %s", ename(errno));
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &v, &n)) wrong("SO_ERROR: %s", ename(errno));
    if (v) sides[i].error = v;
    n = sizeof a;
    if (getpeername(fd, (void *)&a, &n) && strict && !sides[i].write_ended) wrong("getpeername: %s", ename(errno));
}

static void end_writing(int i) {
    struct side *s = &sides[i];
    if (s->write_ended) return;
    s->write_ended = 1;
    if (shutdown(s->fd, SHUT_WR) && strict && !s->error) wrong("shutdown: %s", ename(errno));
}

static void close_side(int i) {
    struct side *s = &sides[i];
    if (s->closed || s->reader) return;
    s->closed = s->write_ended = 1;
    if (close(s->fd)) wrong("close: %s", ename(errno));
    s->events = 0;
}

static void step_end(int i) {
    switch (dice(strict ? 10 : 5)) {
    case 0: return end_writing(i);
    case 1:
        if (strict || sides[i].reader) return;
        sides[i].read_shut = 1;
        shutdown(sides[i].fd, SHUT_RD);
        return;
    case 2:
        if (strict || sides[i].reader) return;
        sides[i].read_shut = sides[i].write_ended = 1;
        shutdown(sides[i].fd, SHUT_RDWR);
        return;
    case 3:
        if (!strict) close_side(i);
    }
}

static void step(void) {
    int i = dice(CONNECTIONS);
    maybe_break();
    switch (dice(20)) {
    case 0: return step_wait();
    case 1: return dice(6) ? step_wait() : step_child();
    default:;
    }
    if (sides[i].closed) return;
    switch (dice(12)) {
    case 0 ... 3: return step_send(i);
    case 4 ... 6: return step_read(i);
    case 7: return step_register(i);
    case 8: return dice(3) ? step_options(i) : step_reader(i);
    case 9: return step_number(i);
    case 10: return step_options(i);
    default: return step_end(i);
    }
}

// ---- a round ----

// Reads all connections to their ends: by epoll if registered, by poll, or in blocking calls.
static void read_to_the_ends(void) {
    double begun = now_s();
    for (;;) {
        int open = 0, by_epoll = 0;
        maybe_break();
        for (int i = 0; i < CONNECTIONS; i++) {
            struct side *s = &sides[i];
            if (s->closed || s->reader || s->read_end >= 0) continue;
            open++;
            by_epoll |= s->events != 0;
            if (!s->events && wait_for(s->fd, POLLIN, 5)) read_once(i, 0);
        }
        struct epoll_event e[CONNECTIONS];
        int n = by_epoll ? epoll_wait(epfd, e, CONNECTIONS, 5) : 0;
        for (int k = 0; k < n; k++) {
            struct side *s = &sides[e[k].data.u32];
            while (s->read_end < 0 && read_once(s - sides, MSG_DONTWAIT)) {}
            if (s->events & EPOLLONESHOT) epoll_ctl(epfd, EPOLL_CTL_MOD, s->fd, &(struct epoll_event){s->events, {.u32 = s - sides}});
        }
        if (!open) return;
        if (now_s() - begun > HUNG_S) {
            for (int i = 0; i < CONNECTIONS; i++)
                if (!sides[i].closed && !sides[i].reader && sides[i].read_end < 0) wrong("connection %d (events %x) never ends after %" PRIu64 " bytes", i, sides[i].events, sides[i].got);
            line("HUNG");
            _exit(1);
        }
    }
}

static void compare_with(int i, const struct side *peer) {
    const struct side *s = &sides[i];
    // Whether one of the programs may have caused a reset.
    int may_reset = s->closed || peer->closed || (s->read_shut && s->write_ended) || (peer->read_shut && peer->write_ended);
    if (s->read_end > 0 && !may_reset && (strict || !(s->read_shut || peer->read_shut))) wrong("connection %d: %s while reading", i, ename(s->read_end));
    if (s->error && !may_reset && strict) wrong("connection %d: %s", i, ename(s->error));
    if (s->read_end == 0 && !s->read_shut && !s->error && s->got != peer->sent) wrong("connection %d: the end after %" PRIu64 " of %" PRIu64 " bytes", i, s->got, peer->sent);
    if (s->got > peer->sent) wrong("connection %d: %" PRIu64 " of %" PRIu64 " bytes", i, s->got, peer->sent);
}

static void play(void) {
    seed = round_seed * 2 + is_server();
    // The same decision in both programs.
    strict = round_seed % 3 != 0;
    epfd = MUST(epoll_create1(EPOLL_CLOEXEC));
    for (int i = 0; i < CONNECTIONS; i++) {
        sides[i] = (struct side){.l = -1, .read_end = -1};
        if (is_server()) {
            sides[i].l = listener();
            tell(port_of(sides[i].l));
            sides[i].fd = MUST(accept(sides[i].l, NULL, NULL));
        } else {
            sides[i].fd = dial(hear());
        }
    }
    now_at("connections", CONNECTIONS);
    meet();
    await_negotiation();
    meet();
    for (int k = 0; k < STEPS; k++) {
        now_at("step", k);
        step();
    }
    for (int i = 0; i < CONNECTIONS; i++)
        if (!sides[i].closed) end_writing(i);
    read_to_the_ends();
    for (int i = 0; i < CONNECTIONS; i++) {
        now_at("reader of connection", i);
        if (sides[i].reader) pthread_join(sides[i].thread, NULL);
    }
    struct side peers[CONNECTIONS];
    if (write(t_sync, sides, sizeof sides) != sizeof sides || full_recv(t_sync, peers, sizeof peers) != sizeof peers) _exit(91);
    for (int i = 0; i < CONNECTIONS; i++) {
        compare_with(i, &peers[i]);
        sides[i].reader = 0;
        close_side(i);
        if (sides[i].l >= 0) close(sides[i].l);
    }
    close(epfd);
    meet();
}

int main(int argc, char **argv) {
    unsigned first = 1, seeds = 1, times = 1;
    begin_pair(argc, argv, 0);
    if (getenv("T_ARGS")) sscanf(getenv("T_ARGS"), "%u %u %d %u", &first, &seeds, &breaks, &times);
    for (round_seed = first; round_seed < first + seeds; round_seed++)
        for (unsigned i = 0; i < times; i++) {
            alarm(60);
            play();
            pipes();
        }
    line("%u rounds, %d wrong", seeds * times, bad);
    return bad != 0;
}
