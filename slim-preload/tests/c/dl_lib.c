// A library that makes connections. It is opened with dlopen, or preloaded before or after SLIM, so that its constructor runs
// before SLIM's.
#include "t.h"

struct conn dl_connection(void) { return connection(); }

void dl_ping(const char *what) {
    struct conn x = connection();
    ping(x.c, x.s, what);
    hang_up(x);
}

static struct conn early;

__attribute__((constructor)) static void first(void) {
    if (!getenv("T_EARLY")) return;
    early = connection();
    ping(early.c, early.s, "from a constructor");
}

// The connection that the constructor made.
struct conn dl_early(void) { return early; }

__attribute__((destructor)) static void last(void) {
    if (!getenv("T_EARLY")) return;
    ping(early.c, early.s, "from a destructor");
    hang_up(early);
    dl_ping("made in a destructor");
}
