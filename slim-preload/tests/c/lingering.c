// `dup2` puts one connection under the number of another, for which the kernel waits (SO_LINGER): the first connection goes on
// meanwhile, also if it breaks, and a signal ends the wait.
#include "t.h"

static struct conn a, b;
static volatile int handled, stop;
static double begun;

static void on_signal(int sig UNUSED) { handled = now_s() - begun < 2; }

static void *echo(void *unused UNUSED) {
    char m[8];
    while (full_recv(a.s, m, 8) == 8 && full_send(a.s, m, 8) == 0) {}
    return NULL;
}

static void *put_over(void *unused UNUSED) {
    R(dup2(a.c, b.c) == b.c);
    line("ended by the signal: %d", now_s() - begun < 2);
    return NULL;
}

int main(void) {
    begin(40);
    handle(SIGUSR1, on_signal, SA_RESTART);
    a = connection();
    b = connection();
    await_negotiation();
    // The peer does not read, so bytes stay unacknowledged.
    static char fill[65536];
    fcntl(b.c, F_SETFL, O_NONBLOCK);
    while (send(b.c, fill, sizeof fill, 0) > 0) {}
    fcntl(b.c, F_SETFL, 0);
    struct linger linger = {1, 5};
    MUST(setsockopt(b.c, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));

    pthread_t echoes, puts_over;
    pthread_create(&echoes, NULL, echo, NULL);
    begun = now_s();
    pthread_create(&puts_over, NULL, put_over, NULL);
    ms(200);
    if (getenv("T_BREAKS") && atoi(getenv("T_BREAKS"))) break_those(port_of(a.l));
    double worst = 0;
    char m[8];
    for (double at = now_s(); at - begun < 0.8; at = now_s()) {
        MUST(full_send(a.c, "question", 8));
        if (full_recv(a.c, m, 8) != 8 || memcmp(m, "question", 8)) line("WRONG");
        if (now_s() - at > worst) worst = now_s() - at;
        ms(1);
    }
    pthread_kill(puts_over, SIGUSR1);
    pthread_join(puts_over, NULL);
    line("handled in time: %d, answered in time: %d", handled, worst < 0.5);
    return 0;
}
