// Every socket option, one on each of many connections, must have the same value before and after the connections break.
// Options that a new transport cannot have make the connection plain TCP. The table of options is in the file T_TABLE.
#include "t.h"
#include <linux/filter.h>
#include <linux/net_tstamp.h>

struct row {
    int level, name;
    char kind[8], fate[8], label[48];
};
static struct row rows[512];
static int count;

static void read_table(void) {
    FILE *f = fopen(getenv("T_TABLE"), "r");
    if (!f) _exit(91);
    while (fscanf(f, "%d %d %7s %7s %47s", &rows[count].level, &rows[count].name, rows[count].kind, rows[count].fate,
                  rows[count].label) == 5)
        count++;
    fclose(f);
}

static int is(const char *a, const char *b) { return !strcmp(a, b); }

struct value {
    unsigned char b[40];
    socklen_t n;
    int r;
};

static struct value get(int fd, const struct row *r) {
    struct value v = {.n = is(r->kind, "Int") ? 4 : is(r->kind, "Sizes") ? 4 : is(r->kind, "Linger") || is(r->kind, "Wide") ? 8 : 16};
    v.r = getsockopt(fd, r->level, r->name, v.b, &v.n);
    if (is(r->kind, "Sizes")) {
        socklen_t n = 4;
        getsockopt(fd, r->level, SO_RCVBUF, v.b + 4, &n);
        n = 4;
        getsockopt(fd, r->level, SO_BUF_LOCK, v.b + 8, &n);
    }
    return v;
}

static int differ(struct value a, struct value b) { return a.r != b.r || memcmp(a.b, b.b, sizeof a.b); }

static const char *shown(struct value v) {
    static char b[4][100];
    static int i;
    char *o = b[i = (i + 1) % 4];
    sprintf(o, "%d:", v.r);
    for (int k = 0; k < 16; k++) sprintf(o + strlen(o), "%02x", v.b[k]);
    return o;
}

static int set(int fd, const struct row *r, const void *value, int n) { return setsockopt(fd, r->level, r->name, value, n); }

// Changes the value of the option. Returns false if the kernel refuses.
static int change(int fd, const struct row *r) {
    struct value before = get(fd, r);
    if (before.r) return 0;
    if (is(r->kind, "Int")) {
        static const struct {
            const char *label;
            int value;
        } special[] = {{"TCP_USER_TIMEOUT", 54321}, {"TCP_KEEPIDLE", 33}, {"TCP_KEEPINTVL", 7}, {"TCP_LINGER2", 9},
                       {"TCP_NOTSENT_LOWAT", 70000}, {"TCP_WINDOW_CLAMP", 50000}, {"TCP_RTO_MAX_MS", 5000},
                       {"TCP_RTO_MIN_US", 100000}, {"TCP_DELACK_MAX_US", 9000}, {"IP_TTL", 77}, {"IPV6_UNICAST_HOPS", 77},
                       {"IP_LOCAL_PORT_RANGE", 40000 | 50000 << 16}, {"SO_PRIORITY", 5}, {"IP_TOS", 0x10}, {"IPV6_TCLASS", 0x20},
                       {"SO_MARK", 9}};
        for (unsigned i = 0; i < sizeof special / sizeof *special; i++)
            if (is(r->label, special[i].label)) set(fd, r, &special[i].value, 4);
        static const int others[] = {1, 0, 2, 5, 77, 3, 4, -1, 4096, 100000};
        for (unsigned i = 0; i < sizeof others / sizeof *others && !differ(before, get(fd, r)); i++) set(fd, r, &others[i], 4);
    } else if (is(r->kind, "Sizes")) {
        int s = 70000, t = 90000;
        set(fd, r, &s, 4);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &t, 4);
    } else if (is(r->kind, "Linger")) {
        set(fd, r, &(struct linger){1, 9}, 8);
    } else if (is(r->kind, "Time")) {
        set(fd, r, &(struct timeval){8, 0}, 16);
    } else if (is(r->kind, "Wide")) {
        uint64_t rate = 1000000000;
        struct sock_txtime t = {CLOCK_MONOTONIC, 0};
        set(fd, r, r->name == SO_TXTIME ? (void *)&t : (void *)&rate, 8);
    } else if (r->level == SOL_SOCKET) {
        set(fd, r, "lo", 3);
    } else {
        set(fd, r, memcmp(before.b, "reno", 4) ? "reno" : "cubic", 5);
    }
    return differ(before, get(fd, r));
}

enum { MSS = 1000 };

// Sets an option that binds the flow to its transport. Returns false if that is not possible.
static int bind_with(int fd, const struct row *r) {
    int zero = 0, mss = MSS, stamps = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    struct sock_filter all = BPF_STMT(BPF_RET | BPF_K, 0xffff);
    struct sock_fprog program = {1, &all};
    struct tcp_md5sig key = {.tcpm_keylen = 3, .tcpm_key = "key"};
    struct sockaddr_in other = {.sin_family = AF_INET, .sin_addr = {htonl(0x0a090807)}};
    memcpy(&key.tcpm_addr, &other, sizeof other);
    if (is(r->label, "SO_TIMESTAMPING")) return !set(fd, r, &stamps, 4);
    if (is(r->label, "SO_TIMESTAMPING_NEW")) return !set(fd, r, &stamps, 4);
    if (is(r->label, "SO_ATTACH_FILTER")) return !set(fd, r, &program, sizeof program);
    if (is(r->label, "SO_PEEK_OFF")) return !set(fd, r, &zero, 4);
    if (is(r->label, "TCP_MAXSEG")) return !set(fd, r, &mss, 4);
    if (is(r->label, "TCP_MD5SIG")) return !set(fd, r, &key, sizeof key);
    if (is(r->label, "TCP_ULP")) return !set(fd, r, "tls", 3);
    if (is(r->label, "IP_OPTIONS")) return !set(fd, r, "\1\1\1\1", 4);
    if (is(r->label, "IPV6_HOPOPTS")) return !set(fd, r, "\0\0\1\4\0\0\0\0", 8);
    if (is(r->label, "IPV6_MTU")) return !set(fd, r, (int[]){1300}, 4);
    return 0;
}

static volatile sig_atomic_t told, told_of;
static void on_told(int s UNUSED, siginfo_t *i, void *c UNUSED) {
    told++;
    told_of = i->si_fd;
}

static int four, six;

// Makes another connection. `how` says how to prepare the client's socket before it connects.
static int another(int v, int how) {
    if (is_server()) {
        int fd = MUST(accept(v == 6 ? six : four, NULL, NULL));
        return fd;
    }
    int c = MUST(socket(v == 6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0)), mss = MSS;
    if (how) MUST(setsockopt(c, IPPROTO_TCP, TCP_MAXSEG, &mss, 4));
    struct sockaddr_in a = v4(four);
    struct sockaddr_in6 b = v6(six);
    MUST(connect(c, v == 6 ? (void *)&b : (void *)&a, v == 6 ? sizeof b : sizeof a));
    return c;
}

static int listen6(void) {
    int s = MUST(socket(AF_INET6, SOCK_STREAM, 0));
    struct sockaddr_in6 a = v6(0);
    MUST(bind(s, (void *)&a, sizeof a));
    MUST(listen(s, 1024));
    return s;
}

static void listeners(void) {
    if (is_server()) {
        four = listener();
        six = listen6();
        tell(port_of(four));
        tell(port_of(six));
    } else {
        four = hear();
        six = hear();
    }
}

static int pinged(int fd) {
    char b[4] = "";
    struct timeval limit = {20, 0};
    if (is_server()) return full_recv(fd, b, 4) == 4 && !memcmp(b, "ping", 4) && !full_send(fd, "pong", 4);
    (void)limit;
    return !full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4 && !memcmp(b, "pong", 4);
}

static void both_break(void) {
    meet();
    if (is_server() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

static void every(void) {
    static int fds[512], ok[512];
    static struct value want[512];
    listeners();
    int owned = another(4, 0), early = another(4, 1), copied = another(4, 0), uncopied = another(4, 0), late = another(4, 0), inherits, mss = MSS, on = 1;
    meet();
    // Connections accepted from now on inherit the option from their listener.
    int save = four;
    if (is_server()) {
        four = listener();
        MUST(setsockopt(four, IPPROTO_TCP, TCP_MAXSEG, &mss, 4));
        tell(port_of(four));
    } else {
        four = hear();
    }
    inherits = another(4, 0);
    four = save;
    for (int i = 0; i < count; i++)
        if (!is(rows[i].fate, "Nothing") && !is(rows[i].fate, "Like")) fds[i] = another(rows[i].level == IPPROTO_IPV6 ? 6 : 4, 0);
    meet();
    await_negotiation();
    meet();
    int changed = 0, bound = 0;
    for (int i = 0; i < count; i++) {
        if (!fds[i]) continue;
        ok[i] = is(rows[i].fate, "Bound") ? !is_server() && bind_with(fds[i], &rows[i]) : change(fds[i], &rows[i]);
        if (!ok[i] && !is_server()) line("not set: %s", rows[i].label);
        changed += ok[i] && !is(rows[i].fate, "Bound");
        bound += ok[i] && is(rows[i].fate, "Bound");
    }
    line("changed %d", changed);
    line("bound %d", bound);
    // A send that is not copied makes the connection plain TCP. Without the option the kernel ignores the flag.
    if (is_server()) {
        char b;
        MUST(full_recv(copied, &b, 1));
        MUST(full_recv(uncopied, &b, 1));
    } else {
        MUST(setsockopt(uncopied, SOL_SOCKET, SO_ZEROCOPY, &on, 4));
        MUST(setsockopt(late, SOL_SOCKET, SO_ZEROCOPY, &on, 4));
        MUST(send(copied, "c", 1, MSG_ZEROCOPY));
        MUST(send(uncopied, "u", 1, MSG_ZEROCOPY));
    }
    struct sigaction sa = {.sa_sigaction = on_told, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGUSR2, &sa, NULL);
    MUST(fcntl(owned, F_SETOWN, getpid()));
    MUST(fcntl(owned, F_SETSIG, SIGUSR2));
    MUST(fcntl(owned, F_SETFL, fcntl(owned, F_GETFL) | O_ASYNC));
    // Time for the peer to hear which connections have become plain TCP.
    ms(100);
    meet();
    // Some options report the value that was set only while the connection stands, so their values are read before the break.
    for (int i = 0; i < count; i++)
        if (fds[i]) want[i] = get(fds[i], &rows[i]);
    both_break();
    // The first such send is the call that meets the break.
    char z = 0;
    int arrived = is_server() ? full_recv(late, &z, 1) == 1 && z == 'z' : send(late, "z", 1, MSG_ZEROCOPY) == 1;
    line("uncopied after a break: %s", arrived ? "held" : "BROKEN");
    for (int i = 0; i < count; i++) {
        if (!fds[i]) continue;
        if (is(rows[i].fate, "Bound")) {
            int plain = is_server() ? 1 : ok[i];
            if (plain && !is_server() && pinged(fds[i])) line("HELD: %s", rows[i].label);
            continue;
        }
        if (!pinged(fds[i])) line("BROKEN: %s %s", rows[i].label, ename(errno));
        struct value v = get(fds[i], &rows[i]);
        // The kernel changes these two options by itself.
        if (differ(want[i], v) && !is(rows[i].label, "TCP_QUICKACK") && !is(rows[i].label, "SO_INCOMING_CPU"))
            line("LOST: %s %s %s", rows[i].label, shown(want[i]), shown(v));
    }
    line("copied: %s", pinged(copied) ? "held" : "BROKEN");
    line("uncopied: %s", pinged(uncopied) ? "HELD" : "plain");
    line("before it was connected: %s", pinged(early) ? "HELD" : "plain");
    line("from the listener: %s", pinged(inherits) ? "HELD" : "plain");
    line("owner %d, signal %d, flag %d", fcntl(owned, F_GETOWN) == getpid(), fcntl(owned, F_GETSIG) == SIGUSR2,
         !!(fcntl(owned, F_GETFL) & O_ASYNC));
    ms(100);
    line("told of the new connection: %d", told > 0 && told_of == owned);
    // Before the peer may send.
    told = told_of = 0;
    meet();
    MUST(full_send(owned, "x", 1));
    for (int i = 0; i < 2000 && !told; i++) ms(1);
    line("told of a byte: %d", told > 0 && told_of == owned);
    meet();
}

// A firewall rejects SYNs without the mark. Only the client's socket has the mark, set before it connects.
static void marked(void) {
    int on = 7;
    if (is_server()) {
        int rules = system("nft 'add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o "
                           "meta mark != 7 tcp flags & (syn|ack) == syn reject with icmp type host-unreachable'");
        if (rules) line("no rules");
        four = listener();
        tell(port_of(four));
    } else {
        four = hear();
    }
    int fd;
    if (is_server()) {
        fd = MUST(accept(four, NULL, NULL));
    } else {
        fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in a = v4(four);
        R(connect(fd, (void *)&a, sizeof a));
        close(fd);
        fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
        MUST(setsockopt(fd, SOL_SOCKET, SO_MARK, &on, 4));
        R(connect(fd, (void *)&a, sizeof a));
    }
    meet();
    await_negotiation();
    both_break();
    line("marked: %d", pinged(fd));
    both_break();
    line("again: %d", pinged(fd));
}

static volatile sig_atomic_t mine, strangers;

static void on_other(int s UNUSED, siginfo_t *i, void *c UNUSED) {
    if (i->si_code == POLL_IN && i->si_fd != mine) strangers++;
}

// A connection whose owner gets signals breaks again and again, and a byte comes at once on the new one. Signals name the descriptor
// that the application knows.
static void owned(void) {
    int l = -1, fd = pair_up(&l);
    mine = fd;
    struct sigaction sa = {.sa_sigaction = on_other, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGUSR2, &sa, NULL);
    MUST(fcntl(fd, F_SETOWN, getpid()));
    MUST(fcntl(fd, F_SETSIG, SIGUSR2));
    MUST(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC));
    for (int n = 0; n < 300; n++) {
        both_break();
        char x = 'x';
        if (is_server() == n % 2) MUST(full_send(fd, &x, 1));
        else MUST(full_recv(fd, &x, 1));
    }
    line("signals of unknown descriptors: %d, flag %d", (int)strangers, !!(fcntl(fd, F_GETFL) & O_ASYNC));
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    if (is(getenv("T_ARGS"), "owned")) {
        owned();
        return 0;
    }
    if (is(getenv("T_ARGS"), "marked")) {
        marked();
        return 0;
    }
    read_table();
    every();
    return 0;
}
