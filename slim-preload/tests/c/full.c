// A program that has opened all that its limit allows: connections that break come back, one after the other, and the program
// gets no descriptor fewer than it could have. T_ARGS: how much it may open, and how far it could raise that.
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
    settle();
    settle();
    meet();
    // Not the one that has a limit as it is usual.
    int full = limit.rlim_cur < 1000;
    while (full && dup(0) >= 0) room++;
    // SLIM's own take some, but what is kept for connections that break takes none of what could be raised.
    if (full) line("room: %d", room > soft - N - 30);
    meet();
    if (is_server()) {
        int last = dup(0);
        // It needs a descriptor.
        close(last < 0 ? 50 : last);
        line("broken: %d", atoi(getenv("T_BREAKS") ?: "0") ? break_connections() >= N : 1);
        while (full && dup(0) >= 0) {}
    }
    double since = now_s();
    meet();
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < N; i++) {
            int v = i + 1000 * round, w = v;
            // In turn one end and the other is the first to find out.
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
