// A thread with a real-time policy polls without a pause, on the only processor of its process, while its flow is suspended.
// The case is in T_ARGS: the call that it polls with; "-user": without the privilege to exceed its own priority; "-late": the
// thread gets the policy only after the connection is established.
// The kernel gives the processor's other threads 50 ms of each second; on a busy machine SLIM has a part of that only.
#include "t.h"
#include <sys/syscall.h>

static const double LIMIT_S = 10;
static int l = -1, fd;
static const char *kase;

static int is(const char *k) { return !strncmp(kase, k, strlen(k)); }

static void real_time(int user) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    MUST(sched_setaffinity(0, sizeof one, &one));
    struct sched_param p = {.sched_priority = 10};
    MUST(sched_setscheduler(0, SCHED_FIFO, &p));
    if (user) MUST(syscall(SYS_setresuid, 65534, 65534, 65534));
}

// One non-blocking check. Returns whether there is something to read.
static int look(int e) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    struct epoll_event ev;
    struct timeval now = {0, 0};
    fd_set s;
    FD_ZERO(&s);
    FD_SET(fd, &s);
    char c;
    if (is("poll")) return poll(&p, 1, 0) > 0;
    if (is("select")) return select(fd + 1, &s, NULL, NULL, &now) > 0;
    if (is("epoll")) return epoll_wait(e, &ev, 1, 0) > 0;
    return recv(fd, &c, 1, MSG_PEEK) >= 0 || errno != EAGAIN;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    kase = getenv("T_ARGS");
    int late = strstr(kase, "-late") != NULL;
    if (!is_server() && !late) real_time(strstr(kase, "-user") != NULL);
    fd = pair_up(&l);
    if (is_server()) {
        hear();
        if (atoi(getenv("T_BREAKS"))) break_connections();
        MUST(full_send(fd, "hello", 5));
        hear();
        return 0;
    }
    if (late) real_time(0);
    struct epoll_event ev = {.events = EPOLLIN};
    int e = MUST(epoll_create1(0));
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    fcntl(fd, F_SETFL, O_NONBLOCK);
    tell(1);
    double begun = now_s();
    while (!look(e) && now_s() - begun < LIMIT_S) {}
    line("%s", now_s() - begun < LIMIT_S ? "there is something" : "STARVED");
    struct sched_param p = {0};
    sched_setscheduler(0, SCHED_OTHER, &p);
    fcntl(fd, F_SETFL, 0);
    char b[8] = "";
    R(full_recv(fd, b, 5));
    line("%s", b);
    tell(1);
    return 0;
}
