// What all variants of poll, select and epoll report of a descriptor in each state.
#include "t.h"

static char buf[1 << 16];

static void show(const char *state, int fd) {
    static const short masks[] = {0, POLLIN, POLLOUT, POLLRDHUP, POLLIN | POLLOUT | POLLPRI | POLLRDHUP};
    char s[256] = "";
    for (unsigned i = 0; i < sizeof masks / sizeof *masks; i++) {
        struct pollfd p = {.fd = fd, .events = masks[i], .revents = 0x7f};
        struct timespec zero = {0, 0};
        int r = i % 2 ? ppoll(&p, 1, &zero, NULL) : poll(&p, 1, 0);
        sprintf(s + strlen(s), " %d:%s", r, bits(p.revents));
    }
    fd_set a, b, c;
    for (int k = 0; k < 2; k++) {
        FD_ZERO(&a);
        FD_ZERO(&b);
        FD_ZERO(&c);
        FD_SET(fd, &a);
        FD_SET(fd, &b);
        FD_SET(fd, &c);
        struct timeval tv = {0, 0};
        struct timespec ts = {0, 0};
        int r = k ? pselect(fd + 1, &a, &b, &c, &ts, NULL) : select(fd + 1, &a, &b, &c, &tv);
        sprintf(s + strlen(s), " select %d:%s%s%s", r, FD_ISSET(fd, &a) ? "r" : "", FD_ISSET(fd, &b) ? "w" : "", FD_ISSET(fd, &c) ? "x" : "");
    }
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLPRI, .data.fd = fd};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    ev.events = 0;
    int r = epoll_wait(e, &ev, 1, 0);
    sprintf(s + strlen(s), " epoll %d:%s", r, bits(ev.events));
    close(e);
    line("%s:%s", state, s);
}

static void *later(void *x) {
    ms(60);
    MUST(send(*(int *)x, "l", 1, 0));
    return NULL;
}

// Waits in each way until the other end, `from`, sends after 60 ms.
static void waits(int fd, int from) {
    pthread_t t;
    double t0;
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = 1};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    for (int way = 0; way < 7; way++) {
        t0 = tick_s();
        pthread_create(&t, NULL, later, &from);
        struct pollfd p = {.fd = fd, .events = POLLIN};
        struct timespec ts = {5, 0};
        struct timeval tv = {5, 0};
        fd_set rd;
        FD_ZERO(&rd);
        FD_SET(fd, &rd);
        int r = way == 0   ? poll(&p, 1, 5000)
                : way == 1 ? poll(&p, 1, -1)
                : way == 2 ? ppoll(&p, 1, &ts, NULL)
                : way == 3 ? select(fd + 1, &rd, NULL, NULL, &tv)
                : way == 4 ? pselect(fd + 1, &rd, NULL, NULL, &ts, NULL)
                : way == 5 ? epoll_wait(e, &ev, 1, 5000)
                           : epoll_pwait2(e, &ev, 1, &ts, NULL);
        line("way %d: %d %s, remaining %d %d", way, r, took(t0, 60), way == 3 ? (int)(tv.tv_sec == 4) : -1, (int)(ts.tv_sec == 5));
        pthread_join(t, NULL);
        MUST(recv(fd, buf, 1, 0));
    }
    // Nothing is sent, so each wait lasts for its time limit.
    struct pollfd p = {.fd = fd, .events = POLLIN};
    struct timespec ts = {0, 50000000};
    struct timeval tv = {0, 50000};
    fd_set rd;
    FD_ZERO(&rd);
    FD_SET(fd, &rd);
    t0 = tick_s();
    R(poll(&p, 1, 50));
    line("%s %s", bits(p.revents), took(t0, 50));
    t0 = tick_s();
    R(ppoll(&p, 1, &ts, NULL));
    line("%s %s", bits(p.revents), took(t0, 50));
    t0 = tick_s();
    R(select(fd + 1, &rd, NULL, NULL, &tv));
    line("%d %s left %d", FD_ISSET(fd, &rd), took(t0, 50), (int)tv.tv_usec);
    FD_SET(fd, &rd);
    t0 = tick_s();
    R(pselect(fd + 1, &rd, NULL, NULL, &ts, NULL));
    line("%d %s", FD_ISSET(fd, &rd), took(t0, 50));
    t0 = tick_s();
    R(epoll_wait(e, &ev, 1, 50));
    line("%s", took(t0, 50));
    t0 = tick_s();
    R(epoll_pwait(e, &ev, 1, 50, NULL));
    line("%s", took(t0, 50));
    t0 = tick_s();
    R(epoll_pwait2(e, &ev, 1, &ts, NULL));
    line("%s", took(t0, 50));
    close(e);
}

// A signal that is blocked outside of the call and unblocked inside.
static void masked(int fd) {
    sigset_t none, usr1;
    sigemptyset(&none);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigprocmask(SIG_BLOCK, &usr1, NULL);
    handle(SIGUSR1, t_on_usr1, 0);
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    struct pollfd p = {.fd = fd, .events = POLLIN};
    struct timespec ts = {2, 0};
    fd_set rd;
    FD_ZERO(&rd);
    FD_SET(fd, &rd);
    raise(SIGUSR1);
    line("before %d", t_usr1);
    R(ppoll(&p, 1, &ts, &none));
    raise(SIGUSR1);
    R(pselect(fd + 1, &rd, NULL, NULL, &ts, &none));
    raise(SIGUSR1);
    R(epoll_pwait(e, &ev, 1, 2000, &none));
    raise(SIGUSR1);
    R(epoll_pwait2(e, &ev, 1, &ts, &none));
    line("after %d", t_usr1);
    raise(SIGUSR1);
    R(poll(&p, 1, 10));
    line("blocked %d", t_usr1);
    sigprocmask(SIG_UNBLOCK, &usr1, NULL);
    line("unblocked %d", t_usr1);
    close(e);
}

int main(void) {
    begin(30);
    int s = socket(AF_INET, SOCK_STREAM, 0);
    show("fresh", s);
    close(s);
    struct conn x;
    x.l = listener();
    show("listening", x.l);
    x.c = dial(port_of(x.l));
    wait_for(x.l, POLLIN, 1000);
    show("to be accepted", x.l);
    show("not yet accepted", x.c);
    x.s = accept(x.l, NULL, NULL);
    await_negotiation();
    show("idle", x.c);
    show("idle, server", x.s);
    show("accepted", x.l);
    waits(x.c, x.s);
    waits(x.s, x.c);
    masked(x.c);
    MUST(send(x.s, "abc", 3, 0));
    arrived(x.c, 3);
    show("data", x.c);
    MUST(recv(x.c, buf, 1, 0));
    show("some data left", x.c);
    int three = 3;
    MUST(setsockopt(x.c, SOL_SOCKET, SO_RCVLOWAT, &three, sizeof three));
    show("less than SO_RCVLOWAT", x.c);
    MUST(send(x.s, "d", 1, 0));
    arrived(x.c, 3);
    show("as much as SO_RCVLOWAT", x.c);
    MUST(recv(x.c, buf, 3, 0));
    three = 1;
    MUST(setsockopt(x.c, SOL_SOCKET, SO_RCVLOWAT, &three, sizeof three));
    show("idle again", x.c);

    fcntl(x.c, F_SETFL, O_NONBLOCK);
    long sent = 0, r;
    for (int quiet = 0; quiet < 3;) {
        while ((r = send(x.c, buf, sizeof buf, 0)) > 0) sent += r, quiet = 0;
        ms(30);
        quiet++;
    }
    line("full: %s %d", ename(errno), sent > 100000);
    show("full", x.c);
    show("the other end of full", x.s);
    long got = 0;
    while (got < sent && (r = recv(x.s, buf, sizeof buf, 0)) > 0) got += r;
    line("all of it came: %d", got == sent);
    wait_for(x.c, POLLOUT, 1000);
    show("not full any more", x.c);
    fcntl(x.c, F_SETFL, 0);

    R(shutdown(x.s, SHUT_WR));
    wait_for(x.c, POLLRDHUP, 1000);
    show("the peer ended its direction", x.c);
    show("own direction ended", x.s);
    MUST(send(x.c, "x", 1, 0));
    arrived(x.s, 1);
    show("own direction ended, data", x.s);
    R(shutdown(x.c, SHUT_WR));
    wait_for(x.s, POLLHUP, 1000);
    show("both ended, data left", x.s);
    MUST(recv(x.s, buf, 1, 0));
    wait_for(x.s, POLLHUP, 1000);
    show("both ended", x.s);
    wait_for(x.c, POLLHUP, 1000);
    show("both ended, client", x.c);
    hang_up(x);

    x = connection();
    R(shutdown(x.c, SHUT_RD));
    show("reading given up", x.c);
    show("the peer of that", x.s);
    hang_up(x);

    x = connection();
    R(shutdown(x.c, SHUT_RDWR));
    wait_for(x.s, POLLRDHUP, 1000);
    show("both directions ended by us", x.c);
    show("both directions ended by the peer", x.s);
    hang_up(x);

    x = connection();
    MUST(send(x.s, "unread", 6, 0));
    arrived(x.c, 6);
    close(x.c);
    wait_for(x.s, POLLHUP, 1000);
    show("reset by the peer", x.s);
    R(recv(x.s, buf, 1, 0));
    show("reset and told", x.s);
    R(recv(x.s, buf, 1, 0));
    close(x.s);
    close(x.l);

    x = connection();
    struct linger lg = {1, 0};
    MUST(send(x.s, "sent before", 11, 0));
    arrived(x.c, 11);
    MUST(setsockopt(x.s, SOL_SOCKET, SO_LINGER, &lg, sizeof lg));
    close(x.s);
    wait_for(x.c, POLLHUP, 1000);
    show("reset, data left", x.c);
    R(recv(x.c, buf, 5, 0));
    show("reset, some data left", x.c);
    R(recv(x.c, buf, 20, 0));
    show("reset, data read", x.c);
    R(recv(x.c, buf, 20, 0));
    show("reset, told after the data", x.c);
    close(x.c);
    close(x.l);

    struct pollfd many[5] = {{-1, POLLIN, 9}, {900, POLLIN, 9}, {0, 0, 9}, {-900, POLLOUT, 9}, {x.c, POLLIN, 9}};
    R(poll(many, 5, 0));
    line("%s %s %s %s %s", bits(many[0].revents), bits(many[1].revents), bits(many[2].revents), bits(many[3].revents), bits(many[4].revents));
    line("SIGPIPE %d", pipes());
    return 0;
}
