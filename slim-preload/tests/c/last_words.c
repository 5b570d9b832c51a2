// Code that runs after main and `exit` uses a connection: exit handlers of the program, and destructors of a library that was
// opened by dlopen. This file is compiled both as the program and as the library. T_ARGS: which of the two uses the connection,
// and when it breaks.
#define _GNU_SOURCE
#include <dlfcn.h>

#include "t.h"

enum { CHUNK = 100000 };
static char buf[CHUNK], got[CHUNK];

struct last {
    int fd, breaks;
};

// Sends many bytes, receives an answer, and reads to the end of the stream.
static void speak(struct last *last) {
    if (last->fd <= 0) return;
    int fd = last->fd;
    fill(buf, 0, CHUNK, 7);
    if (full_send(fd, buf, CHUNK)) line("send: %s", ename(errno));
    if (full_recv(fd, got, CHUNK) != CHUNK || !verify(got, 0, CHUNK, 8)) line("recv: %s", ename(errno));
    if (last->breaks == 2 && atoi(getenv("T_BREAKS") ?: "0")) break_connections();
    fill(buf, CHUNK, CHUNK, 7);
    if (full_send(fd, buf, CHUNK)) line("send again: %s", ename(errno));
    MUST(shutdown(fd, SHUT_WR));
    line("the end: %zd", recv(fd, got, 1, 0));
    close(fd);
}

#ifdef LIBRARY
struct last dl_last;
__attribute__((destructor)) static void words(void) { speak(&dl_last); }
#else
static struct last mine;
static void words(void) { speak(&mine); }

static void quietly(void) {
    // Only sends the last bytes. The kernel closes the connection.
    fill(buf, 0, CHUNK, 7);
    if (full_send(mine.fd, buf, CHUNK)) line("send: %s", ename(errno));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 40);
    char how[16], library[512];
    struct last last = {0};
    if (sscanf(getenv("T_ARGS"), "%15s %d %511s", how, &last.breaks, library) != 3) return 1;
    int server = is_server();
    if (server) {
        int l = listener();
        tell(port_of(l));
        last.fd = MUST(accept(l, NULL, NULL));
        await_negotiation();
        meet();
        if (!strcmp(how, "atexit")) {
            mine = last;
            atexit(words);
            exit(0);
        }
        void *dl = dlopen(library, RTLD_NOW);
        if (!dl) line("%s", dlerror());
        struct last *theirs = dlsym(dl, "dl_last");
        *theirs = last;
        if (!strcmp(how, "quiet")) {
            mine = last;
            theirs->fd = 0;
            atexit(quietly);
        }
        return 0;
    }
    last.fd = dial(hear());
    await_negotiation();
    meet();
    int breaks = atoi(getenv("T_BREAKS") ?: "0");
    if (full_recv(last.fd, got, CHUNK) != CHUNK || !verify(got, 0, CHUNK, 7)) line("recv: %s", ename(errno));
    if (strcmp(how, "quiet")) {
        if (last.breaks == 1 && breaks) break_connections();
        fill(buf, 0, CHUNK, 8);
        if (full_send(last.fd, buf, CHUNK)) line("send: %s", ename(errno));
        if (full_recv(last.fd, got, CHUNK) != CHUNK || !verify(got, CHUNK, CHUNK, 7)) line("recv again: %s", ename(errno));
    }
    double since = now_s();
    line("the end: %zd", recv(last.fd, got, 1, 0));
    line("soon: %d", now_s() - since < 1);
    close(last.fd);
    return 0;
}
#endif
