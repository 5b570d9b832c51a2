// A program that begins under a system call filter of its parent. The filter allows what the program itself calls: it moves
// bytes by read and write only. Any other call that moves bytes kills the process.
#include "t.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void filter(void) {
    static const int forbidden[] = {SYS_sendto, SYS_recvfrom, SYS_sendmsg, SYS_recvmsg, SYS_timerfd_create};
    enum { N = sizeof forbidden / sizeof *forbidden };
    struct sock_filter f[N + 3] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (int i = 0; i < N; i++) f[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[i], N - i, 0);
    f[N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    f[N + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog p = {N + 3, f};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p, 0, 0));
}

int main(int argc, char **argv) {
    if (argc > 1) {
        filter();
        execl(argv[0], argv[0], NULL);
        _exit(91);
    }
    begin(20);
    struct conn x = connection();
    char b[8] = "";
    R(write(x.c, "question", 8));
    R(read(x.s, b, 8));
    R(writev(x.s, &(struct iovec){"answer", 6}, 1));
    R(readv(x.c, &(struct iovec){b, 8}, 1));
    pid_t p = fork();
    if (!p) {
        struct conn y = connection();
        R(write(y.c, "question", 8));
        hang_up(y);
        _exit(0);
    }
    int status = 0;
    R(waitpid(p, &status, 0) == p);
    line("child: %x", status);
    hang_up(x);
    return 0;
}
