// Signal-driven I/O (O_ASYNC): signals of a connection name the number through which the program has set the flag, also after the
// connection breaks, and while bytes of the broken one are unread. Each line is the same without SLIM, where nothing breaks.
#include "t.h"
#include <sys/mount.h>

static volatile sig_atomic_t right, wrong, of, strangers;

static void on_signal(int s UNUSED, siginfo_t *i, void *c UNUSED) {
    if (i->si_fd == of) right++;
    else wrong++, strangers++;
}

static const char *told(void) {
    for (int i = 0; i < 300 && !right && !wrong; i++) ms(1);
    ms(2);
    const char *s = wrong ? "A WRONG NUMBER" : right ? "told" : "not told";
    right = wrong = 0;
    return s;
}

static int fd;
static int asynchronous(void) { return !!(fcntl(fd, F_GETFL) & O_ASYNC); }

// Sends a byte, which the other end does not read yet. It has arrived when this returns.
static void byte(void) {
    right = wrong = 0;
    meet();
    if (is_server()) {
        MUST(full_send(fd, "x", 1));
        acked(fd);
    }
    meet();
}

static void read_all(int n) {
    char b[100];
    if (!is_server()) line("read %zd", full_recv(fd, b, n));
}

// A byte is unread when the connection breaks.
static void stash(void) {
    byte();
    if (!is_server()) arrived(fd, 1);
    meet();
    if (is_server()) break_if_wanted();
    meet();
    // Both ends have the new connection when this byte has come.
    byte();
    right = wrong = 0;
}

static void tell_line(const char *what) {
    if (!is_server()) line("%s: %s, flag %d", what, told(), asynchronous());
}

static void set_flag(int through, int on) {
    int f = fcntl(through, F_GETFL);
    MUST(fcntl(through, F_SETFL, on ? f | O_ASYNC : f & ~O_ASYNC));
}

static void own(int number) {
    struct sigaction sa = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN, &sa, NULL);
    MUST(fcntl(fd, F_SETOWN, getpid()));
    MUST(fcntl(fd, F_SETSIG, SIGRTMIN));
    of = number;
}

static void unread(void) {
    own(fd);
    set_flag(fd, 1);
    for (int n = 0; n < 5; n++) {
        stash();
        // The connection behind the unread byte breaks, too.
        if (n & 1) stash();
        byte();
        tell_line("behind an unread byte");
        read_all(n & 1 ? 5 : 3);
        byte();
        tell_line("after all is read");
        read_all(1);
    }
}

static void changed(void) {
    own(fd);
    int on = 1, off = 0, e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 7}, got;
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    for (int n = 0; n < 5; n++) {
        stash();
        byte();
        tell_line("without the flag");
        set_flag(fd, 1);
        if (!is_server()) line("epoll %d", epoll_wait(e, &got, 1, 0));
        byte();
        tell_line("set by fcntl");
        MUST(ioctl(fd, FIOASYNC, &off));
        byte();
        tell_line("cleared by ioctl");
        MUST(ioctl(fd, FIOASYNC, &on));
        byte();
        tell_line("set by ioctl");
        set_flag(fd, 0);
        byte();
        tell_line("cleared by fcntl");
        read_all(7);
        MUST(ioctl(fd, FIOASYNC, &on));
        byte();
        tell_line("after all is read");
        set_flag(fd, 0);
        read_all(1);
    }
}

static void second(void) {
    int d = MUST(dup(fd));
    own(d);
    set_flag(d, 1);
    byte();
    tell_line("before");
    read_all(1);
    for (int n = 0; n < 5; n++) {
        stash();
        byte();
        tell_line("behind an unread byte");
        read_all(3);
        byte();
        tell_line("after all is read");
        read_all(1);
    }
    close(d);
}

// The connection breaks while no new one can be made: loopback is down. `unread`: a byte is unread then.
static void away(int unread) {
    if (unread) byte();
    if (!is_server() && unread) arrived(fd, 1);
    meet();
    if (is_server() && atoi(getenv("T_BREAKS"))) {
        if (system("ip link set lo down")) line("loopback cannot be set down");
        break_if_wanted();
    }
    meet();
    char b;
    // This call meets the break.
    ssize_t r = recv(fd, &b, 1, MSG_DONTWAIT | MSG_PEEK);
    if (!is_server()) line("while away: %zd %s", r, r < 0 ? ename(errno) : "");
    right = wrong = 0;
    meet();
}

static void back(void) {
    meet();
    if (is_server() && atoi(getenv("T_BREAKS")) && system("ip link set lo up")) line("loopback cannot be set up");
    byte();
}

static void suspended(void) {
    own(fd);
    int on = 1, off = 0;
    for (int n = 0; n < 8; n++) {
        away(n & 1);
        switch (n / 2) {
        case 0: set_flag(fd, 1); break;
        case 1: MUST(ioctl(fd, FIOASYNC, &on)); break;
        case 2:
            set_flag(fd, 1);
            MUST(ioctl(fd, FIOASYNC, &off));
            break;
        case 3:
            // The number that was set last counts.
            set_flag(fd, 1);
            set_flag(fd, 0);
            set_flag(of = dup(fd), 1);
        }
        if (!is_server()) line("flag %d", asynchronous());
        back();
        byte();
        tell_line("after it");
        read_all(2 + (n & 1));
        byte();
        tell_line("after all is read");
        set_flag(fd, 0);
        read_all(1);
    }
}

// An owner that is set while the connection is away.
static void owners(void) {
    // A signal to this program's own group must not reach the harness.
    setpgid(0, 0);
    set_flag(fd, 1);
    away(0);
    own(fd);
    back();
    byte();
    tell_line("set while away");
    read_all(2);
    away(1);
    MUST(fcntl(fd, F_SETOWN, 0));
    back();
    byte();
    tell_line("cleared while away");
    if (!is_server()) line("owner %d", fcntl(fd, F_GETOWN));
    read_all(3);
    // A group that has ended is not the caller's.
    pid_t child = fork();
    if (!child) {
        setpgid(0, 0);
        pause();
        _exit(0);
    }
    setpgid(child, child);
    MUST(fcntl(fd, F_SETOWN, -child));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    stash();
    byte();
    tell_line("the group has ended");
    read_all(3);
    MUST(fcntl(fd, F_SETOWN, -getpid()));
    stash();
    byte();
    tell_line("a group");
    read_all(3);
    // A thread.
    struct f_owner_ex o = {F_OWNER_TID, gettid()};
    MUST(fcntl(fd, F_SETOWN_EX, &o));
    stash();
    byte();
    tell_line("a thread");
    read_all(3);
}

// As the first process of a PID namespace, whose group has the number 1.
static void begin_first(void) {
    MUST(unshare(CLONE_NEWPID | CLONE_NEWNS));
    pid_t child = MUST(fork());
    if (child) {
        int status;
        MUST(waitpid(child, &status, 0));
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    MUST(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    MUST(mount("proc", "/proc", "proc", 0, NULL));
    MUST(setsid());
}

// The owner is the group 1: processes of other groups get no signals.
static void first_group(void) {
    pid_t other = MUST(fork());
    if (!other) {
        setpgid(0, 0);
        signal(SIGIO, SIG_DFL);
        pause();
        _exit(0);
    }
    setpgid(other, other);
    set_flag(fd, 1);
    for (int i = 0; i < 2; i++) {
        own(fd);
        struct sigaction sa = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
        sigaction(SIGIO, &sa, NULL);
        // Without F_SETSIG a signal does not name the number.
        MUST(fcntl(fd, F_SETSIG, i ? SIGRTMIN : 0));
        MUST(fcntl(fd, F_SETOWN, -getpgrp()));
        line("owner %d", fcntl(fd, F_GETOWN));
        stash();
        byte();
        if (!is_server()) line("told: %d", strcmp(told(), "not told") != 0);
        read_all(3);
        line("the other one: %d", waitpid(other, NULL, WNOHANG));
    }
    strangers = 0;
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
}

// The program has opened all descriptors that it may.
static void full(void) {
    own(fd);
    struct rlimit most = {1000, 1000};
    MUST(setrlimit(RLIMIT_NOFILE, &most));
    for (int n = 0; n < 3; n++) {
        stash();
        // The other program makes a descriptor to break the connection.
        while (!is_server() && dup(0) >= 0) {}
        set_flag(fd, 1);
        byte();
        tell_line("behind an unread byte");
        read_all(3);
        byte();
        tell_line("after all is read");
        set_flag(fd, 0);
        read_all(1);
    }
}

static volatile int asked_enough;
static volatile long nothing;

// Asks whether there is something to read, though that is certain.
static void *asks(void *way) {
    struct timespec now = {0, 0};
    while (!asked_enough) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        struct timeval at_once = {0, 0};
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        int r = 0;
        switch ((long)way) {
        case 0: r = poll(&p, 1, 0); break;
        case 1: r = poll(&p, 1, 3); break;
        case 2: r = ppoll(&p, 1, &now, NULL); break;
        case 3: r = select(fd + 1, &set, NULL, NULL, &at_once); break;
        }
        nothing += r != 1;
    }
    return NULL;
}

// The flag changes while other threads ask for the unread bytes.
static void asked(void) {
    enum { ASKS = 4 };
    own(fd);
    signal(SIGRTMIN, SIG_IGN);
    for (int n = 0; n < 2; n++) {
        stash();
        if (!is_server()) {
            pthread_t threads[ASKS];
            double since = now_s();
            wait_for(fd, POLLIN, 5000);
            asked_enough = 0;
            for (long i = 0; i < ASKS; i++) MUST(-pthread_create(&threads[i], NULL, asks, (void *)i));
            for (int on = 0; now_s() < since + 3;) on = !on, MUST(ioctl(fd, FIOASYNC, &on));
            asked_enough = 1;
            for (int i = 0; i < ASKS; i++) pthread_join(threads[i], NULL);
            line("nothing to read: %ld times", nothing);
        }
        read_all(2);
    }
}

// The program executes itself: signals, and options that it has set, are as before.
static void executed(char **argv) {
    int on = 1;
    if (!getenv("T_AGAIN")) {
        own(fd);
        set_flag(fd, 1);
        MUST(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on));
        signal(SIGRTMIN, SIG_IGN);
        if (atoi(getenv("T_STASHED"))) stash();
        char n[12];
        sprintf(n, "%d", fd);
        setenv("T_AGAIN", n, 1);
        fcntl(t_sync, F_SETFD, 0);
        execv("/proc/self/exe", argv);
        _exit(90);
    }
    fd = of = atoi(getenv("T_AGAIN"));
    struct sigaction sa = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN, &sa, NULL);
    if (atoi(getenv("T_STASHED"))) {
        byte();
        tell_line("behind an unread byte");
        read_all(3);
    }
    for (int n = 0; n < 3; n++) {
        stash();
        byte();
        tell_line("executed");
        read_all(3);
        socklen_t size = sizeof on;
        getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, &size);
        if (!is_server()) line("keepalive %d, owner %d", on, fcntl(fd, F_GETOWN) == getpid());
    }
}

static void *toggles(void *arg UNUSED) {
    for (int on = 0;; on = !on) ioctl(fd, FIOASYNC, &on);
    return NULL;
}

// The client executes itself again and again while another thread changes the flag: unread bytes are not lost.
static void executing(char **argv) {
    enum { TIMES = 30 };
    int n = getenv("T_ROUND") ? atoi(getenv("T_ROUND")) : 0;
    if (is_server()) {
        for (; n < TIMES; n++) stash(), meet();
        return;
    }
    if (n) {
        char c;
        int got = 0;
        fd = atoi(getenv("T_AGAIN"));
        while (got < 2 && wait_for(fd, POLLIN, 5000) && recv(fd, &c, 1, 0) == 1) got++;
        line("read %d", got);
        meet();
    }
    if (n == TIMES) return;
    stash();
    pthread_t t;
    MUST(-pthread_create(&t, NULL, toggles, NULL));
    ms(n % 5);
    char number[12], round[12];
    sprintf(number, "%d", fd);
    sprintf(round, "%d", n + 1);
    setenv("T_AGAIN", number, 1);
    setenv("T_ROUND", round, 1);
    fcntl(t_sync, F_SETFD, 0);
    execv("/proc/self/exe", argv);
    _exit(90);
}

static volatile int ended;

static void *polls(void *arg UNUSED) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (!ended) poll(&p, 1, 20);
    return NULL;
}

// Bytes come, the connection breaks, and the flag changes, at random times.
static void storm(void) {
    unsigned seed = getpid();
    if (is_server()) {
        for (int n = 0; n < 1000; n++) {
            char c = n;
            MUST(full_send(fd, &c, 1));
            if (n % 10 == 9) break_if_wanted();
            if (rand_r(&seed) % 2) ms(rand_r(&seed) % 5);
        }
        return;
    }
    own(fd);
    pthread_t t;
    MUST(-pthread_create(&t, NULL, polls, NULL));
    for (int n = 0; n < 1000; n++) {
        int flag = rand_r(&seed) % 2;
        switch (rand_r(&seed) % 4) {
        case 0: set_flag(fd, flag); break;
        case 1: MUST(ioctl(fd, FIOASYNC, &flag)); break;
        case 2: ms(rand_r(&seed) % 5); break;
        }
        if (!(rand_r(&seed) % 10)) ms(20);
        char c;
        if (full_recv(fd, &c, 1) != 1 || c != (char)n) {
            line("WRONG BYTE %d", n);
            break;
        }
    }
    ended = 1;
    pthread_join(t, NULL);
}

// A connection that the program has closed does not signal, though bytes are still being sent.
static void closed(void) {
    own(fd);
    static char b[1 << 16];
    if (!is_server()) {
        send_till_full(fd, b, sizeof b, 1);
        set_flag(fd, 1);
        close(fd);
        ms(10);
        right = wrong = 0;
    }
    meet();
    if (is_server()) {
        while (recv(fd, b, sizeof b, 0) > 0) {}
        close(fd);
    }
    meet();
    if (!is_server()) line("closed: %s", told());
}

int main(int argc, char **argv) {
    int l = -1;
    const char *what = getenv("T_ARGS");
    if (!strcmp(what, "first_group")) begin_first();
    begin_pair(argc, argv, 60);
    if (!getenv("T_AGAIN")) fd = pair_up(&l);
    if (!strcmp(what, "unread")) unread();
    if (!strcmp(what, "changed")) changed();
    if (!strcmp(what, "second")) second();
    if (!strcmp(what, "suspended")) suspended();
    if (!strcmp(what, "owners")) owners();
    if (!strcmp(what, "first_group")) first_group();
    if (!strcmp(what, "full")) full();
    if (!strcmp(what, "asked")) asked();
    if (!strcmp(what, "executed")) executed(argv);
    if (!strcmp(what, "executing")) executing(argv);
    if (!strcmp(what, "closed")) closed();
    if (!strcmp(what, "storm")) storm();
    line("signals of other numbers: %d", (int)strangers);
    meet();
    return 0;
}
