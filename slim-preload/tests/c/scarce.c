// Scarce resources: few descriptors, no threads, a taken port. The program must run as without SLIM.
#include "t.h"

static void *nothing(void *p) { return p; }

int main(int argc, char **argv) {
    begin(20);
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "nofile")) {
        struct rlimit r = {atoi(argv[2]), atoi(argv[2])};
        MUST(setrlimit(RLIMIT_NOFILE, &r));
        struct conn x = connection();
        ping(x.c, x.s, "few descriptors");
        int n = 0, fd, last = -1;
        while ((fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0) n++, last = fd;
        line("%d more, the last %d, then %s", n, last, ename(errno));
        R(dup(0));
        R(accept(x.l, NULL, NULL));
        R(open("/dev/null", O_RDONLY));
        R(epoll_create1(0));
        close(last);
        struct sockaddr_in a = v4(port_of(x.l));
        fd = R(socket(AF_INET, SOCK_STREAM, 0));
        R(connect(fd, (void *)&a, sizeof a));
        close(last - 1);
        int s = R(accept(x.l, NULL, NULL));
        await_negotiation();
        ping(fd, s, "the last two");
        ping(x.c, x.s, "the first two");
    } else if (!strcmp(what, "nproc")) {
        struct rlimit r = {1, 1};
        MUST(setrlimit(RLIMIT_NPROC, &r));
        // The limit does not apply to root.
        if (geteuid() == 0) MUST(setuid(65534));
        pthread_t t;
        line("thread: %s", ename(pthread_create(&t, NULL, nothing, NULL)));
        struct conn x = connection();
        ping(x.c, x.s, "no threads");
        struct conn y = connection();
        ping(y.c, y.s, "and again");
        hang_up(x);
        hang_up(y);
    } else if (!strcmp(what, "memory")) {
        // Room for the running program, but not for a large buffer.
        struct rlimit r = {192 << 20, 192 << 20};
        MUST(setrlimit(RLIMIT_AS, &r));
        struct conn x = connection();
        ping(x.c, x.s, "little memory");
        hang_up(x);
    } else if (!strcmp(what, "udp-before")) {
        // Another socket of the program already has the UDP port.
        int u, l;
        struct sockaddr_in a;
        // Another program may have the TCP port of the same number.
        for (;;) {
            u = socket(AF_INET, SOCK_DGRAM, 0);
            a = v4(0);
            MUST(bind(u, (void *)&a, sizeof a));
            a = v4(port_of(u));
            l = socket(AF_INET, SOCK_STREAM, 0);
            if (bind(l, (void *)&a, sizeof a) == 0) break;
            close(l);
            close(u);
        }
        R(listen(l, 5));
        int c = dial(port_of(l)), s = R(accept(l, NULL, NULL));
        await_negotiation();
        ping(c, s, "UDP taken");
        // A peer may send HELLO to that port. The program must still get its own datagrams.
        int w = dial(port_of(l));
        s = R(accept(l, NULL, NULL));
        ping(w, s, "again");
        int me = socket(AF_INET, SOCK_DGRAM, 0);
        R(sendto(me, "mine", 4, 0, (void *)&a, sizeof a));
        line("%s", bits(wait_for(u, POLLIN, 1000)));
    } else if (!strcmp(what, "udp-after")) {
        // TCP first, then UDP on the same port, as name servers and iperf3 do.
        int l = listener();
        struct sockaddr_in a = v4(port_of(l));
        int c = dial(port_of(l)), s = R(accept(l, NULL, NULL));
        await_negotiation();
        int u = R(socket(AF_INET, SOCK_DGRAM, 0));
        R(bind(u, (void *)&a, sizeof a));
        int me = R(socket(AF_INET, SOCK_DGRAM, 0));
        R(sendto(me, "datagram", 8, 0, (void *)&a, sizeof a));
        line("%s", bits(wait_for(u, POLLIN, 1000)));
        char b[64];
        R(recv(u, b, sizeof b, MSG_DONTWAIT));
        ping(c, s, "TCP beside it");
        close(u);
        close(me);
        c = dial(port_of(l));
        s = R(accept(l, NULL, NULL));
        await_negotiation();
        ping(c, s, "TCP after it");
    } else if (!strcmp(what, "udp-any-after")) {
        int l = listener();
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port_of(l))};
        int u = R(socket(AF_INET, SOCK_DGRAM, 0));
        R(bind(u, (void *)&a, sizeof a));
    } else if (!strcmp(what, "threads")) {
        // A program that never uses TCP gets no thread and no descriptor from SLIM.
        int u[2], n = 0;
        MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, u));
        MUST(send(u[0], "x", 1, 0));
        close(socket(AF_INET, SOCK_DGRAM, 0));
        DIR *d = opendir("/proc/self/task");
        for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
        line("threads %d", n);
        closedir(d);
        d = opendir("/proc/self/fd");
        n = 0;
        for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
        line("descriptors %d", n);
        closedir(d);
    } else {
        line("unknown");
        return 1;
    }
    line("SIGPIPE %d", pipes());
    return 0;
}
