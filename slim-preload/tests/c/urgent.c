// Urgent data between two programs, read out of band and in line, at the end of a connection and when it breaks. The case is
// in T_ARGS, and whether the connection breaks is in T_BREAKS.
#include "t.h"

static int l = -1, fd;

static int is(const char *what) { return strstr(getenv("T_ARGS"), what) != NULL; }

static void both_break(void) {
    const char *b = getenv("T_BREAKS");
    meet();
    if (b && atoi(b) && is_server() && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    meet();
}

static void mark(void) {
    int at = -1;
    R(ioctl(fd, SIOCATMARK, &at));
    line("at the mark %d", at);
}

static void take(int flags) {
    char b[64];
    errno = UNTOUCHED;
    ssize_t n = recv(fd, b, sizeof b, flags | MSG_DONTWAIT);
    // All errnos of a broken connection count as one, because each end may notice the break in several ways.
    const char *e = n >= 0 ? "" : errno == ECONNRESET || errno == ECONNABORTED || errno == EPIPE ? "broken" : ename(errno);
    line("recv(%s) = %zd %s", flags & MSG_OOB ? "MSG_OOB" : "", n, e);
    if (n > 0) quote(b, n);
}

static void writer(void) {
    R(send(fd, "first", 5, 0));
    acked(fd);
    meet();
    meet();
    R(send(fd, "before!", 7, MSG_OOB));
    R(send(fd, "after", 5, 0));
    if (is("twice")) {
        R(send(fd, "again?", 6, MSG_OOB));
        struct iovec v = {"end", 3};
        struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
        R(sendmsg(fd, &m, MSG_OOB));
        R(sendto(fd, "and more", 8, 0, NULL, 0));
    }
    acked(fd);
    meet();
    both_break();
    if (is("close")) R(close(fd));
    if (is("shut")) R(shutdown(fd, SHUT_WR));
    if (is("more")) {
        char b[10];
        R(full_recv(fd, b, 5));
    }
    meet();
    meet();
}

static void reader(void) {
    int on = 1;
    mark();
    take(MSG_OOB);
    if (is("inline")) R(setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on));
    meet();
    arrived(fd, 5);
    take(0);
    meet();
    meet();
    both_break();
    // Waits, because a non-blocking call may come before SLIM has decided what becomes of the broken connection.
    wait_for(fd, POLLIN, 5000);
    ms(30);
    if (is("aside")) take(MSG_OOB);
    mark();
    if (is("more")) R(send(fd, "reply", 5, MSG_NOSIGNAL));
    take(0);
    mark();
    take(MSG_OOB);
    take(0);
    meet();
    if (!is("more")) wait_for(fd, POLLIN, 5000);
    for (int i = 0; i < 3; i++) take(0);
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    fd = pair_up(&l);
    if (is_server())
        writer();
    else
        reader();
    close(fd);
    return 0;
}
