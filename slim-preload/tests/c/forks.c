// Connections and processes: fork, vfork, spawn, exec, and descriptors sent to another process.
#include "t.h"

extern char **environ;
static char buf[256];
static const char *self;

static void child_ends(pid_t p, const char *what) {
    int st = -1;
    MUST(waitpid(p, &st, 0));
    if (WIFSIGNALED(st))
        line("%s: killed by %d", what, WTERMSIG(st));
    else
        line("%s: exit %d", what, WEXITSTATUS(st));
}

static void ends(int fd) {
    line("the peer sees %s", bits(wait_for(fd, POLLIN | POLLRDHUP, 1000)));
    R(recv(fd, buf, 9, MSG_DONTWAIT));
}

// A child that answers in upper case, until the end of the stream.
static void answer(int fd) {
    char b[64];
    ssize_t n;
    while ((n = read(fd, b, sizeof b)) > 0) {
        for (ssize_t i = 0; i < n; i++) b[i] -= b[i] >= 'a' && b[i] <= 'z' ? 32 : 0;
        if (full_send(fd, b, n)) break;
    }
}

static void ask(int fd, const char *q) {
    memset(buf, 0, sizeof buf);
    if (full_send(fd, q, strlen(q)) == 0) R(full_recv(fd, buf, strlen(q)));
    quote(buf, strlen(q));
}

// The program after exec goes on with a descriptor that it has inherited.
static int heir(int fd) {
    begin(20);
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    R(getpeername(fd, (void *)&a, &n));
    line("flags %x, close on exec %d", fcntl(fd, F_GETFL), fcntl(fd, F_GETFD));
    line("%s", bits(wait_for(fd, POLLIN, 2000)));
    R(full_recv(fd, buf, 6));
    quote(buf, 6);
    MUST(send(fd, "heir here", 9, 0));
    R(full_recv(fd, buf, 4));
    quote(buf, 4);
    // The program after exec also makes a connection.
    struct conn x = connection();
    ping(x.c, x.s, "the heir's own");
    hang_up(x);
    return 0;
}

static void exec_self(int fd, const char *how) {
    char n[12];
    sprintf(n, "%d", fd);
    execl(self, self, how, n, (char *)NULL);
    _exit(90);
}

// A child shuts down the sending direction of the connection, by the inherited number or by a copy, with or without using the
// connection first. The other direction goes on.
static void ended_by_child(int uses, int copies) {
    struct conn x = connection();
    if (uses) MUST(send(x.s, "q", 1, 0));
    pid_t p = fork();
    if (!p) {
        if (copies) x.c = R(dup(x.c));
        if (uses) R(full_recv(x.c, buf, 1));
        if (uses) R(send(x.c, "answer", 6, 0));
        R(shutdown(x.c, SHUT_WR));
        _exit(0);
    }
    child_ends(p, "child");
    R(full_recv(x.s, buf, 9));
    R(send(x.s, "back", 4, 0));
    R(full_recv(x.c, buf, 4));
    line("%s", bits(wait_for(x.s, POLLIN | POLLRDHUP, 2000)));
    hang_up(x);
}

int main(int argc, char **argv) {
    self = argv[0];
    if (argc > 2 && !strcmp(argv[1], "heir")) return heir(atoi(argv[2]));
    if (argc > 2 && !strcmp(argv[1], "closed")) {
        line("after exec: %d %s", fcntl(atoi(argv[2]), F_GETFD), ename(errno));
        return 0;
    }
    begin(60);
    struct conn x;
    pid_t p;

    line("-- a forking server");
    int l = listener();
    for (int i = 0; i < 3; i++) {
        int c = dial(port_of(l)), s = MUST(accept(l, NULL, NULL));
        await_negotiation();
        p = fork();
        if (!p) {
            close(l);
            close(c);
            answer(s);
            exit(0);
        }
        R(close(s));
        ask(c, "first question");
        ms(30);
        ask(c, "second");
        R(shutdown(c, SHUT_WR));
        R(recv(c, buf, 9, 0));
        R(close(c));
        child_ends(p, "worker");
    }
    close(l);

    line("-- the child talks, then the parent");
    x = connection();
    ping(x.c, x.s, "before fork");
    p = fork();
    if (!p) {
        ping(x.c, x.s, "child");
        ping(x.s, x.c, "child, the other way");
        exit(3);
    }
    child_ends(p, "child");
    ping(x.c, x.s, "parent");
    p = fork();
    if (!p) {
        R(shutdown(x.c, SHUT_WR));
        _exit(0);
    }
    child_ends(p, "the child that shuts down");
    ends(x.s);
    R(send(x.s, "still", 5, 0));
    R(full_recv(x.c, buf, 5));
    hang_up(x);

    line("-- a child closes everything it can");
    x = connection();
    p = fork();
    if (!p) {
        for (int i = 3; i < 20000; i++) close(i);
        _exit(0);
    }
    child_ends(p, "closer");
    ping(x.c, x.s, "after the closer");
    p = fork();
    if (!p) {
        closefrom(3);
        execl("/bin/true", "true", (char *)NULL);
        _exit(9);
    }
    child_ends(p, "closer and exec");
    ping(x.c, x.s, "after the second closer");
    line("poll %s", bits(wait_for(x.s, POLLIN | POLLRDHUP, 0)));

    line("-- the parent is gone first: the connection lives in the child");
    int go[2];
    MUST(pipe(go));
    p = fork();
    if (!p) {
        pid_t q = fork();
        if (q) _exit(0);
        close(go[0]);
        close(x.c);
        ms(50);
        answer(x.s);
        write(go[1], "d", 1);
        _exit(0);
    }
    child_ends(p, "middle");
    close(go[1]);
    R(close(x.s));
    ask(x.c, "to the grandchild");
    R(shutdown(x.c, SHUT_WR));
    R(recv(x.c, buf, 1, 0));
    R(read(go[0], buf, 1));
    close(go[0]);
    R(close(x.c));
    R(close(x.l));

    line("-- vfork, posix_spawn, system, popen");
    x = connection();
    p = vfork();
    if (!p) {
        for (int i = 3; i < 2000; i++) fcntl(i, F_SETFD, FD_CLOEXEC);
        execl("/bin/true", "true", (char *)NULL);
        _exit(9);
    }
    child_ends(p, "vfork and exec");
    ping(x.c, x.s, "after vfork");
    p = vfork();
    if (!p) {
        // The child of vfork has its own descriptors but the parent's memory.
        close(x.c);
        close(x.s);
        close(x.l);
        _exit(4);
    }
    child_ends(p, "vfork and close");
    ping(x.c, x.s, "after vfork and close");
    p = vfork();
    if (!p) {
        dup2(x.c, 1);
        execl("/bin/echo", "echo", "-n", "spoken", (char *)NULL);
        _exit(9);
    }
    child_ends(p, "vfork and dup2");
    R(full_recv(x.s, buf, 6));
    quote(buf, 6);
    ping(x.c, x.s, "after vfork and dup2");
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, x.c, 1);
    posix_spawn_file_actions_addclose(&fa, x.s);
    char *args[] = {"echo", "-n", "spawned", NULL};
    R(posix_spawn(&p, "/bin/echo", &fa, NULL, args, environ));
    child_ends(p, "posix_spawn");
    R(full_recv(x.s, buf, 7));
    quote(buf, 7);
    R(system("exit 7") >> 8);
    FILE *f = popen("echo popened", "r");
    line("%s", fgets(buf, sizeof buf, f) ? buf : "nothing");
    R(pclose(f));
    ping(x.s, x.c, "after all of them");
    hang_up(x);

    line("-- exec with a connected descriptor");
    for (int side = 0; side < 2; side++) {
        x = connection();
        ping(x.c, x.s, "before exec");
        int mine = side ? x.s : x.c, other = side ? x.c : x.s;
        p = fork();
        if (!p) {
            close(other);
            exec_self(mine, "heir");
        }
        MUST(close(mine));
        MUST(send(other, "legacy", 6, 0));
        // The parent writes no transcript while the program after exec does.
        MUST(full_recv(other, buf, 9));
        MUST(send(other, "tail", 4, 0));
        child_ends(p, "heir");
        quote(buf, 9);
        ends(other);
        close(other);
        close(x.l);
    }
    line("-- exec without fork, bytes on the way");
    x = connection();
    p = fork();
    if (!p) {
        // The child makes and uses a connection, and calls exec with bytes unread.
        int c = dial(port_of(x.l));
        MUST(send(c, "hi", 2, 0));
        MUST(full_recv(c, buf, 2));
        ms(50);
        exec_self(c, "heir");
    }
    int s = MUST(accept(x.l, NULL, NULL));
    R(full_recv(s, buf, 2));
    MUST(send(s, "yolega", 6, 0));
    ms(120);
    MUST(send(s, "cy", 2, 0));
    MUST(full_recv(s, buf, 9));
    MUST(send(s, "tail", 4, 0));
    child_ends(p, "heir");
    quote(buf, 9);
    ends(s);
    close(s);
    MUST(fcntl(x.c, F_SETFD, FD_CLOEXEC));
    p = fork();
    if (!p) exec_self(x.c, "closed");
    child_ends(p, "close on exec");
    ping(x.c, x.s, "after exec of a child");
    hang_up(x);

    line("-- sent to another process");
    x = connection();
    int u[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, u));
    ping(x.c, x.s, "before");
    p = fork();
    if (!p) {
        closefrom(u[1] + 1);
        close(x.c);
        close(x.s);
        close(x.l);
        close(u[0]);
        char b[1], c[CMSG_SPACE(sizeof(int))];
        struct iovec v = {b, 1};
        struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c};
        MUST(recvmsg(u[1], &m, MSG_CMSG_CLOEXEC));
        int fd;
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
        line("received %d, close on exec %d", fd, fcntl(fd, F_GETFD));
        answer(fd);
        _exit(0);
    }
    close(u[1]);
    union {
        struct cmsghdr h;
        char room[CMSG_SPACE(sizeof(int))];
    } cm = {.h = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&cm.h), &x.s, sizeof x.s);
    struct iovec v = {"f", 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &cm, .msg_controllen = sizeof cm};
    MUST(sendmsg(u[0], &m, 0));
    MUST(close(x.s));
    ask(x.c, "passed on");
    ms(50);
    ask(x.c, "again");
    R(shutdown(x.c, SHUT_WR));
    R(recv(x.c, buf, 1, 0));
    child_ends(p, "receiver");
    close(x.c);
    close(x.l);
    close(u[0]);

    line("-- ended by a child");
    for (int way = 0; way < 4; way++) ended_by_child(way & 1, way >> 1);

    line("-- a child's own connections");
    x = connection();
    p = fork();
    if (!p) {
        struct conn y = connection();
        ping(y.c, y.s, "child's own");
        hang_up(y);
        int c = dial(port_of(x.l));
        int s2 = MUST(accept(x.l, NULL, NULL));
        await_negotiation();
        ping(c, s2, "through the inherited listener");
        _exit(0);
    }
    child_ends(p, "child");
    ping(x.c, x.s, "parent");
    int c = dial(port_of(x.l));
    s = MUST(accept(x.l, NULL, NULL));
    await_negotiation();
    ping(c, s, "parent's listener");
    hang_up(x);
    line("SIGPIPE %d", pipes());
    return 0;
}
