// Copies of descriptors, their flags, and the numbers that the program sees.
#include "t.h"

static char buf[256];

static void ends(int fd) {
    line("the peer sees %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 1000)));
    R(recv(fd, buf, 9, MSG_DONTWAIT));
}

int main(void) {
    begin(20);
    line("-- copies");
    struct conn x = connection();
    int d = R(dup(x.c)), e = R(fcntl(x.c, F_DUPFD, 50)), f = R(fcntl(x.c, F_DUPFD_CLOEXEC, 50));
    int g = R(dup2(x.c, 60)), h = R(dup3(x.c, 61, O_CLOEXEC));
    line("close on exec %d %d %d %d %d %d", fcntl(x.c, F_GETFD), fcntl(d, F_GETFD), fcntl(e, F_GETFD), fcntl(f, F_GETFD), fcntl(g, F_GETFD), fcntl(h, F_GETFD));
    ping(d, x.s, "dup");
    ping(e, x.s, "F_DUPFD");
    ping(f, x.s, "F_DUPFD_CLOEXEC");
    ping(g, x.s, "dup2");
    ping(h, x.s, "dup3");
    line("the same name %d", port_of(d) == port_of(x.c) && peer_port_of(h) == peer_port_of(x.c));
    MUST(send(x.s, "shared", 6, 0));
    arrived(x.c, 6);
    R(recv(d, buf, 2, 0));
    R(recv(x.c, buf, 2, 0));
    R(read(h, buf, 9));

    line("-- the flags of a file are shared, those of a descriptor are not");
    R(fcntl(x.c, F_SETFL, O_NONBLOCK));
    line("%x %x %x", fcntl(x.c, F_GETFL), fcntl(d, F_GETFL), fcntl(g, F_GETFL));
    R(recv(d, buf, 9, 0));
    int off = 0, on = 1;
    R(ioctl(d, FIONBIO, &off));
    line("%x %x %x", fcntl(x.c, F_GETFL), fcntl(d, F_GETFL), fcntl(g, F_GETFL));
    R(ioctl(g, FIONBIO, &on));
    R(recv(x.c, buf, 9, 0));
    R(fcntl(x.c, F_SETFL, O_RDWR));
    R(fcntl(x.c, F_SETFD, FD_CLOEXEC));
    line("%x %x", fcntl(x.c, F_GETFD), fcntl(d, F_GETFD));
    R(ioctl(x.c, FIONCLEX));
    line("%x", fcntl(x.c, F_GETFD));
    R(ioctl(x.c, FIOCLEX));
    line("%x", fcntl(x.c, F_GETFD));

    line("-- the first goes, the rest stay");
    R(close(x.c));
    ping(d, x.s, "after the first was closed");
    R(close(d));
    R(close(e));
    R(close(f));
    R(close(g));
    ping(h, x.s, "the last");
    R(shutdown(h, SHUT_WR));
    ends(x.s);
    R(close(h));
    R(close(x.s));
    R(close(x.l));

    line("-- dup2 over a connection closes it");
    struct conn y = connection(), z = connection();
    R(dup2(y.c, z.c));
    ends(z.s);
    ping(z.c, y.s, "what was put there");
    R(dup2(z.c, z.c));
    R(dup2(y.s, z.s));
    R(close(y.s));
    ping(y.c, z.s, "both moved");
    int null = R(open("/dev/null", O_RDWR));
    R(dup2(null, y.c));
    R(send(y.c, "x", 1, 0));
    R(write(y.c, "x", 1));
    ping(z.c, z.s, "one number is a file now");
    R(dup3(null, z.c, 0));
    ends(z.s);
    R(close(z.s));
    R(close(y.l));
    R(close(z.l));
    R(close(y.c));
    R(close(z.c));
    R(close(null));

    line("-- standard output over a connection");
    x = connection();
    int keep = R(dup(1));
    MUST(dup2(x.c, 1));
    printf("printed %d", 42);
    fflush(stdout);
    MUST(dup2(keep, 1));
    close(keep);
    memset(buf, 0, sizeof buf);
    R(full_recv(x.s, buf, 10));
    quote(buf, 10);
    FILE *in = fdopen(x.s, "r+");
    MUST(send(x.c, "a line\nanother\n", 15, 0));
    line("%s", fgets(buf, sizeof buf, in) ? "got" : "nothing");
    quote(buf, strlen(buf));
    line("%s", fgets(buf, sizeof buf, in) ? "got" : "nothing");
    quote(buf, strlen(buf));
    fprintf(in, "from stdio");
    fflush(in);
    memset(buf, 0, sizeof buf);
    R(full_recv(x.c, buf, 10));
    quote(buf, 10);
    R(fclose(in));
    ends(x.c);
    close(x.c);
    close(x.l);

    line("-- listeners");
    x.l = listener();
    R(setsockopt(x.l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    int port = port_of(x.l);
    d = R(dup(x.l));
    R(close(x.l));
    x.c = dial(port);
    x.s = R(accept(d, NULL, NULL));
    settle();
    ping(x.c, x.s, "accepted through the copy");
    R(close(d));
    ping(x.c, x.s, "without a listener");
    struct sockaddr_in a = v4(port);
    d = R(socket(AF_INET, SOCK_STREAM, 0));
    R(connect(d, (void *)&a, sizeof a));
    R(close(d));
    // The port can be had again as it can without us.
    d = R(socket(AF_INET, SOCK_STREAM, 0));
    R(setsockopt(d, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    R(bind(d, (void *)&a, sizeof a));
    R(listen(d, 5));
    y.c = dial(port);
    y.s = R(accept(d, NULL, NULL));
    settle();
    ping(y.c, y.s, "a new listener on the same port");
    ping(x.c, x.s, "and the old connection");
    close(y.c);
    close(y.s);
    close(x.c);
    close(x.s);
    close(d);

    line("-- numbers");
    int p[2];
    R(pipe(p));
    x = connection();
    line("%d %d %d", x.l, x.c, x.s);
    R(close(p[0]));
    R(open("/dev/null", O_RDONLY));
    R(close(x.c));
    R(open("/dev/null", O_RDONLY));
    R(socket(AF_INET, SOCK_STREAM, 0));
    R(dup(0));
    R(epoll_create1(0));
    y = connection();
    line("%d %d %d", y.l, y.c, y.s);
    R(close(0));
    R(socket(AF_INET, SOCK_STREAM, 0));
    R(close(2));
    z = connection();
    line("%d %d %d", z.l, z.c, z.s);
    ping(z.c, z.s, "low numbers");

    line("-- what close_range and closefrom do");
    R(close_range(y.c, y.c, 0));
    ends(y.s);
    R(close_range(200, 100, 0));
    closefrom(y.s);
    R(fcntl(z.l, F_GETFD));
    R(fcntl(z.s, F_GETFD));
    R(socket(AF_INET, SOCK_STREAM, 0));
    x = connection();
    ping(x.c, x.s, "after closefrom");
    R(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC));
    line("close on exec %d", fcntl(x.c, F_GETFD));
    line("SIGPIPE %d", pipes());
    return 0;
}
