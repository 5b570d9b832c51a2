// Execs that concern other programs than the one that loads the library next. The first argument says which case.
#include "t.h"
#include <sched.h>

enum { CHILDREN = 30, FLOOR = 100 };
static volatile int over;
static char *self;

static void *execute_in_vain(void *none UNUSED) {
    static char huge[300000];
    memset(huge, 'x', sizeof huge - 1);
    char *args[] = {self, huge, NULL};
    while (!over) execv(self, args);
    return NULL;
}

// Children are forked while two threads execute in vain. Each makes a connection, and executes a program that goes on with it.
static void forked(void) {
    pthread_t t[2];
    // On one processor a thread that executes is mostly interrupted in the middle of it.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    MUST(sched_setaffinity(0, sizeof one, &one));
    for (int i = 0; i < 2; i++) MUST(-pthread_create(&t[i], NULL, execute_in_vain, NULL));
    for (int n = 0; n < CHILDREN; n++) {
        // One that no child has yet, so that it is handed over when the child is forked.
        struct conn own = connection();
        ms(3 + n % 7);
        pid_t p = fork();
        if (!p) {
            hang_up(own);
            struct conn x = connection();
            char number[2][12];
            sprintf(number[0], "%d", x.c);
            sprintf(number[1], "%d", x.s);
            execl(self, self, "child", number[0], number[1], NULL);
            _exit(9);
        }
        int st;
        MUST(waitpid(p, &st, 0));
        hang_up(own);
        if (st) line("child %d: status %x", n, st);
    }
    over = 1;
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
}

int main(int argc, char **argv) {
    begin(60);
    self = argv[0];
    const char *kase = argv[1];
    if (!strcmp(kase, "forked")) {
        forked();
    } else if (!strcmp(kase, "child")) {
        if (breaks_wanted()) break_those(port_of(atoi(argv[3])));
        ping(atoi(argv[2]), atoi(argv[3]), "child");
    } else if (!strcmp(kase, "executes")) {
        connection();
        execl(argv[2], argv[2], "numbers", NULL);
        return 9;
    } else if (!strcmp(kase, "numbers") && argc == 2) {
        // Numbers that the application has not opened.
        int n = 0;
        for (int i = FLOOR; i < 70000; i++) n += fcntl(i, F_GETFD) >= 0;
        line("%d strange descriptors", n);
    }
    return 0;
}
