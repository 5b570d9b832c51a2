// Both ends have shut down their sending halves when the connection breaks, and most bytes of one direction are still to come.
// No wait for events may report a hangup before the last byte: event loops (libuv) take that for the end of the stream.
#include "t.h"

enum { MOST = 1 << 24 };
static char b[1 << 16];

static long serve(int fd) {
    long sent = 0;
    fill(b, 0, sizeof b, 1);
    for (ssize_t r; sent < MOST && (r = send(fd, b, 4096, MSG_DONTWAIT | MSG_NOSIGNAL)) > 0; sent += r) {}
    MUST(shutdown(fd, SHUT_WR));
    return sent;
}

// The events of one wait, as poll bits.
static unsigned look(int fd, int ep, const char *how) {
    if (!strcmp(how, "poll")) return wait_for(fd, POLLIN | POLLRDHUP, 5000);
    struct epoll_event e = {0};
    return epoll_wait(ep, &e, 1, 5000) > 0 ? e.events : 0;
}

static void read_by_events(int fd, const char *how, long all) {
    const unsigned over = POLLERR | POLLHUP | POLLRDHUP;
    long got = 0, early = 0;
    int ep = MUST(epoll_create1(0)), unread;
    struct epoll_event e = {EPOLLIN | EPOLLRDHUP | (strcmp(how, "edges") ? 0 : EPOLLET), {.fd = fd}};
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
    for (;;) {
        unsigned seen = look(fd, ep, how);
        ssize_t r;
        MUST(ioctl(fd, FIONREAD, &unread));
        if (seen & over && got + unread < all && !early) early = 1, line("%s: %s, but not all is there", how, bits(seen));
        while ((r = recv(fd, b, sizeof b, MSG_DONTWAIT)) > 0) got += r;
        if (r == 0 || errno != EAGAIN) {
            line("%s: %s after %s", how, r ? ename(errno) : "end", got == all ? "everything" : "a part");
            break;
        }
        if (!seen) {
            line("%s: nothing for long", how);
            break;
        }
    }
    close(ep);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    const char *how = getenv("T_ARGS");
    int l = -1, fd = pair_up(&l), breaks = atoi(getenv("T_BREAKS"));
    if (is_server()) {
        tell(serve(fd));
        hear();
        if (breaks) break_connections();
        tell(1);
        hear();
    } else {
        MUST(shutdown(fd, SHUT_WR));
        long all = hear();
        // Time for the announcement of the end to arrive.
        ms(100);
        tell(1);
        hear();
        read_by_events(fd, how, all);
        tell(1);
    }
    close(fd);
    return 0;
}
