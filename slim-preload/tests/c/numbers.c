// A program that opens a descriptor gets the lowest free number, also at every moment of a resume.
#include "t.h"
#include "raw.h"
#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

// The two lowest free numbers.
static int lowest, next, wrong;

static void is(const char *what, int got, int want) {
    if (got != want && wrong++ < 5) line("%s: %d instead of %d", what, got, want);
}

#define TAKE(call)                                                                                                 \
    do {                                                                                                           \
        int fd_ = (call);                                                                                          \
        is(#call, fd_, lowest);                                                                                    \
        close(fd_);                                                                                                \
    } while (0)

// Opens descriptors by functions that call open inside of libc.
static void ask_inside(void) {
    char names[4][32];
    for (int i = 0; i < 4; i++) strcpy(names[i], i % 2 ? "/tmp/slim-numbers-XXXXXX.tmp" : "/tmp/slim-numbers-XXXXXX");
    TAKE(mkstemp(names[0]));
    TAKE(mkstemps(names[1], 4));
    TAKE(mkostemp(names[2], O_CLOEXEC));
    TAKE(mkostemps(names[3], 4, O_CLOEXEC));
    for (int i = 0; i < 4; i++) unlink(names[i]);
    char shared[32];
    sprintf(shared, "/slim-numbers-%d", getpid());
    TAKE(shm_open(shared, O_RDWR | O_CREAT, 0600));
    shm_unlink(shared);
    TAKE(posix_openpt(O_RDWR | O_NOCTTY));
    FILE *f = tmpfile();
    is("tmpfile", fileno(f), lowest);
    fclose(f);
    DIR *d = opendir("/");
    is("opendir", dirfd(d), lowest);
    closedir(d);
}

// Opens a descriptor in every way, once each.
static void ask(void) {
    sigset_t none;
    sigemptyset(&none);
    TAKE(socket(AF_INET, SOCK_STREAM, 0));
    TAKE(open("/dev/null", O_RDONLY));
    TAKE(openat(AT_FDCWD, "/dev/null", O_RDONLY));
    TAKE(creat("/dev/null", 0600));
    TAKE(dup(1));
    TAKE(fcntl(1, F_DUPFD, 0));
    TAKE(epoll_create(1));
    TAKE(epoll_create1(0));
    TAKE(eventfd(0, 0));
    TAKE(timerfd_create(CLOCK_MONOTONIC, 0));
    TAKE(signalfd(-1, &none, 0));
    TAKE(inotify_init());
    TAKE(memfd_create("numbers", 0));

    int two[2] = {-1, -1};
    MUST(pipe(two));
    is("pipe, reading", two[0], lowest);
    is("pipe, writing", two[1], next);
    close(two[0]);
    close(two[1]);
    MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, two));
    is("socketpair, one", two[0], lowest);
    is("socketpair, other", two[1], next);
    close(two[0]);
    close(two[1]);
    FILE *f = fopen("/dev/null", "r");
    is("fopen", fileno(f), lowest);
    fclose(f);
}

// Closing a free number must do no harm, and a file that is put under it must stay there.
static void overwrite(void) {
    for (int i = 0; i < 10; i++) {
        struct stat here, there;
        is("close of nothing", close(lowest), -1);
        is("dup2", dup2(0, lowest), lowest);
        is("still the same file", fstat(0, &here) == 0 && fstat(lowest, &there) == 0 && here.st_ino == there.st_ino, 1);
        close(lowest);
    }
}

static void connect_and_accept(int l) {
    int c = dial(port_of(l)), s = accept(l, NULL, NULL);
    is("socket to connect", c, lowest);
    is("accept", s, next);
    close(c);
    close(s);
}

int main(void) {
    const char *breaks = getenv("T_BREAKS");
    begin(60);
    struct conn x = connection();
    MUST(fcntl(x.s, F_SETFL, O_NONBLOCK));
    lowest = MUST(dup(1));
    next = MUST(dup(1));
    close(lowest);
    close(next);
    int good = 0;
    for (int i = 0; i < 300; i++) {
        // A raw system call, which no hook sees: the library takes it for an unannounced end of the stream.
        if (breaks) raw(SYS_shutdown, x.s, SHUT_RDWR);
        MUST(full_send(x.c, "ping", 4));
        char m[4] = "";
        for (int got = 0; got < 4;) {
            int r = recv(x.s, m + got, 4 - got, 0);
            if (r == 0 || (r < 0 && errno != EAGAIN)) {
                line("recv = %d %s", r, ename(errno));
                return 1;
            }
            if (r > 0) got += r;
            ask();
            ask_inside();
            overwrite();
        }
        if (i % 10 == 0) connect_and_accept(x.l);
        good += !memcmp(m, "ping", 4);
    }
    line("good %d, wrong numbers %d", good, wrong);
    return 0;
}
