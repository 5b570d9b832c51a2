// Descriptors move to other numbers and other processes while their connection is broken. The new holder soon gets the right
// bytes or an error, never wrong bytes and never a false end of the stream. No call waits for ever. Two programs; the case is
// in T_ARGS, and whether connections break at all is in T_BREAKS.
#include "t.h"
#include <net/if.h>

extern char **environ;
static char buf[1 << 20];
static int l = -1, fd;
static const char *kase, *self;

static int is(const char *k) { return !strcmp(kase, k); }
static int breaks(void) { return atoi(getenv("T_BREAKS")); }

// Takes the network down or brings it up. Without its address no connection can be made, so a broken flow stays suspended. In
// the case "dark" the whole network goes.
static void network(int up) {
    if (!getenv("T_OWN_NETWORK")) exit(91);
    int s = MUST(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    struct ifreq r = {.ifr_name = "lo:1"};
    if (is("dark")) {
        strcpy(r.ifr_name, "lo");
        r.ifr_flags = up ? IFF_UP | IFF_RUNNING : 0;
        MUST(ioctl(s, SIOCSIFFLAGS, &r));
    } else if (up) {
        struct sockaddr_in a = v4(0);
        memcpy(&r.ifr_addr, &a, sizeof a);
        MUST(ioctl(s, SIOCSIFADDR, &r));
    } else {
        MUST(ioctl(s, SIOCSIFFLAGS, &r));
    }
    close(s);
}

static void go_away(void) {
    if (!breaks()) return;
    network(0);
    MUST(break_connections());
}

static void come_back(void) {
    if (breaks()) network(1);
}

static void *come_back_later(void *after) {
    ms((long)after);
    come_back();
    return NULL;
}

// Reads at most `most` bytes, which should be the stream `seed` from offset `off`. Returns what was found: "all" bytes right,
// or how reading ended before that.
static const char *finds(int f, uint64_t off, size_t most, uint64_t seed) {
    uint64_t end = off + most;
    while (off < end) {
        if (!(wait_for(f, POLLIN | POLLRDHUP, 4000))) return "NOTHING";
        ssize_t n = read(f, buf, end - off < sizeof buf ? end - off : sizeof buf);
        if (n == 0) return "THE END";
        if (n < 0) return "an error";
        if (!verify(buf, off, n, seed)) return "WRONG BYTES";
        off += n;
    }
    return "all";
}

// For readers that get an error under the preload: in a bare run nothing breaks, so they get all bytes, which counts the same.
static const char *or_error(const char *found) {
    return !strcmp(found, "all") ? "an error" : found;
}

static void put(int f, uint64_t off, size_t n, uint64_t seed) {
    fill(buf, off, n, seed);
    if (full_send(f, buf, n)) line("send: %s", ename(errno));
}

static void talk(const char *what) {
    char b[8] = "";
    int ok = is_server() ? full_recv(fd, b, 4) == 4 && !memcmp(b, "ping", 4) && !full_send(fd, "pong", 4)
                         : !full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4 && !memcmp(b, "pong", 4);
    line("%s: %s", what, ok ? "ping, pong" : ename(errno));
}

static void ended(pid_t p, const char *what) {
    int st = -1;
    MUST(waitpid(p, &st, 0));
    line("%s: %s %d", what, WIFSIGNALED(st) ? "killed by" : "exit", WIFSIGNALED(st) ? WTERMSIG(st) : WEXITSTATUS(st));
}

// Waits until the break has been noticed, so that the flow is suspended afterwards.
static void notice(int f) {
    wait_for(f, POLLRDHUP, 40);
}

// A forked child reads from a suspended flow. The parent then goes on without noticing anything.
static void forked(void) {
    for (int unread = 0; unread < 2; unread++) {
        if (!is_server() && unread) put(fd, 0, 5000, 1);
        if (is_server() && unread) arrived(fd, 5000);
        meet();
        if (is_server()) {
            go_away();
            notice(fd);
            meet();
            pid_t p = fork();
            if (!p) {
                if (breaks()) {
                    const char *found = or_error(finds(fd, 0, 5000, 1));
                    line("child: %s", found);
                    ssize_t n = send(fd, "child", 5, MSG_NOSIGNAL);
                    line("child sends: %s", n < 0 ? "an error" : "SENT");
                } else {
                    line("child: an error");
                    line("child sends: an error");
                }
                exit(0);
            }
            ended(p, "child");
            come_back();
            if (unread) line("parent: %s", finds(fd, 0, 5000, 1));
        } else {
            meet();
        }
        talk("after it");
        meet();
    }
}

// A child that was forked before the break reads after it. It must not see an end of the stream, since the peer did not end it.
static void late(void) {
    if (!is_server()) put(fd, 0, 5000, 1);
    meet();
    if (is_server()) {
        arrived(fd, 5000);
        int go[2];
        MUST(pipe(go));
        pid_t p = fork();
        if (!p) {
            read(go[0], buf, 1);
            line("child: %s", breaks() ? or_error(finds(fd, 5000, 1, 1)) : "an error");
            exit(0);
        }
        if (breaks()) MUST(break_connections());
        line("parent: %s", finds(fd, 0, 5000, 1));
        talk("parent");
        write(go[1], "g", 1);
        ended(p, "child");
    } else {
        talk("client");
    }
    meet();
}

// A child reads while the connection breaks. It gets right bytes, and then an error.
static void reading(void) {
    enum { MUCH = 8 << 20 };
    if (is_server()) {
        pid_t p = fork();
        if (!p) {
            const char *found = finds(fd, 0, MUCH, 1);
            line("child: %s", breaks() ? or_error(found) : "an error");
            exit(0);
        }
        ms(60);
        if (breaks()) MUST(break_connections());
        ended(p, "child");
        close(fd);
        meet();
    } else {
        for (size_t off = 0; off < MUCH; off += sizeof buf) {
            fill(buf, off, sizeof buf, 1);
            if (full_send(fd, buf, sizeof buf)) break;
        }
        meet();
    }
}

static int heir(int f, const char *how, int broken) {
    begin(30);
    if (broken)
        line("heir, %s: %s", how, or_error(finds(f, 0, 5000, 1)));
    else
        line("heir, %s: an error", how);
    return 0;
}

__attribute__((noinline)) static pid_t vforked(const char *path, char **args, int copy) {
    pid_t p = vfork();
    if (!p) {
        if (copy) dup2(fd, 77);
        execv(path, args);
        _exit(9);
    }
    return p;
}

// Another program inherits the descriptor, in every way to start a program.
static void started(void) {
    static const char *ways[] = {"fork", "vfork", "vfork and dup2", "posix_spawn", "posix_spawn and dup2", "system"};
    for (unsigned k = 0; k < 12; k++) {
        int unread = k % 2;
        const char *way = ways[k / 2];
        if (!is_server() && unread) put(fd, 0, 5000, 1);
        if (is_server() && unread) arrived(fd, 5000);
        meet();
        if (is_server()) {
            char number[12], command[400];
            char *args[] = {(char *)self, "heir", number, (char *)way, breaks() ? "1" : "0", NULL};
            sprintf(number, "%d", k / 2 == 2 || k / 2 == 4 ? 77 : fd);
            go_away();
            notice(fd);
            meet();
            pid_t p = 0;
            posix_spawn_file_actions_t fa;
            posix_spawn_file_actions_init(&fa);
            posix_spawn_file_actions_adddup2(&fa, fd, 77);
            pthread_t t;
            pthread_create(&t, NULL, come_back_later, (void *)700);
            switch (k / 2) {
            case 0:
                if (!(p = fork())) execv(self, args), _exit(9);
                break;
            case 1: p = vforked(self, args, 0); break;
            case 2: p = vforked(self, args, 1); break;
            case 3: MUST(posix_spawn(&p, self, NULL, NULL, args, environ)); break;
            case 4: MUST(posix_spawn(&p, self, &fa, NULL, args, environ)); break;
            case 5:
                sprintf(command, "exec %s heir %d system %d", self, fd, breaks() > 0);
                R(system(command));
            }
            if (p) ended(p, way);
            pthread_join(t, NULL);
            if (unread) line("parent: %s", finds(fd, 0, 5000, 1));
        } else {
            meet();
        }
        talk(way);
        meet();
    }
}

// This process replaces itself by another program (exec), which waits for the connection and goes on with it.
static int changed(int f, int sync) {
    begin(30);
    t_sync = sync;
    fd = f;
    talk("as another program");
    line("%s", finds(fd, 0, 5000, 1));
    meet();
    return 0;
}

static void exec_away(void) {
    if (is_server()) {
        meet();
        go_away();
        notice(fd);
        pid_t p = fork();
        // A child brings the network back, because threads end with exec.
        if (!p) {
            ms(400);
            come_back();
            _exit(0);
        }
        char number[12], sync[12];
        meet();
        sprintf(number, "%d", fd);
        sprintf(sync, "%d", t_sync);
        fcntl(t_sync, F_SETFD, 0);
        execl(self, self, "changed", number, sync, NULL);
        line("exec: %s", ename(errno));
    } else {
        meet();
        meet();
        talk("client");
        put(fd, 0, 5000, 1);
        meet();
    }
}

static void send_number(int u, int f) {
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int))];
    } cm = {.h = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&cm.h), &f, sizeof f);
    struct iovec v = {"f", 1};
    struct mmsghdr m = {.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &cm, .msg_controllen = sizeof cm}};
    if (is("passed-many"))
        MUST(sendmmsg(u, &m, 1, 0));
    else
        MUST(sendmsg(u, &m.msg_hdr, 0));
}

static int receive_number(int u) {
    char b[1], c[CMSG_SPACE(sizeof(int))];
    struct iovec v = {b, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c};
    MUST(recvmsg(u, &m, 0));
    int f;
    memcpy(&f, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof f);
    return f;
}

// The descriptor of a suspended flow is sent to another process. The message waits until the flow is resumed. With unread
// bytes the receiver gets these bytes and then an error, because they are not on the new connection.
static void passed(int unread) {
    if (!is_server() && unread) put(fd, 0, 5000, 1);
    if (is_server() && unread) arrived(fd, 5000);
    int u[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, u));
    meet();
    if (is_server()) {
        pid_t p = fork();
        if (!p) {
            close(fd);
            close(u[0]);
            fd = receive_number(u[1]);
            if (unread) {
                line("receiver: %s", finds(fd, 0, 5000, 1));
                if (breaks()) line("receiver: %s", or_error(finds(fd, 5000, 1, 1)));
                else line("receiver: an error");
            } else {
                talk("receiver");
                line("receiver: %s", finds(fd, 0, 5000, 1));
            }
            exit(0);
        }
        close(u[1]);
        go_away();
        notice(fd);
        pthread_t t;
        pthread_create(&t, NULL, come_back_later, (void *)300);
        meet();
        send_number(u[0], fd);
        MUST(close(fd));
        pthread_join(t, NULL);
        ended(p, "receiver");
    } else {
        meet();
        if (!unread) {
            talk("client");
            put(fd, 0, 5000, 1);
        }
    }
    meet();
}

// A suspended flow gets new descriptor numbers, and other files get its number.
static void numbers(void) {
    int second = -1;
    if (!is_server()) put(fd, 0, 5000, 1);
    int other = pair_up(&l);
    meet();
    if (is_server()) {
        arrived(fd, 5000);
        go_away();
        notice(fd);
        second = R(dup(fd));
        R(dup2(fd, 70));
        R(dup3(fd, 71, O_CLOEXEC));
        R(fcntl(fd, F_DUPFD, 72));
        int null = MUST(open("/dev/null", O_RDWR));
        // The first number becomes a file. Another connection is closed because the flow is duplicated over its number.
        R(dup2(null, fd));
        R(dup2(70, other));
        struct pollfd p = {.fd = 71, .events = POLLIN};
        line("poll %d", breaks() ? 0 : poll(&p, 1, 0) - 1);
        come_back();
        line("%s", finds(second, 0, 1000, 1));
        line("%s", finds(70, 1000, 1000, 1));
        line("%s", finds(71, 2000, 1000, 1));
        line("%s", finds(72, 3000, 1000, 1));
        line("%s", finds(other, 4000, 1000, 1));
        R(write(fd, "into the file", 13));
        for (int i = 70; i < 73; i++) R(close(i));
        R(close(second));
        fd = other;
    }
    talk("the last number");
    if (!is_server()) {
        line("the other one: %s", bits(wait_for(other, POLLIN | POLLRDHUP, 5000)));
        R(recv(other, buf, 1, 0));
    }
    meet();
}

// libc's streams write and read by themselves while the connection breaks. They get an error, as without SLIM.
static void streams(void) {
    int n = 0;
    if (is_server()) {
        memset(buf, 0, 100);
        R(full_recv(fd, buf, 15));
        quote(buf, 15);
        MUST(full_send(fd, "a line\n", 7));
    } else {
        FILE *f = fdopen(dup(fd), "r");
        R(dprintf(fd, "%d words, %s", 1024, "all"));
        line("%s", fgets(buf, 100, f) ? "got" : "nothing");
        quote(buf, strlen(buf));
        R(fclose(f));
    }
    meet();
    if (is_server() && breaks()) MUST(break_connections());
    meet();
    if (is_server()) {
        line("%s", breaks() ? or_error(finds(fd, 0, 1, 1)) : "an error");
    } else {
        ms(50);
        for (int i = 0; breaks() && i < 3 && n >= 0; i++) n = dprintf(fd, "more");
        line("%s", n < 0 || !breaks() ? "an error" : "SENT");
        line("SIGPIPE at most once: %d", pipes() <= 1);
    }
    meet();
}

static volatile int over;
static void *flood(void *p UNUSED) {
    static char b[200000];
    for (uint64_t off = 0; off < 24 << 20;) {
        size_t n = 1 + t_word(5, off) % sizeof b;
        if (n > (24 << 20) - off) n = (24 << 20) - off;
        fill(b, off, n, is_server() ? 1 : 2);
        if (full_send(fd, b, n)) {
            line("flood: %s", ename(errno));
            break;
        }
        off += n;
    }
    return NULL;
}

static void *drink(void *p UNUSED) {
    static char b[200000];
    uint64_t off = 0;
    while (off < 24 << 20) {
        ssize_t n = recv(fd, b, sizeof b, 0);
        if (n <= 0 || !verify(b, off, n, is_server() ? 2 : 1)) {
            line("drink: %zd", n);
            break;
        }
        off += n;
    }
    line("came %" PRIu64, off);
    over = 1;
    return NULL;
}

// All of these operations at any moment of a break, with many bytes in flight in both directions.
static void any_moment(void) {
    pthread_t a, b;
    pthread_create(&a, NULL, flood, NULL);
    pthread_create(&b, NULL, drink, NULL);
    for (int i = 0; is_server() && !over && i < 60; i++) {
        if (breaks()) break_connections();
        usleep(t_word(4, i) % 3000);
        pid_t p = 0;
        char *args[] = {"true", NULL};
        switch (i % 5) {
        case 0:
            if (!(p = fork())) _exit(0);
            break;
        case 1:
            if (!(p = fork())) execv("/bin/true", args), _exit(9);
            break;
        case 2: p = vforked("/bin/true", args, 0); break;
        case 3: posix_spawn(&p, "/bin/true", NULL, NULL, args, environ); break;
        case 4: {
            int d = dup(fd), e = dup2(fd, 50);
            close(d);
            usleep(t_word(6, i) % 1000);
            close(e);
        }
        }
        int st = 0;
        if (p && (waitpid(p, &st, 0) != p || st)) line("child %d: %x", i % 5, st);
    }
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    meet();
    talk("after all");
    meet();
}

int main(int argc, char **argv) {
    self = argv[0];
    if (argc > 4 && !strcmp(argv[1], "heir")) return heir(atoi(argv[2]), argv[3], atoi(argv[4]));
    if (argc > 3 && !strcmp(argv[1], "changed")) return changed(atoi(argv[2]), atoi(argv[3]));
    begin_pair(argc, argv, 60);
    kase = getenv("T_ARGS");
    if (!is("dark")) {
        t_host = 0x0a090901;
        if (is_server()) network(1);
    }
    fd = pair_up(&l);
    if (is("forked") || is("dark")) forked();
    if (is("late")) late();
    if (is("reading")) reading();
    if (is("started")) started();
    if (is("exec")) exec_away();
    if (is("passed") || is("passed-many")) passed(0);
    if (is("passed-unread")) passed(1);
    if (is("numbers")) numbers();
    if (is("streams")) streams();
    if (is("any-moment")) any_moment();
    line("SIGPIPE %d", pipes());
    return 0;
}
