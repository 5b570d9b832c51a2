// Raw system calls, which no hook sees.
#pragma once
#include <sys/syscall.h>

UNUSED static long raw6(long nr, long a, long b, long c, long d, long e, long f) {
    long r;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = nr, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    r = x0;
#else
#error "not known how this processor makes system calls"
#endif
    if (r < 0 && r > -4096) {
        errno = -r;
        return -1;
    }
    return r;
}

#define RAW_PICK(a, b, c, d, e, f, g, name, ...) name
#define raw(...) RAW_PICK(__VA_ARGS__, raw6_, raw5_, raw4_, raw3_, raw2_, raw1_, raw0_)(__VA_ARGS__)
#define raw6_(n, a, b, c, d, e, f) raw6(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define raw5_(n, a, b, c, d, e) raw6_(n, a, b, c, d, e, 0)
#define raw4_(n, a, b, c, d) raw5_(n, a, b, c, d, 0)
#define raw3_(n, a, b, c) raw4_(n, a, b, c, 0)
#define raw2_(n, a, b) raw3_(n, a, b, 0)
#define raw1_(n, a) raw2_(n, a, 0)
#define raw0_(n) raw1_(n, 0)
