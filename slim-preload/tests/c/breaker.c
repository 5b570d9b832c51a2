// Destroys all connections of its network namespace again and again. Arguments: how many to destroy in all, and the
// milliseconds between two rounds.
#include "t.h"

int main(int argc, char **argv) {
    begin(600);
    if (argc < 3) return 94;
    int want = atoi(argv[1]), destroyed = 0;
    for (double since = now_s(); destroyed < want && now_s() < since + 300;) {
        int n = break_connections();
        if (n < 0) {
            line("cannot break connections: %s", ename(errno));
            return 1;
        }
        destroyed += n;
        ms(atoi(argv[2]));
    }
    line("destroyed %d", destroyed);
    return destroyed < want;
}
