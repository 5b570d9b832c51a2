// Connections that their programs end in order, without any fault. T_ARGS: how they end, how many there are, and which
// program ends them (`client` or `server`). The other program observes the ends.
#include "t.h"

enum { MOST = 1000, PIECE = 4096 };
static char how[32], ends_it[32];
static int l = -1, port, count, fds[MOST], ends;
static char buf[1 << 16];

static int is(const char *what) { return !strcmp(how, what); }

static void nonblocking(int fd) { MUST(fcntl(fd, F_SETFL, O_NONBLOCK)); }

// Reads until the end, or an error.
static void read_up(int fd) {
    while (recv(fd, buf, sizeof buf, 0) > 0) {}
}

// The same with an epoll loop.
static void loop_up(int fd, int writes) {
    nonblocking(fd);
    int ep = MUST(epoll_create1(EPOLL_CLOEXEC)), ended = 0, refused = !writes;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (writes ? EPOLLOUT : 0)};
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
    while (!ended || !refused) {
        MUST(epoll_wait(ep, &e, 1, 10000));
        if (e.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
            ssize_t n = recv(fd, buf, sizeof buf, 0);
            ended |= n == 0 || (n < 0 && errno != EAGAIN);
        }
        if (!refused && send(fd, buf, PIECE, MSG_NOSIGNAL) < 0) refused = errno != EAGAIN;
        if (ended && writes && !refused) {
            e.events = EPOLLOUT;
            MUST(epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e));
        }
    }
    close(ep);
}

static void write_on(int fd) {
    while (send(fd, buf, PIECE, MSG_NOSIGNAL) > 0) {}
}

static void end(int fd) {
    struct linger hard = {1, 0};
    if (is("write") || is("loop-write")) full_recv(fd, buf, 3 * PIECE);
    if (is("unread")) arrived(fd, 1);
    if (is("hard")) MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard));
    if (is("half")) read_up(fd), MUST(full_send(fd, "answer", 6));
    if (is("read") || is("loop-read") || is("both")) MUST(full_send(fd, buf, 100));
    close(fd);
}

static void see(int fd) {
    if (is("unread")) MUST(full_send(fd, "x", 1));
    if (is("half")) MUST(full_send(fd, "question", 8)), MUST(shutdown(fd, SHUT_WR));
    if (is("write")) write_on(fd);
    if (is("loop-write")) loop_up(fd, 1);
    if (is("loop-read")) loop_up(fd, 0);
    if (is("both")) full_recv(fd, buf, 100);
    else read_up(fd);
    close(fd);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    if (sscanf(getenv("T_ARGS"), "%31s %d %31s", how, &count, ends_it) != 3 || count > MOST) return 1;
    ends = !strcmp(ends_it, is_server() ? "server" : "client");
    if (is_server()) l = listener(), tell(port_of(l));
    else port = hear();
    for (int i = 0; i < count; i++) {
        fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        MUST(full_send(fds[i], "x", 1));
        full_recv(fds[i], buf, 1);
    }
    meet();
    await_negotiation();
    meet();
    if (is("exit")) {
        if (ends) exit(0);
        for (int i = 0; i < count; i++) see(fds[i]);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        meet();
        if (ends) end(fds[i]);
        else see(fds[i]);
    }
    meet();
    return 0;
}
