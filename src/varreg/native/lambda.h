/* Lambda, and the variance and history that it needs. Included once for each REAL, float and
   double; NAME(x) is the name of function x for this REAL. The definitions in PyTorch are in
   regularizer.py. The letters are the same.

   Work is done in small blocks, so that intermediate results stay in the first-level cache: memory
   is read once, and written once. */

#ifndef LAMBDA
#define LAMBDA

#define BLOCKS(n) (((n) + BLOCK - 1) / BLOCK)
#define AT_MOST(a, b) ((a) < (b) ? (a) : (b))
#define AT_LEAST(a, b) ((a) > (b) ? (a) : (b))

#define TINY ((REAL)(sizeof(REAL) == sizeof(float) ? FLT_MIN : DBL_MIN))
#define SQRT(x) ((REAL)(sizeof(REAL) == sizeof(float) ? sqrtf(x) : sqrt(x)))

/* If Python had a kind for which there is no loop below, lambda would not be written. */
_Static_assert(HISTORY_KINDS == 3 && FORM_KINDS == 2 && INCREMENT_KINDS == 4, "kinds");

/* Call `work` for all blocks of all tensors; the threads have equal shares. `number` is the number
   of the block among all blocks. */
static void each_block(int64_t tasks, const Task *task, int threads,
                       void (*work)(const Task *, int64_t at, int64_t n, int64_t number)) {
    int64_t blocks = 0;
    for (int64_t k = 0; k < tasks; k++) blocks += BLOCKS(task[k].n);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int share = 0; share < threads; share++) {
        int64_t from = blocks * share / threads, to = blocks * (share + 1) / threads, before = 0;
        for (int64_t k = 0; k < tasks && before < to; before += BLOCKS(task[k].n), k++) {
            int64_t end = AT_MOST(to - before, BLOCKS(task[k].n));
            for (int64_t b = AT_LEAST(from - before, 0); b < end; b++)
                work(task + k, b * BLOCK, AT_MOST(BLOCK, task[k].n - b * BLOCK), before + b);
        }
    }
}

/* Add up the four sums of all blocks of each tensor, and write the results to the beginning of the
   same memory. The order of additions does not depend on the number of threads. */
static void add_up(int64_t tasks, const Task *task) {
    double *in = tasks ? task->products : 0, *out = in;
    for (int64_t k = 0; k < tasks; k++, out += 4) {
        double sums[4] = {0, 0, 0, 0};
        for (int64_t b = 0; b < BLOCKS(task[k].n); b++, in += 4)
            for (int j = 0; j < 4; j++) sums[j] += in[j];
        for (int j = 0; j < 4; j++) out[j] = sums[j];
    }
}
#endif

#define TENSOR(name) ((REAL *)t->name + at) /* of task t, from element `at` on */
#define NUMBER(name) ((REAL)t->name)

typedef struct {
    REAL s, half, limit, low, high;
} NAME(bounds);

/* Enter rho of one element into its history, and compute lambda. If `enter` is 0, the history
   contains rho already. Callers that must be fast pass constants for kind, form, scale_free and
   enter. */
static inline __attribute__((always_inline)) void
NAME(element)(REAL variance, REAL delta, REAL *rho_sum, REAL *rho_count, REAL present, REAL *lambda,
              int masked, int kind, int form, int scale_free, int enter, NAME(bounds) b) {
    REAL rho = scale_free ? variance / (delta * delta) : variance;
    rho = rho > b.limit ? b.limit : rho;
    /* no sample had a gradient, or squares lost their precision */
    rho = ((masked != 0) & (present <= TINY)) ? (REAL)NAN : rho;
    REAL value = kind == HISTORY_HARMONIC ? 1 / rho : rho;
    int valid = (rho - rho == 0) & (value - value == 0); /* both are finite */
    REAL sum = *rho_sum, number = *rho_count;
    if (enter) {
        sum += valid ? value : 0;
        sum = sum > LARGEST_HISTORY ? LARGEST_HISTORY : sum;
        number += valid ? (REAL)1 : (REAL)0;
        *rho_sum = sum;
        *rho_count = number;
    }
    /* rho over its average: exactly 1 in the first step */
    REAL relative = kind == HISTORY_SUM    ? rho / sum
                    : kind == HISTORY_MEAN ? rho / sum * number
                                           : rho / (number / sum);
    REAL average = kind == HISTORY_SUM ? sum : kind == HISTORY_MEAN ? sum / number : number / sum;
    REAL result = form == FORM_RATIONAL ? (1 + b.s) / (1 + b.s * relative)
                                        : (1 + b.half) * (average / rho) - b.half;
    result = result < b.low ? b.low : result;
    result = result > b.high ? b.high : result;
    *lambda = result == result ? result : 1; /* undefined: take the base's own step */
}

#define LOOP(KIND, FORM, SCALE_FREE)                                                               \
    if (t->history == KIND && t->form == FORM && t->scale_free == SCALE_FREE) {                    \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++)                                        \
            NAME(element)(variance[i], delta[i], rho_sum + i, rho_count + i, present[i],           \
                          lambda + i, masked, KIND, FORM, SCALE_FREE, 1, b);                       \
        return;                                                                                    \
    }

/* Compute lambda of n elements of a task, from element `at` on. `rho_count` has their counts. */
static void NAME(lambda_of)(const Task *t, int64_t at, int64_t n, const REAL *variance,
                            const REAL *delta, REAL *restrict rho_count, REAL *restrict lambda) {
    REAL *restrict rho_sum = TENSOR(rho_sum);
    const int masked = t->square != 0;
    const REAL *present = masked ? TENSOR(square) : variance;
    const NAME(bounds) b = {NUMBER(s), NUMBER(half), NUMBER(limit), NUMBER(low), NUMBER(high)};
    LOOP(HISTORY_SUM, FORM_RATIONAL, 1)
    LOOP(HISTORY_MEAN, FORM_RATIONAL, 1)
    LOOP(HISTORY_HARMONIC, FORM_RATIONAL, 1)
    LOOP(HISTORY_SUM, FORM_AFFINE, 1)
    LOOP(HISTORY_MEAN, FORM_AFFINE, 1)
    LOOP(HISTORY_HARMONIC, FORM_AFFINE, 1)
    LOOP(HISTORY_SUM, FORM_RATIONAL, 0)
    LOOP(HISTORY_MEAN, FORM_RATIONAL, 0)
    LOOP(HISTORY_HARMONIC, FORM_RATIONAL, 0)
    LOOP(HISTORY_SUM, FORM_AFFINE, 0)
    LOOP(HISTORY_MEAN, FORM_AFFINE, 0)
    LOOP(HISTORY_HARMONIC, FORM_AFFINE, 0)
}

#undef LOOP

/* Set the bits of elements that have no gradient in this step. Usually there are none. */
static void NAME(mark_absent)(const Task *t, int64_t at, int64_t n) {
    const REAL *W = TENSOR(square);
    uint8_t *out = (uint8_t *)t->absent + at / 8, flags[BLOCK] = {0}, any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = 0; i < n; i++) {
        flags[i] = W[i] <= TINY;
        any |= flags[i];
    }
    memset(out, 0, (n + 7) / 8);
    for (int64_t i = 0; any && i < n; i++) out[i / 8] |= flags[i] << i % 8;
}

/* Compute lambda of n elements of a task, with counts of any form: the formulas need a number of
   the history's type for each element. Report in is_outgrown: 1 if some element had no finite rho,
   2 if some element had one, 4 if a narrow count is now as large as it can be. */
static void NAME(regularize)(const Task *t, int64_t at, int64_t n, const REAL *variance,
                             const REAL *delta, REAL *lambda) {
    REAL counts[BLOCK], fewest, most;
    if (t->absent) NAME(mark_absent)(t, at, n);
    if (t->counts == COUNTS_WIDE) {
        NAME(lambda_of)(t, at, n, variance, delta, TENSOR(rho_count), lambda);
        return;
    }
    const int is_shared = t->counts == COUNTS_SHARED;
    const REAL before = is_shared ? *(REAL *)t->rho_count : 0;
    int16_t *narrow = (int16_t *)t->rho_count + at;
    for (int64_t i = 0; i < n; i++) counts[i] = is_shared ? before : (REAL)narrow[i];
    NAME(lambda_of)(t, at, n, variance, delta, counts, lambda);
    fewest = most = counts[0];
#pragma omp simd reduction(min : fewest) reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        fewest = counts[i] < fewest ? counts[i] : fewest;
        most = counts[i] > most ? counts[i] : most;
    }
    int64_t found = is_shared ? (fewest <= before) | (most > before) << 1 : 0;
    if (!is_shared) {
        for (int64_t i = 0; i < n; i++) narrow[i] = (int16_t)counts[i];
        found = most >= INT16_MAX ? 4 : 0;
    }
    if (found) __atomic_fetch_or((int64_t *)&t->is_outgrown, found, __ATOMIC_RELAXED);
}

static void NAME(lambda_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    (void)number;
    NAME(regularize)(t, at, n, TENSOR(variance), TENSOR(delta), TENSOR(lam));
}

/* Compute lambda from an increment and its variance. The definition is regularizer.lambdas. */
void NAME(lambda)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(lambda_block));
}

/* out = (m * square - total^2) * factor, and 0 where that is no more than rounding errors */
static inline void NAME(variance_block)(int64_t n, const REAL *restrict total,
                                        const REAL *restrict square, REAL *restrict out, REAL m,
                                        REAL factor, REAL rounding) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL size = m * square[i];
        REAL left = size - total[i] * total[i];
        out[i] = left <= size * rounding ? 0 : left * factor; /* nan stays nan */
    }
}

/* Write the variance of moments. The definition is Moments.variance. */
void NAME(variance)(const REAL *total, const REAL *square, REAL *out, int64_t n, double m,
                    double factor, double rounding, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK)
        NAME(variance_block)(AT_MOST(BLOCK, n - i), total + i, square + i, out + i, (REAL)m,
                             (REAL)factor, (REAL)rounding);
}

/* Write S.S, g.S, g.g and the sum of W of a block, in double precision. Usually g equals S, and all
   three products are the same. */
static void NAME(compare_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    const REAL *S = TENSOR(total), *g = TENSOR(grad), *W = TENSOR(square);
    double *out = (double *)t->products + 4 * number, SS = 0, gS = 0, gg = 0, sum = 0;
    int changed = 0;
    if (S == g) { /* the same memory */
#pragma omp simd reduction(+ : SS, sum)
        for (int64_t i = 0; i < n; i++) {
            SS += (double)S[i] * (double)S[i];
            sum += W[i];
        }
    } else {
#pragma omp simd reduction(| : changed) reduction(+ : SS, sum)
        for (int64_t i = 0; i < n; i++) {
            changed |= S[i] != g[i];
            SS += (double)S[i] * (double)S[i];
            sum += W[i];
        }
    }
    if (changed) {
        __atomic_store_n((int64_t *)&t->is_changed, 1, __ATOMIC_RELAXED);
#pragma omp simd reduction(+ : gS, gg)
        for (int64_t i = 0; i < n; i++) {
            gS += (double)S[i] * (double)g[i];
            gg += (double)g[i] * (double)g[i];
        }
    }
    out[0] = SS;
    out[1] = changed ? gS : SS;
    out[2] = changed ? gg : SS;
    out[3] = sum;
}

/* Compare gradients with the measured ones. The definition is products in optim/gradient.py. */
void NAME(compare)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(compare_block));
    add_up(tasks, task);
}
