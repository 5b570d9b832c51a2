// Short connections: how long their ends take.
#include "t.h"

static double seen_at;

static void *read_end(void *fd) {
    char b;
    ssize_t n = recv((int)(intptr_t)fd, &b, 1, 0);
    seen_at = now_s();
    return (void *)n;
}

// Passes the descriptor, so that another process may have it: the connection becomes plain TCP.
static void pass(int fd) {
    int s[2], copy;
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
    char byte = 'x', room[CMSG_SPACE(sizeof fd)];
    struct iovec v = {&byte, 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    MUST(sendmsg(s[0], &m, 0));
    m.msg_controllen = sizeof room;
    MUST(recvmsg(s[1], &m, 0));
    memcpy(&copy, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof copy);
    close(copy);
    close(s[0]);
    close(s[1]);
}

// A thread that already waits for the end of a connection sees it at once, even after the connection has become plain TCP.
static void plain_end(void) {
    double least = 1;
    for (int i = 0; i < 20; i++) {
        struct conn x = connection();
        ping(x.c, x.s, "before");
        pthread_t t;
        void *n;
        pthread_create(&t, NULL, read_end, (void *)(intptr_t)x.s);
        ms(10);
        pass(x.c);
        ms(10);
        double closed_at = now_s();
        close(x.c);
        pthread_join(t, &n);
        if (n) line("the end is %ld", (long)(intptr_t)n);
        if (seen_at - closed_at < least) least = seen_at - closed_at;
        close(x.s);
        close(x.l);
    }
    line("the end comes %s", least < 0.002 ? "at once" : "late");
}

int main(void) {
    begin(60);
    plain_end();
    return 0;
}
