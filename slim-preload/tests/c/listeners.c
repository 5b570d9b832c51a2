// Connections to listeners that have just begun to listen, or whose process has forked and exited. Two programs; the way is
// in T_ARGS. The harness checks in the event log that SLIM managed all connections.
#include "t.h"

static const char *way;
static int is(const char *w) { return !strcmp(way, w); }

static int unconnected(int *port) {
    int s = MUST(socket(AF_INET, SOCK_STREAM, 0)), on = 1;
    struct sockaddr_in a = v4(*port);
    MUST(setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    MUST(bind(s, (void *)&a, sizeof a));
    *port = port_of(s);
    return s;
}

// The client knows the port before the server listens, and connects as soon as possible.
static void at_once(void) {
    for (int i = 0; i < 20; i++) {
        char b[4] = "";
        if (is_server()) {
            int port = 0, l = unconnected(&port);
            tell(port);
            hear();
            usleep(t_word(2, i) % 2000);
            MUST(listen(l, 5));
            int s = MUST(accept(l, NULL, NULL));
            full_recv(s, b, 4);
            await_negotiation();
            meet();
            close(s);
            close(l);
        } else {
            int port = hear(), c, r;
            tell(1);
            do {
                c = MUST(socket(AF_INET, SOCK_STREAM, 0));
                struct sockaddr_in a = v4(port);
                r = connect(c, (void *)&a, sizeof a);
                if (r) close(c);
            } while (r);
            MUST(full_send(c, "here", 4));
            await_negotiation();
            meet();
            close(c);
        }
    }
}

// The listening process forks and exits. The child waits for connections.
static void daemonised(void) {
    if (!is_server()) {
        int port = hear();
        for (int i = 0; i < 2; i++) {
            int c = dial(port);
            char b[4] = "";
            MUST(full_send(c, "ping", 4));
            line("%zd %.4s", full_recv(c, b, 4), b);
            await_negotiation();
            meet();
            close(c);
        }
        return;
    }
    int l = listener(), e = -1;
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = l};
    if (is("epoll-before")) {
        e = epoll_create1(0);
        MUST(epoll_ctl(e, EPOLL_CTL_ADD, l, &ev));
    }
    int port = port_of(l), gone[2];
    MUST(pipe(gone));
    if (fork()) _exit(0);
    // The pipe ends when the parent exits.
    close(gone[1]);
    read(gone[0], &gone, 1);
    close(gone[0]);
    if (is("epoll")) {
        e = epoll_create1(0);
        MUST(epoll_ctl(e, EPOLL_CTL_ADD, l, &ev));
    }
    // A second child tells the client to begin once this process is, as far as can be told, inside its wait.
    pid_t p = fork();
    if (!p) {
        close(l);
        ms(150);
        tell(port);
        _exit(0);
    }
    for (int i = 0; i < 2; i++) {
        struct pollfd f = {l, POLLIN, 0};
        fd_set r;
        FD_ZERO(&r);
        FD_SET(l, &r);
        if (is("poll")) poll(&f, 1, 5000);
        if (is("select")) select(l + 1, &r, NULL, NULL, NULL);
        if (e >= 0) epoll_wait(e, &ev, 1, 5000);
        int s = MUST(accept(l, NULL, NULL));
        char b[4] = "";
        full_recv(s, b, 4);
        full_send(s, b, 4);
        await_negotiation();
        meet();
        close(s);
    }
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    way = getenv("T_ARGS");
    if (is("at-once"))
        at_once();
    else
        daemonised();
    return 0;
}
