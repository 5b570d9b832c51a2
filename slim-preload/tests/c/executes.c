// A process executes other programs, again and again, and each goes on with the same connection. Two programs; the case is in T_ARGS,
// and whether connections break at all is in T_BREAKS. The client executes, or the server if the case begins with "s-".
#include "t.h"
#include <sys/mman.h>
#include <sys/syscall.h>

extern char **environ;
enum { CHUNK = 20000, STEPS = 12 };
static char buf[CHUNK];
static const char *kase, *self, *other;
static int fd, l = -1, step;
static volatile int over;

static int is(const char *k) { return !strcmp(kase, k); }
static int refused(void) { return !strncmp(kase, "refused", 7); }
static int breaks(void) { return atoi(getenv("T_BREAKS")); }

// Chunk number `n` of the bytes that the executing end receives (seed 1) or sends (seed 2).
static void get_chunk(int f, int n, uint64_t seed) {
    ssize_t r = full_recv(f, buf, CHUNK);
    if (r != CHUNK)
        line("chunk %d: received %zd %s", n, r, ename(errno));
    else
        verify(buf, (uint64_t)n * CHUNK, CHUNK, seed);
}

static void put_chunk(int f, int n, uint64_t seed) {
    fill(buf, (uint64_t)n * CHUNK, CHUNK, seed);
    if (full_send(f, buf, CHUNK)) line("chunk %d: send: %s", n, ename(errno));
}

// ---- the other end ----

static void *break_often(void *none UNUSED) {
    unsigned seed = getpid();
    while (!over) {
        ms(3 + rand_r(&seed) % 12);
        break_if_wanted();
    }
    return NULL;
}

static void *put_all(void *chunks) {
    static char b[CHUNK];
    for (long n = 0; n < (long)chunks; n++) {
        fill(b, (uint64_t)n * CHUNK, CHUNK, 1);
        if (full_send(fd, b, CHUNK)) line("send: %s", ename(errno));
    }
    return NULL;
}

static void serve(int chunks) {
    pthread_t breaker, sender;
    if (is("chain")) pthread_create(&breaker, NULL, break_often, NULL);
    pthread_create(&sender, NULL, put_all, (void *)(long)chunks);
    for (int n = 0; n < chunks; n++) {
        // Slowly, so that bytes of the other end wait when it executes a program.
        if (is("chain") || is("before")) ms(4);
        get_chunk(fd, n, 2);
    }
    pthread_join(sender, NULL);
    over = 1;
    if (is("chain")) pthread_join(breaker, NULL);
    // The other end may break the connection, and then ends the stream.
    line("%zd %s", recv(fd, buf, CHUNK, 0), "at the end");
    meet();
    close(fd);
}

// ---- threads that read and send when their program executes another ----

// An exec may end a thread in the middle of a call. Then one number may be sent or read in part or not at all, also without SLIM. So the
// first byte of a number has its highest bit set, and the others have not: who reads finds the next number. More may not be lost, and
// nothing may be repeated.
enum { NUMBER = 8, EXECS = 60 };
static const uint64_t LAST = (1ull << 56) - 1;

// What the threads of all programs have done.
struct moved {
    volatile uint64_t received, sent, repeated, lost;
};
static struct moved *moved;

static void put_number(uint64_t n) {
    unsigned char b[NUMBER];
    for (int i = 0; i < NUMBER; i++) b[i] = (n >> (7 * i) & 0x7f) | (i ? 0 : 0x80);
    if (full_send(fd, b, sizeof b)) line("send: %s", ename(errno)), _exit(91);
}

// Whether a number has come, before the other end closes. Bytes before it that are no whole number are passed over.
static int get_number(uint64_t *n) {
    unsigned char b[NUMBER];
    size_t have = 0;
    for (;;) {
        ssize_t r = full_recv(fd, b + have, sizeof b - have);
        // How a connection ends that breaks at its end is the matter of other tests.
        if (r == 0 || over) return 0;
        if (r != (ssize_t)(sizeof b - have)) line("received %zd %s", r, ename(errno)), _exit(91);
        int first = NUMBER - 1;
        while (first >= 0 && !(b[first] & 0x80)) first--;
        if (first == 0) break;
        have = first < 0 ? 0 : sizeof b - first;
        if (have) memmove(b, b + first, have);
    }
    *n = 0;
    for (int i = 0; i < NUMBER; i++) *n |= (uint64_t)(b[i] & 0x7f) << (7 * i);
    return 1;
}

static void report(uint64_t next, uint64_t repeated, uint64_t lost) {
    if (lost > (refused() ? 0 : EXECS)) line("%" PRIu64 " numbers lost", lost);
    line("%s numbers, %" PRIu64 " repeated", next > 100 ? "many" : "few", repeated);
}

// The other end sends the numbers from 0 on, until the last one has come: faster than they are read if there is to be a backlog.
static void *put_numbers(void *none UNUSED) {
    for (uint64_t n = 0; !over; n++) {
        put_number(n);
        if (n % 8 == 0 && is("moving")) ms(1);
    }
    return NULL;
}

static void serve_numbers(void) {
    pthread_t breaker, sender;
    pthread_create(&breaker, NULL, break_often, NULL);
    pthread_create(&sender, NULL, put_numbers, NULL);
    uint64_t next = 0, n, repeated = 0, lost = 0;
    while (get_number(&n) && n != LAST) {
        repeated += n < next;
        lost += n > next ? n - next : 0;
        next = n + 1;
    }
    over = 1;
    pthread_join(breaker, NULL);
    pthread_join(sender, NULL);
    report(next, repeated, lost);
    meet();
}

static void *get_numbers(void *none UNUSED) {
    uint64_t n;
    while (get_number(&n)) {
        moved->repeated += n < moved->received;
        moved->lost += n > moved->received ? n - moved->received : 0;
        moved->received = n + 1;
    }
    return NULL;
}

static void *put_more_numbers(void *none UNUSED) {
    while (!over) {
        uint64_t n = __atomic_fetch_add(&moved->sent, 1, __ATOMIC_RELAXED);
        put_number(n);
        if (n % 16 == 0 && !refused()) ms(1);
    }
    return NULL;
}

static void go(const char *path, char **env, int how);

static void share_moved(void) {
    if (!step) MUST(dup2(MUST(memfd_create("moved", 0)), 80));
    MUST(ftruncate(80, sizeof *moved));
    moved = mmap(NULL, sizeof *moved, PROT_READ | PROT_WRITE, MAP_SHARED, 80, 0);
}

// A handler interrupts the executing thread, and sends, or in the end shuts the connection down. That may cost the connection.
static void in_exec(int s UNUSED) {
    int e = errno;
    if (step + 1 < EXECS / 2)
        put_number(moved->sent++);
    else
        shutdown(fd, SHUT_WR);
    errno = e;
}

static void execute_while_interrupted(void) {
    share_moved();
    sigset_t often;
    sigemptyset(&often);
    sigaddset(&often, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &often, NULL);
    pthread_t t;
    MUST(-pthread_create(&t, NULL, get_numbers, NULL));
    if (step < EXECS / 2) {
        handle(SIGUSR1, in_exec, SA_RESTART);
        // The kernel deletes this timer at the exec, with its signals.
        timer_t timer;
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        struct itimerspec times = {{0, 300000}, {0, 300000}};
        MUST(timer_create(CLOCK_MONOTONIC, &event, &timer));
        MUST(timer_settime(timer, 0, &times, NULL));
        pthread_sigmask(SIG_UNBLOCK, &often, NULL);
        ms(step % 12);
        go(self, NULL, 0);
        line("exec: %s", ename(errno));
    }
    shutdown(fd, SHUT_WR);
    meet();
    over = 1;
    report(moved->received, moved->repeated, moved->lost);
}

// Executes a program that loads SLIM, too, with an argument that is too long.
static void fail_to_execute(void) {
    static char huge[300000];
    memset(huge, 'x', sizeof huge - 1);
    char *args[] = {"x", huge, NULL};
    execve(self, args, environ);
}

static void *execute_in_vain(void *none UNUSED) {
    while (!over) fail_to_execute();
    return NULL;
}

// Wherever the signal has interrupted the exec. Not each time: the next signal would always come when the handler has returned.
static void execute_in_handler(int s UNUSED) {
    static int calls;
    int e = errno;
    if (++calls % 20 == 0) fail_to_execute();
    errno = e;
}

static void *interrupt(void *threads) {
    while (!over) {
        pthread_kill(*(pthread_t *)threads, SIGUSR1);
        usleep(300);
    }
    return NULL;
}

// Opens and closes a number of the connection that is lower than its other one.
static void *duplicate(void *none UNUSED) {
    while (!over) close(MUST(dup(fd)));
    return NULL;
}

// Several threads execute in vain, beside traffic both ways.
static void execute_while_refused(void) {
    static struct moved here;
    enum { THREADS = 6 };
    int threads = is("refused") ? THREADS : 2;
    pthread_t receiver, sender, beside, t[THREADS];
    moved = &here;
    if (is("refused-duplicates")) {
        int high = MUST(fcntl(fd, F_DUPFD, 100));
        close(fd);
        fd = high;
    }
    sigset_t often;
    sigemptyset(&often);
    sigaddset(&often, SIGUSR1);
    handle(SIGUSR1, execute_in_handler, SA_RESTART);
    for (int i = 0; i < threads; i++) MUST(-pthread_create(&t[i], NULL, execute_in_vain, NULL));
    pthread_sigmask(SIG_BLOCK, &often, NULL);
    MUST(-pthread_create(&receiver, NULL, get_numbers, NULL));
    MUST(-pthread_create(&sender, NULL, put_more_numbers, NULL));
    if (is("refused-handlers")) MUST(-pthread_create(&beside, NULL, interrupt, t));
    if (is("refused-duplicates")) MUST(-pthread_create(&beside, NULL, duplicate, NULL));
    ms(3000);
    over = 1;
    if (!is("refused")) pthread_join(beside, NULL);
    for (int i = 0; i < threads; i++) pthread_join(t[i], NULL);
    pthread_join(sender, NULL);
    put_number(LAST);
    meet();
    report(moved->received, moved->repeated, moved->lost);
}

static void execute_while_moving(void) {
    int times = is("backlog") ? EXECS / 2 : EXECS;
    share_moved();
    pthread_t t;
    MUST(-pthread_create(&t, NULL, get_numbers, NULL));
    if (step < times) {
        MUST(-pthread_create(&t, NULL, put_more_numbers, NULL));
        ms(step % 12);
        go(self, NULL, 0);
        line("exec: %s", ename(errno));
    }
    put_number(LAST);
    meet();
    over = 1;
    report(moved->received, moved->repeated, moved->lost);
}

// ---- the end that executes ----

static void exchange(void) {
    get_chunk(fd, step, 1);
    put_chunk(fd, step, 2);
}

static char **without(const char *name) {
    static char *env[1000];
    int n = 0;
    for (char **e = environ; *e && n < 990; e++)
        if (strncmp(*e, name, strlen(name))) env[n++] = *e;
    env[n] = NULL;
    return env;
}

// Executes a program that goes on with the next step. Returns if that fails.
static void go(const char *path, char **env, int how) {
    char number[3][12];
    sprintf(number[0], "%d", step + 1);
    sprintf(number[1], "%d", fd);
    char role[2] = {t_role, 0};
    char *args[] = {(char *)self, role, number[0], number[1], (char *)other, NULL};
    char *name = strrchr(path, '/') + 1;
    char dir[PATH_MAX] = "";
    memcpy(dir, path, name - path);
    fcntl(t_sync, F_SETFD, 0);
    int at;
    switch (how) {
    case 0: execv(path, args); break;
    case 1: execve(path, args, env); break;
    case 2:
        setenv("PATH", dir, 1);
        execvp(name, args);
        break;
    case 3:
        setenv("PATH", "/nowhere:/etc", 1);
        execvpe(path, args, env);
        break;
    case 4: fexecve(open(path, O_RDONLY | O_CLOEXEC), args, env); break;
    case 5:
        at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        execveat(at, name, args, env, 0);
        break;
    case 6: syscall(SYS_execve, path, args, env); break;
    case 7: syscall(SYS_execveat, AT_FDCWD, path, args, env, 0); break;
    case 8: execl(path, args[0], args[1], args[2], args[3], args[4], NULL); break;
    case 9:
        setenv("PATH", dir, 1);
        execlp(name, args[0], args[1], args[2], args[3], args[4], NULL);
        break;
    case 10: execle(path, args[0], args[1], args[2], args[3], args[4], NULL, env); break;
    }
}

static void ended(pid_t p, const char *what) {
    int st = -1;
    MUST(waitpid(p, &st, 0));
    line("%s: exit %d", what, WEXITSTATUS(st));
}

static void failures(void) {
    char *args[] = {"x", NULL}, *huge[] = {"x", calloc(1, 300000), NULL};
    memset(huge[1], 'x', 299999);
    R(execv("/none", args));
    break_if_wanted();
    R(execvp("slim-none", args));
    R(execv("/etc/passwd", args));
    R(execv("/", args));
    R(execve(self, huge, environ));
    break_if_wanted();
    R(execvp(self, huge));
    R(execve((char *)8, args, environ));
    R(execve(self, (char **)8, environ));
    R(execve(self, args, (char **)8));
    R(fexecve(-1, args, environ));
    free(huge[1]);
}

static void children(void) {
    char *args[] = {"true", NULL};
    pid_t p = fork();
    if (!p) execv("/bin/true", args), _exit(9);
    ended(p, "fork");
    p = vfork();
    if (!p) execv("/bin/true", args), _exit(9);
    ended(p, "vfork");
    MUST(posix_spawn(&p, "/bin/true", NULL, NULL, args, environ) ? -1 : 0);
    ended(p, "spawn");
    line("system %d", system("true"));
}

static void *read_for_ever(void *none UNUSED) {
    char b;
    recv(fd, &b, 1, MSG_PEEK);
    pause();
    return NULL;
}

// Numbers that the application has not opened: none may be left in a program without SLIM.
static void strangers(void) {
    int n = 0;
    for (int i = fd + 1; i < 70000; i++) n += i != t_sync && fcntl(i, F_GETFD) >= 0;
    line("%d strange descriptors", n);
}

static void execute(void) {
    if (is("moving") || is("backlog")) return execute_while_moving();
    if (refused()) return execute_while_refused();
    if (is("interrupted")) return execute_while_interrupted();
    int last = is("chain") || is("before") || is("after") ? STEPS : is("names") ? 11 : 2;
    if (step) line("step %d", step);
    if (step && (is("after") || is("names") || is("children") || is("two"))) break_if_wanted();
    if (step == 1 && (!strncmp(kase, "static", 6) || is("without"))) strangers();
    if (step == 1 && is("two")) {
        line("close on exec %d", fcntl(71, F_GETFD));
        close(fd);
        fd = 70;
    }
    exchange();
    if (step == last) {
        if (is("two")) break_if_wanted();
        R(close(fd));
        meet();
        return;
    }
    if (is("failures")) failures();
    if (is("children") && !step) children();
    if (is("child-keeps") && !step) {
        pid_t p = fork();
        if (!p) ms(300), _exit(0);
    }
    if (is("threads")) {
        pthread_t t;
        pthread_create(&t, NULL, read_for_ever, NULL);
        ms(20);
    }
    if (is("two") && !step) {
        MUST(dup2(fd, 70));
        MUST(fcntl(fd, F_DUPFD_CLOEXEC, 71));
    }
    if (is("before")) break_if_wanted();
    if (is("without") && !step)
        go(self, without("LD_PRELOAD="), 1);
    else if (is("off") && !step) {
        putenv("SLIM=off");
        go(self, NULL, 0);
    } else if (!strncmp(kase, "static", 6))
        go(other, NULL, 0);
    else if (is("names"))
        go(self, environ, step);
    else
        go(self, NULL, 0);
    line("exec: %s", ename(errno));
}

int main(int argc, char **argv) {
    self = argv[0];
    begin_pair(argc, argv, 60);
    kase = getenv("T_ARGS");
    int executes = is_server() == !strncmp(kase, "s-", 2);
    if (!strncmp(kase, "s-", 2)) kase += 2;
    other = strchr(kase, '/') ? strchr(kase, '/') : self;
    if (argc > 3) {
        step = atoi(argv[2]);
        fd = atoi(argv[3]);
        execute();
        return 0;
    }
    fd = pair_up(&l);
    if (l >= 0) close(l);
    if (executes)
        execute();
    else if (is("moving") || is("backlog") || refused() || is("interrupted"))
        serve_numbers();
    else
        serve(1 + (is("chain") || is("before") || is("after") ? STEPS : is("names") ? 11 : 2));
    (void)breaks;
    return 0;
}
