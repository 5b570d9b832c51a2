// A program that installs a system call filter for itself, which does not allow the library's calls; and a program whose first
// thread ends before the others. In each case the program then behaves as in a bare run. The case is in T_ARGS.
#include "t.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static const char *kase;
static void say(const char *what);
static int is(const char *k) { return !strcmp(kase, k); }
static int l = -1, fd;

// Installs a filter with one answer for `count` calls and another for all others. In the case "by-number" it is installed by `syscall`.
static void install(const int *calls, int count, unsigned answer, unsigned otherwise) {
    struct sock_filter f[count + 3];
    f[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++) f[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], count - i, 0);
    f[count + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, otherwise);
    f[count + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    struct sock_fprog p = {count + 3, f};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    if (is("by-number"))
        MUST(syscall(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p, 0, 0));
    else if (is("seccomp"))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p));
    else
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p, 0, 0));
}

// Any other call than the allowed ones ends the thread or the process.
static void filter(unsigned otherwise) {
    static const int allowed[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_alarm};
    install(allowed, sizeof allowed / sizeof *allowed, SECCOMP_RET_ALLOW, otherwise);
}

// Calls that the program does not make itself end the process.
static void forbid(void) {
    static const int forbidden[] = {SYS_rt_sigprocmask, SYS_getpid, SYS_gettid, SYS_sendto, SYS_sendmsg, SYS_recvmsg, SYS_getsockopt};
    install(forbidden, sizeof forbidden / sizeof *forbidden, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW);
}

// Calls that return or take descriptor numbers.
static void numbers(void) {
    int s = MUST(socket(AF_INET, SOCK_STREAM, 0)), two[2];
    struct sockaddr_in a = v4(0);
    MUST(bind(s, (void *)&a, sizeof a));
    MUST(close(MUST(dup(s))));
    MUST(close(MUST(fcntl(s, F_DUPFD, 10))));
    MUST(pipe(two));
    MUST(dup2(two[0], two[1]));
    MUST(close(two[0]));
    MUST(close(two[1]));
    MUST(close(MUST(memfd_create("filters", 0))));
    MUST(close(MUST(epoll_create1(0))));
    MUST(close(MUST(eventfd(0, 0))));
    MUST(close(MUST(open("/dev/null", O_RDONLY))));
    MUST(close(s));
    say("numbers\n");
}

static void say(const char *what) {
    if (write(1, what, strlen(what)) < 0) _exit(90);
}

// Uses only read and write, which the filter allows.
static void echo(void) {
    char b[8];
    for (int i = 0; i < 3; i++) {
        if (write(fd, "question", 8) != 8) say("not written\n");
        int got = 0;
        while (got < 8) {
            ssize_t n = read(fd, b + got, 8 - got);
            if (n <= 0) break;
            got += n;
        }
        say(got == 8 && !memcmp(b, "question", 8) ? "answered\n" : "WRONG\n");
    }
}

static void *other(void *x) {
    (void)x;
    ms(300);
    echo();
    close(fd);
    line("the last thread ends");
    return NULL;
}

// The end of the filtered process closes two further connections.
int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    kase = getenv("T_ARGS");
    fd = pair_up(&l);
    if (is_server()) {
        // Echoes until the end of the stream.
        char b[64];
        ssize_t n;
        while ((n = recv(fd, b, sizeof b, 0)) > 0) full_send(fd, b, n);
        line("end: %zd", n);
        // Checks that the peer program has ended, with all its threads.
        struct pollfd p = {.fd = t_sync, .events = POLLIN};
        line("gone: %d", poll(&p, 1, 5000));
        return 0;
    }
    fcntl(t_sync, F_SETFD, FD_CLOEXEC);
    if (is("strict")) {
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0));
        echo();
        syscall(SYS_exit, 0);
    }
    if (is("thread") || is("process") || is("by-number") || is("seccomp")) {
        filter(is("thread") ? SECCOMP_RET_KILL_THREAD : SECCOMP_RET_KILL_PROCESS);
        echo();
        syscall(SYS_exit_group, 0);
    }
    if (is("numbers")) {
        forbid();
        numbers();
        echo();
        syscall(SYS_exit_group, 0);
    }
    if (is("killed")) {
        filter(SECCOMP_RET_KILL_THREAD);
        echo();
        // The filter kills this thread, which is the program's only one.
        syscall(SYS_getppid);
    }
    if (is("main-exits")) {
        echo();
        line("the first thread ends");
        pthread_exit(NULL);
    }
    if (is("main-exits-first")) {
        pthread_t t;
        pthread_create(&t, NULL, other, NULL);
        line("the first thread ends");
        pthread_exit(NULL);
    }
    return 0;
}
