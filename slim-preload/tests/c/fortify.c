// The calls through the checking entry points of glibc: __read_chk, __recv_chk, __recvfrom_chk, __poll_chk, __ppoll_chk.
// Compiled with _FORTIFY_SOURCE. Sizes depend on the arguments, so that the compiler cannot omit the check.
#include "t.h"

int main(int argc, char **argv UNUSED) {
    begin(10);
    struct conn x = connection();
    char b[16];
    struct pollfd p[2] = {{x.c, POLLIN, 0}, {x.s, POLLIN, 0}};
    struct timespec ts = {1, 0};
    size_t n = 7 + argc;
    MUST(send(x.s, "0123456789abcdefghijklmnop", 26, 0));
    arrived(x.c, 26);
    R(poll(p, argc + 1, 100));
    line("%s %s", bits(p[0].revents), bits(p[1].revents));
    R(ppoll(p, argc, &ts, NULL));
    line("%s", bits(p[0].revents));
    memset(b, 0, sizeof b);
    R(read(x.c, b, n));
    quote(b, 8);
    R(recv(x.c, b, n, MSG_PEEK));
    R(recv(x.c, b, n, 0));
    quote(b, 8);
    struct sockaddr_in a;
    socklen_t l = sizeof a;
    R(recvfrom(x.c, b, n, 0, (void *)&a, &l));
    quote(b, 8);
    fd_set s;
    FD_ZERO(&s);
    FD_SET(x.c + argc - 1, &s);
    R(select(x.c + 1, &s, NULL, NULL, NULL));
    R(recv(x.c, b, n, MSG_WAITALL | MSG_DONTWAIT));
    ping(x.c, x.s, "checked");
    // A size that exceeds the buffer aborts the program, as without SLIM.
    pid_t k = fork();
    if (!k) {
        close(2);
        read(x.c, b, 16 + argc);
        _exit(0);
    }
    int st;
    waitpid(k, &st, 0);
    line("killed by %d", WIFSIGNALED(st) ? WTERMSIG(st) : 0);
    hang_up(x);
    return 0;
}
