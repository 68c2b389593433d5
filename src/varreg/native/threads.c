/* Threads for kernels that clang compiles without an OpenMP library: in wheels, and where only the
   compiler is installed. This file defines the few functions that clang calls for the kernels'
   pragmas: `parallel`, and `for` with a static or dynamic schedule. Code with another pragma does
   not link.

   The threads are torch's own team, if torch's OpenMP has GNU's interface (share_threads): a second
   team would compete for the processors. Otherwise they are a pool of threads that sleep between
   calls. */
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

#include "contract.h"

#ifdef _WIN32
#include <windows.h>
#define HERE
#define YIELD SwitchToThread()
#define PROCESS ((int64_t)GetCurrentProcessId())
typedef SRWLOCK Lock;
typedef CONDITION_VARIABLE Condition;
#define LOCKED SRWLOCK_INIT
#define WAITING CONDITION_VARIABLE_INIT
#define lock AcquireSRWLockExclusive
#define unlock ReleaseSRWLockExclusive
#define try_lock TryAcquireSRWLockExclusive
#define wait_for(c, l) SleepConditionVariableSRW(c, l, INFINITE, 0)
#define wake WakeAllConditionVariable
#else
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#define HERE __attribute__((visibility("hidden"))) /* another OpenMP must not replace these */
#define YIELD sched_yield()
#define PROCESS ((int64_t)getpid())
typedef pthread_mutex_t Lock;
typedef pthread_cond_t Condition;
#define LOCKED PTHREAD_MUTEX_INITIALIZER
#define WAITING PTHREAD_COND_INITIALIZER
#define lock pthread_mutex_lock
#define unlock pthread_mutex_unlock
#define try_lock(l) (pthread_mutex_trylock(l) == 0)
#define wait_for pthread_cond_wait
#define wake pthread_cond_broadcast
#endif

#define ARGUMENTS 40 /* variables that a parallel region uses, at most: see work() */
#define LOOPS 4      /* loops with a dynamic schedule in one region, at most */

#define P void *
#define P10 P, P, P, P, P, P, P, P, P, P
typedef void (*Region)(int32_t *, int32_t *, P10, P10, P10, P10);

typedef struct {
    Region region;
    void *argument[ARGUMENTS];
    int64_t next[LOOPS]; /* the next iteration of each dynamic loop */
    int waiting, passed; /* threads at the barrier; barriers that all threads have passed */
} Team;

/* This thread: its team, its number, the size of the team, and its place in dynamic loops. */
static __thread struct {
    Team *team;
    int number, size, wanted, loop;
    int64_t first, last, chunk;
} me;

static void work(Team *team, int number, int size) {
    int32_t thread = number, zero = 0;
    void **a = team->argument;
    me.team = team, me.number = number, me.size = size, me.loop = -1;
#define A5(k) a[k], a[k + 1], a[k + 2], a[k + 3], a[k + 4]
#define A10(k) A5(k), A5(k + 5)
    /* the region ignores surplus arguments */
    team->region(&thread, &zero, A10(0), A10(10), A10(20), A10(30));
    me.team = NULL, me.number = 0, me.size = 1;
}

/* ---- torch's team ---------------------------------------------------------------------------- */

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)(void), (*size)(void);
} torch;

/* Use the team of an OpenMP library: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
void share_threads(void *parallel, void *number, void *size) {
    torch.number = (int (*)(void))number;
    torch.size = (int (*)(void))size;
    torch.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
}

static void work_for_torch(void *team) { work(team, torch.number(), torch.size()); }

/* ---- a team of our own ----------------------------------------------------------------------- */

static struct {
    Lock one, guard; /* allows one team at a time; guards the fields below */
    Condition more;
    Team *team;
    int64_t process;
    int workers, size, number; /* threads of the pool; size of the team; teams so far */
    int busy;                  /* workers that have not finished */
} pool = {LOCKED, LOCKED, WAITING, NULL, 0, 0, 0, 0, 0};

#ifdef _WIN32
static DWORD WINAPI worker(void *of)
#else
static void *worker(void *of)
#endif
{
    const int self = (int)(intptr_t)of;
    lock(&pool.guard);
    int seen = pool.number - 1; /* the team that this thread was made for has started already */
    unlock(&pool.guard);
    for (;;) {
        for (int k = 0; k < PATIENCE; k++)
            if (__atomic_load_n(&pool.number, __ATOMIC_ACQUIRE) != seen) break;
        lock(&pool.guard);
        while (pool.number == seen) wait_for(&pool.more, &pool.guard);
        seen = pool.number;
        Team *team = pool.team;
        const int size = pool.size;
        unlock(&pool.guard);
        if (self >= size) continue;
        work(team, self, size);
        __atomic_sub_fetch(&pool.busy, 1, __ATOMIC_RELEASE);
    }
    return 0;
}

static int start(int number) {
#ifdef _WIN32
    HANDLE made = CreateThread(NULL, 0, worker, (void *)(intptr_t)number, 0, NULL);
    if (made) CloseHandle(made);
    return made != NULL;
#else
    pthread_t made;
    if (pthread_create(&made, NULL, worker, (void *)(intptr_t)number)) return 0;
    return pthread_detach(made) == 0;
#endif
}

static void work_in_pool(Team *team, int size) {
    if (pool.process != PROCESS) { /* after a fork, only this thread exists: make a new pool */
        pool.process = PROCESS;
        pool.workers = 0;
        pool.guard = (Lock)LOCKED;
        pool.more = (Condition)WAITING;
    }
    lock(&pool.guard);
    __atomic_store_n(&pool.number, pool.number + 1, __ATOMIC_RELEASE);
    while (pool.workers < size - 1 && pool.workers < WORKERS && start(pool.workers + 1))
        pool.workers++;
    if (size > pool.workers + 1) size = pool.workers + 1;
    pool.team = team;
    pool.size = size;
    __atomic_store_n(&pool.busy, size - 1, __ATOMIC_RELEASE);
    wake(&pool.more);
    unlock(&pool.guard);
    work(team, 0, size);
    for (int k = 0; __atomic_load_n(&pool.busy, __ATOMIC_ACQUIRE); k++)
        if (k > PATIENCE) YIELD;
}

/* ---- what clang calls ------------------------------------------------------------------------ */

HERE int omp_get_thread_num(void) { return me.number; }
HERE int32_t __kmpc_global_thread_num(void *at) { return me.number; }
HERE void __kmpc_push_num_threads(void *at, int32_t thread, int32_t n) { me.wanted = n; }
HERE void __kmpc_serialized_parallel(void *at, int32_t thread) {
    static __thread Team alone;
    for (int k = 0; k < LOOPS; k++) alone.next[k] = 0;
    me.team = &alone, me.number = 0, me.size = 1, me.loop = -1;
}
HERE void __kmpc_end_serialized_parallel(void *at, int32_t thread) { me.team = NULL; }

HERE void __kmpc_fork_call(void *at, int32_t count, Region region, ...) {
    Team team = {region};
    if (count > ARGUMENTS) abort(); /* the first call of the kernel aborts, so a test shows it */
    va_list arguments;
    va_start(arguments, region);
    for (int k = 0; k < count; k++) team.argument[k] = va_arg(arguments, void *);
    va_end(arguments);
    const int size = me.wanted > 1 ? me.wanted : 1;
    me.wanted = 0;
    if (size > 1 && torch.parallel)
        torch.parallel(work_for_torch, &team, (unsigned)size, 0);
    else if (size > 1 && try_lock(&pool.one)) {
        work_in_pool(&team, size);
        unlock(&pool.one);
    } else
        work(&team, 0, 1);
}

HERE void __kmpc_barrier(void *at, int32_t thread) {
    if (me.size < 2) return;
    Team *t = me.team;
    const int passed = __atomic_load_n(&t->passed, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&t->waiting, 1, __ATOMIC_ACQ_REL) == me.size) {
        t->waiting = 0;
        __atomic_store_n(&t->passed, passed + 1, __ATOMIC_RELEASE);
    } else
        for (int k = 0; __atomic_load_n(&t->passed, __ATOMIC_ACQUIRE) == passed; k++)
            if (k > PATIENCE) YIELD;
}

/* Give each thread a range of iterations, in order and of about equal length. */
#define STATIC(NAME, INT)                                                                          \
    HERE void NAME(void *at, int32_t thread, int32_t schedule, int32_t *is_last, INT *first,       \
                   INT *last, INT *stride, INT step, INT chunk) {                                  \
        if (schedule != 34 || step != 1) abort();                                                  \
        const INT all = *last - *first + 1, n = me.size > 1 ? me.size : 1, t = me.number;          \
        const INT some = all / n, more = all % n; /* clang calls it only if all > 0 */             \
        *first += t * some + (t < more ? t : more);                                                \
        *last = *first + some + (t < more) - 1;                                                    \
        *is_last = t == n - 1;                                                                     \
        *stride = all;                                                                             \
    }
STATIC(__kmpc_for_static_init_4, int32_t)
STATIC(__kmpc_for_static_init_8, int64_t)
STATIC(__kmpc_for_static_init_4u, uint32_t)
STATIC(__kmpc_for_static_init_8u, uint64_t)
HERE void __kmpc_for_static_fini(void *at, int32_t thread) {}

/* Give the next iterations to any thread that is free. */
HERE void __kmpc_dispatch_init_8(void *at, int32_t thread, int32_t schedule, int64_t first,
                                 int64_t last, int64_t step, int64_t chunk) {
    if (++me.loop >= LOOPS || step != 1) abort();
    me.first = first, me.last = last, me.chunk = chunk > 0 ? chunk : 1;
}
HERE int32_t __kmpc_dispatch_next_8(void *at, int32_t thread, int32_t *is_last, int64_t *first,
                                    int64_t *last, int64_t *step) {
    const int64_t taken = __atomic_fetch_add(&me.team->next[me.loop], me.chunk, __ATOMIC_RELAXED);
    *first = me.first + taken;
    if (*first > me.last) return 0;
    *last = *first + me.chunk - 1 < me.last ? *first + me.chunk - 1 : me.last;
    *is_last = *last == me.last;
    *step = 1;
    return 1;
}
HERE void __kmpc_dispatch_deinit(void *at, int32_t thread) {}
