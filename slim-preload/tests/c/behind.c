// A byte of urgent data arrives on a new transport, while bytes from before the break are still unread.
#include "t.h"

static unsigned char b[100000];

static void server(int fd) {
    int on = 1;
    char urgent;
    MUST(setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on));
    fill(b, 0, sizeof b, 1);
    R(full_send(fd, b, sizeof b));
    acked(fd);
    meet();
    if (getenv("T_BREAKS") && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections");
    meet();
    R(full_recv(fd, &urgent, 1));
    fill(b, sizeof b, sizeof b, 1);
    R(full_send(fd, b, sizeof b));
    meet();
}

static void client(int fd) {
    meet();
    meet();
    ms(400);
    R(send(fd, "o", 1, MSG_OOB));
    for (int i = 0; i < 2; i++) {
        R(full_recv(fd, b, sizeof b));
        verify(b, i * sizeof b, sizeof b, 1);
    }
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    int l = -1, fd = pair_up(&l);
    is_server() ? server(fd) : client(fd);
    close(fd);
    return 0;
}
