// Several threads and a signal handler send on one connection, first one thread alone, then all at once, while the connection
// breaks again and again. Each record is sent by one call, so it must arrive in one piece, and the records of one sender must
// arrive in order. Two programs; T_BREAKS says how often the server breaks the connection.
#include "t.h"

enum { THREADS = 4, HANDLER = THREADS, SENDERS, ALONE = 500, RECORDS = 2500 };

struct record {
    uint32_t sender, number;
    unsigned char bytes[56];
};

static int fd;
static volatile int alone = 1, over, ended, broken;
static volatile uint64_t got;
static pthread_t threads[THREADS];
static uint32_t by_handler;

static struct record record(int server, uint32_t sender, uint32_t number) {
    struct record r = {.sender = sender, .number = number};
    fill(r.bytes, (uint64_t)number * sizeof r.bytes, sizeof r.bytes, 10 * server + sender);
    return r;
}

static void *sender(void *p) {
    uint32_t me = (uint32_t)(uintptr_t)p;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(me ? SIG_BLOCK : SIG_UNBLOCK, &usr1, NULL);
    while (me && alone) usleep(100);
    for (uint32_t i = 0; i < RECORDS; i++) {
        struct record r = record(is_server(), me, i);
        if (full_send(fd, &r, sizeof r)) {
            line("sender %u, record %u: %s", me, i, ename(errno));
            break;
        }
        if (i == ALONE) alone = 0;
        if (i % 16 == 0) usleep(300);
    }
    return NULL;
}

// Interrupts the first sender at any point. A record that cannot be sent at once is sent by a later signal.
static void on_usr1(int s UNUSED) {
    int e = errno;
    struct record r = record(is_server(), HANDLER, by_handler);
    ssize_t n = send(fd, &r, sizeof r, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n == sizeof r)
        by_handler++;
    else if (n >= 0 || (errno != EAGAIN && errno != EINTR))
        line("the handler: %zd %s", n, n < 0 ? ename(errno) : "");
    errno = e;
}

static void *interrupter(void *p UNUSED) {
    while (!over) {
        pthread_kill(threads[0], SIGUSR1);
        usleep(150);
    }
    return NULL;
}

static int breaks(void) { return getenv("T_BREAKS") ? atoi(getenv("T_BREAKS")) : 0; }

// The number of received records at which break `i` is due.
static uint64_t due(int i) { return (uint64_t)THREADS * RECORDS / (breaks() + 1) * (i + 1); }

static void *breaker(void *p UNUSED) {
    while (broken < breaks()) {
        while (!ended && got < due(broken)) usleep(200);
        if (ended) break;
        if (break_connections() < 0) line("cannot break connections: %s", ename(errno));
        broken++;
    }
    return NULL;
}

static void receive(void) {
    uint32_t next[SENDERS] = {0};
    struct record r;
    ssize_t n;
    while ((n = full_recv(fd, &r, sizeof r)) == sizeof r) {
        if (r.sender >= SENDERS || r.number != next[r.sender]) {
            line("after %" PRIu64 " records: number %u of sender %u", got, r.number, r.sender);
            break;
        }
        if (!verify(r.bytes, (uint64_t)r.number * sizeof r.bytes, sizeof r.bytes, 10 * !is_server() + r.sender)) break;
        next[r.sender]++;
        got++;
        // The reader waits for the breaker, which could fall behind on a busy machine.
        while (is_server() && broken < breaks() && got >= due(broken)) usleep(200);
    }
    ended = 1;
    for (int i = 0; i < THREADS; i++) line("%u records of sender %d", next[i], i);
    line("some of the handler: %d; then %zd", next[HANDLER] > 0, n);
}

static void *all_senders(void *p UNUSED) {
    pthread_t i;
    for (uintptr_t t = 0; t < THREADS; t++) pthread_create(&threads[t], NULL, sender, (void *)t);
    pthread_create(&i, NULL, interrupter, NULL);
    for (int t = 1; t < THREADS; t++) pthread_join(threads[t], NULL);
    // The first sender ends last, so that it is interrupted until then.
    over = 1;
    pthread_join(i, NULL);
    pthread_join(threads[0], NULL);
    shutdown(fd, SHUT_WR);
    return NULL;
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = -1, room = 4 << 20, one = 1;
    fd = pair_up(&l);
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    // Room for all records: without room a call sends only a part, on unbroken connections too.
    MUST(setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room));
    handle(SIGUSR1, on_usr1, SA_RESTART);
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    pthread_t s, b;
    pthread_create(&s, NULL, all_senders, NULL);
    if (is_server()) pthread_create(&b, NULL, breaker, NULL);
    receive();
    pthread_join(s, NULL);
    if (is_server()) pthread_join(b, NULL);
    meet();
    R(close(fd));
    return 0;
}
