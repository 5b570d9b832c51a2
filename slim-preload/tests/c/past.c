// Bytes move where the library does not see it, and the connection breaks afterwards. Two programs; the case is in T_ARGS.
// If the streams can no longer be right, both ends must get an error, and never a wrong byte.
#include "t.h"
#include "raw.h"

static int l = -1, fd;
static char b[4096];

static int is(const char *what) { return !strcmp(getenv("T_ARGS"), what); }

static void both_break(void) {
    meet();
    if (is_server() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

// Reads the rest of the stream, which must continue where the application stopped.
static void rest(uint64_t off, uint64_t seed) {
    ssize_t n;
    while ((n = recv(fd, b, sizeof b, 0)) > 0) {
        if (!verify(b, off, n, seed)) return;
        off += n;
    }
    line("%" PRIu64 " bytes, then %s", off, n ? ename(errno) : "the end");
}

// Reads `seen` bytes through the library and then `past` bytes past it.
static void reads(int seen, int past) {
    if (is_server()) {
        fill(b, 0, 1000, 1);
        MUST(full_send(fd, b, 1000));
        acked(fd);
        meet();
    } else {
        meet();
        MUST(full_recv(fd, b, seen));
        if (past) MUST(raw(SYS_read, fd, b, past));
    }
    both_break();
    if (is_server())
        rest(0, 2);
    else
        rest(seen + past, 1);
}

static void writes(int past) {
    if (is_server()) {
        fill(b, 0, 1000, 1);
        MUST(full_send(fd, b, 500));
        if (past) MUST(raw(SYS_write, fd, b + 500, past));
        acked(fd);
        meet();
    } else {
        meet();
        MUST(full_recv(fd, b, 500));
    }
    both_break();
    if (is_server())
        rest(0, 2);
    else
        rest(500, 1);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    fd = pair_up(&l);
    if (is("read")) reads(10, 1);
    if (is("read-all")) reads(999, 1);
    if (is("read-many")) reads(10, 20);
    if (is("write")) writes(1);
    if (is("write-many")) writes(2);
    meet();
    close(fd);
    return 0;
}
