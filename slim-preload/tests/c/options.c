// Socket options and ioctls: options that were set read back, all others have the kernel's value.
#include "t.h"

struct opt {
    const char *name;
    int level, opt, size;
};
#define O(l, o, s) {#o, l, o, s}

static const struct opt opts[] = {
    O(SOL_SOCKET, SO_TYPE, 4), O(SOL_SOCKET, SO_DOMAIN, 4), O(SOL_SOCKET, SO_PROTOCOL, 4), O(SOL_SOCKET, SO_ACCEPTCONN, 4),
    O(SOL_SOCKET, SO_KEEPALIVE, 4), O(SOL_SOCKET, SO_REUSEADDR, 4), O(SOL_SOCKET, SO_REUSEPORT, 4), O(SOL_SOCKET, SO_BROADCAST, 4),
    O(SOL_SOCKET, SO_DONTROUTE, 4), O(SOL_SOCKET, SO_LINGER, 8), O(SOL_SOCKET, SO_RCVTIMEO, 16), O(SOL_SOCKET, SO_SNDTIMEO, 16),
    O(SOL_SOCKET, SO_RCVLOWAT, 4), O(SOL_SOCKET, SO_SNDLOWAT, 4), O(SOL_SOCKET, SO_OOBINLINE, 4), O(SOL_SOCKET, SO_ERROR, 4),
    O(SOL_SOCKET, SO_PRIORITY, 4), O(SOL_SOCKET, SO_MARK, 4), O(SOL_SOCKET, SO_TIMESTAMP, 4), O(SOL_SOCKET, SO_PASSCRED, 4),
    O(SOL_SOCKET, SO_BINDTODEVICE, 16), O(SOL_SOCKET, SO_ZEROCOPY, 4), O(SOL_SOCKET, SO_BUSY_POLL, 4), O(SOL_SOCKET, SO_INCOMING_NAPI_ID, 4),
    O(IPPROTO_TCP, TCP_NODELAY, 4), O(IPPROTO_TCP, TCP_CORK, 4), O(IPPROTO_TCP, TCP_KEEPIDLE, 4), O(IPPROTO_TCP, TCP_KEEPINTVL, 4),
    O(IPPROTO_TCP, TCP_KEEPCNT, 4), O(IPPROTO_TCP, TCP_SYNCNT, 4), O(IPPROTO_TCP, TCP_LINGER2, 4), O(IPPROTO_TCP, TCP_DEFER_ACCEPT, 4),
    O(IPPROTO_TCP, TCP_USER_TIMEOUT, 4), O(IPPROTO_TCP, TCP_CONGESTION, 16), O(IPPROTO_TCP, TCP_FASTOPEN, 4), O(IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4),
    O(IPPROTO_TCP, TCP_INQ, 4), O(IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 4), O(IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 4), O(IPPROTO_TCP, TCP_REPAIR, 4),
    O(IPPROTO_IP, IP_TOS, 4), O(IPPROTO_IP, IP_TTL, 4), O(IPPROTO_IP, IP_MTU_DISCOVER, 4), O(IPPROTO_IP, IP_RECVERR, 4),
    O(IPPROTO_IP, IP_FREEBIND, 4), O(IPPROTO_IP, IP_TRANSPARENT, 4), O(IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 4), O(IPPROTO_IPV6, IPV6_V6ONLY, 4),
};

static void dump(const char *what, int fd) {
    line("-- %s", what);
    for (unsigned i = 0; i < sizeof opts / sizeof *opts; i++) {
        unsigned char v[32];
        memset(v, 0xee, sizeof v);
        socklen_t n = opts[i].size;
        int r = getsockopt(fd, opts[i].level, opts[i].opt, v, &n);
        char t[100] = "";
        for (int k = 0; r == 0 && k < opts[i].size; k++) sprintf(t + strlen(t), "%02x", v[k]);
        line("%s %s %d %s", opts[i].name, r ? ename(errno) : "0", (int)n, t);
    }
}

static void set(int fd, int level, int opt, int v, const char *name) {
    int got = -1;
    socklen_t n = sizeof got;
    int r = setsockopt(fd, level, opt, &v, sizeof v), e = errno;
    int g = getsockopt(fd, level, opt, &got, &n);
    line("set %s %d: %s, get %d: %d", name, v, r ? ename(e) : "0", g, got);
}
#define SET(fd, l, o, v) set(fd, l, o, v, #o)

static void set_all(int fd) {
    SET(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    SET(fd, IPPROTO_TCP, TCP_KEEPIDLE, 33);
    SET(fd, IPPROTO_TCP, TCP_KEEPINTVL, 7);
    SET(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
    SET(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 12345);
    SET(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    SET(fd, IPPROTO_TCP, TCP_CORK, 1);
    SET(fd, IPPROTO_TCP, TCP_CORK, 0);
    SET(fd, IPPROTO_TCP, TCP_SYNCNT, 3);
    SET(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 70000);
    SET(fd, IPPROTO_TCP, TCP_LINGER2, 9);
    SET(fd, SOL_SOCKET, SO_PRIORITY, 5);
    SET(fd, SOL_SOCKET, SO_OOBINLINE, 1);
    SET(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    SET(fd, SOL_SOCKET, SO_SNDBUF, 100000);
    SET(fd, SOL_SOCKET, SO_RCVBUF, 120000);
    SET(fd, SOL_SOCKET, SO_SNDBUF, 1);
    SET(fd, SOL_SOCKET, SO_RCVLOWAT, 2);
    SET(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    SET(fd, IPPROTO_IP, IP_TOS, 0x10);
    SET(fd, IPPROTO_IP, IP_TTL, 77);
    SET(fd, SOL_SOCKET, SO_TYPE, 1);
    SET(fd, SOL_SOCKET, SO_ERROR, 1);
    SET(fd, IPPROTO_TCP, TCP_KEEPIDLE, 0);
    SET(fd, IPPROTO_TCP, TCP_KEEPCNT, 1000);
    SET(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, -1);
    SET(fd, 9999, 1, 1);
    struct linger lg = {1, 3};
    R(setsockopt(fd, SOL_SOCKET, SO_LINGER, &lg, sizeof lg));
    struct timeval tv = {3, 500000}, bad = {0, 2000000}, zero = {0, 0};
    R(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
    R(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv));
    R(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bad, sizeof bad));
    R(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, 3));
    R(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &zero, sizeof zero));
    R(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4));
    R(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "nonsense", 8));
    R(setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3));
    R(setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "", 0));
    R(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, (void *)1, 4));
    R(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, NULL, 4));
    R(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &lg, -1));
}

static void *nowhere = (void *)1;

static void lengths(int fd) {
    char v[300];
    for (int n = 0; n < 6; n++) {
        socklen_t l = n;
        memset(v, 0x11, sizeof v);
        int r = getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, v, &l);
        line("length %d: %d %d %02x%02x%02x%02x", n, r, (int)l, v[0] & 255, v[1] & 255, v[2] & 255, v[3] & 255);
    }
    socklen_t l = -1;
    R(getsockopt(fd, SOL_SOCKET, SO_TYPE, v, &l));
    l = 4;
    R(getsockopt(fd, SOL_SOCKET, SO_TYPE, nowhere, &l));
    R(getsockopt(fd, SOL_SOCKET, SO_TYPE, v, NULL));
    R(getsockopt(fd, SOL_SOCKET, SO_TYPE, v, nowhere));
    struct tcp_info ti;
    l = sizeof ti;
    R(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &ti, &l));
    line("state %d, length %d", ti.tcpi_state, (int)(l == sizeof ti));
    l = 2;
    R(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &ti, &l));
    line("length %d", (int)l);
}

static void ioctls(struct conn x) {
    int n = -1, on = 1;
    char buf[64];
    line("-- ioctl");
    R(ioctl(x.c, FIONREAD, &n));
    line("%d", n);
    MUST(send(x.s, "seven..", 7, 0));
    arrived(x.c, 7);
    R(ioctl(x.c, FIONREAD, &n));
    line("%d", n);
    R(ioctl(x.c, SIOCINQ, &n));
    line("%d", n);
    R(recv(x.c, buf, 3, 0));
    R(ioctl(x.c, FIONREAD, &n));
    line("%d", n);
    R(recv(x.c, buf, 9, 0));
    acked(x.s);
    R(ioctl(x.s, SIOCOUTQ, &n));
    line("%d", n);
    R(ioctl(x.s, SIOCOUTQNSD, &n));
    line("%d", n);
    R(ioctl(x.c, TIOCOUTQ, &n));
    line("%d", n);
    // The peer reads nothing, so unacknowledged bytes remain and are counted.
    static char big[1 << 20];
    R(ioctl(x.s, FIONBIO, &on));
    line("flags %x", fcntl(x.s, F_GETFL));
    long sent = 0, r;
    for (int quiet = 0; quiet < 3; quiet++) {
        while ((r = send(x.s, big, sizeof big, 0)) > 0) sent += r, quiet = 0;
        ms(30);
    }
    int in, out;
    MUST(ioctl(x.s, SIOCOUTQ, &out));
    MUST(ioctl(x.c, FIONREAD, &in));
    line("queued at both ends is all that was sent: %d, some at each: %d %d", in + out == sent, in > 0, out > 0);
    long got = 0;
    while (got < sent && (r = recv(x.c, big, sizeof big, 0)) > 0) got += r;
    acked(x.s);
    line("all came %d", got == sent);
    R(ioctl(x.c, SIOCATMARK, &n));
    line("%d", n);
    R(ioctl(x.c, FIONREAD, NULL));
    R(ioctl(x.c, FIONBIO, (void *)1));
    R(ioctl(x.c, SIOCOUTQ, (void *)1));
    R(ioctl(x.c, TCGETS, buf));
    R(ioctl(x.l, FIONREAD, &n));
    R(ioctl(x.l, SIOCOUTQ, &n));
    int s = socket(AF_INET, SOCK_STREAM, 0);
    R(ioctl(s, FIONREAD, &n));
    R(ioctl(s, SIOCOUTQ, &n));
    close(s);
    R(ioctl(x.c, FIOASYNC, &on));
    line("flags %x", fcntl(x.c, F_GETFL));
    on = 0;
    R(ioctl(x.c, FIOASYNC, &on));
    R(isatty(x.c));
    R(lseek(x.c, 0, SEEK_CUR));
    R(pread(x.c, buf, 1, 0));
    R(pwrite(x.c, buf, 1, 0));
    R(fsync(x.c));
    R(ftruncate(x.c, 0));
    struct stat st;
    R(fstat(x.c, &st));
    line("socket %d size %d", S_ISSOCK(st.st_mode), (int)st.st_size);
    char link[64], path[64];
    sprintf(path, "/proc/self/fd/%d", x.c);
    r = readlink(path, link, sizeof link - 1);
    link[r > 0 ? r : 0] = 0;
    line("a link to a socket %d", !strncmp(link, "socket:", 7));
}

int main(void) {
    begin(20);
    int s = socket(AF_INET, SOCK_STREAM, 0), s6 = socket(AF_INET6, SOCK_STREAM, 0);
    dump("fresh", s);
    dump("fresh, IPv6", s6);
    close(s);
    close(s6);
    struct conn x = connection();
    dump("listener", x.l);
    dump("client", x.c);
    dump("server", x.s);
    set_all(x.c);
    dump("client, set", x.c);
    set_all(x.s);
    dump("server, set", x.s);
    lengths(x.c);
    ping(x.c, x.s, "with options");
    hang_up(x);

    line("-- set before the connection, and inherited from the listener");
    x.l = listener();
    set_all(x.l);
    x.c = socket(AF_INET, SOCK_STREAM, 0);
    set_all(x.c);
    struct sockaddr_in a = v4(port_of(x.l));
    R(connect(x.c, (void *)&a, sizeof a));
    x.s = R(accept(x.l, NULL, NULL));
    await_negotiation();
    dump("client", x.c);
    dump("server", x.s);
    ping(x.c, x.s, "inherited");
    hang_up(x);

    x = connection();
    ioctls(x);
    ping(x.c, x.s, "after it all");
    hang_up(x);
    return 0;
}
