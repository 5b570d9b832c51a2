// A program has no memory left, so SLIM cannot keep a copy of what it sends. Then the connection breaks, and the program ends.
// The peer must get all bytes, or an error. T_ARGS: the bytes of memory that are left, and how the program ends.
#include "t.h"

static char buf[16384];

static long memory_in_use(void) {
    char b[64] = "";
    int fd = MUST(open("/proc/self/statm", O_RDONLY));
    MUST(read(fd, b, sizeof b - 1));
    close(fd);
    return atol(b) * sysconf(_SC_PAGESIZE);
}

static void client(int fd, long left, const char *how) {
    struct rlimit r = {memory_in_use() + left, RLIM_INFINITY};
    MUST(setrlimit(RLIMIT_AS, &r));
    tell(send_till_full(fd, buf, sizeof buf, 7));
    hear();
    if (!strcmp(how, "close")) close(fd);
    exit(0);
}

static void server(int fd) {
    long sent = hear(), got = 0;
    ssize_t n;
    // This process has the memory that it takes.
    if (MUST(break_connections()) == 0) line("nothing was broken");
    tell(1);
    while ((n = recv(fd, buf, sizeof buf, 0)) > 0 && verify(buf, got, n, 7)) got += n;
    if (n < 0)
        line("an error, which is right");
    else if (n == 0 && got == sent)
        line("all %ld bytes, which is right", got);
    else
        line("EARLY END after %ld of %ld bytes", got, sent);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    long left;
    char how[16];
    if (sscanf(getenv("T_ARGS"), "%ld %15s", &left, how) != 2) return 2;
    int l = -1;
    if (is_server()) {
        l = listener();
        // What the peer's kernel has received would not have to be sent again.
        int small = 4096;
        MUST(setsockopt(l, SOL_SOCKET, SO_RCVBUF, &small, sizeof small));
    }
    int fd = pair_up(&l);
    is_server() ? server(fd) : client(fd, left, how);
    return 0;
}
