// The accepting program notices that a connection is broken, and closes it. The other program meets the break only then. It has all bytes,
// so it must meet the end of the stream. T_ARGS: number of connections; T_BREAKS says whether they break.
#include "t.h"

enum { MOST = 200 };
static int fds[MOST];

static void leave(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    int port = peer_port_of(fd);
    acked(fd);
    if (atoi(getenv("T_BREAKS"))) MUST(break_those(port));
    if (poll(&p, 1, 0)) line("poll: %s", bits(p.revents));
    MUST(close(fd));
}

static void see(int fd) {
    char b[16];
    long n = full_recv(fd, b, 6);
    ssize_t end = recv(fd, b, 1, 0);
    if (n != 6 || end) line("%ld bytes, then %zd %s", n, end, end < 0 ? ename(errno) : "");
    MUST(close(fd));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = is_server() ? listener() : -1, port = 0, count = atoi(getenv("T_ARGS"));
    char b[16];
    if (is_server()) tell(port_of(l));
    else port = hear();
    for (int i = 0; i < count; i++) {
        fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        if (!is_server()) MUST(full_send(fds[i], "question", 8));
        else full_recv(fds[i], b, 8), MUST(full_send(fds[i], "answer", 6));
    }
    meet();
    await_negotiation();
    meet();
    for (int i = 0; i < count; i++) {
        if (is_server()) leave(fds[i]), tell(1);
        else hear(), see(fds[i]);
    }
    meet();
    // The server's agent has to hear what has become of its connections.
    ms(500);
    meet();
    return 0;
}
