// A signal handler ends a connection while its own thread is sending on it, at any moment of the send.
#include "t.h"

static struct conn x;
static int null, way;
static volatile int handled;

static void end(int sig UNUSED) {
    int saved = errno;
    if (way == 0) shutdown(x.c, SHUT_WR);
    if (way == 1) close(x.c);
    if (way == 2) shutdown(x.c, SHUT_RDWR);
    if (way == 3) dup2(null, x.c);
    handled = 1;
    errno = saved;
}

// A write that waits for room has sent nothing when its connection is ended. It returns what it returns in a bare run, and
// raises no SIGPIPE.
static void waits(int flags) {
    static char b[1 << 16];
    handle(SIGUSR1, end, flags);
    for (way = 0; way < 4; way++) {
        x = connection();
        while (send(x.c, b, sizeof b, MSG_DONTWAIT) > 0) {}
        handled = 0;
        struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        struct itimerspec once = {{0, 0}, {0, 50000000}};
        timer_t t;
        MUST(timer_create(CLOCK_MONOTONIC, &ev, &t));
        MUST(timer_settime(t, 0, &once, NULL));
        ssize_t r = write(x.c, b, sizeof b);
        line("%d: %zd %s, SIGPIPE %d", way, r, ename(errno), pipes());
        timer_delete(t);
        if (way != 1) close(x.c);
        close(x.s);
        close(x.l);
    }
}

static void *drain(void *p UNUSED) {
    static char b[1 << 16];
    while (recv(x.s, b, sizeof b, 0) > 0) {}
    return NULL;
}

int main(int argc, char **argv UNUSED) {
    static char b[1 << 16];
    enum { TIMES = 80 };
    begin(60);
    null = MUST(open("/dev/null", O_RDONLY));
    if (argc > 1) {
        waits(0);
        waits(SA_RESTART);
        return 0;
    }
    handle(SIGUSR1, end, SA_RESTART);
    sigset_t mine;
    sigemptyset(&mine);
    sigaddset(&mine, SIGUSR1);
    struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_t t;
    MUST(timer_create(CLOCK_MONOTONIC, &ev, &t));
    unsigned seed = 1;
    for (int i = 0; i < TIMES; i++) {
        pthread_t reads;
        x = connection();
        way = i % 4;
        handled = 0;
        pthread_sigmask(SIG_BLOCK, &mine, NULL);
        pthread_create(&reads, NULL, drain, NULL);
        pthread_sigmask(SIG_UNBLOCK, &mine, NULL);
        struct itimerspec once = {{0, 0}, {0, 1 + rand_r(&seed) % 3000000}};
        MUST(timer_settime(t, 0, &once, NULL));
        size_t len = 1 + rand_r(&seed) % (i / 4 % 2 ? 100 : sizeof b);
        while (send(x.c, b, len, MSG_NOSIGNAL) > 0) {}
        if (!handled) line("ended early: %s", ename(errno));
        if (way != 1) close(x.c);
        pthread_join(reads, NULL);
        close(x.s);
        close(x.l);
    }
    line("%d times", TIMES);
    return 0;
}
