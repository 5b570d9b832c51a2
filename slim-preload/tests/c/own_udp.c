// A server that also serves UDP, on the port number of its TCP listener, once a client has sent its first bytes, as iperf3
// does. It must receive only its client's datagrams there.
// With T_ARGS=frozen, the other threads of the client do not run while it connects, as on a machine with too much to do. With T_ARGS=stopped
// they do not run for long, as in a debugger: a client that makes many connections is not held up for long.
#include "t.h"
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>

enum { FROZEN_MS = 180, STOPPED_MS = 20000, CONNECTIONS = 12 };

static int is(const char *k) { return !strcmp(getenv("T_ARGS"), k); }
static int clients(void) { return is("frozen") ? 3 : 12; }

static void serve(void) {
    int l = listener(), port = port_of(l), on = 1;
    tell(port);
    if (is("stopped")) {
        hear();
        return;
    }
    for (int i = 0; i < clients(); i++) {
        char b[16] = "";
        int s = MUST(accept(l, NULL, NULL));
        full_recv(s, b, 1);
        int u = MUST(socket(AF_INET, SOCK_DGRAM, 0));
        struct sockaddr_in a = v4(port);
        MUST(setsockopt(u, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
        MUST(bind(u, (void *)&a, sizeof a));
        struct pollfd p = {u, POLLIN, 0};
        // Longer than SLIM waits before it repeats a query.
        line("client %d: %s", i, poll(&p, 1, 120) ? "a datagram that it has not sent" : "nothing yet");
        MUST(full_send(s, "u", 1));
        MUST(poll(&p, 1, 5000));
        line("client %d: %zd bytes, %.5s", i, recv(u, b, sizeof b, 0), b);
        MUST(full_send(s, "e", 1));
        close(u);
        close(s);
    }
}

// Stops all threads of this process but the caller, for some time from now on. They exist since the first socket call.
static pid_t freeze_others(int for_ms) {
    int stopped[2];
    char b = 0;
    pid_t me = getpid();
    connect(MUST(socket(AF_INET, SOCK_STREAM, 0)), (void *)&(struct sockaddr_in){.sin_family = AF_INET}, 1);
    MUST(pipe(stopped));
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    pid_t tracer = MUST(fork());
    if (!tracer) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/task", me);
        DIR *d = opendir(path);
        for (struct dirent *e; (e = readdir(d));) {
            pid_t t = atoi(e->d_name);
            if (!t || t == me) continue;
            MUST(ptrace(PTRACE_SEIZE, t, 0, 0));
            MUST(ptrace(PTRACE_INTERRUPT, t, 0, 0));
            MUST(waitpid(t, NULL, __WALL));
        }
        MUST(write(stopped[1], "s", 1));
        ms(for_ms);
        // They go on when their tracer is gone.
        _exit(0);
    }
    close(stopped[1]);
    MUST(read(stopped[0], &b, 1));
    close(stopped[0]);
    return tracer;
}

// Each client is a new process, which SLIM does not know yet.
static void ask(int port) {
    char b = 0;
    if (is("frozen")) freeze_others(FROZEN_MS);
    int c = dial(port), u = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    MUST(full_send(c, "b", 1));
    full_recv(c, &b, 1);
    struct sockaddr_in a = v4(port);
    MUST(sendto(u, "hello", 5, 0, (void *)&a, sizeof a));
    full_recv(c, &b, 1);
    _exit(0);
}

static void connect_often(int port) {
    pid_t tracer = freeze_others(STOPPED_MS);
    double begun = now_s();
    for (int i = 0; i < CONNECTIONS; i++) dial(port);
    line("%d connections: %s", CONNECTIONS, now_s() - begun < CONNECTIONS / 2 ? "in time" : "LATE");
    kill(tracer, SIGKILL);
    MUST(waitpid(tracer, NULL, 0));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    if (is_server()) {
        serve();
        return 0;
    }
    int port = hear();
    if (is("stopped")) {
        connect_often(port);
        tell(1);
        return 0;
    }
    for (int i = 0; i < clients(); i++) {
        pid_t p = MUST(fork());
        if (!p) ask(port);
        int status = 0;
        MUST(waitpid(p, &status, 0));
        line("client %d: %d", i, status);
    }
    return 0;
}
