// A server that drops its privileges before it opens its first socket.
#include "t.h"

int main(void) {
    begin(20);
    if (geteuid() == 0) {
        MUST(setgid(65534));
        MUST(setuid(65534));
    }
    pid_t p = MUST(fork());
    if (!p) {
        char b = 0;
        int l = listener(), c = dial(port_of(l)), s = MUST(accept(l, NULL, NULL));
        MUST(full_send(c, "x", 1));
        full_recv(s, &b, 1);
        line("got %c", b);
        poll(NULL, 0, 300);
        _exit(0);
    }
    int status = 0;
    MUST(waitpid(p, &status, 0));
    line("child %d", status);
    return 0;
}
