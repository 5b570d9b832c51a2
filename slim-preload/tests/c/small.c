// Connections with small buffers are full when they break. All bytes must arrive, without a stall.
// The arguments: the sizes for SO_RCVBUF and SO_SNDBUF, 0 for the system's default.
#include "t.h"

static int rcvbuf, sndbuf;
static unsigned char b[70000];

static void sizes(int fd) {
    if (rcvbuf) MUST(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof rcvbuf));
    if (sndbuf) MUST(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &sndbuf, sizeof sndbuf));
}

static void has_sizes(int fd, const char *end) {
    int r, s;
    socklen_t n = sizeof r;
    MUST(getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &r, &n));
    MUST(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &s, &n));
    line("%s: receives %d, sends %d", end, rcvbuf ? r : 0, sndbuf ? s : 0);
}

struct way {
    int from, to;
    uint64_t seed, sent, received;
};

// Sends as much as fits.
static void fill_up(struct way *w) {
    for (int idle = 0; idle < 30;) {
        size_t n = 1 + t_word(8, w->sent) % 6000;
        fill(b, w->sent, n, w->seed);
        ssize_t r = send(w->from, b, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (r > 0) w->sent += r, idle = 0;
        else idle++, ms(1);
    }
}

static int read_all(struct way *w) {
    while (w->received < w->sent) {
        ssize_t r = recv(w->to, b, sizeof b, 0);
        if (r <= 0) return line("recv: %zd %s", r, ename(errno)), 0;
        if (!verify(b, w->received, r, w->seed)) return 0;
        w->received += r;
    }
    return 1;
}

int main(int argc, char **argv) {
    begin(60);
    rcvbuf = argc > 1 ? atoi(argv[1]) : 0;
    sndbuf = argc > 2 ? atoi(argv[2]) : 0;
    int l = listener();
    sizes(l);
    int c = MUST(socket(AF_INET, SOCK_STREAM, 0));
    sizes(c);
    struct sockaddr_in a = v4(port_of(l));
    MUST(connect(c, (void *)&a, sizeof a));
    int s = MUST(accept(l, NULL, NULL));
    await_negotiation();
    struct way there = {c, s, 3, 0, 0}, back = {s, c, 4, 0, 0};
    double longest = 0, last = 0;
    for (int round = 0; round < 6; round++) {
        fill_up(&there);
        fill_up(&back);
        if (getenv("T_BREAKS") && atoi(getenv("T_BREAKS")) && break_connections() < 0) line("cannot break connections");
        double begun = now_s();
        line("there: %s", read_all(&there) ? "all" : "not all");
        line("back: %s", read_all(&back) ? "all" : "not all");
        last = now_s() - begun;
        if (last > longest) longest = last;
        fprintf(stderr, "round %d: %" PRIu64 " bytes there, %" PRIu64 " back; read in %.0f ms\n", round, there.received, back.received, last * 1000);
    }
    has_sizes(c, "the one end");
    has_sizes(s, "the other end");
    line("read %s", longest < 1 ? "at once" : "with a stall");
    return 0;
}
