// Prints the policy and the nice value (less the program's at its beginning) of SLIM's thread, of the first thread, and of a thread and a
// process that are started after SLIM's.
// The argument "user": without any privilege; "idle": the program has the policy SCHED_IDLE.
#include "t.h"
#include <dirent.h>
#include <sys/resource.h>

static int usual;

static int nice_of(int thread) { return getpriority(PRIO_PROCESS, thread) - usual; }

static void *own(void *who) {
    line("%s: policy %d, nice %d", (char *)who, sched_getscheduler(0), nice_of(0));
    return NULL;
}

static int slims(void) {
    DIR *all = opendir("/proc/self/task");
    for (struct dirent *e; (e = readdir(all));) {
        char path[300], name[20] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
        FILE *f = fopen(path, "r");
        if (!f) continue;
        if (!fgets(name, sizeof name, f)) name[0] = 0;
        fclose(f);
        if (!strcmp(name, "slim-agent\n")) return atoi(e->d_name);
    }
    return 0;
}

int main(int argc, char **argv) {
    begin(20);
    usual = getpriority(PRIO_PROCESS, 0);
    struct rlimit none = {0, 0};
    MUST(setrlimit(RLIMIT_NICE, &none));
    MUST(setrlimit(RLIMIT_RTPRIO, &none));
    if (argc > 1 && !strcmp(argv[1], "user")) MUST(setresuid(65534, 65534, 65534));
    struct sched_param zero = {0};
    if (argc > 1 && !strcmp(argv[1], "idle")) MUST(sched_setscheduler(0, SCHED_IDLE, &zero));
    struct conn x = connection();
    ping(x.c, x.s, "a connection");
    int t = slims();
    line("SLIM: policy %d, nice %d", sched_getscheduler(t) & ~SCHED_RESET_ON_FORK, nice_of(t));
    own("first");
    pthread_t other;
    pthread_create(&other, NULL, own, "thread");
    pthread_join(other, NULL);
    if (!fork()) {
        own("child");
        _exit(0);
    }
    wait(NULL);
    hang_up(x);
    return 0;
}
