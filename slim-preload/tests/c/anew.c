// Addresses (getsockname, getpeername) of a connection whose break has not been noticed yet, and of a socket that is
// disconnected (AF_UNSPEC) and reused after its transport was replaced. Two programs; the case is in T_ARGS.
#include "t.h"

static int fd, l = -1, mine, theirs;

static int is(const char *word) { return strstr(getenv("T_ARGS"), word) != NULL; }

static void name(int peer) {
    struct sockaddr_in a = {0};
    socklen_t n = sizeof a, none = 0;
    int (*ask)(int, struct sockaddr *, socklen_t *) = peer ? getpeername : getsockname;
    if (ask(fd, (void *)&a, &n)) return line("no %s: %s", peer ? "peer" : "name", ename(errno));
    int r = ask(fd, NULL, &none);
    line("%s: %s, %s port; no room: %d %u", peer ? "peer" : "name", inet_ntoa(a.sin_addr),
         ntohs(a.sin_port) == (peer ? theirs : mine) ? "its" : "some other", r, none);
}

static void names(void) {
    name(0);
    name(1);
}

static void talk(void) {
    char b[8] = "";
    int ok = is_server() ? full_recv(fd, b, 4) == 4 && !full_send(fd, "pong", 4)
                         : !full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4;
    // The errno depends on which end is destroyed first.
    int broken = !ok && (errno == ECONNRESET || errno == ECONNABORTED);
    line("%s", ok ? b : broken ? "broken" : ename(errno));
}

static void both_break(void) {
    static int before;
    meet();
    // With "bound" the first connection is spared, because in a bare run it would end there. The second one breaks.
    int now = !is("bound") || before++ > 0;
    if (now && is_server() && atoi(getenv("T_BREAKS"))) break_connections();
    meet();
}

static void begins(void) {
    await_negotiation();
    meet();
    mine = port_of(fd);
    theirs = peer_port_of(fd);
    talk();
    both_break();
    // Before either end notices the break.
    names();
    if (!is("unused")) talk();
    names();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    char b;
    if (is_server()) tell(port_of(l = listener())), fd = MUST(accept(l, NULL, NULL));
    else fd = dial(hear());
    begins();
    // The option makes the connection plain TCP at both ends. If the client sets it, its socket keeps it after a disconnect.
    if (is("plain") && is_server() != is("bound")) {
        int clamp = 1 << 16;
        MUST(setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &clamp, sizeof clamp));
    }
    await_negotiation();
    meet();
    if (is_server()) {
        R(recv(fd, &b, 1, 0));
        close(fd);
        fd = is("listen") ? dial(hear()) : MUST(accept(l, NULL, NULL));
    } else {
        struct sockaddr_in at = v4(theirs);
        R(connect(fd, &(struct sockaddr){.sa_family = AF_UNSPEC}, sizeof at));
        // The local address now depends on which end has made the last transport.
        name(1);
        if (is("listen")) {
            R(listen(fd, 3));
            tell(port_of(fd));
            int s = MUST(accept(fd, NULL, NULL));
            close(fd);
            fd = s;
        } else {
            R(connect(fd, (void *)&at, sizeof at));
        }
    }
    begins();
    meet();
    return 0;
}
