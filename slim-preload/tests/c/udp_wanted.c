// Another process wants the UDP port with the number of a TCP listener, or has it already. It must get the port. Connections to
// the listener go on as before, and SLIM prints no message.
#include "t.h"

static int udp(int port, uint32_t host) {
    int u = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    struct sockaddr_in a = v4(port);
    a.sin_addr.s_addr = htonl(host);
    R(bind(u, (void *)&a, sizeof a));
    return u;
}

static void talk(int fd) {
    char b[4] = "";
    int ok = is_server() ? full_recv(fd, b, 4) == 4 && !full_send(fd, "pong", 4)
                         : !full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4 && !memcmp(b, "pong", 4);
    line("%s", ok ? "ping, pong" : ename(errno));
}

static void one(uint32_t host) {
    int l = -1, port, c;
    if (is_server()) l = listener(), port = port_of(l), tell(port);
    else port = hear();
    c = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
    await_negotiation();
    talk(c);
    if (!is_server()) {
        int u = udp(port, host);
        struct sockaddr_in a = v4(port);
        MUST(sendto(u, "mine", 4, 0, (void *)&a, sizeof a));
        char b[4];
        line("%zd of its own", recv(u, b, sizeof b, 0));
        close(u);
    }
    meet();
    // Both the old connection and a new one must work.
    talk(c);
    int d = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
    talk(d);
    meet();
    close(c), close(d);
    if (is_server()) close(l);
    meet();
}

// The other process has the port before the listener exists.
static void taken(void) {
    int u = -1, port;
    if (!is_server()) {
        u = udp(0, INADDR_LOOPBACK), port = port_of(u), tell(port);
    } else {
        port = hear();
        int l = MUST(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in a = v4(port);
        R(bind(l, (void *)&a, sizeof a));
        R(listen(l, 1));
        close(l);
    }
    meet();
    if (u >= 0) close(u);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    one(INADDR_LOOPBACK);
    one(INADDR_ANY);
    taken();
    return 0;
}
