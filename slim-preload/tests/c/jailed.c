// A program that changes its root directory to one without /proc, before or after its first connection. Connections break
// if T_BREAKS is set. The case is the argument: it says when, and with "unseen" the epoll registrations are made where no hook
// sees it.
#include "t.h"
#include "raw.h"

static const char *kase;
static int is(const char *k) { return strstr(kase, k) != NULL; }

static void jail(void) {
    char at[] = "/tmp/slim-jail-XXXXXX";
    if (!mkdtemp(at)) _exit(97);
    int tmp = MUST(open("/tmp", O_PATH));
    MUST(chroot(at));
    MUST(chdir("/"));
    // The directory is removed at once, so that it does not stay behind.
    MUST(unlinkat(tmp, at + strlen("/tmp/"), AT_REMOVEDIR));
    close(tmp);
    line("proc: %d", access("/proc/self", F_OK));
}

// Counts the numbers that stay open: SLIM's thread occupies a low number for the microseconds in which it makes a descriptor.
static int numbers_open(void) {
    int n = 0, open[64];
    for (int i = 3; i < 64; i++) open[i] = fcntl(i, F_GETFD) >= 0;
    ms(20);
    for (int i = 3; i < 64; i++) n += open[i] && fcntl(i, F_GETFD) >= 0;
    return n;
}

// What recv gives when the stream has ended. A call that does not wait may fail with EAGAIN before that: a forked child has had the
// connection, so the peer's end of stream is announced by SLIM's thread, at the same time as the kernel's.
static int end_of_stream(int fd) {
    char b[1];
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (MUST(poll(&p, 1, 5000)) == 0) return -2;
        int n = recv(fd, b, 1, 0);
        if (n >= 0 || errno != EAGAIN) return n;
    }
}

int main(int argc, char **argv) {
    begin(40);
    kase = argc > 1 ? argv[1] : "";
    int breaks = atoi(getenv("T_BREAKS") ?: "0");
    if (is("before")) jail();
    struct conn x = connection();
    ping(x.c, x.s, "works");
    int e = MUST(epoll_create1(EPOLL_CLOEXEC)), n = 0;
    struct epoll_event v = {.events = EPOLLIN, .data.u64 = 7};
    if (is("unseen")) {
        MUST(raw(SYS_epoll_ctl, e, EPOLL_CTL_ADD, x.s, &v));
        MUST(fcntl(x.s, F_SETFL, O_NONBLOCK));
    } else {
        MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.s, &v));
    }
    if (is("after")) jail();
    for (int i = 0; i < 3; i++) {
        if (breaks) MUST(break_connections());
        R(send(x.c, "hello", 5, 0));
        char b[8];
        struct epoll_event w = {0};
        R(epoll_wait(e, &w, 1, 5000));
        line("%" PRIu64 " %s", w.data.u64, bits(w.events));
        R(recv(x.s, b, 8, 0));
        // No further event is reported.
        R(epoll_wait(e, &w, 1, 20));
    }
    // The child's close_range closes the program's descriptors, and only those.
    pid_t p = fork();
    if (!p) {
        R(close_range(3, ~0u, 0));
        line("open: %d", numbers_open());
        struct conn y = connection();
        ping(y.c, y.s, "the child's");
        line("numbers %d %d %d", y.l, y.c, y.s);
        R(close_range(3, ~0u, 0));
        line("open: %d", numbers_open());
        _exit(0);
    }
    waitpid(p, &n, 0);
    line("child: %x", n);
    R(close(x.c));
    line("end: %d", end_of_stream(x.s));
    R(close_range(3, ~0u, 0));
    line("open: %d", fcntl(x.s, F_GETFD));
    x = connection();
    ping(x.c, x.s, "after that");
    hang_up(x);
    return 0;
}
