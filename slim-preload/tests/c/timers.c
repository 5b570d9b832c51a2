// Time limits of sockets, and signals that come while a call waits.
#include "t.h"
#include <stdatomic.h>

static char buf[1 << 20];
static pthread_t main_thread;

static atomic_int interrupted;

// Sends a signal after 60 ms. On a busy machine that may be before the call that it is to interrupt, so further signals follow.
static void *interrupter(void *x) {
    for (int n = 1; !interrupted; n++) {
        ms(10);
        if (n != 6 && n % 50) continue;
        if (x)
            kill(getpid(), SIGUSR1);
        else
            pthread_kill(main_thread, SIGUSR1);
    }
    return NULL;
}

// Starts a thread that sends signals until `over`. With `process` they go to the process instead of this thread.
static pthread_t soon(int process) {
    pthread_t t;
    interrupted = t_usr1 = 0;
    pthread_create(&t, NULL, interrupter, process ? &main_thread : NULL);
    return t;
}

static void over(pthread_t t) {
    interrupted = 1;
    pthread_join(t, NULL);
    line("  %s signal", t_usr1 ? "a" : "no");
}

struct later {
    int fd, ms;
};
static void *talker(void *x) {
    struct later l = *(struct later *)x;
    ms(l.ms);
    MUST(send(l.fd, "later", 5, MSG_NOSIGNAL));
    return NULL;
}

#define INTERRUPTED(call)                                                                                          \
    do {                                                                                                           \
        double t0_ = tick_s();                                                                                      \
        pthread_t t_ = soon(0);                                                                                    \
        R(call);                                                                                                   \
        line("  %s", took(t0_, 60));                                                                               \
        over(t_);                                                                                                  \
    } while (0)

static fd_set *only(int fd) {
    static fd_set s;
    FD_ZERO(&s);
    FD_SET(fd, &s);
    return &s;
}

static void in_full(struct conn x) {
    fcntl(x.c, F_SETFL, O_NONBLOCK);
    for (int quiet = 0; quiet < 3; quiet++) {
        while (send(x.c, buf, sizeof buf, 0) > 0) quiet = 0;
        ms(20);
    }
    fcntl(x.c, F_SETFL, 0);
}

int main(void) {
    begin(40);
    main_thread = pthread_self();
    struct conn x = connection();
    struct iovec v = {buf, 9};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    pthread_t t;
    double t0;

    line("-- SO_RCVTIMEO");
    struct timeval tv = {0, 60000}, none = {0, 0};
    R(setsockopt(x.c, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
    t0 = tick_s();
    R(recv(x.c, buf, 9, 0));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(read(x.c, buf, 9));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(readv(x.c, &v, 1));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(recvmsg(x.c, &m, 0));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(recv(x.c, buf, 9, MSG_PEEK));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(recv(x.c, buf, 9, MSG_DONTWAIT));
    line("%s", took(t0, 0));
    MUST(send(x.s, "abc", 3, 0));
    arrived(x.c, 3);
    t0 = tick_s();
    R(recv(x.c, buf, 9, MSG_WAITALL));
    line("%s", took(t0, 60));
    // A limit that even a busy machine does not reach.
    struct timeval ample = {10, 0};
    MUST(setsockopt(x.c, SOL_SOCKET, SO_RCVTIMEO, &ample, sizeof ample));
    struct later lt = {x.s, 30};
    pthread_create(&t, NULL, talker, &lt);
    R(recv(x.c, buf, 9, 0));
    pthread_join(t, NULL);
    t0 = tick_s();
    R(poll(&(struct pollfd){x.c, POLLIN, 0}, 1, 100));
    line("%s", took(t0, 100));
    R(setsockopt(x.l, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
    t0 = tick_s();
    R(accept(x.l, NULL, NULL));
    line("%s", took(t0, 60));
    R(setsockopt(x.l, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none));
    R(setsockopt(x.c, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none));

    line("-- SO_SNDTIMEO");
    in_full(x);
    R(setsockopt(x.c, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof tv));
    // Fills the buffers: the kernel may still find some room.
    while (send(x.c, buf, sizeof buf, 0) > 0) {}
    t0 = tick_s();
    R(send(x.c, buf, sizeof buf, 0));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(write(x.c, buf, 1000000));
    line("%s", took(t0, 60));
    t0 = tick_s();
    R(send(x.c, buf, 9, MSG_DONTWAIT));
    line("%s", took(t0, 0));
    R(setsockopt(x.c, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none));

    line("-- interrupted, no SA_RESTART");
    handle(SIGUSR1, t_on_usr1, 0);
    INTERRUPTED(send(x.c, buf, sizeof buf, 0));
    INTERRUPTED(writev(x.c, &v, 1));
    hang_up(x);
    x = connection();
    struct pollfd p = {.fd = x.c, .events = POLLIN};
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.c, &ev));
    INTERRUPTED(recv(x.c, buf, 9, 0));
    INTERRUPTED(recv(x.c, buf, 9, MSG_PEEK));
    INTERRUPTED(recv(x.c, buf, 9, MSG_WAITALL));
    INTERRUPTED(read(x.c, buf, 9));
    INTERRUPTED(readv(x.c, &v, 1));
    INTERRUPTED(recvmsg(x.c, &m, 0));
    INTERRUPTED(recvfrom(x.c, buf, 9, 0, NULL, NULL));
    INTERRUPTED(accept(x.l, NULL, NULL));
    INTERRUPTED(accept4(x.l, NULL, NULL, 0));
    INTERRUPTED(poll(&p, 1, 3000));
    INTERRUPTED(ppoll(&p, 1, NULL, NULL));
    INTERRUPTED(select(x.c + 1, only(x.c), NULL, NULL, NULL));
    INTERRUPTED(pselect(x.c + 1, only(x.c), NULL, NULL, NULL, NULL));
    INTERRUPTED(epoll_wait(e, &ev, 1, 3000));
    INTERRUPTED(epoll_pwait(e, &ev, 1, -1, NULL));
    MUST(send(x.s, "abc", 3, 0));
    arrived(x.c, 3);
    INTERRUPTED(recv(x.c, buf, 9, MSG_WAITALL));

    line("-- interrupted, SA_RESTART");
    handle(SIGUSR1, t_on_usr1, SA_RESTART);
    lt.ms = 150;
    for (int i = 0; i < 4; i++) {
        t0 = tick_s();
        pthread_create(&t, NULL, talker, &lt);
        pthread_t u = soon(0);
        if (i == 0) R(recv(x.c, buf, 9, 0));
        if (i == 1) R(read(x.c, buf, 9));
        if (i == 2) R(recvmsg(x.c, &m, 0));
        if (i == 3) R(recv(x.c, buf, 5, MSG_WAITALL));
        line("  %s", took(t0, 150));
        pthread_join(t, NULL);
        over(u);
    }
    INTERRUPTED(poll(&p, 1, 3000));
    INTERRUPTED(epoll_wait(e, &ev, 1, 3000));
    tv.tv_sec = 3;
    R(setsockopt(x.c, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
    INTERRUPTED(recv(x.c, buf, 9, 0));
    R(setsockopt(x.c, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none));

    line("-- a signal to the process finds a thread of the program");
    handle(SIGUSR1, t_on_usr1, 0);
    for (int i = 0; i < 5; i++) {
        sigset_t s, old;
        // The sending thread blocks the signal, so that only the main thread can take it.
        sigemptyset(&s);
        sigaddset(&s, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &s, &old);
        t = soon(1);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        R(recv(x.c, buf, 9, 0));
        over(t);
    }
    line("-- a timer of the process");
    struct itimerspec its = {.it_value = {0, 50000000}, .it_interval = {0, 500000000}}, stop = {0};
    struct sigevent se = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_t id;
    t_usr1 = 0;
    MUST(timer_create(CLOCK_MONOTONIC, &se, &id));
    MUST(timer_settime(id, 0, &its, NULL));
    R(recv(x.c, buf, 9, 0));
    MUST(timer_settime(id, 0, &stop, NULL));
    line("  %s signal", t_usr1 ? "a" : "no");

    line("-- connect interrupted");
    int full = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = v4(0);
    MUST(bind(full, (void *)&a, sizeof a));
    MUST(listen(full, 0));
    a = v4(port_of(full));
    int w = dial(port_of(full)), c = socket(AF_INET, SOCK_STREAM, 0);
    INTERRUPTED(connect(c, (void *)&a, sizeof a));
    R(fcntl(c, F_SETFL, O_NONBLOCK));
    R(connect(c, (void *)&a, sizeof a));
    close(c);
    close(w);
    close(full);
    ping(x.c, x.s, "after all this");
    hang_up(x);
    line("SIGPIPE %d", pipes());
    return 0;
}
