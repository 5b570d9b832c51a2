/*
 * slim_framed: the framing layer that SLIM avoids, for comparison in `slim bench`. Not for any other use.
 *
 *   cc -O2 -shared -fPIC -o libslim_framed.so slim_framed.c
 *   LD_PRELOAD=./libslim_framed.so program        (both ends of every connection need it)
 *
 * The other way to make a stream survive its connection is to number the bytes in user space, as Eternal
 * Terminal does. Every write becomes a frame with a sequence number; a copy stays in a buffer until the
 * peer acknowledges it with a frame of its own; and every read parses frames. This is the cheapest
 * form of that which we know: in the process itself, without a relay or a thread, with one system
 * call for a write and two for a read (the header, then its payload; the next header is read together
 * with a payload that has arrived completely), and with an acknowledgement for every 64 KiB. It has the
 * cost of such a layer while nothing fails, and nothing else: it does not resume.
 *
 * A frame: kind and length (32 bits each), number of the first byte (64 bits), payload. The
 * receiver compares the number with its own count, and aborts the program when they differ.
 *
 * At most one header is read ahead of what the program has asked for, and its payload is still in the
 * kernel, so poll, select and epoll work unchanged. Not covered: dup of a connection, MSG_PEEK, sendfile,
 * FIONREAD. SLIM_FRAMED_LOG=FILE (with %p for the process id): file to which the numbers of frames sent
 * and received are written at the end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DATA = 0x64617461, ACK = 0x61636b21 };
enum { FLOWS = 1 << 16, PIECES = 64, ACK_EVERY = 64 * 1024, MOST = 1 << 30 };
enum { BACKUP_FIRST = 256 * 1024, BACKUP_MOST = 64 * 1024 * 1024 };

struct header {
    uint32_t kind, length;
    uint64_t number;
};

struct flow {
    atomic_int framed;
    pthread_mutex_t sending, receiving;
    /* Sending: bytes sent, bytes that the peer has acknowledged, rest of the current frame, rest of its header. */
    uint64_t sent, acknowledged;
    size_t frame_left, header_left;
    struct header out;
    char *backup;
    size_t backup_size;
    /* Receiving: bytes given to the program, bytes acknowledged, rest of the current frame, bytes of the next header. */
    uint64_t received, told;
    size_t payload_left, header_got;
    struct header in;
};

static struct flow *_Atomic flows[FLOWS];
static atomic_ulong frames_sent, frames_received;

/* The function of libc that ours replaces. */
#define REAL(name) \
    ({ \
        static __typeof__(&name) real; \
        if (!real) \
            real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        real; \
    })

static struct flow *flow_of(int fd)
{
    if (fd < 0 || fd >= FLOWS)
        return NULL;
    struct flow *flow = atomic_load_explicit(&flows[fd], memory_order_acquire);
    return flow && atomic_load_explicit(&flow->framed, memory_order_acquire) ? flow : NULL;
}

static void frame(int fd)
{
    int protocol = 0;
    socklen_t size = sizeof protocol;
    if (fd < 0 || fd >= FLOWS || flow_of(fd)
        || getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) != 0 || protocol != IPPROTO_TCP)
        return;
    struct flow *flow = atomic_load(&flows[fd]);
    if (!flow) {
        flow = calloc(1, sizeof *flow);
        if (!flow)
            abort();
        pthread_mutex_init(&flow->sending, NULL);
        pthread_mutex_init(&flow->receiving, NULL);
        atomic_store(&flows[fd], flow);
    }
    flow->sent = flow->acknowledged = flow->received = flow->told = 0;
    flow->frame_left = flow->header_left = flow->payload_left = flow->header_got = 0;
    atomic_store(&flow->framed, 1);
}

static void unframe(int fd)
{
    struct flow *flow = flow_of(fd);
    if (!flow)
        return;
    atomic_store(&flow->framed, 0);
    free(flow->backup);
    flow->backup = NULL;
    flow->backup_size = 0;
}

/* Appends `limit` bytes of `from` at most to the `have` pieces of `to`; returns the new number of pieces. */
static size_t gather(struct iovec *to, size_t have, const struct iovec *from, size_t count,
                     size_t limit)
{
    for (size_t i = 0; i < count && limit > 0 && have < PIECES; i++) {
        size_t length = from[i].iov_len < limit ? from[i].iov_len : limit;
        if (length > 0)
            to[have++] = (struct iovec){ from[i].iov_base, length };
        limit -= length;
    }
    return have;
}

static size_t length_of(const struct iovec *pieces, size_t count)
{
    size_t length = 0;
    for (size_t i = 0; i < count; i++)
        length += pieces[i].iov_len;
    return length < MOST ? length : MOST;
}

/* Makes room for `more` bytes; when the largest buffer is full, the oldest bytes are dropped. */
static void make_room(struct flow *flow, size_t more)
{
    size_t held = flow->sent - flow->acknowledged, size = flow->backup_size;
    if (held + more <= size)
        return;
    size = size ? size : BACKUP_FIRST;
    while (size < held + more && size < BACKUP_MOST)
        size *= 2;
    if (size > flow->backup_size) {
        char *larger = malloc(size);
        if (!larger)
            abort();
        for (uint64_t at = flow->acknowledged; at < flow->sent;) {
            size_t from = at % flow->backup_size, to = at % size, n = flow->sent - at;
            if (n > flow->backup_size - from)
                n = flow->backup_size - from;
            if (n > size - to)
                n = size - to;
            memcpy(larger + to, flow->backup + from, n);
            at += n;
        }
        free(flow->backup);
        flow->backup = larger;
        flow->backup_size = size;
    }
    if (held + more > size)
        flow->acknowledged = flow->sent + more - size;
}

static void keep(struct flow *flow, const struct iovec *pieces, size_t bytes)
{
    for (; bytes > 0; pieces++) {
        const char *from = pieces->iov_base;
        size_t left = pieces->iov_len < bytes ? pieces->iov_len : bytes;
        bytes -= left;
        while (left > 0) {
            size_t n = left < BACKUP_FIRST ? left : BACKUP_FIRST;
            make_room(flow, n);
            size_t at = flow->sent % flow->backup_size;
            if (n > flow->backup_size - at)
                n = flow->backup_size - at;
            memcpy(flow->backup + at, from, n);
            flow->sent += n;
            from += n;
            left -= n;
        }
    }
}

static ssize_t put(int fd, struct iovec *pieces, size_t count, int flags)
{
    struct msghdr message = { .msg_iov = pieces, .msg_iovlen = count };
    return REAL(sendmsg)(fd, &message, flags);
}

/* Sends the rest of a header that the kernel did not take completely. */
static ssize_t put_header(struct flow *flow, int fd, int flags)
{
    while (flow->header_left > 0) {
        char *rest = (char *)(&flow->out + 1) - flow->header_left;
        struct iovec piece = { rest, flow->header_left };
        ssize_t n = put(fd, &piece, 1, flags);
        if (n < 0)
            return -1;
        flow->header_left -= (size_t)n;
    }
    return 0;
}

static ssize_t send_framed(struct flow *flow, int fd, const struct iovec *pieces, size_t count,
                           int flags)
{
    struct iovec out[PIECES + 1];
    size_t total = length_of(pieces, count);
    ssize_t taken = -1;
    if (flags & (MSG_OOB | MSG_FASTOPEN)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (total == 0)
        return 0;
    pthread_mutex_lock(&flow->sending);
    if (put_header(flow, fd, flags) != 0)
        goto end;
    if (flow->frame_left == 0) {
        size_t used = gather(out, 1, pieces, count, total);
        total = length_of(out + 1, used - 1);
        flow->out = (struct header){ DATA, (uint32_t)total, flow->sent };
        out[0] = (struct iovec){ &flow->out, sizeof flow->out };
        ssize_t n = put(fd, out, used, flags);
        if (n < 0)
            goto end;
        atomic_fetch_add_explicit(&frames_sent, 1, memory_order_relaxed);
        flow->frame_left = total;
        if ((size_t)n > sizeof flow->out) {
            taken = n - (ssize_t)sizeof flow->out;
        } else {
            flow->header_left = sizeof flow->out - (size_t)n;
            if (put_header(flow, fd, flags) != 0)
                goto end;
        }
    }
    if (taken < 0) {
        size_t used = gather(out, 0, pieces, count, flow->frame_left);
        taken = put(fd, out, used, flags);
    }
    if (taken > 0) {
        keep(flow, pieces, (size_t)taken);
        flow->frame_left -= (size_t)taken;
    }
end:
    pthread_mutex_unlock(&flow->sending);
    return taken;
}

/* Tells the peer how much has arrived. While a frame is being sent that is left to a later call. */
static void acknowledge(struct flow *flow, int fd)
{
    int error = errno;
    if (pthread_mutex_trylock(&flow->sending) != 0)
        return;
    if (flow->frame_left == 0 && flow->header_left == 0) {
        flow->out = (struct header){ ACK, 0, flow->received };
        struct iovec piece = { &flow->out, sizeof flow->out };
        ssize_t n = put(fd, &piece, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            flow->header_left = sizeof flow->out - (size_t)n;
            flow->told = flow->received;
        }
    }
    pthread_mutex_unlock(&flow->sending);
    errno = error;
}

/* Acts on a complete header. */
static void take_header(struct flow *flow)
{
    flow->header_got = 0;
    if (flow->in.kind == ACK) {
        pthread_mutex_lock(&flow->sending);
        if (flow->in.number > flow->acknowledged)
            flow->acknowledged = flow->in.number;
        pthread_mutex_unlock(&flow->sending);
        return;
    }
    if (flow->in.kind != DATA || flow->in.number != flow->received || flow->in.length == 0) {
        static const char wrong[] = "slim_framed: a frame that does not follow the last one\n";
        (void)!REAL(write)(2, wrong, sizeof wrong - 1);
        abort();
    }
    flow->payload_left = flow->in.length;
    atomic_fetch_add_explicit(&frames_received, 1, memory_order_relaxed);
}

static ssize_t receive_framed(struct flow *flow, int fd, const struct iovec *pieces, size_t count,
                              int flags)
{
    struct iovec in[PIECES + 1];
    ssize_t n;
    if (flags & (MSG_PEEK | MSG_OOB | MSG_TRUNC | MSG_ERRQUEUE)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (length_of(pieces, count) == 0)
        return 0;
    pthread_mutex_lock(&flow->receiving);
    while (flow->payload_left == 0) {
        if (flow->header_got < sizeof flow->in) {
            n = REAL(recv)(fd, (char *)&flow->in + flow->header_got,
                           sizeof flow->in - flow->header_got, flags & MSG_DONTWAIT);
            if (n <= 0)
                goto end;
            flow->header_got += (size_t)n;
        }
        if (flow->header_got == sizeof flow->in)
            take_header(flow);
    }
    size_t used = gather(in, 0, pieces, count, flow->payload_left);
    size_t wanted = length_of(in, used);
    if (wanted == flow->payload_left)
        in[used++] = (struct iovec){ &flow->in, sizeof flow->in };
    struct msghdr message = { .msg_iov = in, .msg_iovlen = used };
    n = REAL(recvmsg)(fd, &message, flags & MSG_DONTWAIT);
    if (n <= 0)
        goto end;
    if ((size_t)n > wanted) {
        flow->header_got = (size_t)n - wanted;
        n = (ssize_t)wanted;
    }
    flow->payload_left -= (size_t)n;
    flow->received += (size_t)n;
    if (flow->header_got == sizeof flow->in && flow->in.kind == ACK)
        take_header(flow);
    if (flow->received - flow->told >= ACK_EVERY)
        acknowledge(flow, fd);
end:
    pthread_mutex_unlock(&flow->receiving);
    return n;
}

/* Receives into one piece; fills it with MSG_WAITALL. */
static ssize_t receive_piece(struct flow *flow, int fd, void *buffer, size_t size, int flags)
{
    size_t got = 0;
    for (;;) {
        struct iovec piece = { (char *)buffer + got, size - got };
        ssize_t n = receive_framed(flow, fd, &piece, 1, flags);
        if (n <= 0)
            return got > 0 ? (ssize_t)got : n;
        got += (size_t)n;
        if (!(flags & MSG_WAITALL) || got == size)
            return (ssize_t)got;
    }
}

/* The functions that replace those of libc. */

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    frame(fd);
    return REAL(connect)(fd, address, size);
}

/* A new number must not inherit the state of its last connection, in whatever way that was closed. */
static int framed(int fd)
{
    unframe(fd);
    frame(fd);
    return fd;
}

int socket(int domain, int type, int protocol)
{
    int fd = REAL(socket)(domain, type, protocol);
    unframe(fd);
    return fd;
}

int accept(int from, struct sockaddr *address, socklen_t *size)
{
    return framed(REAL(accept)(from, address, size));
}

int accept4(int from, struct sockaddr *address, socklen_t *size, int flags)
{
    return framed(REAL(accept4)(from, address, size, flags));
}

int close(int fd)
{
    unframe(fd);
    return REAL(close)(fd);
}

int dup2(int from, int to)
{
    if (from != to)
        unframe(to);
    return REAL(dup2)(from, to);
}

int dup3(int from, int to, int flags)
{
    unframe(to);
    return REAL(dup3)(from, to, flags);
}

ssize_t write(int fd, const void *buffer, size_t size)
{
    struct flow *flow = flow_of(fd);
    struct iovec piece = { (void *)buffer, size };
    return flow ? send_framed(flow, fd, &piece, 1, 0) : REAL(write)(fd, buffer, size);
}

ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    struct flow *flow = flow_of(fd);
    return flow ? send_framed(flow, fd, pieces, (size_t)count, 0) : REAL(writev)(fd, pieces, count);
}

ssize_t send(int fd, const void *buffer, size_t size, int flags)
{
    struct flow *flow = flow_of(fd);
    struct iovec piece = { (void *)buffer, size };
    return flow ? send_framed(flow, fd, &piece, 1, flags) : REAL(send)(fd, buffer, size, flags);
}

ssize_t sendto(int fd, const void *buffer, size_t size, int flags, const struct sockaddr *address,
               socklen_t length)
{
    struct flow *flow = flow_of(fd);
    struct iovec piece = { (void *)buffer, size };
    return flow ? send_framed(flow, fd, &piece, 1, flags)
                : REAL(sendto)(fd, buffer, size, flags, address, length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct flow *flow = flow_of(fd);
    return flow ? send_framed(flow, fd, message->msg_iov, message->msg_iovlen, flags)
                : REAL(sendmsg)(fd, message, flags);
}

ssize_t read(int fd, void *buffer, size_t size)
{
    struct flow *flow = flow_of(fd);
    return flow ? receive_piece(flow, fd, buffer, size, 0) : REAL(read)(fd, buffer, size);
}

ssize_t readv(int fd, const struct iovec *pieces, int count)
{
    struct flow *flow = flow_of(fd);
    return flow ? receive_framed(flow, fd, pieces, (size_t)count, 0) : REAL(readv)(fd, pieces, count);
}

ssize_t recv(int fd, void *buffer, size_t size, int flags)
{
    struct flow *flow = flow_of(fd);
    return flow ? receive_piece(flow, fd, buffer, size, flags) : REAL(recv)(fd, buffer, size, flags);
}

ssize_t recvfrom(int fd, void *buffer, size_t size, int flags, struct sockaddr *address,
                 socklen_t *length)
{
    struct flow *flow = flow_of(fd);
    if (!flow)
        return REAL(recvfrom)(fd, buffer, size, flags, address, length);
    if (length)
        *length = 0;
    return receive_piece(flow, fd, buffer, size, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    struct flow *flow = flow_of(fd);
    if (!flow)
        return REAL(recvmsg)(fd, message, flags);
    message->msg_controllen = message->msg_namelen = 0;
    message->msg_flags = 0;
    return receive_framed(flow, fd, message->msg_iov, message->msg_iovlen, flags);
}

/* The names of `read` and `recv` in programs that were built with _FORTIFY_SOURCE. */
ssize_t __read_chk(int fd, void *buffer, size_t size, size_t room)
{
    return size <= room ? read(fd, buffer, size) : (abort(), -1);
}

ssize_t __recv_chk(int fd, void *buffer, size_t size, size_t room, int flags)
{
    return size <= room ? recv(fd, buffer, size, flags) : (abort(), -1);
}

__attribute__((destructor)) static void write_log(void)
{
    const char *name = getenv("SLIM_FRAMED_LOG"), *mark = name ? strstr(name, "%p") : NULL;
    char path[4096];
    if (!mark || atomic_load(&frames_sent) + atomic_load(&frames_received) == 0)
        return;
    snprintf(path, sizeof path, "%.*s%d%s", (int)(mark - name), name, getpid(), mark + 2);
    FILE *log = fopen(path, "w");
    if (log) {
        fprintf(log, "{\"sent\":%lu,\"received\":%lu}\n", atomic_load(&frames_sent),
                atomic_load(&frames_received));
        fclose(log);
    }
}
