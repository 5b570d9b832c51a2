// A connection breaks again and again while threads use it. Another thread only queries it, and sets options to the values
// that they have already. None of its calls may fail or report an error.
#include "t.h"
#include <pthread.h>

enum { ROUNDS = 150 };

static volatile int over;
static int conn;

// Sends bytes to and fro, so that this thread is in the middle of a call when the connection breaks.
static void *talks(void *p UNUSED) {
    char b[512];
    for (uint64_t at = 0;; at += sizeof b) {
        fill(b, at, sizeof b, is_server());
        if (full_send(conn, b, sizeof b)) line("send: %s", ename(errno));
        ssize_t r = full_recv(conn, b, sizeof b);
        if (r == 0) break;
        if (r != sizeof b) line("recv: %zd %s", r, ename(errno));
        if (!verify(b, at, sizeof b, !is_server())) break;
        // The server ends the exchange after it has answered the client.
        if (is_server() && over) {
            shutdown(conn, SHUT_WR);
            break;
        }
    }
    return NULL;
}

static int calls, failed;
static void check(const char *what, int r) {
    calls++;
    if (r < 0 && failed++ < 10) line("%s: %s", what, ename(errno));
}

static void *asks(void *p UNUSED) {
    while (!over) {
        struct sockaddr_in a;
        socklen_t n = sizeof a;
        int v = 0, on = 1;
        check("getpeername", getpeername(conn, (void *)&a, &n));
        n = sizeof a;
        check("getsockname", getsockname(conn, (void *)&a, &n));
        n = sizeof v;
        check("SO_ERROR", getsockopt(conn, SOL_SOCKET, SO_ERROR, &v, &n));
        if (v) errno = v, check("an error", -1);
        struct tcp_info info;
        n = sizeof info;
        check("TCP_INFO", getsockopt(conn, IPPROTO_TCP, TCP_INFO, &info, &n));
        // Programs check the state of a pooled connection before they use it again.
        if (info.tcpi_state == TCP_CLOSE) errno = ENOTCONN, check("the state", -1);
        check("SO_RCVBUF", getsockopt(conn, SOL_SOCKET, SO_RCVBUF, &v, &n));
        check("TCP_NODELAY", setsockopt(conn, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
        check("F_GETFL", v = fcntl(conn, F_GETFL));
        check("F_SETFL", fcntl(conn, F_SETFL, v));
        check("F_GETOWN", fcntl(conn, F_GETOWN));
        check("FIONREAD", ioctl(conn, FIONREAD, &v));
        check("SIOCOUTQ", ioctl(conn, SIOCOUTQ, &v));
        v = 0;
        check("FIONBIO", ioctl(conn, FIONBIO, &v));
    }
    return NULL;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = -1, breaks = atoi(getenv("T_BREAKS"));
    pthread_t talker, asker;
    conn = pair_up(&l);
    pthread_create(&talker, NULL, talks, NULL);
    pthread_create(&asker, NULL, asks, NULL);
    for (int n = 0; n < ROUNDS; n++) {
        ms(3);
        if (breaks && is_server()) break_connections();
    }
    over = 1;
    pthread_join(asker, NULL);
    pthread_join(talker, NULL);
    line("%s: %d failed", calls > 1000 ? "many calls" : "few calls", failed);
    meet();
    close(conn);
    return 0;
}
