// Every call that moves bytes, with every flag that programs use, and with wrong arguments.
#include "t.h"

static int a, b;
static char buf[1 << 16];

static void data(const char *s) {
    MUST(send(a, s, strlen(s), 0));
    arrived(b, strlen(s));
}

static void rest(void) {
    memset(buf, 0, sizeof buf);
    long r = R(recv(b, buf, sizeof buf, MSG_DONTWAIT));
    if (r > 0) quote(buf, r);
}

static void plain(void) {
    line("-- read and write");
    R(write(a, "hello", 5));
    arrived(b, 5);
    R(read(b, buf, 3));
    R(read(b, buf + 3, 64));
    quote(buf, 5);
    R(write(a, "", 0));
    R(read(b, buf, 0));
    R(send(a, NULL, 0, 0));
    R(recv(b, NULL, 0, MSG_DONTWAIT));
    data("x");
    R(recv(b, NULL, 0, 0));
    R(read(b, NULL, 0));
    rest();
    R(send(a, "nosignal", 8, MSG_NOSIGNAL));
    R(send(a, "more", 4, MSG_MORE));
    R(send(a, "!", 1, MSG_DONTWAIT | MSG_EOR));
    arrived(b, 13);
    rest();
}

static void vectors(void) {
    line("-- readv and writev");
    struct iovec v[5] = {{"one", 3}, {NULL, 0}, {"two", 3}, {"", 0}, {"three", 5}};
    R(writev(a, v, 5));
    arrived(b, 11);
    char p[2], q[20];
    struct iovec w[3] = {{p, 2}, {NULL, 0}, {q, 20}};
    R(readv(b, w, 3));
    quote(p, 2);
    quote(q, 9);
    R(writev(a, v, 0));
    R(writev(a, v, -1));
    struct iovec many[IOV_MAX + 1];
    for (int i = 0; i <= IOV_MAX; i++) many[i] = (struct iovec){"z", 1};
    R(writev(a, many, IOV_MAX + 1));
    R(writev(a, many, IOV_MAX));
    arrived(b, IOV_MAX);
    static char z[IOV_MAX];
    for (int i = 0; i < IOV_MAX; i++) many[i] = (struct iovec){z + i, 1};
    R(readv(b, many, IOV_MAX + 1));
    R(readv(b, many, IOV_MAX));
    line("sum %d", (int)strspn((z[IOV_MAX - 1] = 0, z), "z"));
    R(readv(b, w, 0));
    struct iovec long_one[2] = {{buf, SSIZE_MAX}, {buf, SSIZE_MAX}};
    R(writev(a, long_one, 2));
    fcntl(b, F_SETFL, O_NONBLOCK);
    R(readv(b, w, 3));
    R(read(b, buf, 10));
    fcntl(b, F_SETFL, 0);
}

static void vectors_at(void) {
    line("-- preadv2 and pwritev2");
    struct iovec v[3] = {{"one", 3}, {NULL, 0}, {"two", 3}};
    char p[2], q[20];
    struct iovec w[2] = {{p, 2}, {q, 20}};
    R(pwritev2(a, v, 3, -1, 0));
    R(pwritev2(a, v, 3, -1, RWF_NOWAIT));
    R(pwritev64v2(a, v, 3, -1, RWF_SYNC));
    arrived(b, 18);
    R(preadv2(b, w, 2, -1, 0));
    quote(q, 16);
    R(pwritev64v2(a, v, 3, -1, RWF_APPEND | RWF_DSYNC | RWF_HIPRI));
    arrived(b, 6);
    R(preadv64v2(b, w, 1, -1, 0));
    R(preadv64v2(b, w, 2, -1, RWF_NOWAIT));
    R(preadv2(b, w, 2, -1, RWF_NOWAIT));
    R(preadv2(b, w, 2, 0, 0));
    R(preadv2(b, w, 2, -2, 0));
    R(preadv2(b, w, 2, -1, 0x1000));
    R(pwritev2(a, v, 3, 0, 0));
    R(pwritev2(a, v, 3, -2, 0));
    R(pwritev2(a, v, 3, -1, 0x1000));
    R(pwritev2(a, v, -1, -1, 0));
    R(pwritev2(a, v, IOV_MAX + 1, -1, 0));
    R(pwritev2(a, (void *)1, 2, -1, 0));
    R(preadv2(b, (void *)1, 2, -1, RWF_NOWAIT));
    R(preadv(b, w, 2, 0));
    R(pwritev(a, v, 3, 0));
    rest();
}

static void *second_half(void *x) {
    ms(40);
    MUST(send(a, x, strlen(x), 0));
    return NULL;
}

static void flags(void) {
    line("-- flags");
    R(recv(b, buf, 10, MSG_DONTWAIT));
    R(recv(b, buf, 10, MSG_DONTWAIT | MSG_PEEK));
    data("peekable");
    R(recv(b, buf, 4, MSG_PEEK));
    R(recv(b, buf, 100, MSG_PEEK));
    R(recv(b, buf, 100, MSG_PEEK | MSG_DONTWAIT));
    R(recv(b, buf, 8, MSG_PEEK | MSG_WAITALL));
    R(recv(b, buf, 4, 0));
    R(recv(b, buf + 4, 100, MSG_PEEK));
    rest();
    quote(buf, 8);

    pthread_t t;
    data("first ");
    pthread_create(&t, NULL, second_half, "second");
    R(recv(b, buf, 12, MSG_WAITALL));
    pthread_join(t, NULL);
    quote(buf, 12);
    data("half");
    pthread_create(&t, NULL, second_half, "more");
    R(recv(b, buf, 8, MSG_WAITALL | MSG_PEEK));
    pthread_join(t, NULL);
    R(recv(b, buf, 8, MSG_WAITALL));
    data("short");
    R(recv(b, buf, 50, MSG_WAITALL | MSG_DONTWAIT));
    struct iovec w[2] = {{buf, 3}, {buf + 3, 5}};
    struct msghdr m = {.msg_iov = w, .msg_iovlen = 2};
    data("abc");
    pthread_create(&t, NULL, second_half, "defgh");
    R(recvmsg(b, &m, MSG_WAITALL));
    pthread_join(t, NULL);
    quote(buf, 8);

    data("truncated away, kept");
    R(recv(b, NULL, 15, MSG_TRUNC));
    R(recv(b, NULL, 5, MSG_TRUNC | MSG_PEEK));
    rest();
    data("flags nobody knows");
    R(recv(b, buf, 5, 0x8000000));
    rest();
    R(recv(b, buf, 5, MSG_ERRQUEUE));
    R(recv(b, buf, 5, MSG_ERRQUEUE | MSG_DONTWAIT));
}

static void addresses(void) {
    line("-- sendto and recvfrom");
    struct sockaddr_in x = v4(9);
    R(sendto(a, "to", 2, 0, (void *)&x, sizeof x));
    R(sendto(a, "to", 2, 0, NULL, 0));
    arrived(b, 4);
    struct sockaddr_storage s;
    memset(&s, 0x5a, sizeof s);
    socklen_t n = sizeof s;
    R(recvfrom(b, buf, 2, 0, (void *)&s, &n));
    line("address length %d family %x", (int)n, s.ss_family);
    R(recvfrom(b, buf, 2, 0, NULL, NULL));
    MUST(send(a, "12", 2, 0));
    arrived(b, 2);
    n = sizeof s;
    R(recvfrom(b, buf, 1, 0, NULL, &n));
    line("address length %d", (int)n);
    R(recvfrom(b, buf, 1, 0, (void *)&s, NULL));
    rest();
    n = sizeof s;
    R(recvfrom(b, buf, 1, MSG_DONTWAIT, (void *)&s, &n));
    line("address length %d", (int)n);
}

static void messages(void) {
    line("-- sendmsg and recvmsg");
    struct iovec v[2] = {{"head", 4}, {"tail", 4}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
    R(sendmsg(a, &m, 0));
    R(sendmsg(a, &m, MSG_NOSIGNAL | MSG_DONTWAIT));
    arrived(b, 16);
    char p[6], q[20], c[256];
    struct sockaddr_storage s;
    struct iovec w[2] = {{p, 6}, {q, 20}};
    struct msghdr g = {.msg_name = &s, .msg_namelen = sizeof s, .msg_iov = w, .msg_iovlen = 2, .msg_control = c, .msg_controllen = sizeof c, .msg_flags = 0x55};
    R(recvmsg(b, &g, MSG_PEEK));
    line("name %d control %d flags %x", (int)g.msg_namelen, (int)g.msg_controllen, g.msg_flags);
    g.msg_controllen = sizeof c;
    g.msg_namelen = sizeof s;
    R(recvmsg(b, &g, MSG_CMSG_CLOEXEC));
    line("name %d control %d flags %x", (int)g.msg_namelen, (int)g.msg_controllen, g.msg_flags);
    quote(p, 6);
    quote(q, 10);
    R(recvmsg(b, &g, MSG_DONTWAIT));
    m.msg_iovlen = 0;
    R(sendmsg(a, &m, 0));
    m.msg_iovlen = IOV_MAX + 1;
    R(sendmsg(a, &m, 0));
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int))];
    } u = {.h = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    m = (struct msghdr){.msg_iov = v, .msg_iovlen = 1, .msg_control = &u, .msg_controllen = sizeof u};
    R(sendmsg(a, &m, 0));
    m.msg_controllen = 3;
    R(sendmsg(a, &m, 0));
    arrived(b, 8);
    rest();
    struct sockaddr_in x = v4(9);
    m = (struct msghdr){.msg_name = &x, .msg_namelen = sizeof x, .msg_iov = v, .msg_iovlen = 1};
    R(sendmsg(a, &m, 0));
    arrived(b, 4);
    rest();
}

static void wrong_pointers(void) {
    line("-- wrong pointers");
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(page + 4096, 4096, PROT_NONE);
    char *bad = page + 4096;
    memset(page, 'p', 4096);
    R(send(a, bad, 10, 0));
    R(write(a, bad, 10));
    R(sendto(a, bad, 10, 0, NULL, 0));
    struct iovec v[2] = {{"good", 4}, {bad, 10}};
    R(writev(a, (struct iovec *)bad, 2));
    R(readv(b, (struct iovec *)bad, 2));
    R(sendmsg(a, (struct msghdr *)bad, 0));
    R(recvmsg(b, (struct msghdr *)bad, MSG_DONTWAIT));
    struct msghdr m = {.msg_iov = (struct iovec *)bad, .msg_iovlen = 2};
    R(sendmsg(a, &m, 0));
    R(recvmsg(b, &m, MSG_DONTWAIT));
    ms(5);
    rest();
    data("stays here");
    R(recv(b, bad, 4, 0));
    R(recv(b, bad, 4, MSG_PEEK));
    R(read(b, bad, 4));
    v[0] = (struct iovec){bad, 4};
    R(readv(b, v, 1));
    R(recv(b, bad - 3, 10, 0));
    rest();
    data("name");
    socklen_t n = 16;
    R(recvfrom(b, buf, 2, 0, (void *)bad, &n));
    R(recvfrom(b, buf, 2, 0, (void *)buf, (void *)bad));
    rest();
    R(send(a, page + 4090, 6, 0));
    arrived(b, 6);
    rest();
}

int main(void) {
    begin(20);
    struct conn x = connection();
    for (int turn = 0; turn < 2; turn++) {
        a = turn ? x.s : x.c;
        b = turn ? x.c : x.s;
        line("==== %s sends", turn ? "server" : "client");
        plain();
        vectors();
    vectors_at();
        flags();
        addresses();
        messages();
        wrong_pointers();
    }
    ping(x.c, x.s, "at the end");
    hang_up(x);
    line("SIGPIPE %d", pipes());
    return 0;
}
