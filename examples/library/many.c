/* Many flows with poll(2), in one thread and without blocking. Both ends send a pattern on each flow, receive the other's, and compare
 * each byte.
 *
 * usage: many serve ADDRESS PORT FLOWS BYTES      prints the port
 *        many ADDRESS PORT FLOWS BYTES            opens FLOWS flows; BYTES go each way on each flow
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <slim.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

#define LIMIT_MS 60000
#define PIECE 16384

/* One flow, with its number in the order of the client, which is the first byte of each stream. */
struct stream {
    slim_flow *flow;
    int number; /* -1: not known yet */
    unsigned long long sent, received;
    int finished, ended;
};

static unsigned long long total;
static int done; /* streams that have ended in both directions */

static int check(int code, const char *what)
{
    if (code < 0) {
        perror(what);
        fprintf(stderr, "%s: %s %s\n", what, slim_strerror(code), slim_error_detail());
        exit(1);
    }
    return code;
}

/* Byte `at` of the stream with this number. */
static unsigned char pattern(int number, unsigned long long at)
{
    return (unsigned char)(at == 0 ? (unsigned)number : (at * 31 + (unsigned)number) >> 3);
}

static void send_more(struct stream *s)
{
    unsigned char buf[PIECE];
    while (s->number >= 0 && s->sent < total) {
        size_t len = total - s->sent < PIECE ? (size_t)(total - s->sent) : PIECE;
        for (size_t i = 0; i < len; i++)
            buf[i] = pattern(s->number, s->sent + i);
        /* Two pieces, as a header and its data would be. */
        struct iovec pieces[2] = {{buf, len / 2}, {buf + len / 2, len - len / 2}};
        ssize_t n = slim_flow_sendv(s->flow, pieces, 2, 0);
        if (n == SLIM_ERR_AGAIN)
            return;
        s->sent += (unsigned long long)check((int)n, "send");
    }
    if (s->sent == total && !s->finished) {
        check(slim_flow_finish(s->flow), "finish");
        s->finished = 1;
        done += s->ended;
    }
}

static void receive_more(struct stream *s)
{
    unsigned char buf[PIECE];
    while (!s->ended) {
        ssize_t n = slim_flow_recv(s->flow, buf, sizeof buf, 0);
        if (n == SLIM_ERR_AGAIN)
            return;
        check((int)n, "receive");
        if (n == 0) {
            if (s->received != total) {
                fprintf(stderr, "flow %d ended at %llu\n", s->number, s->received);
                exit(1);
            }
            s->ended = 1;
            done += s->finished;
        }
        if (n > 0 && s->number < 0)
            s->number = buf[0];
        for (ssize_t i = 0; i < n; i++) {
            if (buf[i] != pattern(s->number, s->received + (unsigned long long)i)) {
                fprintf(stderr, "flow %d: wrong byte at %llu\n", s->number,
                        s->received + (unsigned long long)i);
                exit(1);
            }
        }
        s->received += (unsigned long long)n;
    }
}

static void drive(slim_session *session, slim_endpoint *endpoint, struct stream *all, int flows)
{
    struct pollfd ready = {.fd = check(slim_session_descriptor(session), "descriptor"),
                           .events = POLLIN};
    int accepted = 0;
    slim_update updates[64];
    while (done < flows) {
        int n = check(slim_session_progress(session, updates, 64), "progress");
        for (int i = 0; i < n; i++) {
            slim_update *u = &updates[i];
            if (u->what & SLIM_UPDATE_ACCEPTABLE) {
                slim_flow *flow;
                while (accepted < flows && slim_accept(endpoint, 0, &flow) == 0) {
                    all[accepted] = (struct stream){.flow = flow, .number = -1};
                    check(slim_flow_set_context(flow, &all[accepted++]), "context");
                }
            }
            struct stream *s = u->context;
            if (s && u->what & SLIM_UPDATE_READABLE)
                receive_more(s);
            if (s && u->what & (SLIM_UPDATE_READABLE | SLIM_UPDATE_WRITABLE))
                send_more(s);
        }
        if (n == 0 && poll(&ready, 1, LIMIT_MS) == 0) {
            fprintf(stderr, "stuck\n");
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    int serves = argc == 6 && strcmp(argv[1], "serve") == 0;
    struct sockaddr_in addr = {.sin_family = AF_INET};
    if ((argc != 5 && !serves) || inet_pton(AF_INET, argv[1 + serves], &addr.sin_addr) != 1) {
        fprintf(stderr, "usage: %s [serve] ADDRESS PORT FLOWS BYTES\n", argv[0]);
        return 2;
    }
    addr.sin_port = htons((uint16_t)atoi(argv[2 + serves]));
    int flows = atoi(argv[3 + serves]);
    total = strtoull(argv[4 + serves], NULL, 10);
    if (flows < 1 || flows > 256 || total < 1)
        return 2;

    slim_options options = SLIM_OPTIONS_INIT;
    options.job = "many";
    options.settings = (const char *const *)environ;
    slim_session *session;
    check(slim_session_open(&options, &session), "open");
    struct stream *all = calloc((size_t)flows, sizeof *all);
    if (!all)
        return 1;
    slim_endpoint *endpoint = NULL;
    const struct sockaddr *to = (const struct sockaddr *)&addr;
    if (serves) {
        check(slim_listen(session, to, sizeof addr, &endpoint), "listen");
        socklen_t len = sizeof addr;
        check(slim_endpoint_address(endpoint, (struct sockaddr *)&addr, &len), "address");
        printf("%d\n", ntohs(addr.sin_port));
        fflush(stdout);
    } else {
        for (int i = 0; i < flows; i++) {
            all[i].number = i;
            check(slim_connect(session, to, sizeof addr, 0, &all[i].flow), "connect");
            check(slim_flow_set_context(all[i].flow, &all[i]), "context");
        }
    }
    drive(session, endpoint, all, flows);

    slim_stats stats;
    check(slim_session_stats(session, &stats, sizeof stats), "stats");
    fprintf(stderr, "resumes: %llu\n", (unsigned long long)stats.resumes);
    for (int i = 0; i < flows; i++)
        slim_flow_close(all[i].flow);
    slim_endpoint_close(endpoint);
    check(slim_session_close(session, LIMIT_MS), "close");
    free(all);
    return 0;
}
