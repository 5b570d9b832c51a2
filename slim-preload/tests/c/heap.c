// A signal handler may interrupt malloc, or run when no memory is left. The calls that it may make must not use the program's
// heap, and must not end the program. The case is the argument; connections break if T_BREAKS is set.
#include "t.h"
#include <sys/syscall.h>

// ---- the program's heap, counted ----

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static __thread const char *inside;
// Set in the program's threads. The only other thread is the agent's. It must not use the program's heap either: it would wait
// for the heap's lock, whose holder may be in a handler that waits for the agent.
static __thread int own;
static volatile int all_own_known;
static volatile int uses;
static const char *volatile first_use;

static void note(void) {
    const char *where = inside ? inside : all_own_known && !own ? "another thread" : NULL;
    if (where && !uses++) first_use = where;
}

void *malloc(size_t n) { return note(), __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return note(), __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return note(), __libc_realloc(p, n); }
void free(void *p) { note(), __libc_free(p); }
void *memalign(size_t a, size_t n) { return note(), __libc_memalign(a, n); }
void *aligned_alloc(size_t a, size_t n) { return note(), __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) { return note(), (*p = __libc_memalign(a, n)) ? 0 : ENOMEM; }

// Runs a call that a handler may make, and records in `inside` that it is under way.
#define SAFE(e)                                                                                                        \
    ({                                                                                                                 \
        inside = #e;                                                                                                   \
        long r_ = (long)(e);                                                                                           \
        inside = NULL;                                                                                                 \
        r_;                                                                                                            \
    })

// Reports any use of the heap inside such calls.
static void used(const char *when) {
    if (uses) line("%s: malloc or free %d times, first in %s", when, uses, first_use);
    uses = 0;
}

static int breaks(void) { return getenv("T_BREAKS") && atoi(getenv("T_BREAKS")); }

static int helper = -1;

// A helper process breaks the connections, because that takes memory.
static void start_helper(void) {
    int sv[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sv));
    if (!MUST(fork())) {
        alarm(0);
        close(sv[0]);
        for (char c; read(sv[1], &c, 1) == 1;) {
            c = break_connections() < 0;
            if (write(sv[1], &c, 1) != 1) break;
        }
        _exit(0);
    }
    close(sv[1]);
    helper = sv[0];
}

static void break_now(void) {
    char failed = 1;
    if (breaks() && (write(helper, "b", 1) != 1 || read(helper, &failed, 1) != 1 || failed)) line("cannot break connections");
}

static unsigned char big[1 << 20], back[1 << 20], peeked[1];

// ---- every call that POSIX lists as safe, and that SLIM hooks ----

// Moves bytes there and back by every call, with lengths from one byte to more than the socket takes at once.
static void move_bytes(int a, int b) {
    static const size_t sizes[] = {1, 100, 3000, 20000, 100000, 400000};
    int fl = fcntl(a, F_GETFL);
    SAFE(fcntl(a, F_SETFL, fl | O_NONBLOCK));
    for (unsigned i = 0; i < 4 * sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i / 4], at = 0, got = 0;
        while (got < n) {
            struct iovec v = {big + at, n - at};
            struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
            ssize_t r = at == n     ? 0
                        : i % 4 == 0 ? SAFE(write(a, big + at, n - at))
                        : i % 4 == 1 ? SAFE(send(a, big + at, n - at, MSG_NOSIGNAL))
                        : i % 4 == 2 ? SAFE(sendto(a, big + at, n - at, 0, NULL, 0))
                                     : SAFE(sendmsg(a, &m, 0));
            if (r > 0) at += r;
            else if (r < 0 && errno != EAGAIN) return line("cannot send: %s", ename(errno));
            struct pollfd p = {b, POLLIN, 0};
            SAFE(poll(&p, 1, 1));
            v = (struct iovec){back + got, at - got};
            r = at == got    ? 0
                : i % 4 == 0 ? SAFE(recv(b, back + got, at - got, MSG_DONTWAIT))
                : i % 4 == 1 ? SAFE(recvfrom(b, back + got, at - got, MSG_DONTWAIT, NULL, NULL))
                : i % 4 == 2 ? SAFE(recvmsg(b, &m, MSG_DONTWAIT))
                : SAFE(poll(&p, 1, 0)) == 1 ? SAFE(read(b, back + got, at - got)) : 0;
            if (r > 0) got += r;
            else if (r < 0 && errno != EAGAIN) return line("cannot receive: %s", ename(errno));
            SAFE(recv(b, peeked, 1, MSG_PEEK | MSG_DONTWAIT));
        }
        if (memcmp(big, back, 1) || memcmp(big + n / 2, back + n / 2, n - n / 2)) return line("wrong bytes");
    }
    SAFE(fcntl(a, F_SETFL, fl));
}

static void look(int fd) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    SAFE(getsockname(fd, (void *)&a, &n));
    n = sizeof a;
    SAFE(getpeername(fd, (void *)&a, &n));
    int v = 1;
    n = sizeof v;
    SAFE(getsockopt(fd, SOL_SOCKET, SO_ERROR, &v, &n));
    v = 1;
    SAFE(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &v, sizeof v));
    SAFE(sockatmark(fd));
    fd_set r, w;
    FD_ZERO(&r);
    FD_ZERO(&w);
    FD_SET(fd, &r);
    FD_SET(fd, &w);
    struct timeval t = {0, 1000};
    struct timespec s = {0, 1000000};
    SAFE(select(fd + 1, &r, &w, NULL, &t));
    FD_ZERO(&w);
    FD_SET(fd, &r);
    SAFE(pselect(fd + 1, &r, &w, NULL, &s, NULL));
    struct pollfd p[2] = {{fd, POLLIN, 0}, {fd, POLLIN | POLLPRI, 0}};
    SAFE(poll(p, 2, 1));
    SAFE(ppoll(p, 2, &s, NULL));
}

static void duplicate(int fd) {
    int one = SAFE(dup(fd)), two = SAFE(fcntl(fd, F_DUPFD_CLOEXEC, 0)), three = SAFE(dup(0));
    SAFE(dup2(one, two));
    SAFE(dup3(fd, three, O_CLOEXEC));
    SAFE(close(three));
    SAFE(close(two));
    SAFE(close(one));
}

// The process has made its first connection before: that one starts the agent, which allocates.
static void connect_and_close(void) {
    int l = SAFE(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in a = v4(0);
    SAFE(bind(l, (void *)&a, sizeof a));
    SAFE(listen(l, 10));
    a = v4(port_of(l));
    int c = SAFE(socket(AF_INET, SOCK_STREAM, 0));
    SAFE(connect(c, (void *)&a, sizeof a));
    int s = SAFE(accept(l, NULL, NULL));
    SAFE(write(c, big, 5000));
    SAFE(read(s, back, 5000));
    await_negotiation();
    SAFE(shutdown(c, SHUT_WR));
    SAFE(read(s, back, 1));
    SAFE(close(c));
    SAFE(close(s));
    SAFE(close(l));
}

static void fork_and_exec(int fd) {
    pid_t p = SAFE(fork());
    if (!p) {
        SAFE(write(fd, "", 0));
        SAFE(execve("/none", (char *[]){NULL}, (char *[]){NULL}));
        _exit(uses ? 1 : 0);
    }
    int how;
    waitpid(p, &how, 0);
    line("the child: %d", how);
    used("a fork and an exec");
}

static void close_many(int fd) {
    int one = 0;
    for (int i = 0; i < 8; i++) one = MUST(dup(fd));
    SAFE(close_range(one - 7, one, 0));
    line("all closed: %d", fcntl(one, F_GETFD) < 0);
    used("a range of numbers");
}

static void *all_calls(void *p UNUSED) {
    own = 1;
    struct conn x = connection();
    uses = 0;
    for (int i = 0; i < (breaks() ? 5 : 1); i++) {
        break_now();
        look(x.c);
        used("while it is away");
        break_now();
        move_bytes(x.c, x.s);
        used("bytes there");
        break_now();
        move_bytes(x.s, x.c);
        used("bytes back");
        break_now();
        duplicate(x.s);
        used("copies");
    }
    connect_and_close();
    used("another connection");
    break_now();
    SAFE(close(x.c));
    SAFE(close(x.s));
    used("closed");
    close(x.l);
    return NULL;
}

static void counted(void) {
    fill(big, 0, sizeof big, 3);
    struct conn x = connection();
    ping(x.c, x.s, "the first");
    own = all_own_known = 1;
    pthread_t t;
    // In two new threads, and below in this thread, which has made calls before.
    for (int i = 0; i < 2; i++) {
        MUST(-pthread_create(&t, NULL, all_calls, NULL));
        pthread_join(t, NULL);
    }
    all_calls(NULL);
    close_many(x.c);
    fork_and_exec(x.c);
    hang_up(x);
}

// ---- a handler that sends while the program does nothing but allocate ----

enum { TOTAL = 12 << 20, TICK_US = 300 };
static int from, to, other;
static volatile uint64_t sent, received;
static volatile int in_vain, ticks, opened, wrong;

static void on_tick(int s UNUSED) {
    int e = errno;
    static unsigned char piece[40000];
    size_t n = 1 + t_word(5, ticks) % (ticks % 8 ? 2000 : sizeof piece);
    if (n > TOTAL - sent) n = TOTAL - sent;
    fill(piece, sent, n, 4);
    ssize_t r = n ? write(from, piece, n) : 0;
    if (r > 0) sent += r;
    else if (r < 0 && errno == EAGAIN) in_vain++;
    else if (r < 0) wrong = errno;
    struct pollfd p = {from, POLLOUT, 0};
    poll(&p, 1, 0);
    if (ticks % 64 == 63) {
        struct sockaddr_in a = v4(other);
        int c = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c, (void *)&a, sizeof a) == 0 && write(c, piece, 100) == 100) opened++;
        close(c);
    }
    ticks++;
    errno = e;
}

static void *reader(void *p UNUSED) {
    static unsigned char b[100000];
    while (received < TOTAL) {
        ssize_t r = recv(to, b, sizeof b, 0);
        if (r < 0 && errno == EINTR) continue;
        if (r <= 0 || !verify(b, received, r, 4)) {
            line("received %" PRIu64 ", then %zd %s", received, r, r < 0 ? ename(errno) : "");
            exit(1);
        }
        received += r;
    }
    return NULL;
}

static void *breaker(void *p UNUSED) {
    while (received < TOTAL) {
        ms(40);
        break_now();
    }
    return NULL;
}

static void *taker(void *l) {
    for (;;) {
        int s = accept((int)(intptr_t)l, NULL, NULL);
        if (s >= 0) close(s);
    }
    return NULL;
}

static void handler(void) {
    struct conn x = connection();
    from = x.c, to = x.s, other = port_of(x.l);
    fcntl(from, F_SETFL, O_NONBLOCK);
    pthread_t r, b, t;
    sigset_t usr2;
    sigemptyset(&usr2);
    sigaddset(&usr2, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &usr2, NULL);
    MUST(-pthread_create(&r, NULL, reader, NULL));
    MUST(-pthread_create(&b, NULL, breaker, NULL));
    MUST(-pthread_create(&t, NULL, taker, (void *)(intptr_t)x.l));
    pthread_sigmask(SIG_UNBLOCK, &usr2, NULL);
    handle(SIGUSR2, on_tick, 0);
    timer_t timer;
    struct sigevent how = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR2};
    how._sigev_un._tid = syscall(SYS_gettid);
    MUST(timer_create(CLOCK_MONOTONIC, &how, &timer));
    struct itimerspec each = {{0, TICK_US * 1000}, {0, TICK_US * 1000}};
    MUST(timer_settime(timer, 0, &each, NULL));
    void *kept[64] = {0};
    for (uint64_t i = 0; received < TOTAL; i++) {
        unsigned at = t_word(6, i) % 64;
        __libc_free(kept[at]);
        kept[at] = __libc_malloc(1 + t_word(7, i) % (i % 16 ? 500 : 70000));
    }
    MUST(timer_delete(timer));
    pthread_join(r, NULL);
    pthread_join(b, NULL);
    line("all received; wrong: %s; others opened: %d", wrong ? ename(wrong) : "nothing", opened > 0);
}

// ---- the first connection of a process, in a handler that may have interrupted malloc ----

static int first_port;

static void on_first(int s UNUSED) {
    struct sockaddr_in a = v4(first_port);
    char b = 0;
    int c = SAFE(socket(AF_INET, SOCK_STREAM, 0));
    int r = SAFE(connect(c, (void *)&a, sizeof a));
    int e = r ? errno : 0;
    ssize_t w = SAFE(write(c, "x", 1)), n = SAFE(read(c, &b, 1));
    int l = SAFE(socket(AF_INET, SOCK_STREAM, 0));
    a = v4(0);
    SAFE(bind(l, (void *)&a, sizeof a));
    int u = SAFE(listen(l, 10));
    SAFE(close(l));
    SAFE(close(c));
    line("connect %d %s, write %zd, read %zd %c, listen %d", r, ename(e), w, n, b, u);
}

// Runs in a process that has no connections yet.
static void first_in_handler(int flags) {
    static unsigned char stack[64 << 10];
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    MUST(sigaltstack(&other, NULL));
    handle(SIGUSR2, on_first, flags);
    raise(SIGUSR2);
    used("the first connection, in a handler");
    struct conn x = connection();
    ping(x.c, x.s, "a later one");
    // This connection is protected: with T_BREAKS it breaks here and is resumed.
    break_now();
    ping(x.c, x.s, "a later one, broken");
    hang_up(x);
}

static void first(void) {
    static const int flags[] = {0, SA_ONSTACK, SA_NODEFER, SA_RESETHAND, SA_SIGINFO | SA_ONSTACK};
    int sv[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sv));
    pid_t server = MUST(fork());
    if (!server) {
        int l = listener(), port = port_of(l);
        MUST(write(sv[1], &port, sizeof port));
        for (;;) {
            char b;
            int s = accept(l, NULL, NULL);
            if (s >= 0 && read(s, &b, 1) == 1 && write(s, &b, 1) != 1) break;
            close(s);
        }
        _exit(1);
    }
    MUST(read(sv[0], &first_port, sizeof first_port));
    for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++) {
        pid_t p = MUST(fork());
        if (!p) {
            first_in_handler(flags[i]);
            fflush(NULL);
            _exit(0);
        }
        int how;
        waitpid(p, &how, 0);
        line("flags %u: %d", i, how);
    }
    kill(server, SIGKILL);
}

// ---- no memory is left ----

enum { MANY = 24 };
static struct conn many[MANY];
static uint64_t out[MANY], in[MANY];
static int over[MANY];

static long status(const char *what) {
    char b[4096];
    int f = open("/proc/self/status", O_RDONLY), n = read(f, b, sizeof b - 1);
    close(f);
    b[n > 0 ? n : 0] = 0;
    char *at = strstr(b, what);
    return at ? atol(at + strlen(what)) << 10 : 0;
}

// Limits the memory of the program to what it has plus `more` bytes.
static void no_more(int which, long more) {
    struct rlimit l;
    getrlimit(which, &l);
    void *p = NULL;
    // Repeated, because another thread may free memory meanwhile, which must not be available either.
    for (int i = 0; i < 50 && p != MAP_FAILED; i++) {
        l.rlim_cur = status(which == RLIMIT_AS ? "VmSize:" : "VmData:") + more;
        MUST(setrlimit(which, &l));
        ms(20);
        p = mmap(NULL, more + (256 << 10), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p != MAP_FAILED) munmap(p, more + (256 << 10));
    }
    line("more memory: %s", p == MAP_FAILED ? "none" : "some");
}

static void enough(int which) {
    struct rlimit l;
    getrlimit(which, &l);
    l.rlim_cur = l.rlim_max;
    MUST(setrlimit(which, &l));
}

// Sends on all connections until they are full, so that each has many bytes in flight.
static void push(void) {
    for (int i = 0; i < MANY; i++) {
        while (!over[i]) {
            fill(big, out[i], 200000, i);
            ssize_t r = send(many[i].c, big, 200000, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (r < 0 && errno != EAGAIN) over[i] = errno;
            if (r <= 0) break;
            out[i] += r;
        }
    }
}

// Reads all that was sent. A failed connection must have delivered the earlier bytes, right and in order.
static void pull(void) {
    for (int i = 0; i < MANY; i++) {
        while (in[i] < out[i]) {
            ssize_t r = recv(many[i].s, back, sizeof back, 0);
            if (r < 0 && errno == EINTR) continue;
            if (r <= 0) {
                over[i] = r ? errno : ENODATA;
                break;
            }
            if (!verify(back, in[i], r, i)) break;
            in[i] += r;
        }
    }
}

static void judge(const char *when) {
    int whole = 0, failed = 0, other = 0;
    for (int i = 0; i < MANY; i++) {
        if (in[i] == out[i] && !over[i]) whole++;
        else if (over[i] == ECONNRESET || over[i] == ECONNABORTED || over[i] == EPIPE || over[i] == ENODATA) failed++;
        else line("connection %d: %" PRIu64 " of %" PRIu64 " bytes, %s", i, in[i], out[i], ename(over[i])), other++;
    }
    line("%s: connections neither whole nor broken: %d", when, other);
    fprintf(stderr, "%s: %d whole, %d failed\n", when, whole, failed);
    line("whole: %d", breaks() ? MANY : whole);
}

static void open_all(void) {
    int l = listener();
    for (int i = 0; i < MANY; i++) {
        many[i] = (struct conn){l, dial(port_of(l)), 0};
        many[i].s = MUST(accept(l, NULL, NULL));
        fcntl(many[i].s, F_SETFL, 0);
        out[i] = in[i] = over[i] = 0;
    }
    await_negotiation();
}

// `more` is the number of bytes that the program may still allocate.
static void scarce(int which, long more) {
    open_all();
    // Uses everything once before memory becomes scarce.
    push();
    pull();
    judge("with memory");
    no_more(which, more);
    push();
    pull();
    judge("without");
    for (int round = 0; round < 4; round++) {
        push();
        break_now();
        push();
        pull();
        judge("broken, without");
    }
    int s = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = v4(port_of(many[0].l));
    MUST(connect(s, (void *)&a, sizeof a));
    int t = MUST(accept(many[0].l, NULL, NULL));
    ping(s, t, "a new one, without");
    enough(which);
    ping(s, t, "with memory again");
    for (int i = 0; i < MANY; i++) close(many[i].c), close(many[i].s);
    int u = dial(port_of(many[0].l)), v = MUST(accept(many[0].l, NULL, NULL));
    ping(u, v, "another one");
}

// ---- unused memory goes back to the system ----

enum { CROWD = 400 };

static void given_back(void) {
    struct conn x = connection(), all[CROWD];
    struct rlimit l;
    getrlimit(RLIMIT_NOFILE, &l);
    l.rlim_cur = l.rlim_max < 8192 ? l.rlim_max : 8192;
    setrlimit(RLIMIT_NOFILE, &l);
    ping(x.c, x.s, "one connection");
    ms(1500);
    long before = status("VmData:"), most = 0, after = 0;
    for (int round = 0; round < 3; round++) {
        int small = 8 << 10, large = 100 << 10;
        MUST(setsockopt(x.l, SOL_SOCKET, SO_RCVBUF, &small, sizeof small));
        for (int i = 0; i < CROWD; i++) {
            all[i].c = MUST(socket(AF_INET, SOCK_STREAM, 0));
            MUST(setsockopt(all[i].c, SOL_SOCKET, SO_SNDBUF, &large, sizeof large));
            struct sockaddr_in a = v4(port_of(x.l));
            MUST(connect(all[i].c, (void *)&a, sizeof a));
            all[i].s = MUST(accept(x.l, NULL, NULL));
        }
        await_negotiation();
        uint64_t sent[CROWD] = {0};
        // The connections take turns, with varying sizes, so that their allocations lie side by side.
        for (int full = 0; full < CROWD;) {
            full = 0;
            for (int i = 0; i < CROWD; i++) {
                size_t n = 1 + t_word(8, sent[i] + i) % 6000;
                fill(big, sent[i], n, i);
                ssize_t r = send(all[i].c, big, n, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (r > 0) sent[i] += r;
                else full++;
            }
        }
        if (status("VmData:") > most) most = status("VmData:");
        for (int i = 0; i < CROWD; i++)
            for (uint64_t got = 0; got < sent[i];) {
                ssize_t r = recv(all[i].s, back, sizeof back, 0);
                if (r <= 0 || !verify(back, got, r, i)) {
                    line("connection %d: %zd %s", i, r, ename(errno));
                    break;
                }
                got += r;
            }
        for (int i = 0; i < CROWD; i++) close(all[i].c), close(all[i].s);
        ms(2500);
        after = status("VmData:");
        fprintf(stderr, "more than before: %ld KiB at most, %ld KiB after\n", (most - before) >> 10, (after - before) >> 10);
    }
    line("given back: %s", after - before <= 13 << 20 ? "yes" : "no");
    ping(x.c, x.s, "that connection");
}

int main(int argc, char **argv) {
    begin(60);
    start_helper();
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "counted")) counted();
    if (!strcmp(what, "handler")) handler();
    if (!strcmp(what, "first")) first();
    if (!strcmp(what, "space")) scarce(RLIMIT_AS, 0);
    if (!strcmp(what, "space-left")) scarce(RLIMIT_AS, 700 << 10);
    if (!strcmp(what, "data")) scarce(RLIMIT_DATA, 0);
    if (!strcmp(what, "given-back")) given_back();
    line("done");
    return 0;
}
