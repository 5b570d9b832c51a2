// Calls that move bytes or descriptors, but that few programs use.
#include "t.h"

static char buf[1 << 16];

static void rest(int fd, long n) {
    memset(buf, 0, n + 1);
    R(full_recv(fd, buf, n));
    quote(buf, n);
}

static volatile sig_atomic_t io;
static void on_io(int s UNUSED) { io++; }

int main(void) {
    begin(20);
    struct conn x = connection();
    char path[] = "/tmp/slim-rare-XXXXXX";
    int f = MUST(mkstemp(path)), p[2];
    unlink(path);
    MUST(write(f, "from a file, all of it", 22));
    MUST(pipe(p));

    line("-- sendfile and splice");
    off_t at = 5;
    R(sendfile(x.c, f, &at, 7));
    line("offset %d", (int)at);
    rest(x.s, 7);
    lseek(f, 0, SEEK_SET);
    R(sendfile(x.c, f, NULL, 1000));
    rest(x.s, 22);
    R(sendfile(x.c, f, NULL, 1000));
    R(sendfile(x.s, x.c, NULL, 10));
    MUST(write(p[1], "through a pipe", 14));
    R(splice(p[0], NULL, x.c, NULL, 100, 0));
    rest(x.s, 14);
    MUST(send(x.c, "into a pipe", 11, 0));
    arrived(x.s, 11);
    R(splice(x.s, NULL, p[1], NULL, 4, 0));
    R(splice(x.s, NULL, p[1], NULL, 100, SPLICE_F_NONBLOCK));
    fcntl(x.s, F_SETFL, O_NONBLOCK);
    R(splice(x.s, NULL, p[1], NULL, 100, SPLICE_F_NONBLOCK));
    fcntl(x.s, F_SETFL, 0);
    memset(buf, 0, 20);
    R(read(p[0], buf, 20));
    quote(buf, 11);
    ping(x.c, x.s, "spliced");

    line("-- sendmmsg and recvmmsg");
    struct iovec v[3] = {{"one", 3}, {"two", 3}, {"three", 5}};
    struct mmsghdr mm[3];
    memset(mm, 0, sizeof mm);
    for (int i = 0; i < 3; i++) mm[i].msg_hdr.msg_iov = v + i, mm[i].msg_hdr.msg_iovlen = 1;
    R(sendmmsg(x.c, mm, 3, 0));
    line("%u %u %u", mm[0].msg_len, mm[1].msg_len, mm[2].msg_len);
    arrived(x.s, 11);
    char a[3][4];
    for (int i = 0; i < 3; i++) v[i] = (struct iovec){a[i], 4};
    struct timespec ts = {1, 0};
    R(recvmmsg(x.s, mm, 3, MSG_DONTWAIT, &ts));
    line("%u %u %u", mm[0].msg_len, mm[1].msg_len, mm[2].msg_len);
    quote(a, 11);
    R(recvmmsg(x.s, mm, 3, MSG_DONTWAIT, NULL));
    // sendmmsg sends at most 1024 messages at once; recvmmsg receives as many as there are.
    struct conn y = connection();
    static struct mmsghdr many[1100];
    static struct iovec one[1100];
    static char bytes[1100];
    for (int i = 0; i < 1100; i++) {
        one[i] = (struct iovec){bytes + i, 1};
        many[i].msg_hdr = (struct msghdr){.msg_iov = one + i, .msg_iovlen = 1};
    }
    R(sendmmsg(y.c, many, 1100, 0));
    R(sendmmsg(y.c, many, 70, 0));
    arrived(y.s, 1094);
    R(recvmmsg(y.s, many, 1100, MSG_DONTWAIT, NULL));
    many[1].msg_hdr.msg_iov = (void *)8;
    R(sendmmsg(y.c, many, 2, 0));
    arrived(y.s, 1);
    R(recv(y.s, buf, 9, 0));
    hang_up(y);

    line("-- preadv2 and pwritev2");
    v[0] = (struct iovec){"pwritev2", 8};
    R(pwritev2(x.c, v, 1, -1, 0));
    v[0] = (struct iovec){buf, 8};
    R(preadv2(x.s, v, 1, -1, 0));
    quote(buf, 8);
    R(preadv2(x.s, v, 1, -1, RWF_NOWAIT));
    R(pwritev2(x.c, v, 1, 0, 0));
    R(dprintf(x.c, "formatted %d", 7));
    rest(x.s, 11);

    line("-- sendto that connects");
    int c = R(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in to = v4(port_of(x.l));
    R(sendto(c, "fast open", 9, MSG_FASTOPEN, (void *)&to, sizeof to));
    int s = R(accept(x.l, NULL, NULL));
    rest(s, 9);
    ping(c, s, "opened fast");
    close(c);
    close(s);

    line("-- no copy");
    int on = 1;
    R(setsockopt(x.c, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
    R(send(x.c, "not copied", 10, MSG_ZEROCOPY));
    rest(x.s, 10);
    wait_for(x.c, 0, 1000);
    char room[256];
    struct msghdr m = {.msg_control = room, .msg_controllen = sizeof room};
    R(recvmsg(x.c, &m, MSG_ERRQUEUE));
    line("told of it %d flags %x", m.msg_controllen > 0, m.msg_flags);
    ping(x.c, x.s, "and on");

    line("-- signals for readiness");
    handle(SIGIO, on_io, SA_RESTART);
    R(fcntl(x.s, F_SETOWN, getpid()));
    R(fcntl(x.s, F_GETOWN) == getpid());
    R(fcntl(x.s, F_SETFL, O_ASYNC | O_NONBLOCK));
    line("flags %x", fcntl(x.s, F_GETFL));
    MUST(send(x.c, "sig", 3, 0));
    arrived(x.s, 3);
    line("SIGIO %d", io > 0);
    R(fcntl(x.s, F_SETFL, 0));
    rest(x.s, 3);

    line("-- a time of arrival");
    R(setsockopt(x.s, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on));
    // Unless timestamps are already in use on this host, the kernel begins to stamp with a delay.
    for (int tries = 0; tries < 200; tries++) {
        MUST(send(x.c, "when", 4, 0));
        arrived(x.s, 4);
        v[0] = (struct iovec){buf, 8};
        m = (struct msghdr){.msg_iov = v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        MUST(recvmsg(x.s, &m, 0));
        if (m.msg_controllen) break;
        ms(5);
    }
    line("control %d flags %x", m.msg_controllen > 0, m.msg_flags);

    line("-- unread bytes counted by TCP_INQ");
    R(setsockopt(x.s, IPPROTO_TCP, TCP_INQ, &on, sizeof on));
    MUST(send(x.c, "inqueue", 7, 0));
    arrived(x.s, 7);
    v[0] = (struct iovec){buf, 2};
    m = (struct msghdr){.msg_iov = v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    R(recvmsg(x.s, &m, 0));
    int inq = -1;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h))
        if (h->cmsg_level == IPPROTO_TCP) memcpy(&inq, CMSG_DATA(h), sizeof inq);
    line("left %d", inq);
    rest(x.s, 5);

    line("-- urgent data");
    R(send(x.c, "u!", 2, MSG_OOB));
    arrived(x.s, 1);
    line("%s", bits(wait_for(x.s, POLLPRI | POLLIN, 1000)));
    R(recv(x.s, buf, 1, MSG_OOB));
    quote(buf, 1);
    R(recv(x.s, buf, 1, MSG_OOB));
    R(recv(x.s, buf, 9, 0));
    R(recv(x.s, buf, 9, MSG_DONTWAIT));
    ping(x.c, x.s, "after urgent data");

    close(f);
    hang_up(x);
    line("SIGPIPE %d", pipes());
    return 0;
}
