// Connections break again and again while one end sends its last bytes and closes. At the other end two threads read from each
// connection, and a third fetches its errors. The end of the stream must not be reported before the last byte. T_ARGS: rounds.
// A connection that has ended may be destroyed before a reader has seen the end. Then the reader gets an error; that must be rare.
#include "t.h"

enum { CONNECTIONS = 12, READERS = 2, PIECE = 700 };

static int conns[CONNECTIONS];
static _Atomic long got[CONNECTIONS], errors[CONNECTIONS];
static _Atomic int over;
static int after_the_end;

static void *reads(void *p) {
    long i = (long)p;
    char b[3000];
    for (ssize_t n; (n = recv(conns[i], b, sizeof b, 0)) != 0; got[i] += n)
        if (n < 0) {
            errors[i]++;
            break;
        }
    return NULL;
}

static void *asks(void *p UNUSED) {
    for (int v; !over;)
        for (int i = 0; i < CONNECTIONS; i++) {
            socklen_t n = sizeof v;
            getsockopt(conns[i], SOL_SOCKET, SO_ERROR, &v, &n);
        }
    return NULL;
}

static void *breaks_all(void *p UNUSED) {
    while (!over) {
        break_connections();
        ms(1);
    }
    return NULL;
}

static void receive_all(int round) {
    pthread_t readers[CONNECTIONS][READERS], asker;
    over = 0;
    for (long i = 0; i < CONNECTIONS; i++) {
        got[i] = errors[i] = 0;
        for (int k = 0; k < READERS; k++) pthread_create(&readers[i][k], NULL, reads, (void *)i);
    }
    pthread_create(&asker, NULL, asks, NULL);
    for (int i = 0; i < CONNECTIONS; i++) {
        long all = hear();
        for (int k = 0; k < READERS; k++) pthread_join(readers[i][k], NULL);
        if (got[i] != all) line("round %d: the end or an error after %ld of %ld bytes", round, got[i], all);
        after_the_end += errors[i];
    }
    over = 1;
    pthread_join(asker, NULL);
}

static void send_all(void) {
    static char b[PIECE];
    pthread_t breaker;
    long sent[CONNECTIONS] = {0};
    over = 0;
    if (atoi(getenv("T_BREAKS"))) pthread_create(&breaker, NULL, breaks_all, NULL);
    for (int i = 0; i < CONNECTIONS; i++) {
        for (int k = 0; k < 20; k++) {
            if (full_send(conns[i], b, PIECE)) line("send: %s", ename(errno));
            else sent[i] += PIECE;
            if (k % 8 == i % 8) ms(1);
        }
        close(conns[i]);
    }
    for (int i = 0; i < CONNECTIONS; i++) tell(sent[i]);
    hear();
    over = 1;
    if (atoi(getenv("T_BREAKS"))) pthread_join(breaker, NULL);
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 120);
    int l = is_server() ? listener() : -1, port = 0, rounds = atoi(getenv("T_ARGS"));
    if (is_server()) tell(port_of(l));
    else port = hear();
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < CONNECTIONS; i++) {
            conns[i] = is_server() ? (int)MUST(accept(l, NULL, NULL)) : dial(port);
            meet();
        }
        await_negotiation();
        meet();
        if (is_server()) {
            receive_all(round);
            tell(1);
        } else {
            send_all();
        }
        for (int i = 0; i < CONNECTIONS && is_server(); i++) close(conns[i]);
        meet();
    }
    line("%d rounds", rounds);
    if (after_the_end > rounds * CONNECTIONS * READERS / 20) line("%d errors in place of the end", after_the_end);
    return 0;
}
