// Every hooked call with every kind of bad pointer (unmapped, null, at the end of a mapping, read-only), and with counts that
// are too large. The connection is idle, has unread bytes, has just lost its transport, or has been resumed with unread bytes
// in the stash. Also on sockets other than TCP. The state is in T_ARGS.
#include "t.h"
#include <setjmp.h>

static int l = -1, fd, unread, away, over;
static sigjmp_buf back;
static char small[4096] __attribute__((aligned(16)));
static const char *which;

static void on_segv(int s UNUSED) { siglongjmp(back, 1); }

// Runs a call and prints its result, or the signal that it raises.
#define C(e)                                                                                                       \
    do {                                                                                                           \
        if (sigsetjmp(back, 1)) {                                                                                  \
            line("%s: " #e ": SIGSEGV", which);                                                                    \
        } else {                                                                                                   \
            errno = 0;                                                                                             \
            long r_ = (long)(e);                                                                                   \
            line("%s: " #e " = %ld %s", which, r_, r_ < 0 ? ename(errno) : "");                                    \
        }                                                                                                          \
    } while (0)

// Calls whose results depend neither on a transport nor on room to send.
static void reading(char *p) {
    struct iovec v = {p, 8}, two[2] = {{small, 0}, {p, 8}}, *list = (void *)p;
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1}, *head = (void *)p;
    struct mmsghdr mm = {.msg_hdr = m}, *heads = (void *)p;
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    C(read(fd, p, 8));
    C(recv(fd, p, 8, MSG_DONTWAIT));
    C(recv(fd, p, 8, MSG_PEEK | MSG_DONTWAIT));
    C(recv(fd, p, 1, MSG_OOB));
    C(recvfrom(fd, p, 8, MSG_DONTWAIT, NULL, NULL));
    C(readv(fd, &v, 1));
    C(readv(fd, two, 2));
    C(readv(fd, list, 1));
    C(readv(fd, list, 3));
    C(readv(fd, list, IOV_MAX + 1));
    C(readv(fd, list, INT_MAX));
    C(readv(fd, list, -1));
    C(preadv2(fd, list, 2, -1, RWF_NOWAIT));
    C(recvmsg(fd, &m, MSG_DONTWAIT));
    C(recvmsg(fd, head, MSG_DONTWAIT));
    m.msg_iov = list;
    C(recvmsg(fd, &m, MSG_DONTWAIT));
    m.msg_iovlen = IOV_MAX + 1;
    C(recvmsg(fd, &m, MSG_DONTWAIT));
    C(recvmmsg(fd, heads, 1, MSG_DONTWAIT, NULL));
    C(recvmmsg(fd, heads, UINT_MAX, MSG_DONTWAIT, NULL));
    C(recvmmsg(fd, &mm, 1, MSG_DONTWAIT, NULL));
    if (unread) {
        C(recvmmsg(fd, &mm, 1, MSG_DONTWAIT | MSG_PEEK, (void *)p));
        C(recvfrom(fd, small, 1, MSG_DONTWAIT | MSG_PEEK, (void *)p, (void *)p));
        C(recvfrom(fd, small, 1, MSG_DONTWAIT | MSG_PEEK, (void *)p, &n));
        C(recvfrom(fd, small, 1, MSG_DONTWAIT | MSG_PEEK, (void *)&a, (void *)p));
        m = (struct msghdr){.msg_iov = &(struct iovec){small, 1}, .msg_iovlen = 1, .msg_control = p, .msg_controllen = 64};
        C(recvmsg(fd, &m, MSG_DONTWAIT | MSG_PEEK));
    }
}

static void asking(char *p) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a, four = 4, huge = -1;
    int i;
    C(getsockname(fd, (void *)p, (n = sizeof a, &n)));
    C(getsockname(fd, (void *)p, (n = 1, &n)));
    C(getsockname(fd, (void *)p, (n = 0, &n)));
    C(getsockname(fd, (void *)p, &huge));
    C(getsockname(fd, (void *)&a, (void *)p));
    C(getpeername(fd, (void *)p, (n = sizeof a, &n)));
    C(getpeername(fd, (void *)p, (n = 0, &n)));
    C(getpeername(fd, (void *)&a, (void *)p));
    C(getsockopt(fd, SOL_SOCKET, SO_ERROR, p, &four));
    C(getsockopt(fd, SOL_SOCKET, SO_ERROR, p, (four = 1, &four)));
    C(getsockopt(fd, SOL_SOCKET, SO_ERROR, p, (four = 0, &four)));
    C(getsockopt(fd, SOL_SOCKET, SO_ERROR, &i, (void *)p));
    C(getsockopt(fd, SOL_SOCKET, SO_TYPE, p, (four = 4, &four)));
    C(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, p, 4));
    C(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, p, 1));
    C(ioctl(fd, FIONREAD, p));
    C(ioctl(fd, FIONBIO, p));
    if (l >= 0) C(ioctl(fd, SIOCATMARK, p));
    if (!away) C(ioctl(fd, SIOCOUTQ, p));
    // AF_UNIX accepts a short name, TCP does not.
    if (l >= 0 || p == NULL) C(connect(fd, (void *)p, 16));
    C(connect(fd, (void *)p, 1000));
    if (!over) C(bind(fd, (void *)p, 16));
    C(fcntl(fd, F_GETLK, p));
}

static void waiting(char *p) {
    struct pollfd one = {fd, POLLIN, 0};
    struct timespec soon = {0, 1000000}, none = {0, 0}, bad = {0, 2000000000}, past = {-1, 0};
    struct timeval tv = {0, 1000};
    struct epoll_event ev = {.events = EPOLLIN};
    fd_set r;
    int e = MUST(epoll_create1(0));
    C(poll((void *)p, 1, 0));
    C(poll((void *)p, 1, 1));
    C(poll((void *)p, 3, 1));
    C(poll((void *)p, 10000000, 1));
    C(poll((void *)p, (nfds_t)-1, 1));
    C(poll((void *)p, (nfds_t)1 << 60, 0));
    C(ppoll((void *)p, 1, &soon, NULL));
    C(ppoll((void *)p, 1, &none, NULL));
    C(ppoll((void *)p, 1, &bad, NULL));
    C(ppoll(&one, 1, &bad, NULL));
    C(ppoll(&one, 1, &past, NULL));
    // libc itself reads the time limits of these calls, so they are valid here.
    if (p) C(select(fd + 1, (void *)p, NULL, NULL, (tv.tv_usec = 1000, &tv)));
    if (p) C(select(fd + 1, NULL, (void *)p, NULL, (tv.tv_usec = 0, &tv)));
    FD_ZERO(&r);
    FD_SET(fd, &r);
    C(select(INT_MAX, NULL, NULL, &r, (tv.tv_usec = 1000, &tv)));
    if (p) C(pselect(fd + 1, NULL, NULL, (void *)p, &soon, NULL));
    C(pselect(fd + 1, &r, NULL, NULL, &bad, NULL));
    C(epoll_ctl(e, EPOLL_CTL_ADD, fd, (void *)p));
    C(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
    C(epoll_ctl(e, EPOLL_CTL_MOD, fd, (void *)p));
    C(epoll_ctl(e, EPOLL_CTL_MOD, fd, &ev));
    if (unread || !p) C(epoll_wait(e, (void *)p, 8, 0));
    if (unread || !p) C(epoll_pwait(e, (void *)p, 1, 1, NULL));
    C(epoll_wait(e, (void *)p, INT_MAX, 0));
    C(epoll_wait(e, (void *)p, -1, 0));
    C(epoll_pwait2(e, &ev, 1, &bad, NULL));
    C(epoll_ctl(e, EPOLL_CTL_DEL, fd, (void *)p));
    close(e);
}

// Calls with unreadable time limits.
static void limits(char *p) {
    struct pollfd one = {fd, POLLIN, 0};
    struct epoll_event ev;
    int e = MUST(epoll_create1(0));
    C(ppoll(&one, 1, (void *)p, NULL));
    C(pselect(fd + 1, NULL, NULL, NULL, (void *)p, NULL));
    C(select(fd + 1, NULL, NULL, NULL, (void *)p));
    C(epoll_pwait2(e, &ev, 1, (void *)p, NULL));
    C(recvmmsg(fd, NULL, 0, MSG_DONTWAIT, (void *)p));
    close(e);
}

static void writing(char *p) {
    struct iovec v = {p, 8}, two[2] = {{small, 1}, {p, 8}}, *list = (void *)p;
    struct msghdr m = {.msg_iov = list, .msg_iovlen = 2}, *head = (void *)p;
    struct mmsghdr *heads = (void *)p;
    int file = MUST(memfd_create("a file", 0));
    MUST(write(file, small, 100));
    C(writev(fd, list, 2));
    C(writev(fd, list, IOV_MAX + 1));
    C(writev(fd, list, -1));
    C(pwritev2(fd, list, 2, -1, RWF_NOWAIT));
    C(sendmsg(fd, head, MSG_DONTWAIT | MSG_NOSIGNAL));
    C(sendmsg(fd, &m, MSG_DONTWAIT));
    m.msg_iovlen = IOV_MAX + 1;
    C(sendmsg(fd, &m, MSG_DONTWAIT));
    C(sendmmsg(fd, heads, 1, MSG_DONTWAIT));
    C(sendmmsg(fd, heads, UINT_MAX, MSG_DONTWAIT));
    if (p && !away) C(sendfile(fd, file, (void *)p, 0));
    if (p) C(sendfile(file, file, (void *)p, 10));
    if (!away) {
        C(write(fd, p, 8));
        C(send(fd, p, 20000, MSG_DONTWAIT));
        C(sendto(fd, p, 8, MSG_DONTWAIT, NULL, 0));
        C(writev(fd, &v, 1));
        C(writev(fd, two, 2));
        m = (struct msghdr){.msg_iov = &v, .msg_iovlen = 1, .msg_control = p, .msg_controllen = 64};
        C(sendmsg(fd, &m, MSG_DONTWAIT));
        if (p) C(sendfile(fd, file, (void *)p, 10));
        // Bytes in the stash cannot be spliced.
        if (!over) C(splice(fd, (void *)p, file, NULL, 1, SPLICE_F_NONBLOCK));
    }
    close(file);
}

static void accepting(char *p) {
    struct sockaddr_storage a;
    socklen_t n;
    int t = listener(), port = port_of(t), c = dial(port);
    C(accept(t, (void *)p, (n = p ? 1 : 16, &n)));
    close(c);
    c = dial(port);
    fcntl(t, F_SETFL, O_NONBLOCK);
    C(accept4(t, (void *)&a, (void *)p, SOCK_CLOEXEC));
    close(c);
    close(t);
    for (int i = 3; i < 200; i++)
        if (i != fd && i != l && i != t_sync && fcntl(i, F_GETFD) >= 0) close(i);
}

static void all(void) {
    static const char *names[] = {"nowhere", "null", "the end", "read only", "far"};
    char *pages = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(mprotect(pages + 4096, 4096, PROT_NONE));
    memset(pages + 8192, 'R', 4096);
    MUST(mprotect(pages + 8192, 4096, PROT_READ));
    char *p[] = {(void *)8, NULL, pages + 4095, pages + 8192, (void *)(1ull << 62)};
    handle(SIGSEGV, on_segv, 0);
    for (int i = 0; i < 5; i++) {
        which = names[i];
        int end = i == 2, ro = i == 3;
        // The last byte of a mapping could be read into, and read-only bytes could be sent.
        if (!end || !unread) reading(p[i]);
        asking(p[i]);
        waiting(p[i]);
        if (i != 1 && !ro) limits(p[i]);
        if (!end && !ro) writing(p[i]);
        if (!is_server() && l >= 0 && !away && !unread) accepting(p[i]);
    }
}

static char state(int pid) {
    char path[64], b[512] = "";
    sprintf(path, "/proc/%d/stat", pid);
    int f = MUST(open(path, O_RDONLY));
    MUST(read(f, b, sizeof b - 1));
    close(f);
    return strrchr(b, ')')[2];
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    const char *args = getenv("T_ARGS"), *breaks = getenv("T_BREAKS");
    fd = pair_up(&l);
    unread = strstr(args, "unread") != NULL;
    away = strstr(args, "away") != NULL;
    over = strstr(args, "over") != NULL;
    int broken = breaks && atoi(breaks);
    if (is_server()) {
        if (unread) MUST(full_send(fd, "unread", 6));
        acked(fd);
        tell(getpid());
        meet();
        if (away) raise(SIGSTOP);
        if (over) meet();
        meet();
        if (unread) MUST(full_send(fd, "more", 4));
        char m[8] = "";
        if (!unread) line("%zd", full_recv(fd, m, 4));
        meet();
        return 0;
    }
    int pid = hear();
    meet();
    l = 0;
    if (unread) arrived(fd, 6);
    if (away)
        while (state(pid) != 'T') ms(1);
    if ((away || over) && broken && break_connections() < 0) line("cannot break connections: %s", ename(errno));
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (over) {
        // Both ends take part in the resume, after which the unread bytes are in the stash.
        meet();
        wait_for(fd, POLLIN, 1000);
        ms(200);
    }
    if (!unread) R(recv(fd, small, 1, 0));
    all();
    if (away) kill(pid, SIGCONT);
    fcntl(fd, F_SETFL, 0);
    meet();
    if (unread) {
        R(full_recv(fd, small, 10));
        quote(small, 10);
    } else {
        R(full_send(fd, "more", 4));
    }
    meet();
    if (!away && !over) {
        line("-- not TCP");
        int un[2];
        MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, un));
        close(fd);
        fd = un[0];
        l = -1;
        MUST(send(un[1], "unread", unread ? 6 : 0, 0));
        all();
    }
    return 0;
}
