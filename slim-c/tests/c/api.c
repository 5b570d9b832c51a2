/* Every function: its results, wrong arguments, and what is left after the close. */
#include <arpa/inet.h>
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <slim.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIMIT 60000
#define IS(call, code)                                                                             \
    do {                                                                                           \
        long long is_result = (long long)(call), is_code = (long long)(code);                      \
        if (is_result != is_code) {                                                                \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld; errno %d, %s\n", __FILE__, __LINE__,     \
                    #call, is_result, is_code, errno, slim_error_detail());                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define TRUE(condition) IS(!!(condition), 1)

static struct sockaddr_in loopback(void)
{
    struct sockaddr_in addr = {.sin_family = AF_INET};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return addr;
}

static slim_session *open_session(const char *const *settings)
{
    slim_options options = SLIM_OPTIONS_INIT;
    options.job = "api";
    options.settings = settings;
    slim_session *session = NULL;
    IS(slim_session_open(&options, &session), 0);
    return session;
}

static slim_endpoint *listen_at(slim_session *session, struct sockaddr_in *addr)
{
    slim_endpoint *endpoint = NULL;
    *addr = loopback();
    IS(slim_listen(session, (struct sockaddr *)addr, sizeof *addr, &endpoint), 0);
    socklen_t len = sizeof *addr;
    IS(slim_endpoint_address(endpoint, (struct sockaddr *)addr, &len), 0);
    IS(len, sizeof *addr);
    TRUE(addr->sin_port != 0);
    return endpoint;
}

static void pair(slim_session *session, slim_flow **near, slim_flow **far)
{
    struct sockaddr_in addr;
    slim_endpoint *endpoint = listen_at(session, &addr);
    IS(slim_connect(session, (struct sockaddr *)&addr, sizeof addr, LIMIT, near), 0);
    IS(slim_accept(endpoint, LIMIT, far), 0);
    IS(slim_flow_wait_negotiated(*near, LIMIT), SLIM_STATE_PROTECTED);
    IS(slim_flow_wait_negotiated(*far, LIMIT), SLIM_STATE_PROTECTED);
    slim_endpoint_close(endpoint);
}

static int entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;
    assert(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static void wrong_arguments(void)
{
    slim_session *session = NULL;
    slim_flow *flow = NULL;
    slim_endpoint *endpoint = NULL;
    struct sockaddr_in addr = loopback();
    struct sockaddr *at = (struct sockaddr *)&addr;
    char byte = 0;
    errno = 0;
    IS(slim_session_open(NULL, NULL), SLIM_ERR_INVALID);
    IS(errno, EINVAL);
    IS(slim_session_close(NULL, 0), 0);
    IS(slim_session_descriptor(NULL), SLIM_ERR_INVALID);
    IS(slim_session_progress(NULL, NULL, 0), SLIM_ERR_INVALID);
    IS(slim_session_wait(NULL, NULL, 0, 0), SLIM_ERR_INVALID);
    IS(slim_session_events(NULL, NULL, 0), SLIM_ERR_INVALID);
    IS(slim_session_on_event(NULL, NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_session_stats(NULL, NULL, 0), SLIM_ERR_INVALID);
    IS(slim_listen(NULL, at, sizeof addr, &endpoint), SLIM_ERR_INVALID);
    IS(slim_connect(NULL, at, sizeof addr, 0, &flow), SLIM_ERR_INVALID);
    IS(slim_connect_blob(NULL, &byte, 1, 0, &flow), SLIM_ERR_INVALID);
    IS(slim_endpoint_id(NULL), 0);
    IS(slim_endpoint_set_context(NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_endpoint_address(NULL, NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_endpoint_blob(NULL, NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_accept(NULL, 0, &flow), SLIM_ERR_INVALID);
    slim_endpoint_close(NULL);
    IS(slim_flow_id(NULL), 0);
    IS(slim_flow_set_context(NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_state(NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_wait_connected(NULL, 0), SLIM_ERR_INVALID);
    IS(slim_flow_wait_negotiated(NULL, 0), SLIM_ERR_INVALID);
    IS(slim_flow_connection(NULL, NULL, NULL, NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_stats(NULL, NULL, 0), SLIM_ERR_INVALID);
    IS(slim_flow_send(NULL, &byte, 1, 0), SLIM_ERR_INVALID);
    IS(slim_flow_sendv(NULL, NULL, 0, 0), SLIM_ERR_INVALID);
    IS(slim_flow_send_all(NULL, &byte, 1, 0, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_recv(NULL, &byte, 1, 0), SLIM_ERR_INVALID);
    IS(slim_flow_recvv(NULL, NULL, 0, 0), SLIM_ERR_INVALID);
    IS(slim_flow_recv_all(NULL, &byte, 1, 0, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_post(NULL, &byte, 1, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_wait_completed(NULL, 0), SLIM_ERR_INVALID);
    IS(slim_flow_finish(NULL), SLIM_ERR_INVALID);
    slim_flow_close(NULL);
    slim_flow_reset(NULL);

    slim_options options = SLIM_OPTIONS_INIT;
    options.size = 8;
    IS(slim_session_open(&options, &session), SLIM_ERR_INVALID);
    struct {
        slim_options known;
        void *later;
    } larger = {SLIM_OPTIONS_INIT, NULL};
    larger.known.size = sizeof larger;
    larger.later = &larger;
    IS(slim_session_open(&larger.known, &session), SLIM_ERR_INVALID);
    larger.later = NULL;
    IS(slim_session_open(&larger.known, &session), 0);
    IS(slim_session_close(session, LIMIT), 0);
    const char *const wrong[] = {"SLIM_ATTEMPTS=many", NULL};
    options = (slim_options)SLIM_OPTIONS_INIT;
    options.settings = wrong;
    IS(slim_session_open(&options, &session), SLIM_ERR_SETTING);
    TRUE(strstr(slim_error_detail(), "SLIM_ATTEMPTS"));
    /* A program that knows only the first options: what lies behind them is not looked at. */
    options = (slim_options)SLIM_OPTIONS_INIT;
    options.size = offsetof(slim_options, transports);
    options.transports = "nothing";
    IS(slim_session_open(&options, &session), 0);
    IS(slim_session_close(session, LIMIT), 0);
    /* Sizes of no version: they end within a pointer, or were never set. */
    options.size = offsetof(slim_options, transports) + 4;
    IS(slim_session_open(&options, &session), SLIM_ERR_INVALID);
    options.size = SIZE_MAX;
    IS(slim_session_open(&options, &session), SLIM_ERR_INVALID);
    options.size = sizeof options;
    IS(slim_session_open(&options, &session), SLIM_ERR_SETTING);
    TRUE(strstr(slim_error_detail(), "transports is \"nothing\""));
    options.transports = "verbs,tcp";
    options.verbs_ports = "mlx5_0:none";
    IS(slim_session_open(&options, &session), SLIM_ERR_SETTING);
    TRUE(strstr(slim_error_detail(), "verbs_ports: \"mlx5_0:none\""));
    options.verbs_ports = "no_such_adapter";
    IS(slim_session_open(&options, &session), 0);
    const char *warning = slim_session_warning(session);
    TRUE(warning && strstr(warning, "; flows use TCP only"));
    IS(slim_session_close(session, LIMIT), 0);
    TRUE(!slim_session_warning(NULL));

    session = open_session(NULL);
    TRUE(!slim_session_warning(session));
    IS(slim_session_progress(session, NULL, 1), SLIM_ERR_INVALID);
    IS(slim_session_on_event(session, NULL, NULL), SLIM_ERR_INVALID);
    IS(slim_session_stats(session, NULL, 8), SLIM_ERR_INVALID);
    IS(slim_listen(session, NULL, 0, &endpoint), SLIM_ERR_INVALID);
    IS(slim_listen(session, at, sizeof addr, NULL), SLIM_ERR_INVALID);
    IS(slim_listen(session, at, 4, &endpoint), SLIM_ERR_INVALID);
    IS(slim_connect(session, at, 4, 0, &flow), SLIM_ERR_INVALID);
    IS(slim_connect(session, at, sizeof addr, 0, NULL), SLIM_ERR_INVALID);
    IS(slim_connect_blob(session, NULL, 0, 0, &flow), SLIM_ERR_INVALID);
    IS(slim_connect_blob(session, "no blob", 7, 0, &flow), SLIM_ERR_BLOB);
    addr.sin_family = AF_UNIX;
    IS(slim_connect(session, at, sizeof addr, 0, &flow), SLIM_ERR_INVALID);
    slim_flow *far;
    pair(session, &flow, &far);
    IS(slim_flow_send(flow, NULL, 1, 0), SLIM_ERR_INVALID);
    IS(slim_flow_recv(flow, NULL, 1, 0), SLIM_ERR_INVALID);
    IS(slim_flow_post(flow, NULL, 1, NULL), SLIM_ERR_INVALID);
    IS(slim_flow_sendv(flow, NULL, 1, 0), SLIM_ERR_INVALID);
    IS(slim_flow_stats(flow, NULL, 8), SLIM_ERR_INVALID);
    slim_flow_close(flow);
    slim_flow_close(far);
    IS(slim_session_close(session, LIMIT), 0);
}

static void texts(void)
{
    TRUE(strcmp(slim_version(), "0.1.0") == 0);
    TRUE(strcmp(slim_strerror(0), "success") == 0);
    TRUE(strcmp(slim_strerror(SLIM_ERR_TIMEOUT), "the time limit has passed") == 0);
    TRUE(strcmp(slim_strerror(-1000), "unknown error code") == 0);
}

static void errors(void)
{
    slim_session *session = open_session(NULL);
    struct sockaddr_in addr;
    slim_endpoint *endpoint = listen_at(session, &addr), *second = NULL;
    slim_flow *flow = NULL;
    struct sockaddr *at = (struct sockaddr *)&addr;
    IS(slim_listen(session, at, sizeof addr, &second), SLIM_ERR_KERNEL);
    IS(errno, EADDRINUSE);
    TRUE(strstr(slim_error_detail(), "bind"));
    IS(slim_accept(endpoint, 0, &flow), SLIM_ERR_AGAIN);
    IS(errno, EAGAIN);
    IS(slim_accept(endpoint, 10, &flow), SLIM_ERR_TIMEOUT);
    IS(errno, ETIMEDOUT);
    slim_endpoint_close(endpoint);
    IS(slim_connect(session, at, sizeof addr, LIMIT, &flow), SLIM_ERR_KERNEL);
    IS(errno, ECONNREFUSED);
    TRUE(flow == NULL);

    slim_flow *near, *far;
    pair(session, &near, &far);
    char buf[8];
    size_t done = 99;
    IS(slim_flow_recv(near, buf, 8, 0), SLIM_ERR_AGAIN);
    IS(slim_flow_recv(near, buf, 8, 10), SLIM_ERR_TIMEOUT);
    IS(slim_flow_send_all(far, "abc", 3, LIMIT, NULL), 0);
    IS(slim_flow_recv_all(near, buf, 8, 50, &done), SLIM_ERR_TIMEOUT);
    IS(done, 3);
    IS(slim_flow_finish(far), 0);
    IS(slim_flow_send(far, "d", 1, 0), SLIM_ERR_SHUTDOWN);
    IS(errno, EPIPE);
    IS(slim_flow_recv_all(near, buf, 8, LIMIT, &done), SLIM_ERR_ENDED);
    IS(done, 0);
    IS(slim_flow_recv(near, buf, 8, LIMIT), 0);
    slim_flow_close(near);
    slim_flow_close(far);

    pair(session, &near, &far);
    slim_flow_reset(far);
    int error = 0;
    while (slim_flow_state(near, &error) != SLIM_STATE_FAILED)
        IS(slim_session_wait(session, NULL, 0, 5), 0);
    IS(error, ECONNRESET);
    IS(slim_flow_send(near, "d", 1, 0), SLIM_ERR_LOST);
    IS(errno, ECONNRESET);
    IS(slim_session_close(session, LIMIT), 0);
    /* The handle is still there. */
    IS(slim_flow_send(near, "d", 1, 0), SLIM_ERR_CLOSED);
    IS(errno, EBADF);
    IS(slim_flow_state(near, NULL), SLIM_STATE_CLOSED);
    slim_flow_close(near);
}

static void vectors(void)
{
    slim_session *session = open_session(NULL);
    slim_flow *near, *far;
    pair(session, &near, &far);
    char head[4] = "head", body[6] = "body..", a[3], b[7];
    struct iovec out[3] = {{head, 4}, {NULL, 0}, {body, 6}}, in[2] = {{a, 3}, {b, 7}};
    IS(slim_flow_sendv(near, out, 3, 0), 10);
    struct pollfd ready = {.fd = slim_session_descriptor(session), .events = POLLIN};
    slim_stats stats;
    ssize_t n = slim_flow_recvv(far, in, 2, LIMIT);
    TRUE(n > 0);
    while (n < 10) {
        /* A blocking call fills the first piece only if it had to wait. */
        ssize_t more = slim_flow_recv(far, n < 3 ? a + n : b + n - 3, n < 3 ? 3 - n : 10 - n, LIMIT);
        TRUE(more > 0);
        n += more;
    }
    TRUE(memcmp(a, "hea", 3) == 0 && memcmp(b, "dbody..", 7) == 0);
    IS(slim_flow_recvv(far, in, 2, 10), SLIM_ERR_TIMEOUT);
    IS(slim_flow_sendv(near, out, 1025, 0), SLIM_ERR_INVALID);
    /* Without room a receive never waits. */
    IS(slim_flow_recv(far, NULL, 0, LIMIT), 0);
    IS(slim_flow_recvv(far, NULL, 0, LIMIT), 0);
    struct iovec none[2] = {{NULL, 0}, {a, 0}};
    IS(slim_flow_recvv(far, none, 2, LIMIT), 0);
    IS(slim_flow_sendv(near, none, 2, LIMIT), 0);
    /* Lengths that no memory has. */
    struct iovec wrong[3][2] = {
        {{head, 4}, {NULL, 1}}, {{head, SIZE_MAX}, {body, 1}}, {{head, SSIZE_MAX}, {body, 1}}};
    for (int i = 0; i < 3; i++) {
        IS(slim_flow_sendv(near, wrong[i], 2, 0), SLIM_ERR_INVALID);
        IS(slim_flow_recvv(far, wrong[i], 2, 0), SLIM_ERR_INVALID);
    }
    IS(slim_flow_recv(far, a, 3, 10), SLIM_ERR_TIMEOUT);
    TRUE(poll(&ready, 1, 0) >= 0);
    struct {
        slim_stats known;
        uint64_t later;
    } larger;
    memset(&larger, 0xff, sizeof larger);
    IS(slim_flow_stats(near, &larger.known, sizeof larger), 0);
    IS(larger.known.sent, 10);
    IS(larger.later, 0);
    memset(&stats, 0xff, sizeof stats);
    IS(slim_session_stats(session, &stats, 16), 0);
    IS(stats.received, 10);
    IS(stats.resumes, (uint64_t)-1);
    struct sockaddr_in local, remote;
    socklen_t local_len = sizeof local, remote_len = sizeof remote;
    IS(slim_flow_connection(near, (struct sockaddr *)&local, &local_len, (struct sockaddr *)&remote,
                            &remote_len),
       0);
    TRUE(local.sin_port != remote.sin_port && local.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    slim_flow_close(near);
    slim_flow_close(far);
    IS(slim_session_close(session, LIMIT), 0);
}

static int connected, inside;

static void on_event(const slim_event *event, void *arg)
{
    slim_session *session = arg;
    slim_stats stats;
    /* The library may be called, but not closed. */
    IS(slim_session_stats(session, &stats, sizeof stats), 0);
    inside = slim_session_close(session, 0);
    connected += event->change == SLIM_EVENT_CONNECTED;
}

static void updates_and_events(void)
{
    slim_session *session = open_session(NULL);
    struct sockaddr_in addr;
    slim_endpoint *endpoint = listen_at(session, &addr);
    int mark_near, mark_far, mark_endpoint;
    IS(slim_endpoint_set_context(endpoint, &mark_endpoint), 0);
    slim_flow *near, *far = NULL;
    IS(slim_connect(session, (struct sockaddr *)&addr, sizeof addr, 0, &near), 0);
    IS(slim_flow_set_context(near, &mark_near), 0);
    unsigned near_is = 0, far_is = 0;
    while (!(near_is & SLIM_UPDATE_WRITABLE) || !(far_is & SLIM_UPDATE_WRITABLE)) {
        slim_update update;
        /* Room for one: the others must come later. */
        IS(slim_session_wait(session, &update, 1, LIMIT), 1);
        if (update.context == &mark_endpoint) {
            IS(update.id, slim_endpoint_id(endpoint));
            IS(update.what, SLIM_UPDATE_ACCEPTABLE);
            if (!far && slim_accept(endpoint, 0, &far) == 0)
                IS(slim_flow_set_context(far, &mark_far), 0);
        } else if (update.context == &mark_near) {
            IS(update.id, slim_flow_id(near));
            near_is |= update.what;
        } else {
            TRUE(update.context == &mark_far);
            far_is |= update.what;
        }
    }
    IS(slim_flow_wait_negotiated(near, LIMIT), SLIM_STATE_PROTECTED);
    IS(slim_flow_wait_negotiated(far, LIMIT), SLIM_STATE_PROTECTED);
    slim_event events[2], more[16];
    IS(slim_session_events(session, events, 2), 2);
    IS(events[0].change, SLIM_EVENT_CONNECTED);
    TRUE(events[0].context == &mark_near || events[0].context == &mark_far);
    IS(slim_session_events(session, more, 16), 2);
    IS(slim_session_on_event(session, on_event, session), 0);
    slim_flow *other;
    IS(slim_connect(session, (struct sockaddr *)&addr, sizeof addr, LIMIT, &other), 0);
    while (connected == 0)
        IS(slim_session_wait(session, NULL, 0, 5), 0);
    IS(inside, SLIM_ERR_INVALID);
    /* Updates that are not taken are merged. */
    slim_update all[8];
    TRUE(slim_session_progress(session, all, 8) < 8);
    for (int i = 0; i < 1000; i++) {
        char byte;
        IS(slim_flow_send_all(far, "x", 1, LIMIT, NULL), 0);
        IS(slim_session_wait(session, NULL, 0, 1), 0);
        IS(slim_flow_recv_all(near, &byte, 1, LIMIT, NULL), 0);
    }
    int count = slim_session_progress(session, all, 8);
    TRUE(count > 0 && count <= 3);
    for (int i = 0; i < count; i++)
        TRUE(all[i].context != &mark_near || all[i].what & SLIM_UPDATE_READABLE);
    /* Closed: no update has its context any more. */
    IS(slim_flow_send_all(far, "x", 1, LIMIT, NULL), 0);
    IS(slim_flow_send_all(near, "x", 1, LIMIT, NULL), 0);
    slim_flow_close(near);
    for (int i = 0; i < 20; i++) {
        int n = slim_session_wait(session, all, 8, 5);
        for (int k = 0; k < n; k++)
            TRUE(all[k].context != &mark_near);
    }
    slim_flow_close(other);
    slim_flow_close(far);
    slim_endpoint_close(endpoint);
    IS(slim_session_close(session, LIMIT), 0);
}

static void blobs(void)
{
    slim_session *session = open_session(NULL);
    struct sockaddr_in addr;
    slim_endpoint *endpoint = listen_at(session, &addr);
    unsigned char blob[512];
    size_t len = 0;
    IS(slim_endpoint_blob(endpoint, NULL, &len), SLIM_ERR_ROOM);
    TRUE(len > 50 && len < sizeof blob);
    size_t needed = len;
    len = sizeof blob;
    IS(slim_endpoint_blob(endpoint, blob, &len), 0);
    IS(len, needed);
    slim_flow *near, *far;
    IS(slim_connect_blob(session, blob, len, 0, &near), 0);
    /* Both ends are here, so each must be driven. */
    while (slim_accept(endpoint, 0, &far) == SLIM_ERR_AGAIN)
        IS(slim_session_wait(session, NULL, 0, 5), 0);
    IS(slim_flow_wait_connected(near, LIMIT), 0);
    IS(slim_flow_state(near, NULL), SLIM_STATE_PROTECTED);
    char got[5];
    IS(slim_flow_send_all(far, "hello", 5, LIMIT, NULL), 0);
    IS(slim_flow_recv_all(near, got, 5, LIMIT, NULL), 0);
    TRUE(memcmp(got, "hello", 5) == 0);
    slim_session *other;
    slim_options options = SLIM_OPTIONS_INIT;
    options.job = "another";
    IS(slim_session_open(&options, &other), 0);
    slim_flow *none = NULL;
    IS(slim_connect_blob(other, blob, len, LIMIT, &none), SLIM_ERR_JOB);
    IS(slim_session_close(other, LIMIT), 0);
    slim_flow_close(near);
    slim_flow_close(far);
    slim_endpoint_close(endpoint);
    IS(slim_session_close(session, LIMIT), 0);
}

/* Receives and compares until `all` bytes have come. */
static void *receive_posts(void *flow)
{
    static unsigned char buf[1 << 16];
    size_t at = 0, all = 8 << 20;
    while (at < all) {
        ssize_t n = slim_flow_recv(flow, buf, sizeof buf, LIMIT);
        TRUE(n > 0);
        for (ssize_t i = 0; i < n; i++, at++)
            TRUE(buf[i] == (unsigned char)(at >> 20));
    }
    return NULL;
}

static void posts(void)
{
    slim_session *session = open_session(NULL);
    slim_flow *near, *far;
    pair(session, &near, &far);
    unsigned char *buffers[8];
    pthread_t receiver;
    assert(pthread_create(&receiver, NULL, receive_posts, far) == 0);
    for (int i = 0; i < 8; i++) {
        buffers[i] = malloc(1 << 20);
        memset(buffers[i], i, 1 << 20);
        IS(slim_flow_post(near, buffers[i], 1 << 20, buffers[i]), 0);
    }
    for (int next = 0; next < 8;) {
        slim_update updates[3];
        int n = slim_session_wait(session, updates, 3, LIMIT);
        TRUE(n > 0);
        for (int i = 0; i < n; i++) {
            if (updates[i].what == SLIM_UPDATE_POST) {
                IS(updates[i].status, 0);
                IS(updates[i].id, slim_flow_id(near));
                /* In order, and nothing reads the buffer any more. */
                TRUE(updates[i].post == buffers[next]);
                memset(buffers[next], 0xee, 1 << 20);
                free(buffers[next++]);
            }
        }
    }
    assert(pthread_join(receiver, NULL) == 0);
    slim_stats stats;
    IS(slim_flow_stats(near, &stats, sizeof stats), 0);
    IS(stats.posted, 8);
    IS(stats.completed, 8);
    IS(slim_flow_post(near, "small", 5, &stats), 0);
    IS(slim_flow_wait_completed(near, LIMIT), 0);
    slim_update update;
    do
        IS(slim_session_wait(session, &update, 1, LIMIT), 1);
    while (update.what != SLIM_UPDATE_POST);
    TRUE(update.post == &stats && update.status == 0);

    /* More than the kernels take, and nobody receives: the flow fails, and the posts with it. */
    unsigned char *large = calloc(4, 8 << 20);
    for (int i = 0; i < 2; i++)
        IS(slim_flow_post(near, large, 16 << 20, large + i), 0);
    slim_flow_reset(far);
    for (int i = 0; i < 2;) {
        IS(slim_session_wait(session, &update, 1, LIMIT), 1);
        if (update.what == SLIM_UPDATE_POST) {
            TRUE(update.post == large + i++);
            IS(update.status, SLIM_ERR_LOST);
        }
    }
    IS(slim_flow_post(near, large, 1, NULL), SLIM_ERR_LOST);
    slim_flow_close(near);

    /* The flow is reset with open posts: they are reported, too. */
    pair(session, &near, &far);
    for (int i = 0; i < 2; i++)
        IS(slim_flow_post(near, large, 16 << 20, large + i), 0);
    slim_flow_reset(near);
    for (int i = 0; i < 2;) {
        IS(slim_session_wait(session, &update, 1, LIMIT), 1);
        if (update.what == SLIM_UPDATE_POST) {
            TRUE(update.post == large + i++ && update.context == NULL);
            IS(update.status, SLIM_ERR_CLOSED);
        }
    }
    slim_flow_close(far);

    /* The session is closed with open posts: the buffers are free. */
    pair(session, &near, &far);
    for (int i = 0; i < 2; i++)
        IS(slim_flow_post(near, large, 16 << 20, NULL), 0);
    IS(slim_session_close(session, 100), SLIM_ERR_TIMEOUT);
    free(large);
    IS(slim_flow_send(near, "d", 1, 0), SLIM_ERR_CLOSED);
    slim_flow_close(near);
    slim_flow_close(far);
}

static void *nothing(void *arg)
{
    return arg;
}

int main(void)
{
    /* Whatever the C library and sanitizers begin at first is there before. */
    pthread_t first;
    assert(pthread_create(&first, NULL, nothing, NULL) == 0);
    assert(pthread_join(first, NULL) == 0);
    entries("/proc/self/fd");
    int threads = entries("/proc/self/task"), descriptors = entries("/proc/self/fd");
    struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"texts", texts},     {"wrong_arguments", wrong_arguments},
               {"errors", errors},   {"vectors", vectors},
               {"blobs", blobs},     {"updates_and_events", updates_and_events},
               {"posts", posts}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        all[i].run();
        IS(entries("/proc/self/task"), threads);
        IS(entries("/proc/self/fd"), descriptors);
        printf("%s\n", all[i].name);
    }
    return 0;
}
