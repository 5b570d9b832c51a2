/*
 * slim_table.h: what a process can ask SLIM: its peers, its flows, and the last escalations with their evidence.
 *
 * libslim_preload.so and libslim export one function, slim_table(). A process has one table, which shows all its flows, whether SLIM came
 * by LD_PRELOAD, or is linked, or both. This header needs no library:
 *
 *   const slim_table_calls *(*find)(void) = (const slim_table_calls *(*)(void))dlsym(RTLD_DEFAULT, "slim_table");
 *   const slim_table_calls *table = find ? find() : NULL;
 *
 * Arrays. `peers`, `flows` and `escalations` store at most `capacity` elements of `size` bytes each in the caller's array, and return how
 * many there are; so if the result is larger than `capacity`, the caller can ask again with a larger array. `size` is sizeof of the
 * structure: later versions add fields at the end of it. Fields that the library does not know are set to zero. The array may be NULL if
 * `capacity` is 0.
 *
 * Errors are negative error numbers: -EINVAL (the array is NULL, or `size` is 0), -ETIMEDOUT (SLIM has not answered within a second).
 * errno is not changed.
 *
 * Threads. Any thread may ask, at any time, but no signal handler and no vforked child. A forked child has a table of its own, with no
 * flows and no escalations; descriptors of its parent's table belong to the parent.
 */


#ifndef SLIM_TABLE_H
#define SLIM_TABLE_H

/* Made by cbindgen of slim-agent/src/table/types.rs. Do not edit: SLIM_WRITE_HEADER=1 cargo test -p slim-c --test header */

#include <stddef.h>
#include <stdint.h>

/**
 * Version of slim_table_calls. It changes only if a program for an older version would not work any more.
 */
#define SLIM_TABLE_VERSION 1

/**
 * SLIM does not work in this process: it is off, it has ended, or the process has not used a TCP socket yet. There are no peers and no
 * flows with a session.
 */
#define SLIM_TABLE_OFF 0

/**
 * SLIM works in this process.
 */
#define SLIM_TABLE_ON 1

/**
 * State of a flow: it is not known yet whether the peer has SLIM.
 */
#define SLIM_TABLE_FLOW_NEGOTIATING 0

/**
 * State of a flow: a connection carries it.
 */
#define SLIM_TABLE_FLOW_ACTIVE 1

/**
 * State of a flow: it has lost its connection and has no new one yet.
 */
#define SLIM_TABLE_FLOW_SUSPENDED 2

/**
 * State of a flow: both sides agree on a new connection, or lost bytes are sent again.
 */
#define SLIM_TABLE_FLOW_RESUMING 3

/**
 * State of a flow: escalated. `reason` says why.
 */
#define SLIM_TABLE_FLOW_ENDED 4

/**
 * State of a flow: plain TCP. `reason` says why.
 */
#define SLIM_TABLE_FLOW_LEGACY 5

/**
 * State of a peer: at least one flow to it has a connection.
 */
#define SLIM_TABLE_PEER_REACHABLE 0

/**
 * State of a peer: no flow to it has a connection.
 */
#define SLIM_TABLE_PEER_SUSPENDED 1

/**
 * State of a peer: no flow to it is left, and the last one ended with evidence; or the witness of the job says that it is lost.
 */
#define SLIM_TABLE_PEER_LOST 2

/**
 * No evidence: the peer itself has ended the flow, or it was not given up because of the network.
 */
#define SLIM_TABLE_EVIDENCE_NONE 0

/**
 * Evidence: the peer's host says that the process does not exist, or another process of the host answers for it.
 */
#define SLIM_TABLE_EVIDENCE_PROCESS_GONE 1

/**
 * Evidence: nothing at the peer's host has answered during the outage.
 */
#define SLIM_TABLE_EVIDENCE_HOST_SILENT 2

/**
 * Evidence: the peer's host has answered, but no connection could be kept.
 */
#define SLIM_TABLE_EVIDENCE_PATH_LOST 3

/**
 * Evidence: the user's limit for a resume has passed.
 */
#define SLIM_TABLE_EVIDENCE_DEADLINE 4

/**
 * A peer process. Texts end with a zero byte.
 */
typedef struct slim_table_peer {
    /**
     * Name of the process: host, process id and incarnation, as in `process` of a flow.
     */
    char process[40];
    /**
     * The whole id of its host, as 32 hexadecimal digits.
     */
    char host[40];
    /**
     * Where it is reached for a resume: address and port, or the kind of transport and its locator. The first `locator_count` of them;
     * those that do not fit are left out.
     */
    char locators[8][144];
    /**
     * Number of `locators`.
     */
    uint32_t locator_count;
    /**
     * Its process id on its host.
     */
    uint32_t pid;
    /**
     * SLIM_TABLE_PEER_...
     */
    uint32_t state;
    /**
     * SLIM_TABLE_EVIDENCE_...: the last evidence against it.
     */
    uint32_t evidence;
    /**
     * Flows to it that have a session.
     */
    uint32_t flows;
    /**
     * Those of them that have no connection.
     */
    uint32_t suspended;
} slim_table_peer;

/**
 * A flow. Texts end with a zero byte.
 */
typedef struct slim_table_flow {
    /**
     * Its name, the same at both ends and in the event log: 32 hexadecimal digits. Zeros while it has none.
     */
    char flow[40];
    /**
     * Our address and port, as getsockname() has them.
     */
    char sock[64];
    /**
     * The peer's address and port, as getpeername() has them.
     */
    char peer[64];
    /**
     * Name of the peer process; empty while it is not known.
     */
    char process[40];
    /**
     * Why it is plain TCP or was given up: the word of the event log. "demoted" if this process made it plain TCP. Empty in other states.
     */
    char reason[24];
    /**
     * SLIM_TABLE_FLOW_...
     */
    uint32_t state;
    /**
     * 1 if the program has closed it, and its bytes are still being delivered.
     */
    uint32_t closed;
    /**
     * Number of the connection in use; 0 is the program's own.
     */
    uint64_t epoch;
    /**
     * How often it was resumed.
     */
    uint64_t resumes;
} slim_table_flow;

/**
 * An escalation: a flow that was given up. Texts end with a zero byte.
 */
typedef struct slim_table_escalation {
    /**
     * Number of the escalation in this process, counted from 1.
     */
    uint64_t seq;
    /**
     * When: nanoseconds since 1970, UTC.
     */
    uint64_t time_ns;
    /**
     * The flow's name.
     */
    char flow[40];
    /**
     * Our address and port.
     */
    char sock[64];
    /**
     * The peer's address and port.
     */
    char peer[64];
    /**
     * Name of the peer process; empty if it is not known.
     */
    char process[40];
    /**
     * Why the flow was suspended: the word of the event log.
     */
    char cause[24];
    /**
     * Why it could not be resumed: the word of the event log.
     */
    char reason[24];
    /**
     * The peer's process id on its host; 0 if it is not known.
     */
    uint32_t pid;
    /**
     * SLIM_TABLE_EVIDENCE_...
     */
    uint32_t evidence;
    /**
     * Attempts to resume that were begun.
     */
    uint32_t attempts;
    /**
     * The error that the program gets (an error number); 0 for an end of stream.
     */
    int error;
} slim_table_escalation;

/**
 * The functions of the table. Later versions of the library add members at the end: before a member beyond `descriptor` is used, `size`
 * must be compared.
 */
typedef struct slim_table_calls {
    /**
     * SLIM_TABLE_VERSION of the library.
     */
    uint32_t version;
    /**
     * Size of this structure in bytes, in the library.
     */
    uint32_t size;
    /**
     * Whether SLIM works in this process: SLIM_TABLE_ON or SLIM_TABLE_OFF.
     */
    int (*state)(void);
    /**
     * Stores the peers: see above.
     */
    int (*peers)(struct slim_table_peer *at, size_t capacity, size_t size);
    /**
     * Stores the flows that have a session, or may get one; and then the last 64 that have none any more, because they were given up or
     * became plain TCP. A connection that SLIM has released is not watched: it may be closed by now.
     */
    int (*flows)(struct slim_table_flow *at, size_t capacity, size_t size);
    /**
     * Stores the last escalations, the newest first, at most 64.
     */
    int (*escalations)(struct slim_table_escalation *at, size_t capacity, size_t size);
    /**
     * Returns a new descriptor, which becomes readable with each escalation from now on; or a negative error number (-EMFILE: too many).
     * The caller reads it empty (it does not block) before it asks for escalations, and closes it.
     */
    int (*descriptor)(void);
} slim_table_calls;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the table of this process. Never NULL, and always the same; it is valid until the process ends. Any thread, but no signal
 * handler. A program that does not link the library finds the function by dlsym(RTLD_DEFAULT, "slim_table"), which returns NULL if the
 * process has no SLIM.
 */
const struct slim_table_calls *slim_table(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SLIM_TABLE_H */
