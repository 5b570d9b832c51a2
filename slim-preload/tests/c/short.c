/*
 * Connections one after the other between two processes, with a byte back and forth on each. The client closes first, except
 * on every fifth connection, where the server does. Both check that each stream ends at the right byte.
 *
 *   short COUNT
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* The server's port. */
static int listening;

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

/*
 * Reports UDP sockets of this process on ports that the kernel may give to a listener: the listener would need the UDP port of
 * the same number. SLIM has UDP sockets once the two processes know each other.
 */
static void look_at_udp_ports(void)
{
    int low = 32768, high = 60999;
    FILE *range = fopen("/proc/sys/net/ipv4/ip_local_port_range", "r");
    if (range == NULL || fscanf(range, "%d %d", &low, &high) != 2)
        die("the kernel's range of ports");
    fclose(range);
    for (int fd = 0; fd < 65536; fd++) {
        struct sockaddr_in at;
        socklen_t len = sizeof at;
        int kind = 0;
        socklen_t kind_len = sizeof kind;
        /* Raw system calls, because the socket may be SLIM's. */
        if (syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &kind, &kind_len) != 0 || kind != SOCK_DGRAM)
            continue;
        if (syscall(SYS_getsockname, fd, &at, &len) != 0 || at.sin_family != AF_INET)
            continue;
        int port = ntohs(at.sin_port);
        if (port >= low && port <= high && port != listening)
            printf("descriptor %d has UDP port %d\n", fd, port);
    }
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
        /* The two processes do not know each other yet, so the first connections last longer. */
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
        listening = ntohs(at.sin_port);
        serve(from, count);
        look_at_udp_ports();
        exit(0);
    }
    if (read(ready[0], &at, sizeof at) != sizeof at)
        die("read");
    connect_to(&at, count);
    look_at_udp_ports();
    if (waitpid(server, &status, 0) != server || status != 0)
        return 1;
    printf("%d connections\n", count);
    return 0;
}
