// Two threads use one connection, in a program that is built with the thread sanitizer.
#include "t.h"

static struct conn x;

static void *sends(void *a) {
    char b[100];
    memset(b, 7, sizeof b);
    for (int i = 0; i < 20000; i++) MUST(full_send(x.c, b, sizeof b));
    return a;
}

static void *receives(void *a) {
    char b[100];
    long n = 0;
    while (n < 2000000) n += MUST(recv(x.s, b, sizeof b, 0));
    line("received %ld", n);
    return a;
}

int main(void) {
    begin(60);
    x = connection();
    pthread_t t[2];
    for (int round = 0; round < 2; round++) {
        pthread_create(&t[0], NULL, sends, NULL);
        pthread_create(&t[1], NULL, receives, NULL);
        for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    }
    hang_up(x);
    return 0;
}
