// Thousands of connections between two processes break at once. Then a byte goes back and forth on each. T_ARGS: how the
// program waits, and the number of connections.
#include "t.h"

enum { MOST = 8192 };
static int fds[MOST], count;

static void *echo(void *arg) {
    char b;
    int fd = (int)(long)arg;
    while (recv(fd, &b, 1, 0) == 1 && send(fd, &b, 1, MSG_NOSIGNAL) == 1) {}
    return NULL;
}

// One byte each way on all connections, in the order in which they become ready.
static int by_poll(void) {
    static struct pollfd p[MOST];
    int left = count;
    for (int i = 0; i < count; i++) {
        p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        char b = i;
        if (!is_server() && send(fds[i], &b, 1, MSG_NOSIGNAL) != 1) return line("send: %s", ename(errno)), -1;
    }
    while (left) {
        if (poll(p, count, -1) < 0) return line("poll: %s", ename(errno)), -1;
        for (int i = 0; i < count; i++) {
            if (p[i].fd < 0 || !p[i].revents) continue;
            char b;
            ssize_t n = recv(fds[i], &b, 1, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) continue;
            if (n != 1 || b != (char)i) return line("recv %d: %zd %s", i, n, ename(errno)), -1;
            if (is_server() && send(fds[i], &b, 1, MSG_NOSIGNAL) != 1) return line("send: %s", ename(errno)), -1;
            p[i].fd = -1;
            left--;
        }
    }
    return 0;
}

static int one_after_the_other(void) {
    for (int i = 0; i < count; i++) {
        char b = i;
        if (!is_server() && send(fds[i], &b, 1, MSG_NOSIGNAL) != 1) return line("send: %s", ename(errno)), -1;
        b = ~i;
        if (recv(fds[i], &b, 1, 0) != 1 || b != (char)i) return line("recv %d: %s", i, ename(errno)), -1;
        if (is_server() && send(fds[i], &b, 1, MSG_NOSIGNAL) != 1) return line("send: %s", ename(errno)), -1;
    }
    return 0;
}

static void *ask(void *arg) {
    int i = (int)(long)arg;
    char b = i;
    if (send(fds[i], &b, 1, MSG_NOSIGNAL) != 1) line("send: %s", ename(errno));
    b = ~i;
    if (recv(fds[i], &b, 1, 0) != 1 || b != (char)i) line("recv %d: %s", i, ename(errno));
    return NULL;
}

// A thread for each connection.
static int by_threads(void) {
    static pthread_t t[MOST];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    for (int i = 0; i < count; i++)
        if (pthread_create(&t[i], &small, is_server() ? echo : ask, (void *)(long)(is_server() ? fds[i] : i))) return line("no thread"), -1;
    for (int i = 0; i < count && !is_server(); i++) pthread_join(t[i], NULL);
    return 0;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 100);
    char how[16] = "";
    sscanf(getenv("T_ARGS"), "%15s %d", how, &count);
    struct rlimit r;
    MUST(getrlimit(RLIMIT_NOFILE, &r));
    r.rlim_cur = r.rlim_max;
    MUST(setrlimit(RLIMIT_NOFILE, &r));
    int l = -1, port = 0;
    if (is_server()) l = listener(), tell(port_of(l));
    else port = hear();
    for (int i = 0; i < count; i++) {
        fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        // One byte on each, so that both programs number the connections alike.
        char b = 0;
        if (!is_server()) MUST(full_send(fds[i], &b, 1));
        else MUST(full_recv(fds[i], &b, 1));
    }
    meet();
    if (atoi(getenv("T_NEGOTIATION_MS") ?: "0")) ms(1000);
    meet();
    double begun = now_s();
    if (is_server() && atoi(getenv("T_BREAKS") ?: "0")) line("broken: %d", break_connections() >= count);
    else if (is_server()) line("broken: 1");
    double since = now_s();
    meet();
    int bad = !strcmp(how, "poll") ? by_poll() : !strcmp(how, "threads") ? by_threads() : one_after_the_other();
    double all = now_s() - since;
    line("good: %d", !bad);
    // A millisecond for each connection is plenty. If each waited for a kernel timer, that would take 40 times as long.
    line("in time: %d", all < 10);
    fprintf(stderr, "%s: broken in %.2f s, all in %.2f s\n", how, since - begun, all);
    meet();
    if (is_server() && !strcmp(how, "threads")) _exit(0);
    return 0;
}
