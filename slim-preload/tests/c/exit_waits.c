// A process waits at exit for the acknowledgement of its last bytes, because its network is down. Meanwhile a signal handler of the program
// sends. The process must end as it would have ended without the wait, and the receiver gets all that was sent before. Needs its own network.
#include "t.h"
#include <net/if.h>

static int s, beats;

static void network(int up) {
    int f = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = up ? IFF_UP | IFF_RUNNING : 0};
    MUST(ioctl(f, SIOCSIFFLAGS, &r));
    close(f);
}

static void beat(int sig UNUSED) {
    int saved = errno;
    if (++beats == 10) network(1);
    write(s, "x", 1);
    errno = saved;
}

int main(int argc UNUSED, char **argv UNUSED) {
    static char b[1000];
    begin(40);
    int l = listener(), port = port_of(l), status;
    pid_t receiver = fork();
    if (!receiver) {
        int c = MUST(accept(l, NULL, NULL));
        long n = full_recv(c, b, sizeof b);
        _exit(n != 900 || !verify(b, 0, 900, 5));
    }
    pid_t sender = fork();
    if (!sender) {
        s = dial(port);
        await_negotiation();
        network(0);
        handle(SIGALRM, beat, SA_RESTART);
        handle(SIGPIPE, SIG_DFL, 0);
        fill(b, 0, 900, 5);
        if (send(s, b, 900, 0) != 900) line("send: %s", ename(errno));
        struct itimerval v = {{0, 50000}, {0, 50000}};
        setitimer(ITIMER_REAL, &v, NULL);
        exit(7);
    }
    waitpid(sender, &status, 0);
    line("the sender: %s %d", WIFEXITED(status) ? "exit" : "signal", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    network(1);
    waitpid(receiver, &status, 0);
    line("the receiver has %s", status ? "other bytes" : "all");
    return 0;
}
