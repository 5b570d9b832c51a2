// Bytes move where no hook sees it (by a raw system call, and through io_uring) on connections that end in order. The programs
// must see these ends as in a bare run. Two programs.
#include "t.h"
#include "raw.h"
#include <linux/io_uring.h>

static int l = -1, ring = -1;
static char b[4096];

// An io_uring for one request at a time.
static struct {
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *requests;
    struct io_uring_cqe *answers;
} r;

static void set_up(void) {
    struct io_uring_params p = {0};
    ring = syscall(SYS_io_uring_setup, 4, &p);
    if (ring < 0) return line("no io_uring: %s", ename(errno));
    char *sq = mmap(NULL, p.sq_off.array + p.sq_entries * sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof *r.answers, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    r.requests = mmap(NULL, p.sq_entries * sizeof *r.requests, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    r.sq_tail = (void *)(sq + p.sq_off.tail), r.sq_mask = (void *)(sq + p.sq_off.ring_mask), r.sq_array = (void *)(sq + p.sq_off.array);
    r.cq_head = (void *)(cq + p.cq_off.head), r.cq_tail = (void *)(cq + p.cq_off.tail), r.cq_mask = (void *)(cq + p.cq_off.ring_mask);
    r.answers = (void *)(cq + p.cq_off.cqes);
}

static long through_ring(int op, int fd, unsigned n) {
    unsigned i = *r.sq_tail & *r.sq_mask;
    r.requests[i] = (struct io_uring_sqe){.opcode = op, .fd = fd, .addr = (uintptr_t)b, .len = n};
    r.sq_array[i] = i;
    __atomic_store_n(r.sq_tail, *r.sq_tail + 1, __ATOMIC_RELEASE);
    MUST(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0));
    while (*r.cq_head == __atomic_load_n(r.cq_tail, __ATOMIC_ACQUIRE)) {}
    long n_moved = r.answers[*r.cq_head & *r.cq_mask].res;
    __atomic_store_n(r.cq_head, *r.cq_head + 1, __ATOMIC_RELEASE);
    return n_moved;
}

enum way { SEEN, BY_NUMBER, BY_RING, WAYS };

static void writes(int fd, enum way way, int n) {
    long w = way == SEEN ? write(fd, b, n) : way == BY_NUMBER ? raw(SYS_write, fd, b, n) : through_ring(IORING_OP_SEND, fd, n);
    if (w != n) line("wrote %ld", w);
}

static void reads(int fd, enum way way, int n) {
    arrived(fd, n);
    long got = way == SEEN ? read(fd, b, n) : way == BY_NUMBER ? raw(SYS_read, fd, b, n) : through_ring(IORING_OP_RECV, fd, n);
    if (got != n) line("read %ld", got);
}

// Both ends move bytes, then the streams end, the server's first. `ending` says how the client notices that.
static void once(enum way server, enum way client, int ending) {
    line("-- %d %d %d", server, client, ending);
    int fd = pair_up(&l);
    enum way way = is_server() ? server : client;
    writes(fd, way, 30);
    reads(fd, way, 30);
    writes(fd, SEEN, 5);
    reads(fd, SEEN, 5);
    acked(fd);
    meet();
    if (is_server()) {
        if (ending == 0) return (void)close(fd), meet();
        R(shutdown(fd, SHUT_WR));
        // The announcement of the end may be late.
        if (ending == 2) ms(20);
    } else {
        if (ending != 1) line("%s", bits(wait_for(fd, POLLIN | POLLRDHUP, 2000)));
        R(recv(fd, b, 9, 0));
        if (ending == 0) return (void)close(fd), meet();
        writes(fd, SEEN, 7);
        R(shutdown(fd, SHUT_WR));
    }
    if (is_server()) {
        R(full_recv(fd, b, 9));
        R(recv(fd, b, 9, 0));
    }
    meet();
    close(fd);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    set_up();
    for (int server = 0; server < (ring < 0 ? BY_RING : WAYS); server++)
        for (int client = 0; client < (ring < 0 ? BY_RING : WAYS); client++)
            for (int ending = 0; ending < 3; ending++) once(server, client, ending);
    line("SIGPIPE %d", pipes());
    return 0;
}
