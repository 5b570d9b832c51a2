// Resources that remain of connections that are over: descriptors, memory, wake-ups. Two programs; T_ARGS has the case and
// the number of connections. The harness checks the printed figures.
#include "t.h"
#include <sys/prctl.h>

static long total;

// ---- resources of a process ----

static long kilobytes(const char *name) {
    char b[4096];
    int f = MUST(open("/proc/self/status", O_RDONLY));
    ssize_t n = MUST(read(f, b, sizeof b - 1));
    close(f);
    b[n] = 0;
    char *at = strstr(b, name);
    return at ? atol(at + strlen(name)) : -1;
}

static int numbers(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n - 3; // ".", "..", and the directory's own descriptor.
}

// How often the other threads have gone to sleep.
static long wakeups(void) {
    DIR *d = opendir("/proc/self/task");
    long all = 0;
    for (struct dirent *e; (e = readdir(d));) {
        char path[64], b[4096];
        if (atoi(e->d_name) == 0 || atoi(e->d_name) == getpid()) continue;
        snprintf(path, sizeof path, "/proc/self/task/%d/status", atoi(e->d_name));
        int f = open(path, O_RDONLY);
        if (f < 0) continue;
        ssize_t n = read(f, b, sizeof b - 1);
        close(f);
        b[n > 0 ? n : 0] = 0;
        char *at = strstr(b, "\nvoluntary_ctxt_switches:");
        if (at) all += atol(at + 25);
    }
    closedir(d);
    return all;
}

// Lists the open descriptors, for debugging.
static void name_numbers(void) {
    DIR *d = opendir("/proc/self/fd");
    for (struct dirent *e; (e = readdir(d));) {
        int fd = atoi(e->d_name), info = 0;
        socklen_t n = sizeof info;
        char path[64], to[128];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t len = readlink(path, to, sizeof to - 1);
        to[len > 0 ? len : 0] = 0;
        if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &info, &n) == 0 && info == IPPROTO_TCP) {
            unsigned char state[1] = {0};
            n = sizeof state;
            getsockopt(fd, IPPROTO_TCP, TCP_INFO, state, &n);
            line("%d: TCP, state %d", fd, state[0]);
        } else {
            line("%d: %s", fd, to);
        }
    }
    closedir(d);
}

static void report(const char *when, int fds) {
    line("%s: resident %ld mapped %ld descriptors %d", when, kilobytes("VmRSS:"), kilobytes("VmSize:"), numbers() - fds);
}

// Waits until only `fds` descriptors are open, for at most `limit_s`.
static void until_closed(int fds, double limit_s) {
    for (double t0 = now_s(); numbers() > fds && now_s() - t0 < limit_s;) ms(20);
}

// ---- cases ----

// The client runs without SLIM, so each connection becomes plain TCP.
static void plain_clients(void) {
    if (is_server()) {
        int l = listener(), fds = 0;
        tell(port_of(l));
        for (long i = 0; i < total; i++) {
            char b;
            int fd = MUST(accept(l, NULL, NULL));
            MUST(full_recv(fd, &b, 1));
            MUST(full_send(fd, &b, 1));
            close(fd);
            if (i == total / 4) meet(), ms(300), fds = numbers(), report("begun", fds), meet();
        }
        meet();
        ms(300);
        report("over", fds);
        meet();
    } else {
        int port = hear();
        for (long i = 0; i < total; i++) {
            char b = 'x';
            int fd = dial(port);
            MUST(full_send(fd, &b, 1));
            MUST(full_recv(fd, &b, 1));
            MUST(full_recv(fd, &b, 1));
            close(fd);
            if (i == total / 4) meet(), meet();
        }
        meet();
        meet();
    }
}


// ---- every way in which a connection can end ----

enum { MOST = 256 };
static int l = -1, port, count, fds[MOST], me;
static long peer;
static char buf[1 << 16];
// Ports of helper programs: one without SLIM, one whose UDP port never answers, one with another key.
static int helper_ports[3];

static void each(void (*f)(int fd)) {
    for (int i = 0; i < count; i++) f(fds[i]);
}

static void close_one(int fd) { close(fd); }

static void close_all(void) { each(close_one); }

static void send_one(int fd) { send(fd, "x", 1, MSG_NOSIGNAL); }

static void recv_one(int fd) { recv(fd, buf, 1, 0); }

// Reads until the end of the stream or an error.
static void drain_one(int fd) {
    while (recv(fd, buf, sizeof buf, 0) > 0) {}
}

// Makes the connections for one way to end, between the two programs. Most of them have a session when this returns.
static void connect_all(void) {
    for (int i = 0; i < count; i++) fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
    each(send_one);
    each(recv_one);
}

static void connect_and_negotiate(void) {
    connect_all();
    meet();
    await_negotiation();
    meet();
}

static void broken(void) {
    meet();
    if (is_server() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

static void leaves(void (*f)(int fd)) {
    connect_and_negotiate();
    if (me) each(f);
    meet();
    if (!me) each(drain_one), close_all();
}

static void closed(void) { leaves(close_one); }

static void closed_at_once(void) {
    connect_all();
    close_all();
}

static void closed_by_both(void) {
    connect_and_negotiate();
    close_all();
}

static void half_close(int fd) { shutdown(fd, SHUT_WR); }

static void half_closed(void) {
    connect_and_negotiate();
    if (me) {
        each(half_close);
        each(drain_one);
        close_all();
    } else {
        each(drain_one);
        each(send_one);
        close_all();
    }
}

static void half_closed_by_both(void) {
    connect_and_negotiate();
    each(half_close);
    each(drain_one);
    close_all();
}

static void shut_one(int fd) {
    send_one(fd);
    shutdown(fd, SHUT_RDWR);
    close(fd);
}

static void shut_down(void) { leaves(shut_one); }

static void linger_0(int fd) {
    struct linger now = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(fd);
}

static void reset(void) { leaves(linger_0); }

static void linger_1(int fd) {
    struct linger later = {1, 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &later, sizeof later);
    send_one(fd);
    close(fd);
}

static void lingered(void) { leaves(linger_1); }

static void unread(void) {
    connect_and_negotiate();
    if (!me) each(send_one);
    meet();
    if (me) close_all();
    meet();
    if (!me) each(drain_one), close_all();
}

static void dup2_one(int fd) {
    int null = MUST(open("/dev/null", O_RDONLY));
    dup2(null, fd);
    close(null);
    close(fd);
}

static void dup2_over(void) { leaves(dup2_one); }

static void range_one(int fd) { close_range(fd, fd, 0); }

static void in_a_range(void) { leaves(range_one); }

static void copy_one(int fd) {
    int copy = MUST(dup(fd));
    close(fd);
    send_one(copy);
    close(copy);
}

static void copied(void) { leaves(copy_one); }

static void epoll_one(int fd) {
    static int ep = -1;
    if (ep < 0) ep = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
    close(fd);
}

static void in_an_epoll(void) { leaves(epoll_one); }

static void used_by_child(void) {
    connect_and_negotiate();
    if (me) {
        pid_t p = fork();
        if (!p) {
            each(send_one);
            _exit(0);
        }
        waitpid(p, NULL, 0);
        each(send_one);
        close_all();
    }
    meet();
    if (!me) each(drain_one), close_all();
}

static void kept_by_child(void) {
    connect_and_negotiate();
    if (me) {
        int end[2];
        MUST(pipe(end));
        pid_t p = fork();
        if (!p) {
            close(end[1]);
            read(end[0], buf, 1);
            _exit(0);
        }
        close(end[0]);
        close_all();
        close(end[1]);
        waitpid(p, NULL, 0);
    }
    meet();
    if (!me) each(drain_one), close_all();
}

static void kept_over_exec(void) {
    connect_and_negotiate();
    if (me) {
        char *args[] = {"true", NULL};
        pid_t p;
        if (posix_spawn(&p, "/bin/true", NULL, NULL, args, environ) == 0) waitpid(p, NULL, 0);
        close_all();
    }
    meet();
    if (!me) each(drain_one), close_all();
}

static void pass_one(int fd) {
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    char room[CMSG_SPACE(sizeof fd)] = "";
    struct iovec v = {"d", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    MUST(sendmsg(pair[0], &m, 0));
    close(fd);
    v.iov_base = buf;
    m.msg_controllen = sizeof room;
    MUST(recvmsg(pair[1], &m, 0));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    send_one(fd);
    close(fd);
    close(pair[0]);
    close(pair[1]);
}

static void passed(void) { leaves(pass_one); }

static void splice_one(int fd) {
    int end[2];
    MUST(pipe(end));
    write(end[1], "s", 1);
    splice(end[0], NULL, fd, NULL, 1, 0);
    close(end[0]);
    close(end[1]);
    close(fd);
}

static void spliced(void) { leaves(splice_one); }

static void stdio_one(int fd) {
    FILE *f = fdopen(fd, "w");
    fputs("stdio", f);
    fclose(f);
}

static void with_stdio(void) { leaves(stdio_one); }

static void resumed(void) {
    connect_and_negotiate();
    broken();
    each(send_one);
    each(recv_one);
    close_all();
}

static void closed_while_away(void) {
    connect_and_negotiate();
    broken();
    close_all();
}

static void stash(int read_it) {
    connect_and_negotiate();
    if (!me) each(send_one), each(send_one);
    meet();
    broken();
    if (!me) each(send_one);
    if (me) each(recv_one);
    if (me && read_it) each(recv_one), each(recv_one);
    meet();
    close_all();
}

static void stash_read(void) { stash(1); }

static void stash_unread(void) { stash(0); }

// Stops the other program for as long as attempts last, so that they get no answer.
static void stand_still(void (*meanwhile)(void)) {
    meet();
    if (me) {
        MUST(kill(peer, SIGSTOP));
        // The kernel's list of connections may be incomplete while connections come and go, so several passes are made.
        for (int n = 0; n < 50 && break_connections() > 0; n++) {}
        meanwhile();
        MUST(kill(peer, SIGCONT));
        tell(1);
    } else {
        hear();
    }
}

static void look_at_one(int fd) { recv(fd, buf, 1, MSG_DONTWAIT); }

static void attempts_fail(void) {
    // Starts the attempts on all connections at once.
    each(look_at_one);
    each(drain_one);
}

static void given_up(void) {
    connect_and_negotiate();
    stand_still(attempts_fail);
    each(drain_one);
    close_all();
}

static void wait_for_end(void) {
    // Longer than the attempts.
    ms(800);
}

static void given_up_unread(void) {
    connect_and_negotiate();
    if (!me) each(send_one);
    stand_still(wait_for_end);
    close_all();
}

// Sends more than the peer's kernel takes, and closes.
static void close_with_unsent(int fd) {
    memset(buf, 'o', sizeof buf);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (int n = 0; n < 64 && send(fd, buf, sizeof buf, MSG_NOSIGNAL) > 0; n++) {}
    close(fd);
}

static void undelivered(void (*then)(void)) {
    int all = count;
    // Few connections, because the bytes take kernel memory.
    if (count > 10) count = 10;
    connect_and_negotiate();
    if (me) each(close_with_unsent);
    meet();
    then();
    if (!me) each(drain_one), close_all();
    count = all;
}

static void nothing(void) {}

static void undelivered_and_read(void) { undelivered(nothing); }

static void undelivered_and_broken(void) { undelivered(broken); }

static void peer_closes(void) {
    if (!me) close_all();
}

static void undelivered_and_unread(void) { undelivered(peer_closes); }

static void peer_resets(void) {
    if (!me) each(linger_0);
}

static void undelivered_and_reset(void) { undelivered(peer_resets); }

static void peer_stands_still(void) { stand_still(wait_for_end); }

static void undelivered_and_given_up(void) { undelivered(peer_stands_still); }

// Starts a helper program, with connections to this one.
static pid_t start(const char *kind, int at, int *said) {
    int end[2];
    char number[16], many[16];
    snprintf(number, sizeof number, "%d", at);
    snprintf(many, sizeof many, "%d", count);
    ssize_t n = readlink("/proc/self/exe", buf, sizeof buf - 1);
    buf[n] = 0;
    MUST(pipe2(end, O_CLOEXEC));
    pid_t p = fork();
    if (!p) {
        dup2(end[1], 50);
        close_range(51, 799, 0);
        if (!strcmp(kind, "bare") || !strcmp(kind, "silent")) setenv("SLIM", "off", 1);
        if (!strcmp(kind, "other-key")) setenv("SLIM_JOB_KEY", "another", 1);
        setenv("T_ARGS", kind, 1);
        execl(buf, buf, number, many, NULL);
        _exit(90);
    }
    close(end[1]);
    int value = 0;
    if (read(end[0], &value, sizeof value) != sizeof value) line("%s: no answer", kind);
    close(end[0]);
    if (said) *said = value;
    return p;
}

static void *serve(void *arg) {
    char b;
    int fd = (int)(long)arg;
    if (recv(fd, &b, 1, 0) > 0) send_one(fd);
    while (recv(fd, &b, 1, 0) > 0) {}
    close(fd);
    return NULL;
}

// The main function of a helper program.
static int helper(const char *kind, int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    alarm(600);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc < 3) return 1;
    count = atoi(argv[2]);
    if (!strcmp(kind, "guest") || !strcmp(kind, "leaver")) {
        for (int i = 0; i < count; i++) fds[i] = dial(atoi(argv[1]));
        each(send_one);
        each(recv_one);
        await_negotiation();
        write(50, &count, sizeof count);
        if (!strcmp(kind, "leaver")) exit(0);
        pause();
    }
    int at = listener(), number = port_of(at);
    if (!strcmp(kind, "silent")) {
        struct sockaddr_in a = v4(number);
        MUST(bind(MUST(socket(AF_INET, SOCK_DGRAM, 0)), (void *)&a, sizeof a));
    }
    write(50, &number, sizeof number);
    close(50);
    for (;;) {
        int fd = accept(at, NULL, NULL);
        if (fd < 0) continue;
        pthread_t t;
        pthread_create(&t, NULL, serve, (void *)(long)fd);
        pthread_detach(t);
    }
}

static void *accept_all(void *at) {
    for (int i = 0; i < count; i++) fds[i] = MUST(accept((int)(long)at, NULL, NULL));
    each(recv_one);
    each(send_one);
    return NULL;
}

// Only the server does this: it accepts connections from helper programs that end.
static void guests(const char *kind, int then_break) {
    if (!is_server()) return;
    int at = listener();
    pthread_t t;
    pthread_create(&t, NULL, accept_all, (void *)(long)at);
    pid_t p = start(kind, port_of(at), NULL);
    pthread_join(t, NULL);
    if (strcmp(kind, "leaver")) kill(p, SIGKILL);
    if (then_break) break_connections();
    waitpid(p, NULL, 0);
    each(drain_one);
    close_all();
    close(at);
}

static void peer_killed(void) { guests("guest", 0); }

static void peer_killed_and_broken(void) { guests("guest", 1); }

static void peer_exits(void) { guests("leaver", 0); }

static void others(int at) {
    if (!is_server()) return;
    for (int i = 0; i < count; i++) {
        fds[i] = dial(at);
        send_one(fds[i]);
        recv_one(fds[i]);
        // Half of them are closed before their negotiation ends.
        if (i % 2) close(fds[i]);
    }
    await_negotiation();
    for (int i = 0; i < count; i += 2) close(fds[i]);
}

static void without_slim(void) { others(helper_ports[0]); }

static void silent(void) { others(helper_ports[1]); }

static void with_another_key(void) { others(helper_ports[2]); }

// Keeps the connections for longer than HELLO is repeated without an answer.
static void silent_for_long(void) {
    if (!is_server()) return;
    for (int i = 0; i < count; i++) fds[i] = dial(helper_ports[2]), send_one(fds[i]);
    ms(450);
    close_all();
}

static void refused(void) {
    struct sockaddr_in a = v4(dead_port());
    for (int i = 0; i < count; i++) {
        int c = MUST(socket(AF_INET, SOCK_STREAM | (i % 2 ? SOCK_NONBLOCK : 0), 0));
        connect(c, (void *)&a, sizeof a);
        if (i % 4 == 1) wait_for(c, POLLOUT, 1000);
        close(c);
    }
}

static void listener_first(int accepted) {
    int at = -1;
    if (is_server()) at = listener(), tell(port_of(at));
    int to = is_server() ? 0 : hear();
    for (int i = 0; i < count; i++) {
        if (!is_server()) fds[i] = dial(to);
        if (is_server() && accepted) fds[i] = MUST(accept(at, NULL, NULL));
    }
    meet();
    await_negotiation();
    if (is_server()) close(at);
    meet();
    if (is_server() && !accepted) return;
    each(half_close);
    each(drain_one);
    close_all();
}

static void without_listener(void) { listener_first(1); }

static void never_accepted(void) { listener_first(0); }

static const struct way {
    const char *name;
    void (*run)(void);
} ways[] = {
    {"closed", closed}, {"closed at once", closed_at_once}, {"closed by both", closed_by_both}, {"half-closed", half_closed},
    {"half-closed by both", half_closed_by_both}, {"shut down", shut_down}, {"reset", reset}, {"lingered", lingered},
    {"unread", unread}, {"dup2", dup2_over}, {"close_range", in_a_range}, {"copied", copied}, {"epoll", in_an_epoll},
    {"used by a child", used_by_child}, {"kept by a child", kept_by_child}, {"kept over exec", kept_over_exec},
    {"passed", passed}, {"spliced", spliced}, {"stdio", with_stdio}, {"resumed", resumed},
    {"closed while away", closed_while_away}, {"stash read", stash_read}, {"stash unread", stash_unread},
    {"given up", given_up}, {"given up unread", given_up_unread}, {"undelivered", undelivered_and_read},
    {"undelivered and broken", undelivered_and_broken}, {"undelivered and unread", undelivered_and_unread},
    {"undelivered and reset", undelivered_and_reset},
    {"undelivered and given up", undelivered_and_given_up},
    {"peer killed", peer_killed}, {"peer killed and broken", peer_killed_and_broken}, {"peer exits", peer_exits},
    {"without SLIM", without_slim}, {"silent", silent}, {"another key", with_another_key}, {"silent for long", silent_for_long},
    {"refused", refused}, {"without its listener", without_listener}, {"never accepted", never_accepted},
};

static void all_ways(void) {
    int rounds = total;
    total = 0;
    const char *only = getenv("T_ONLY");
    int at_first = 0;
    pid_t helpers[3];
    tell(getpid());
    peer = hear();
    if (is_server()) {
        static const char *kinds[] = {"bare", "silent", "other-key"};
        for (int i = 0; i < 3; i++) helpers[i] = start(kinds[i], 0, &helper_ports[i]);
        l = listener();
        tell(port_of(l));
    } else {
        port = hear();
    }
    for (int round = 0; round < rounds; round++) {
        me = is_server() == round % 2;
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            if (only && strcmp(only, ways[i].name)) continue;
            strcpy(t_last, ways[i].name);
            double t0 = now_s();
            ways[i].run();
            total += count;
            meet();
            if (getenv("T_TIMES")) line("%s: %.0f ms, descriptors %d", ways[i].name, (now_s() - t0) * 1000, numbers());
        }
        // By now both ends have done everything at least once.
        if (round == (rounds < 8 ? 1 : rounds / 4)) {
            meet();
            ms(1500);
            report("begun", at_first = numbers());
            line("begun after %ld connections", total);
            meet();
        }
    }
    until_closed(at_first, 10);
    if (numbers() > at_first) name_numbers();
    meet();
    ms(500);
    report("over", at_first);
    line("over after %ld connections", total);
    meet();
    long before = wakeups();
    ms(3000);
    line("over: wake-ups %ld in 3 s", wakeups() - before);
    meet();
    for (int i = 0; is_server() && i < 3; i++) kill(helpers[i], SIGKILL), waitpid(helpers[i], NULL, 0);
}

// A server closes connections to clients that do not read for long. Prints what it keeps for them, and whether they get all
// bytes.
static void not_read(void) {
    int at_first = numbers();
    long sum = 0, seen = 0;
    if (is_server()) l = listener(), at_first = numbers(), tell(port_of(l));
    else port = hear();
    connect_and_negotiate();
    if (is_server()) {
        memset(buf, 'o', sizeof buf);
        for (int i = 0; i < count; i++) {
            long n = 0, one = 0;
            fcntl(fds[i], F_SETFL, O_NONBLOCK);
            for (; one < total && (n = send(fds[i], buf, sizeof buf, MSG_NOSIGNAL)) > 0; one += n) {}
            sum += one;
            close(fds[i]);
        }
        report("closed", at_first);
        ms(3500);
        report("kept", at_first);
        tell(sum);
    } else {
        sum = hear();
        for (int i = 0; i < count; i++) {
            ssize_t n;
            while ((n = recv(fds[i], buf, sizeof buf, 0)) > 0) seen += n;
            if (n < 0) line("%s", ename(errno));
            close(fds[i]);
        }
        line("all: %d", seen == sum);
    }
    meet();
}

int main(int argc, char **argv) {
    const char *args = getenv("T_ARGS");
    char kase[32] = "";
    long n = 0;
    if (!args || sscanf(args, "%31s %ld %d", kase, &n, &count) < 1) return 1;
    static const struct way cases[] = {{"plain-clients", plain_clients}, {"ways", all_ways}, {"not-read", not_read}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(kase, cases[i].name)) {
            const char *files = getenv("T_FILES");
            struct rlimit limit = {files ? atoi(files) : 1024, 1024};
            if (files) MUST(setrlimit(RLIMIT_NOFILE, &limit));
            begin_pair(argc, argv, 140);
            if (count > MOST) count = MOST;
            total = n;
            cases[i].run();
            return 0;
        }
    return helper(kase, argc, argv);
}
