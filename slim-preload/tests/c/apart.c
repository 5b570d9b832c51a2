// After its first connection a program stops sharing descriptors, a network and so on with its threads or with other
// processes: by `unshare`, `setns`, and `close_range` with CLOSE_RANGE_UNSHARE. Everything that works in a bare run works
// under the preload, and the connections go on. The case is the argument.
#include "t.h"
#include <linux/close_range.h>
#include <sys/syscall.h>

static const char *kase;
static int is(const char *k) { return !strcmp(kase, k); }
static struct conn x;

static void *waits(void *a) {
    pause();
    return a;
}

// From here on this thread has its own descriptor table.
static void *apart(void *a) {
    R(unshare(CLONE_FILES));
    ping(x.c, x.s, "in the thread");
    R(close(x.c));
    char b[1];
    struct timeval t = {0, 200000};
    MUST(setsockopt(x.s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t));
    R(recv(x.s, b, 1, 0));
    line("has ended: %d", fcntl(x.c, F_GETFD));
    int p[2];
    MUST(pipe(p));
    R(write(p[1], "x", 1));
    R(read(p[0], b, 1));
    return a;
}

static void in_ns(const char *name) {
    char at[64];
    snprintf(at, sizeof at, "/proc/self/ns/%s", name);
    int ns = MUST(open(at, O_RDONLY | O_CLOEXEC));
    line("-- %s", name);
    R(setns(ns, 0));
    close(ns);
}

int main(int argc, char **argv) {
    begin(30);
    kase = argc > 1 ? argv[1] : "";
    x = connection();
    ping(x.c, x.s, "works");
    int e = MUST(epoll_create1(0));
    struct epoll_event v = {.events = EPOLLIN};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.s, &v));
    if (is("files")) R(unshare(CLONE_FILES));
    if (is("files-by-number")) R(syscall(SYS_unshare, CLONE_FILES));
    if (is("user")) R(unshare(CLONE_NEWUSER));
    if (is("user-by-number")) R(syscall(SYS_unshare, CLONE_NEWUSER));
    if (is("thread-flags")) R(unshare(CLONE_THREAD | CLONE_SIGHAND | CLONE_VM));
    if (is("user-thread")) {
        // The kernel refuses this to any program with several threads.
        pthread_t t;
        pthread_create(&t, NULL, waits, NULL);
        R(unshare(CLONE_NEWUSER));
    }
    if (is("mounts")) in_ns("mnt");
    if (is("own-mounts")) {
        R(unshare(CLONE_NEWNS | CLONE_FS));
        in_ns("mnt");
    }
    if (is("uts")) {
        R(unshare(CLONE_NEWUTS | CLONE_NEWIPC));
        in_ns("uts");
    }
    if (is("bad")) {
        R(unshare(0x7));
        R(setns(-1, 0));
        R(setns(0, CLONE_NEWNET));
    }
    if (is("network")) {
        R(unshare(CLONE_NEWNET));
        struct {
            char name[16];
            short flags;
            char pad[22];
        } up = {"lo", 1, ""};
        int s = MUST(socket(AF_INET, SOCK_DGRAM, 0));
        MUST(ioctl(s, 0x8914, &up));
        close(s);
        struct conn y = connection();
        ping(y.c, y.s, "in the new network");
        hang_up(y);
    }
    if (is("same-network")) in_ns("net");
    if (is("close-range")) {
        R(syscall(SYS_close_range, e + 1, ~0u, CLOSE_RANGE_UNSHARE));
        int p[2];
        R(dup2(x.c, 5000));
        R(close(5000));
        MUST(pipe(p));
        R(write(p[1], "x", 1));
    }
    if (is("close-all")) {
        R(close_range(3, ~0u, CLOSE_RANGE_UNSHARE));
        for (int i = 3; i < 6; i++) line("%d: %d", i, fcntl(i, F_GETFD));
        x = connection();
        e = MUST(epoll_create1(0));
        MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.s, &v));
        line("numbers %d %d %d", x.l, x.c, x.s);
    }
    if (is("close-on-exec")) {
        R(close_range(x.c, x.c, CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC));
        line("flag %d", fcntl(x.c, F_GETFD));
    }
    if (is("thread")) {
        pthread_t t;
        pthread_create(&t, NULL, apart, NULL);
        pthread_join(t, NULL);
        R(epoll_wait(e, &v, 1, 0));
    }
    ping(x.c, x.s, "goes on");
    ping(x.s, x.c, "the other way");
    R(close(x.c));
    char b[1];
    R(recv(x.s, b, 1, 0));
    R(epoll_wait(e, &v, 1, 1000));
    R(close(x.s));
    hang_up(connection());
    return 0;
}
