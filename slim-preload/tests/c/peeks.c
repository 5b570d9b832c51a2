// Peeks at unread bytes (MSG_PEEK with all related flags, FIONREAD) immediately after a break, over and over. They must show all
// bytes that the peer's kernel knows to be acknowledged, and the right ones. And an edge-triggered loop whose reader only
// peeks. Two programs.
#include "t.h"
#include <sys/epoll.h>

enum { ROUNDS = 120, MOST = 64 };

static int l = -1, fd;
static unsigned long at;

static int breaks(void) {
    return getenv("T_BREAKS") && atoi(getenv("T_BREAKS"));
}

static int is(const char *what) { return !strcmp(getenv("T_ARGS"), what); }

// The number of bytes that round `i` sends before and after its break.
static int before(int i) { return 1 + i * 7 % 13; }
static int behind(int i) { return i % 3 ? 1 + i * 5 % 11 : 0; }

static void server(void) {
    unsigned char b[MOST];
    for (int i = 0; i < ROUNDS; i++) {
        fill(b, at, before(i) + behind(i), 1);
        MUST(full_send(fd, b, before(i)));
        acked(fd);
        meet();
        meet();
        MUST(full_send(fd, b + before(i), behind(i)));
        acked(fd);
        meet();
        meet();
        at += before(i) + behind(i);
    }
}

static long look(unsigned char *b, int n, int i) {
    struct iovec v[2] = {{b, n / 2}, {b + n / 2, n - n / 2}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
    if (is("wait")) return recv(fd, b, n, MSG_PEEK | MSG_WAITALL);
    if (is("dontwait")) {
        long r = recv(fd, b, n, MSG_PEEK | MSG_DONTWAIT);
        // EAGAIN until SLIM knows what becomes of the broken connection.
        for (int k = 0; r < 0 && errno == EAGAIN && k < 3000; k++, ms(1)) r = recv(fd, b, n, MSG_PEEK | MSG_DONTWAIT);
        return r;
    }
    if (is("message")) return recvmsg(fd, &m, MSG_PEEK | (i % 2 ? MSG_WAITALL : 0));
    if (is("least")) {
        MUST(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &n, sizeof n));
        return recv(fd, b, MOST, MSG_PEEK);
    }
    return recv(fd, b, i % 2 ? MOST : n, MSG_PEEK);
}

static void client(void) {
    for (int i = 0; i < ROUNDS; i++) {
        unsigned char b[MOST];
        int n = before(i) + behind(i), unread = 0;
        meet();
        if (breaks() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
        meet();
        // In odd rounds the peek starts before the later bytes are sent. A peek that waits for all bytes must wait for them.
        if (is("wait") && i % 2) {
            long r = look(b, n, i);
            if (r != n) line("round %d, %d + %d bytes: %ld early", i, before(i), behind(i), r);
        }
        meet();
        if (i % 4 == 3 && breaks() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
        memset(b, 0, sizeof b);
        long r = look(b, n, i);
        if (r != n) line("round %d, %d + %d bytes: %ld", i, before(i), behind(i), r);
        verify(b, at, n, 1);
        for (int k = 0; k < 3000 && unread < n; k++, ms(1)) MUST(ioctl(fd, FIONREAD, &unread));
        if (unread != n) line("round %d: %d unread", i, unread);
        MUST(full_recv(fd, b, n));
        verify(b, at, n, 1);
        at += n;
        meet();
    }
}

// The reader answers each edge-triggered event by peeks only, and reads all bytes at the end.
static void edges(void) {
    unsigned char b[MOST];
    int e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET}, got;
    MUST(fcntl(fd, F_SETFL, O_NONBLOCK));
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    for (int i = 0; i < ROUNDS; i++) {
        int n = before(i) + behind(i), seen = 0;
        meet();
        for (int k = 0; k < 3 && seen < before(i); k++) {
            int r = epoll_wait(e, &got, 1, 3000);
            if (r != 1) line("round %d: %d events before", i, r);
            r = recv(fd, b, sizeof b, MSG_PEEK);
            seen = r > seen ? r : seen;
        }
        if (breaks() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
        meet();
        meet();
        for (int k = 0; k < 9 && seen < n; k++) {
            int r = epoll_wait(e, &got, 1, 3000);
            if (r != 1) line("round %d: %d events", i, r);
            r = recv(fd, b, sizeof b, MSG_PEEK);
            seen = r > seen ? r : seen;
        }
        if (seen != n) line("round %d, %d + %d bytes: %d", i, before(i), behind(i), seen);
        verify(b, at, n, 1);
        for (int have = 0; have < n;) {
            int r = recv(fd, b + have, n - have, 0);
            if (r > 0) have += r;
            if (r < 0) wait_for(fd, POLLIN, 3000);
        }
        verify(b, at, n, 1);
        at += n;
        meet();
    }
    close(e);
}

// An option that is set while the flow is suspended must be set on the new transport.
static void options(void) {
    unsigned char b[MOST];
    for (int i = 0; i < ROUNDS; i++) {
        int n = before(i) + behind(i), unread = 0, least = 0, is = 0;
        meet();
        if (breaks() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
        meet();
        for (int k = 0; k <= i * 7 % 60; k++, usleep(10)) {
            least = 2 + k;
            MUST(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least));
        }
        for (int k = 0; k < 3000 && unread < n; k++, ms(1)) MUST(ioctl(fd, FIONREAD, &unread));
        meet();
        wait_for(fd, POLLOUT, 3000);
        MUST(getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &is, &(socklen_t){sizeof is}));
        if (is != least) line("round %d: set %d, and is %d", i, least, is);
        MUST(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &(int){1}, sizeof is));
        MUST(full_recv(fd, b, n));
        verify(b, at, n, 1);
        at += n;
        meet();
    }
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    fd = pair_up(&l);
    if (is_server())
        server();
    else if (is("edge"))
        edges();
    else if (is("options"))
        options();
    else
        client();
    meet();
    close(fd);
    return 0;
}
