// What the library says by UDP, and the program is in the way of. The dynamic linker finds the program's `sendmsg` before
// libc's (flag -rdynamic), so the agent's datagrams come through here.
#pragma once
#include "t.h"
#include <dlfcn.h>

enum { HELLO = 1, HELLO_ACK = 3, FIN = 5, QUERY = 6, STATUS = 7, DEMOTE = 9, HELLO_DONE = 10 };

// Kinds that are lost, and how many of each were.
static _Atomic unsigned t_lost_kinds, t_lost[16];
// The last datagram of each kind that was lost.
static struct {
    char data[512];
    size_t len;
    struct sockaddr_storage to;
    socklen_t to_len;
} t_kept[16];

static int t_kind(const struct msghdr *m) {
    const char *data = m->msg_iovlen == 1 ? m->msg_iov->iov_base : NULL;
    if (!data || !m->msg_name || m->msg_iov->iov_len < 8 || m->msg_iov->iov_len > 512 || memcmp(data, "SLIM", 4)) return 0;
    return data[5] & 15;
}

ssize_t sendmsg(int fd, const struct msghdr *m, int flags) {
    static ssize_t (*next)(int, const struct msghdr *, int);
    if (!next) next = (ssize_t(*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    int kind = t_kind(m);
    if (!(t_lost_kinds >> kind & 1) || !kind) return next(fd, m, flags);
    memcpy(t_kept[kind].data, m->msg_iov->iov_base, t_kept[kind].len = m->msg_iov->iov_len);
    memcpy(&t_kept[kind].to, m->msg_name, t_kept[kind].to_len = m->msg_namelen);
    t_lost[kind]++;
    return m->msg_iov->iov_len;
}

// Says the last one of a kind that was lost, if one was.
UNUSED static void say_kept(int kind) {
    if (!t_lost[kind]) return;
    int s = MUST(socket(t_kept[kind].to.ss_family, SOCK_DGRAM, 0));
    MUST(sendto(s, t_kept[kind].data, t_kept[kind].len, 0, (void *)&t_kept[kind].to, t_kept[kind].to_len));
    close(s);
}
