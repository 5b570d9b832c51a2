// The ways in which connections begin, and do not.
#include "t.h"

static char buf[64];

static void so_error(int fd) {
    int e = -1;
    socklen_t n = sizeof e;
    R(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
    line("SO_ERROR %s", e ? ename(e) : "0");
}

int main(void) {
    begin(40);
    int l = listener(), port = port_of(l);
    struct sockaddr_in at = v4(port), dead = v4(dead_port());

    line("-- blocking");
    int c = R(socket(AF_INET, SOCK_STREAM, 0));
    R(connect(c, (void *)&at, sizeof at));
    R(connect(c, (void *)&at, sizeof at));
    struct sockaddr_in from;
    socklen_t n = sizeof from;
    int s = R(accept(l, (void *)&from, &n));
    line("from the client's port %d, length %d", ntohs(from.sin_port) == port_of(c), n);
    settle();
    ping(c, s, "blocking");
    R(connect(s, (void *)&at, sizeof at));
    R(listen(c, 1));
    R(bind(c, (void *)&at, sizeof at));
    close(c);
    R(read(s, buf, 1));
    close(s);

    line("-- refused");
    c = R(socket(AF_INET, SOCK_STREAM, 0));
    R(connect(c, (void *)&dead, sizeof dead));
    so_error(c);
    line("%s", bits(wait_for(c, POLLIN | POLLOUT, 0)));
    R(connect(c, (void *)&at, sizeof at));
    s = R(accept(l, NULL, NULL));
    settle();
    ping(c, s, "after a refusal, the same socket");
    close(c);
    close(s);

    line("-- not blocking");
    c = R(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    R(connect(c, (void *)&at, sizeof at));
    line("%s", bits(wait_for(c, POLLIN | POLLOUT, 1000)));
    so_error(c);
    R(connect(c, (void *)&at, sizeof at));
    R(connect(c, (void *)&at, sizeof at));
    s = R(accept4(l, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    line("flags %x %x", fcntl(s, F_GETFL), fcntl(s, F_GETFD));
    R(recv(s, buf, 1, 0));
    settle();
    R(send(c, "nb", 2, 0));
    line("%s", bits(wait_for(s, POLLIN, 1000)));
    R(recv(s, buf, 9, 0));
    R(recv(s, buf, 9, 0));
    close(c);
    line("%s", bits(wait_for(s, POLLIN | POLLRDHUP, 1000)));
    R(recv(s, buf, 9, 0));
    close(s);

    line("-- not blocking, bytes at once");
    c = R(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    R(connect(c, (void *)&at, sizeof at));
    line("%s", bits(wait_for(c, POLLOUT, 1000)));
    R(send(c, "early", 5, 0));
    s = R(accept(l, NULL, NULL));
    R(recv(s, buf, 9, 0));
    close(s);
    line("%s", bits(wait_for(c, POLLIN | POLLRDHUP, 1000)));
    R(recv(c, buf, 9, 0));
    close(c);

    line("-- not blocking, refused");
    c = R(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    R(connect(c, (void *)&dead, sizeof dead));
    line("%s", bits(wait_for(c, POLLIN | POLLOUT | POLLRDHUP, 1000)));
    so_error(c);
    so_error(c);
    R(send(c, "x", 1, MSG_NOSIGNAL));
    R(recv(c, buf, 1, 0));
    R(connect(c, (void *)&dead, sizeof dead));
    ms(20);
    R(connect(c, (void *)&dead, sizeof dead));
    R(recv(c, buf, 1, 0));
    R(recv(c, buf, 1, 0));
    close(c);

    line("-- epoll waits for the connection");
    int e = epoll_create1(0);
    c = R(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    struct epoll_event ev = {.events = EPOLLOUT | EPOLLIN | EPOLLET, .data.u64 = 0x1122334455667788};
    R(epoll_ctl(e, EPOLL_CTL_ADD, c, &ev));
    R(epoll_wait(e, &ev, 1, 0));
    line("%s", bits(ev.events));
    R(connect(c, (void *)&at, sizeof at));
    memset(&ev, 0, sizeof ev);
    R(epoll_wait(e, &ev, 1, 1000));
    line("%s data %" PRIx64, bits(ev.events), ev.data.u64);
    s = R(accept(l, NULL, NULL));
    settle();
    R(epoll_wait(e, &ev, 1, 0));
    MUST(send(s, "e", 1, 0));
    R(epoll_wait(e, &ev, 1, 1000));
    line("%s data %" PRIx64, bits(ev.events), ev.data.u64);
    R(epoll_wait(e, &ev, 1, 0));
    close(c);
    R(epoll_wait(e, &ev, 1, 0));
    close(s);
    close(e);

    line("-- nobody accepts");
    int full = R(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in any = v4(0);
    R(bind(full, (void *)&any, sizeof any));
    R(listen(full, 0));
    struct sockaddr_in busy = v4(port_of(full));
    int waiting = dial(port_of(full));
    c = R(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    R(connect(c, (void *)&busy, sizeof busy));
    ms(30);
    R(connect(c, (void *)&busy, sizeof busy));
    line("%s", bits(wait_for(c, POLLIN | POLLOUT, 0)));
    n = sizeof from;
    R(getpeername(c, (void *)&from, &n));
    R(send(c, "x", 1, MSG_NOSIGNAL));
    R(recv(c, buf, 1, 0));
    R(close(c));
    c = R(socket(AF_INET, SOCK_STREAM, 0));
    struct timeval tv = {0, 100000};
    R(setsockopt(c, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv));
    double t0 = now_s();
    R(connect(c, (void *)&busy, sizeof busy));
    line("%s", took(t0, 100));
    R(connect(c, (void *)&busy, sizeof busy));
    close(c);
    close(full);
    line("%s", bits(wait_for(waiting, POLLIN | POLLRDHUP, 1000)));
    R(recv(waiting, buf, 1, 0));
    close(waiting);

    line("-- a connection to itself");
    c = R(socket(AF_INET, SOCK_STREAM, 0));
    any = v4(0);
    R(bind(c, (void *)&any, sizeof any));
    struct sockaddr_in self = v4(port_of(c));
    R(connect(c, (void *)&self, sizeof self));
    settle();
    R(send(c, "myself", 6, 0));
    R(recv(c, buf, 20, 0));
    R(shutdown(c, SHUT_WR));
    R(recv(c, buf, 20, 0));
    close(c);

    line("-- dissolved and connected again");
    c = dial(port);
    s = R(accept(l, NULL, NULL));
    settle();
    ping(c, s, "first");
    struct sockaddr un = {.sa_family = AF_UNSPEC};
    R(connect(c, &un, sizeof un));
    n = sizeof from;
    R(getpeername(c, (void *)&from, &n));
    // Bare always ECONNRESET; under the preload it can be the plain end.
    line("the peer sees an end %d", (wait_for(s, POLLIN | POLLRDHUP, 1000) & POLLRDHUP) && recv(s, buf, 1, 0) <= 0);
    close(s);
    R(send(c, "x", 1, MSG_NOSIGNAL));
    R(connect(c, (void *)&at, sizeof at));
    s = MUST(accept(l, NULL, NULL));
    settle();
    ping(c, s, "second");
    close(c);
    close(s);

    line("-- bound before");
    c = R(socket(AF_INET, SOCK_STREAM, 0));
    any = v4(0);
    any.sin_addr.s_addr = htonl(0x7f000002);
    R(bind(c, (void *)&any, sizeof any));
    R(connect(c, (void *)&at, sizeof at));
    n = sizeof from;
    s = R(accept(l, (void *)&from, &n));
    line("from %s", inet_ntoa(from.sin_addr));
    settle();
    ping(c, s, "bound before");
    close(c);
    close(s);

    line("-- the server speaks first, the client is gone before accept");
    c = dial(port);
    MUST(send(c, "left behind", 11, 0));
    close(c);
    s = R(accept(l, NULL, NULL));
    memset(buf, 0, sizeof buf);
    R(full_recv(s, buf, 50));
    quote(buf, 11);
    R(recv(s, buf, 1, 0));
    close(s);

    line("-- IPv6, and IPv4 through it");
    int l6 = R(socket(AF_INET6, SOCK_STREAM, 0));
    struct sockaddr_in6 any6 = {.sin6_family = AF_INET6};
    R(bind(l6, (void *)&any6, sizeof any6));
    R(listen(l6, 8));
    struct sockaddr_in6 at6 = v6(port_of(l6)), from6;
    c = R(socket(AF_INET6, SOCK_STREAM, 0));
    R(connect(c, (void *)&at6, sizeof at6));
    n = sizeof from6;
    s = R(accept(l6, (void *)&from6, &n));
    settle();
    ping(c, s, "IPv6");
    close(c);
    close(s);
    c = dial(port_of(l6));
    n = sizeof from6;
    s = R(accept(l6, (void *)&from6, &n));
    char text[64];
    line("from %s length %d", inet_ntop(AF_INET6, &from6.sin6_addr, text, sizeof text), n);
    settle();
    ping(c, s, "IPv4 into IPv6");
    close(c);
    close(s);

    line("-- accept with short addresses");
    c = dial(port);
    n = 4;
    memset(&from, 0, sizeof from);
    s = R(accept(l, (void *)&from, &n));
    line("length %d port %d", n, from.sin_addr.s_addr);
    close(c);
    close(s);
    c = dial(port);
    n = -5;
    R(accept(l, (void *)&from, &n));
    close(c);
    ms(5);
    R(fcntl(l, F_SETFL, O_NONBLOCK));
    s = R(accept(l, NULL, NULL));

    line("-- a hundred at once");
    R(fcntl(l, F_SETFL, 0));
    int cs[100], ss[100], good = 0;
    for (int i = 0; i < 100; i++) cs[i] = dial(port);
    for (int i = 0; i < 100; i++) ss[i] = MUST(accept(l, NULL, NULL));
    settle();
    for (int i = 0; i < 100; i++) MUST(write(cs[i], &i, sizeof i));
    for (int i = 0; i < 100; i++) {
        int v = -1;
        good += full_recv(ss[i], &v, sizeof v) == sizeof v && v == i;
        close(ss[i]);
    }
    for (int i = 0; i < 100; i++) good += read(cs[i], buf, 1) == 0 && close(cs[i]) == 0;
    line("good %d, last numbers %d %d", good, cs[99], ss[99]);
    line("SIGPIPE %d", pipes());
    return 0;
}
