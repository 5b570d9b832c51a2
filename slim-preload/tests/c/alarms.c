// A call that waits for readiness returns when a descriptor is ready, or when its time is over. It must not return because a
// transport was replaced just before the call, or after a handler had left an earlier wait by a jump. Two programs.
#include "t.h"
#include <setjmp.h>

enum { MANY = 4 };
static int fds[MANY];
static sigjmp_buf out;

static void leave(int s UNUSED) { siglongjmp(out, 1); }

static void talk(int fd) {
    char b = 'x';
    if (is_server() && (full_recv(fd, &b, 1) != 1 || full_send(fd, &b, 1))) line("server: %s", ename(errno));
    if (!is_server() && (full_send(fd, &b, 1) || full_recv(fd, &b, 1) != 1)) line("client: %s", ename(errno));
}

static int wait_by(int how, int limit) {
    struct timeval tv = {limit / 1000, limit % 1000 * 1000};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fds[0], &set);
    if (how) return select(fds[0] + 1, &set, NULL, NULL, limit < 0 ? NULL : &tv);
    return poll(&(struct pollfd){fds[0], POLLIN, 0}, 1, limit);
}

static void left_by_a_jump(int how) {
    struct sigevent by = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    timer_t timer;
    MUST(timer_create(CLOCK_MONOTONIC, &by, &timer));
    MUST(timer_settime(timer, 0, &(struct itimerspec){.it_value.tv_nsec = 50000000}, NULL));
    if (!sigsetjmp(out, 1)) line("%d without a jump", wait_by(how, -1));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    handle(SIGUSR2, leave, 0);
    int l = -1, port = 0;
    if (is_server()) tell(port_of(l = listener()));
    else port = hear();
    for (int i = 0; i < MANY; i++) fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
    await_negotiation();
    for (int i = 0; i < MANY; i++) talk(fds[i]);
    for (int round = 0; round < 4; round++) {
        left_by_a_jump(round % 2);
        meet();
        if (is_server() && atoi(getenv("T_BREAKS"))) break_connections();
        meet();
        for (int i = 0; i < MANY; i++) talk(fds[i]);
        meet();
        if (is_server()) {
            ms(100);
            MUST(send(fds[0], "y", 1, 0));
        } else {
            char b;
            R(wait_by(round % 2, round < 2 ? -1 : 20000));
            R(recv(fds[0], &b, 1, 0));
        }
    }
    return 0;
}
