// A program has opened as many descriptors as its limit allows. Broken connections are resumed one after the other, and the
// program can still open as many descriptors as in a bare run. T_ARGS: the soft and the hard limit on open files, and the ends
// that have these limits.
#include "t.h"

enum { N = 40 };

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int soft = 0, hard = 0, fds[N], l = -1, port = 0, room = 0;
    char ends[16] = "";
    sscanf(getenv("T_ARGS"), "%d %d %15s", &soft, &hard, ends);
    struct rlimit limit = {soft, hard}, now;
    if (strstr(ends, "both") || strstr(ends, is_server() ? "server" : "client")) MUST(setrlimit(RLIMIT_NOFILE, &limit));
    MUST(getrlimit(RLIMIT_NOFILE, &limit));
    if (is_server()) l = listener(), tell(port_of(l));
    else port = hear();
    for (int i = 0; i < N; i++) {
        fds[i] = is_server() ? MUST(accept(l, NULL, NULL)) : dial(port);
        char b = i;
        if (is_server()) MUST(full_recv(fds[i], &b, 1));
        else MUST(full_send(fds[i], &b, 1));
    }
    await_negotiation();
    await_negotiation();
    meet();
    // Only the program with a low limit fills it; the other one has a usual limit.
    int full = limit.rlim_cur < 1000;
    while (full && dup(0) >= 0) room++;
    // SLIM's own descriptors take some numbers. Its reserve for broken connections takes none if the limit can be raised.
    if (full) line("room: %d", room > soft - N - 30);
    meet();
    if (is_server()) {
        int last = dup(0);
        // Frees a descriptor, which breaking connections needs.
        close(last < 0 ? 50 : last);
        line("broken: %d", atoi(getenv("T_BREAKS") ?: "0") ? break_connections() >= N : 1);
        while (full && dup(0) >= 0) {}
    }
    double since = now_s();
    meet();
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < N; i++) {
            int v = i + 1000 * round, w = v;
            // The two ends take turns to be the first that notices the break.
            int first = i % 2 == is_server();
            if (!first && full_recv(fds[i], &w, sizeof w) != sizeof w) line("recv %d: %s", i, ename(errno));
            if (full_send(fds[i], &v, sizeof v)) line("send %d: %s", i, ename(errno));
            if (first && full_recv(fds[i], &w, sizeof w) != sizeof w) line("recv %d: %s", i, ename(errno));
            if (v != w) line("connection %d says %d", i, w);
        }
    line("soon: %d", now_s() - since < 5);
    MUST(getrlimit(RLIMIT_NOFILE, &now));
    line("limits as before: %d", now.rlim_cur == limit.rlim_cur && now.rlim_max == limit.rlim_max);
    meet();
    return 0;
}
