// The program closes descriptor numbers, and reuses them for other files, by system calls of its own: through `syscall`, which
// is hooked, and by raw system calls that no hook sees.
#include "t.h"
#include "raw.h"
#include <linux/io_uring.h>
#include <sys/eventfd.h>

static char buf[256];

static void ends(int fd) {
    line("the peer sees %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
    R(recv(fd, buf, 9, MSG_DONTWAIT));
    R(recv(fd, buf, 9, MSG_DONTWAIT));
}

static long close_seen(int fd) { return syscall(SYS_close, fd); }
static long close_range_seen(int fd) { return syscall(SYS_close_range, fd, fd, 0); }
static long close_unseen(int fd) { return raw(SYS_close, fd); }
static long dup_over_unseen(int fd) {
    int null = open("/dev/null", O_RDWR);
    long r = raw(SYS_dup3, null, fd, 0) == fd ? 0 : -1;
    close(null);
    return r + raw(SYS_close, fd);
}

// Closes through io_uring, or by a raw system call where io_uring is not available.
static long close_by_ring(int fd) {
    struct io_uring_params p = {0};
    int ring = raw(SYS_io_uring_setup, 1, &p);
    if (ring < 0) return raw(SYS_close, fd);
    size_t queues = p.sq_off.array + p.sq_entries * sizeof(unsigned), answers = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    if (answers > queues) queues = answers;
    char *q = mmap(NULL, queues, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *asked = mmap(NULL, sizeof *asked, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    MUST(q == MAP_FAILED || asked == MAP_FAILED || !(p.features & IORING_FEAT_SINGLE_MMAP) ? -1 : 0);
    *asked = (struct io_uring_sqe){.opcode = IORING_OP_CLOSE, .fd = fd};
    *(unsigned *)(q + p.sq_off.array) = 0;
    __atomic_store_n((unsigned *)(q + p.sq_off.tail), 1, __ATOMIC_RELEASE);
    MUST(raw(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0));
    struct io_uring_cqe *answer = (void *)(q + p.cq_off.cqes);
    errno = answer->res < 0 ? -answer->res : 0;
    long r = answer->res < 0 ? -1 : 0;
    munmap(asked, sizeof *asked);
    munmap(q, queues);
    raw(SYS_close, ring);
    return r;
}

static const struct way {
    const char *name;
    long (*close)(int);
} ways[] = {{"syscall(SYS_close)", close_seen}, {"syscall(SYS_close_range)", close_range_seen}, {"unseen", close_unseen}, {"overwritten", dup_over_unseen}, {"io_uring", close_by_ring}};

// Bytes written to a file must be in that file, and nowhere else.
static void is_a_file(int fd) {
    for (int i = 0; i < 3; i++) R(write(fd, "a line\n", 7));
    struct iovec v[2] = {{"two ", 4}, {"parts\n", 6}};
    R(writev(fd, v, 2));
    R(lseek(fd, 0, SEEK_SET));
    memset(buf, 0, sizeof buf);
    R(read(fd, buf, 64));
    quote(buf, strlen(buf));
    R(read(fd, buf, 64));
    R(send(fd, "x", 1, 0));
    R(recv(fd, buf, 1, 0));
    line("poll %s, closes on exec %d", bits(wait_for(fd, POLLIN | POLLOUT, 0)), fcntl(fd, F_GETFD));
    R(fcntl(fd, F_GETFL) & O_ACCMODE);
}

static void is_a_pipe(int r, int w) {
    R(write(w, "through", 7));
    memset(buf, 0, sizeof buf);
    R(read(r, buf, 9));
    quote(buf, strlen(buf));
    fcntl(r, F_SETFL, O_NONBLOCK);
    R(read(r, buf, 9));
    R(close(w));
    R(read(r, buf, 9));
    R(close(r));
}

static void is_a_pair(int a, int b) {
    ping(a, b, "another pair");
    int v = 0;
    socklen_t n = sizeof v;
    R(getsockopt(a, SOL_SOCKET, SO_DOMAIN, &v, &n));
    line("domain %d", v);
    R(shutdown(a, SHUT_WR));
    R(recv(b, buf, 9, 0));
    R(send(b, "back", 4, 0));
    R(recv(a, buf, 9, 0));
    R(close(b));
    R(recv(a, buf, 9, 0));
    R(send(a, "x", 1, MSG_NOSIGNAL));
    R(close(a));
}

// Moves a new descriptor to the number that it should have got, by the same kind of call that opened it. SLIM's thread may
// occupy that number for the microseconds in which it makes a descriptor.
static int moved(int fd, int number, int seen) {
    if (fd < 0 || fd == number) return fd;
    while (raw(SYS_fcntl, number, F_GETFD) >= 0) ms(1);
    MUST(seen ? dup2(fd, number) : raw(SYS_dup3, fd, number, 0));
    MUST(seen ? close(fd) : raw(SYS_close, fd));
    return number;
}

// The same for two numbers. The second descriptor may have got the number that the first should have got.
static void both_moved(int p[2], int number, int seen) {
    if (p[1] == number) {
        p[1] = MUST(seen ? fcntl(number, F_DUPFD, number + 1) : raw(SYS_fcntl, number, F_DUPFD, number + 1));
        MUST(seen ? close(number) : raw(SYS_close, number));
    }
    p[0] = moved(p[0], number, seen);
}

// A connection's number is closed and reused. The new file is opened by libc's call (`seen`) or by a raw system call.
static void reused(const struct way *way, int seen) {
    line("-- %s, then reused %s", way->name, seen ? "by libc's call" : "unseen");
    struct conn x = connection();
    ping(x.c, x.s, "before");
    R(way->close(x.c));
    line("the same number %d", moved(seen ? memfd_create("file", 0) : (int)raw(SYS_memfd_create, "file", 0), x.c, seen) == x.c);
    is_a_file(x.c);
    ends(x.s);
    R(close(x.c));
    R(close(x.s));
    R(close(x.l));

    x = connection();
    R(way->close(x.c));
    int p[2];
    R(seen ? pipe(p) : raw(SYS_pipe2, p, 0));
    both_moved(p, x.c, seen);
    line("%d", p[0] == x.c);
    is_a_pipe(p[0], p[1]);
    ends(x.s);
    R(close(x.s));
    R(close(x.l));

    x = connection();
    R(way->close(x.c));
    R(seen ? socketpair(AF_UNIX, SOCK_STREAM, 0, p) : raw(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, p));
    both_moved(p, x.c, seen);
    line("%d", p[0] == x.c);
    is_a_pair(p[0], p[1]);
    ends(x.s);
    R(close(x.s));
    R(close(x.l));

    x = connection();
    MUST(send(x.s, "unread", 6, 0));
    arrived(x.c, 6);
    R(way->close(x.c));
    int event = moved(seen ? eventfd(0, EFD_NONBLOCK) : (int)raw(SYS_eventfd2, 0, EFD_NONBLOCK), x.c, seen);
    line("%d", event == x.c);
    uint64_t one = 1;
    R(read(event, &one, 8));
    R(write(event, &one, 8));
    R(read(event, &one, 8));
    ends(x.s);
    R(close(event));
    R(close(x.s));
    R(close(x.l));

    // Another connection takes the number, and becomes a flow itself.
    x = connection();
    R(way->close(x.c));
    int again = moved(seen ? socket(AF_INET, SOCK_STREAM, 0) : (int)raw(SYS_socket, AF_INET, SOCK_STREAM, 0), x.c, seen);
    line("%d", again == x.c);
    struct sockaddr_in at = v4(port_of(x.l));
    R(connect(again, (void *)&at, sizeof at));
    int other = R(accept(x.l, NULL, NULL));
    await_negotiation();
    ping(again, other, "the new connection");
    ends(x.s);
    ping(again, other, "still");
    line("its own name %d", peer_port_of(other) == port_of(again));
    R(shutdown(again, SHUT_WR));
    ends(other);
    R(close(again));
    R(close(other));
    R(close(x.s));
    R(close(x.l));
}

// The closed number stays unused.
static void left(const struct way *way) {
    line("-- %s, and left", way->name);
    struct conn x = connection();
    R(way->close(x.c));
    // Waits until SLIM's thread, which works on the new connection, has stopped making descriptors: otherwise it might occupy the
    // closed number, which is the lowest free one.
    ms(60);
    R(send(x.c, "x", 1, 0));
    R(recv(x.c, buf, 1, 0));
    R(read(x.c, buf, 1));
    R(shutdown(x.c, SHUT_RDWR));
    R(getsockname(x.c, (void *)buf, &(socklen_t){sizeof buf}));
    R(close(x.c));
    ends(x.s);
    R(close(x.s));

    // The connection has a copy, which remains usable.
    x.c = dial(port_of(x.l));
    x.s = MUST(accept(x.l, NULL, NULL));
    await_negotiation();
    int d = R(dup(x.c));
    R(way->close(x.c));
    ping(d, x.s, "the copy");
    int null = R(open("/dev/null", O_RDWR));
    R(write(null, "x", 1));
    R(read(null, buf, 1));
    ping(d, x.s, "the copy still");
    R(close(null));
    R(way->close(d));
    ends(x.s);
    R(close(x.s));
    R(close(x.l));
}

static void waits(const struct way *way) {
    line("-- %s, and waited for", way->name);
    struct conn x = connection();
    int e = R(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = x.c}, got;
    R(epoll_ctl(e, EPOLL_CTL_ADD, x.c, &ev));
    R(way->close(x.c));
    int p[2];
    R(raw(SYS_pipe2, p, 0));
    both_moved(p, x.c, 0);
    line("%d", p[0] == x.c);
    R(epoll_ctl(e, EPOLL_CTL_MOD, p[0], &ev));
    R(epoll_ctl(e, EPOLL_CTL_ADD, p[0], &ev));
    R(epoll_wait(e, &got, 1, 0));
    MUST(write(p[1], "x", 1));
    R(epoll_wait(e, &got, 1, 1000));
    line("poll %s", bits(wait_for(p[0], POLLIN, 1000)));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p[0], &set);
    R(select(p[0] + 1, &set, NULL, NULL, &(struct timeval){1, 0}));
    ends(x.s);
    close(p[0]);
    close(p[1]);
    close(e);
    close(x.s);
    close(x.l);
}

static void listeners(const struct way *way) {
    line("-- a listener, %s", way->name);
    int on = 1, l = listener(), port = port_of(l);
    MUST(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    int c = dial(port), s = R(accept(l, NULL, NULL));
    await_negotiation();
    R(way->close(l));
    int null = R(open("/dev/null", O_RDWR));
    line("%d", null == l);
    R(accept(null, NULL, NULL));
    R(close(null));
    ping(c, s, "accepted before");
    struct sockaddr_in a = v4(port);
    l = R(socket(AF_INET, SOCK_STREAM, 0));
    R(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    R(bind(l, (void *)&a, sizeof a));
    R(listen(l, 5));
    int c2 = dial(port), s2 = R(accept(l, NULL, NULL));
    await_negotiation();
    ping(c2, s2, "again on that port");
    close(c2);
    close(s2);
    close(l);
    close(c);
    close(s);
    // Soon the port is also free for UDP, because SLIM has closed its control socket there.
    int u = R(socket(AF_INET, SOCK_DGRAM, 0)), bound = -1;
    for (int i = 0; i < 500 && (bound = bind(u, (void *)&a, sizeof a)) < 0; i++) ms(10);
    line("bound %d", bound);
    R(close(u));
}

static void calls_by_number(void) {
    line("-- all calls by number");
    int l = R(syscall(SYS_socket, AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in a = v4(0);
    R(syscall(SYS_bind, l, &a, sizeof a));
    R(syscall(SYS_listen, l, 5));
    a = v4(port_of(l));
    int c = R(syscall(SYS_socket, AF_INET, SOCK_STREAM, 0));
    R(syscall(SYS_connect, c, &a, sizeof a));
    int s = R(syscall(SYS_accept4, l, NULL, NULL, 0));
    await_negotiation();
    R(syscall(SYS_sendto, c, "hello", 5, 0, NULL, 0));
    memset(buf, 0, sizeof buf);
    R(syscall(SYS_recvfrom, s, buf, 9, 0, NULL, NULL));
    quote(buf, strlen(buf));
    R(syscall(SYS_write, s, "answer", 6));
    R(syscall(SYS_read, c, buf, 9));
    quote(buf, strlen(buf));
    struct pollfd p = {.fd = c, .events = POLLIN | POLLOUT};
    R(syscall(SYS_ppoll, &p, 1, NULL, NULL, 8));
    line("%s", bits(p.revents));
    // The system call counts its time limit down, which libc's functions do not.
    struct timespec limit = {2, 0};
    R(syscall(SYS_ppoll, &p, 1, &limit, NULL, 8));
    line("counted down %d", limit.tv_sec < 2 && limit.tv_nsec > 0);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(c, &set);
    limit = (struct timespec){2, 0};
    sigset_t none;
    sigemptyset(&none);
    struct {
        const void *set;
        size_t size;
    } mask = {&none, 8};
    R(syscall(SYS_pselect6, c + 1, NULL, &set, NULL, &limit, &mask));
    line("%d, counted down %d", FD_ISSET(c, &set), limit.tv_sec < 2 && limit.tv_nsec > 0);
    limit = (struct timespec){0, 20000000};
    R(syscall(SYS_pselect6, c + 1, &set, NULL, NULL, &limit, NULL));
    line("left %ld", limit.tv_nsec);
    mask.size = 4;
    R(syscall(SYS_pselect6, c + 1, NULL, &set, NULL, &limit, &mask));
    R(syscall(SYS_pselect6, c + 1, NULL, &set, NULL, (void *)1, NULL));
    R(syscall(SYS_pselect6, c + 1, NULL, &set, NULL, NULL, (void *)1));
    R(syscall(SYS_select, c + 1, NULL, &set, NULL, (void *)1));
    R(syscall(SYS_ppoll, &p, 1, (void *)1, NULL, 8));
    limit.tv_nsec = -1;
    R(syscall(SYS_pselect6, c + 1, NULL, &set, NULL, &limit, NULL));
    R(syscall(SYS_ppoll, &p, 1, &limit, NULL, 8));
    int made[] = {syscall(SYS_timerfd_create, CLOCK_MONOTONIC, 0), syscall(SYS_signalfd4, -1, &none, 8, 0), syscall(SYS_inotify_init1, 0)};
    line("%d %d %d", made[0] - c, made[1] - c, made[2] - c);
    for (int i = 0; i < 3; i++) R(close(made[i]));
    int e = R(syscall(SYS_epoll_create1, 0));
    struct epoll_event ev = {.events = EPOLLOUT, .data.fd = c}, got;
    R(syscall(SYS_epoll_ctl, e, EPOLL_CTL_ADD, c, &ev));
    R(syscall(SYS_epoll_pwait, e, &got, 1, 100, NULL, 8));
    line("%s", bits(got.events));
    int d = R(syscall(SYS_dup, c));
    R(syscall(SYS_dup3, c, 70, O_CLOEXEC));
    R(syscall(SYS_fcntl, c, F_DUPFD, 71));
    ping(70, s, "dup3");
    ping(71, s, "F_DUPFD");
    R(syscall(SYS_close_range, 70, 71, 0));
    ping(d, s, "dup");
    R(syscall(SYS_shutdown, c, SHUT_WR));
    ends(s);
    R(syscall(SYS_close, d));
    R(syscall(SYS_close, c));
    R(syscall(SYS_close, s));
    R(syscall(SYS_close, l));
    R(syscall(SYS_close, e));
    R(syscall(SYS_close, e));
    R(syscall(SYS_read, -1, buf, 1));
    R(syscall(100000));
    line("%d", syscall(SYS_getpid) == getpid());
}

int main(void) {
    begin(60);
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        reused(&ways[i], 1);
        reused(&ways[i], 0);
        left(&ways[i]);
        waits(&ways[i]);
        listeners(&ways[i]);
    }
    calls_by_number();
    line("next number %d, SIGPIPE %d", (int)MUST(dup(1)), pipes());
    return 0;
}
