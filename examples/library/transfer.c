/* Sends a file. The sender posts the mapped file, so that no byte is copied outside of the kernel. The receiver writes it, and answers with
 * the length and a checksum, which the sender compares.
 *
 * usage: transfer receive ADDRESS PORT FILE       prints the port
 *        transfer send ADDRESS PORT FILE
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <slim.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

#define LIMIT_MS 60000
#define PIECE (1 << 20)
#define AHEAD 16 /* pieces that are posted and not completed */

struct summary {
    uint64_t length, sum;
};

static int check(int code, const char *what)
{
    if (code < 0) {
        perror(what);
        fprintf(stderr, "%s: %s %s\n", what, slim_strerror(code), slim_error_detail());
        exit(1);
    }
    return code;
}

/* FNV-1a with 64 bits, over words of 8 bytes; the last one is filled up with zeros. */
static void add(struct summary *all, const unsigned char *data, size_t len)
{
    uint64_t sum = all->sum;
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, len - i < 8 ? len - i : 8);
        sum = (sum ^ word) * 0x100000001b3;
        sum ^= sum >> 29;
    }
    all->sum = sum;
    all->length += len;
}

static void send_file(slim_session *session, slim_flow *flow, const char *path)
{
    int fd = open(path, O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) {
        perror(path);
        exit(1);
    }
    size_t size = (size_t)st.st_size, at = 0;
    unsigned char *file = NULL;
    if (size > 0) {
        file = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (file == MAP_FAILED) {
            perror(path);
            exit(1);
        }
    }
    struct summary mine = {0, 0};
    int open_posts = 0;
    while (at < size || open_posts > 0) {
        if (at < size && open_posts < AHEAD) {
            size_t len = size - at < PIECE ? size - at : PIECE;
            check(slim_flow_post(flow, file + at, len, file + at), "post");
            add(&mine, file + at, len);
            at += len;
            open_posts++;
        }
        slim_update updates[32];
        int wait = at < size && open_posts < AHEAD ? 0 : LIMIT_MS;
        int n = check(slim_session_wait(session, updates, 32, wait), "wait");
        if (n == 0 && wait > 0) {
            fprintf(stderr, "stuck at %zu\n", at);
            exit(1);
        }
        for (int i = 0; i < n; i++) {
            if (updates[i].what == SLIM_UPDATE_POST) {
                check(updates[i].status, "completion");
                open_posts--;
            }
        }
    }
    check(slim_flow_finish(flow), "finish");
    struct summary theirs;
    check(slim_flow_recv_all(flow, &theirs, sizeof theirs, LIMIT_MS, NULL), "receive");
    if (memcmp(&theirs, &mine, sizeof mine) != 0) {
        fprintf(stderr, "the receiver has other bytes\n");
        exit(1);
    }
    printf("%llu bytes, checksum %016llx\n", (unsigned long long)mine.length,
           (unsigned long long)mine.sum);
    if (file)
        munmap(file, size);
    close(fd);
}

static void receive_file(slim_flow *flow, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    unsigned char *buf = malloc(PIECE);
    if (fd < 0 || !buf) {
        perror(path);
        exit(1);
    }
    struct summary all = {0, 0};
    size_t n;
    do {
        /* Full pieces, so that both ends see the same words. */
        int code = slim_flow_recv_all(flow, buf, PIECE, LIMIT_MS, &n);
        if (code != SLIM_ERR_ENDED)
            check(code, "receive");
        add(&all, buf, n);
        for (size_t done = 0; done < n;) {
            ssize_t written = write(fd, buf + done, n - done);
            if (written < 0) {
                perror(path);
                exit(1);
            }
            done += (size_t)written;
        }
    } while (n == PIECE);
    check(slim_flow_send_all(flow, &all, sizeof all, LIMIT_MS, NULL), "answer");
    free(buf);
    if (close(fd) < 0) {
        perror(path);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    int sends = argc == 5 && strcmp(argv[1], "send") == 0;
    struct sockaddr_in addr = {.sin_family = AF_INET};
    if (argc != 5 || (!sends && strcmp(argv[1], "receive") != 0) ||
        inet_pton(AF_INET, argv[2], &addr.sin_addr) != 1) {
        fprintf(stderr, "usage: %s send|receive ADDRESS PORT FILE\n", argv[0]);
        return 2;
    }
    addr.sin_port = htons((uint16_t)atoi(argv[3]));

    slim_options options = SLIM_OPTIONS_INIT;
    options.job = "transfer";
    options.settings = (const char *const *)environ;
    slim_session *session;
    check(slim_session_open(&options, &session), "open");
    slim_flow *flow;
    struct sockaddr *at = (struct sockaddr *)&addr;
    if (sends) {
        check(slim_connect(session, at, sizeof addr, LIMIT_MS, &flow), "connect");
        send_file(session, flow, argv[4]);
    } else {
        slim_endpoint *endpoint;
        check(slim_listen(session, at, sizeof addr, &endpoint), "listen");
        socklen_t len = sizeof addr;
        check(slim_endpoint_address(endpoint, at, &len), "address");
        printf("%d\n", ntohs(addr.sin_port));
        fflush(stdout);
        check(slim_accept(endpoint, LIMIT_MS, &flow), "accept");
        slim_endpoint_close(endpoint);
        receive_file(flow, argv[4]);
    }
    slim_stats stats;
    check(slim_flow_stats(flow, &stats, sizeof stats), "stats");
    fprintf(stderr, "resumes: %llu\n", (unsigned long long)stats.resumes);
    slim_flow_close(flow);
    check(slim_session_close(session, LIMIT_MS), "close");
    return 0;
}
