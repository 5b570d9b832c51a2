// The limit on open files always has the value that the program has set: also in children, and while connections are closed
// with bytes in flight.
#include "t.h"
#include <stdatomic.h>

enum { N = 120 };
static atomic_int stop, wrong, looks;

static void *sets(void *x) {
    (void)x;
    for (int i = 0; !stop; i++) {
        struct rlimit want = {i % 2 ? 500 : 600, 1000}, got;
        MUST(setrlimit(RLIMIT_NOFILE, &want));
        MUST(getrlimit(RLIMIT_NOFILE, &got));
        wrong += got.rlim_cur != want.rlim_cur || sysconf(_SC_OPEN_MAX) != (long)want.rlim_cur;
        looks++;
    }
    return NULL;
}

static void *forks(void *x) {
    (void)x;
    while (!stop) {
        struct rlimit got = {0, 0};
        pid_t p = MUST(fork());
        if (!p) {
            getrlimit(RLIMIT_NOFILE, &got);
            _exit(got.rlim_cur != 500 && got.rlim_cur != 600);
        }
        int st = -1;
        waitpid(p, &st, 0);
        wrong += st != 0;
    }
    return NULL;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    static int fds[N];
    static char much[1 << 20];
    int l = -1;
    for (int i = 0; i < N; i++) {
        if (is_server()) {
            if (l < 0) tell(port_of(l = listener()));
            fds[i] = MUST(accept(l, NULL, NULL));
        } else {
            static long port;
            if (!port) port = hear();
            fds[i] = dial(port);
        }
    }
    meet();
    // Many connections have to be negotiated.
    for (int i = 0; i < 4; i++) await_negotiation();
    meet();
    if (is_server()) {
        hear();
        for (int i = 0; i < N; i++)
            while (recv(fds[i], much, sizeof much, 0) > 0) {}
        return 0;
    }
    struct rlimit own = {500, 1000};
    MUST(setrlimit(RLIMIT_NOFILE, &own));
    for (int i = 0; i < N; i++)
        while (send(fds[i], much, sizeof much, MSG_DONTWAIT) > 0) {}
    pthread_t t, u;
    pthread_create(&t, NULL, sets, NULL);
    if (strstr(getenv("T_ARGS"), "fork")) pthread_create(&u, NULL, forks, NULL);
    for (int i = 0; i < N; i++) {
        close(fds[i]);
        for (int at = looks; looks < at + 20;) {}
    }
    stop = 1;
    pthread_join(t, NULL);
    if (strstr(getenv("T_ARGS"), "fork")) pthread_join(u, NULL);
    line("wrong: %d", wrong);
    tell(1);
    return 0;
}
