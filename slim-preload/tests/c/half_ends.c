// The peer process exits without an announcement. Until SLIM knows that it is gone, it does not report the end of the stream.
// The sending direction works meanwhile as in a bare run.
#include "t.h"

static int s;

static void serve(void) {
    char b[8];
    int l = listener();
    tell(port_of(l));
    s = MUST(accept(l, NULL, NULL));
    await_negotiation();
    full_recv(s, b, 1);
    MUST(full_send(s, "g", 1));
    // Waits until the client has exited and its kernel has sent the FIN.
    while (read(atoi(getenv("T_SYNC")), b, 1) > 0) {}
    ms(30);
    MUST(fcntl(s, F_SETFL, O_NONBLOCK));
    // The result is not recorded: the end may be seen earlier or later.
    recv(s, b, 1, 0);
    if (strcmp(getenv("T_ARGS"), "shut")) {
        R(send(s, "hello", 5, MSG_NOSIGNAL));
    } else {
        R(shutdown(s, SHUT_WR));
        R(send(s, "hello", 5, MSG_NOSIGNAL));
    }
    ssize_t r;
    while ((r = recv(s, b, 1, 0)) < 0 && errno == EAGAIN) ms(5);
    line("recv = %zd %s", r, r ? ename(errno) : "");
    R(close(s));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    if (is_server()) {
        serve();
        return 0;
    }
    s = dial(hear());
    await_negotiation();
    char b;
    MUST(full_send(s, "x", 1));
    full_recv(s, &b, 1);
    _exit(0);
}
