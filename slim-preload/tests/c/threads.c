// Several threads use one connection: both directions at once, two readers, close and cancellation while a thread waits.
#include "t.h"

enum { TOTAL = 100 << 20, PIECE = 60000 };

static struct conn x;
static int good = 1;

struct way {
    int fd;
    uint64_t seed, total;
};

static void *writer(void *p) {
    struct way w = *(struct way *)p;
    char *b = malloc(PIECE);
    for (uint64_t off = 0; off < w.total;) {
        size_t n = 1 + t_word(w.seed, off) % PIECE;
        if (n > w.total - off) n = w.total - off;
        fill(b, off, n, w.seed);
        if (full_send(w.fd, b, n)) {
            line("send: %s", ename(errno));
            good = 0;
            break;
        }
        off += n;
    }
    free(b);
    return NULL;
}

static void *reader(void *p) {
    struct way w = *(struct way *)p;
    char *b = malloc(PIECE);
    uint64_t off = 0;
    while (off < w.total) {
        ssize_t n = recv(w.fd, b, PIECE, 0);
        if (n <= 0) {
            line("recv: %zd %s", n, n ? ename(errno) : "");
            break;
        }
        if (!verify(b, off, n, w.seed)) break;
        off += n;
    }
    if (off != w.total) good = 0;
    free(b);
    return NULL;
}

static void duplex(void) {
    line("-- both directions");
    x = connection();
    pthread_t t[4];
    struct way a = {x.c, 1, TOTAL / 2}, b = {x.s, 1, TOTAL / 2}, c = {x.s, 2, TOTAL / 2}, d = {x.c, 2, TOTAL / 2};
    pthread_create(&t[0], NULL, writer, &a);
    pthread_create(&t[1], NULL, reader, &b);
    pthread_create(&t[2], NULL, writer, &c);
    pthread_create(&t[3], NULL, reader, &d);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    line("good %d", good);
    hang_up(x);
}

static unsigned char seen[1 << 20];
static long counts[2];

// Two threads read consecutive numbers: none may come twice, none may be missing.
static void *half_reader(void *p) {
    long who = (long)p;
    uint32_t n;
    // Each number comes in one segment (MSG_EOR), so the kernel's socket lock gives all of it to one reader.
    while (recv(x.s, &n, sizeof n, MSG_WAITALL) == sizeof n) {
        __atomic_add_fetch(&seen[n], 1, __ATOMIC_RELAXED);
        counts[who]++;
    }
    return NULL;
}

static void two_readers(void) {
    line("-- two readers");
    x = connection();
    pthread_t t[2];
    for (long i = 0; i < 2; i++) pthread_create(&t[i], NULL, half_reader, (void *)i);
    for (uint32_t i = 0; i < 30000; i++) MUST(send(x.c, &i, sizeof i, MSG_EOR));
    shutdown(x.c, SHUT_WR);
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    int once = 0;
    for (int i = 0; i < 30000; i++) once += seen[i] == 1;
    line("once %d, all %ld", once, counts[0] + counts[1]);
    hang_up(x);
}

static void *half_writer(void *p) {
    char b[512];
    memset(b, (int)(long)p, sizeof b);
    for (int i = 0; i < 4000; i++)
        if (send(x.c, b, sizeof b, 0) != sizeof b) line("short send");
    return NULL;
}

static void two_writers(void) {
    line("-- two writers");
    x = connection();
    pthread_t t[2];
    pthread_create(&t[0], NULL, half_writer, (void *)'A');
    pthread_create(&t[1], NULL, half_writer, (void *)'B');
    long n[2] = {0, 0}, r;
    static char b[1 << 16];
    while (n[0] + n[1] < 2 * 4000 * 512 && (r = recv(x.s, b, sizeof b, 0)) > 0)
        for (long i = 0; i < r; i++) n[b[i] == 'B']++;
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    line("%ld %ld", n[0], n[1]);
    hang_up(x);
}

static void *in_recv(void *p UNUSED) {
    char b[64];
    R(recv(x.c, b, sizeof b, 0));
    return NULL;
}
static void *in_send(void *p UNUSED) {
    static char b[1 << 20];
    ssize_t r;
    do r = send(x.c, b, sizeof b, MSG_NOSIGNAL);
    while (r > 0);
    line("send: %s", ename(errno));
    return NULL;
}
static void *in_accept(void *p UNUSED) {
    accept(x.l, NULL, NULL);
    return NULL;
}
static void *in_poll(void *p UNUSED) {
    struct pollfd f = {.fd = x.c, .events = POLLIN};
    R(poll(&f, 1, 5000));
    line("%s", bits(f.revents));
    return NULL;
}
static void *in_select(void *p UNUSED) {
    fd_set s;
    FD_ZERO(&s);
    FD_SET(x.c, &s);
    select(x.c + 1, &s, NULL, NULL, NULL);
    return NULL;
}
static int e;
static void *in_epoll(void *p UNUSED) {
    struct epoll_event ev;
    epoll_wait(e, &ev, 1, 5000);
    return NULL;
}

static pthread_t started(void *(*f)(void *)) {
    pthread_t t;
    pthread_create(&t, NULL, f, NULL);
    ms(40);
    return t;
}

static void under_a_waiter(void) {
    pthread_t t;
    line("-- close while a thread is in recv: it still gets what comes");
    x = connection();
    t = started(in_recv);
    R(close(x.c));
    ms(20);
    line("the peer sees %s", bits(wait_for(x.s, POLLRDHUP, 0)));
    MUST(send(x.s, "five!", 5, 0));
    pthread_join(t, NULL);
    line("the peer sees %s", bits(wait_for(x.s, POLLRDHUP, 1000)));
    close(x.s);
    close(x.l);

    line("-- shutdown while a thread is in recv");
    x = connection();
    t = started(in_recv);
    MUST(shutdown(x.c, SHUT_RD));
    pthread_join(t, NULL);
    hang_up(x);
    x = connection();
    t = started(in_recv);
    MUST(shutdown(x.s, SHUT_WR));
    pthread_join(t, NULL);
    hang_up(x);

    line("-- shutdown while a thread is in send");
    x = connection();
    t = started(in_send);
    MUST(shutdown(x.c, SHUT_RDWR));
    pthread_join(t, NULL);
    hang_up(x);

    line("-- shutdown while a thread is in poll");
    x = connection();
    t = started(in_poll);
    MUST(shutdown(x.c, SHUT_RD));
    pthread_join(t, NULL);
    hang_up(x);

    line("-- dup2 while a thread is in recv");
    x = connection();
    t = started(in_recv);
    int null = open("/dev/null", O_RDONLY);
    R(dup2(null, x.c));
    MUST(send(x.s, "six...", 6, 0));
    pthread_join(t, NULL);
    close(null);
    hang_up(x);
}

static void *in_calls_that_do_not_wait(void *p UNUSED) {
    char b;
    for (;;) recv(x.c, &b, 1, MSG_DONTWAIT);
    return NULL;
}

// Must run before any other thread has been cancelled.
static void cancelled_without_waiting(void) {
    line("-- cancelled without waiting");
    x = connection();
    pthread_t t = started(in_calls_that_do_not_wait);
    void *how = NULL;
    pthread_cancel(t);
    pthread_join(t, &how);
    line("cancelled %d", how == PTHREAD_CANCELED);
    ping(x.s, x.c, "goes on");
    hang_up(x);
}

static void cancelled(void) {
    void *(*const ways[])(void *) = {in_recv, in_send, in_accept, in_poll, in_select, in_epoll};
    static char b[1 << 20];
    line("-- cancelled");
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        x = connection();
        e = epoll_create1(0);
        struct epoll_event ev = {.events = EPOLLIN};
        MUST(epoll_ctl(e, EPOLL_CTL_ADD, x.c, &ev));
        pthread_t t = started(ways[i]);
        void *how = NULL;
        pthread_cancel(t);
        pthread_join(t, &how);
        line("way %u cancelled %d", i, how == PTHREAD_CANCELED);
        fcntl(x.s, F_SETFL, O_NONBLOCK);
        long got = 0, r;
        if (i == 1)
            for (int quiet = 0; quiet < 3; quiet++) {
                while ((r = recv(x.s, b, sizeof b, 0)) > 0) got += r, quiet = 0;
                ms(10);
            }
        fcntl(x.s, F_SETFL, 0);
        ping(x.c, x.s, "goes on");
        ping(x.s, x.c, "and back");
        hang_up(x);
        close(e);
    }
}

static void *in_polls_that_do_not_wait(void *p UNUSED) {
    struct pollfd f = {.fd = x.s, .events = POLLIN};
    for (;;) poll(&f, 1, 1);
    return NULL;
}

// A thread that is cancelled at any point of a call must leave nothing behind that another thread waits for. The time limit
// detects such a wait.
static void cancelled_at_any_moment(void) {
    void *(*const ways[])(void *) = {in_send, in_polls_that_do_not_wait};
    static char b[1 << 20];
    line("-- cancelled at any moment");
    for (int i = 0; i < 200; i++) {
        x = connection();
        pthread_t t;
        pthread_create(&t, NULL, ways[i % 2], NULL);
        for (double until = now_s() + i * 5e-6; now_s() < until;) {}
        pthread_cancel(t);
        // Makes room for a send that waits, so that the moment at which there is room varies, too.
        fcntl(x.s, F_SETFL, O_NONBLOCK);
        while (recv(x.s, b, sizeof b, 0) > 0) {}
        pthread_join(t, NULL);
        fcntl(x.c, F_SETFL, O_NONBLOCK);
        send(x.c, "a byte", 1, MSG_NOSIGNAL);
        hang_up(x);
    }
}

static void *churn(void *p UNUSED) {
    for (int i = 0; i < 60; i++) {
        int c = dial(port_of(x.l));
        int32_t v = i, w = -1;
        MUST(full_send(c, &v, sizeof v));
        shutdown(c, SHUT_WR);
        if (full_recv(c, &w, sizeof w) != sizeof w || w != i + 1) line("wrong answer %d to %d", w, i);
        close(c);
    }
    return NULL;
}

static void *serve(void *p UNUSED) {
    int s;
    while ((s = accept(x.l, NULL, NULL)) >= 0) {
        int32_t v = 0;
        if (full_recv(s, &v, sizeof v) != sizeof v) {
            close(s);
            break;
        }
        v++;
        full_send(s, &v, sizeof v);
        close(s);
    }
    return NULL;
}

static void many(void) {
    line("-- threads that connect and close");
    pthread_t t[4], u[2];
    x.l = listener();
    for (int i = 0; i < 2; i++) pthread_create(&u[i], NULL, serve, NULL);
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, churn, NULL);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    for (int i = 0; i < 2; i++) close(dial(port_of(x.l)));
    for (int i = 0; i < 2; i++) pthread_join(u[i], NULL);
    R(close(x.l));
}

int main(void) {
    begin(60);
    duplex();
    two_readers();
    two_writers();
    under_a_waiter();
    cancelled_without_waiting();
    cancelled();
    cancelled_at_any_moment();
    many();
    line("next number %d", (int)MUST(dup(1)));
    line("SIGPIPE %d", pipes());
    return 0;
}
