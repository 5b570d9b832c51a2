// A program must not notice that its connection breaks, even at a bad moment. Two programs; the case is in T_ARGS, and
// whether the connection breaks at all is in T_BREAKS.
#include "t.h"

static char buf[1 << 20];
static int l = -1, fd;
static const char *kase;

static int is(const char *k) { return !strcmp(kase, k); }

// Both programs call this; the server breaks the connection while both wait.
static void both_break(void) {
    meet();
    if (is_server()) break_if_wanted();
    meet();
}

static void talk(const char *what) {
    char b[8] = "";
    int ok = is_server() ? full_recv(fd, b, 4) == 4 && !memcmp(b, "ping", 4) && !full_send(fd, "pong", 4)
                         : !full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4 && !memcmp(b, "pong", 4);
    line("%s: %s", what, ok ? "ping, pong" : ename(errno));
}

static void send_stream(uint64_t n, uint64_t seed) {
    for (uint64_t off = 0; off < n; off += sizeof buf) {
        size_t k = n - off < sizeof buf ? n - off : sizeof buf;
        fill(buf, off, k, seed);
        if (full_send(fd, buf, k)) {
            line("send at %" PRIu64 ": %s", off, ename(errno));
            return;
        }
    }
}

static void recv_stream(uint64_t n, uint64_t seed) {
    uint64_t off = 0;
    while (off < n) {
        ssize_t r = recv(fd, buf, sizeof buf, 0);
        if (r <= 0) {
            line("recv at %" PRIu64 ": %zd %s", off, r, r ? ename(errno) : "");
            return;
        }
        if (!verify(buf, off, r, seed)) return;
        off += r;
    }
    line("stream %" PRIu64 " whole", seed);
}

static void idle(void) {
    for (int i = 0; i < 6; i++) {
        both_break();
        if (i % 2) ms(20);
        talk("after a break");
    }
    for (int i = 0; i < 8; i++) {
        // The other direction first.
        both_break();
        if (is_server())
            MUST(full_send(fd, "server first", 12));
        else
            R(full_recv(fd, buf, 12));
    }
    both_break();
}

static void half_close(void) {
    if (is_server()) {
        both_break();
        recv_stream(3 << 20, 1);
        R(recv(fd, buf, 1, 0));
        both_break();
        R(recv(fd, buf, 1, 0));
        send_stream(2 << 20, 2);
        R(shutdown(fd, SHUT_WR));
        both_break();
    } else {
        pthread_t t;
        pthread_create(&t, NULL, (void *(*)(void *))(void *)both_break, NULL);
        send_stream(3 << 20, 1);
        R(shutdown(fd, SHUT_WR));
        pthread_join(t, NULL);
        both_break();
        R(send(fd, "x", 1, MSG_NOSIGNAL));
        pthread_create(&t, NULL, (void *(*)(void *))(void *)both_break, NULL);
        recv_stream(2 << 20, 2);
        R(recv(fd, buf, 1, 0));
        pthread_join(t, NULL);
        R(recv(fd, buf, 1, 0));
    }
}

// Sends as much as fits.
static uint64_t send_much(uint64_t seed) {
    uint64_t n = send_till_full(fd, buf, sizeof buf, seed);
    line("more than a little %d", n > 100000);
    return n;
}

// Opens many connections, and sends the first `n` bytes of its number over each.
static void open_many(int *fds, int count, size_t n) {
    if (is_server()) l = listener(), tell(port_of(l));
    int port = is_server() ? 0 : hear();
    for (int i = 0; i < count; i++) {
        fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        if (!is_server()) MUST(full_send(fds[i], &i, n));
    }
}

static void on_usr2(int s UNUSED) {
    int e = errno;
    ms(4);
    errno = e;
}

// A shutdown while the transport is being replaced, because the peer has noticed the break. A signal handler prolongs the call.
static void shut(void) {
    enum { N = 200 };
    static int fds[N];
    timer_t timer;
    struct sigevent by_usr2 = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    handle(SIGUSR2, on_usr2, SA_RESTART);
    MUST(timer_create(CLOCK_MONOTONIC, &by_usr2, &timer));
    int ends = 0;
    open_many(fds, N, 1);
    meet();
    await_negotiation();
    both_break();
    for (int i = 0; i < N; i++) {
        if (is_server()) {
            ends += full_recv(fds[i], buf, 2) == 1;
            continue;
        }
        struct itimerspec soon = {.it_value.tv_nsec = 1 + t_word(7, i) % 60000};
        MUST(timer_settime(timer, 0, &soon, NULL));
        if (shutdown(fds[i], SHUT_WR)) line("shutdown: %s", ename(errno));
    }
    line("ends %d", ends);
    meet();
}

// Closed with bytes in flight, and then broken: the bytes arrive, and after them the end of the stream.
static void linger(int then_exit) {
    if (is_server()) {
        uint64_t n = hear();
        break_if_wanted();
        tell(1);
        recv_to_end(fd, buf, sizeof buf, n, 3);
        if (!then_exit) meet();
    } else {
        uint64_t n = send_much(3);
        R(close(fd));
        tell(n);
        hear();
        if (then_exit) exit(0);
        meet();
    }
}

// Both directions are shut down with bytes in flight. The bytes still arrive.
static void shut_both(void) {
    if (is_server()) {
        uint64_t n = hear();
        break_if_wanted();
        tell(1);
        recv_to_end(fd, buf, sizeof buf, n, 3);
    } else {
        uint64_t n = send_much(3);
        R(shutdown(fd, SHUT_RDWR));
        tell(n);
        hear();
    }
    meet();
}

// The connection breaks with bytes in flight, then the process exits. Neither it nor its peer has noticed the break.
static void leave(void) {
    if (is_server()) {
        uint64_t n = hear();
        ms(60);
        recv_to_end(fd, buf, sizeof buf, n, 3);
    } else {
        uint64_t n = send_much(3);
        tell(n);
        break_if_wanted();
    }
}

static void *breaks(void *n) {
    for (long i = 0; i < (long)n; i++) {
        ms(15);
        break_if_wanted();
    }
    return NULL;
}

static void big_send(void) {
    enum { BIG = 64 << 20 };
    if (is_server()) {
        pthread_t t;
        pthread_create(&t, NULL, breaks, (void *)8);
        uint64_t off = 0;
        while (off < BIG) {
            ssize_t r = recv(fd, buf, 200000, 0);
            if (r <= 0) {
                line("recv at %" PRIu64 ": %zd %s", off, r, r ? ename(errno) : "");
                break;
            }
            if (!verify(buf, off, r, 4)) break;
            off += r;
            if (off % 7 == 0) usleep(1500);
        }
        line("%" PRIu64, off);
        pthread_join(t, NULL);
    } else {
        char *big = malloc(BIG);
        fill(big, 0, BIG, 4);
        R(send(fd, big, BIG, 0));
    }
}

// A break must not end a wait of any kind.
static void waits(void) {
    int e = epoll_create1(0), o = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = 5};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    ev.events = EPOLLOUT | EPOLLONESHOT;
    MUST(epoll_ctl(o, EPOLL_CTL_ADD, fd, &ev));
    R(epoll_wait(o, &ev, 1, 1000));
    for (int kind = 0; kind < 9; kind++) {
        meet();
        if (is_server()) {
            ms(60);
            break_if_wanted();
            ms(60);
            break_if_wanted();
            ms(60);
            MUST(full_send(fd, "now", 3));
        } else {
            double t0 = tick_s();
            struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
            struct timespec ts = {5, 0};
            fd_set r;
            FD_ZERO(&r);
            FD_SET(fd, &r);
            line("kind %d", kind);
            if (kind == 0) R(recv(fd, buf, 1, 0));
            if (kind == 1) R(recv(fd, buf, 3, MSG_WAITALL | MSG_PEEK));
            if (kind == 2) R(poll(&p, 1, 5000));
            if (kind == 3) R(ppoll(&p, 1, &ts, NULL));
            if (kind == 4) R(select(fd + 1, &r, NULL, NULL, NULL));
            if (kind == 5) R(pselect(fd + 1, &r, NULL, NULL, &ts, NULL));
            if (kind == 6) R(epoll_wait(e, &ev, 1, 5000));
            if (kind == 7) R(epoll_pwait2(e, &ev, 1, &ts, NULL));
            if (kind == 8) R(readv(fd, &(struct iovec){buf, 1}, 1));
            line("%s %s %d", took(t0, 180), bits(p.revents), FD_ISSET(fd, &r));
            if (kind == 6 || kind == 7) line("%s %d", bits(ev.events), (int)ev.data.u64);
            R(full_recv(fd, buf, kind == 0 || kind == 8 ? 2 : 3));
            quote(buf, 2);
            // A one-shot registration that fired before the break stays disarmed.
            R(epoll_wait(o, &ev, 1, 0));
            // A wait without an event lasts for its full time limit.
        }
        meet();
        if (is_server()) {
            break_if_wanted();
        } else {
            double t0 = tick_s();
            struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
            R(poll(&p, 1, 120));
            line("%s %s", took(t0, 120), bits(p.revents));
        }
        meet();
        talk("after it");
    }
}

// A direction is shut down right after a break.
static void end_direction(void) {
    if (is_server()) {
        tell(1);
        R(recv(fd, buf, 1, 0));
        R(send(fd, "x", 1, 0));
    } else {
        hear();
        R(shutdown(fd, SHUT_WR));
        R(recv(fd, buf, 1, 0));
    }
}

// A break right after connect and accept, with little or no time to negotiate.
static void hello(int then_shut) {
    for (int i = 0; i < 40; i++) {
        if (is_server()) {
            if (l < 0) l = listener();
            tell(port_of(l));
            fd = MUST(accept(l, NULL, NULL));
            if (then_shut || i % 4 == 0) usleep(t_word(3, i) % 1500);
            break_if_wanted();
        } else {
            fd = dial(hear());
        }
        if (then_shut)
            end_direction();
        else
            talk("broken at once");
        meet();
        close(fd);
        meet();
    }
}

// Breaks as early as possible, even in the middle of connect. An error is allowed then, a wrong byte is not.
static void connecting(void) {
    pthread_t t;
    if (is_server()) {
        l = listener();
        fcntl(l, F_SETFL, O_NONBLOCK);
        tell(port_of(l));
        pthread_create(&t, NULL, breaks, (void *)60);
        for (;;) {
            struct pollfd p[2] = {{l, POLLIN, 0}, {t_sync, POLLIN, 0}};
            poll(p, 2, 100);
            int s = accept(l, NULL, NULL);
            if (s >= 0) {
                fcntl(s, F_SETFL, 0);
                struct timeval tv = {3, 0};
                setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
                ssize_t n = full_recv(s, buf, 3000);
                if (n > 0 && verify(buf, 0, n, 6)) full_send(s, buf, n);
                close(s);
            }
            if (p[1].revents) break;
        }
        pthread_join(t, NULL);
        hear();
    } else {
        int port = hear(), good = 0;
        double until = now_s() + 1.2;
        struct sockaddr_in a = v4(port);
        while (now_s() < until || good <= 5) {
            int c = socket(AF_INET, SOCK_STREAM, 0);
            struct timeval tv = {3, 0};
            setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
            if (connect(c, (void *)&a, sizeof a) == 0) {
                fill(buf, 0, 3000, 6);
                if (!full_send(c, buf, 3000)) {
                    ssize_t n = full_recv(c, buf, 3000);
                    if (n > 0 && verify(buf, 0, n, 6) && n == 3000) good++;
                }
            }
            close(c);
        }
        line("some came through");
        tell(1);
    }
}

static void many(int count, int limit) {
    static int fds[1000];
    struct rlimit r = {limit, limit};
    if (limit) MUST(setrlimit(RLIMIT_NOFILE, &r));
    int good = 0;
    open_many(fds, count, sizeof(int));
    meet();
    ms(500);
    for (int round = 0; round < 2; round++) {
        both_break();
        for (int i = 0; i < count; i++) {
            int v[20];
            if (!is_server()) {
                for (int k = 0; k < 20; k++) v[k] = i * 20 + k;
                if (full_send(fds[i], v, sizeof v)) line("send: %s", ename(errno));
            } else {
                if (!round && full_recv(fds[i], v, 4) != 4) line("recv: %s", ename(errno));
                if (!round && v[0] != i) line("connection %d says %d", i, v[0]);
                if (full_recv(fds[i], v, sizeof v) != sizeof v) line("recv: %s", ename(errno));
                int ok = 1;
                for (int k = 0; k < 20; k++) ok &= v[k] == i * 20 + k;
                good += ok;
            }
        }
        meet();
    }
    line("good %d", good);
    meet();
    for (int i = 0; i < count; i++) close(fds[i]);
}

static int filler[256];
static void *free_later(void *p) {
    ms(300);
    for (int i = 0; i < 256 && filler[i] >= 0; i++) close(filler[i]);
    return p;
}

// No descriptor is free when the connection breaks. Calls on it wait until one becomes free. With `close_it` the program
// closes the connection while it is broken.
static void none_left(int close_it) {
    struct rlimit r = {128, 128};
    if (!is_server()) {
        MUST(setrlimit(RLIMIT_NOFILE, &r));
        for (int i = 0; (filler[i] = dup(0)) >= 0;) i++;
    }
    if (!is_server()) MUST(full_send(fd, "before, ", 8));
    both_break();
    if (is_server()) {
        if (!close_it) MUST(full_send(fd, "after it", 8));
        line("all: %zd", full_recv(fd, buf, 20));
    } else if (close_it) {
        // Gives the break time to be noticed.
        wait_for(fd, POLLRDHUP, 40);
        MUST(close(fd));
        free_later(NULL);
    } else {
        pthread_t t;
        pthread_create(&t, NULL, free_later, NULL);
        line("%s", bits(wait_for(fd, POLLIN, 10000)));
        R(full_recv(fd, buf, 8));
        MUST(full_send(fd, "and the last", 12));
        pthread_join(t, NULL);
        MUST(close(fd));
    }
    meet();
}

// The peer dies, with the connection intact or broken at the same moment. The end of the stream must come quickly.
static void death(int how) {
    if (is_server()) {
        if (how == 2) MUST(send(fd, "unread", 6, 0));
        meet();
        double t0 = now_s();
        struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
        if (how == 1) R(poll(&p, 1, 10000));
        if (how == 1) line("%s", bits(p.revents));
        if (how == 3) {
            ssize_t r;
            do r = send(fd, buf, sizeof buf, MSG_NOSIGNAL);
            while (r > 0);
            line("%s", ename(errno));
        } else {
            R(recv(fd, buf, 9, 0));
        }
        line("quickly: %d", now_s() - t0 < 1.0);
        R(recv(fd, buf, 9, 0));
        R(send(fd, "x", 1, MSG_NOSIGNAL));
        R(close(fd));
    } else {
        meet();
        if (how == 2) arrived(fd, 6);
        ms(how == 3 ? 200 : 100);
        kill(getpid(), SIGKILL);
    }
}

// The peer dies, and the survivor sends before it reads, as an event loop may do. It meets the end of the stream before a send is refused.
static void death_first(void) {
    if (is_server()) {
        meet();
        ms(150);
        for (;;) {
            struct pollfd p = {.fd = fd, .events = POLLIN | POLLOUT};
            if (poll(&p, 1, 1000) < 1) continue;
            if (p.revents & POLLOUT && send(fd, "x", 1, MSG_DONTWAIT) < 0 && errno != EAGAIN) line("send %s", ename(errno));
            if (!(p.revents & POLLIN)) continue;
            ssize_t r = recv(fd, buf, 9, MSG_DONTWAIT);
            if (r < 0 && errno == EAGAIN) continue;
            line("recv %zd", r);
            break;
        }
        line("SIGPIPE %d", pipes());
        R(close(fd));
    } else {
        meet();
        ms(100);
        kill(getpid(), SIGKILL);
    }
}

// The peer has closed in good order, and then the kernel loses its end, which resets ours. The survivor sends before it reads: its first
// send is the first one that the peer refuses.
static void closed_first(int how) {
    if (is_server()) {
        arrived(fd, 3);
        wait_for(fd, POLLRDHUP, 2000);
        meet();
        meet();
        if (how == 1) line("poll %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
        if (how == 2) R(recv(fd, buf, 9, 0));
        if (how == 2) R(recv(fd, buf, 9, 0));
        R(send(fd, "x", 1, 0));
        line("SIGPIPE %d", pipes());
        wait_for(fd, POLLHUP, 2000);
        R(send(fd, "x", 1, 0));
        line("SIGPIPE %d", pipes());
        R(recv(fd, buf, 9, 0));
        R(close(fd));
    } else {
        MUST(full_send(fd, "bye", 3));
        MUST(shutdown(fd, SHUT_RDWR));
        meet();
        if (breaks_wanted() && break_ends(0, CLOSED_FIRST) < 1) line("no end was broken");
        meet();
    }
}

// What poll and epoll show of an end behind bytes that were there before a break. `later`: the peer ends its stream after the break.
static void end_behind_bytes(int later) {
    if (!is_server()) {
        MUST(full_send(fd, "bye", 3));
        if (!later) MUST(shutdown(fd, SHUT_WR));
        both_break();
        if (later) MUST(shutdown(fd, SHUT_WR));
        R(recv(fd, buf, 9, 0));
        meet();
        return;
    }
    int e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = 5};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    arrived(fd, 3);
    if (!later) wait_for(fd, POLLRDHUP, 2000);
    both_break();
    line("before the stream is read: %s", bits(wait_for(fd, POLLRDHUP, 2000)));
    line("%s", bits(wait_for(fd, POLLIN | POLLOUT | POLLRDHUP, 2000)));
    R(epoll_wait(e, &ev, 1, 2000));
    line("%s", bits(ev.events));
    R(recv(fd, buf, 2, 0));
    line("read in part: %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    R(shutdown(fd, SHUT_WR));
    line("both have ended: %s", bits(wait_for(fd, POLLIN | POLLOUT | POLLRDHUP, 2000)));
    R(epoll_wait(e, &ev, 1, 2000));
    line("%s", bits(ev.events));
    R(recv(fd, buf, 9, 0));
    R(recv(fd, buf, 9, 0));
    line("read: %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    meet();
}

// The same for a direction that the program itself shuts down for reading.
static void end_of_reading(void) {
    if (!is_server()) {
        MUST(full_send(fd, "bye", 3));
        both_break();
        meet();
        return;
    }
    arrived(fd, 3);
    both_break();
    line("%s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    R(recv(fd, buf, 2, 0));
    R(shutdown(fd, SHUT_RD));
    line("%s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    R(recv(fd, buf, 9, 0));
    R(recv(fd, buf, 9, 0));
    meet();
}

static void death_broken(void) {
    if (is_server()) {
        meet();
        double t0 = now_s();
        ssize_t r = recv(fd, buf, 9, 0);
        line("an end %d, quickly %d", r <= 0, now_s() - t0 < 1.5);
    } else {
        meet();
        ms(50);
        break_connections();
        kill(getpid(), SIGKILL);
    }
}

static void copies(void) {
    int d = MUST(dup(fd)), f = MUST(fcntl(fd, F_DUPFD_CLOEXEC, 40));
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 1};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, d, &ev));
    ev.data.u64 = 2;
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, f, &ev));
    both_break();
    talk("first number");
    fd = d;
    talk("second");
    both_break();
    fd = f;
    talk("third");
    line("%d %d %x", fcntl(d, F_GETFD), fcntl(f, F_GETFD), fcntl(f, F_GETFL));
    MUST(fcntl(d, F_SETFL, O_NONBLOCK));
    both_break();
    // The socket is non-blocking by now, so a call at the moment of the break may return EAGAIN.
    while (send(d, "1", 1, MSG_NOSIGNAL) != 1 && errno == EAGAIN) wait_for(d, POLLOUT, 3000);
    line("%s", bits(wait_for(f, POLLIN, 3000)));
    struct epoll_event evs[4];
    line("both numbers %d", epoll_wait(e, evs, 4, 1000));
    R(recv(d, buf, 1, 0));
    line("flags %x %x", fcntl(f, F_GETFL), fcntl(d, F_GETFL));
    MUST(fcntl(d, F_SETFL, 0));
    close(d);
    both_break();
    fd = f;
    talk("the third alone");
    close(f);
    fd = 4;
    both_break();
}

// Calls immediately after a break, before SLIM has noticed it.
static void at_once(void) {
    int v = -1, one = 1;
    socklen_t n = sizeof v;
    struct sockaddr_in a;
    meet();
    int mine = port_of(fd), theirs = peer_port_of(fd);
    for (int i = 0; i < 5; i++) {
        meet();
        break_if_wanted();
        if (i == 0) R(getsockopt(fd, SOL_SOCKET, SO_ERROR, &v, &n)), line("SO_ERROR %d", v);
        if (i == 1) R(getpeername(fd, (void *)&a, (n = sizeof a, &n))), line("%d", ntohs(a.sin_port) == theirs);
        if (i == 2) R(getsockname(fd, (void *)&a, (n = sizeof a, &n))), line("%d", ntohs(a.sin_port) == mine);
        if (i == 3) R(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
        if (i == 4) R(ioctl(fd, FIONREAD, &v));
        talk("after that");
    }
    n = sizeof v;
    R(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &v, &n));
    line("TCP_NODELAY %d", v);
    meet();
    // Unread bytes stay, are counted, and can be peeked at.
    MUST(full_send(fd, "0123456789", 10));
    arrived(fd, 10);
    both_break();
    ms(30);
    R(ioctl(fd, FIONREAD, &v));
    line("%d", v);
    R(recv(fd, buf, 5, MSG_PEEK));
    R(recv(fd, buf, 3, 0));
    both_break();
    R(recv(fd, buf, 20, MSG_PEEK));
    R(recv(fd, NULL, 2, MSG_TRUNC));
    line("%s", bits(wait_for(fd, POLLIN, 1000)));
    R(recv(fd, buf, 20, MSG_DONTWAIT));
    quote(buf, 5);
    R(recv(fd, buf, 20, MSG_DONTWAIT));
    both_break();
    if (is_server()) {
        break_if_wanted();
        R(shutdown(fd, SHUT_WR));
        R(recv(fd, buf, 1, 0));
    } else {
        R(recv(fd, buf, 1, 0));
        R(close(fd));
    }
    meet();
}

// Exchanges messages for as long as the file T_WHILE exists, while the harness sends noise. Then one true break.
static void steady(void) {
    const char *file = getenv("T_WHILE");
    for (int i = 0, over = !file; !over; i++) {
        char b[8] = "";
        if (!is_server()) over = access(file, F_OK) < 0;
        const char *word = over ? "over" : "talk";
        if (is_server() ? full_recv(fd, b, 4) != 4 || full_send(fd, b, 4) : full_send(fd, word, 4) || full_recv(fd, b, 4) != 4) {
            line("disturbed at %d: %s", i, ename(errno));
            return;
        }
        if (is_server() && !memcmp(b, "over", 4)) over = 1, word = "over";
        if (memcmp(b, word, 4)) line("wrong bytes at %d", i);
        if (!is_server()) usleep(800);
    }
    both_break();
    talk("after a break");
}

static void set_options(int s) {
    int on = 1, seconds = 77, ms_ = 54321, size = 70000, tos = 0x10;
    struct linger linger = {1, 9};
    struct timeval limit = {8, 0};
    MUST(setsockopt(s, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on));
    MUST(setsockopt(s, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds));
    MUST(setsockopt(s, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms_, sizeof ms_));
    MUST(setsockopt(s, SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    MUST(setsockopt(s, IPPROTO_IP, IP_TOS, &tos, sizeof tos));
    MUST(setsockopt(s, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    MUST(setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    MUST(setsockopt(s, IPPROTO_TCP, TCP_CONGESTION, "reno", 4));
}

static void show_options(void) {
    struct option {
        const char *name;
        int level, option;
    } all[] = {
        {"keepalive", SOL_SOCKET, SO_KEEPALIVE}, {"keepidle", IPPROTO_TCP, TCP_KEEPIDLE},
        {"user timeout", IPPROTO_TCP, TCP_USER_TIMEOUT}, {"sndbuf", SOL_SOCKET, SO_SNDBUF},
        {"tos", IPPROTO_IP, IP_TOS}, {"priority", SOL_SOCKET, SO_PRIORITY}, {"nodelay", IPPROTO_TCP, TCP_NODELAY},
        {"oobinline", SOL_SOCKET, SO_OOBINLINE}, {"lowat", SOL_SOCKET, SO_RCVLOWAT},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int v = -1;
        socklen_t n = sizeof v;
        MUST(getsockopt(fd, all[i].level, all[i].option, &v, &n));
        // The kernel chooses the size of an unset buffer again for each connection.
        if (all[i].option != SO_SNDBUF || v == 140000) line("  %s %d", all[i].name, v);
    }
    struct linger g;
    struct timeval t;
    char name[16] = "";
    socklen_t n = sizeof g;
    MUST(getsockopt(fd, SOL_SOCKET, SO_LINGER, &g, &n));
    n = sizeof t;
    MUST(getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, &n));
    n = sizeof name;
    MUST(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &n));
    line("  linger %d %d, limit %d s, %s", g.l_onoff, g.l_linger, (int)t.tv_sec, strcmp(name, "reno") ? "default" : name);
}

static void options(void) {
    show_options();
    both_break();
    talk("after a break");
    show_options();
    set_options(fd);
    both_break();
    talk("after another");
    show_options();
}

// A listener with options, which its accepted connections inherit. With `replace` the program makes the listener, and
// then replaces itself by `exec`.
static void with_options(char **argv, int replace) {
    const char *have = getenv("T_LISTENER");
    // HELLO for the first connection may come before the process can answer it: the process learns of such a listener
    // only when it accepts.
    if (!is_server()) {
        int port = (int)hear();
        dial(port);
        meet();
        fd = dial(port);
    } else {
        l = have ? atoi(have) : listener();
        if (!have) set_options(l);
        if (replace && !have) {
            char number[16];
            snprintf(number, sizeof number, "%d", l);
            setenv("T_LISTENER", number, 1);
            fcntl(t_sync, F_SETFD, 0);
            execv(argv[0], argv);
            line("exec: %s", ename(errno));
        }
        tell(port_of(l));
        MUST(accept(l, NULL, NULL));
        meet();
        fd = MUST(accept(l, NULL, NULL));
    }
    meet();
    await_negotiation();
    meet();
    options();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    kase = getenv("T_ARGS");
    if (is("options") || is("options-exec")) {
        with_options(argv, is("options-exec"));
        line("SIGPIPE %d", pipes());
        return 0;
    }
    if (!is("hello") && !is("hello-shut") && !is("connecting") && !is("shut") && !is("many") && !is("scarce")) fd = pair_up(&l);
    if (is("idle")) idle();
    if (is("half-close")) half_close();
    if (is("linger")) linger(0);
    if (is("linger-exit")) linger(1);
    if (is("shut-both")) shut_both();
    if (is("leave")) leave();
    if (is("shut")) shut();
    if (is("big-send")) big_send();
    if (is("waits")) waits();
    if (is("hello")) hello(0);
    if (is("hello-shut")) hello(1);
    if (is("connecting")) connecting();
    if (is("many")) many(1000, 0);
    // The limit has room for the connections and for SLIM's permanent descriptors, but not for a second one per connection.
    if (is("scarce")) many(200, 240);
    if (is("none-left")) none_left(0);
    if (is("none-left-close")) none_left(1);
    if (is("death")) death(0);
    if (is("death-poll")) death(1);
    if (is("death-unread")) death(2);
    if (is("death-send")) death(3);
    if (is("death-first")) death_first();
    if (is("death-broken")) death_broken();
    if (is("closed-send")) closed_first(0);
    if (is("closed-poll")) closed_first(1);
    if (is("closed-read")) closed_first(2);
    if (is("end-behind")) end_behind_bytes(0);
    if (is("end-later")) end_behind_bytes(1);
    if (is("end-of-reading")) end_of_reading();
    if (is("copies")) copies();
    if (is("at-once")) at_once();
    if (is("steady")) steady();
    line("SIGPIPE %d", pipes());
    return 0;
}
