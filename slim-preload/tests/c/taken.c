// While a connection breaks and is resumed, the program puts another file under its descriptor number, where no hook sees it.
// Two programs; T_ARGS says what is put there (file, pair, sink), T_BREAKS whether connections break.
#include "t.h"
#include "raw.h"

enum { ROUNDS = 60, LINES = 12 };

static char buf[4096];

// Bytes written to the number must be in the file, and the number must still be the file.
static int file(int fd, int round) {
    int f = MUST(memfd_create("file", MFD_CLOEXEC)), good = 1;
    usleep(round * 100);
    MUST(raw(SYS_dup3, f, fd, 0));
    for (int i = 0; i < LINES; i++) {
        good &= write(fd, "a line\n", 7) == 7;
        usleep(500);
    }
    struct stat here, there;
    good &= fstat(f, &there) == 0 && fstat(fd, &here) == 0 && here.st_ino == there.st_ino;
    good &= pread(f, buf, sizeof buf, 0) == 7 * LINES;
    close(f);
    return good;
}

// Bytes sent to the number must arrive at the other end of the socket pair.
static int pair(int fd, int round, int sink) {
    int p[2], good = 1;
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p));
    usleep(round * 100);
    MUST(raw(SYS_dup3, p[0], fd, 0));
    close(p[0]);
    if (sink) {
        for (int i = 0; i < LINES; i++) {
            good &= send(fd, "a line\n", 7, 0) == 7;
            usleep(500);
        }
        good &= recv(p[1], buf, sizeof buf, 0) == 7 * LINES;
        close(p[1]);
        return good;
    }
    for (int i = 0; i < LINES; i++) {
        good &= send(fd, "a line\n", 7, 0) == 7;
        good &= wait_for(p[1], POLLIN, 1000) == POLLIN && recv(p[1], buf, sizeof buf, 0) == 7;
        good &= write(p[1], "back", 4) == 4 && wait_for(fd, POLLIN, 1000) == POLLIN && read(fd, buf, sizeof buf) == 4;
        usleep(500);
    }
    close(p[1]);
    good &= recv(fd, buf, 1, 0) == 0;
    return good;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    const char *what = getenv("T_ARGS"), *breaks = getenv("T_BREAKS");
    int good = 0, l = -1;
    for (int round = 0; round < ROUNDS; round++) {
        int fd = pair_up(&l);
        if (is_server()) {
            meet();
            if (breaks && atoi(breaks)) MUST(break_connections());
            ssize_t n = recv(fd, buf, sizeof buf, 0);
            if (n > 0) line("%zd bytes that were never sent", n);
            good += n <= 0;
        } else {
            meet();
            good += !strcmp(what, "file") ? file(fd, round) : pair(fd, round, !strcmp(what, "sink"));
        }
        MUST(close(fd));
        meet();
    }
    line("good %d of %d", good, ROUNDS);
    return 0;
}
