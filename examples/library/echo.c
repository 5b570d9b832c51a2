/* Echo. The client sends each line of its input and prints the answer.
 *
 * usage: echo serve ADDRESS PORT      serves one client after the other, until one sends the line "bye"; prints the port
 *        echo ADDRESS PORT
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <slim.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

#define LIMIT_MS 60000

static int check(int code, const char *what)
{
    if (code < 0) {
        perror(what); /* errno says more where the kernel was asked */
        fprintf(stderr, "%s: %s %s\n", what, slim_strerror(code), slim_error_detail());
        exit(1);
    }
    return code;
}

/* Sends back what comes. Returns whether the client said goodbye. */
static int answer(slim_flow *flow)
{
    char buf[4096];
    char last[4] = "";
    for (;;) {
        ssize_t n = slim_flow_recv(flow, buf, sizeof buf, LIMIT_MS);
        if (check((int)n, "receive") == 0)
            return memcmp(last, "bye\n", 4) == 0;
        check(slim_flow_send_all(flow, buf, (size_t)n, LIMIT_MS, NULL), "send");
        for (ssize_t i = 0; i < n; i++) {
            memmove(last, last + 1, 3);
            last[3] = buf[i];
        }
    }
}

static void serve(slim_session *session, const struct sockaddr_in *addr)
{
    slim_endpoint *endpoint;
    check(slim_listen(session, (const struct sockaddr *)addr, sizeof *addr, &endpoint), "listen");
    struct sockaddr_in own;
    socklen_t len = sizeof own;
    check(slim_endpoint_address(endpoint, (struct sockaddr *)&own, &len), "address");
    printf("%d\n", ntohs(own.sin_port));
    fflush(stdout);
    int done = 0;
    while (!done) {
        slim_flow *flow;
        check(slim_accept(endpoint, LIMIT_MS, &flow), "accept");
        done = answer(flow);
        slim_flow_close(flow);
    }
    slim_endpoint_close(endpoint);
}

static void ask(slim_session *session, const struct sockaddr_in *addr)
{
    slim_flow *flow;
    check(slim_connect(session, (const struct sockaddr *)addr, sizeof *addr, LIMIT_MS, &flow),
          "connect");
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        size_t len = strlen(line);
        check(slim_flow_send_all(flow, line, len, LIMIT_MS, NULL), "send");
        check(slim_flow_recv_all(flow, line, len, LIMIT_MS, NULL), "receive");
        fwrite(line, 1, len, stdout);
        fflush(stdout);
    }
    check(slim_flow_finish(flow), "finish");
    check((int)slim_flow_recv(flow, line, sizeof line, LIMIT_MS), "end");
    slim_stats stats;
    check(slim_flow_stats(flow, &stats, sizeof stats), "stats");
    fprintf(stderr, "resumes: %llu\n", (unsigned long long)stats.resumes);
    slim_flow_close(flow);
}

int main(int argc, char **argv)
{
    int serves = argc == 4 && strcmp(argv[1], "serve") == 0;
    struct sockaddr_in addr = {.sin_family = AF_INET};
    if ((argc != 3 && !serves) || inet_pton(AF_INET, argv[argc - 2], &addr.sin_addr) != 1) {
        fprintf(stderr, "usage: %s [serve] ADDRESS PORT\n", argv[0]);
        return 2;
    }
    addr.sin_port = htons((uint16_t)atoi(argv[argc - 1]));

    slim_options options = SLIM_OPTIONS_INIT;
    options.job = "echo";
    options.settings = (const char *const *)environ;
    slim_session *session;
    check(slim_session_open(&options, &session), "open");
    if (serves)
        serve(session, &addr);
    else
        ask(session, &addr);
    check(slim_session_close(session, LIMIT_MS), "close");
    return 0;
}
