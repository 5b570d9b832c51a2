// A thread stays inside a call for long, because a signal handler has interrupted it, or because there is no room to send. Its
// connection breaks, and so does another one of the process, whose resume must not wait for the first. T_ARGS: the call, how
// many milliseconds the handler takes, and how many milliseconds after its first break the other connection breaks again.
#include "t.h"
#include "raw.h"

enum { MUCH = 32 << 20 };

static char call[16];
static int length, later, a;
// Set just before the first thread makes the call that waits.
static _Atomic int waits;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t said = PTHREAD_COND_INITIALIZER;
static int is_sent;
static struct conn other;
static char data[MUCH];

static int is(const char *k) { return !strcmp(call, k); }
static int breaks(void) { return atoi(getenv("T_BREAKS")); }

static void takes_its_time(int sig UNUSED) {
    int saved = errno;
    ms(length);
    errno = saved;
}

static void *sends(void *p UNUSED) {
    // A blocking send that has sent nothing yet waits in the kernel, so the buffers are filled first. The kernel's first probe of
    // a full peer, after 0.2 s, makes some room again.
    size_t sent = 0;
    for (double last = now_s(); now_s() - last < 0.6 && sent < MUCH / 2;) {
        ssize_t n = send(a, data, 100000, MSG_DONTWAIT);
        if (n < 0) ms(2);
        if (n > 0) sent += n, last = now_s();
    }
    waits = 1;
    int all = full_send(a, data, MUCH - sent) == 0;
    pthread_mutex_lock(&order);
    line("all is sent: %d", all);
    is_sent = 1;
    pthread_cond_signal(&said);
    pthread_mutex_unlock(&order);
    return NULL;
}

static void *says_more(void *p UNUSED) {
    full_send(a, "more", 4);
    return NULL;
}

static void *receives(void *p UNUSED) {
    char b[8] = "";
    waits = 1;
    ssize_t n = full_recv(a, b, 8);
    if (is("room")) return NULL;
    // The answer may arrive before the sending thread has returned from its call.
    pthread_mutex_lock(&order);
    while (is("send") && !is_sent) pthread_cond_wait(&said, &order);
    pthread_mutex_unlock(&order);
    line("has received %zd: %.8s", n, b);
    return NULL;
}

static void at_once(void) {
    double begun = now_s();
    ping(other.c, other.s, "the other one");
    double took = now_s() - begun;
    line("at once: %d", took < 0.4);
    if (took >= 0.4) fprintf(stderr, "the other one took %.3f s\n", took);
}

static void serve(void) {
    tell(getpid());
    if (is("room")) {
        hear();
        // A raw system call: no hook sees this end, so SLIM does not announce it.
        if (breaks()) MUST(raw(SYS_shutdown, a, SHUT_WR));
        tell(1);
        raise(SIGSTOP);
    }
    hear();
    ssize_t n = is("recv") ? 4 : is("send") ? MUCH : MUCH + 4;
    line("all has come: %d", full_recv(a, data, n) == n);
    if (!is("room")) MUST(full_send(a, "received", 8));
    meet();
    close(a);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    int l = -1;
    if (sscanf(getenv("T_ARGS"), "%15s %d %d", call, &length, &later) < 2) return 2;
    a = pair_up(&l);
    if (is_server()) {
        serve();
        return 0;
    }
    pid_t server = hear();
    other = connection();
    handle(SIGUSR1, takes_its_time, SA_RESTART);
    pthread_t first, second, third;
    pthread_create(&first, NULL, is("recv") ? receives : sends, NULL);
    while (!waits) ms(1);
    ms(300);
    if (is("room")) {
        // One thread waits for room, one notices the unannounced end of the stream, and a third then wants to send.
        tell(1);
        hear();
        ms(50);
        pthread_create(&second, NULL, receives, NULL);
        ms(50);
        pthread_create(&third, NULL, says_more, NULL);
        ms(1500);
        if (breaks()) MUST(break_those(port_of(other.l)));
        at_once();
        MUST(kill(server, SIGCONT));
    } else {
        pthread_kill(first, SIGUSR1);
        ms(50);
        if (breaks()) MUST(break_connections());
        pthread_create(&second, NULL, is("recv") ? says_more : receives, NULL);
        ms(30);
        at_once();
        if (later) {
            ms(later);
            if (breaks()) MUST(break_connections());
            at_once();
        }
    }
    tell(1);
    pthread_join(first, NULL);
    if (later) _exit(0);
    meet();
    pthread_join(second, NULL);
    if (is("room")) pthread_join(third, NULL);
    hang_up(other);
    return 0;
}
