// The server closes connections with unread bytes. Each client's call must end in ECONNRESET, and soon. T_ARGS: the number of
// worker processes that share the listener (0: one process accepts), and the connections of each of the two clients.
#include "t.h"
#include <sys/prctl.h>
#include <sys/wait.h>

// Where SLIM waits for something that does not come, it waits for a second. On two busy processors the owner of the listener and the
// worker got their turns after 160 and 216 ms.
#define SOON 0.5

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void serve(int listener) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        int s = accept(listener, NULL, NULL);
        if (s < 0) continue;
        struct pollfd p = {s, POLLIN, 0};
        poll(&p, 1, 1000);
        close(s);
    }
}

static int client(int port, int count) {
    int late = 0, other = 0;
    double worst = 0;
    for (int i = 0; i < count; i++) {
        int c = MUST(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in a = v4(port);
        MUST(connect(c, (void *)&a, sizeof a));
        char b[100] = "";
        double begun = now();
        // The reset may come between the two calls.
        int r = send(c, b, sizeof b, MSG_NOSIGNAL);
        if (r > 0) r = recv(c, b, sizeof b, 0);
        double took = now() - begun;
        worst = took > worst ? took : worst;
        late += took > SOON;
        other += r >= 0 || (errno != ECONNRESET && errno != EPIPE);
        close(c);
    }
    if (late || other) printf("%d of %d late, worst %.0f ms; %d ended otherwise\n", late, count, worst * 1e3, other);
    return late || other;
}

int main(void) {
    int workers = 0, count = 0;
    if (sscanf(getenv("T_ARGS"), "workers=%d count=%d", &workers, &count) != 2) return 2;
    int l = listener(), port = port_of(l), bad = 0;
    pid_t servers[16], clients[2];
    int all = workers ? workers : 1;
    for (int i = 0; i < all; i++)
        if (!(servers[i] = MUST(fork()))) serve(l);
    close(l);
    for (int i = 0; i < 2; i++)
        if (!(clients[i] = MUST(fork()))) exit(client(port, count));
    for (int i = 0; i < 2; i++) {
        int status;
        waitpid(clients[i], &status, 0);
        bad |= status;
    }
    for (int i = 0; i < all; i++) kill(servers[i], SIGKILL), waitpid(servers[i], NULL, 0);
    return bad ? 1 : 0;
}
