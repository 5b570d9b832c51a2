// A session beside connections of the program's own, under the preload library. Bytes go back and forth on both until the end of standard
// input, and are compared. Then it prints the number of agent threads, and how often the flows of the session were resumed.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <slim.h>
#include <slim_table.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(holds) \
    ((holds) ? (void)0 : (fprintf(stderr, "%d: %s (%s)\n", __LINE__, #holds, strerror(errno)), exit(1)))

enum { BLOCK = 3000 };

static unsigned char out[BLOCK], in[BLOCK];

static void fill(unsigned round, unsigned char salt) {
    for (unsigned n = 0; n < BLOCK; n++) out[n] = (unsigned char)((n * 7 + round) ^ salt);
}

static void over_flow(slim_flow *from, slim_flow *to) {
    CHECK(slim_flow_send_all(from, out, BLOCK, 60000, NULL) == 0);
    for (ssize_t got = 0, n; got < BLOCK; got += n) {
        n = slim_flow_recv(to, in + got, (size_t)(BLOCK - got), 60000);
        CHECK(n > 0);
    }
    CHECK(memcmp(in, out, BLOCK) == 0);
}

static void over_socket(int from, int to) {
    CHECK(send(from, out, BLOCK, 0) == BLOCK);
    CHECK(recv(to, in, BLOCK, MSG_WAITALL) == BLOCK);
    CHECK(memcmp(in, out, BLOCK) == 0);
}

static unsigned agents(void) {
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file && fgets(name, sizeof name, file)) count += strcmp(name, "slim-agent\n") == 0;
        if (file) fclose(file);
    }
    closedir(tasks);
    return count;
}

static unsigned long long resumes(slim_flow *flow) {
    slim_stats stats;
    CHECK(slim_flow_stats(flow, &stats, sizeof stats) == 0);
    return stats.resumes;
}

// The active flows in the table. Sums up their resumes.
static int table_flows(unsigned long long *resumes) {
    slim_table_flow all[16];
    int n = slim_table()->flows(all, 16, sizeof *all), active = 0;
    CHECK(n >= 0 && n <= 16);
    for (int i = 0; i < n; i++) {
        if (all[i].state != SLIM_TABLE_FLOW_ACTIVE) continue;
        active++;
        *resumes += all[i].resumes;
    }
    return active;
}

int main(void) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;

    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && near >= 0);
    CHECK(bind(listener, (struct sockaddr *)&addr, len) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&addr, &len) == 0);
    CHECK(connect(near, (struct sockaddr *)&addr, len) == 0);
    int far = accept(listener, NULL, NULL);
    CHECK(far >= 0);

    slim_options options = SLIM_OPTIONS_INIT;
    slim_session *session;
    slim_endpoint *endpoint;
    slim_flow *one, *other;
    options.job = "beside";
    CHECK(slim_session_open(&options, &session) == 0);
    addr.sin_port = 0;
    CHECK(slim_listen(session, (struct sockaddr *)&addr, sizeof addr, &endpoint) == 0);
    len = sizeof addr;
    CHECK(slim_endpoint_address(endpoint, (struct sockaddr *)&addr, &len) == 0);
    CHECK(slim_connect(session, (struct sockaddr *)&addr, sizeof addr, 60000, &one) == 0);
    CHECK(slim_accept(endpoint, 60000, &other) == 0);
    CHECK(slim_flow_wait_negotiated(one, 60000) == SLIM_STATE_PROTECTED);
    CHECK(slim_flow_wait_negotiated(other, 60000) == SLIM_STATE_PROTECTED);
    const slim_table_calls *(*find)(void);
    unsigned long long none = 0;
    *(void **)&find = dlsym(RTLD_DEFAULT, "slim_table");
    CHECK(find && find() == slim_table());
    // The program's own connection may still negotiate.
    for (int i = 0; table_flows(&none) != 4; i++) CHECK(i < 10000 && usleep(1000) == 0);
    CHECK(none == 0);
    printf("%u\n", agents());
    fflush(stdout);

    struct pollfd end = {.fd = 0, .events = POLLIN};
    for (unsigned round = 0; poll(&end, 1, 1) == 0; round++) {
        fill(round, 1);
        over_flow(one, other);
        over_flow(other, one);
        fill(round, 2);
        over_socket(near, far);
        over_socket(far, near);
    }
    unsigned long long resumed = resumes(one) + resumes(other);
    CHECK(agents() == 1);
    unsigned long long all = 0;
    CHECK(table_flows(&all) > 0 && all >= resumed && slim_table()->escalations(NULL, 0, sizeof(slim_table_escalation)) == 0);
    slim_flow_close(one);
    slim_flow_close(other);
    slim_endpoint_close(endpoint);
    CHECK(slim_session_close(session, 10000) == 0);
    // The agent goes on for the program's own connection.
    CHECK(agents() == 1);
    over_socket(near, far);
    fprintf(stderr, "resumes: %llu\n", resumed);
    return 0;
}
