/* A program that links the library asks for its own flows, and learns of the death of its peer. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <slim.h>
#include <slim_table.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(holds) \
    ((holds) ? (void)0 : (fprintf(stderr, "%d: %s (%s)\n", __LINE__, #holds, strerror(errno)), exit(1)))

static slim_session *open_session(void) {
    slim_options options = SLIM_OPTIONS_INIT;
    slim_session *session;
    options.job = "table";
    CHECK(slim_session_open(&options, &session) == 0);
    return session;
}

/* The peer: connects, and receives nothing. */
static void peer(int port) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    slim_flow *flow;
    CHECK(read(port, &addr.sin_port, sizeof addr.sin_port) == sizeof addr.sin_port);
    CHECK(slim_connect(open_session(), (struct sockaddr *)&addr, sizeof addr, 60000, &flow) == 0);
    for (;;) pause();
}

int main(void) {
    int port[2];
    CHECK(pipe(port) == 0);
    pid_t child = fork();
    if (child == 0) peer(port[0]);
    CHECK(child > 0);

    const slim_table_calls *table = slim_table();
    slim_table_flow flow;
    slim_table_peer peer;
    slim_table_escalation last;
    CHECK(table == slim_table() && table->version == SLIM_TABLE_VERSION && table->size >= sizeof *table);
    CHECK(table->state() == SLIM_TABLE_OFF && table->flows(&flow, 1, sizeof flow) == 0);

    slim_session *session = open_session();
    slim_endpoint *endpoint;
    slim_flow *one;
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    CHECK(slim_listen(session, (struct sockaddr *)&addr, sizeof addr, &endpoint) == 0);
    CHECK(slim_endpoint_address(endpoint, (struct sockaddr *)&addr, &len) == 0);
    CHECK(write(port[1], &addr.sin_port, sizeof addr.sin_port) == sizeof addr.sin_port);
    CHECK(slim_accept(endpoint, 60000, &one) == 0);
    CHECK(slim_flow_wait_negotiated(one, 60000) == SLIM_STATE_PROTECTED);

    CHECK(table->state() == SLIM_TABLE_ON && table->flows(&flow, 1, sizeof flow) == 1);
    CHECK(flow.state == SLIM_TABLE_FLOW_ACTIVE && flow.epoch == 0);
    CHECK(table->peers(&peer, 1, sizeof peer) == 1 && peer.pid == (unsigned)child);
    CHECK(peer.state == SLIM_TABLE_PEER_REACHABLE && !strcmp(peer.process, flow.process));

    int news = table->descriptor();
    struct pollfd poll_news = {.fd = news, .events = POLLIN};
    CHECK(news >= 0 && poll(&poll_news, 1, 0) == 0);
    char bytes[4];
    CHECK(slim_flow_send_all(one, "not read", 8, 60000, NULL) == 0);
    usleep(50000);
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(slim_flow_recv(one, bytes, sizeof bytes, 60000) == SLIM_ERR_LOST);
    CHECK(poll(&poll_news, 1, 0) == 1);
    CHECK(table->escalations(&last, 1, sizeof last) == 1 && last.evidence == SLIM_TABLE_EVIDENCE_PROCESS_GONE);
    CHECK(last.pid == (unsigned)child && !strcmp(last.flow, flow.flow));
    CHECK(table->peers(&peer, 1, sizeof peer) == 1 && peer.state == SLIM_TABLE_PEER_LOST);

    slim_flow_close(one);
    slim_endpoint_close(endpoint);
    CHECK(slim_session_close(session, 10000) == 0);
    CHECK(table->state() == SLIM_TABLE_OFF && close(news) == 0);
    return 0;
}
