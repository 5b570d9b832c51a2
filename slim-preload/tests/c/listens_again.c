// A program closes its listener, and listens on the same port again at once. Each time SLIM must have a UDP socket on that
// port, which answers HELLO.
#include "t.h"
#include "raw.h"

enum { TIMES = 2500 };

// Whether a UDP socket has this port. Uses raw system calls, which no hook sees.
static int is_taken(int port) {
    int s = raw(SYS_socket, AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in a = v4(port);
    int taken = raw(SYS_bind, s, &a, sizeof a) < 0;
    raw(SYS_close, s);
    return taken;
}

int main(void) {
    begin(60);
    int port = 0, missed = 0, on = 1;
    for (int i = 0; i < TIMES; i++) {
        int l = MUST(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in a = v4(port);
        MUST(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
        MUST(bind(l, (void *)&a, sizeof a));
        MUST(listen(l, 5));
        port = port_of(l);
        // Time for the previous listener's UDP socket to be closed.
        ms(1);
        missed += !is_taken(port);
        close(l);
        // A random pause, so that the next listener comes at any moment of the close.
        double until = now_s() + t_word(1, i) % 300 / 1e6;
        while (now_s() < until) {}
    }
    line("%d times nobody was asked", missed);
    return 0;
}
