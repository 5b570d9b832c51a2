// A vforked child has its parent's memory but its own descriptor numbers. Whatever it does with a number that is a connection
// in its parent must not affect that connection, which is broken each time if T_BREAKS is set.
#include "t.h"
#include "raw.h"

static struct conn x, y;
static int p[2], file, status, breaks;

#define CHILD(what, ...)                                                                                               \
    do {                                                                                                               \
        line("-- %s", what);                                                                                           \
        pid_t child = vfork();                                                                                         \
        if (!child) {                                                                                                  \
            __VA_ARGS__;                                                                                               \
            _exit(0);                                                                                                  \
        }                                                                                                              \
        MUST(waitpid(child, &status, 0));                                                                              \
        line("child: %x", status);                                                                                     \
        if (breaks) MUST(break_connections());                                                                         \
        ping(x.c, x.s, "goes on");                                                                                     \
        ping(x.s, x.c, "the other way");                                                                               \
    } while (0)

// Prints the bytes that have come through the pipe.
static void piped(void) {
    char b[64];
    int n = 0;
    MUST(ioctl(p[0], FIONREAD, &n));
    MUST(read(p[0], b, n > 64 ? 64 : n));
    quote(b, n);
}

int main(void) {
    static char b[64];
    struct pollfd f;
    begin(30);
    breaks = atoi(getenv("T_BREAKS") ?: "0");
    x = connection();
    y = connection();
    MUST(pipe(p));
    file = MUST(memfd_create("file", MFD_CLOEXEC));
    ping(x.c, x.s, "works");
    // This case comes first, while no hook has seen any change.
    CHILD("dup2 by a system call, then write", raw(SYS_dup3, p[1], x.c, 0); R(write(x.c, "to the pipe", 11)); R(send(x.c, "x", 1, 0)));
    piped();
    CHILD("dup2, then write", R(dup2(p[1], x.c)); R(write(x.c, "to the pipe", 11)); R(send(x.c, "x", 1, 0)));
    piped();
    CHILD("close, then write", R(close(x.c)); R(write(x.c, "x", 1)); R(recv(x.c, b, 1, 0)));
    MUST(write(p[1], "for the child", 13));
    CHILD("dup2, then read", R(dup2(p[0], x.c)); R(read(x.c, b, sizeof b)); R(recv(x.c, b, 1, 0)));
    CHILD("another number for the next file", R(close(x.c)); int n = MUST(dup(file)); line("%d", n == x.c);
          R(write(n, "to the file", 11)); R(lseek(n, 0, SEEK_SET)); R(read(n, b, sizeof b)));
    // The parent does not count bytes that a child moves on another of its connections, so nothing is broken from here on.
    ping(y.c, y.s, "the other one");
    breaks = 0;
    CHILD("another connection", R(dup2(y.c, x.c)); R(write(x.c, "to the other", 12)); f = (struct pollfd){x.c, POLLIN | POLLOUT, 0};
          R(poll(&f, 1, 0)); line("%s", bits(f.revents)));
    R(recv(y.s, b, 12, 0));
    ping(y.c, y.s, "the other one");
    R(close(x.c));
    R(recv(x.s, b, 1, 0));
    R(close(x.s));
    hang_up(connection());
    return 0;
}
