// Connections are closed while bytes from before a break are unread. epoll reports nothing of them afterwards, and their
// descriptor numbers can be registered again.
#include "t.h"

static void both_break(void) {
    meet();
    if (is_server()) break_connections();
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    int l = -1, e = epoll_create1(0);
    for (int i = 0; i < 4; i++) {
        int fd = pair_up(&l), null = MUST(open("/dev/null", O_RDONLY));
        struct epoll_event ev = {.events = EPOLLIN | (i % 2 ? EPOLLET : 0), .data.u64 = 10 + i};
        if (is_server()) MUST(full_send(fd, "unread", 6));
        meet();
        if (!is_server()) arrived(fd, 6);
        if (i < 2) both_break();
        if (!is_server()) wait_for(fd, POLLIN, 5000);
        if (i >= 2) both_break();
        // Time to notice the break and to resume the connection.
        ms(is_server() ? 0 : 100);
        if (!is_server()) {
            char b;
            R(recv(fd, &b, 1, 0));
            R(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
            line("told: %d", epoll_wait(e, &ev, 1, 2000));
            R(i % 2 ? dup2(null, fd) == fd : close(fd) == 0);
            line("events of closed connections: %d", epoll_wait(e, &ev, 1, 50));
        }
        meet();
        if (is_server() || i % 2) close(fd);
        close(null);
    }
    return 0;
}
