// The peer's process is gone without a word: until that is known, its end of the stream is not believed. Our direction
// works meanwhile as it does bare.
#include "t.h"

static int s;

static void serve(void) {
    char b[8];
    int l = listener();
    tell(port_of(l));
    s = MUST(accept(l, NULL, NULL));
    settle();
    full_recv(s, b, 1);
    MUST(full_send(s, "g", 1));
    // It is gone, and its kernel has ended the stream.
    while (read(atoi(getenv("T_SYNC")), b, 1) > 0) {}
    ms(30);
    MUST(fcntl(s, F_SETFL, O_NONBLOCK));
    // How soon the end is seen may differ.
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
    settle();
    char b;
    MUST(full_send(s, "x", 1));
    full_recv(s, &b, 1);
    _exit(0);
}
