// Random sequences of calls on both ends of connections, some of them by system calls that no hook sees: what each call
// gives must be what bare sockets give. One line for each block of sequences, a sum over all results; with a block's
// number as third argument, every call of that block too, with -1 of all.
// Arguments: the first block, and how many.
#include "t.h"
#include "raw.h"

enum { SEQUENCES = 20, STEPS = 14, SLOTS = 6 };

// What a number refers to, as far as it takes to know what to wait for: the network is as fast as it likes.
struct object {
    enum { NONE, TCP, UNIX, PIPE_R, PIPE_W, FILE_ } kind;
    int refs, peer, unread, ended, shut, reset;
};

static struct object objects[64];
static int n_objects, slot_fd[SLOTS], slot_object[SLOTS], verbose;
static uint64_t sum, rng;

static unsigned dice(unsigned n) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (rng >> 11) % n;
}

static void note(const char *what, int slot, long r) {
    int e = r < 0 ? errno : 0;
    if (verbose) line("  %s slot %d (%d) = %ld %s", what, slot, slot < 0 ? -1 : slot_fd[slot], r, e ? ename(e) : "");
    for (const char *p = what; *p; p++) sum = (sum ^ (unsigned char)*p) * 0x100000001b3ull;
    sum = (sum ^ (uint64_t)r) * 0x100000001b3ull;
    sum = (sum ^ (uint64_t)e) * 0x100000001b3ull;
}

static int object(int kind) {
    objects[n_objects] = (struct object){.kind = kind, .peer = -1};
    return n_objects++;
}

static int put(int fd, int o) {
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] < 0) {
            slot_fd[i] = fd;
            slot_object[i] = o;
            objects[o].refs++;
            return i;
        }
    _exit(91);
}

static int free_slots(void) {
    int n = 0;
    for (int i = 0; i < SLOTS; i++) n += slot_fd[i] < 0;
    return n;
}

// Until the kernel shows it.
static void until(int fd, short events) {
    wait_for(fd, events, 3000);
}

// A call that does not wait is told to come again as long as the library does not know what an end means.
static int again(const struct object *o, int fd, long r, short events, double since) {
    if (r >= 0 || errno != EAGAIN || o->kind != TCP || now_s() > since + 3) return 0;
    wait_for(fd, events, 100);
    return 1;
}

// The other end learns of it.
static void end_of(int o) {
    struct object *me = &objects[o];
    if (me->peer < 0) return;
    struct object *other = &objects[me->peer];
    if (me->kind == TCP && (me->unread || me->reset)) other->reset = 1;
    other->ended = 1;
}

static void drop(int slot) {
    struct object *o = &objects[slot_object[slot]];
    slot_fd[slot] = -1;
    if (--o->refs == 0) end_of(slot_object[slot]);
}

// Three ways to make a call. The last is not for what gives out a number, for that may be one that the library is just
// using; nor for bytes of connections, and for copies of their numbers: what those move has to be counted.
#define BY(nr, libc_call, ...) BY_ONE_OF(3, nr, libc_call, __VA_ARGS__)
#define MAKE(nr, libc_call, ...) BY_ONE_OF(2, nr, libc_call, __VA_ARGS__)
#define BY_SEEN(o, nr, libc_call, ...) BY_ONE_OF((o)->kind == TCP ? 2 : 3, nr, libc_call, __VA_ARGS__)
#define BY_ONE_OF(ways, nr, libc_call, ...)                                                                        \
    ({                                                                                                             \
        long r_;                                                                                                   \
        switch (dice(ways)) {                                                                                      \
        case 0: r_ = (libc_call); break;                                                                           \
        case 1: r_ = syscall(nr, __VA_ARGS__); break;                                                              \
        default: r_ = raw(nr, __VA_ARGS__);                                                                        \
        }                                                                                                          \
        r_;                                                                                                        \
    })

static int pick(void) {
    int used[SLOTS], n = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) used[n++] = i;
    return n ? used[dice(n)] : -1;
}

static void step(void) {
    static char buf[4096];
    int s = pick();
    unsigned what = dice(100);
    if (s < 0 && what >= 22) return;
    struct object *o = s < 0 ? NULL : &objects[slot_object[s]];
    int fd = s < 0 ? -1 : slot_fd[s];
    struct object *peer = o && o->peer >= 0 ? &objects[o->peer] : NULL;
    // The number that the kernel gives next is the one that was closed last, or lower: it is used again at once.
    if (what < 6) {
        if (!free_slots()) return;
        int f = MAKE(SYS_memfd_create, memfd_create("sequences", 0), "sequences", 0);
        note("memfd_create", put(f, object(FILE_)), f);
    } else if (what < 12) {
        int p[2];
        if (free_slots() < 2) return;
        note("pipe", -1, MAKE(SYS_pipe2, pipe2(p, O_NONBLOCK), p, O_NONBLOCK));
        int r = object(PIPE_R), w = object(PIPE_W);
        objects[r].peer = w;
        objects[w].peer = r;
        note("reads", put(p[0], r), p[0]);
        note("writes", put(p[1], w), p[1]);
    } else if (what < 18) {
        int p[2];
        if (free_slots() < 2) return;
        note("socketpair", -1, MAKE(SYS_socketpair, socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p), AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p));
        int a = object(UNIX), b = object(UNIX);
        objects[a].peer = b;
        objects[b].peer = a;
        note("one", put(p[0], a), p[0]);
        note("other", put(p[1], b), p[1]);
    } else if (what < 22) {
        if (s < 0 || !free_slots()) return;
        int d = MAKE(SYS_dup, dup(fd), fd);
        note("dup", put(d, slot_object[s]), d);
    } else if (what < 26) {
        int t = pick();
        if (t == s) return;
        note("dup3", t, BY_SEEN(o, SYS_dup3, dup3(fd, slot_fd[t], 0), fd, slot_fd[t], 0));
        int same = slot_object[t] == slot_object[s], to = slot_fd[t];
        if (!same) {
            drop(t);
            slot_fd[t] = to;
            slot_object[t] = slot_object[s];
            o->refs++;
        }
    } else if (what < 44) {
        note("close", s, BY(SYS_close, close(fd), fd));
        drop(s);
        if (dice(2)) note("close again", -1, MAKE(SYS_close, close(fd), fd));
    } else if (what < 66) {
        size_t n = 1 + dice(50);
        // That the own side has ended comes before that the connection was reset, or after it.
        if (o->shut && o->reset) return;
        // What was written after the peer's end is answered by a reset, which is waited for.
        static const char text[] = "the quick brown fox jumps over the lazy dog, at last";
        long r = BY_SEEN(o, SYS_write, write(fd, text, n), fd, text, n);
        for (double t = now_s(); again(o, fd, r, POLLOUT, t);) r = write(fd, text, n);
        note("write", s, r);
        note("SIGPIPE", -1, pipes());
        if (r > 0 && peer && (o->kind != TCP || !o->reset)) peer->unread += r;
        if (r > 0 && o->kind == TCP && peer && peer->refs == 0) {
            o->reset = 1;
            until(fd, POLLHUP);
        }
    } else if (what < 90) {
        // Only what can be expected is waited for.
        if (o->kind == TCP || o->kind == UNIX || o->kind == PIPE_R) {
            if (o->reset) until(fd, o->kind == TCP ? POLLHUP : POLLIN);
            if (o->unread) for (int i = 0, n = 0; i < 3000 && n < o->unread && ioctl(fd, FIONREAD, &n) == 0 && n < o->unread; i++) ms(1);
            if (o->ended) until(fd, o->kind == TCP ? POLLRDHUP : POLLIN);
        }
        size_t n = 1 + dice(80);
        long r = BY_SEEN(o, SYS_read, read(fd, buf, n), fd, buf, n);
        for (double t = now_s(); (o->ended || o->reset) && again(o, fd, r, POLLIN, t);) r = read(fd, buf, n);
        note("read", s, r);
        if (r > 0) {
            o->unread = o->unread > r ? o->unread - r : 0;
            for (int i = 0; i < r; i++) sum = (sum ^ (unsigned char)buf[i]) * 0x100000001b3ull;
        }
    } else if (what < 94) {
        // Of a connection that was reset it is not known at once whether it is lost, or at its end.
        if (o->reset) return;
        note("shutdown", s, shutdown(fd, SHUT_WR));
        o->shut = 1;
        if (peer && (o->kind == TCP || o->kind == UNIX)) peer->ended = 1;
    } else {
        int v = 0;
        socklen_t n = sizeof v;
        note("SO_TYPE", s, getsockopt(fd, SOL_SOCKET, SO_TYPE, &v, &n));
        note("flags", s, fcntl(fd, F_GETFL) & (O_ACCMODE | O_NONBLOCK));
        struct stat st;
        note("fstat", s, fstat(fd, &st));
        note("kind", s, st.st_mode & S_IFMT);
    }
}

static int l;

static void sequence(int c, int a) {
    n_objects = 0;
    for (int i = 0; i < SLOTS; i++) slot_fd[i] = -1;
    int x = object(TCP), y = object(TCP);
    objects[x].peer = y;
    objects[y].peer = x;
    note("connector", put(c, x), 0);
    note("acceptor", put(a, y), 0);
    for (int i = 0; i < STEPS; i++) step();
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) {
            note("close", i, BY(SYS_close, close(slot_fd[i]), slot_fd[i]));
            slot_fd[i] = -1;
        }
}

int main(int argc, char **argv) {
    begin(600);
    if (argc < 3) return 94;
    int first = atoi(argv[1]), count = atoi(argv[2]), show = argc > 3 ? atoi(argv[3]) : -2;
    l = listener();
    for (int block = first; block < first + count; block++) {
        int c[SEQUENCES], a[SEQUENCES];
        verbose = block == show || show == -1;
        sum = 0xcbf29ce484222325ull;
        rng = t_word(block, 1) | 1;
        for (int i = 0; i < SEQUENCES; i++) {
            c[i] = dial(port_of(l));
            a[i] = MUST(accept(l, NULL, NULL));
            MUST(fcntl(c[i], F_SETFL, O_NONBLOCK));
            MUST(fcntl(a[i], F_SETFL, O_NONBLOCK));
        }
        // Some are used while they still negotiate.
        if (block % 4) settle();
        for (int i = 0; i < SEQUENCES; i++) {
            if (verbose) line("sequence %d", i);
            sequence(c[i], a[i]);
        }
        line("block %d: %016" PRIx64 ", next number %d", block, sum, (int)MUST(dup(1)));
        // The number of the line, and that it is free again.
        close(l + 1);
    }
    return 0;
}
