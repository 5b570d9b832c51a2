// A process ends in every way and at any moment. It must end at once, and all that it has sent must arrive. The case is the
// argument.
#include "t.h"

static struct conn x;
static const char *kase;
static int is(const char *k) { return !strcmp(kase, k); }

static void end(int s UNUSED) { exit(0); }

static void *waits(void *b) {
    recv(x.s, b, 8, 0);
    line("a thread was woken");
    return b;
}

static void *many(void *b) {
    for (;;) {
        if (full_send(x.c, b, 8) < 0 || full_recv(x.s, b, 8) != 8) line("WRONG");
    }
    return b;
}

int main(int argc, char **argv) {
    static char b[8], c[8];
    begin(20);
    kase = argc > 1 ? argv[1] : "return";
    x = connection();
    ping(x.c, x.s, "works");
    int status = 0;
    pthread_t t;
    if (is("return")) return 0;
    if (is("quick")) quick_exit(0);
    if (is("_exit")) _exit(0);
    if (is("handler")) {
        struct itimerval v = {.it_value = {0, 50000}};
        handle(SIGALRM, end, 0);
        setitimer(ITIMER_REAL, &v, NULL);
        recv(x.s, b, 8, 0);
        line("not reached");
    }
    if (is("thread")) {
        pthread_create(&t, NULL, waits, b);
        ms(50);
        exit(0);
    }
    if (is("busy")) {
        pthread_create(&t, NULL, many, c);
        ms(50);
        exit(0);
    }
    if (is("fork")) {
        pid_t p = fork();
        if (!p) exit(5);
        waitpid(p, &status, 0);
        line("child: %d", WEXITSTATUS(status));
        // A child that starts its own agent.
        p = fork();
        if (!p) {
            struct conn y = connection();
            ping(y.c, y.s, "the child's own");
            exit(6);
        }
        waitpid(p, &status, 0);
        line("child: %d", WEXITSTATUS(status));
        ping(x.c, x.s, "after that");
    }
    if (is("vfork")) {
        pid_t p = vfork();
        if (!p) _exit(5);
        waitpid(p, &status, 0);
        line("child: %d", WEXITSTATUS(status));
        ping(x.c, x.s, "after that");
    }
    return 0;
}
