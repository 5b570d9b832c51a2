// What a program can ask SLIM by slim_table(). It links nothing of SLIM. The case is the first word of T_ARGS, or the argument.
#include "t.h"
#include "raw.h"
#include <dlfcn.h>
#include <slim_table.h>
#include <stddef.h>

#define CHECK(holds)                                                                                               \
    do {                                                                                                           \
        if (!(holds)) {                                                                                            \
            line("line %d: %s (%s)", __LINE__, #holds, ename(errno));                                              \
            _exit(1);                                                                                              \
        }                                                                                                          \
    } while (0)

enum { ROOM = 256 };
static const slim_table_calls *table;

static const slim_table_calls *find(void) {
    const slim_table_calls *(*get)(void);
    *(void **)&get = dlsym(RTLD_DEFAULT, "slim_table");
    return get ? get() : NULL;
}

// The flow with this local port; returns how many there are.
static int flow_at(int port, slim_table_flow *to) {
    slim_table_flow all[ROOM];
    char end[16];
    int n = table->flows(all, ROOM, sizeof *all), found = 0;
    CHECK(n >= 0 && n <= ROOM);
    snprintf(end, sizeof end, ":%d", port);
    for (int i = 0; i < n; i++) {
        size_t len = strlen(all[i].sock);
        CHECK(len < sizeof all[i].sock && len > strlen(end));
        if (strcmp(all[i].sock + len - strlen(end), end)) continue;
        *to = all[i];
        found++;
    }
    return found;
}

// Waits until the flow is in this state.
static slim_table_flow awaited(int port, unsigned state) {
    slim_table_flow flow = {0};
    for (int i = 0; i < 10000; i++) {
        if (flow_at(port, &flow) == 1 && flow.state == state) return flow;
        ms(1);
    }
    line("flow %s is in state %u, not %u", flow.sock, flow.state, state);
    _exit(1);
}

static slim_table_peer only_peer(void) {
    slim_table_peer peers[2];
    CHECK(table->peers(peers, 2, sizeof *peers) == 1);
    return peers[0];
}

static int flows(void) { return table->flows(NULL, 0, sizeof(slim_table_flow)); }

// Reads a descriptor of the table empty.
static void read_empty(int news) {
    char b[100];
    while (read(news, b, sizeof b) > 0) {}
    CHECK(errno == EAGAIN);
}

// Stops a process, and waits until each of its threads has stopped.
static void stop(pid_t pid) {
    MUST(kill(pid, SIGSTOP));
    for (int running = 1; running; ms(1)) {
        char path[600];
        snprintf(path, sizeof path, "/proc/%d/task", pid);
        DIR *tasks = opendir(path);
        CHECK(tasks);
        running = 0;
        for (struct dirent *task; (task = readdir(tasks));) {
            if (*task->d_name == '.') continue;
            snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, task->d_name);
            FILE *f = fopen(path, "r");
            char state = 0;
            if (!f || fscanf(f, "%*d (%*[^)]) %c", &state) != 1 || state != 'T') running = 1;
            if (f) fclose(f);
        }
        closedir(tasks);
    }
}

// A peer that stops, goes on, and is killed with bytes unread.
static void watch(void) {
    int l = -1, fd = pair_up(&l), port = port_of(fd);
    if (is_server()) {
        char b[4];
        tell(getpid());
        CHECK(full_recv(fd, b, 4) == 4);
        CHECK(!full_send(fd, "pong", 4));
        for (;;) pause();
    }
    pid_t server = hear();
    char name[40];
    slim_table_flow before = awaited(port, SLIM_TABLE_FLOW_ACTIVE), now;
    CHECK(table->state() == SLIM_TABLE_ON);
    CHECK(before.epoch == 0 && before.resumes == 0 && !before.closed && !*before.reason);
    CHECK(strlen(before.flow) == 32 && !strncmp(before.peer, "127.0.0.1:", 10));
    slim_table_peer peer = only_peer();
    CHECK(peer.pid == (unsigned)server && peer.flows == 1 && peer.suspended == 0 && peer.state == SLIM_TABLE_PEER_REACHABLE);
    CHECK(!strcmp(peer.process, before.process) && !strncmp(peer.host, peer.process, 8) && peer.locator_count > 0);
    strcpy(name, before.flow);

    int count = flows(), news = table->descriptor(), e = MUST(epoll_create1(0));
    CHECK(news >= 0 && flows() == count);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = news};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, news, &ev));

    stop(server);
    CHECK(break_connections() >= 1);
    CHECK(send(fd, "ping", 4, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    now = awaited(port, SLIM_TABLE_FLOW_SUSPENDED);
    CHECK(!strcmp(now.flow, name) && now.resumes == 0);
    peer = only_peer();
    CHECK(peer.flows == 1 && peer.suspended == 1 && peer.state == SLIM_TABLE_PEER_SUSPENDED);
    MUST(kill(server, SIGCONT));
    now = awaited(port, SLIM_TABLE_FLOW_ACTIVE);
    CHECK(!strcmp(now.flow, name) && now.resumes == 1 && now.epoch >= 1);
    CHECK(only_peer().state == SLIM_TABLE_PEER_REACHABLE);
    char b[4];
    CHECK(!full_send(fd, "ping", 4) && full_recv(fd, b, 4) == 4 && !memcmp(b, "pong", 4));
    CHECK(table->escalations(NULL, 0, sizeof(slim_table_escalation)) == 0 && epoll_wait(e, &ev, 1, 0) == 0);

    CHECK(!full_send(fd, "not read", 8));
    acked(fd);
    MUST(kill(server, SIGKILL));
    CHECK(recv(fd, b, 4, 0) == -1 && errno == ECONNRESET);
    // The descriptor is readable before the program sees the error.
    CHECK(epoll_wait(e, &ev, 1, 0) == 1 && ev.data.fd == news && wait_for(news, POLLIN, 0) == POLLIN);
    slim_table_escalation last[2];
    CHECK(table->escalations(last, 2, sizeof *last) == 1);
    CHECK(last->seq == 1 && last->evidence == SLIM_TABLE_EVIDENCE_PROCESS_GONE && last->error == ECONNRESET);
    CHECK(last->pid == (unsigned)server && !strcmp(last->flow, name) && !strcmp(last->process, before.process));
    CHECK(!strcmp(last->reason, "peer_gone") && !strcmp(last->cause, "ECONNRESET") && !strcmp(last->sock, before.sock));
    CHECK(last->time_ns / 1000000000 - time(NULL) + 60 < 120);
    read_empty(news);
    CHECK(epoll_wait(e, &ev, 1, 0) == 0);
    now = awaited(port, SLIM_TABLE_FLOW_ENDED);
    CHECK(!strcmp(now.reason, "peer_gone") && now.resumes == 1);
    peer = only_peer();
    CHECK(peer.state == SLIM_TABLE_PEER_LOST && peer.flows == 0 && peer.evidence == SLIM_TABLE_EVIDENCE_PROCESS_GONE);
    close(news);
    line("done");
}

// A peer that stands still until the attempts are used up: its host answers.
static void stopped(void) {
    int l = -1, fd = pair_up(&l), port = port_of(fd);
    if (is_server()) {
        tell(getpid());
        for (;;) pause();
    }
    pid_t server = hear();
    awaited(port, SLIM_TABLE_FLOW_ACTIVE);
    int news = table->descriptor();
    stop(server);
    CHECK(break_connections() >= 1);
    char b[4];
    CHECK(recv(fd, b, 4, 0) == -1);
    int error = errno;
    CHECK(wait_for(news, POLLIN, 0) == POLLIN);
    slim_table_escalation last;
    CHECK(table->escalations(&last, 1, sizeof last) == 1);
    CHECK(last.evidence == SLIM_TABLE_EVIDENCE_PATH_LOST && last.attempts == 2 && last.error == error);
    CHECK(!strcmp(last.reason, "attempts") && only_peer().state == SLIM_TABLE_PEER_LOST);
    MUST(kill(server, SIGKILL));
    line("done");
}

// A peer without SLIM.
static void alone(void) {
    int l = -1, fd = pair_up(&l), port = port_of(fd);
    if (table) {
        slim_table_flow flow = awaited(port, SLIM_TABLE_FLOW_LEGACY);
        CHECK(*flow.reason && !*flow.process);
        CHECK(table->peers(NULL, 0, sizeof(slim_table_peer)) == 0);
        line("legacy");
    } else {
        line("no table");
    }
    meet();
}

// Wrong arguments, and structures of other versions.
static void wrong(void) {
    struct conn x = connection();
    awaited(port_of(x.c), SLIM_TABLE_FLOW_ACTIVE);
    awaited(port_of(x.s), SLIM_TABLE_FLOW_ACTIVE);
    slim_table_flow all[3];
    CHECK(table->version == SLIM_TABLE_VERSION && table->size >= sizeof *table);
    CHECK(table->flows(NULL, 1, sizeof *all) == -EINVAL && table->flows(all, 3, 0) == -EINVAL);
    CHECK(table->flows(NULL, 0, 0) == -EINVAL && table->flows(all, SIZE_MAX, sizeof *all) == -EINVAL);
    CHECK(table->flows(all, SIZE_MAX / sizeof *all, sizeof *all) == -EINVAL);
    CHECK(table->peers(NULL, 1, sizeof(slim_table_peer)) == -EINVAL && table->peers(NULL, 0, 0) == -EINVAL);
    CHECK(table->escalations(NULL, 7, 8) == -EINVAL && table->escalations(NULL, 0, SIZE_MAX) == 0);
    CHECK(table->flows(NULL, 0, sizeof *all) == 2);
    // More room than there is memory, but not more than is used.
    CHECK(table->flows(all, PTRDIFF_MAX / sizeof *all, sizeof *all) == 2);

    // The array is too small.
    memset(all, 0x55, sizeof all);
    CHECK(table->flows(all, 1, sizeof *all) == 2);
    CHECK(all[0].state == SLIM_TABLE_FLOW_ACTIVE && all[1].state == 0x55555555);
    // A program for an older version.
    struct older {
        char part[offsetof(slim_table_flow, epoch)];
    } old[3];
    memset(old, 0x55, sizeof old);
    CHECK(table->flows((void *)old, 3, sizeof *old) == 2);
    for (int i = 0; i < 2; i++) CHECK(!strncmp(old[i].part + offsetof(slim_table_flow, sock), "127.0.0.1:", 10));
    for (size_t i = 0; i < sizeof *old; i++) CHECK(old[2].part[i] == 0x55);
    // A program for a later version.
    struct later {
        slim_table_flow known;
        uint64_t unknown[3];
    } late[3];
    memset(late, 0x55, sizeof late);
    CHECK(table->flows((void *)late, 3, sizeof *late) == 2);
    for (int i = 0; i < 2; i++) CHECK(late[i].known.state == SLIM_TABLE_FLOW_ACTIVE && !late[i].unknown[0] && !late[i].unknown[2]);
    CHECK(late[2].unknown[0] == 0x5555555555555555);
    // Memory without any alignment.
    static char odd[3 * sizeof(slim_table_flow) + 1];
    CHECK(table->flows((void *)(odd + 1), 3, sizeof *all) == 2 && !strncmp(odd + 1 + 40, "127.0.0.1:", 10));
    // errno is the program's.
    errno = 77;
    CHECK(table->flows(NULL, 1, 0) == -EINVAL && flows() == 2 && table->state() == SLIM_TABLE_ON && errno == 77);
    // Descriptors are limited in number, and given back.
    int news[100], n = 0;
    for (int round = 0; round < 3; round++) {
        for (n = 0; n < 100 && (news[n] = table->descriptor()) >= 0; n++) {}
        CHECK(n == 64 && news[n] == -EMFILE);
        while (n > 0) close(news[--n]);
    }
    hang_up(x);
    line("done");
}

// Ends a flow by a reset: its peer closes with bytes unread.
static void escalate(void) {
    struct conn x = connection();
    char b[4];
    awaited(port_of(x.c), SLIM_TABLE_FLOW_ACTIVE);
    awaited(port_of(x.s), SLIM_TABLE_FLOW_ACTIVE);
    MUST(full_send(x.c, "not read", 8));
    arrived(x.s, 8);
    close(x.s);
    CHECK(recv(x.c, b, 4, 0) == -1 && errno == ECONNRESET);
    close(x.c);
    close(x.l);
}

static int is_unix(int fd) {
    int domain = 0;
    socklen_t len = sizeof domain;
    return raw(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) == 0 && domain == AF_UNIX;
}

// Makes a descriptor. Returns the number of SLIM's end: a new Unix socket far above the program's numbers. SLIM's own
// sockets of the connections before must be closed by then, because their numbers are used again.
static int ours_of(int *news) {
    static char before[65536];
    ms(300);
    for (int fd = 100; fd < 65536; fd++) before[fd] = is_unix(fd);
    *news = table->descriptor();
    CHECK(*news >= 0 && *news < 100);
    for (int fd = 100; fd < 65536; fd++)
        if (!before[fd] && is_unix(fd)) return fd;
    return -1;
}

// A program closes SLIM's end of a descriptor where no hook sees it, and has a file of its own under the number.
static void taken(void) {
    escalate();
    int own[2], news, ours = ours_of(&news);
    CHECK(ours >= 0);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, own));
    CHECK(raw(SYS_close, ours) == 0 && raw(SYS_dup3, own[0], ours, 0) == ours);
    escalate();
    CHECK(table->escalations(NULL, 0, sizeof(slim_table_escalation)) == 2);
    char b[8];
    CHECK(recv(own[1], b, sizeof b, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    CHECK(close(own[0]) == 0 && close(news) == 0 && table->descriptor() >= 0);
    // The number is the program's.
    CHECK(write(ours, "own", 3) == 3 && read(own[1], b, 3) == 3);
    line("done");
}

static void off(void) {
    struct conn x = connection();
    slim_table_flow flow;
    CHECK(table->state() == SLIM_TABLE_OFF && table->flows(&flow, 1, sizeof flow) == 0);
    CHECK(table->peers(NULL, 0, sizeof(slim_table_peer)) == 0 && table->escalations(NULL, 0, 8) == 0);
    int news = table->descriptor();
    CHECK(news >= 0 && wait_for(news, POLLIN, 0) == 0 && close(news) == 0);
    hang_up(x);
    line("done");
}

// A forked child has a table of its own.
static void forks(void) {
    CHECK(table->state() == SLIM_TABLE_OFF);
    struct conn x = connection();
    awaited(port_of(x.c), SLIM_TABLE_FLOW_ACTIVE);
    int news = table->descriptor();
    CHECK(news >= 0);
    pid_t child = fork();
    if (!child) {
        CHECK(table->state() == SLIM_TABLE_OFF && flows() == 0);
        CHECK(table->peers(NULL, 0, sizeof(slim_table_peer)) == 0);
        struct conn y = connection();
        awaited(port_of(y.c), SLIM_TABLE_FLOW_ACTIVE);
        CHECK(table->state() == SLIM_TABLE_ON && table->descriptor() >= 0);
        hang_up(y);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0 && table->state() == SLIM_TABLE_ON && flows() >= 2);
    hang_up(x);
    line("done");
}

// ---- many threads ask while flows break and end, descriptors are closed, and the process forks ----

static volatile int over;
static unsigned long asked, late;

static void *asks(void *seed) {
    unsigned r = (unsigned)(uintptr_t)seed;
    int news[8], n = 0;
    while (!over) {
        slim_table_flow all[ROOM];
        slim_table_peer peers[4];
        slim_table_escalation last[70];
        int f = table->flows(all, rand_r(&r) % ROOM, sizeof *all), p = table->peers(peers, 4, sizeof *peers),
            e = table->escalations(last, 70, sizeof *last);
        CHECK((f >= 0 || f == -ETIMEDOUT) && (p >= 0 || p == -ETIMEDOUT) && e >= 0 && e <= 64);
        for (int i = 1; i < e; i++) CHECK(last[i].seq == last[i - 1].seq - 1);
        __atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED);
        if (f < 0 || p < 0) __atomic_add_fetch(&late, 1, __ATOMIC_RELAXED);
        if (n < 8 && (news[n] = table->descriptor()) >= 0) n++;
        if (n && rand_r(&r) % 2) close(news[--n]);
        if (n) {
            char b[8];
            CHECK(read(news[0], b, sizeof b) != 0);
        }
    }
    while (n) close(news[--n]);
    return NULL;
}

static void *talks(void *seed) {
    unsigned r = (unsigned)(uintptr_t)seed;
    while (!over) {
        struct conn x = connection();
        char b[4];
        for (int i = rand_r(&r) % 40; i > 0 && !over; i--) {
            if (full_send(x.c, "ping", 4) || full_recv(x.s, b, 4) != 4) break;
        }
        if (rand_r(&r) % 2) {
            struct linger hard = {1, 0};
            setsockopt(x.s, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        }
        close(x.s);
        recv(x.c, b, 4, 0);
        close(x.c);
        close(x.l);
    }
    return NULL;
}

static void storm(void) {
    const char *s = getenv("T_SECONDS");
    double end = now_s() + (s ? atoi(s) : 3);
    pthread_t threads[10];
    for (uintptr_t i = 0; i < 10; i++) CHECK(!pthread_create(&threads[i], NULL, i < 6 ? asks : talks, (void *)(i + 1)));
    for (int round = 0; now_s() < end; round++) {
        break_connections();
        pid_t child = fork();
        if (!child) {
            CHECK(table->state() == SLIM_TABLE_OFF && flows() == 0 && table->escalations(NULL, 0, 8) == 0);
            CHECK(table->descriptor() >= 0);
            _exit(0);
        }
        CHECK(child > 0);
        int status;
        MUST(waitpid(child, &status, 0));
        CHECK(status == 0);
        ms(5);
    }
    over = 1;
    for (int i = 0; i < 10; i++) pthread_join(threads[i], NULL);
    fprintf(stderr, "asked %lu times, %lu without an answer, %d escalations\n", asked, late,
            table->escalations(NULL, 0, sizeof(slim_table_escalation)));
    line("done");
}

int main(int argc, char **argv) {
    const char *words = getenv("T_ARGS"), *what = words ? words : argv[1];
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"watch", watch}, {"stopped", stopped}, {"alone", alone}, {"wrong", wrong}, {"off", off}, {"fork", forks}, {"taken", taken}, {"storm", storm}};
    if (words)
        begin_pair(argc, argv, 60);
    else
        begin(60);
    table = find();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, what)) return cases[i].run(), 0;
    return 99;
}
