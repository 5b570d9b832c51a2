// A program registers its connection with epoll by raw system calls, which no hook sees. It must still be woken, however often
// the connection breaks. Two programs. T_ARGS says how the client waits: "level", "edge" or "once" is the kind of registration.
// With "-unseen" the client also waits by a raw system call. With "-change" it sometimes changes the registered events while the
// connection breaks, and must be woken for the latest ones. The server breaks the connection if T_BREAKS is set.
#include "t.h"
#include "raw.h"

enum { ROUNDS = 120, PIECE = 5000 };

static char b[PIECE];

static int is(const char *what) { return strstr(getenv("T_ARGS"), what) != NULL; }

static void server(int fd) {
    for (int i = 0; i < ROUNDS; i++) {
        fill(b, (uint64_t)i * PIECE, PIECE, 1);
        if (i % 6 == 5 && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
        if (full_send(fd, b, PIECE)) line("send: %s", ename(errno));
        if (i % 6 == 2 && atoi(getenv("T_BREAKS"))) break_connections();
        char ack = 0;
        if (full_recv(fd, &ack, 1) != 1 || ack != 'a') {
            line("no acknowledgement in round %d: %s", i, ename(errno));
            return;
        }
    }
}

// For some microseconds, while the transport is replaced, the kernel has no registration to change, or changes one that SLIM
// has already read (see the README).
static void change(int e, int fd, struct epoll_event *ev) {
    for (int i = 0; i < 100; i++) {
        if (raw(SYS_epoll_ctl, e, EPOLL_CTL_MOD, fd, ev) == 0) return;
        if (errno != ENOENT) break;
        ms(1);
    }
    line("EPOLL_CTL_MOD: %s", ename(errno));
    exit(1);
}

static void client(int fd) {
    uint32_t events = EPOLLIN | EPOLLRDHUP | (is("edge") ? EPOLLET : is("once") ? EPOLLONESHOT : 0);
    struct epoll_event ev = {.events = events, .data.u64 = 0x1234567890ull}, got;
    int e = MUST(raw(SYS_epoll_create1, EPOLL_CLOEXEC));
    MUST(fcntl(fd, F_SETFL, O_NONBLOCK));
    MUST(raw(SYS_epoll_ctl, e, EPOLL_CTL_ADD, fd, &ev));
    int i = 0, have = 0, lost = 0;
    while (i < ROUNDS) {
        if (is("change") && have == 0 && i % 6 == 5) {
            // The server breaks the connection at about this time.
            struct epoll_event other = ev;
            other.events = (events & ~EPOLLIN) | EPOLLOUT;
            change(e, fd, &other);
            ms(10);
            change(e, fd, &ev);
        }
        int n = is("unseen") ? (int)raw(SYS_epoll_pwait, e, &got, 1, 5000, NULL, 8) : epoll_wait(e, &got, 1, 5000);
        if (n != 1 || got.data.u64 != ev.data.u64) {
            line("not woken in round %d, with %d bytes: %d", i, have, n);
            return;
        }
        if (is("change") && got.events & EPOLLOUT && lost++ == 0) {
            change(e, fd, &ev);
            continue;
        }
        if (got.events & EPOLLOUT) {
            line("woken in round %d for events that it does not wait for: %x", i, got.events);
            return;
        }
        ssize_t r;
        while ((r = recv(fd, b, PIECE - have, 0)) > 0) {
            if (!verify(b, (uint64_t)i * PIECE + have, r, 1)) return;
            have += r;
            if (have == PIECE) {
                have = 0;
                i++;
                while (send(fd, "a", 1, 0) < 0 && errno == EAGAIN) ms(1);
            }
        }
        if (r == 0 || errno != EAGAIN) {
            if (i < ROUNDS) line("recv = %zd %s in round %d", r, ename(errno), i);
            break;
        }
        if (is("once")) change(e, fd, &ev);
    }
    line("rounds %d", i);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = -1, fd = pair_up(&l);
    is_server() ? server(fd) : client(fd);
    meet();
    close(fd);
    return 0;
}
