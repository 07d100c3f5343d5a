/* Counts the bytes that are allocated, and their peak: what `memory_versions.py` preloads (LD_PRELOAD).
 *
 * Resident memory also holds what malloc keeps after free(), which depends on the order and addresses of
 * earlier allocations: equal code came out 2 bytes per parameter apart. Bytes in use do not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

/* Smaller blocks are Python's and the interpreter's caches; gradients, codes and indices are larger. */
enum { SMALLEST = 32768 };

static _Atomic long live, peak;

static void *counted(void *block) {
    long size = malloc_usable_size(block); /* 0 for NULL */
    if (size >= SMALLEST) {
        long now = atomic_fetch_add(&live, size) + size, most = atomic_load(&peak);
        while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {}
    }
    return block;
}

static void discounted(void *block) {
    long size = malloc_usable_size(block);
    if (size >= SMALLEST) atomic_fetch_sub(&live, size);
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t to, size_t size) { return counted(__libc_memalign(to, size)); }
void *aligned_alloc(size_t to, size_t size) { return counted(__libc_memalign(to, size)); }

int posix_memalign(void **out, size_t to, size_t size) {
    void *block = counted(__libc_memalign(to, size));
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

void *realloc(void *old, size_t size) {
    discounted(old);
    void *block = counted(__libc_realloc(old, size));
    if (!block && size) counted(old); /* it failed, so the old block is still there */
    return block;
}

void free(void *block) {
    int kept = errno; /* free() must not change it */
    discounted(block);
    __libc_free(block);
    errno = kept;
}

/* Return the peak since the last call of `restart`, above what was allocated then. */
static long begin;
void live_bytes_restart(void) { begin = live; peak = begin; }
long live_bytes_grown(void) { return peak - begin; }
