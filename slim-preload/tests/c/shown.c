// An end of the stream that was reported to the program stays reported, whatever SLIM finds out about the peer afterwards.
// The program has both ends, and intercepts the library's control messages, so that neither end receives FIN.
#include "says.h"

static char buf[16];

static int seen_by_poll(int fd) { return wait_for(fd, POLLIN | POLLRDHUP, 2000); }

static int seen_by_epoll(int fd) {
    int e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP}, got = {0};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    epoll_wait(e, &got, 1, 2000);
    close(e);
    return got.events;
}

static int seen_by_peek(int fd) { return recv(fd, buf, 1, MSG_PEEK) == 0 ? POLLIN : 0; }

static const struct way {
    const char *name;
    int (*sees)(int);
} ways[] = {{"poll", seen_by_poll}, {"epoll", seen_by_epoll}, {"peek", seen_by_peek}};

// The acceptor's negotiation completes between the two checks.
static void shown(const struct way *way) {
    line("-- %s", way->name);
    t_lost_kinds = 1 << HELLO_DONE | 1 << FIN;
    t_lost[HELLO_DONE] = 0;
    struct conn x = connection();
    // Waits until the connector's flow is live, if the library is loaded.
    for (int i = 0; i < 100 && getenv("LD_PRELOAD") && !t_lost[HELLO_DONE]; i++) ms(1);
    R(shutdown(x.c, SHUT_WR));
    line("the acceptor sees %s", bits(way->sees(x.s)));
    say_kept(HELLO_DONE);
    ms(50);
    R(recv(x.s, buf, 9, MSG_DONTWAIT));
    R(recv(x.s, buf, 9, MSG_DONTWAIT));
    R(send(x.s, "answer", 6, 0));
    memset(buf, 0, sizeof buf);
    R(recv(x.c, buf, 9, 0));
    quote(buf, strlen(buf));
    t_lost_kinds = 0;
    hang_up(x);
}

int main(void) {
    begin(30);
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) shown(&ways[i]);
    return 0;
}
