// A dup2 or dup3 that the kernel refuses must not affect the descriptor that it would have replaced: a connection that breaks
// afterwards with bytes in flight, a listener, an epoll instance. Two programs.
#include "t.h"

enum { MUCH = 8 << 20 };

static int l = -1;
static char b[MUCH];

// The kernel refuses a copy for bad flags, or because the number exceeds a limit that was lowered.
static void refused(int fd) {
    R(dup3(0, fd, 0xff00));
    struct rlimit own, low;
    getrlimit(RLIMIT_NOFILE, &own);
    low = own;
    low.rlim_cur = fd;
    setrlimit(RLIMIT_NOFILE, &low);
    line("refused beyond the limit %d %d", dup2(0, fd) < 0 && errno == EBADF, dup3(0, fd, 0) < 0 && errno == EBADF);
    setrlimit(RLIMIT_NOFILE, &own);
}

static void both_break(void) {
    meet();
    if (is_server() && getenv("T_BREAKS") && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

// Each end has bytes in flight when copies are refused.
static void full(void) {
    int fd = pair_up(&l);
    long sent = 0, n;
    fill(b, 0, MUCH, t_role);
    while (sent < MUCH && (n = send(fd, b + sent, MUCH - sent, MSG_DONTWAIT)) > 0) sent += n;
    line("there is more than was taken %d", sent < MUCH);
    refused(fd);
    both_break();
    tell(sent);
    long want = hear();
    uint64_t at = 0;
    while (at < (uint64_t)want && (n = recv(fd, b, want - at, 0)) > 0 && verify(b, at, n, is_server() ? 'c' : 's')) at += n;
    line("missing %ld", want - (long)at);
    meet();
    char m[4] = "", *text = is_server() ? "pong" : "ping";
    line("%d", full_send(fd, text, 4));
    line("%d %.4s", (int)full_recv(fd, m, 4), m);
    R(shutdown(fd, SHUT_WR));
    R(recv(fd, m, 4, 0));
    close(fd);
}

static void others(void) {
    if (is_server()) refused(l);
    int fd = pair_up(&l), epfd = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = 7};
    MUST(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e));
    refused(epfd);
    both_break();
    MUST(full_send(fd, "x", 1));
    memset(&e, 0, sizeof e);
    R(epoll_wait(epfd, &e, 1, 5000));
    line("%s of %d", bits(e.events), (int)e.data.u64);
    meet();
    close(fd);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    full();
    others();
    return 0;
}
