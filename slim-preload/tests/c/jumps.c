// Waiting calls are left by a jump out of a signal handler, and must leave nothing behind.
#include "t.h"
#include <setjmp.h>

static sigjmp_buf back;
static char much[8 << 20];
static struct conn x;

static void jump(int s UNUSED) { siglongjmp(back, 1); }

static void after(int n) {
    struct itimerval t = {.it_value = {0, n * 1000}};
    setitimer(ITIMER_REAL, &t, NULL);
}

// Runs a call that waits until a handler jumps out of it.
#define LEAVE(e)                                                                                                   \
    do {                                                                                                           \
        if (!sigsetjmp(back, 1)) {                                                                                 \
            after(40);                                                                                             \
            long r_ = (long)(e);                                                                                   \
            after(0);                                                                                              \
            line(#e " = %ld", r_);                                                                                 \
        } else {                                                                                                   \
            line(#e " is left");                                                                                   \
        }                                                                                                          \
    } while (0)

static void deeper(int n) {
    volatile char room[256];
    room[0] = n;
    if (n) return deeper(n - 1);
    ping(x.c, x.s, "deep in the stack");
    (void)room[0];
}

static void receives(void) {
    line("-- calls that wait for bytes");
    char b[8];
    struct iovec v = {b, 8};
    struct pollfd p = {x.s, POLLIN, 0};
    fd_set r;
    struct epoll_event ev = {.events = EPOLLIN};
    int e = MUST(epoll_create1(0));
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.s, &ev));
    static int i;
    for (i = 0; i < 3; i++) {
        LEAVE(read(x.s, b, 8));
        LEAVE(readv(x.s, &v, 1));
        LEAVE(recv(x.s, b, 8, MSG_WAITALL));
        LEAVE(poll(&p, 1, -1));
        FD_ZERO(&r);
        FD_SET(x.s, &r);
        LEAVE(select(x.s + 1, &r, NULL, NULL, NULL));
        LEAVE(epoll_wait(e, &ev, 1, -1));
        ping(x.c, x.s, "goes on");
        deeper(20);
    }
    close(e);
}

// Sends as much as fits without waiting.
static size_t fill_up(void) {
    size_t n = 0;
    ssize_t r;
    fcntl(x.c, F_SETFL, O_NONBLOCK);
    for (int quiet = 0; quiet < 3; quiet++) {
        while ((r = send(x.c, much, sizeof much, 0)) > 0) n += r, quiet = 0;
        ms(20);
    }
    fcntl(x.c, F_SETFL, 0);
    return n;
}

enum { LAST = 1000 };
static char last[LAST];

// Reads up to and including the bytes that are written last.
static void *reader(void *wait) {
    static char b[1 << 16];
    ms(*(int *)wait);
    for (int seen = 0; seen < LAST;) {
        ssize_t n = MUST(recv(x.s, b, sizeof b, 0));
        for (ssize_t i = 0; i < n; i++) seen += b[i] == 'Z';
    }
    return NULL;
}

static void sends(void) {
    line("-- calls that wait for room");
    static int i, wait = 30;
    for (i = 0; i < 3; i++) {
        fill_up();
        LEAVE(write(x.c, much, 1 << 20));
        // Another write waits until there is room, and not for ever.
        pthread_t t;
        sigset_t alarm;
        sigemptyset(&alarm);
        sigaddset(&alarm, SIGALRM);
        pthread_sigmask(SIG_BLOCK, &alarm, NULL);
        pthread_create(&t, NULL, reader, &wait);
        R(write(x.c, last, LAST));
        pthread_join(t, NULL);
        pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
        ping(x.c, x.s, "goes on");
        deeper(20);
    }
}

static volatile ssize_t inner;

static void write_too(int s UNUSED) {
    int saved = errno;
    inner = send(x.c, much, 10, MSG_DONTWAIT);
    errno = saved;
}

static void handlers(void) {
    line("-- a handler writes, too");
    static int wait = 150;
    fill_up();
    sigset_t alarm;
    pthread_t t;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    pthread_create(&t, NULL, reader, &wait);
    pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
    handle(SIGALRM, write_too, SA_RESTART);
    after(40);
    R(write(x.c, last, LAST));
    pthread_join(t, NULL);
    line("in the handler %d", inner == 10 || inner == -1);
    ping(x.c, x.s, "goes on");
}

int main(void) {
    begin(30);
    memset(last, 'Z', LAST);
    x = connection();
    // Limits the bytes in flight and in the buffers.
    int size = 100000;
    MUST(setsockopt(x.c, SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    MUST(setsockopt(x.s, SOL_SOCKET, SO_RCVBUF, &size, sizeof size));
    handle(SIGALRM, jump, 0);
    receives();
    sends();
    handlers();
    char b[1];
    R(close(x.c));
    R(recv(x.s, b, 1, 0));
    hang_up(x);
    return 0;
}
