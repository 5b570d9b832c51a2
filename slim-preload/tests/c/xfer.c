// Transfers in both directions of a connection at once, in one of many ways to read and write, while the connection breaks
// again and again. Two programs; T_ARGS has the way, T_BREAKS how often the server breaks the connection.
#include "t.h"

enum { TOTAL = 12 << 20, PIECE = 50000, MUCH = (3 << 20) + 12345 };

static int fd, in_fd, out_fd;
static const char *way;
static uint64_t in_seed, out_seed;
static volatile uint64_t got;
static volatile int over, broken;

static int breaks(void) { return getenv("T_BREAKS") ? atoi(getenv("T_BREAKS")) : 0; }

static int is(const char *w) { return !strcmp(way, w); }

// Breaks the connection after every 1/n of the received bytes, and again a little later, while it resumes.
static void *breaker(void *p UNUSED) {
    int n = breaks();
    for (int i = 1; i <= n; i++) {
        while (!over && got < (uint64_t)TOTAL / (n + 1) * i) usleep(200);
        if (over) break;
        if (break_connections() < 0) line("cannot break connections: %s", ename(errno));
        broken = i;
        if (i % 3 == 0) {
            usleep(t_word(7, i) % 6000);
            break_connections();
        }
    }
    return NULL;
}

// The reader waits for the breaker, which could fall behind on a busy machine.
static void count(size_t n) {
    static int due;
    int all = is_server() ? breaks() : 0;
    got += n;
    while (due < all && got >= (uint64_t)TOTAL / (all + 1) * (due + 1)) due++;
    while (broken < due) usleep(200);
}

static size_t size_at(uint64_t seed, uint64_t off) {
    size_t n = 1 + t_word(seed, off) % PIECE;
    return n < TOTAL - off ? n : TOTAL - off;
}

static int wait_way(int want) {
    struct pollfd p = {.fd = in_fd, .events = want};
    if (is("select")) {
        fd_set r, w;
        FD_ZERO(&r);
        FD_ZERO(&w);
        if (want & POLLIN) FD_SET(in_fd, &r);
        if (want & POLLOUT) FD_SET(out_fd, &w);
        if (select(in_fd + 1, &r, &w, NULL, NULL) < 0) return -1;
        return (FD_ISSET(in_fd, &r) ? POLLIN : 0) | (FD_ISSET(out_fd, &w) ? POLLOUT : 0);
    }
    if (is("pselect")) {
        fd_set r, w;
        struct timespec ts = {30, 0};
        FD_ZERO(&r);
        FD_ZERO(&w);
        if (want & POLLIN) FD_SET(in_fd, &r);
        if (want & POLLOUT) FD_SET(out_fd, &w);
        if (pselect(in_fd + 1, &r, &w, NULL, &ts, NULL) <= 0) return -1;
        return (FD_ISSET(in_fd, &r) ? POLLIN : 0) | (FD_ISSET(out_fd, &w) ? POLLOUT : 0);
    }
    struct timespec ts = {30, 0};
    int r = is("ppoll") ? ppoll(&p, 1, &ts, NULL) : poll(&p, 1, 30000);
    if (r <= 0) {
        line("poll: %d %s", r, r ? ename(errno) : "");
        return -1;
    }
    return p.revents;
}

// One non-blocking read. Returns 1 if bytes came, 0 if there were none, -1 at the end of the stream or after an error.
static int take(void) {
    static char b[PIECE];
    ssize_t n;
    do n = recv(in_fd, b, size_at(in_seed + 9, got), 0);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) {
        if (n < 0 || got != TOTAL) line("recv at %" PRIu64 ": %zd %s", got, n, n ? ename(errno) : "");
        return -1;
    }
    if (!verify(b, got, n, in_seed)) return -1;
    count(n);
    return 1;
}

static uint64_t put;
static int give(void) {
    static char b[PIECE];
    size_t want = size_at(out_seed, put);
    fill(b, put, want, out_seed);
    ssize_t n;
    do n = send(out_fd, b, want, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n < 0) {
        line("send at %" PRIu64 ": %s", put, ename(errno));
        return -1;
    }
    put += n;
    if (put == TOTAL) shutdown(out_fd, SHUT_WR);
    return 1;
}

static void with_readiness(void) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    int end = 0;
    while (!end || put < TOTAL) {
        int r = wait_way((end ? 0 : POLLIN) | (put < TOTAL ? POLLOUT : 0));
        if (r < 0) return;
        if (!end && r & (POLLIN | POLLHUP | POLLERR)) end = take() < 0;
        if (put < TOTAL && r & POLLOUT && give() < 0) return;
        if (end && got < TOTAL) return;
    }
}

static void with_epoll(void) {
    int edge = is("epoll-edge"), shot = is("epoll-oneshot");
    unsigned mode = edge ? EPOLLET : shot ? EPOLLONESHOT : 0;
    int e = epoll_create1(0), end = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | mode, .data.u64 = 0xabcdef};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    while (!end || put < TOTAL) {
        int n = epoll_wait(e, &ev, 1, 30000);
        if (n <= 0 || ev.data.u64 != 0xabcdef) {
            line("epoll_wait: %d %s", n, n < 0 ? ename(errno) : "");
            return;
        }
        unsigned was = ev.events;
        int r;
        if (!end && was & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) {
            do r = take();
            while (r > 0 && edge);
            end = r < 0;
        }
        if (put < TOTAL && was & EPOLLOUT) {
            do r = give();
            while (r > 0 && edge && put < TOTAL);
            if (r < 0) return;
        }
        if (end && got < TOTAL) return;
        if (!edge) {
            ev.events = (end ? 0 : EPOLLIN) | (put < TOTAL ? EPOLLOUT : 0) | mode;
            ev.data.u64 = 0xabcdef;
            MUST(epoll_ctl(e, EPOLL_CTL_MOD, fd, &ev));
        }
    }
    close(e);
}

static int one_set(int fd_, unsigned what) {
    int e = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event ev = {.events = what};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd_, &ev));
    return e;
}

// Writes that are so long that SLIM passes them to the kernel in pieces, and some non-blocking ones. After such a write a call
// with an invalid iovec list must still fail, and do nothing else.
static int give_much(void) {
    static char b[MUCH];
    static int turn;
    size_t n = MUCH < TOTAL - put ? MUCH : TOTAL - put, k = n / 3;
    fill(b, put, n, out_seed);
    struct iovec v[3] = {{b, k}, {NULL, 0}, {b + k, n - k}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 3};
    ssize_t w;
    switch (turn++ % 4) {
    case 0: w = sendmsg(out_fd, &m, MSG_NOSIGNAL); break;
    case 1: w = writev(out_fd, v, 3); break;
    case 2: w = sendmsg(out_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT); break;
    default: w = send(out_fd, b, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (w < 0 && errno == EAGAIN) return wait_for(out_fd, POLLOUT, 30000);
    if (w < 0) {
        line("send at %" PRIu64 ": %s", put, ename(errno));
        return -1;
    }
    put += w;
    if (writev(out_fd, (struct iovec *)4096, 2) != -1 || errno != EFAULT) line("writev of no list: %s", ename(errno));
    if (sendmsg(out_fd, (struct msghdr *)4096, MSG_NOSIGNAL) != -1 || errno != EFAULT)
        line("sendmsg of no message: %s", ename(errno));
    struct iovec endless[2] = {{b, 1}, {b, (size_t)-1}};
    if (writev(out_fd, endless, 2) != -1 || errno != EINVAL) line("writev without end: %s", ename(errno));
    if (put == TOTAL) shutdown(out_fd, SHUT_WR);
    return 1;
}

static void *writer(void *p UNUSED) {
    int e = is("epoll-two") ? one_set(out_fd, EPOLLOUT | EPOLLET) : -1;
    char path[] = "/tmp/slim-xfer-XXXXXX";
    int file = -1;
    off_t at = 0;
    if (is("sendfile")) {
        file = MUST(mkstemp(path));
        unlink(path);
        char *all = malloc(TOTAL);
        fill(all, 0, TOTAL, out_seed);
        for (size_t n = 0; n < TOTAL;) n += MUST(write(file, all + n, TOTAL - n));
        free(all);
    }
    while (put < TOTAL) {
        int r;
        if (is("msg")) {
            static char b[PIECE];
            size_t n = size_at(out_seed, put), k = n / 3;
            fill(b, put, n, out_seed);
            struct iovec v[3] = {{b, k}, {NULL, 0}, {b + k, n - k}};
            struct msghdr m = {.msg_iov = v, .msg_iovlen = 3};
            ssize_t w = put % 3 == 0   ? sendmsg(out_fd, &m, MSG_NOSIGNAL)
                        : put % 3 == 1 ? writev(out_fd, v, 3)
                                       : pwritev2(out_fd, v, 3, -1, 0);
            if (w < 0) line("sendmsg: %s", ename(errno));
            r = w < 0 ? -1 : 1;
            if (w > 0) put += w;
            if (put == TOTAL) shutdown(out_fd, SHUT_WR);
        } else if (file >= 0) {
            ssize_t w = sendfile(out_fd, file, &at, size_at(out_seed, put) * 10);
            if (w < 0) line("sendfile: %s", ename(errno));
            r = w < 0 ? -1 : 1;
            if (w > 0) put += w;
            if (put == TOTAL) shutdown(out_fd, SHUT_WR);
        } else if (is("much")) {
            r = give_much();
        } else {
            r = give();
        }
        if (r < 0) break;
        if (r == 0 && e >= 0) {
            struct epoll_event ev;
            if (epoll_wait(e, &ev, 1, 30000) <= 0) line("no event for writing");
        } else if (r == 0 && !is("time-limits")) {
            line("send: EAGAIN");
            break;
        }
    }
    if (e >= 0) close(e);
    if (file >= 0) close(file);
    return NULL;
}

static void with_threads(void) {
    pthread_t t;
    int e = is("epoll-two") ? one_set(in_fd, EPOLLIN | EPOLLET | EPOLLRDHUP) : -1;
    if (e >= 0) fcntl(fd, F_SETFL, O_NONBLOCK);
    if (is("time-limits")) {
        struct timeval tv = {0, 20000};
        MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
        MUST(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv));
    }
    pthread_create(&t, NULL, writer, NULL);
    static char b[PIECE], c[PIECE];
    for (;;) {
        size_t want = size_at(in_seed + 9, got);
        ssize_t n;
        if (is("waitall")) {
            n = recv(in_fd, b, want, MSG_WAITALL);
            if (n > 0 && (size_t)n != want) line("MSG_WAITALL gave %zd of %zu", n, want);
        } else if (is("peek")) {
            ssize_t k = recv(in_fd, c, want, MSG_PEEK);
            // This is the only reader, so the peeked bytes are still there.
            n = k > 0 ? recv(in_fd, b, k, 0) : k;
            if (n != k || (n > 0 && memcmp(b, c, n))) line("peeked %zd, read %zd", k, n);
        } else if (is("msg")) {
            struct iovec v[3] = {{b, want / 2}, {NULL, 0}, {b + want / 2, want - want / 2}};
            struct msghdr m = {.msg_iov = v, .msg_iovlen = 3};
            n = got % 3 == 0 ? recvmsg(in_fd, &m, 0) : got % 3 == 1 ? readv(in_fd, v, 3) : preadv2(in_fd, v, 3, -1, 0);
        } else if (is("fionread")) {
            int k = 0;
            wait_for(in_fd, POLLIN, 30000);
            MUST(ioctl(in_fd, FIONREAD, &k));
            if (k > PIECE) k = PIECE;
            n = read(in_fd, b, k ? k : 1);
            if (k && n != k) line("FIONREAD said %d, read gave %zd", k, n);
        } else {
            int r = take();
            if (r > 0) continue;
            if (r < 0) break;
            if (e >= 0) {
                struct epoll_event ev;
                if (epoll_wait(e, &ev, 1, 30000) <= 0) line("no event for reading");
                continue;
            }
            if (is("time-limits")) continue;
            line("recv: EAGAIN");
            break;
        }
        if (n == 0 && got == TOTAL) break;
        if (n <= 0) {
            line("read at %" PRIu64 ": %zd %s", got, n, n ? ename(errno) : "");
            break;
        }
        if (!verify(b, got, n, in_seed)) break;
        count(n);
    }
    pthread_join(t, NULL);
    if (e >= 0) close(e);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    way = getenv("T_ARGS");
    int l = -1;
    fd = pair_up(&l);
    in_seed = is_server() ? 1 : 2;
    out_seed = 3 - in_seed;
    in_fd = out_fd = fd;
    int local = port_of(fd), one = 1, idle = 77;
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle));
    MUST(fcntl(fd, F_SETFD, FD_CLOEXEC));
    if (is("dup")) {
        in_fd = MUST(dup(fd));
        out_fd = MUST(dup2(fd, 70));
        close(fd);
        fd = in_fd;
    }
    pthread_t t;
    if (is_server()) pthread_create(&t, NULL, breaker, NULL);
    if (is("poll") || is("ppoll") || is("select") || is("pselect"))
        with_readiness();
    else if (is("epoll-level") || is("epoll-edge") || is("epoll-oneshot"))
        with_epoll();
    else
        with_threads();
    over = 1;
    if (is_server()) pthread_join(t, NULL);
    line("%s: read %" PRIu64 ", written %" PRIu64, way, got, put);
    idle = one = 0;
    socklen_t n = sizeof one;
    getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, &n);
    getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &n);
    struct sockaddr_in a;
    n = sizeof a;
    R(getsockname(fd, (void *)&a, &n));
    line("the same port %d; nodelay %d idle %d; flags %x %d", ntohs(a.sin_port) == local, one, idle, fcntl(fd, F_GETFL), fcntl(fd, F_GETFD));
    meet();
    R(close(fd));
    line("next number %d", (int)MUST(dup(1)));
    return 0;
}
