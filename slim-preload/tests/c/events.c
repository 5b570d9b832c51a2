// Events of an unbroken connection that poll, select and epoll report like errors: the application must get them. And waits
// must end when their time is over.
#include "t.h"
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>

enum { MUCH = 6 << 20 };

static char buf[1 << 16];

// Prints the error queue.
static void queue(int fd) {
    char control[256];
    struct msghdr m = {.msg_control = control, .msg_controllen = sizeof control};
    R(recvmsg(fd, &m, MSG_ERRQUEUE | MSG_DONTWAIT));
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        struct sock_extended_err *e = (void *)CMSG_DATA(c);
        if (c->cmsg_level == SOL_IP && c->cmsg_type == IP_RECVERR) line("  errno %s origin %d", ename(e->ee_errno), e->ee_origin);
    }
}

static void waits(int fd, int limit) {
    struct pollfd p = {fd, POLLIN, 0};
    double t0 = now_s();
    R(poll(&p, 1, limit));
    line("%s, %s", bits(p.revents), p.revents ? "an event" : took(t0, limit));

    struct timespec ts = {0, limit * 1000000L};
    t0 = now_s();
    R(ppoll(&p, 1, &ts, NULL));
    line("%s, %s", bits(p.revents), p.revents ? "an event" : took(t0, limit));

    fd_set r, x;
    FD_ZERO(&r);
    FD_ZERO(&x);
    FD_SET(fd, &r);
    FD_SET(fd, &x);
    struct timeval tv = {0, limit * 1000L};
    t0 = now_s();
    int n = R(select(fd + 1, &r, NULL, &x, &tv));
    line("%d %d, %s", !!FD_ISSET(fd, &r), !!FD_ISSET(fd, &x), n ? "an event" : took(t0, limit));

    int e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    ev.events = 0;
    t0 = now_s();
    n = R(epoll_wait(e, &ev, 1, limit));
    line("%s, %s", bits(ev.events), n ? "an event" : took(t0, limit));
    close(e);
}

static void *reader(void *fd) {
    static char b[1 << 16];
    for (size_t got = 0; got < MUCH;) got += MUST(recv(*(int *)fd, b, sizeof b, 0));
    return NULL;
}

static void zero_copy(void) {
    line("-- completions of sends that are not copied");
    struct conn x = connection();
    int one = 1;
    R(setsockopt(x.c, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one));
    R(send(x.c, buf, 30000, MSG_ZEROCOPY));
    MUST(full_recv(x.s, buf, 30000));
    acked(x.c);
    ms(20);
    waits(x.c, 60);
    // Entries in the error queue must not delay a blocking write that does not fit.
    static char much[MUCH];
    pthread_t t;
    pthread_create(&t, NULL, reader, &x.s);
    R(send(x.c, much, MUCH, 0));
    pthread_join(t, NULL);
    queue(x.c);
    hang_up(x);
}

static void stamps(void) {
    line("-- times of sending");
    struct conn x = connection();
    int on = SOF_TIMESTAMPING_TX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_OPT_ID | SOF_TIMESTAMPING_OPT_TSONLY;
    R(setsockopt(x.c, SOL_SOCKET, SO_TIMESTAMPING, &on, sizeof on));
    R(send(x.c, "when", 4, 0));
    MUST(full_recv(x.s, buf, 4));
    acked(x.c);
    ms(20);
    waits(x.c, 60);
    queue(x.c);
    waits(x.c, 60);
    ping(x.c, x.s, "goes on");
    hang_up(x);
}

int main(void) {
    begin(20);
    zero_copy();
    stamps();
    line("-- nothing happens");
    struct conn x = connection();
    waits(x.c, 60);
    hang_up(x);
    return 0;
}
