/* A session that cannot be opened, for lack of descriptors, threads or memory, leaves nothing behind.
 * usage: scarce descriptors|threads|memory
 */
#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <slim.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIMIT 10000
#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%d: not %s; errno %d, %s\n", __LINE__, #condition, errno,             \
                    slim_error_detail());                                                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static int entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;
    MUST(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int descriptors, tasks;

static void nothing_is_left(void)
{
    MUST(entries("/proc/self/fd") == descriptors);
    MUST(entries("/proc/self/task") == tasks);
}

/* Opens a session. Returns whether that worked. If not, it is for lack of what has this error number. */
static int opens(int lacking)
{
    slim_session *session = NULL;
    int code = slim_session_open(NULL, &session), number = errno;
    if (code == 0) {
        MUST(slim_session_close(session, LIMIT) == 0);
        return 1;
    }
    MUST(code == SLIM_ERR_KERNEL);
    errno = number;
    MUST(errno == lacking);
    MUST(session == NULL);
    MUST(*slim_error_detail());
    return 0;
}

static void few_descriptors(void)
{
    struct rlimit own;
    MUST(getrlimit(RLIMIT_NOFILE, &own) == 0);
    int refused = 0, opened = 0;
    for (rlim_t soft = 0; !opened && soft < 300; soft++) {
        struct rlimit few = {soft, soft + 64 < own.rlim_max ? own.rlim_max : soft};
        MUST(setrlimit(RLIMIT_NOFILE, &few) == 0);
        opened = opens(EMFILE);
        refused += !opened;
        MUST(setrlimit(RLIMIT_NOFILE, &own) == 0);
        nothing_is_left();
    }
    MUST(opened && refused > 2);
}

/* The kernel makes no thread and no process from now on. */
static void no_threads(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone3, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    for (int i = 0; i < 3; i++) {
        MUST(!opens(EAGAIN));
        nothing_is_left();
    }
}

/* Bytes of address space in use. */
static rlim_t address_space(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    MUST(file && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* In children, since memory that libc has got stays. Where the library's own allocation fails, the program is aborted, as documented. */
static void little_memory(void)
{
    int refused = 0, aborted = 0, opened = 0;
    for (rlim_t more = 0; !opened && more < 64 << 20; more += 64 << 10) {
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            struct rlimit little = {address_space() + more, RLIM_INFINITY};
            /* Rust says on standard error which allocation failed. */
            MUST(freopen("/dev/null", "w", stderr));
            MUST(setrlimit(RLIMIT_AS, &little) == 0);
            slim_session *session = NULL;
            int code = slim_session_open(NULL, &session), number = errno;
            little.rlim_cur = RLIM_INFINITY;
            MUST(setrlimit(RLIMIT_AS, &little) == 0);
            if (code == 0)
                _exit(slim_session_close(session, LIMIT) == 0 ? 10 : 1);
            MUST(code == SLIM_ERR_KERNEL);
            MUST(number == EAGAIN || number == ENOMEM);
            nothing_is_left();
            _exit(11);
        }
        int status = 0;
        MUST(waitpid(child, &status, 0) == child);
        if (WIFSIGNALED(status)) {
            MUST(WTERMSIG(status) == SIGABRT);
            aborted++;
        } else {
            MUST(WEXITSTATUS(status) == 10 || WEXITSTATUS(status) == 11);
            opened += WEXITSTATUS(status) == 10;
            refused += WEXITSTATUS(status) == 11;
        }
    }
    printf("%d refused, %d aborted\n", refused, aborted);
    MUST(opened && refused > 0);
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    descriptors = entries("/proc/self/fd");
    tasks = entries("/proc/self/task");
    if (!strcmp(what, "descriptors"))
        few_descriptors();
    else if (!strcmp(what, "threads"))
        no_threads();
    else if (!strcmp(what, "memory"))
        little_memory();
    else
        return 2;
    return 0;
}
