// Ways to end a connection, and what the peer sees of each. Two programs.
#include "t.h"

static char buf[1 << 20];

static void see(int fd) {
    line("poll %s", bits(wait_for(fd, POLLIN | POLLOUT | POLLRDHUP, 0)));
}

static void so_error(int fd) {
    int e = -1;
    socklen_t n = sizeof e;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n);
    line("SO_ERROR %s", e ? ename(e) : "0");
}

static void linger(int fd, int on, int seconds) {
    struct linger lg = {on, seconds};
    MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &lg, sizeof lg));
}

int main(int argc, char **argv) {
    begin_pair(argc, argv, 60);
    int l = -1, fd;
    // The client ends the connections in the first turn, the server in the second.
    for (int turn = 0; turn < 2; turn++) {
        int me = is_server() == turn;
        line("==== %s", me ? "I act" : "I watch");

        line("-- close");
        fd = pair_up(&l);
        if (me) {
            MUST(send(fd, "last words", 10, 0));
            R(close(fd));
            meet();
            meet();
        } else {
            meet();
            arrived(fd, 10);
            wait_for(fd, POLLRDHUP, 2000);
            see(fd);
            R(recv(fd, buf, 4, 0));
            R(recv(fd, buf, 40, 0));
            R(recv(fd, buf, 40, 0));
            R(recv(fd, buf, 40, 0));
            see(fd);
            R(send(fd, "x", 1, 0));
            wait_for(fd, POLLHUP, 2000);
            see(fd);
            R(send(fd, "x", 1, 0));
            line("SIGPIPE %d", pipes());
            R(write(fd, "x", 1));
            line("SIGPIPE %d", pipes());
            R(send(fd, "x", 1, MSG_NOSIGNAL));
            struct iovec v = {"v", 1};
            R(writev(fd, &v, 1));
            struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
            R(sendmsg(fd, &m, 0));
            line("SIGPIPE %d", pipes());
            R(recv(fd, buf, 1, 0));
            so_error(fd);
            R(shutdown(fd, SHUT_RDWR));
            R(close(fd));
            meet();
        }

        line("-- shutdown(SHUT_WR), the other direction goes on");
        fd = pair_up(&l);
        if (me) {
            MUST(send(fd, "question", 8, 0));
            R(shutdown(fd, SHUT_WR));
            R(shutdown(fd, SHUT_WR));
            R(send(fd, "x", 1, 0));
            R(write(fd, "x", 1));
            R(send(fd, "", 0, 0));
            line("SIGPIPE %d", pipes());
            R(full_recv(fd, buf, 1000));
            see(fd);
            R(recv(fd, buf, 1, 0));
            R(shutdown(fd, SHUT_RDWR));
            R(close(fd));
        } else {
            memset(buf, 0, 100);
            R(full_recv(fd, buf, 1000));
            quote(buf, 8);
            see(fd);
            R(recv(fd, buf, 1, 0));
            for (int i = 0; i < 10; i++) MUST(send(fd, "answer ", 7, 0));
            ms(20);
            R(send(fd, "the end", 7, 0));
            R(close(fd));
        }
        meet();

        line("-- shutdown(SHUT_RD)");
        fd = pair_up(&l);
        if (me) {
            arrived(fd, 5);
            R(shutdown(fd, SHUT_RD));
            R(recv(fd, buf, 9, 0));
            R(recv(fd, buf, 9, 0));
            see(fd);
            meet();
            meet();
            R(recv(fd, buf, 9, 0));
            R(recv(fd, buf, 9, 0));
            R(send(fd, "still", 5, 0));
            R(shutdown(fd, 3));
            R(shutdown(fd, -1));
            R(close(fd));
        } else {
            MUST(send(fd, "first", 5, 0));
            meet();
            R(send(fd, "second", 6, 0));
            acked(fd);
            meet();
            R(full_recv(fd, buf, 9));
            R(close(fd));
        }
        meet();

        line("-- shutdown(SHUT_RDWR)");
        fd = pair_up(&l);
        if (me) {
            MUST(send(fd, "bye", 3, 0));
            R(shutdown(fd, SHUT_RDWR));
            R(recv(fd, buf, 9, 0));
            R(send(fd, "x", 1, 0));
            line("SIGPIPE %d", pipes());
            see(fd);
            meet();
            R(close(fd));
        } else {
            R(full_recv(fd, buf, 9));
            see(fd);
            meet();
            R(close(fd));
        }
        meet();

        // A socket that has shut both directions refuses further data.
        const int shuts[][2] = {{SHUT_RDWR, -1}, {SHUT_WR, SHUT_RD}, {SHUT_RD, SHUT_WR}, {SHUT_WR, SHUT_RDWR}};
        for (unsigned k = 0; k < sizeof shuts / sizeof *shuts; k++) {
            line("-- both directions are shut, way %u, and the peer goes on sending", k);
            fd = pair_up(&l);
            if (me) {
                MUST(send(fd, "bye", 3, 0));
                for (int i = 0; i < 2 && shuts[k][i] >= 0; i++) R(shutdown(fd, shuts[k][i]));
                meet();
                meet();
                wait_for(fd, POLLERR, 2000);
                see(fd);
                R(recv(fd, buf, 9, 0));
                R(recv(fd, buf, 9, 0));
                R(send(fd, "x", 1, 0));
                line("SIGPIPE %d", pipes());
                R(close(fd));
            } else {
                meet();
                R(full_recv(fd, buf, 9));
                R(send(fd, "more", 4, 0));
                wait_for(fd, POLLHUP, 2000);
                see(fd);
                R(send(fd, "x", 1, 0));
                line("SIGPIPE %d", pipes());
                R(send(fd, "x", 1, 0));
                R(recv(fd, buf, 9, 0));
                meet();
                so_error(fd);
                R(close(fd));
            }
            meet();
        }

        line("-- close with unread bytes: the peer is reset");
        fd = pair_up(&l);
        if (me) {
            arrived(fd, 6);
            R(close(fd));
            meet();
        } else {
            MUST(send(fd, "unread", 6, 0));
            wait_for(fd, POLLHUP, 3000);
            see(fd);
            R(recv(fd, buf, 9, 0));
            R(recv(fd, buf, 9, 0));
            so_error(fd);
            R(send(fd, "x", 1, 0));
            line("SIGPIPE %d", pipes());
            see(fd);
            R(close(fd));
            meet();
        }

        line("-- the same, with bytes for the peer on the way");
        fd = pair_up(&l);
        if (me) {
            MUST(send(fd, "parting", 7, 0));
            acked(fd);
            arrived(fd, 6);
            R(close(fd));
            meet();
        } else {
            MUST(send(fd, "unread", 6, 0));
            wait_for(fd, POLLHUP, 3000);
            see(fd);
            R(recv(fd, buf, 4, 0));
            see(fd);
            R(recv(fd, buf, 9, 0));
            R(recv(fd, buf, 9, 0));
            R(recv(fd, buf, 9, 0));
            R(close(fd));
            meet();
        }

        line("-- the peer learns of a reset by sending");
        fd = pair_up(&l);
        if (me) {
            arrived(fd, 6);
            R(close(fd));
            meet();
            meet();
        } else {
            MUST(send(fd, "unread", 6, 0));
            meet();
            wait_for(fd, POLLHUP, 3000);
            R(send(fd, "x", 1, 0));
            line("SIGPIPE %d", pipes());
            R(send(fd, "x", 1, 0));
            line("SIGPIPE %d", pipes());
            R(recv(fd, buf, 1, 0));
            R(close(fd));
            meet();
        }

        line("-- SO_LINGER 0");
        fd = pair_up(&l);
        if (me) {
            linger(fd, 1, 0);
            R(close(fd));
            meet();
        } else {
            wait_for(fd, POLLHUP, 3000);
            so_error(fd);
            see(fd);
            R(recv(fd, buf, 9, 0));
            R(close(fd));
            meet();
        }

        line("-- SO_LINGER, the peer reads slowly");
        fd = pair_up(&l);
        if (me) {
            linger(fd, 1, 10);
            memset(buf, 'l', sizeof buf);
            MUST(full_send(fd, buf, 600000));
            double t0 = now_s();
            R(close(fd));
            line("before five seconds: %d", now_s() - t0 < 5);
            meet();
        } else {
            ms(150);
            R(full_recv(fd, buf, sizeof buf));
            R(close(fd));
            meet();
        }

        line("-- a thread is in recv when the peer closes, and when it resets");
        for (int k = 0; k < 2; k++) {
            fd = pair_up(&l);
            if (me) {
                ms(40);
                if (k) linger(fd, 1, 0);
                R(close(fd));
                meet();
            } else {
                R(recv(fd, buf, 9, 0));
                R(close(fd));
                meet();
            }
        }

        line("-- a thread is in send when the peer closes");
        fd = pair_up(&l);
        if (me) {
            ms(60);
            R(close(fd));
            meet();
        } else {
            long r;
            memset(buf, 's', sizeof buf);
            do r = send(fd, buf, sizeof buf, 0);
            while (r > 0);
            line("%s, SIGPIPE %d", ename(errno), pipes());
            R(send(fd, buf, 1, 0));
            line("SIGPIPE %d", pipes());
            R(close(fd));
            meet();
        }

        line("-- a process that ends without a word");
        for (int how = 0; how < 3; how++) {
            fd = pair_up(&l);
            if (me) {
                pid_t p = fork();
                if (!p) {
                    if (how == 2) arrived(fd, 4);
                    MUST(send(fd, "child", 5, 0));
                    acked(fd);
                    if (how == 0) exit(0);
                    kill(getpid(), SIGKILL);
                }
                R(close(fd));
                waitpid(p, NULL, 0);
                meet();
            } else {
                if (how == 2) MUST(send(fd, "uuuu", 4, 0));
                R(full_recv(fd, buf, 5));
                R(recv(fd, buf, 9, 0));
                R(recv(fd, buf, 9, 0));
                R(close(fd));
                meet();
            }
        }

        line("-- SIGPIPE kills a process that does not handle it");
        fd = pair_up(&l);
        if (me) {
            R(close(fd));
            meet();
            meet();
        } else {
            meet();
            wait_for(fd, POLLRDHUP, 2000);
            MUST(send(fd, "x", 1, 0));
            wait_for(fd, POLLHUP, 2000);
            send(fd, "x", 1, MSG_NOSIGNAL);
            pid_t p = fork();
            if (!p) {
                signal(SIGPIPE, SIG_DFL);
                R(send(fd, "x", 1, MSG_NOSIGNAL));
                write(fd, "x", 1);
                line("not killed");
                _exit(0);
            }
            int st;
            waitpid(p, &st, 0);
            line("child killed by %d", WIFSIGNALED(st) ? WTERMSIG(st) : 0);
            signal(SIGPIPE, SIG_IGN);
            R(write(fd, "x", 1));
            handle(SIGPIPE, t_on_pipe, SA_RESTART);
            R(close(fd));
            meet();
        }
    }
    line("number of the last descriptor %d", fd);
    return 0;
}
