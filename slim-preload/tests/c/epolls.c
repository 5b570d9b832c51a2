// epoll: level and edge triggers, one shot, several instances, changes, and descriptors that are closed or duplicated while
// registered.
#include "t.h"

static char buf[256];

static void events(int e, const char *what) {
    struct epoll_event ev[16];
    memset(ev, 0, sizeof ev);
    int n = epoll_wait(e, ev, 16, 0);
    char s[512] = "";
    // Sorted by data, because epoll promises no order of events.
    for (int done = 0; done < n; done++) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (ev[i].data.u64 != UINT64_MAX && (best < 0 || ev[i].data.u64 < ev[best].data.u64)) best = i;
        sprintf(s + strlen(s), " %" PRIx64 ":%s", ev[best].data.u64, bits(ev[best].events));
        ev[best].data.u64 = UINT64_MAX;
    }
    line("%s: %d%s", what, n, s);
}

static int ctl(int e, int op, int fd, unsigned events, uint64_t data) {
    struct epoll_event ev = {.events = events, .data.u64 = data};
    return epoll_ctl(e, op, fd, &ev);
}

static void put(int fd, const char *s, int to) {
    int before = 0;
    MUST(ioctl(to, FIONREAD, &before));
    MUST(send(fd, s, strlen(s), 0));
    arrived(to, before + strlen(s));
}

static void *waiter(void *x) {
    struct epoll_event ev;
    memset(&ev, 0, sizeof ev);
    int n = epoll_wait(*(int *)x, &ev, 1, 3000);
    line("waiter: %d %s %" PRIx64, n, bits(ev.events), ev.data.u64);
    return NULL;
}

// A connection is closed while the peer has not read everything. epoll reports nothing of it, neither then nor when the peer
// ends; with `by_another` it was registered by another number, which was closed before.
static void closed_with_bytes_on_the_way(int by_another) {
    enum { MUCH = 8 << 20 };
    static char much[MUCH];
    struct conn x = connection();
    int e = MUST(epoll_create1(0)), unacked = 0;
    int registered = by_another ? MUST(dup(x.s)) : x.s;
    R(ctl(e, EPOLL_CTL_ADD, registered, EPOLLIN | EPOLLOUT | EPOLLRDHUP, 77));
    if (by_another) {
        R(close(registered));
        events(e, "that number is closed");
    }
    MUST(fcntl(x.s, F_SETFL, O_NONBLOCK));
    MUST(write(x.s, much, MUCH));
    MUST(ioctl(x.s, SIOCOUTQ, &unacked));
    line("unacknowledged: %d", unacked > 0);
    R(close(x.s));
    events(e, "closed");
    while (recv(x.c, much, MUCH, 0) > 0) {}
    close(x.c);
    ms(100);
    events(e, "ended by the peer");
    close(x.l);
    close(e);
}

// A one-shot registration that has fired stays disarmed when its number is closed while the connection has another number:
// epoll does not report the end of the stream.
static void fired_and_closed(void) {
    struct conn x = connection();
    int e = MUST(epoll_create1(0)), other = MUST(dup(x.s));
    R(ctl(e, EPOLL_CTL_ADD, x.s, EPOLLOUT | EPOLLONESHOT, 78));
    events(e, "fired");
    R(close(x.s));
    R(shutdown(other, SHUT_WR));
    R(shutdown(x.c, SHUT_WR));
    wait_for(other, POLLHUP, 2000);
    events(e, "at the end");
    MUST(fcntl(other, F_DUPFD, x.s));
    R(ctl(e, EPOLL_CTL_ADD, x.s, EPOLLOUT, 79));
    R(ctl(e, EPOLL_CTL_MOD, x.s, EPOLLOUT | EPOLLONESHOT, 80));
    events(e, "armed again");
    close(other);
    hang_up(x);
    close(e);
}

int main(void) {
    begin(20);
    struct conn x = connection();
    int e = R(epoll_create(1)), f = R(epoll_create1(EPOLL_CLOEXEC));

    line("-- level");
    R(ctl(e, EPOLL_CTL_ADD, x.c, EPOLLIN, 0xfedcba9876543210));
    events(e, "nothing");
    put(x.s, "abc", x.c);
    events(e, "data");
    events(e, "still");
    MUST(recv(x.c, buf, 2, 0));
    events(e, "some left");
    MUST(recv(x.c, buf, 2, 0));
    events(e, "none left");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLOUT, 2));
    events(e, "writable too");
    R(ctl(e, EPOLL_CTL_MOD, x.c, 0, 3));
    put(x.s, "x", x.c);
    events(e, "no interest");
    R(ctl(e, EPOLL_CTL_DEL, x.c, 0, 0));
    R(ctl(e, EPOLL_CTL_DEL, x.c, 0, 0));
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN, 0));

    line("-- edge");
    R(ctl(e, EPOLL_CTL_ADD, x.c, EPOLLIN | EPOLLET, 4));
    events(e, "what was there");
    events(e, "once");
    put(x.s, "y", x.c);
    events(e, "more came");
    events(e, "once");
    MUST(recv(x.c, buf, 1, 0));
    events(e, "reading is no edge");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLET, 5));
    events(e, "armed again");
    events(e, "once");
    MUST(recv(x.c, buf, 9, 0));
    R(recv(x.c, buf, 9, MSG_DONTWAIT));
    put(x.s, "z", x.c);
    events(e, "after EAGAIN");
    MUST(recv(x.c, buf, 9, 0));
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 6));
    events(e, "writable");
    events(e, "once");

    line("-- one shot");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLONESHOT, 7));
    put(x.s, "1", x.c);
    events(e, "shot");
    put(x.s, "2", x.c);
    events(e, "spent");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLONESHOT, 8));
    events(e, "armed");
    events(e, "spent");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN | EPOLLONESHOT | EPOLLET, 9));
    events(e, "armed, edge");
    events(e, "spent");
    MUST(recv(x.c, buf, 9, 0));

    line("-- two sets");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN, 0xa));
    R(ctl(f, EPOLL_CTL_ADD, x.c, EPOLLIN | EPOLLET, 0xb));
    put(x.s, "two", x.c);
    events(e, "level");
    events(f, "edge");
    events(e, "level");
    events(f, "edge");
    R(ctl(e, EPOLL_CTL_DEL, x.c, 0, 0));
    put(x.s, "!", x.c);
    events(e, "removed");
    events(f, "edge");
    MUST(recv(x.c, buf, 9, 0));
    R(ctl(f, EPOLL_CTL_DEL, x.c, 0, 0));

    line("-- several descriptors");
    R(ctl(e, EPOLL_CTL_ADD, x.c, EPOLLIN | EPOLLOUT, 1));
    R(ctl(e, EPOLL_CTL_ADD, x.s, EPOLLIN, 2));
    R(ctl(e, EPOLL_CTL_ADD, x.l, EPOLLIN, 3));
    put(x.c, "q", x.s);
    int c2 = dial(port_of(x.l));
    wait_for(x.l, POLLIN, 1000);
    events(e, "three");
    struct epoll_event one;
    R(epoll_wait(e, &one, 1, 0));
    int s2 = MUST(accept(x.l, NULL, NULL));
    MUST(recv(x.s, buf, 9, 0));
    events(e, "one");
    close(c2);
    close(s2);

    line("-- doubled and closed");
    int d = R(dup(x.c));
    R(ctl(e, EPOLL_CTL_ADD, d, EPOLLIN, 0xd));
    put(x.s, "d", x.c);
    events(e, "both numbers");
    R(ctl(e, EPOLL_CTL_MOD, x.c, EPOLLIN, 1));
    R(close(x.c));
    events(e, "the first closed, its registration stays");
    MUST(recv(d, buf, 9, 0));
    events(e, "read");
    put(x.s, "e", d);
    events(e, "again");
    R(ctl(e, EPOLL_CTL_DEL, x.c, 0, 0));
    R(dup2(d, x.c));
    R(ctl(e, EPOLL_CTL_ADD, x.c, EPOLLIN, 0xe));
    events(e, "the number is back");
    R(close(d));
    R(close(x.c));
    // Bytes from the peer were unread, so the close resets the connection.
    wait_for(x.s, POLLHUP, 1000);
    events(e, "all closed, the peer sees the end");
    R(close(x.s));
    events(e, "nothing left");
    R(close(x.l));
    R(close(e));
    R(close(f));

    line("-- the end of a stream");
    x = connection();
    e = epoll_create1(0);
    f = epoll_create1(0);
    R(ctl(e, EPOLL_CTL_ADD, x.c, EPOLLIN | EPOLLRDHUP | EPOLLET, 1));
    R(ctl(f, EPOLL_CTL_ADD, x.c, 0, 2));
    events(e, "idle");
    R(shutdown(x.s, SHUT_WR));
    wait_for(x.c, POLLRDHUP, 1000);
    events(e, "half closed");
    events(e, "once");
    events(f, "no interest");
    R(recv(x.c, buf, 1, 0));
    R(close(x.s));
    R(shutdown(x.c, SHUT_WR));
    wait_for(x.c, POLLHUP, 1000);
    ms(5);
    events(e, "closed");
    events(f, "no interest, but HUP");
    R(close(x.c));
    events(f, "gone");
    R(close(x.l));

    line("-- sets in sets");
    x = connection();
    R(ctl(e, EPOLL_CTL_ADD, f, EPOLLIN, 0xf));
    R(ctl(f, EPOLL_CTL_ADD, e, EPOLLIN, 0xf));
    R(ctl(f, EPOLL_CTL_ADD, x.s, EPOLLIN, 5));
    events(e, "idle");
    put(x.c, "n", x.s);
    events(e, "outer");
    line("poll of the set %s", bits(wait_for(f, POLLIN, 1000)));
    events(f, "inner");
    MUST(recv(x.s, buf, 1, 0));
    events(e, "read");

    line("-- added while a thread waits");
    pthread_t t;
    int g = epoll_create1(0);
    pthread_create(&t, NULL, waiter, &g);
    ms(30);
    R(ctl(g, EPOLL_CTL_ADD, x.s, EPOLLIN | EPOLLEXCLUSIVE, 0x77));
    ms(10);
    put(x.c, "w", x.s);
    pthread_join(t, NULL);
    R(ctl(g, EPOLL_CTL_MOD, x.s, EPOLLIN, 0x77));
    MUST(recv(x.s, buf, 1, 0));

    line("-- a doubled set, a closed set");
    int h = R(dup(g));
    put(x.c, "h", x.s);
    events(h, "through the copy");
    R(close(g));
    events(h, "still");
    R(ctl(h, EPOLL_CTL_MOD, x.s, EPOLLIN | EPOLLET, 0x78));
    events(h, "changed through the copy");
    R(close(h));
    R(close(f));
    R(ctl(e, EPOLL_CTL_ADD, x.s, EPOLLIN, 1));
    events(e, "the inner set is gone");
    MUST(recv(x.s, buf, 1, 0));

    line("-- closed with bytes on the way");
    for (int by_another = 0; by_another < 2; by_another++) closed_with_bytes_on_the_way(by_another);

    line("-- fired, and closed");
    fired_and_closed();

    line("-- in a forked child");
    pid_t p = fork();
    if (!p) {
        put(x.c, "c", x.s);
        events(e, "child");
        _exit(0);
    }
    waitpid(p, NULL, 0);
    events(e, "parent");
    hang_up(x);
    events(e, "closed");
    line("SIGPIPE %d", pipes());
    return 0;
}
