// MSG_PEEK and FIONREAD on a connection that breaks show all unread bytes: those of the old transport, and after them those of
// the new one. Two programs.
#include "t.h"

enum { BEFORE = 700, BEHIND = 13000 };

static int l = -1;
static unsigned char b[BEFORE + BEHIND + 1];

static void server(int fd) {
    fill(b, 0, sizeof b, 1);
    MUST(full_send(fd, b, BEFORE));
    acked(fd);
    meet();
    meet();
    MUST(full_send(fd, b + BEFORE, BEHIND));
    meet();
    char m[4];
    R(full_recv(fd, m, 4));
}

// Waits until `want` unread bytes can be seen. Returns how many there are.
static long seen(int fd, int by_peek, int want) {
    int n = 0, before = errno;
    for (int i = 0; i < 3000 && n < want; i++, ms(1)) {
        if (by_peek)
            n = recv(fd, b, sizeof b, MSG_PEEK | MSG_DONTWAIT);
        else
            MUST(ioctl(fd, FIONREAD, &n));
        // Bytes that were seen before must not disappear. Without a transport a peek may return EAGAIN.
        if (n < BEFORE && !(by_peek && errno == EAGAIN)) line("only %d can be seen", n);
    }
    errno = before;
    return n;
}

static void client(int fd, int by_peek) {
    meet();
    R(seen(fd, by_peek, BEFORE));
    if (getenv("T_BREAKS") && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections");
    R(seen(fd, by_peek, BEFORE));
    meet();
    R(seen(fd, by_peek, BEFORE + BEHIND));
    if (by_peek) verify(b, 0, BEFORE + BEHIND, 1);
    // A peek consumes nothing.
    R(recv(fd, b, 20, MSG_PEEK));
    verify(b, 0, 20, 1);
    R(full_recv(fd, b, BEFORE + BEHIND));
    verify(b, 0, BEFORE + BEHIND, 1);
    R(recv(fd, b, 1, MSG_PEEK | MSG_DONTWAIT));
    int n = -1;
    R(ioctl(fd, FIONREAD, &n));
    line("%d", n);
    meet();
    R(full_send(fd, "done", 4));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    for (int by_peek = 0; by_peek < 2; by_peek++) {
        int fd = pair_up(&l);
        is_server() ? server(fd) : client(fd, by_peek);
        meet();
        close(fd);
    }
    return 0;
}
