// A program with so much thread-local storage that it would fill a small thread stack.
#include "t.h"

static __thread char large[900 << 10];

int main(void) {
    begin(10);
    memset(large, 1, sizeof large);
    struct conn x = connection();
    ping(x.c, x.s, "large");
    for (int i = 0; i < 8; i++) {
        int c = dial(port_of(x.l)), s = MUST(accept(x.l, NULL, NULL));
        await_negotiation();
        ping(c, s, "one more");
        close(c);
        close(s);
    }
    hang_up(x);
    return large[5] - 1;
}
