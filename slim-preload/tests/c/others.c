// Calls on descriptors that are not connections, in a program with one connection and without threads.
#include "t.h"

static char buf[64];

static void others(void) {
    line("-- datagrams");
    int one = R(socket(AF_INET, SOCK_DGRAM, 0)), two = R(socket(AF_INET, SOCK_DGRAM, 0));
    struct sockaddr_in any = v4(0), from = {0};
    R(bind(one, (void *)&any, sizeof any));
    R(bind(two, (void *)&any, sizeof any));
    struct sockaddr_in to = v4(port_of(two));
    R(sendto(one, "hello", 5, 0, (void *)&to, sizeof to));
    R(sendto(one, "again", 5, 0, (void *)&to, sizeof to));
    socklen_t n = sizeof from;
    R(recvfrom(two, buf, 3, MSG_TRUNC, (void *)&from, &n));
    line("address length %d, from one: %d", (int)n, ntohs(from.sin_port) == port_of(one));
    R(recvfrom(two, buf, sizeof buf, 0, NULL, NULL));
    R(recv(two, buf, sizeof buf, MSG_DONTWAIT));
    R(connect(one, (void *)&to, sizeof to));
    R(write(one, "written", 7));
    R(read(two, buf, sizeof buf));
    R(send(one, "", 0, 0));
    R(recv(two, buf, sizeof buf, 0));
    R(send(two, "x", 1, 0));
    R(close(two));
    R(write(one, "y", 1));
    R(read(one, buf, 1));
    R(close(one));
    line("-- a pipe");
    int p[2];
    R(pipe(p));
    struct iovec v[2] = {{"head", 4}, {"tail", 4}}, w[2] = {{buf, 3}, {buf + 3, 60}};
    R(writev(p[1], v, 2));
    R(readv(p[0], w, 2));
    quote(buf, 8);
    R(recv(p[0], buf, 1, 0));
    R(send(p[1], buf, 1, 0));
    R(write(p[0], buf, 1));
    R(read(p[1], buf, 1));
    R(write(p[1], "x", 1));
    R(read(p[0], NULL, 1));
    R(close(p[0]));
    R(write(p[1], buf, 1));
    R(close(p[1]));
    R(read(p[0], buf, 1));
    R(write(-1, buf, 1));
}

int main(void) {
    begin(20);
    struct conn x = connection();
    ping(x.c, x.s, "first");
    others();
    ping(x.c, x.s, "at the end");
    hang_up(x);
    line("SIGPIPE %d", pipes());
    return 0;
}
