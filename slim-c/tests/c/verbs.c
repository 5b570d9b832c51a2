/* Two sessions in one process, each with an adapter of its own; a flow between them.
 *
 *   verbs ADAPTER ADAPTER FILE
 *
 * It sends pieces of all sizes both ways, and checks every byte, for as long as there is the FILE, and then ends both directions in order. Exit status 0: all was right. */
#include <slim.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIMIT 60000
enum { MOST = 300000 };

static void must(const char *what, long got, long wanted)
{
    if (got != wanted) {
        fprintf(stderr, "%s: %ld (%s), not %ld\n", what, got, slim_strerror((int)got), wanted);
        exit(1);
    }
}

static slim_session *open_session(const char *adapter)
{
    slim_options options = SLIM_OPTIONS_INIT;
    slim_session *session;

    options.transports = "verbs,tcp";
    options.verbs_ports = adapter;
    must("slim_session_open", slim_session_open(&options, &session), 0);
    if (slim_session_warning(session)) {
        fprintf(stderr, "%s\n", slim_session_warning(session));
        exit(1);
    }
    return session;
}

static unsigned char byte(uint64_t at, int direction)
{
    return (unsigned char)(at * 2654435761u >> 13) + (unsigned char)direction;
}

static unsigned char out[MOST], in[MOST];
static uint64_t moved[2];

/* Sends a piece from one end, and takes it at the other one. */
static void pass(slim_flow *from, slim_flow *to, size_t len, int direction)
{
    size_t sent = 0, got = 0;

    for (size_t i = 0; i < len; i++)
        out[i] = byte(moved[direction] + i, direction);
    while (got < len) {
        long n;
        if (sent < len) {
            n = (long)slim_flow_send(from, out + sent, len - sent, 0);
            if (n > 0)
                sent += (size_t)n;
            else if (n != SLIM_ERR_AGAIN && n != SLIM_ERR_TIMEOUT)
                must("slim_flow_send", n, 0);
        }
        n = (long)slim_flow_recv(to, in + got, len - got, sent < len ? 0 : LIMIT);
        if (n > 0)
            got += (size_t)n;
        else if (sent == len || (n != SLIM_ERR_AGAIN && n != SLIM_ERR_TIMEOUT))
            must("slim_flow_recv", n, (long)(len - got));
    }
    if (memcmp(in, out, len) != 0) {
        fprintf(stderr, "wrong bytes behind %llu\n", (unsigned long long)moved[direction]);
        exit(1);
    }
    moved[direction] += len;
}

int main(int argc, char **argv)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_storage bound;
    socklen_t bound_len = sizeof bound;
    slim_endpoint *listener;
    slim_flow *near, *far;

    if (argc != 4)
        return 2;
    slim_session *here = open_session(argv[1]), *there = open_session(argv[2]);
    must("slim_listen", slim_listen(there, (struct sockaddr *)&addr, sizeof addr, &listener), 0);
    must("slim_endpoint_address", slim_endpoint_address(listener, (struct sockaddr *)&bound, &bound_len), 0);
    must("slim_connect", slim_connect(here, (struct sockaddr *)&bound, bound_len, LIMIT, &near), 0);
    must("slim_accept", slim_accept(listener, LIMIT, &far), 0);
    for (uint64_t round = 0; access(argv[3], F_OK) == 0; round++) {
        size_t len = round % 50 == 49 ? MOST : 1 + (size_t)(round * 7919 % 3000);
        pass(near, far, len, 0);
        pass(far, near, len, 1);
        usleep(1000);
    }
    must("slim_flow_finish", slim_flow_finish(near), 0);
    must("the end", (long)slim_flow_recv(far, in, 1, LIMIT), 0);
    must("slim_flow_finish", slim_flow_finish(far), 0);
    must("the other end", (long)slim_flow_recv(near, in, 1, LIMIT), 0);
    slim_flow_close(near);
    slim_flow_close(far);
    slim_endpoint_close(listener);
    must("slim_session_close", slim_session_close(here, LIMIT), 0);
    must("slim_session_close", slim_session_close(there, LIMIT), 0);
    printf("%llu and %llu bytes were right\n", (unsigned long long)moved[0], (unsigned long long)moved[1]);
    return 0;
}
