/* A preloaded library that moves the wall clock of a process, holds its resolver and delays its disk, as a shared file
 * says. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    volatile long clock_offset_s;
    volatile long holds_names;
    volatile long disk_delay_us;
};

static struct faults *shared;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BATON_TEST_FAULTS");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *memory = mmap(NULL, sizeof(struct faults), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    shared = memory == MAP_FAILED ? NULL : memory;
}

static long offset_s(void) {
    return shared == NULL ? 0 : shared->clock_offset_s;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset_s();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0)
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now != NULL)
        *now = exact.tv_sec;
    return exact.tv_sec;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    static int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    if (real == NULL)
        real = (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(RTLD_NEXT, "getaddrinfo");
    while (shared != NULL && shared->holds_names && node != NULL && strcmp(node, "localhost") == 0)
        usleep(10000);
    return real(node, service, hints, found);
}

static void delay_disk(void) {
    if (shared != NULL && shared->disk_delay_us > 0)
        usleep((useconds_t)shared->disk_delay_us);
}

/* Reads and writes at an offset: those of a file tier. Python calls the functions with flags where they exist. */
#define DELAYED(name)                                                                                                  \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {                           \
        static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);                                         \
        if (real == NULL)                                                                                              \
            real = (ssize_t (*)(int, const struct iovec *, int, off64_t, int))dlsym(RTLD_NEXT, #name);                 \
        delay_disk();                                                                                                  \
        return real(fd, parts, count, offset, flags);                                                                  \
    }

DELAYED(preadv64v2)
DELAYED(pwritev64v2)
