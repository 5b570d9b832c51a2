// In a process that makes no connection the library sets nothing up: no registration for membarrier, for example.
#include "t.h"
#include <linux/membarrier.h>
#include <sys/syscall.h>

int main(void) {
    begin(20);
    R(syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
    int u = MUST(socket(AF_UNIX, SOCK_STREAM, 0)), d = MUST(socket(AF_INET, SOCK_DGRAM, 0)), e = MUST(epoll_create1(0));
    struct epoll_event ev = {.events = EPOLLIN};
    R(epoll_ctl(e, EPOLL_CTL_ADD, d, &ev));
    R(syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
    R(close(u));
    return 0;
}
