// A forked child has the descriptors that its parent has opened and no others, whatever the library does at that moment.
#include "t.h"
#include "raw.h"

enum { ROUNDS = 60, PAIRS = 16, FORKS = 12, NUMBERS = 1 << 16 };

static char expected[NUMBERS], open_now[NUMBERS];

// Finds the open numbers, by calls that no hook sees. Returns the number of the directory that it opens for that.
static int look(void) {
    static char b[1 << 15] __attribute__((aligned(8)));
    int dir = MUST(raw(SYS_open, "/proc/self/fd", O_RDONLY | O_DIRECTORY));
    memset(open_now, 0, sizeof open_now);
    for (long n; (n = raw(SYS_getdents64, dir, b, sizeof b)) > 0;)
        for (long at = 0; at < n;) {
            const struct dirent64 *d = (void *)(b + at);
            int fd = atoi(d->d_name);
            if (d->d_name[0] != '.' && fd != dir && fd < NUMBERS) open_now[fd] = 1;
            at += d->d_reclen;
        }
    raw(SYS_close, dir);
    return dir;
}

static int differs(void) {
    int given = look(), lowest = 0;
    while (expected[lowest]) lowest++;
    return given != lowest || memcmp(open_now, expected, NUMBERS);
}

int main(void) {
    begin(60);
    look();
    memcpy(expected, open_now, NUMBERS);
    int l = listener(), bad = 0, c[PAIRS], s[PAIRS];
    expected[l] = 1;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < PAIRS; i++) {
            c[i] = dial(port_of(l));
            s[i] = MUST(accept(l, NULL, NULL));
            expected[c[i]] = 1;
        }
        await_negotiation();
        // Resets make the library busy: it opens and closes descriptors of its own.
        struct linger none = {1, 0};
        for (int i = 0; i < PAIRS; i++) {
            MUST(setsockopt(s[i], SOL_SOCKET, SO_LINGER, &none, sizeof none));
            MUST(fcntl(c[i], F_SETFL, O_NONBLOCK));
            MUST(close(s[i]));
            char b;
            recv(c[i], &b, 1, 0);
        }
        for (int i = 0; i < FORKS; i++) {
            pid_t p = MUST(fork());
            if (p == 0) _exit(differs());
            int status;
            MUST(waitpid(p, &status, 0));
            bad += status != 0;
        }
        for (int i = 0; i < PAIRS; i++) {
            MUST(close(c[i]));
            expected[c[i]] = 0;
        }
    }
    line("children with other descriptors than their parent's: %d", bad);
    return 0;
}
