// One end shuts directions before a break, while the flow is suspended, or after the resume. Shows what this end reads, and
// what becomes of the bytes that the other end sends. Two programs; T_ARGS: what is shut, and when.
#include "t.h"

static int fd;

static void look(const char *what) {
    char b[64];
    int ready = wait_for(fd, POLLIN | POLLRDHUP, 1000);
    ssize_t r = recv(fd, b, sizeof b, MSG_DONTWAIT);
    line("%s: %s, %zd %s", what, bits(ready), r, r < 0 ? ename(errno) : "");
}

static void both_break(void) {
    meet();
    if (is_server() && atoi(getenv("T_BREAKS") ?: "0")) break_connections();
    meet();
}

// Each end notices the break, and the flow is resumed.
static void both_notice(void) {
    wait_for(fd, 0, 0);
    ms(60);
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    const char *k = getenv("T_ARGS");
    int l = -1, how = strstr(k, "both") ? SHUT_RDWR : SHUT_RD;
    if (is_server()) tell(port_of(l = listener())), fd = MUST(accept(l, NULL, NULL));
    else fd = dial(hear());
    await_negotiation();
    char b[8];
    if (is_server()) MUST(full_send(fd, "ping", 4)), MUST(full_recv(fd, b, 4));
    else MUST(full_recv(fd, b, 4)), MUST(full_send(fd, "pong", 4));
    meet();
    if (strstr(k, "before") && !is_server()) R(shutdown(fd, how)), acked(fd);
    if (!strstr(k, "whole")) both_break();
    if (strstr(k, "away") && !is_server()) wait_for(fd, 0, 0), R(shutdown(fd, how));
    if (!strstr(k, "whole")) both_notice();
    if (strstr(k, "after") && !is_server()) R(shutdown(fd, how)), acked(fd);
    ms(20);
    meet();
    if (!is_server()) look("reads");
    if (is_server() && how == SHUT_RDWR) look("reads");
    meet();
    for (int i = 0; i < 3; i++) {
        if (is_server()) {
            R(send(fd, "more", 4, MSG_NOSIGNAL));
            ms(80);
        }
        meet();
        if (!is_server()) look("then");
        meet();
    }
    if (is_server()) look("at last");
    meet();
    return 0;
}
