// A model of the descriptors that random sequences of calls use. It knows which state the kernel will show, so that a sequence
// can wait for that state, since the network has no fixed speed. It is in shared memory, so that it includes a child's calls.
#pragma once
#include "t.h"
#include "raw.h"

enum { SLOTS = 7, OBJECTS = 64, REGISTRATIONS = 24 };

// The object that a descriptor number refers to.
struct object {
    enum { NONE, TCP, UNIX, PIPE_R, PIPE_W, FILE_ } kind;
    int refs, peer, unread, ended, shut, reset;
    // Whether a close resets the connection; the ports of the connection.
    int hard, ports[2];
};

// A registration with epoll: alive until its file is closed. `pending` has the events that it still has to report.
struct registration {
    int object, fd, live, armed;
    unsigned events, pending;
};

static struct model {
    struct object objects[OBJECTS];
    struct registration registrations[REGISTRATIONS];
    int n_objects, n_registrations;
    uint64_t sum, rng;
} *m;
static int slot_fd[SLOTS], slot_object[SLOTS], verbose;

static unsigned dice(unsigned n) {
    m->rng ^= m->rng << 13;
    m->rng ^= m->rng >> 7;
    m->rng ^= m->rng << 17;
    return (m->rng >> 11) % n;
}

static void add(uint64_t v) { m->sum = (m->sum ^ v) * 0x100000001b3ull; }

static void note(const char *what, int slot, long r) {
    int e = r < 0 ? errno : 0;
    if (verbose) line("  %s slot %d (%d) = %ld %s", what, slot, slot < 0 ? -1 : slot_fd[slot], r, e ? ename(e) : "");
    for (const char *p = what; *p; p++) add((unsigned char)*p);
    add(r);
    add(e);
}

static void note_bits(const char *what, int slot, unsigned events) {
    if (verbose) line("  %s slot %d: %s", what, slot, bits(events));
    add(events);
}

static int object(int kind) {
    m->objects[m->n_objects] = (struct object){.kind = kind, .peer = -1};
    return m->n_objects++;
}

static struct object *peer_of(const struct object *o) { return o->peer >= 0 ? &m->objects[o->peer] : NULL; }

static struct object *of(int slot) { return &m->objects[slot_object[slot]]; }

static int put(int fd, int o) {
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] < 0) {
            slot_fd[i] = fd;
            slot_object[i] = o;
            m->objects[o].refs++;
            return i;
        }
    _exit(91);
}

static int free_slots(void) {
    int n = 0;
    for (int i = 0; i < SLOTS; i++) n += slot_fd[i] < 0;
    return n;
}

static int pick(void) {
    int used[SLOTS], n = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) used[n++] = i;
    return n ? used[dice(n)] : -1;
}

// A slot that refers to the object, or -1.
static int slot_of(int o) {
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0 && slot_object[i] == o) return i;
    return -1;
}

// Ways to make a call. The last one, which no hook sees, is not used for three kinds of calls. Calls that create a descriptor
// might get a number that the library is just using. The library must count the bytes of connections, so calls that move them
// and calls that copy their numbers must be seen. So must registrations of connections with epoll (README, system calls that
// bypass libc).
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

// Notes an event on an object, which its registrations have to report.
static void edge(int o, unsigned events) {
    for (int i = 0; i < m->n_registrations; i++) {
        struct registration *r = &m->registrations[i];
        if (r->live && r->armed && r->object == o) r->pending |= events;
    }
}

// The object is closed for good: notes what the other end will see.
static void end_of(int o) {
    struct object *me = &m->objects[o], *other = peer_of(me);
    for (int i = 0; i < m->n_registrations; i++)
        if (m->registrations[i].object == o) m->registrations[i].live = 0;
    if (!other) return;
    if (me->kind == TCP && (me->unread || me->reset || me->hard)) {
        other->reset = 1;
        edge(me->peer, EPOLLIN | EPOLLHUP | EPOLLERR);
    }
    other->ended = 1;
    edge(me->peer, EPOLLIN | EPOLLRDHUP);
}

static void unrefer(int o) {
    if (--m->objects[o].refs == 0) end_of(o);
}

static void drop(int slot) {
    slot_fd[slot] = -1;
    unrefer(slot_object[slot]);
}

// Waits until the kernel shows these events.
static void until(int fd, short events) { wait_for(fd, events, 3000); }

// Waits for the state that the model expects, and for nothing else.
static void shows(const struct object *o, int fd) {
    if (o->kind != TCP && o->kind != UNIX && o->kind != PIPE_R) return;
    if (o->reset) until(fd, o->kind == TCP ? POLLHUP : POLLIN);
    if (o->unread)
        for (int i = 0, n = 0; i < 3000 && n < o->unread && ioctl(fd, FIONREAD, &n) == 0 && n < o->unread; i++) ms(1);
    if (o->ended) until(fd, o->kind == TCP ? POLLRDHUP : POLLIN);
}

static void all_show(void) {
    for (int i = 0; i < SLOTS; i++)
        if (slot_fd[i] >= 0) shows(of(i), slot_fd[i]);
}

// Whether to repeat a non-blocking call: it returns EAGAIN while the library does not know yet what an end of the stream means.
static int again(const struct object *o, int fd, long r, short events, double since) {
    if (r >= 0 || errno != EAGAIN || o->kind != TCP || now_s() > since + 3) return 0;
    wait_for(fd, events, 100);
    return 1;
}
