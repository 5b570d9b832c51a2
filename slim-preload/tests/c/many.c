// recvmmsg on a connection that its peer resets: if some messages were received, the next call returns the error, before any
// unread bytes. sendmmsg sends nothing after a message that was sent in part. Message headers need not be aligned.
#include "t.h"

static int fd, flags;

static void many(const char *what) {
    char b[3][4];
    struct iovec v[3];
    struct mmsghdr m[3];
    memset(m, 0, sizeof m);
    for (int i = 0; i < 3; i++) {
        v[i] = (struct iovec){b[i], 4};
        m[i].msg_hdr = (struct msghdr){.msg_iov = &v[i], .msg_iovlen = 1};
    }
    errno = 0;
    int r = recvmmsg(fd, m, 3, flags, NULL);
    line("%s: %d %s, %u %u %u", what, r, r < 0 ? ename(errno) : "", m[0].msg_len, m[1].msg_len, m[2].msg_len);
}

static void *waits(void *x) {
    (void)x;
    many("waited");
    return NULL;
}

static void reset(struct conn *x) {
    struct linger at_once = {1, 0};
    MUST(setsockopt(x->s, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once));
    close(x->s);
}

static void case_of(int unread, int waiting, int f) {
    line("-- %d unread, %s, flags %x", unread, waiting ? "waited for" : "before", f);
    struct conn x = connection();
    fd = x.c, flags = f;
    if (unread) MUST(send(x.s, "message!more", unread, 0));
    arrived(fd, unread);
    pthread_t t;
    if (waiting) {
        MUST(pthread_create(&t, NULL, waits, NULL) ? -1 : 0);
        ms(50);
    }
    reset(&x);
    if (waiting)
        pthread_join(t, NULL);
    else
        wait_for(fd, POLLERR, 3000);
    // Time for SLIM to decide that the connection is over.
    if (!waiting) ms(100);
    for (int i = 0; i < 3; i++) many("then");
    close(x.c);
    close(x.l);
}

static pthread_t sender;

static void *interrupts_then_reads(void *end) {
    static char b[1 << 20];
    uint64_t all = 0;
    ms(100);
    pthread_kill(sender, SIGUSR1);
    ms(300);
    for (ssize_t r; (r = recv(*(int *)end, b, sizeof b, 0)) > 0; all += r) {}
    return (void *)all;
}

static void sent_in_part(void) {
    enum { MUCH = 1 << 26 };
    line("-- a message that is sent in part");
    struct conn x = connection();
    char *much = mmap(NULL, MUCH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct iovec v[3] = {{"first", 5}, {much, MUCH}, {"behind", 6}};
    struct mmsghdr m[3];
    memset(m, 0, sizeof m);
    for (int i = 0; i < 3; i++) m[i].msg_hdr = (struct msghdr){.msg_iov = &v[i], .msg_iovlen = 1};
    handle(SIGUSR1, t_on_usr1, 0);
    pthread_t t;
    void *all;
    sender = pthread_self();
    MUST(pthread_create(&t, NULL, interrupts_then_reads, &x.s) ? -1 : 0);
    R(sendmmsg(x.c, m, 3, 0));
    close(x.c);
    pthread_join(t, &all);
    line("%u, %s, %u; %s", m[0].msg_len, m[1].msg_len < MUCH ? "a part" : "all", m[2].msg_len,
         m[0].msg_len + m[1].msg_len + m[2].msg_len == (uint64_t)all ? "no more has come" : "something else has come");
    munmap(much, MUCH);
    close(x.s);
    close(x.l);
}

static void unaligned(void) {
    line("-- not aligned");
    struct conn x = connection();
    char b[8] = "", list[sizeof(struct iovec) + 3], message[sizeof(struct mmsghdr) + 5];
    struct iovec v = {"unaligned", 9};
    struct mmsghdr m = {.msg_hdr = {.msg_iov = (void *)(list + 3), .msg_iovlen = 1}};
    for (int i = 0; i < 2; i++) {
        memcpy(list + 3, &v, sizeof v);
        memcpy(message + 5, &m, sizeof m);
        R(i ? recvmmsg(x.s, (void *)(message + 5), 1, 0, NULL) : sendmmsg(x.c, (void *)(message + 5), 1, 0));
        v = (struct iovec){b, sizeof b};
    }
    quote(b, sizeof b);
    R(writev(x.c, (void *)(list + 3), 1));
    R(readv(x.s, (void *)(list + 3), 1));
    quote(b, sizeof b);
    hang_up(x);
}

int main(void) {
    begin(30);
    int cases[] = {0, MSG_DONTWAIT, MSG_WAITFORONE};
    for (int i = 0; i < 3; i++) {
        case_of(0, 0, cases[i]);
        case_of(6, 0, cases[i]);
        case_of(12, 0, cases[i]);
    }
    case_of(0, 1, 0);
    case_of(6, 1, 0);
    case_of(8, 1, 0);
    sent_in_part();
    unaligned();
    return 0;
}
