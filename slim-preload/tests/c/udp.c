// Connections break in their first milliseconds, while the library's control messages (UDP) are lost, late or duplicated. Two
// programs; T_ARGS has the case, T_BREAKS says whether connections break at all. In a case "may-fail" a connection may end in an
// error, as without the library. No byte may be wrong, and no call may wait for ever.
#include "says.h"

enum { BYTES = 5000 };
static char buf[BYTES];
static int l = -1;

static void *breaks(void *after_us) {
    usleep((long)after_us);
    const char *b = getenv("T_BREAKS");
    if (b && atoi(b) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    return NULL;
}

// Sends and receives in pieces, then ends both directions. Returns the number of bytes received, or -1 after an error.
static long exchange(int fd, uint64_t mine, uint64_t theirs) {
    long got = 0;
    for (int part = 0; part < 10; part++) {
        size_t n = BYTES / 10;
        char piece[BYTES / 10];
        fill(piece, part * n, n, mine);
        if (full_send(fd, piece, n) < 0) return -1;
        ssize_t r = full_recv(fd, buf, n);
        if (r > 0 && !verify(buf, part * n, r, theirs)) exit(1);
        if (r != (ssize_t)n) return -1;
        got += r;
        usleep(300);
    }
    if (shutdown(fd, SHUT_WR) < 0 || recv(fd, buf, 1, 0) != 0) return -1;
    return got;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 100);
    const char *kase = getenv("T_ARGS");
    int may_fail = !!strstr(kase, "may-fail"), good = 0, failed = 0;
    // A server that the peer does not hear waits 3 s for each broken connection, as it may be the peer that is late.
    int connections = strstr(kase, "mute") ? 12 : 40;
    if (strstr(kase, "no-done")) t_lost_kinds = 1 << HELLO_DONE;
    if (strstr(kase, "late")) t_late_ms = 30;
    if (strstr(kase, "twice")) t_times = 2;
    if (strstr(kase, is_server() ? "mute-server" : "mute-client")) t_lost_kinds = ~0u;
    if (is_server()) l = listener();
    int port = is_server() ? (tell(port_of(l)), 0) : hear();
    for (int i = 0; i < connections; i++) {
        pthread_t t;
        int fd = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        if (is_server()) pthread_create(&t, NULL, breaks, (void *)(long)(t_word(5, i) % 5000));
        long r = exchange(fd, is_server() ? 2 * i : 2 * i + 1, is_server() ? 2 * i + 1 : 2 * i);
        r == BYTES ? good++ : failed++;
        if (is_server()) pthread_join(t, NULL);
        close(fd);
        meet();
    }
    if (getenv("T_VERBOSE")) line("%d whole, %d in an error", good, failed);
    if (may_fail)
        line("all are over: %d", good + failed == connections);
    else
        line("%d whole, %d in an error", good, failed);
    return 0;
}
