// Threads are cancelled, or exit, in the middle of a call on a connection that breaks afterwards. No other call may wait for
// them.
#include "t.h"

static int fd;
static char buf[1 << 16];

static void *reads(void *arg) {
    char b[10];
    if (arg)
        recv(fd, b, sizeof b, MSG_WAITALL);
    else
        recv(fd, b, sizeof b, 0);
    line("came back");
    return NULL;
}

static void *writes(void *none) {
    while (send(fd, buf, sizeof buf, MSG_NOSIGNAL) > 0) {}
    line("came back");
    return none;
}

static void ends_thread(int s UNUSED) { pthread_exit(NULL); }

static void interrupted(void *(*f)(void *), void *arg, int how) {
    pthread_t t;
    pthread_create(&t, NULL, f, arg);
    ms(50);
    if (how) pthread_kill(t, SIGUSR1);
    else pthread_cancel(t);
    pthread_join(t, NULL);
}

static void broken(const char *what) {
    meet();
    const char *b = getenv("T_BREAKS");
    if (is_server() && b && atoi(b) && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
    double since = now_s();
    char m[5] = "";
    if (is_server()) full_recv(fd, m, 4), full_send(fd, "pong", 4);
    else full_send(fd, "ping", 4), full_recv(fd, m, 4);
    double took = now_s() - since;
    if (took > 0.6) line("%s: %.2f s", what, took);
    line("%s: %s", what, m);
    meet();
}

int main(int argc, char **argv) {
    int l = -1;
    begin_pair(argc, argv, 60);
    handle(SIGUSR1, ends_thread, 0);
    fd = pair_up(&l);
    for (int how = 0; how < 2; how++) {
        if (is_server()) interrupted(reads, NULL, how);
        broken("read");
        if (!is_server()) interrupted(reads, NULL, how);
        broken("read at the other end");
    }
    if (is_server()) {
        meet();
        long n = 0;
        ssize_t r;
        while ((r = recv(fd, buf, sizeof buf, MSG_DONTWAIT)) > 0) n += r;
        tell(n > 0);
        while (recv(fd, buf, sizeof buf, MSG_DONTWAIT) > 0) ms(1);
    } else {
        interrupted(writes, NULL, 0);
        meet();
        line("written %ld", hear());
    }
    meet();
    close(fd);
    return 0;
}
