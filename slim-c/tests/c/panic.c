/* A panic in the library becomes an error code and breaks its session; other sessions go on.
 * usage: panic NAME     the library panics in the function NAME
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <slim.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT 60000
#define IS(call, code)                                                                             \
    do {                                                                                           \
        long long is_result = (long long)(call), is_code = (long long)(code);                      \
        if (is_result != is_code) {                                                                \
            printf("%d: %s is %lld, not %lld\n", __LINE__, #call, is_result, is_code);             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static slim_session *session, *other;
static slim_endpoint *endpoint;
static slim_flow *near, *far;
static struct sockaddr_in addr;

static void open_all(void)
{
    socklen_t len = sizeof addr;
    addr.sin_family = AF_INET;
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    IS(slim_session_open(NULL, &session), 0);
    IS(slim_session_open(NULL, &other), 0);
    IS(slim_listen(other, (struct sockaddr *)&addr, sizeof addr, &endpoint), 0);
    IS(slim_endpoint_address(endpoint, (struct sockaddr *)&addr, &len), 0);
    IS(slim_connect(session, (struct sockaddr *)&addr, sizeof addr, LIMIT, &near), 0);
    IS(slim_accept(endpoint, LIMIT, &far), 0);
    IS(slim_flow_wait_negotiated(far, LIMIT), SLIM_STATE_PROTECTED);
    IS(slim_flow_wait_negotiated(near, LIMIT), SLIM_STATE_PROTECTED);
}

static long long call(const char *name)
{
    char byte = 'x';
    slim_update update;
    slim_event event;
    slim_flow *flow;
    if (!strcmp(name, "slim_flow_send"))
        return slim_flow_send(near, &byte, 1, 0);
    if (!strcmp(name, "slim_flow_recv"))
        return slim_flow_recv(near, &byte, 1, 0);
    if (!strcmp(name, "slim_flow_post"))
        return slim_flow_post(near, &byte, 1, NULL);
    if (!strcmp(name, "slim_session_progress"))
        return slim_session_progress(session, &update, 1);
    if (!strcmp(name, "slim_session_events"))
        return slim_session_events(session, &event, 1);
    if (!strcmp(name, "slim_connect"))
        return slim_connect(session, (struct sockaddr *)&addr, sizeof addr, 0, &flow);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    open_all();
    setenv("SLIM_FORCED_PANIC", argv[1], 1);
    errno = 0;
    IS(call(argv[1]), SLIM_ERR_INTERNAL);
    IS(errno, ENOTRECOVERABLE);
    IS(strstr(slim_error_detail(), "forced in") != NULL, 1);
    unsetenv("SLIM_FORCED_PANIC");
    /* The session stays broken, and so do its flows. */
    char byte;
    slim_update update;
    IS(call(argv[1]), SLIM_ERR_INTERNAL);
    IS(slim_session_progress(session, &update, 1), SLIM_ERR_INTERNAL);
    IS(slim_flow_recv(near, &byte, 1, LIMIT), SLIM_ERR_INTERNAL);
    IS(slim_flow_finish(near), SLIM_ERR_INTERNAL);
    /* The other session shares the thread, and goes on. The peer gets an error, not an end. */
    IS(slim_flow_send(far, "a", 1, LIMIT), 1);
    slim_flow_close(near);
    IS(slim_session_close(session, LIMIT), SLIM_ERR_INTERNAL);
    ssize_t end = slim_flow_recv(far, &byte, 1, LIMIT);
    IS(end, SLIM_ERR_LOST);
    IS(errno, ECONNRESET);
    IS(slim_connect(other, (struct sockaddr *)&addr, sizeof addr, LIMIT, &near), 0);
    slim_flow_close(near);
    slim_flow_close(far);
    slim_endpoint_close(endpoint);
    IS(slim_session_close(other, LIMIT), 0);
    return 0;
}
