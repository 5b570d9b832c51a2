// The program's malloc fails while the first connection is made.
#include "t.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static volatile int fails;

void *malloc(size_t n) { return fails ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n) { return fails ? NULL : __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) {
    *p = aligned_alloc(a, n);
    return *p ? 0 : ENOMEM;
}

int main(void) {
    begin(20);
    fails = 1;
    struct conn x = connection();
    fails = 0;
    await_negotiation();
    ping(x.c, x.s, "without memory");
    hang_up(x);
    x = connection();
    ping(x.c, x.s, "with memory");
    hang_up(x);
    return 0;
}
