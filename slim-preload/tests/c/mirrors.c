// Epoll registrations survive a break, even if the descriptor numbers change their meaning: in a forked child, and after one
// of several numbers of an epoll instance or of a connection is closed. And forks while other threads register.
#include "t.h"
#include <stdatomic.h>

static char buf[64];

static void register_(int e, int fd, uint64_t data) {
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = data};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
}

static void both_break(void) {
    const char *b = getenv("T_BREAKS");
    meet();
    if (is_server() && b && atoi(b) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

// The server sends, and the client prints the events of its epoll instance.
static void report(int e, int fd, const char *what) {
    if (is_server()) {
        MUST(full_send(fd, "hello", 5));
        meet();
        return;
    }
    struct epoll_event ev[4];
    memset(ev, 0, sizeof ev);
    int n = epoll_wait(e, ev, 4, 3000);
    line("%s: %d %" PRIx64 " %s", what, n, ev[0].data.u64, n > 0 ? bits(ev[0].events) : "");
    // Does not read from the descriptor that the event names, which may be the wrong one.
    line("  %zd bytes", full_recv(fd, buf, 5));
    line("  then %d", epoll_wait(e, ev, 4, 50));
    meet();
}

// A child closes the inherited descriptors, and opens the same kinds again under the same numbers.
static void forked(void) {
    int l = -1, fd = pair_up(&l);
    int e = MUST(epoll_create1(0));
    register_(e, fd, 0x11);
    report(e, fd, "parent");
    fflush(stdout);
    pid_t child = MUST(fork());
    if (child) {
        int st = -1;
        MUST(waitpid(child, &st, 0));
        line("child: %x", st);
        report(e, fd, "parent again");
        return;
    }
    alarm(20);
    close(e);
    close(fd);
    int mine = pair_up(&l), set = MUST(epoll_create1(0));
    line("the same numbers: %d", mine == fd && set == e);
    register_(set, mine, 0x22);
    report(set, mine, "child");
    both_break();
    report(set, mine, "child after a break");
    both_break();
    report(set, mine, "child after another");
    _exit(0);
}

// One of two numbers of an instance is closed. The instance remains usable by the other.
static void doubled(int first, int over) {
    int l = -1, fd = pair_up(&l);
    int a = MUST(epoll_create1(0)), b = MUST(dup(a));
    register_(a, fd, 0x33);
    report(b, fd, "before");
    int gone = first ? a : b, left = first ? b : a;
    if (over)
        MUST(dup2(0, gone));
    else
        close(gone);
    // Another instance takes the closed number.
    int other = MUST(epoll_create1(0));
    if (!over) line("the same number: %d", other == gone);
    both_break();
    report(left, fd, "after a break");
    // A registration by the remaining number is in the same instance.
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 0x44};
    R(epoll_ctl(left, EPOLL_CTL_ADD, fd, &ev));
    R(epoll_ctl(left, EPOLL_CTL_MOD, fd, &ev));
    both_break();
    report(left, fd, "after another");
    both_break();
    R(epoll_ctl(other, EPOLL_CTL_MOD, fd, &ev));
    R(epoll_ctl(left, EPOLL_CTL_DEL, fd, &ev));
}

// A connection has two numbers. The registered one is closed, before or after the connection breaks.
static void copied(uint32_t events, int late, int over) {
    int l = -1, fd = pair_up(&l);
    int a = MUST(epoll_create1(0)), b = MUST(epoll_create1(0)), copy = MUST(fcntl(fd, F_DUPFD, 30));
    struct epoll_event ev = {.events = events, .data.u64 = 0x55};
    MUST(epoll_ctl(a, EPOLL_CTL_ADD, fd, &ev));
    ev.data.u64 = 0x66;
    MUST(epoll_ctl(b, EPOLL_CTL_ADD, fd, &ev));
    int once = events & EPOLLONESHOT;
    if (!once) report(a, fd, "before");
    if (late) both_break();
    if (over)
        MUST(dup2(0, fd));
    else
        R(close(fd));
    if (!late) both_break();
    report(a, copy, "by the copy");
    if (once) report(a, copy, "fired");
    both_break();
    report(b, copy, "by the copy, in the other set");
    // The registration can no longer be named by its number, and the copy is not registered.
    ev.data.u64 = 0x77;
    R(epoll_ctl(a, EPOLL_CTL_MOD, fd, &ev));
    R(epoll_ctl(a, EPOLL_CTL_DEL, copy, &ev));
    both_break();
    // The connection gets the closed number again, which names the registration again.
    MUST(dup2(copy, fd));
    if (late) both_break();
    R(epoll_ctl(a, EPOLL_CTL_ADD, fd, &ev));
    R(epoll_ctl(a, EPOLL_CTL_MOD, fd, &ev));
    if (!late) both_break();
    report(a, copy, "by its number again");
    R(epoll_ctl(a, EPOLL_CTL_DEL, fd, &ev));
    R(epoll_ctl(a, EPOLL_CTL_DEL, fd, &ev));
    close(b);
    // The connection becomes plain TCP while it is registered by a closed number.
    R(epoll_ctl(a, EPOLL_CTL_ADD, fd, &ev));
    R(close(fd));
    if (is_server()) R(send(copy, "!", 1, MSG_OOB));
    meet();
    if (!is_server()) line("urgent: %s", bits(wait_for(copy, POLLPRI, 3000)));
    R(recv(copy, buf, 1, MSG_OOB));
    report(a, copy, "plain");
    if (!is_server()) {
        R(close(copy));
        R(epoll_wait(a, &ev, 1, 50));
    } else {
        R(recv(copy, buf, 1, 0));
        R(close(copy));
    }
}

static atomic_int stop;

static void *registers(void *x) {
    int fd = *(int *)x;
    while (!stop) {
        int e = MUST(epoll_create1(0));
        struct epoll_event ev = {.events = EPOLLIN};
        for (int i = 0; i < 40; i++) {
            MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
            MUST(epoll_ctl(e, EPOLL_CTL_DEL, fd, &ev));
        }
        close(e);
    }
    return NULL;
}

// Children that register descriptors, forked while other threads of the parent register some.
static int forking(void) {
    begin(60);
    struct conn x = connection();
    pthread_t t[2];
    for (int i = 0; i < 2; i++) MUST(pthread_create(&t[i], NULL, registers, &x.c) ? -1 : 0);
    int stuck = 0;
    for (int i = 0; i < 150 && !stuck; i++) {
        pid_t p = MUST(fork());
        if (!p) {
            int e = epoll_create1(0), s[2];
            struct epoll_event ev = {.events = EPOLLIN};
            _exit(e < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, s) || epoll_ctl(e, EPOLL_CTL_ADD, s[0], &ev));
        }
        int st = -1;
        for (double begun = now_s(); waitpid(p, &st, WNOHANG) == 0; ms(1))
            if (now_s() - begun > 5) kill(p, SIGKILL);
        stuck = st;
    }
    stop = 1;
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    line("children: %x", stuck);
    hang_up(x);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "forking")) return forking();
    begin_pair(argc, argv, 60);
    const char *kase = getenv("T_ARGS");
    if (!strcmp(kase, "fork")) forked();
    if (!strcmp(kase, "first")) doubled(1, 0);
    if (!strcmp(kase, "second")) doubled(0, 0);
    if (!strcmp(kase, "over")) doubled(1, 1);
    if (!strcmp(kase, "copy")) copied(EPOLLIN, 0, 0);
    if (!strcmp(kase, "copy-late")) copied(EPOLLIN, 1, 0);
    if (!strcmp(kase, "copy-over")) copied(EPOLLIN | EPOLLRDHUP, 0, 1);
    if (!strcmp(kase, "copy-edge")) copied(EPOLLIN | EPOLLET, 0, 0);
    if (!strcmp(kase, "copy-once")) copied(EPOLLIN | EPOLLONESHOT, 1, 0);
    return 0;
}
