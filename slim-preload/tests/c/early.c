// Connections end and break while all that the acceptor has from its peer is HELLO: the message that would show that the peer
// got the answer is lost. Two programs; the case is in T_ARGS, and whether the connection breaks at all is in T_BREAKS.
#include "says.h"

static char buf[1 << 20];
static int l = -1, fd;
static const char *kase;

static int is(const char *k) { return !strcmp(kase, k); }

// Waits until the library, if it is loaded, has sent a message of this kind, even one that was lost.
static void said(int kind) {
    if (!getenv("LD_PRELOAD")) return;
    for (int i = 0; i < 1000 && !t_lost[kind] && !t_said[kind]; i++) ms(1);
    if (!t_lost[kind] && !t_said[kind]) line("nothing was said");
}

static void connected(void) {
    if (is_server()) {
        l = listener();
        tell(port_of(l));
        fd = MUST(accept(l, NULL, NULL));
    } else {
        struct sockaddr_in a = v4(hear());
        int small = 8192;
        fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
        if (is("in-flight") || is("in-flight-now")) MUST(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small));
        MUST(connect(fd, (void *)&a, sizeof a));
    }
}

// Breaks the connection once both programs are here. From then on no message is lost.
static void broken(void) {
    meet();
    if (is_server()) break_if_wanted();
    meet();
    t_lost_kinds = 0;
}

static void received(size_t n) {
    R(full_recv(fd, buf, n));
    line("verified %d", verify(buf, 0, n, 7));
    R(recv(fd, buf, 1, 0));
}

// The acceptor closes, with all bytes arrived or with many still in flight.
static void acceptor_closes(size_t n) {
    if (is_server()) {
        int large = 1 << 20;
        MUST(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &large, sizeof large));
        fill(buf, 0, n, 7);
        R(full_send(fd, buf, n));
        if (n == 5) acked(fd);
        if (!is("in-flight-now")) said(HELLO_ACK);
        R(close(fd));
        broken();
    } else {
        if (!is("in-flight-now")) said(HELLO_DONE);
        broken();
        received(n);
        R(close(fd));
    }
    meet();
}

// The connector closes before it has got an answer.
static void connector_closes(size_t n) {
    if (is_server()) {
        said(HELLO_ACK);
        broken();
        received(n);
        R(close(fd));
    } else {
        fill(buf, 0, n, 7);
        R(full_send(fd, buf, n));
        acked(fd);
        R(close(fd));
        broken();
    }
    meet();
}

// The acceptor has read the end of the stream, and answers.
static void half_closed(void) {
    if (is_server()) {
        R(recv(fd, buf, 1, 0));
        broken();
        R(send(fd, "answer", 6, MSG_NOSIGNAL));
    } else {
        said(HELLO_DONE);
        R(shutdown(fd, SHUT_WR));
        broken();
        memset(buf, 0, 9);
        R(full_recv(fd, buf, 6));
        quote(buf, strlen(buf));
    }
    meet();
    R(close(fd));
    meet();
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 30);
    kase = getenv("T_ARGS");
    t_lost_kinds = is_server() ? (is("connector") ? 1 << HELLO_ACK : 0) : (is("connector") ? 0 : 1 << HELLO_DONE);
    if (is("half")) t_lost_kinds |= 1 << FIN;
    connected();
    if (is("closes")) acceptor_closes(5);
    if (is("in-flight") || is("in-flight-now")) acceptor_closes(300000);
    if (is("connector")) connector_closes(5);
    if (is("half")) half_closed();
    line("SIGPIPE %d", pipes());
    return 0;
}
