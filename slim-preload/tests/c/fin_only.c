// A program with a blocking descriptor waits for bytes with poll or select, and then reads. If the end of the connection's stream, which
// nobody has announced, made it readable, the read would wait, and a program that has other things to do would hang. T_ARGS: the
// number of exchanges, and the way of waiting.
#include "t.h"
#include "raw.h"

static int s;

static void wait_for_bytes(int way) {
    struct pollfd p = {.fd = s, .events = POLLIN};
    fd_set r;
    FD_ZERO(&r);
    FD_SET(s, &r);
    struct timespec t = {.tv_sec = 60};
    if (way == 0) MUST(poll(&p, 1, -1));
    if (way == 1) MUST(ppoll(&p, 1, &t, NULL));
    if (way == 2) MUST(select(s + 1, &r, NULL, NULL, NULL));
    while (way == 3 && MUST(poll(&p, 1, 0)) == 0) ms(1);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int count, way, l = -1, vain = 0, wrong = 0;
    if (sscanf(getenv("T_ARGS"), "%d %d", &count, &way) != 2) return 94;
    int breaks = atoi(getenv("T_BREAKS"));
    s = pair_up(&l);
    char b;
    for (int i = 0; i < count; i++) {
        if (is_server()) {
            wait_for_bytes(way);
            if (recv(s, &b, 1, MSG_PEEK | MSG_DONTWAIT) != 1) vain++;
            wrong += recv(s, &b, 1, 0) != 1 || b != (char)i;
            MUST(send(s, &b, 1, 0));
        } else {
            // As a middlebox would end it: without SLIM's knowledge.
            if (breaks) raw(SYS_shutdown, s, SHUT_WR, 0);
            ms(30);
            b = i;
            MUST(send(s, &b, 1, 0));
            wrong += recv(s, &b, 1, 0) != 1 || b != (char)i;
        }
    }
    line("%d exchanges, %d times nothing to read, %d wrong bytes", count, vain, wrong);
    meet();
    return 0;
}
