// Unusual uses of descriptors and processes must not cost a program a connection, nor make it wait for ever. The case is in
// T_ARGS.
#include "t.h"
#include "raw.h"

static char b[4096];
static int is(const char *k) { return !strcmp(getenv("T_ARGS"), k); }

static void talk(int fd, const char *what) {
    for (int i = 0; i < 20; i++) {
        if (is_server()) {
            fill(b, i * sizeof b, sizeof b, 1);
            if (full_send(fd, b, sizeof b)) line("%s: send: %s", what, ename(errno));
        } else if (full_recv(fd, b, sizeof b) != sizeof b || !verify(b, i * sizeof b, sizeof b, 1)) {
            line("%s: %d: %s", what, i, ename(errno));
            return;
        }
    }
    line("%s: all there", what);
}

static void child_is_over(pid_t p) {
    int st = -1;
    MUST(waitpid(p, &st, 0));
    line("child: %d", st);
}

// A child that shares the descriptor table, and nothing else.
static void shares_descriptors(void) {
    pid_t p = MUST(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0));
    if (!p) raw(SYS_exit_group, 0);
    child_is_over(p);
}

// A child that closes all of its descriptors where no hook sees it, and becomes a server.
static void becomes_a_server(void) {
    pid_t p = MUST(fork());
    if (!p) {
        for (int i = 3; i < 5000; i++) raw(SYS_close, i);
        raw(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR, 0);
        int l = listener();
        _exit(l < 0);
    }
    child_is_over(p);
}

// Closes all descriptors that the program has not opened, SLIM's included, where no hook sees it.
static void closes_all(void) {
    const int first = 100, last = 70000;
    if (is("closes-each")) {
        for (int i = first; i < last; i++)
            if (i != t_sync) raw(SYS_close, i);
        return;
    }
    pid_t p = is("closes-in-child") ? MUST(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0)) : 0;
    if (!p) {
        raw(SYS_close_range, first, t_sync - 1, 0);
        raw(SYS_close_range, t_sync + 1, ~0u, 0);
        if (is("closes-in-child")) raw(SYS_exit_group, 0);
    }
    if (p) child_is_over(p);
}

// Moves many more bytes than the replay buffer holds.
static void much(int fd) {
    enum { TIMES = 8192 };
    for (int i = 0; i < TIMES; i++) {
        fill(b, i * sizeof b, sizeof b, 2);
        if (is_server() ? full_recv(fd, b, sizeof b) != sizeof b || !verify(b, i * sizeof b, sizeof b, 2) : full_send(fd, b, sizeof b)) {
            line("much: %d: %s", i, ename(errno));
            return;
        }
    }
    line("much: all there");
}

// Whether a thread, named by its directory in /proc, is stopped.
static int is_stopped(const char *tasks, const char *thread) {
    char path[400], text[256] = "", *name_ends;
    snprintf(path, sizeof path, "%s/%s/stat", tasks, thread);
    int f = open(path, O_RDONLY);
    if (f < 0) return 1;
    ssize_t n = read(f, text, sizeof text - 1);
    close(f);
    return n <= 0 || ((name_ends = strrchr(text, ')')) && name_ends[2] == 'T');
}

// Stops all threads of a process, and waits until they have stopped: when `kill` returns the signal may not have arrived yet.
static void stop(pid_t p) {
    char tasks[64];
    snprintf(tasks, sizeof tasks, "/proc/%d/task", p);
    MUST(kill(p, SIGSTOP));
    for (int all = 0; !all; ms(1)) {
        all = 1;
        DIR *d = opendir(tasks);
        if (!d) _exit(97);
        for (struct dirent *e; (e = readdir(d));)
            if (e->d_name[0] != '.' && !is_stopped(tasks, e->d_name)) all = 0;
        closedir(d);
    }
}

// The flow is suspended when the descriptors are closed: the other end is stopped and answers nothing.
static void away(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (is_server()) {
        tell(getpid());
        meet();
        return;
    }
    pid_t server = hear();
    stop(server);
    if (atoi(getenv("T_BREAKS"))) MUST(break_connections());
    // Without SLIM this call sees the error, with SLIM it sees nothing.
    poll(&p, 1, 300);
    closes_all();
    MUST(kill(server, SIGCONT));
    double since = now_s();
    line("poll: %d", poll(&p, 1, 5000));
    // The error of a bare run depends on which end is destroyed first.
    line("recv: %zd", recv(fd, b, 1, MSG_DONTWAIT));
    line("%s", now_s() - since < 4 ? "soon" : "late");
    meet();
}

static int closes(void) { return !strncmp(getenv("T_ARGS"), "closes-", 7); }

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = -1, fd = pair_up(&l);
    talk(fd, "before");
    if (is("away")) {
        away(fd);
        return 0;
    }
    if (!is_server()) {
        if (is("shares")) shares_descriptors();
        if (is("server")) becomes_a_server();
        if (closes()) closes_all();
    }
    meet();
    if (closes()) {
        talk(fd, "without others");
        much(fd);
        meet();
    }
    if (is_server() && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    if (closes()) {
        meet();
        // SLIM can no longer resume the connection: it ends as without SLIM.
        struct pollfd p = {.fd = fd, .events = POLLIN};
        double since = now_s();
        line("poll: %d", poll(&p, 1, 5000));
        line("recv: %zd", recv(fd, b, 1, MSG_DONTWAIT));
        line("%s", now_s() - since < 4 ? "soon" : "late");
        meet();
        return 0;
    }
    talk(fd, "after");
    meet();
    close(fd);
    return 0;
}
