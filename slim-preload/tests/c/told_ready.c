// A program that relies on readiness: after poll, select or epoll has reported a descriptor as ready, a non-blocking call must not
// fail with EAGAIN. Bare TCP never does that. Some programs (XGBoost) take it for success. Connections break between the report and
// the call. T_ARGS: the number of exchanges, the bytes of each, the way of waiting, and after how many reports a connection breaks.
#include "t.h"

static char in[1 << 20], out[1 << 20];
static int s, e, way, breaks, eagain_in, eagain_out, broken;
static unsigned seed = 1;

// Waits for some of `events`, and returns those that are reported.
static int ready(int events) {
    if (way == 0) {
        struct pollfd p = {.fd = s, .events = events};
        MUST(poll(&p, 1, -1));
        return p.revents;
    }
    if (way == 1) {
        fd_set r, w;
        FD_ZERO(&r);
        FD_ZERO(&w);
        if (events & POLLIN) FD_SET(s, &r);
        if (events & POLLOUT) FD_SET(s, &w);
        MUST(select(s + 1, &r, &w, NULL, NULL));
        return (FD_ISSET(s, &r) ? POLLIN : 0) | (FD_ISSET(s, &w) ? POLLOUT : 0);
    }
    struct epoll_event ev = {.events = events};
    MUST(epoll_ctl(e, EPOLL_CTL_MOD, s, &ev));
    MUST(epoll_wait(e, &ev, 1, -1));
    return ev.events;
}

static void maybe_break(void) {
    if (breaks && rand_r(&seed) / 7 % breaks == 0) broken += break_connections() > 0;
}

// Sends and receives `n` bytes at the same time.
static void exchange(size_t n) {
    size_t sent = 0, got = 0;
    while (sent < n || got < n) {
        int r = ready((sent < n ? POLLOUT : 0) | (got < n ? POLLIN : 0));
        maybe_break();
        if (r & POLLIN && got < n) {
            ssize_t k = recv(s, in + got, n - got, 0);
            if (k < 0 && errno == EAGAIN) k = 0, eagain_in++;
            if (k < 0) MUST(k);
            got += k;
            maybe_break();
        }
        if (r & POLLOUT && sent < n) {
            ssize_t k = send(s, out + sent, n - sent, MSG_NOSIGNAL);
            if (k < 0 && errno == EAGAIN) k = 0, eagain_out++;
            if (k < 0) MUST(k);
            sent += k;
        }
    }
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 120);
    int count, size, l = -1, wrong = 0;
    if (sscanf(getenv("T_ARGS"), "%d %d %d %d", &count, &size, &way, &breaks) != 4) return 94;
    if (!atoi(getenv("T_BREAKS"))) breaks = 0;
    int wanted = breaks > 0;
    seed += is_server();
    s = pair_up(&l);
    MUST(fcntl(s, F_SETFL, O_NONBLOCK));
    struct epoll_event ev = {.events = 0};
    e = MUST(epoll_create1(0));
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, s, &ev));
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < size; k++) out[k] = i * 7 + k % 251 + is_server();
        exchange(size);
        for (int k = 0; k < size; k++) wrong += in[k] != (char)(i * 7 + k % 251 + !is_server());
    }
    line("%d exchanges, %d wrong bytes, %d reads and %d writes without effect", count, wrong, eagain_in, eagain_out);
    meet();
    return wanted && !broken ? 95 : 0;
}
