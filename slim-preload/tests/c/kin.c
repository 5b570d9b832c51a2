// Processes that are created and ended by unusual calls; and the time limit of recvmmsg.
#include "t.h"
#include "raw.h"

static char buf[64];
static const char *self;

static void child_ends(pid_t p, const char *what) {
    int st = -1;
    MUST(waitpid(p, &st, 0));
    line("%s: %s %d", what, WIFSIGNALED(st) ? "killed by" : "exit", WIFSIGNALED(st) ? WTERMSIG(st) : WEXITSTATUS(st));
}

static void ends(int fd) {
    line("the peer sees %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    R(recv(fd, buf, 9, MSG_DONTWAIT));
}

static pid_t by_Fork(void) { return _Fork(); }
static pid_t by_fork_number(void) {
#ifdef SYS_fork
    return syscall(SYS_fork);
#else
    return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
#endif
}
static pid_t by_clone_number(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

static const struct {
    const char *name;
    pid_t (*fork)(void);
} ways[] = {{"_Fork", by_Fork}, {"SYS_fork", by_fork_number}, {"SYS_clone", by_clone_number}};

static void forked(unsigned i) {
    line("-- %s: the child talks, then the parent", ways[i].name);
    struct conn x = connection();
    ping(x.c, x.s, "before");
    pid_t p = MUST(ways[i].fork());
    if (!p) {
        ping(x.c, x.s, "child");
        ping(x.s, x.c, "child, the other way");
        _exit(3);
    }
    child_ends(p, "child");
    ping(x.c, x.s, "parent");
    p = MUST(ways[i].fork());
    if (!p) {
        close(x.c);
        struct conn y = connection();
        ping(y.c, y.s, "the child's own");
        _exit(4);
    }
    child_ends(p, "child");
    ping(x.c, x.s, "parent");
    line("-- %s: the parent closes, the child goes on", ways[i].name);
    int go[2];
    MUST(pipe(go));
    p = MUST(ways[i].fork());
    if (!p) {
        close(x.s);
        close(go[1]);
        read(go[0], buf, 1);
        MUST(send(x.c, "late", 4, 0));
        _exit(5);
    }
    R(close(x.c));
    close(go[0]);
    close(go[1]);
    R(full_recv(x.s, buf, 4));
    quote(buf, 4);
    child_ends(p, "child");
    ends(x.s);
    R(close(x.s));
    R(close(x.l));
}

static void execed(void) {
    line("-- execveat");
    struct conn x = connection();
    ping(x.c, x.s, "before");
    pid_t p = fork();
    if (!p) {
        char n[12];
        sprintf(n, "%d", x.c);
        char *args[] = {(char *)self, "heir", n, NULL};
        extern char **environ;
        execveat(AT_FDCWD, self, args, environ, 0);
        _exit(90);
    }
    R(close(x.c));
    R(full_recv(x.s, buf, 9));
    quote(buf, 9);
    child_ends(p, "heir");
    ends(x.s);
    R(close(x.s));
    R(close(x.l));
}

static void quick(void) {
    line("-- quick_exit");
    struct conn x = connection();
    pid_t p = fork();
    if (!p) {
        // The child makes its own connection.
        int c = dial(port_of(x.l));
        await_negotiation();
        MUST(send(c, "last words", 10, 0));
        quick_exit(6);
    }
    int s = R(accept(x.l, NULL, NULL));
    R(full_recv(s, buf, 10));
    quote(buf, 10);
    ends(s);
    child_ends(p, "quick_exit");
    ping(x.c, x.s, "the other connection");
    close(s);
    hang_up(x);
}

struct late {
    int fd, ms;
};

static void *send_late(void *p) {
    struct late *l = p;
    ms(l->ms);
    MUST(send(l->fd, "b", 1, 0));
    return NULL;
}

static void many(int fd, const char *what, unsigned n, struct timespec *limit, int flags) {
    struct mmsghdr m[4];
    struct iovec v[4];
    memset(m, 0, sizeof m);
    for (int i = 0; i < 4; i++) {
        v[i] = (struct iovec){buf + 8 * i, 8};
        m[i].msg_hdr = (struct msghdr){.msg_iov = &v[i], .msg_iovlen = 1};
    }
    errno = 0;
    int r = recvmmsg(fd, m, n, flags, limit);
    line("%s: recvmmsg = %d %s, %u %u %u %u", what, r, r < 0 ? ename(errno) : "", m[0].msg_len, m[1].msg_len, m[2].msg_len, m[3].msg_len);
    if (limit) line("  left %s", limit->tv_sec || limit->tv_nsec ? "something" : "nothing");
}

static void limits(void) {
    line("-- recvmmsg");
    struct conn x = connection();
    pthread_t t;
    struct late l = {x.s, 150};
    MUST(send(x.s, "a", 1, 0));
    arrived(x.c, 1);
    pthread_create(&t, NULL, send_late, &l);
    double since = now_s();
    struct timespec limit = {0, 100000000};
    many(x.c, "the limit is looked at after each message", 4, &limit, 0);
    line("%s", took(since, 150));
    pthread_join(t, NULL);
    MUST(send(x.s, "c", 1, 0));
    arrived(x.c, 1);
    limit = (struct timespec){0, 0};
    many(x.c, "no time at all", 4, &limit, 0);
    MUST(send(x.s, "d", 1, 0));
    arrived(x.c, 1);
    limit = (struct timespec){5, 0};
    many(x.c, "enough time", 1, &limit, 0);
    limit = (struct timespec){0, 1000000000};
    many(x.c, "a bad limit", 1, &limit, 0);
    limit = (struct timespec){-1, 0};
    many(x.c, "another", 1, &limit, 0);
    MUST(send(x.s, "e", 1, 0));
    arrived(x.c, 1);
    many(x.c, "one", 4, NULL, MSG_WAITFORONE);
    many(x.c, "none", 4, NULL, MSG_DONTWAIT);
    R(shutdown(x.s, SHUT_WR));
    wait_for(x.c, POLLRDHUP, 2000);
    many(x.c, "the end", 3, NULL, 0);
    hang_up(x);
}

int main(int argc, char **argv) {
    self = argv[0];
    begin(60);
    if (argc > 2 && !strcmp(argv[1], "heir")) {
        // No transcript here, because the parent writes one at the same time.
        return send(atoi(argv[2]), "heir here", 9, 0) == 9 ? 7 : 8;
    }
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) forked(i);
    execed();
    quick();
    limits();
    line("SIGPIPE %d", pipes());
    return 0;
}
