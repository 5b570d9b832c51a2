// Connections break while they wait to be accepted by a busy server. Two programs; T_ARGS says after how many milliseconds
// they break, and after how many more they are accepted; T_BREAKS says whether they break at all.
#include "t.h"

enum { SIZE = 100000 };
static char buf[SIZE];

// A single-threaded server computes meanwhile.
static void compute(int for_ms) {
    double until = now_s() + for_ms / 1000.0;
    volatile unsigned n = 0;
    while (now_s() < until) {
        n++;
        usleep(1000);
    }
}

static void serve(int l, const char *what) {
    int fd = MUST(accept(l, NULL, NULL));
    line("%s: %zd", what, full_recv(fd, buf, SIZE));
    line("verified %d", verify(buf, 0, SIZE, 1));
    fill(buf, 0, SIZE, 2);
    R(full_send(fd, buf, SIZE));
    R(recv(fd, buf, 1, 0));
    close(fd);
}

static void ask(int fd, const char *what) {
    line("%s: %zd", what, full_recv(fd, buf, SIZE));
    line("verified %d", verify(buf, 0, SIZE, 2));
    close(fd);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int before = 0, after = 0;
    sscanf(getenv("T_ARGS"), "%d %d", &before, &after);
    if (is_server()) {
        int l = listener();
        tell(port_of(l));
        hear();
        compute(before);
        if (atoi(getenv("T_BREAKS"))) MUST(break_connections());
        compute(after);
        serve(l, "first");
        serve(l, "second");
        close(l);
    } else {
        int port = hear(), fd[2];
        for (int i = 0; i < 2; i++) fd[i] = dial(port);
        fill(buf, 0, SIZE, 1);
        for (int i = 0; i < 2; i++) R(full_send(fd[i], buf, SIZE));
        tell(1);
        ask(fd[0], "first");
        ask(fd[1], "second");
    }
    meet();
    line("SIGPIPE %d", pipes());
    return 0;
}
