// A process with a broken connection ends, or closes it, while a child that was forked before may have the connection, too. The peer
// must not see an orderly end as long as the child has it. T_ARGS: how the process ends (exit, close), whether the child has closed
// its number (closed), and whether there is no /proc (blind).
#include "t.h"
#include <sys/mount.h>

static int is(const char *word) { return strstr(getenv("T_ARGS"), word) != NULL; }

static void child(int fd, int from) {
    char c;
    if (is("closed")) {
        // The parent does not end before it has delivered its bytes.
        close(fd);
    } else {
        MUST(read(from, &c, 1) == 0 ? 0 : -1);
    }
    ms(300);
    if (!is("closed")) line("child's send = %s", send(fd, "more", 4, MSG_NOSIGNAL) < 0 ? "error" : "sent");
    MUST(system("nft delete table ip t"));
    ms(300);
    tell(1);
    _exit(0);
}

static void client(int fd) {
    int ends[2];
    char c;
    MUST(pipe(ends));
    MUST(full_send(fd, "begun", 5));
    meet();
    if (!MUST(fork())) {
        close(ends[1]);
        child(fd, ends[0]);
    }
    ms(50);
    // Nobody can make a new connection.
    MUST(system("nft 'add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o "
                "tcp flags & (syn|ack) == syn drop'"));
    MUST(full_send(fd, "last", 4));
    MUST(break_connections());
    recv(fd, &c, 1, MSG_DONTWAIT | MSG_PEEK);
    if (is("close")) line("close = %d", close(fd));
    exit(0);
}

static void server(int fd) {
    char buf[64];
    size_t got = 0;
    MUST(full_recv(fd, buf, 5));
    meet();
    hear();
    for (ssize_t n; (n = recv(fd, buf + got, sizeof buf - got, 0)) != 0; got += n)
        if (n < 0) {
            line("an error");
            return;
        }
    line("%zu bytes, and the end", got);
}

// Starts the program anew where /proc is not mounted.
static void without_proc(char **argv) {
    MUST(unshare(CLONE_NEWNS));
    MUST(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    MUST(umount2("/proc", MNT_DETACH));
    MUST(execv(argv[0], argv));
}

int main(int argc, char **argv) {
    if (is("blind") && !access("/proc/self", F_OK)) without_proc(argv);
    begin_pair(argc, argv, 40);
    int l = -1;
    if (is_server()) l = listener();
    int fd = pair_up(&l);
    is_server() ? server(fd) : client(fd);
    return 0;
}
