// A process leaves a file for the next program as the library does when it hands connections over, and executes itself. The file is
// damaged, of another version, or another process's; the first argument says which. The library's version is the second argument.
#include "t.h"

// FORMAT is the one in slim-preload/src/exec.rs.
enum { LIMIT = 1024, NUMBER = 768 - 4, FORMAT = 2 };

static void put(int f, const void *p, size_t n) { MUST(write(f, p, n)); }

static void number(int f, uint64_t n, size_t size) { put(f, &n, size); }

int main(int argc, char **argv) {
    begin(20);
    if (argc == 4) {
        // The program after the exec.
        R(fcntl(NUMBER, F_GETFD));
        line("the socket: %d", fcntl(atoi(argv[3]), F_GETFD));
        struct conn x = connection();
        ping(x.c, x.s, "a connection");
        hang_up(x);
        return 0;
    }
    struct rlimit r = {LIMIT, LIMIT};
    MUST(setrlimit(RLIMIT_NOFILE, &r));
    int f = MUST(memfd_create("left", MFD_ALLOW_SEALING)), u = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    const char *kind = argv[1], *version = argv[2];
    struct stat about;
    MUST(fstat(u, &about));
    put(f, "SLIM hands over\n", 16);
    if (!strcmp(kind, "damaged")) {
        number(f, UINT64_MAX / 3, 8);
        put(f, kind, strlen(kind));
    } else {
        // The descriptors that were kept: number and identity of each.
        number(f, 1, 8);
        number(f, u, 4);
        number(f, (uint64_t)about.st_dev << 32 | (uint32_t)about.st_ino, 8);
        number(f, strcmp(kind, "format") ? FORMAT : 99, 4);
        number(f, strlen(version), 8);
        put(f, version, strlen(version));
        number(f, strcmp(kind, "child") ? getpid() : 1, 4);
        number(f, 0, 4);
    }
    MUST(fcntl(f, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE));
    MUST(dup2(f, NUMBER));
    close(f);
    char socket[12];
    sprintf(socket, "%d", u);
    execl(argv[0], argv[0], kind, version, socket, NULL);
    return 99;
}
