// A process ends, or closes a connection, while the connection is broken. All that was sent must arrive, and after it the end of the
// stream. Two programs; the case is in T_ARGS, and whether the connection breaks at all is in T_BREAKS. The client ends; the server
// reads.
#include "t.h"

enum { FLOWS = 200 };

static char buf[1 << 20];
static int l = -1, fd;
static const char *kase;

static int has(const char *k) { return strstr(kase, k) != NULL; }
static int is(const char *k) { return !strcmp(kase, k); }

// Lets SLIM find the break, if `seen`.
static void look(int at, int seen) {
    char c;
    if (seen) recv(at, &c, 1, MSG_DONTWAIT);
}

// Stops the server for a second after it has got a number from the client, so that the client has to wait for it at exit.
static uint64_t hear_and_stop(void) {
    tell(getpid());
    uint64_t n = hear();
    if (!fork()) {
        alarm(0);
        pid_t parent = getppid();
        ms(1000);
        kill(parent, SIGCONT);
        _exit(0);
    }
    kill(getpid(), SIGSTOP);
    return n;
}

// Tells the server the number, and waits until the server is stopped.
static void tell_to_stop(uint64_t n) {
    char path[64], stat[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)hear());
    tell(n);
    while (!strstr(stat, ") T ")) {
        ms(5);
        FILE *f = fopen(path, "r");
        if (!f || !fgets(stat, sizeof stat, f)) return;
        fclose(f);
    }
}

// ---- the last thread of the process returns after the first one has ended ----

enum { LAST_WORDS = 9 };

// The connection must still work in the handlers that run at exit.
static void last_words(void) {
    fcntl(fd, F_SETFL, 0);
    if (full_send(fd, "last word", LAST_WORDS)) line("last words: %s", ename(errno));
}

static void *last_thread(void *early) {
    ms(100);
    if (early) fd = pair_up(&l);
    tell_to_stop(send_till_full(fd, buf, sizeof buf, 3));
    break_if_wanted();
    look(fd, 1);
    return NULL;
}

// With `early` the first thread ends before the process has made a connection.
static void first_ends(int words, int early) {
    if (early && is_server()) fd = pair_up(&l);
    if (is_server()) {
        uint64_t n = hear_and_stop(), off = 0;
        while (off < n) {
            ssize_t r = recv(fd, buf, n - off < sizeof buf ? n - off : sizeof buf, 0);
            if (r <= 0 || !verify(buf, off, r, 3)) {
                line("after %d: %zd %s", off > 0, r, r < 0 ? ename(errno) : "");
                return;
            }
            off += r;
        }
        line("all");
        ssize_t r = words ? full_recv(fd, buf, LAST_WORDS) : 0;
        if (words) line("%zd %.*s", r, r > 0 ? (int)r : 0, buf);
        R(recv(fd, buf, 1, 0));
    } else {
        pthread_t t;
        if (words) atexit(last_words);
        pthread_create(&t, NULL, last_thread, early ? &t : NULL);
        pthread_exit(NULL);
    }
}

// ---- a close with and without SO_LINGER ----

// The server meets the break in a call, or after the close.
static void closing(int linger_s, int bytes, int seen, int waits) {
    if (is_server() != has("swap")) {
        uint64_t n = hear();
        if (!waits) ms(50);
        recv_to_end(fd, buf, sizeof buf, n, 3);
        meet();
    } else {
        struct linger g = {1, linger_s};
        if (linger_s) MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &g, sizeof g));
        uint64_t n = bytes ? send_till_full(fd, buf, sizeof buf, 3) : 5;
        if (!bytes) {
            fill(buf, 0, n, 3);
            MUST(full_send(fd, buf, n));
            acked(fd);
        }
        if (waits) {
            tell(n);
            ms(50);
            break_if_wanted();
        } else {
            break_if_wanted();
            tell(n);
        }
        look(fd, seen);
        R(close(fd));
        meet();
    }
}

// The client closes with unread bytes: a kernel resets the connection, whether or not the break has been noticed.
static void unread(int seen) {
    if (is_server()) {
        MUST(send(fd, "unread", 6, 0));
        meet();
        meet();
        // Which error it is depends on how the connection broke.
        line("an error: %d", recv(fd, buf, 1, 0) < 0);
        meet();
    } else {
        meet();
        arrived(fd, 6);
        break_if_wanted();
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        if (seen) poll(&p, 1, 0);
        if (seen) send(fd, "", 0, MSG_DONTWAIT | MSG_NOSIGNAL);
        R(close(fd));
        meet();
        meet();
    }
}

// ---- a second exit while the process waits for the first one ----

static pthread_t first_thread;

static void *signals(void *p) {
    ms(150);
    pthread_kill(first_thread, SIGUSR1);
    return p;
}

static void *exits_later(void *p) {
    ms(150);
    exit(0);
    return p;
}

static void *quits_later(void *p) {
    ms(150);
    quick_exit(0);
    return p;
}

static void on_signal(int s UNUSED) { exit(0); }

static void exits_twice(void *(*other)(void *)) {
    if (is_server()) {
        recv_to_end(fd, buf, sizeof buf, hear_and_stop(), 3);
    } else {
        tell_to_stop(send_till_full(fd, buf, sizeof buf, 3));
        break_if_wanted();
        look(fd, 1);
        pthread_t t;
        first_thread = pthread_self();
        handle(SIGUSR1, on_signal, 0);
        for (int i = 0; i < 2; i++) pthread_create(&t, NULL, other, NULL);
        exit(0);
    }
}

// ---- an exit with hardly a free descriptor ----

static void scarce(void) {
    static int fds[FLOWS];
    static uint64_t sent[FLOWS];
    struct rlimit r = {300, 300};
    int small = 4096;
    if (is_server()) {
        l = listener();
        MUST(setsockopt(l, SOL_SOCKET, SO_RCVBUF, &small, sizeof small));
        tell(port_of(l));
    } else {
        MUST(setrlimit(RLIMIT_NOFILE, &r));
    }
    int port = is_server() ? 0 : hear();
    for (int i = 0; i < FLOWS; i++) fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
    meet();
    await_negotiation();
    ms(300);
    meet();
    // More than the peer takes, so that bytes are undelivered.
    for (int i = 0; i < FLOWS; i++) {
        if (is_server()) {
            sent[i] = hear();
            continue;
        }
        MUST(setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &small, sizeof small));
        fill(buf, 0, sizeof buf, i);
        ssize_t n;
        while ((n = send(fds[i], buf + sent[i], sizeof buf - sent[i], MSG_DONTWAIT)) > 0) sent[i] += n;
        tell(sent[i]);
    }
    if (is_server()) {
        hear_and_stop();
        for (int i = 0; i < FLOWS; i++) recv_to_end(fds[i], buf, sizeof buf, sent[i], i);
    } else {
        tell_to_stop(0);
        break_if_wanted();
        for (int i = 0; i < FLOWS; i++) look(fds[i], 1);
    }
}

// ---- shutdowns in all orders; nobody has noticed the break ----

static const int orders[][3] = {{SHUT_RDWR, -1}, {SHUT_RD, -1}, {SHUT_RD, SHUT_WR, -1}, {SHUT_WR, SHUT_RD, -1}, {SHUT_RD, SHUT_RDWR, -1}, {-1}};
enum { ORDERS = sizeof orders / sizeof *orders, WORDS = 100 };

// The result of each call must be as without a break, and so must errno after a call that succeeds.
static void shutdowns(void) {
    int all[ORDERS] = {fd};
    for (int i = 1; i < ORDERS; i++) all[i] = pair_up(&l);
    meet();
    if (is_server()) {
        for (int i = 0; i < ORDERS; i++) recv_to_end(all[i], buf, sizeof buf, WORDS, i);
        meet();
        return;
    }
    struct sockaddr_in a;
    for (int i = 0; i < ORDERS; i++) {
        fill(buf, 0, WORDS, i);
        MUST(full_send(all[i], buf, WORDS));
    }
    break_if_wanted();
    for (int i = 0; i < ORDERS; i++) {
        socklen_t n = sizeof a;
        for (const int *how = orders[i]; *how >= 0; how++) R(shutdown(all[i], *how));
        errno = 0;
        // It would notice the break.
        if (orders[i][0] < 0) line("getpeername = %d %s", getpeername(all[i], (void *)&a, &n), ename(errno));
        // The next transport has no other end either.
        ms(100);
        close(all[i]);
    }
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 90);
    kase = getenv("T_ARGS");
    if (!is("scarce") && !has("early")) fd = pair_up(&l);
    if (has("first-ends")) first_ends(has("words"), has("early"));
    if (!strncmp(kase, "close", 5))
        closing(has("lingers") ? 10 : 0, !has("empty"), has("seen"), has("waits"));
    if (is("unread")) unread(0);
    if (is("unread-seen")) unread(1);
    if (is("exits-twice")) exits_twice(exits_later);
    if (is("exits-quickly")) exits_twice(quits_later);
    if (is("exits-in-handler")) exits_twice(signals);
    if (is("scarce")) scarce();
    if (is("shutdowns")) shutdowns();
    return 0;
}
