// Asynchronous I/O on a connection, through libc and through the kernel's own calls. The connection becomes plain TCP: it
// breaks like a bare one, and all bytes before the break are right. Two programs; the case is in T_ARGS.
#include "t.h"
#include <aio.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>

static int l = -1, fd;

static int is(const char *what) { return !strcmp(getenv("T_ARGS"), what); }

static long done(struct aiocb *a) {
    const struct aiocb *list[] = {a};
    MUST(aio_suspend(list, 1, NULL));
    int e = aio_error(a);
    long n = aio_return(a);
    if (e) errno = e;
    return e ? -1 : n;
}

static long by_kernel(void *buf, unsigned n, int operation) {
    aio_context_t context = 0;
    MUST(syscall(SYS_io_setup, 4, &context));
    struct iocb b = {.aio_fildes = fd, .aio_lio_opcode = operation, .aio_buf = (uintptr_t)buf, .aio_nbytes = n}, *list[] = {&b};
    MUST(syscall(SYS_io_submit, context, 1, list));
    struct io_event e;
    MUST(syscall(SYS_io_getevents, context, 1, 1, &e, NULL));
    MUST(syscall(SYS_io_destroy, context));
    if (e.res >= 0) return e.res;
    errno = -e.res;
    return -1;
}

// One read or write in the way of the case.
static long once(void *buf, unsigned n, int writes) {
    struct aiocb a = {.aio_fildes = fd, .aio_buf = buf, .aio_nbytes = n, .aio_lio_opcode = writes ? LIO_WRITE : LIO_READ}, *list[] = {NULL, &a};
    if (is("kernel")) return by_kernel(buf, n, writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD);
    if (is("list"))
        MUST(lio_listio(LIO_NOWAIT, list, 2, NULL));
    else
        MUST(writes ? aio_write(&a) : aio_read(&a));
    return done(&a);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    fd = pair_up(&l);
    unsigned char b[1000];
    for (int i = 0; i < 5; i++) {
        fill(b, i * 500, 500, 1);
        if (is_server()) {
            R(once(b, 500, 1));
        } else {
            memset(b, 0, sizeof b);
            arrived(fd, 500);
            R(once(b, 500, 0));
            verify(b, i * 500, 500, 1);
        }
    }
    if (is_server()) acked(fd);
    // Time for the peer to hear that the connection is plain TCP.
    ms(50);
    meet();
    const char *breaks = getenv("T_BREAKS");
    if (breaks && atoi(breaks) && is_server() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
    wait_for(fd, POLLIN, 200);
    if (breaks && atoi(breaks)) {
        long n = once(b, 1, is_server());
        line("%ld %s", n, errno == ECONNRESET || errno == ECONNABORTED || errno == EPIPE ? "broken" : ename(errno));
    }
    meet();
    close(fd);
    return 0;
}
