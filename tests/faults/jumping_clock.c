/* A time of day that jumps while processes run: preloaded into each of them (places.py). The file FAULTS_CLOCK holds
 * how many seconds it is ahead, and is read anew at every call. Clocks that do not jump stay as they are; whoever
 * waits for a time of day wakes when it has come by the clock that jumps, as the kernel would have it. Times of files
 * are the machine's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define LOOKS_AGAIN (SECOND / 5) /* the most that a wait takes to see a jump */

static const volatile int64_t *ahead;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("FAULTS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        ahead = found;
}

#define REAL(name)                                                                                                     \
    static __typeof__(name) *real;                                                                                     \
    if (!real)                                                                                                         \
        real = dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int failed = real(clock, now);
    if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (where)
        *where = found.tv_sec;
    return found.tv_sec;
}

/* Makes of a time by the clock that jumps one by the kernel's, at most LOOKS_AGAIN ahead; whether that is all. */
static int come(const struct timespec *asked, struct timespec *until) {
    clock_gettime(CLOCK_REALTIME, until);
    int64_t left = (asked->tv_sec - until->tv_sec) * SECOND + asked->tv_nsec - until->tv_nsec;
    int64_t waits = left < 0 ? 0 : left < LOOKS_AGAIN ? left : LOOKS_AGAIN;
    int64_t at = until->tv_nsec + waits;
    until->tv_sec += at / SECOND - (ahead ? *ahead : 0);
    until->tv_nsec = at % SECOND;
    return left <= LOOKS_AGAIN;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict asked) {
    REAL(pthread_cond_timedwait);
    struct timespec until;
    if (cond->__data.__wrefs & 2) /* made for the clock that does not jump: nptl/pthread_cond_common.c */
        return real(cond, mutex, asked);
    for (;;) {
        int all = come(asked, &until);
        int result = real(cond, mutex, &until);
        if (result != ETIMEDOUT || all)
            return result;
    }
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict asked) {
    REAL(sem_timedwait);
    struct timespec until;
    for (;;) {
        int all = come(asked, &until);
        int result = real(semaphore, &until);
        if (!result || errno != ETIMEDOUT || all)
            return result;
    }
}

long syscall(long number, ...) {
    REAL(syscall);
    va_list given;
    va_start(given, number);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long), d = va_arg(given, long),
         e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    if (number != SYS_futex || !(b & FUTEX_CLOCK_REALTIME) || !d)
        return real(number, a, b, c, d, e, f);
    struct timespec until;
    for (;;) {
        int all = come((const struct timespec *)d, &until);
        long result = real(number, a, b, c, (long)&until, e, f);
        if (!result || errno != ETIMEDOUT || all)
            return result;
    }
}
