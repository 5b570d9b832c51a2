// Signal handlers make the same calls as those that they interrupt, at any moment. The case is the argument.
#include "t.h"

static const char *kase;
static int is(const char *k) { return !strcmp(kase, k); }
static struct conn x;
static volatile long handled;
static volatile int bad;

static void end_to_end(void) {
    int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = v4(0);
    socklen_t n = sizeof a;
    if (bind(l, (void *)&a, sizeof a) || listen(l, 5) || getsockname(l, (void *)&a, &n) || connect(c, (void *)&a, sizeof a)) bad++;
    int s = accept(l, NULL, NULL);
    if (s < 0) bad++;
    close(s);
    close(c);
    close(l);
}

static void again(int sig UNUSED) {
    int saved = errno;
    end_to_end();
    handled++;
    errno = saved;
}

// These fork handlers use the connection before and after a fork. They are registered before the first connection.
static void before(void) {
    ping(x.c, x.s, "before the fork");
    end_to_end();
}
static void in_parent(void) {
    ping(x.c, x.s, "in the parent");
    end_to_end();
}
static void in_child(void) { hang_up(x); }

static void leave(int sig UNUSED) { pthread_exit(NULL); }

static void *reads(void *b) {
    recv(x.s, b, 8, 0);
    return b;
}

int main(int argc, char **argv) {
    begin(40);
    kase = argc > 1 ? argv[1] : "";
    if (is("fork")) {
        pthread_atfork(before, in_parent, in_child);
        x = connection();
        int status;
        pid_t p = fork();
        if (!p) {
            x = connection();
            ping(x.c, x.s, "in the child");
            exit(0);
        }
        MUST(waitpid(p, &status, 0));
        line("child: %x", status);
        hang_up(x);
    }
    if (is("listen")) {
        end_to_end();
        handle(SIGUSR1, again, SA_RESTART);
        struct sigevent ev = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        timer_t t;
        MUST(timer_create(CLOCK_MONOTONIC, &ev, &t));
        unsigned seed = 1;
        for (double begun = now_s(); now_s() - begun < 2;) {
            struct itimerspec once = {{0, 0}, {0, 1 + rand_r(&seed) % 1000000}}, never = {{0, 0}, {0, 0}};
            MUST(timer_settime(t, 0, &once, NULL));
            end_to_end();
            MUST(timer_settime(t, 0, &never, NULL));
        }
        line("handled %d, bad %d", handled > 20, bad);
    }
    if (is("leave")) {
        // A thread that has left a call by `pthread_exit` must not delay later calls.
        static char b[8];
        pthread_t t;
        x = connection();
        handle(SIGUSR1, leave, 0);
        pthread_create(&t, NULL, reads, b);
        ms(50);
        pthread_kill(t, SIGUSR1);
        pthread_join(t, NULL);
        if (getenv("T_BREAKS") && atoi(getenv("T_BREAKS"))) MUST(break_connections());
        double begun = now_s();
        ping(x.c, x.s, "goes on");
        line("at once: %d", now_s() - begun < 0.7);
        hang_up(x);
    }
    return 0;
}
