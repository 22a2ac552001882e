// A libcuda for tests on machines without a GPU: two devices of 8 GiB whose memory is shared memory of the host.
// Like the real one, it refuses to open a handle in the process that exported it, and knows one context per thread.
// Copies are done as late as they may be: when their stream is waited for.
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, SLOTS = 64 };
static const size_t MEMORY = (size_t)8 << 30;
typedef struct { unsigned char reserved[64]; } Handle;
static struct { void* at; size_t size; char name[60]; int owned; } maps[SLOTS];
static _Thread_local int current = 0;

int cuInit(unsigned flags) { return flags == 0 ? OK : INVALID_VALUE; }
int cuDeviceGetCount(int* count) { *count = 2; return OK; }
int cuDeviceGet(int* device, int index) { *device = index; return index < 2 ? OK : INVALID_DEVICE; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uintptr_t)(device + 1); return OK; }
int cuCtxSetCurrent(void* context) { current = (int)(uintptr_t)context; return OK; }

int cuGetErrorString(int code, const char** words) {
    *words = code == OUT_OF_MEMORY ? "out of memory" : "invalid argument";
    return OK;
}

static size_t used(void) {
    size_t sum = 0;
    for (int i = 0; i < SLOTS; i++) sum += maps[i].owned ? maps[i].size : 0;
    return sum;
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    *total = MEMORY;
    *free = MEMORY - used();
    return current ? OK : INVALID_CONTEXT;
}

static int map(const char* name, int flags, size_t size, uint64_t* address) {
    int fd = shm_open(name, flags, 0600), slot = 0;
    while (slot < SLOTS && maps[slot].at) slot++;
    if (fd < 0 || slot == SLOTS) return INVALID_VALUE;
    struct stat found;
    if ((flags & O_CREAT) && ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    fstat(fd, &found);
    maps[slot].at = mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    maps[slot].size = (size_t)found.st_size;
    maps[slot].owned = (flags & O_CREAT) != 0;
    snprintf(maps[slot].name, sizeof maps[slot].name, "%s", name);
    close(fd);
    *address = (uint64_t)(uintptr_t)maps[slot].at;
    return OK;
}

static int find(uint64_t address) {
    for (int i = 0; i < SLOTS; i++)
        if (maps[i].at && (uint64_t)(uintptr_t)maps[i].at == address) return i;
    return -1;
}

int cuMemAlloc_v2(uint64_t* address, size_t size) {
    static int serial = 0;
    char name[60];
    if (!current) return INVALID_CONTEXT;
    if (size == 0 || size > MEMORY - used()) return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "/baton-fake-cuda-%d-%d", (int)getpid(), serial++);
    return map(name, O_CREAT | O_EXCL | O_RDWR, size, address);
}

static int unmap(uint64_t address, int owned) {
    int slot = find(address);
    if (slot < 0 || maps[slot].owned != owned) return INVALID_VALUE;
    munmap(maps[slot].at, maps[slot].size);
    if (owned) shm_unlink(maps[slot].name);
    memset(&maps[slot], 0, sizeof maps[slot]);
    return OK;
}

int cuMemFree_v2(uint64_t address) { return unmap(address, 1); }
int cuIpcCloseMemHandle(uint64_t address) { return unmap(address, 0); }

int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
    int slot = find(address);
    if (slot < 0 || !maps[slot].owned) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, maps[slot].name, sizeof maps[slot].name);
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
    char mine[60];
    snprintf(mine, sizeof mine, "/baton-fake-cuda-%d-", (int)getpid());
    if (flags != 1 || strncmp((char*)handle.reserved, mine, strlen(mine)) == 0) return INVALID_VALUE;
    return map((char*)handle.reserved, O_RDWR, 0, address);
}

// ---- page-locked memory, streams and copies

enum { HANDLE = 400, LOCKED = 4096, COPIES = 65536 };
typedef struct { void* to; const void* from; size_t size; } Copy;
typedef struct { int used; Copy copies[COPIES]; } Stream;
static struct { char* at; size_t size; } locked[LOCKED];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cuMemHostAlloc(void** at, size_t size, unsigned flags) {
    if (!current) return INVALID_CONTEXT;
    if (flags != 1 || size == 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int slot = 0;
    while (slot < LOCKED && locked[slot].at) slot++;
    if (slot < LOCKED) {
        *at = locked[slot].at = malloc(size);
        locked[slot].size = size;
    }
    pthread_mutex_unlock(&lock);
    return slot < LOCKED ? OK : OUT_OF_MEMORY;
}

static int find_locked(const void* at, size_t size) {
    for (int i = 0; i < LOCKED; i++)
        if (locked[i].at && (char*)at >= locked[i].at && (char*)at + size <= locked[i].at + locked[i].size) return i;
    return -1;
}

int cuMemFreeHost(void* at) {
    pthread_mutex_lock(&lock);
    int slot = find_locked(at, 1);
    int fine = slot >= 0 && locked[slot].at == at;
    if (fine) {
        free(at);
        memset(&locked[slot], 0, sizeof locked[slot]);
    }
    pthread_mutex_unlock(&lock);
    return fine ? OK : INVALID_VALUE;
}

int cuStreamCreate(Stream** stream, unsigned flags) {
    if (!current) return INVALID_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    *stream = calloc(1, sizeof **stream);
    return *stream ? OK : OUT_OF_MEMORY;
}

int cuStreamDestroy_v2(Stream* stream) {
    if (!stream || stream->used) return HANDLE;
    free(stream);
    return OK;
}

int cuStreamSynchronize(Stream* stream) {
    if (!current) return INVALID_CONTEXT;
    if (!stream) return HANDLE;
    for (int i = 0; i < stream->used; i++) memcpy(stream->copies[i].to, stream->copies[i].from, stream->copies[i].size);
    stream->used = 0;
    return OK;
}

static int begin(uint64_t device, void* host, size_t size, Stream* stream, int out) {
    if (!current) return INVALID_CONTEXT;
    if (!stream || stream->used == COPIES) return HANDLE;
    int inside = 0;
    for (int i = 0; i < SLOTS; i++) {
        uint64_t at = (uint64_t)(uintptr_t)maps[i].at;
        inside |= at && device >= at && device + size <= at + maps[i].size;
    }
    pthread_mutex_lock(&lock);
    int is_locked = find_locked(host, size) >= 0;
    pthread_mutex_unlock(&lock);
    if (!inside || !is_locked) return INVALID_VALUE;
    void* there = (void*)(uintptr_t)device;
    Copy copy = {out ? host : there, out ? there : host, size};
    stream->copies[stream->used++] = copy;
    return OK;
}

int cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t size, Stream* stream) {
    return begin(device, host, size, stream, 1);
}

int cuMemcpyHtoDAsync_v2(uint64_t device, void* host, size_t size, Stream* stream) {
    return begin(device, host, size, stream, 0);
}
