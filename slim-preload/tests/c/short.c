/*
 * Connections one after the other between two processes, a byte there and back on each. The client closes first; on every
 * fifth connection the server does. Both check that each stream ends where it is to end.
 *
 *   short COUNT
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
    perror(what);
    _exit(1);
}

static void ends(int fd)
{
    char byte;
    if (read(fd, &byte, 1) != 0)
        die("no end of the stream");
}

static int server_closes_first(int n)
{
    return n % 5 == 4;
}

static void serve(int from, int count)
{
    for (int n = 0; n < count; n++) {
        char byte;
        int fd = accept(from, NULL, NULL);
        if (fd < 0 || read(fd, &byte, 1) != 1 || byte != (char)n || write(fd, &byte, 1) != 1)
            die("serve");
        if (!server_closes_first(n))
            ends(fd);
        close(fd);
    }
}

static void connect_to(const struct sockaddr_in *to, int count)
{
    for (int n = 0; n < count; n++) {
        char byte = (char)n;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (const struct sockaddr *)to, sizeof *to) != 0 || write(fd, &byte, 1) != 1
            || read(fd, &byte, 1) != 1 || byte != (char)n)
            die("connect");
        if (server_closes_first(n))
            ends(fd);
        /* The two do not know each other yet. */
        if (n < 5)
            usleep(100000);
        close(fd);
    }
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 0, status;
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof at;
    int ready[2];
    pid_t server;
    if (pipe(ready) != 0 || (server = fork()) < 0)
        die("fork");
    if (server == 0) {
        int from = socket(AF_INET, SOCK_STREAM, 0);
        if (bind(from, (struct sockaddr *)&at, sizeof at) != 0 || listen(from, 64) != 0
            || getsockname(from, (struct sockaddr *)&at, &len) != 0)
            die("listen");
        if (write(ready[1], &at, sizeof at) != sizeof at)
            die("write");
        serve(from, count);
        exit(0);
    }
    if (read(ready[0], &at, sizeof at) != sizeof at)
        die("read");
    connect_to(&at, count);
    if (waitpid(server, &status, 0) != server || status != 0)
        return 1;
    printf("%d connections\n", count);
    return 0;
}
