// Random sequences of calls on both ends of connections, by several threads and processes, some of them by raw system calls
// that no hook sees. Each call must have the result that it has on bare sockets. Prints one line for each block of sequences,
// with a checksum of all results. Arguments: the first block, the number of blocks, and optionally the number of a block whose
// calls are all printed (-1: those of all blocks).
#include "model.h"
#include <semaphore.h>
#include <sys/prctl.h>

enum { SEQUENCES = 20, STEPS = 16 };

static char buf[4096];
static int epoll[2] = {-1, -1}, in_child;

// A child that only keeps descriptors open, and their objects.
static pid_t kept;
static int kept_objects[SLOTS], n_kept;

// ---- numbers ----

// The kernel gives the lowest free number, often the one that was closed last, so the number is reused at once.
static void step_file(void) {
    if (!free_slots()) return;
    int f = MAKE(SYS_memfd_create, memfd_create("sequences", 0), "sequences", 0);
    note("memfd_create", put(f, object(FILE_)), f);
}

static void step_pipe(void) {
    int p[2];
    if (free_slots() < 2) return;
    note("pipe", -1, MAKE(SYS_pipe2, pipe2(p, O_NONBLOCK), p, O_NONBLOCK));
    int r = object(PIPE_R), w = object(PIPE_W);
    m->objects[r].peer = w;
    m->objects[w].peer = r;
    note("reads", put(p[0], r), p[0]);
    note("writes", put(p[1], w), p[1]);
}

static void step_pair(void) {
    int p[2];
    enum { TYPE = SOCK_STREAM | SOCK_NONBLOCK };
    if (free_slots() < 2) return;
    note("socketpair", -1, MAKE(SYS_socketpair, socketpair(AF_UNIX, TYPE, 0, p), AF_UNIX, TYPE, 0, p));
    int a = object(UNIX), b = object(UNIX);
    m->objects[a].peer = b;
    m->objects[b].peer = a;
    note("one", put(p[0], a), p[0]);
    note("other", put(p[1], b), p[1]);
}

static void step_dup(void) {
    int s = pick();
    if (s < 0 || !free_slots()) return;
    int d = MAKE(SYS_dup, dup(slot_fd[s]), slot_fd[s]);
    note("dup", put(d, slot_object[s]), d);
}

// If a registered number is closed while the connection has another, the registration is kept, unless no hook sees the close.
// Then it is lost when the library puts another file under the other number, after a break or a reset. So the registration is
// removed before such a close.
static void unregister(int slot) {
    for (int i = 0; !in_child && i < m->n_registrations; i++) {
        struct registration *r = &m->registrations[i];
        if (!r->live || r->fd != slot_fd[slot] || r->object != slot_object[slot]) continue;
        note("DEL before", slot, epoll_ctl(epoll[0], EPOLL_CTL_DEL, r->fd, NULL));
        r->live = 0;
    }
}

// Whether a hook must see that this process closes its last number of a connection. That is so if the connection was registered
// by another number, which is closed by now (README, system calls that bypass libc).
static int must_be_seen(int slot) {
    int numbers = 0, by_closed = 0;
    for (int i = 0; i < SLOTS; i++) numbers += slot_fd[i] >= 0 && slot_object[i] == slot_object[slot];
    for (int i = 0; i < m->n_registrations; i++) {
        const struct registration *r = &m->registrations[i];
        by_closed |= r->live && r->object == slot_object[slot] && r->fd != slot_fd[slot];
    }
    return numbers == 1 && by_closed && of(slot)->kind == TCP;
}

static void step_dup3(void) {
    int s = pick(), t = pick();
    if (s < 0 || t == s) return;
    struct object *o = of(s), *over = of(t);
    int fd = slot_fd[s], to = slot_fd[t];
    int unseen = o->kind != TCP && dice(3) == 0 && !must_be_seen(t);
    if (unseen && slot_object[t] != slot_object[s] && over->refs > 1) unregister(t);
    note("dup3", t, unseen ? raw(SYS_dup3, fd, to, 0) : MAKE(SYS_dup3, dup3(fd, to, 0), fd, to, 0));
    if (slot_object[t] == slot_object[s]) return;
    drop(t);
    slot_fd[t] = to;
    slot_object[t] = slot_object[s];
    o->refs++;
}

static void step_close(void) {
    int s = pick();
    if (s < 0) return;
    int fd = slot_fd[s], o = slot_object[s];
    int unseen = dice(3) == 0 && !must_be_seen(s);
    if (unseen && m->objects[o].refs > 1) unregister(s);
    note("close", s, unseen ? raw(SYS_close, fd) : MAKE(SYS_close, close(fd), fd));
    drop(s);
    if (dice(2)) note("close again", -1, MAKE(SYS_close, close(fd), fd));
}

// ---- bytes ----

static long write_by(unsigned way, int fd, const void *p, size_t n) {
    struct iovec v[2] = {{(void *)p, n / 2}, {(char *)p + n / 2, n - n / 2}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    switch (way) {
    case 0: return write(fd, p, n);
    case 1: return syscall(SYS_write, fd, p, n);
    case 2: return writev(fd, v, 2);
    case 3: return send(fd, p, n, 0);
    default: return sendmsg(fd, &h, 0);
    }
}

static void write_to(int s, unsigned way, size_t n) {
    static const char text[] = "the quick brown fox jumps over the lazy dog, at last";
    int fd = slot_fd[s];
    struct object *o = of(s), *peer = peer_of(o);
    long r = write_by(way, fd, text, n);
    for (double t = now_s(); again(o, fd, r, POLLOUT, t);) r = write_by(way, fd, text, n);
    note("write", s, r);
    note("SIGPIPE", -1, pipes());
    if (r <= 0) return;
    if (peer && (o->kind != TCP || !o->reset)) {
        peer->unread += r;
        edge(o->peer, EPOLLIN);
    }
    // Bytes written after the peer has closed are answered by a reset. Waits for that reset.
    if (o->kind == TCP && peer->refs == 0) {
        o->reset = 1;
        edge(slot_object[s], EPOLLHUP | EPOLLERR | EPOLLIN);
        until(fd, POLLHUP);
    }
}

static void step_write(void) {
    int s = pick();
    size_t n = 1 + dice(50);
    unsigned way = dice(5);
    // If this side is shut and the connection is reset, either of the two errors may come first.
    if (s < 0 || (of(s)->shut && of(s)->reset)) return;
    write_to(s, of(s)->kind == TCP || of(s)->kind == UNIX ? way : way % 3, n);
}

static long read_by(unsigned way, int fd, size_t n) {
    struct iovec v[2] = {{buf, n / 2}, {buf + n / 2, n - n / 2}};
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 2};
    switch (way) {
    case 0: return read(fd, buf, n);
    case 1: return syscall(SYS_read, fd, buf, n);
    case 2: return readv(fd, v, 2);
    case 3: return recv(fd, buf, n, 0);
    case 4: return recvmsg(fd, &h, 0);
    default: return recv(fd, buf, n, MSG_PEEK);
    }
}

static void took_bytes(struct object *o, long r) {
    o->unread = o->unread > r ? o->unread - r : 0;
}

static void step_read(void) {
    int s = pick();
    size_t n = 1 + dice(80);
    unsigned way = dice(6);
    if (s < 0) return;
    struct object *o = of(s);
    int fd = slot_fd[s];
    if (o->kind != TCP && o->kind != UNIX) way %= 3;
    shows(o, fd);
    long r = read_by(way, fd, n);
    for (double t = now_s(); (o->ended || o->reset || o->unread) && again(o, fd, r, POLLIN, t);) r = read_by(way, fd, n);
    note(way == 5 ? "peek" : "read", s, r);
    if (r <= 0) return;
    if (way != 5) took_bytes(o, r);
    for (int i = 0; i < r; i++) add((unsigned char)buf[i]);
}

// Waits until the peer's kernel has answered the last end of stream. On loopback it does that at once, mostly; on a busy machine it may take a moment. Only
// after that shutdown fails, with ENOTCONN.
static void settle(int fd) {
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    for (double t = now_s(); now_s() < t + 1; ms(1)) {
        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 || info.tcpi_state == TCP_CLOSE) return;
    }
}

static void step_shutdown(void) {
    int s = pick();
    // For a reset connection SLIM does not know at once whether it is broken or at its end.
    if (s < 0 || of(s)->reset) return;
    struct object *o = of(s), *peer = peer_of(o);
    if (o->kind == TCP && o->shut && o->ended) settle(slot_fd[s]);
    note("shutdown", s, shutdown(slot_fd[s], SHUT_WR));
    o->shut = 1;
    if (peer && (o->kind == TCP || o->kind == UNIX)) {
        peer->ended = 1;
        edge(o->peer, EPOLLIN | EPOLLRDHUP);
        if (o->ended) edge(o->peer, EPOLLHUP), edge(slot_object[s], EPOLLHUP);
    }
}

static void step_hard(void) {
    int s = pick();
    if (s < 0 || of(s)->kind != TCP) return;
    struct linger l = {1, 0};
    note("SO_LINGER", s, setsockopt(slot_fd[s], SOL_SOCKET, SO_LINGER, &l, sizeof l));
    of(s)->hard = 1;
}

// ---- looks ----

static void step_look(void) {
    int s = pick(), v = 0;
    if (s < 0) return;
    socklen_t n = sizeof v;
    const struct object *o = of(s);
    note("SO_TYPE", s, getsockopt(slot_fd[s], SOL_SOCKET, SO_TYPE, &v, &n));
    note("flags", s, fcntl(slot_fd[s], F_GETFL) & (O_ACCMODE | O_NONBLOCK));
    struct stat st;
    note("fstat", s, fstat(slot_fd[s], &st));
    note("kind", s, st.st_mode & S_IFMT);
    shows(o, slot_fd[s]);
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in a = {0};
        n = sizeof a;
        long r = i ? getpeername(slot_fd[s], (void *)&a, &n) : getsockname(slot_fd[s], (void *)&a, &n);
        note(i ? "getpeername" : "getsockname", s, r);
        if (!r && o->kind == TCP) note("the same", s, ntohs(a.sin_port) == o->ports[i]);
    }
}

static void step_error(void) {
    int s = pick(), v = 0;
    if (s < 0 || of(s)->kind != TCP || (of(s)->shut && of(s)->reset)) return;
    socklen_t n = sizeof v;
    shows(of(s), slot_fd[s]);
    note("SO_ERROR", s, getsockopt(slot_fd[s], SOL_SOCKET, SO_ERROR, &v, &n));
    note("is", s, v);
}

static void step_poll(void) {
    struct pollfd p[SLOTS];
    int n = 0;
    unsigned way = dice(3);
    all_show();
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) p[n++] = (struct pollfd){.fd = slot_fd[i], .events = POLLIN | POLLOUT | POLLRDHUP | POLLPRI};
    struct timespec none = {0};
    note("poll", -1, way == 0 ? poll(p, n, 0) : way == 1 ? ppoll(p, n, &none, NULL) : syscall(SYS_poll, p, n, 0));
    for (int i = n = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) note_bits("is", i, p[n++].revents);
}

static void step_select(void) {
    fd_set s[3];
    unsigned way = dice(2);
    all_show();
    for (int k = 0; k < 3; k++) {
        FD_ZERO(&s[k]);
        for (int i = 0; i < SLOTS; i++)
            if (slot_fd[i] >= 0) FD_SET(slot_fd[i], &s[k]);
    }
    struct timeval tv = {0};
    struct timespec none = {0};
    note("select", -1, way ? select(60, &s[0], &s[1], &s[2], &tv) : pselect(60, &s[0], &s[1], &s[2], &none, NULL));
    for (int i = 0; i < SLOTS; i++)
        for (int k = 0; k < 3 && slot_fd[i] >= 0; k++) note("is", i, FD_ISSET(slot_fd[i], &s[k]));
}

// ---- epoll ----

static struct registration *registered(int s) {
    for (int i = 0; i < m->n_registrations; i++) {
        struct registration *r = &m->registrations[i];
        if (r->live && r->fd == slot_fd[s] && r->object == slot_object[s]) return r;
    }
    return NULL;
}

static void step_register(void) {
    int s = pick(), op = dice(3) ? EPOLL_CTL_ADD : dice(2) ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    static const unsigned kinds[] = {EPOLLIN, EPOLLOUT, EPOLLIN | EPOLLRDHUP, EPOLLIN | EPOLLOUT | EPOLLRDHUP, EPOLLRDHUP, 0};
    unsigned events = kinds[dice(6)] | (dice(3) ? 0 : EPOLLET) | (dice(3) ? 0 : EPOLLONESHOT);
    int ep = epoll[dice(2)];
    if (s < 0 || in_child || m->n_registrations == REGISTRATIONS) return;
    struct registration *old = registered(s), *r = old ? old : &m->registrations[m->n_registrations];
    struct epoll_event e = {.events = events, .data.u64 = r - m->registrations};
    note("epoll_ctl", s, BY_SEEN(of(s), SYS_epoll_ctl, epoll_ctl(ep, op, slot_fd[s], &e), ep, op, slot_fd[s], &e));
    note_bits("of", s, events);
    if (of(s)->kind == FILE_ || (op == EPOLL_CTL_ADD) == !!old) return;
    if (!old) m->n_registrations++;
    *r = (struct registration){slot_object[s], slot_fd[s], op != EPOLL_CTL_DEL, 1, events, ~0u};
}

// The events that a registration has to report now, of those since its last report.
static unsigned due(const struct registration *r) {
    const struct object *o = &m->objects[r->object];
    unsigned is = 0;
    if (!r->live || !r->armed || o->kind != TCP) return 0;
    if (o->unread || o->ended || o->reset) is |= EPOLLIN;
    if (o->ended || o->reset) is |= EPOLLRDHUP;
    if (o->reset || (o->ended && o->shut)) is |= EPOLLHUP;
    if (!(o->shut && o->reset)) is |= EPOLLOUT;
    return is & r->pending & (r->events | EPOLLHUP);
}

// epoll may report an edge again, so for edges only the events that are due are recorded.
static void step_wait(void) {
    struct epoll_event e[REGISTRATIONS];
    unsigned told[REGISTRATIONS] = {0}, expected[REGISTRATIONS], way = dice(3);
    if (in_child) return;
    all_show();
    for (int i = 0; i < m->n_registrations; i++) expected[i] = due(&m->registrations[i]);
    int waits = 0;
    for (double until = now_s() + 3; now_s() < until; waits = 1) {
        int n = way == 0 ? epoll_wait(epoll[0], e, REGISTRATIONS, waits) : way == 1 ? epoll_pwait(epoll[1], e, REGISTRATIONS, waits, NULL)
              : (int)syscall(SYS_epoll_pwait, epoll[0], e, REGISTRATIONS, waits, NULL, 8L);
        if (n < 0) note("epoll_wait", -1, n);
        for (int i = 0; i < n; i++) {
            struct registration *r = &m->registrations[e[i].data.u64];
            if (r->events & (EPOLLET | EPOLLONESHOT)) told[e[i].data.u64] |= e[i].events;
            else told[e[i].data.u64] = e[i].events;
        }
        int missing = 0;
        for (int i = 0; i < m->n_registrations; i++) missing |= expected[i] & ~told[i];
        if (!missing) break;
    }
    for (int i = 0; i < m->n_registrations; i++) {
        struct registration *r = &m->registrations[i];
        int edges = r->events & EPOLLET && m->objects[r->object].kind == TCP;
        unsigned is = edges ? told[i] & expected[i] : told[i];
        note("registration", -1, i);
        if (verbose) line("  %d (%d)%s reports %s, expected %s", i, r->fd, r->live ? "" : " gone", bits(is), bits(expected[i]));
        add(is);
        if (r->events & EPOLLONESHOT && told[i]) r->armed = 0;
        r->pending &= ~told[i];
    }
}

// ---- processes and threads ----

static void let_go(void) {
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) drop(i);
}

static void step_child(void);
static void step_fork(void) {
    int stays = dice(3) == 0, steps = dice(4);
    if (in_child || (stays && kept)) return;
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) of(i)->refs++;
    n_kept = stays ? 0 : n_kept;
    for (int i = 0; stays && i < SLOTS; i++)
        if (slot_fd[i] >= 0) kept_objects[n_kept++] = slot_object[i];
    pid_t pid = MUST(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        in_child = 1;
        while (stays) raw(SYS_pause);
        for (int i = 0; i < steps; i++) step_child();
        let_go();
        _exit(7);
    }
    if (stays) {
        kept = pid;
        note("child", -1, 0);
        return;
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    note("child", -1, status);
}

static void end_kept(void) {
    if (!kept || in_child) return;
    kill(kept, SIGKILL);
    MUST(waitpid(kept, NULL, 0));
    note("end of the child", -1, 0);
    kept = 0;
    for (int i = 0; i < n_kept; i++) unrefer(kept_objects[i]);
}

struct reader {
    int fd;
    long r, e;
    char got[100];
};

static void *reads(void *p) {
    struct reader *r = p;
    r->r = read(r->fd, r->got, sizeof r->got);
    r->e = errno;
    return NULL;
}

// A thread waits for bytes while the peer writes or ends the stream.
static void step_reader(void) {
    int s = pick(), event = dice(3), nap = dice(3);
    if (s < 0 || in_child || of(s)->kind != TCP) return;
    struct object *o = of(s);
    int t = slot_of(o->peer);
    if (o->unread || o->ended || o->reset || o->shut || t < 0 || peer_of(o)->reset || peer_of(o)->shut) return;
    fcntl(slot_fd[s], F_SETFL, 0);
    struct reader r = {.fd = slot_fd[s]};
    pthread_t thread;
    MUST(-pthread_create(&thread, NULL, reads, &r));
    ms(nap);
    if (event == 2) {
        note("ends", t, shutdown(slot_fd[t], SHUT_WR));
        of(t)->shut = 1;
        o->ended = 1;
        edge(slot_object[s], EPOLLIN | EPOLLRDHUP);
    } else {
        write_to(t, event, 20);
    }
    pthread_join(thread, NULL);
    fcntl(slot_fd[s], F_SETFL, O_NONBLOCK);
    errno = r.e;
    note("reader", s, r.r);
    if (r.r > 0) took_bytes(o, r.r);
    for (int i = 0; i < r.r; i++) add((unsigned char)r.got[i]);
}

// ---- sequences ----

static const struct {
    void (*run)(void);
    int weight, child;
} steps[] = {
    {step_file, 6, 1},     {step_pipe, 4, 1},   {step_pair, 4, 1},  {step_dup, 5, 1},      {step_dup3, 5, 1},
    {step_close, 16, 1},   {step_write, 22, 1}, {step_read, 22, 1}, {step_shutdown, 4, 1}, {step_hard, 2, 1},
    {step_look, 5, 1},     {step_error, 2, 1},  {step_poll, 5, 1},  {step_select, 2, 1},   {step_register, 10, 0},
    {step_wait, 8, 0},     {step_fork, 3, 0},   {end_kept, 2, 0},   {step_reader, 3, 0},
};

static void any_step(int child) {
    int total = 0;
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++) total += steps[i].child >= child ? steps[i].weight : 0;
    int at = dice(total);
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (steps[i].child >= child && (at -= steps[i].weight) < 0) return steps[i].run();
}

static void step_child(void) { any_step(1); }

// A second thread makes some of the calls.
static sem_t go, done;
static void *worker(void *none) {
    for (;;) {
        while (sem_wait(&go)) {}
        any_step(0);
        sem_post(&done);
    }
    return none;
}

static void step(void) {
    if (dice(5)) return any_step(0);
    sem_post(&go);
    while (sem_wait(&done)) {}
}

static void sequence(int c, int a) {
    m->n_objects = m->n_registrations = 0;
    for (int i = 0; i < SLOTS; i++) slot_fd[i] = -1;
    int x = object(TCP), y = object(TCP);
    m->objects[x] = (struct object){.kind = TCP, .peer = y, .ports = {port_of(c), peer_port_of(c)}};
    m->objects[y] = (struct object){.kind = TCP, .peer = x, .ports = {peer_port_of(c), port_of(c)}};
    note("connector", put(c, x), 0);
    note("acceptor", put(a, y), 0);
    for (int i = 0; i < STEPS; i++) step();
    end_kept();
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) {
            note("close", i, MAKE(SYS_close, close(slot_fd[i]), slot_fd[i]));
            slot_fd[i] = -1;
        }
}

int main(int argc, char **argv) {
    begin(600);
    if (argc < 3) return 94;
    int first = atoi(argv[1]), count = atoi(argv[2]), show = argc > 3 ? atoi(argv[3]) : -2;
    m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int l = listener();
    sem_init(&go, 0, 0);
    sem_init(&done, 0, 0);
    pthread_t thread;
    MUST(-pthread_create(&thread, NULL, worker, NULL));
    for (int block = first; block < first + count; block++) {
        int c[SEQUENCES], a[SEQUENCES];
        verbose = block == show || show == -1;
        m->sum = 0xcbf29ce484222325ull;
        m->rng = t_word(block, 1) | 1;
        for (int i = 0; i < SEQUENCES; i++) {
            c[i] = dial(port_of(l));
            a[i] = MUST(accept(l, NULL, NULL));
            MUST(fcntl(c[i], F_SETFL, O_NONBLOCK));
            MUST(fcntl(a[i], F_SETFL, O_NONBLOCK));
        }
        // In every fourth block the connections are used while they still negotiate.
        if (block % 4) await_negotiation();
        epoll[0] = MUST(epoll_create1(0));
        epoll[1] = MUST(fcntl(epoll[0], F_DUPFD, 800));
        for (int i = 0; i < SEQUENCES; i++) {
            if (verbose) line("sequence %d", i);
            sequence(c[i], a[i]);
        }
        close(epoll[0]);
        close(epoll[1]);
        line("block %d: %016" PRIx64 ", next number %d", block, m->sum, (int)MUST(dup(1)));
        // Closes the number of the `dup` in the line above, so that it is free again.
        close(l + 1);
    }
    return 0;
}
