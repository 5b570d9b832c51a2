/* Two threads race for a variable. ThreadSanitizer must report it. */
#include <pthread.h>
#include <slim.h>

static int counter;

static void *count(void *arg)
{
    for (int i = 0; i < 1000; i++)
        counter++;
    return arg;
}

int main(void)
{
    pthread_t one, other;
    slim_session *session;
    if (slim_session_open(NULL, &session) != 0)
        return 0;
    pthread_create(&one, NULL, count, NULL);
    pthread_create(&other, NULL, count, NULL);
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    slim_session_close(session, 10000);
    return 0;
}
