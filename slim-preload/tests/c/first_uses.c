// Makes many calls for the first time, after the first connection. Marks on standard error show where they begin and end.
#include "t.h"

int main(void) {
    begin(20);
    int l = listener(), c = dial(port_of(l)), s = accept(l, NULL, NULL), p[2], sv[2];
    (void)!write(2, "BEGIN\n", 6);
    char b[8] = "";
    struct iovec v = {b, 8};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct mmsghdr mm = {.msg_hdr = m};
    struct pollfd f = {c, POLLIN, 0};
    struct timespec now = {0, 0};
    struct timeval tv = {0, 0};
    struct epoll_event ev = {.events = EPOLLIN};
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    fd_set set;
    for (int i = 0; i < 12; i++) send(c, b, 8, 0);
    write(c, b, 8), writev(c, &v, 1), sendto(c, b, 8, 0, NULL, 0), sendmsg(c, &m, 0), sendmmsg(c, &mm, 1, 0), pwritev2(c, &v, 1, -1, 0);
    ms(50);
    read(s, b, 8), readv(s, &v, 1), recv(s, b, 8, 0), recvfrom(s, b, 8, 0, NULL, NULL), recvmsg(s, &m, 0);
    recvmmsg(s, &mm, 1, 0, NULL), preadv2(s, &v, 1, -1, 0);
    FD_ZERO(&set);
    poll(&f, 1, 0), ppoll(&f, 1, &now, NULL), select(0, &set, NULL, NULL, &tv), pselect(0, &set, NULL, NULL, &now, NULL);
    int e = epoll_create1(0);
    epoll_ctl(e, EPOLL_CTL_ADD, s, &ev), epoll_wait(e, &ev, 1, 0), epoll_pwait(e, &ev, 1, 0, NULL);
    getsockname(c, (void *)&a, &n), getpeername(c, (void *)&a, &n), getsockopt(c, SOL_SOCKET, SO_TYPE, b, &n);
    setsockopt(c, SOL_SOCKET, SO_KEEPALIVE, b, 4), ioctl(s, FIONREAD, b), fcntl(c, F_GETFL);
    pipe(p), socketpair(AF_UNIX, SOCK_STREAM, 0, sv), dup(c), dup2(c, 50), dup3(c, 51, O_CLOEXEC), close(51);
    open("/dev/null", O_RDONLY), openat(AT_FDCWD, "/dev/null", O_RDONLY), sendfile(c, p[0], NULL, 0);
    splice(p[0], NULL, sv[0], NULL, 1, SPLICE_F_NONBLOCK), shutdown(c, SHUT_WR), syscall(39), close_range(60, 61, 0);
    (void)!write(2, "END\n", 4);
    return 0;
}
