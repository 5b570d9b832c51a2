/*
 * slim.h: byte streams between processes that outlive their TCP connections.
 *
 * A broken connection is replaced, lost bytes are sent again, and the program notices only a pause. A peer without SLIM sees plain TCP.
 *
 *   session    all endpoints and flows of one job in this process; has one descriptor to poll
 *   endpoint   an address at which flows are accepted
 *   flow       one byte stream in both directions
 *
 * Results. Functions that can fail return a negative SLIM_ERR_... code and set `errno`; slim_strerror() has the texts of the codes.
 * A successful call may change `errno`, too.
 *
 * Time limits. `timeout_ms` is in milliseconds, as for poll(): negative means no limit, and 0 does not wait at all. With 0, functions
 * that would have to wait return SLIM_ERR_AGAIN if they have that code, else SLIM_ERR_TIMEOUT.
 *
 * Without blocking. slim_session_descriptor() is readable when something may have changed; slim_session_progress() says what.
 *
 * Threads. Any function may be called in any thread, at the same time as others. Only the functions that close or reset a handle must be
 * the last ones to use it. The library must not be called in signal handlers, and a thread must not be cancelled during a call. The library
 * has one thread of its own for all sessions with equal settings; it blocks all signals.
 *
 * Ownership. A handle belongs to the program until the program closes it. Each handle of a flow or endpoint must be closed, before or
 * after its session. Structures and strings that the program passes are not kept, except the buffers of slim_flow_post().
 *
 * Forks. A forked child must not use the handles of its parent, except to close them, which does not affect the parent. It may open its own
 * session.
 *
 * The library prints nothing, unless the setting SLIM_LOG is set, and never ends the program; if it meets a mistake of its own it returns
 * SLIM_ERR_INTERNAL. The only exception: if the system refuses memory, the program is aborted.
 */


#ifndef SLIM_H
#define SLIM_H

/* Made by cbindgen of slim-c/src. Do not edit: SLIM_WRITE_HEADER=1 cargo test -p slim-c --test header */

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

/* The options that every slim_options begins with. */
#define SLIM_OPTIONS_INIT { sizeof(slim_options), NULL, NULL, NULL, NULL }


/**
 * An argument is NULL or has a value that is not allowed, or the function must not be called here. `errno`: `EINVAL`.
 */
#define SLIM_ERR_INVALID -1

/**
 * Nothing can be done now without waiting. `errno`: `EAGAIN`.
 */
#define SLIM_ERR_AGAIN -2

/**
 * The time limit has passed. `errno`: `ETIMEDOUT`.
 */
#define SLIM_ERR_TIMEOUT -3

/**
 * The session, the endpoint or the flow is closed. `errno`: `EBADF`.
 */
#define SLIM_ERR_CLOSED -4

/**
 * The peer ended the stream before all requested bytes were received. `errno`: `ENODATA`.
 */
#define SLIM_ERR_ENDED -5

/**
 * This end has finished sending, or the peer has closed the flow. `errno`: `EPIPE`.
 */
#define SLIM_ERR_SHUTDOWN -6

/**
 * The flow has failed: its connection broke and was not replaced. `errno`: the error of the connection.
 */
#define SLIM_ERR_LOST -7

/**
 * The kernel refused a system call, or a connection was not established. `errno`: the kernel's error number.
 */
#define SLIM_ERR_KERNEL -8

/**
 * A setting cannot be used; slim_error_detail() says which one. `errno`: `EINVAL`.
 */
#define SLIM_ERR_SETTING -9

/**
 * The bytes are not the blob of an endpoint. `errno`: `EINVAL`.
 */
#define SLIM_ERR_BLOB -10

/**
 * The blob's endpoint belongs to another job, or has another job key. `errno`: `EACCES`.
 */
#define SLIM_ERR_JOB -11

/**
 * The caller's memory is too small for the result. `errno`: `ENOBUFS`.
 */
#define SLIM_ERR_ROOM -12

/**
 * The library has met a mistake of its own, which slim_error_detail() describes. The session cannot be used any more: calls with it, its
 * endpoints and its flows return this code. Only the functions that close or reset a handle still work: they reset the flows, so that the
 * peers get an error. `errno`: `ENOTRECOVERABLE`.
 */
#define SLIM_ERR_INTERNAL -13

/**
 * The first connection is not established yet.
 */
#define SLIM_STATE_CONNECTING 1

/**
 * The flow is usable, and the peer is being asked whether it has SLIM. Its bytes are kept already. But if the connection breaks now and
 * the peer does not answer within half a second, the flow fails. To be sure, wait for SLIM_STATE_PROTECTED (slim_flow_wait_negotiated()),
 * or open the flow by blob (slim_connect_blob()): such a flow is never in this state.
 */
#define SLIM_STATE_NEGOTIATING 2

/**
 * The flow outlives its connection.
 */
#define SLIM_STATE_PROTECTED 3

/**
 * The flow is plain TCP: the peer does not have SLIM, or the settings forbid it.
 */
#define SLIM_STATE_PLAIN 4

/**
 * The connection is broken, or suspected to be, and is being replaced.
 */
#define SLIM_STATE_SUSPENDED 5

/**
 * The flow has failed: its connection broke and was not replaced.
 */
#define SLIM_STATE_FAILED 6

/**
 * The session is closed.
 */
#define SLIM_STATE_CLOSED 7

/**
 * Of an endpoint: flows may be waiting to be accepted.
 */
#define SLIM_UPDATE_ACCEPTABLE 1

/**
 * A receive may return bytes, the end of the stream, or an error.
 */
#define SLIM_UPDATE_READABLE 2

/**
 * A flow that took no more bytes, or that has just been opened, may take bytes now.
 */
#define SLIM_UPDATE_WRITABLE 4

/**
 * The state of the flow may have changed.
 */
#define SLIM_UPDATE_CHANGED 8

/**
 * The flow has failed.
 */
#define SLIM_UPDATE_ENDED 16

/**
 * A post is completed: `post` and `status` say which one and how. No other bit is set in such an update.
 */
#define SLIM_UPDATE_POST 32

/**
 * The first connection is established.
 */
#define SLIM_EVENT_CONNECTED 1

/**
 * The peer has SLIM: from now on the flow outlives its connection.
 */
#define SLIM_EVENT_PROTECTED 2

/**
 * The flow is plain TCP from now on.
 */
#define SLIM_EVENT_PLAIN 3

/**
 * The flow has lost its connection and is suspended. `error` is the error of the connection, if this end met one.
 */
#define SLIM_EVENT_SUSPENDED 4

/**
 * The flow has a new connection.
 */
#define SLIM_EVENT_RESUMED 5

/**
 * The flow goes on with its old connection, which proved to be intact.
 */
#define SLIM_EVENT_REINSTATED 6

/**
 * The flow has failed with `error`; 0: with an end of the stream.
 */
#define SLIM_EVENT_ESCALATED 7

/**
 * An address at which a session accepts flows.
 */
typedef struct slim_endpoint slim_endpoint;

/**
 * A byte stream between two processes, in both directions.
 */
typedef struct slim_flow slim_flow;

/**
 * All endpoints and flows of one job in this process.
 */
typedef struct slim_session slim_session;

/**
 * Options of a session. Set all of them by SLIM_OPTIONS_INIT first: `slim_options options = SLIM_OPTIONS_INIT;`
 */
typedef struct slim_options {
    /**
     * sizeof(slim_options), which tells the library how many options the program knows.
     */
    size_t size;
    /**
     * Name of the job. Blobs are valid only in sessions with the same name. NULL: an empty name.
     */
    const char *job;
    /**
     * Settings, as NAME=VALUE, with a NULL at the end: those of SLIM's environment variables (docs/ENVIRONMENT.md). Other names are
     * ignored, so `environ` may be given. NULL: the default of each. The default of SLIM_LOG is `off`.
     */
    const char *const *settings;
    /**
     * Kinds of transport that flows may use, the preferred one first: "tcp", or "verbs,tcp" (queue pairs of InfiniBand and RoCE where these can be made, and TCP else;
     * docs/VERBS.md). Such a session has a thread of its own. NULL: "tcp".
     */
    const char *transports;
    /**
     * With "verbs,tcp": adapters or their ports, with commas between, for example "mlx5_0,mlx5_1:2". NULL: all that have a link when the session is opened.
     */
    const char *verbs_ports;
} slim_options;

/**
 * A change of a flow or an endpoint, or the completion of a post.
 */
typedef struct slim_update {
    /**
     * The number of the flow or endpoint.
     */
    uint64_t id;
    /**
     * The pointer that was set for the flow or endpoint, else NULL. Also NULL if the flow is closed already.
     */
    void *context;
    /**
     * With SLIM_UPDATE_POST: the pointer that was given to slim_flow_post(). The buffer belongs to the program again.
     */
    void *post;
    /**
     * SLIM_UPDATE_... bits.
     */
    uint32_t what;
    /**
     * With SLIM_UPDATE_POST: 0 if the peer's kernel has the bytes. SLIM_ERR_LOST or SLIM_ERR_SHUTDOWN if the flow has failed before, and
     * SLIM_ERR_CLOSED if it was closed before: then the peer may have all, some or none of them.
     */
    int32_t status;
} slim_update;

/**
 * An event of a flow.
 */
typedef struct slim_event {
    /**
     * The number of the flow.
     */
    uint64_t flow;
    /**
     * The pointer that was set for the flow, else NULL. Also NULL if the flow is closed already.
     */
    void *context;
    /**
     * One of SLIM_EVENT_...
     */
    uint32_t change;
    /**
     * An error number as in `errno`, or 0.
     */
    int32_t error;
    /**
     * With SLIM_EVENT_RESUMED: bytes that this end has replayed in this resume.
     */
    uint64_t replayed;
    /**
     * With SLIM_EVENT_RESUMED: length of the suspension, in nanoseconds.
     */
    uint64_t away_ns;
} slim_event;

/**
 * A callback for events. It may call the library, except slim_session_close(), and must return: no longjmp(), no C++ exception.
 */
typedef void (*slim_event_callback)(const struct slim_event *event, void *arg);

/**
 * Counters of a flow, or of a session.
 */
typedef struct slim_stats {
    /**
     * Bytes that the program has sent.
     */
    uint64_t sent;
    /**
     * Bytes that the program has received.
     */
    uint64_t received;
    /**
     * Number of resumes onto a new connection.
     */
    uint64_t resumes;
    /**
     * Bytes that this end has replayed.
     */
    uint64_t replayed;
    /**
     * Total time of all suspensions, the present ones included, in nanoseconds.
     */
    uint64_t suspended_ns;
    /**
     * Of a flow: number of posts; of a session: 0.
     */
    uint64_t posted;
    /**
     * Of a flow: number of posts whose bytes the peer's kernel has; of a session: 0.
     */
    uint64_t completed;
    /**
     * Of a session: flows that are open; of a flow: 0, as all that follow.
     */
    uint64_t open;
    /**
     * Flows that were opened or accepted.
     */
    uint64_t flows;
    /**
     * Flows that have failed.
     */
    uint64_t failed;
    /**
     * Events that were dropped because the program did not take them in time.
     */
    uint64_t lost_events;
} slim_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the text of an error code, for example "the time limit has passed". Never NULL; the text is constant. Codes that are not
 * negative are "success". The text of `errno` is strerror()'s. Any thread, also with no session open.
 */
const char *slim_strerror(int code);

/**
 * Returns details of the last failure in this thread that had any: the setting that cannot be used, the system call that was refused, or
 * the library's own mistake. An empty string if there was none. Never NULL. The text is valid until the next call of the library in this
 * thread.
 */
const char *slim_error_detail(void);

/**
 * Returns the version of the library, for example "0.1.0". Never NULL; the text is constant. Any thread.
 */
const char *slim_version(void);

/**
 * Opens a session: starts the library's thread, unless another session with the same settings has one. `options`: NULL for the defaults.
 * Stores the session in `*session`; close it by slim_session_close().
 *
 * Returns 0, SLIM_ERR_SETTING (a setting cannot be used), SLIM_ERR_KERNEL (the thread got no memory, socket or descriptor; the file with
 * the job key cannot be used), or SLIM_ERR_INVALID. Any thread.
 */
int slim_session_open(const struct slim_options *options,
                      struct slim_session **session);

/**
 * Closes all endpoints and flows of the session, and frees the session. Waits at most `timeout_ms` milliseconds until all sent bytes are
 * delivered (negative: no limit). If no other session uses the library's thread, the call also ends the thread, which may take about as
 * long again. Afterwards no posted buffer is in use, and there are no more updates about posts. The handles of endpoints and flows stay:
 * close each of them, before or after; until then they may keep descriptors. NULL is allowed and does nothing.
 *
 * Returns 0; SLIM_ERR_TIMEOUT: posts were left that the kernel did not take in time, and their flows were reset, or the thread has not
 * ended yet and will end later; SLIM_ERR_INVALID in a callback of this library, and the session stays open; or SLIM_ERR_INTERNAL. Except
 * in the case SLIM_ERR_INVALID the session is freed. No other thread may use the session during the call.
 */
int slim_session_close(struct slim_session *session,
                       int timeout_ms);

/**
 * Says what the options have asked for and the session has not: a kind of transport that cannot be used (flows use TCP then), or ports of adapters. One line for each.
 * NULL if it has all, or if `session` is NULL. The text is valid until the session is closed. Any thread.
 */
const char *slim_session_warning(const struct slim_session *session);

/**
 * Returns a descriptor for poll(), select() or epoll: readable when slim_session_progress() may have updates, or has work to do. It
 * belongs to the session: do not read from it, and do not close it. Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_session_descriptor(const struct slim_session *session);

/**
 * Stores the updates since the last call in `updates`, an array with room for `room` of them, and returns their number. Does not wait.
 * Sends posted bytes, finds idle connections that have died, and calls the callback for events. Each change is reported once, as by
 * edge-triggered epoll: on SLIM_UPDATE_READABLE receive until SLIM_ERR_AGAIN, or remember that there is more. If it returns `room`, call
 * it again before you wait for the descriptor.
 *
 * Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; concurrent calls divide the updates between them.
 */
int slim_session_progress(const struct slim_session *session,
                          struct slim_update *updates,
                          size_t room);

/**
 * Like slim_session_progress(), but waits until there is an update, at most `timeout_ms` milliseconds (negative: no limit). Returns 0 if
 * there was none.
 */
int slim_session_wait(const struct slim_session *session,
                      struct slim_update *updates,
                      size_t room,
                      int timeout_ms);

/**
 * Sets the callback for events, in place of an earlier one. Only slim_session_progress() and slim_session_wait() call it, in the thread
 * that called them, with `arg`. It stays until the session is closed. The event is valid during the callback.
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; the callback must be fit for each thread that calls the two functions.
 */
int slim_session_on_event(const struct slim_session *session,
                          slim_event_callback callback,
                          void *arg);

/**
 * Stores the oldest events in `events`, an array with room for `room` of them, and returns their number. An event is returned once. The
 * session keeps the last 4096 events; with a callback it keeps none.
 *
 * Or returns SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_session_events(const struct slim_session *session,
                        struct slim_event *events,
                        size_t room);

/**
 * Stores the session's counters in `*stats`: sums over its flows, closed ones included. `size` is sizeof(*stats).
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_session_stats(const struct slim_session *session,
                       struct slim_stats *stats,
                       size_t size);

/**
 * Opens an endpoint, which accepts flows at this IPv4 or IPv6 address; with port 0 the kernel chooses a port. Stores the endpoint in
 * `*endpoint`; close it by slim_endpoint_close().
 *
 * Returns 0, SLIM_ERR_KERNEL (for example with `errno` EADDRINUSE), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_listen(const struct slim_session *session,
                const struct sockaddr *addr,
                socklen_t addrlen,
                struct slim_endpoint **endpoint);

/**
 * Opens a flow to an endpoint, or to any TCP server, and stores it in `*flow`; close it by slim_flow_close(). Waits at most `timeout_ms`
 * milliseconds until the connection is established (negative: no limit). With 0 it does not wait: the flow is SLIM_STATE_CONNECTING, and
 * an update reports the connection, or its failure. An established flow is SLIM_STATE_NEGOTIATING until the peer has answered whether it
 * has SLIM; slim_flow_wait_negotiated() waits for that.
 *
 * Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_KERNEL (for example with `errno` ECONNREFUSED), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_connect(const struct slim_session *session,
                 const struct sockaddr *addr,
                 socklen_t addrlen,
                 int timeout_ms,
                 struct slim_flow **flow);

/**
 * Opens a flow to the endpoint with this blob (slim_endpoint_blob()), and stores it in `*flow`; close it by slim_flow_close(). The flow
 * is protected from the beginning, without negotiation. Waits at most `timeout_ms` milliseconds until the endpoint has accepted the
 * flow, and tries one address of the endpoint after the other (negative: no limit). With 0 it tries only the first address and does not
 * wait: the flow is SLIM_STATE_CONNECTING, and goes on while the program is in slim_session_progress() or waits in a call of this session.
 *
 * Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_BLOB, SLIM_ERR_JOB, SLIM_ERR_KERNEL (with `errno` ECONNREFUSED: the endpoint is closed, or does
 * not recognize this process as one of its job), SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_connect_blob(const struct slim_session *session,
                      const void *blob,
                      size_t len,
                      int timeout_ms,
                      struct slim_flow **flow);

/**
 * Returns the endpoint's number, which updates have as `id`. Numbers of flows and endpoints are unique in the process and are never
 * reused. 0 if `endpoint` is NULL. Any thread.
 */
uint64_t slim_endpoint_id(const struct slim_endpoint *endpoint);

/**
 * Sets the pointer that later updates of the endpoint have as `context`. The library does not use it otherwise.
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_endpoint_set_context(const struct slim_endpoint *endpoint,
                              void *context);

/**
 * Stores the address at which the endpoint listens in `*addr`, as getsockname() does: `*addrlen` is the room there, and then the length
 * of the address.
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_endpoint_address(const struct slim_endpoint *endpoint,
                          struct sockaddr *addr,
                          socklen_t *addrlen);

/**
 * Stores the endpoint's blob, a few hundred bytes, in `blob`. `*len` is the room there, and then the length of the blob. The program sends
 * the blob to the other processes of the job by its own means; they pass it to slim_connect_blob(). The blob holds a secret: a process
 * that has the blob, and the job key if there is one, can open a flow. The first call opens one more listening port.
 *
 * Returns 0; SLIM_ERR_ROOM, and `*len` is the length that is needed; SLIM_ERR_KERNEL; SLIM_ERR_TIMEOUT: the library's thread did not tell
 * the host's addresses in time; SLIM_ERR_CLOSED; SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_endpoint_blob(const struct slim_endpoint *endpoint,
                       void *blob,
                       size_t *len);

/**
 * Accepts a flow and stores it in `*flow`; close it by slim_flow_close(). Waits at most `timeout_ms` milliseconds (negative: no limit; 0:
 * does not wait). Flows that were opened by blob are accepted in the same way: call it until SLIM_ERR_AGAIN at each
 * SLIM_UPDATE_ACCEPTABLE, since the endpoint answers their connectors in this call.
 *
 * Returns 0, SLIM_ERR_AGAIN (only with 0), SLIM_ERR_TIMEOUT, SLIM_ERR_CLOSED, SLIM_ERR_KERNEL (for example with `errno` EMFILE),
 * SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_accept(const struct slim_endpoint *endpoint,
                int timeout_ms,
                struct slim_flow **flow);

/**
 * Closes the endpoint and frees it; accepted flows stay open. There are no more updates with its context, except those that
 * slim_session_progress() has returned already. NULL is allowed and does nothing. No other thread may use the endpoint during the call.
 */
void slim_endpoint_close(struct slim_endpoint *endpoint);

/**
 * Returns the flow's number, which updates and events have. Numbers of flows and endpoints are unique in the process and are never reused.
 * 0 if `flow` is NULL. Any thread.
 */
uint64_t slim_flow_id(const struct slim_flow *flow);

/**
 * Sets the pointer that later updates and events of the flow have as `context`. The library does not use it otherwise. Set it before
 * the next slim_session_progress(): updates from before have NULL.
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_set_context(const struct slim_flow *flow,
                          void *context);

/**
 * Returns the flow's state, SLIM_STATE_..., or SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. With SLIM_STATE_FAILED, `*error` is the error of its
 * connection as in `errno`, or 0 if the peer's stream has ended in order; else 0. `error` may be NULL. Any thread.
 */
int slim_flow_state(const struct slim_flow *flow,
                    int *error);

/**
 * Waits until the first connection is established, at most `timeout_ms` milliseconds (negative: no limit).
 *
 * Returns 0, SLIM_ERR_TIMEOUT (the connection is still being made), SLIM_ERR_KERNEL (it failed), SLIM_ERR_CLOSED, SLIM_ERR_INVALID or
 * SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_wait_connected(const struct slim_flow *flow,
                             int timeout_ms);

/**
 * Waits until it is known whether the peer has SLIM, at most `timeout_ms` milliseconds (negative: no limit). A flow can be used before.
 *
 * Returns the flow's state then, SLIM_STATE_PROTECTED for example; SLIM_ERR_TIMEOUT, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_wait_negotiated(const struct slim_flow *flow,
                              int timeout_ms);

/**
 * Stores both ends of the flow's present connection in `*local` and `*remote`, as getsockname() does: the lengths are the room there, and
 * then the lengths of the addresses. Each pair of pointers may be NULL.
 *
 * Returns 0; SLIM_ERR_AGAIN: the flow has no connection at the moment; SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_connection(const struct slim_flow *flow,
                         struct sockaddr *local,
                         socklen_t *locallen,
                         struct sockaddr *remote,
                         socklen_t *remotelen);

/**
 * Stores the flow's counters in `*stats`. `size` is sizeof(*stats).
 *
 * Returns 0, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_stats(const struct slim_flow *flow, struct slim_stats *stats, size_t size);

/**
 * Ends this direction: the peer receives all sent and posted bytes, then the end of the stream. This end can still receive.
 *
 * Returns 0, SLIM_ERR_AGAIN (the first connection is not established yet), SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any
 * thread.
 */
int slim_flow_finish(const struct slim_flow *flow);

/**
 * Closes the flow and frees it. The library still delivers the sent bytes, even if the connection breaks (SLIM_LINGER). As with close(),
 * the flow is reset if there are bytes that this end has not received. Posts that the kernel has not taken yet are still sent by
 * slim_session_progress() and slim_session_close(); each post is still reported, with SLIM_ERR_CLOSED. To know that the peer has the
 * bytes, wait for the completions before. There are no more updates with the flow's context, except those that slim_session_progress() has
 * returned already. NULL is allowed and does nothing. No other thread may use the flow during the call.
 */
void slim_flow_close(struct slim_flow *flow);

/**
 * Closes the flow, discards undelivered bytes, and frees it: the peer gets ECONNRESET. Otherwise like slim_flow_close().
 */
void slim_flow_reset(struct slim_flow *flow);

/**
 * Sends bytes: waits at most `timeout_ms` milliseconds (negative: no limit; 0: does not wait) until at least one byte is sent. Returns the
 * number of bytes, which may be less than `len`.
 *
 * Or returns SLIM_ERR_AGAIN (only with 0; SLIM_UPDATE_WRITABLE tells when to try again), SLIM_ERR_TIMEOUT, SLIM_ERR_LOST,
 * SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_KERNEL (for example with `errno` ENOBUFS; the flow goes on), SLIM_ERR_INVALID or
 * SLIM_ERR_INTERNAL. Any thread; the order of concurrent sends is undefined.
 */
ssize_t slim_flow_send(const struct slim_flow *flow,
                       const void *data,
                       size_t len,
                       int timeout_ms);

/**
 * Like slim_flow_send(), with `count` pieces; at most 1024.
 */
ssize_t slim_flow_sendv(const struct slim_flow *flow,
                        const struct iovec *pieces,
                        size_t count,
                        int timeout_ms);

/**
 * Sends all `len` bytes; waits at most `timeout_ms` milliseconds (negative: no limit). `*done` becomes the number of bytes sent, also
 * if the call fails; `done` may be NULL.
 *
 * Returns 0, SLIM_ERR_TIMEOUT, or another error of slim_flow_send(). Any thread.
 */
int slim_flow_send_all(const struct slim_flow *flow,
                       const void *data,
                       size_t len,
                       int timeout_ms,
                       size_t *done);

/**
 * Receives bytes: waits at most `timeout_ms` milliseconds (negative: no limit; 0: does not wait) until at least one byte is there. Returns
 * the number of bytes; 0 at the end of the peer's stream, or if `len` is 0.
 *
 * Or returns SLIM_ERR_AGAIN (only with 0; SLIM_UPDATE_READABLE tells when to try again), SLIM_ERR_TIMEOUT, SLIM_ERR_LOST, SLIM_ERR_CLOSED,
 * SLIM_ERR_KERNEL, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread; the order of concurrent receives is undefined.
 */
ssize_t slim_flow_recv(const struct slim_flow *flow,
                       void *into,
                       size_t len,
                       int timeout_ms);

/**
 * Like slim_flow_recv(), into `count` pieces; at most 1024.
 */
ssize_t slim_flow_recvv(const struct slim_flow *flow,
                        const struct iovec *pieces,
                        size_t count,
                        int timeout_ms);

/**
 * Receives exactly `len` bytes; waits at most `timeout_ms` milliseconds (negative: no limit). `*done` becomes the number of bytes
 * received, also if the call fails: these are not received again. `done` may be NULL.
 *
 * Returns 0, SLIM_ERR_ENDED (the peer's stream ended before), SLIM_ERR_TIMEOUT, or another error of slim_flow_recv(). Any thread.
 */
int slim_flow_recv_all(const struct slim_flow *flow,
                       void *into,
                       size_t len,
                       int timeout_ms,
                       size_t *done);

/**
 * Posts a buffer: sends its `len` bytes after all earlier sends and posts, and keeps the buffer itself, not a copy, until the peer's
 * kernel has all of them. Until then the program must not change or free the buffer: after a broken connection its bytes are sent again.
 * An update with SLIM_UPDATE_POST and `post` says when the buffer is free. Posts of a flow are reported in order, each of them exactly
 * once, unless the session is closed before: after slim_session_close() all buffers are free.
 *
 * Never waits, so the program must limit the amount of posted bytes. slim_session_progress() sends the bytes that the kernel does not take
 * at once; until it has taken all, slim_flow_send() returns SLIM_ERR_AGAIN. The bytes of buffers of less than a kilobyte may be copied.
 *
 * Returns 0, SLIM_ERR_LOST, SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. After SLIM_ERR_INTERNAL the buffer
 * may be in use until the session is closed; after another error it is not in use, and is not reported. Any thread.
 */
int slim_flow_post(const struct slim_flow *flow,
                   const void *data,
                   size_t len,
                   void *post);

/**
 * Waits until the peer's kernel has the bytes of all posts of the flow, at most `timeout_ms` milliseconds (negative: no limit). The next
 * slim_session_progress() reports them.
 *
 * Returns 0, SLIM_ERR_TIMEOUT, SLIM_ERR_LOST, SLIM_ERR_SHUTDOWN, SLIM_ERR_CLOSED, SLIM_ERR_INVALID or SLIM_ERR_INTERNAL. Any thread.
 */
int slim_flow_wait_completed(const struct slim_flow *flow,
                             int timeout_ms);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLIM_H */
