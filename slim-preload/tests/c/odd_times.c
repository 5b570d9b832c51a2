// Calls before the preload's constructor, after its destructor, from a library opened later, and from exit handlers.
#include "t.h"
#include <dlfcn.h>

static struct conn x;

static void at_exit(void) {
    ping(x.c, x.s, "from an exit handler");
    struct conn y = connection();
    ping(y.c, y.s, "made in an exit handler");
    hang_up(y);
}

__attribute__((constructor(101))) static void before_main(void) {
    struct conn y = connection();
    ping(y.c, y.s, "before main");
    hang_up(y);
}

__attribute__((destructor(101))) static void after_main(void) {
    ping(x.c, x.s, "after exit handlers");
    struct conn y = connection();
    ping(y.c, y.s, "made after exit handlers");
    hang_up(y);
    hang_up(x);
}

int main(int argc, char **argv) {
    begin(20);
    x = connection();
    ping(x.c, x.s, "in main");
    atexit(at_exit);
    struct conn (*early)(void) = (struct conn(*)(void))dlsym(RTLD_DEFAULT, "dl_early");
    if (early) {
        struct conn y = early();
        ping(y.c, y.s, "in main, the constructor's connection");
    } else if (argc > 1) {
        void *h = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!h) line("%s", dlerror());
        ((void (*)(const char *))dlsym(h, "dl_ping"))("from a library");
        struct conn y = ((struct conn(*)(void))dlsym(h, "dl_connection"))();
        ping(y.c, y.s, "a library's connection");
        dlclose(h);
        ping(y.c, y.s, "after the library");
        hang_up(y);
        // The function as dlsym finds it, which is what foreign function interfaces of other languages call.
        ssize_t (*a_send)(int, const void *, size_t, int) = (ssize_t(*)(int, const void *, size_t, int))dlsym(RTLD_DEFAULT, "send");
        line("%zd", a_send(x.c, "by name", 7, 0));
        char b[8] = "";
        R(full_recv(x.s, b, 7));
        quote(b, 7);
    }
    exit(5 - 5);
}
