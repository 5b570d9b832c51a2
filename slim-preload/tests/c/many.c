// recvmmsg on a connection that its peer resets: the error is kept for the next call where some messages were received, and
// comes before the bytes that are unread.
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
    // It may be settled a moment later that the connection is over.
    if (!waiting) ms(100);
    for (int i = 0; i < 3; i++) many("then");
    close(x.c);
    close(x.l);
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
    return 0;
}
