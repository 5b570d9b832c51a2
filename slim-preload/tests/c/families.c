// The family of sockets and the form of their addresses, for connections that break and for those that are escalated. T_ARGS:
// the family of the client's socket, that of the server's, the program that notices the break first, and whether the
// connection is resumed (`resume`) or escalated (`over`).
#include "t.h"
#include <netinet/ip.h>

static void end_of(const char *what, int fd, int (*ask)(int, struct sockaddr *, socklen_t *), int quiet) {
    struct sockaddr_storage a;
    memset(&a, 0xee, sizeof a);
    socklen_t n = sizeof a;
    if (ask(fd, (void *)&a, &n)) {
        line("%s: %s", what, ename(errno));
        return;
    }
    char text[64] = "";
    struct sockaddr_in6 *six = (void *)&a;
    struct sockaddr_in *four = (void *)&a;
    inet_ntop(a.ss_family, a.ss_family == AF_INET ? (void *)&four->sin_addr : (void *)&six->sin6_addr, text, sizeof text);
    static int ports[2];
    int port = ntohs(a.ss_family == AF_INET ? four->sin_port : six->sin6_port), *first = &ports[*what == 'p'];
    if (!*first) *first = port;
    line("%s: family %d, %u bytes, %s, port as before: %d", what, a.ss_family, n, quiet ? "" : text, port == *first);
}

static void option(const char *what, int fd, int level, int name) {
    int v = -1;
    socklen_t n = sizeof v;
    int r = getsockopt(fd, level, name, &v, &n);
    line("%s: %d", what, r ? -errno : v);
}

static void look(int fd) {
    end_of("local", fd, getsockname, 0);
    end_of("peer", fd, getpeername, 0);
    option("domain", fd, SOL_SOCKET, SO_DOMAIN);
    option("only IPv6", fd, IPPROTO_IPV6, IPV6_V6ONLY);
    option("class", fd, IPPROTO_IPV6, IPV6_TCLASS);
    option("hops", fd, IPPROTO_IPV6, IPV6_UNICAST_HOPS);
    option("type of service", fd, IPPROTO_IP, IP_TOS);
    option("reuse", fd, SOL_SOCKET, SO_REUSEADDR);
    option("error", fd, SOL_SOCKET, SO_ERROR);
}

// Returns only when all threads, those on other processors too, have stopped.
static void stop(pid_t p) {
    char path[64], b[512];
    snprintf(path, sizeof path, "/proc/%d/task", p);
    MUST(kill(p, SIGSTOP));
    for (int runs = 1; runs;) {
        runs = 0;
        DIR *d = opendir(path);
        for (struct dirent *e; (e = readdir(d));) {
            char at[400];
            snprintf(at, sizeof at, "%s/%s/stat", path, e->d_name);
            int f = e->d_name[0] == '.' ? -1 : open(at, O_RDONLY);
            ssize_t n = f < 0 ? 0 : read(f, b, sizeof b - 1);
            if (f >= 0) close(f);
            b[n > 0 ? n : 0] = 0;
            char *state = strrchr(b, ')');
            runs |= state && state[2] != 'T';
        }
        closedir(d);
    }
}

static int server(int six, int port) {
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    struct sockaddr_in four = v4(port);
    int off = 0, l = MUST(socket(six ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
    if (six) setsockopt(l, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    MUST(six ? bind(l, (void *)&any, sizeof any) : bind(l, (void *)&four, sizeof four));
    MUST(listen(l, 8));
    return l;
}

static int client(int six, int port) {
    struct sockaddr_in four = v4(port);
    struct sockaddr_in6 mapped = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr);
    int c = MUST(socket(six ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
    MUST(six ? connect(c, (void *)&mapped, sizeof mapped) : connect(c, (void *)&four, sizeof four));
    return c;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    char cs[8], ss[8], first[8], then[8];
    if (sscanf(getenv("T_ARGS"), "%7s %7s %7s %7s", cs, ss, first, then) != 4) return 1;
    int fd, i_am_first = !strcmp(first, is_server() ? "server" : "client");
    tell(getpid());
    long other = hear();
    if (is_server()) {
        int plain = listener(), l = server(!strcmp(ss, "six"), 0);
        // Another connection first, to a listener of the other kind.
        tell(port_of(plain));
        MUST(accept(plain, NULL, NULL));
        tell(port_of(l));
        fd = MUST(accept(l, NULL, NULL));
    } else {
        dial(hear());
        fd = client(!strcmp(cs, "six"), hear());
    }
    int class = 0x20;
    if (setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &class, sizeof class)) setsockopt(fd, IPPROTO_IP, IP_TOS, &class, sizeof class);
    await_negotiation();
    meet();
    look(fd);
    if (!strcmp(then, "over")) {
        // The peer is stopped, so attempts get no answer.
        meet();
        if (i_am_first) {
            stop(other);
            if (atoi(getenv("T_BREAKS") ?: "0")) {
                // The kernel's list of connections may be incomplete, so several passes are made.
                for (int n = 0; n < 50 && break_connections() > 0; n++) {}
            } else {
                // The closest equivalent in a bare run: the peer causes the same error.
                MUST(kill(other, SIGCONT));
                tell(1);
                hear();
            }
            char b;
            // The errno depends on what broke the connection.
            line("ends: %d", recv(fd, &b, 1, 0) < 0);
            look(fd);
            R(send(fd, "x", 1, MSG_NOSIGNAL));
            look(fd);
            if (atoi(getenv("T_BREAKS") ?: "0")) MUST(kill(other, SIGCONT)), tell(1), hear();
        } else {
            struct linger none = {1, 0};
            hear();
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
            close(fd);
            tell(1);
        }
        meet();
        return 0;
    }
    for (int round = 0; round < 2; round++) {
        meet();
        if (is_server() && atoi(getenv("T_BREAKS") ?: "0")) break_connections();
        meet();
        char b[4] = "";
        if (i_am_first) {
            MUST(full_send(fd, "abc", 4));
            // The other program makes no call before the connection is resumed.
            ms(300);
            tell(1);
        } else {
            hear();
        }
        if (i_am_first) MUST(full_recv(fd, b, 4));
        else MUST(full_recv(fd, b, 4)), MUST(full_send(fd, b, 4));
        line("round %d: %s", round, b);
        look(fd);
        class = 0x40 + 0x20 * round;
        line("set: %d", setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &class, sizeof class) ? errno : 0);
        look(fd);
    }
    // This option makes the connection plain TCP.
    int clamp = 1 << 16;
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &clamp, sizeof clamp));
    look(fd);
    look(MUST(dup(fd)));
    meet();
    return 0;
}
