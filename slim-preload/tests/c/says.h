// Lets a program lose, delay or repeat the library's control messages (UDP). The dynamic linker finds the program's `sendmsg`
// before libc's (flag -rdynamic), so the agent's datagrams come through here.
#pragma once
#include "t.h"
#include "raw.h"
#include <dlfcn.h>

enum { HELLO = 1, HELLO_ACK = 3, FIN = 5, QUERY = 6, STATUS = 7, DEMOTE = 9, HELLO_DONE = 10 };

// Bit mask of the kinds of messages to lose; how many of each kind were lost, and how many were sent.
static _Atomic unsigned t_lost_kinds, t_lost[16], t_said[16];
// The last lost datagram of each kind.
static struct {
    char data[512];
    size_t len;
    struct sockaddr_storage to;
    socklen_t to_len;
} t_kept[16];

// By how many milliseconds each message is delayed, and how often it is delivered.
static int t_late_ms, t_times = 1;

static int t_kind(const struct msghdr *m) {
    const char *data = m->msg_iovlen == 1 ? m->msg_iov->iov_base : NULL;
    if (!data || !m->msg_name || m->msg_iov->iov_len < 8 || m->msg_iov->iov_len > 512 || memcmp(data, "SLIM", 4)) return 0;
    return data[5] & 15;
}

// A delayed datagram.
struct t_later {
    double at;
    int fd;
    char data[512], control[256];
    struct sockaddr_storage to;
    struct iovec part;
    struct msghdr m;
    struct t_later *next;
};
static struct t_later *t_first, **t_end = &t_first;
static pthread_mutex_t t_lock = PTHREAD_MUTEX_INITIALIZER;

// By raw system calls, because these datagrams are not the program's.
static void *t_deliver(void *none UNUSED) {
    for (;;) {
        pthread_mutex_lock(&t_lock);
        struct t_later *d = t_first && t_first->at <= now_s() ? t_first : NULL;
        if (d && !(t_first = d->next)) t_end = &t_first;
        pthread_mutex_unlock(&t_lock);
        if (!d) {
            ms(1);
            continue;
        }
        for (int i = 0; i < t_times; i++) raw(SYS_sendmsg, d->fd, &d->m, MSG_DONTWAIT | MSG_NOSIGNAL);
        raw(SYS_close, d->fd);
        free(d);
    }
    return NULL;
}

static void t_postpone(int fd, const struct msghdr *m) {
    static pthread_t thread;
    struct t_later *d = calloc(1, sizeof *d);
    // A copy, because the socket may be closed before the datagram is sent.
    if (m->msg_controllen > sizeof d->control || (d->fd = raw(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 600)) < 0) return free(d);
    d->at = now_s() + t_late_ms / 1e3;
    d->m = *m;
    d->part = (struct iovec){memcpy(d->data, m->msg_iov->iov_base, m->msg_iov->iov_len), m->msg_iov->iov_len};
    d->m.msg_iov = &d->part;
    d->m.msg_name = memcpy(&d->to, m->msg_name, m->msg_namelen);
    d->m.msg_control = memcpy(d->control, m->msg_control ? m->msg_control : "", m->msg_controllen);
    pthread_mutex_lock(&t_lock);
    if (!thread) pthread_create(&thread, NULL, t_deliver, NULL);
    *t_end = d;
    t_end = &d->next;
    pthread_mutex_unlock(&t_lock);
}

ssize_t sendmsg(int fd, const struct msghdr *m, int flags) {
    static ssize_t (*next)(int, const struct msghdr *, int);
    if (!next) next = (ssize_t(*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    int kind = t_kind(m);
    if (!kind) return next(fd, m, flags);
    if (t_lost_kinds >> kind & 1) {
        memcpy(t_kept[kind].data, m->msg_iov->iov_base, t_kept[kind].len = m->msg_iov->iov_len);
        memcpy(&t_kept[kind].to, m->msg_name, t_kept[kind].to_len = m->msg_namelen);
        t_lost[kind]++;
        return m->msg_iov->iov_len;
    }
    ssize_t n = m->msg_iov->iov_len;
    if (t_late_ms)
        t_postpone(fd, m);
    else
        for (int i = 0; i < t_times; i++) n = next(fd, m, flags);
    t_said[kind]++;
    return n;
}

// Sends the last lost message of a kind, if there is one.
UNUSED static void say_kept(int kind) {
    if (!t_lost[kind]) return;
    int s = MUST(socket(t_kept[kind].to.ss_family, SOCK_DGRAM, 0));
    MUST(sendto(s, t_kept[kind].data, t_kept[kind].len, 0, (void *)&t_kept[kind].to, t_kept[kind].to_len));
    close(s);
}
