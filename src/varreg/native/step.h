/* Included once for each REAL, float and double, with NAME(x) giving its functions their names. The letters are those of regularizer.py.

   Work is done in blocks so small that what passes from one stage to the next stays in the first-level cache: memory is read once, and
   written once. */

#ifndef STEP
#define STEP

#define BLOCK 512 /* elements */
#define BLOCKS(n) (((n) + BLOCK - 1) / BLOCK)
#define AT_MOST(a, b) ((a) < (b) ? (a) : (b))
#define AT_LEAST(a, b) ((a) > (b) ? (a) : (b))

#define TINY ((REAL)(sizeof(REAL) == sizeof(float) ? FLT_MIN : DBL_MIN))
#define SQRT(x) ((REAL)(sizeof(REAL) == sizeof(float) ? sqrtf(x) : sqrt(x)))

enum { GRADIENT, HEAVY_BALL, NESTEROV, ADAM };

/* One tensor's part of a call for many, as step.py packs it. Which is which is said where they are taken out. */
typedef struct {
    int64_t n; /* elements */
    int64_t kinds[4];
    void *tensors[13];
    double numbers[19];
} Task;

/* All blocks of all tensors, in equal shares for the threads. `number` is that of the block among all. */
static void each_block(int64_t tasks, const Task *task, int threads, void (*work)(const Task *, int64_t at, int64_t n, int64_t number)) {
    int64_t blocks = 0;
    for (int64_t k = 0; k < tasks; k++) blocks += BLOCKS(task[k].n);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int share = 0; share < threads; share++) {
        int64_t from = blocks * share / threads, to = blocks * (share + 1) / threads, before = 0;
        for (int64_t k = 0; k < tasks && before < to; before += BLOCKS(task[k].n), k++)
            for (int64_t b = AT_LEAST(from - before, 0); b < AT_MOST(to - before, BLOCKS(task[k].n)); b++)
                work(task + k, b * BLOCK, AT_MOST(BLOCK, task[k].n - b * BLOCK), before + b);
    }
}
#endif

/* One element: rho enters its history, and lambda comes out. kind, form and scale_free are constants where this is inlined. */
static inline __attribute__((always_inline)) void NAME(element)(REAL variance, REAL delta, REAL *history, REAL *count, REAL present, REAL *lambda,
                                                                int some, int kind, int form, int scale_free, REAL s, REAL half, REAL limit, REAL low, REAL high) {
    REAL rho = scale_free ? variance / (delta * delta) : variance;
    rho = rho > limit ? limit : rho;
    rho = (some != 0) & (present <= TINY) ? (REAL)NAN : rho; /* no sample had a gradient, or squares lost their precision */
    REAL value = kind == HARMONIC ? 1 / rho : rho;
    int valid = (rho - rho == 0) & (value - value == 0);
    REAL sum = *history + (valid ? value : 0);
    sum = sum > HUGE_SUM ? HUGE_SUM : sum;
    REAL number = *count + (valid ? (REAL)1 : (REAL)0);
    *history = sum;
    *count = number;
    REAL relative = kind == SUM ? rho / sum : kind == MEAN ? rho / sum * number : rho / (number / sum); /* rho over its average: 1 for the first */
    REAL average = kind == SUM ? sum : kind == MEAN ? sum / number : number / sum;
    REAL result = form == RATIONAL ? (1 + s) / (1 + s * relative) : (1 + half) * (average / rho) - half;
    result = result < low ? low : result;
    result = result > high ? high : result;
    *lambda = result == result ? result : 1;
}

#define LOOP(KIND, FORM, SCALE_FREE)                                                                                                \
    if (kind == KIND && form == FORM && scale_free == SCALE_FREE) {                                                                 \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++)                                                                         \
            NAME(element)(variance[i], delta[i], history + i, count + i, present[i], lambda + i, some, KIND, FORM, SCALE_FREE, s, half, limit, low, high); \
        return;                                                                                                                     \
    }

static void NAME(lambda_block)(int64_t n, const REAL *variance, const REAL *delta, REAL *restrict history, REAL *restrict count, const REAL *present,
                               REAL *restrict lambda, int some, int kind, int form, int scale_free, REAL s, REAL half, REAL limit, REAL low, REAL high) {
    LOOP(SUM, RATIONAL, 1) LOOP(MEAN, RATIONAL, 1) LOOP(HARMONIC, RATIONAL, 1) LOOP(SUM, AFFINE, 1) LOOP(MEAN, AFFINE, 1) LOOP(HARMONIC, AFFINE, 1)
    LOOP(SUM, RATIONAL, 0) LOOP(MEAN, RATIONAL, 0) LOOP(HARMONIC, RATIONAL, 0) LOOP(SUM, AFFINE, 0) LOOP(MEAN, AFFINE, 0) LOOP(HARMONIC, AFFINE, 0)
}

#undef LOOP

void NAME(lambda)(const REAL *variance, const REAL *delta, REAL *history, REAL *count, const REAL *present, REAL *lambda, int64_t n, int64_t some, int64_t kind,
                  int64_t form, int64_t scale_free, double s, double half, double limit, double low, double high, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK)
        NAME(lambda_block)(AT_MOST(BLOCK, n - i), variance + i, delta + i, history + i, count + i, present + i, lambda + i, (int)some, (int)kind, (int)form,
                           (int)scale_free, (REAL)s, (REAL)half, (REAL)limit, (REAL)low, (REAL)high);
}

/* out = (m * square - total^2) * factor, and 0 where that is no more than rounding */
static inline void NAME(variance_block)(int64_t n, const REAL *restrict total, const REAL *restrict square, REAL *restrict out, REAL m, REAL factor,
                                        REAL rounding) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL size = m * square[i];
        REAL left = size - total[i] * total[i];
        out[i] = left <= size * rounding ? 0 : left * factor; /* nan stays nan */
    }
}

void NAME(variance)(const REAL *total, const REAL *square, REAL *out, int64_t n, double m, double factor, double rounding, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) NAME(variance_block)(AT_MOST(BLOCK, n - i), total + i, square + i, out + i, (REAL)m, (REAL)factor, (REAL)rounding);
}

/* S.S, g.S, g.g and the sum of W of a block, in double precision. Mostly g is S, and one product does for three. Twin: products(). */
static void NAME(compare_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    const REAL *S = (const REAL *)t->tensors[0] + at, *g = (const REAL *)t->tensors[1] + at, *W = (const REAL *)t->tensors[2] + at;
    double *out = (double *)t->tensors[3] + 4 * number, SS = 0, gS = 0, gg = 0, sum = 0;
    int changed = 0;
#pragma omp simd reduction(| : changed) reduction(+ : SS, sum)
    for (int64_t i = 0; i < n; i++) {
        changed |= S[i] != g[i];
        SS += (double)S[i] * (double)S[i];
        sum += W[i];
    }
    if (changed) {
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

/* Four sums for each tensor, at the beginning of what is room for four of each block. In an order that does not depend on threads. */
void NAME(compare)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(compare_block));
    double *in = tasks ? task->tensors[3] : 0, *out = in;
    for (int64_t k = 0; k < tasks; k++, out += 4) {
        double sums[4] = {0, 0, 0, 0};
        for (int64_t b = 0; b < BLOCKS(task[k].n); b++, in += 4)
            for (int j = 0; j < 4; j++) sums[j] += in[j];
        for (int j = 0; j < 4; j++) out[j] = sums[j];
    }
}

/* V <- keep V + take s2 */
static inline void NAME(accumulate)(int64_t n, REAL *restrict V, const REAL *restrict s2, REAL keep, REAL take) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) V[i] = keep * V[i] + take * s2[i];
}

/* What varreg/optim does after the base's step, for elements of one tensor: variance, increment, lambda, and x.

   The base went to x' = x - lr * delta, so that x + lambda (x' - x) is x' + (1 - lambda) lr delta: where x was need not be known. Where delta
   itself has a part from weight decay, decay * x, that is decay * (x' + lr * delta); solved for delta, it is a division by 1 - lr * decay. */
static void NAME(update_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    (void)number;
#define TENSOR(k) ((REAL *)t->tensors[k] + at)
#define NUMBER(k) ((REAL)t->numbers[k])
    const REAL *total = TENSOR(0), *square = TENSOR(1);
    REAL *restrict x = TENSOR(2), *history = TENSOR(3), *count = TENSOR(4), *lambda = TENSOR(5);
    const REAL lr = NUMBER(8);
    REAL s2[BLOCK], ours[BLOCK];
    const REAL *variance = s2, *delta = ours;
    NAME(variance_block)(n, total, square, s2, NUMBER(0), NUMBER(1), NUMBER(2));

    if (t->kinds[0] == ADAM) {
        const REAL *restrict average = TENSOR(8), *restrict second = TENSOR(9);
        REAL *restrict N = TENSOR(10), *restrict C = TENSOR(11), *restrict V = TENSOR(12);
        const REAL keep_N = NUMBER(9), keep_C = NUMBER(10), keep_V = NUMBER(11), take_N = NUMBER(12), take_C = NUMBER(13), take_V = NUMBER(14);
        const REAL unbias_n = NUMBER(15), unbias_p = NUMBER(16), eps = NUMBER(17), rounding = NUMBER(18);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            N[i] = keep_N * N[i] + take_N * s2[i];
            C[i] = keep_C * C[i] + take_C * s2[i];
            V[i] = keep_V * V[i] + take_V * s2[i];
            REAL inverse = 1 / (SQRT(second[i] * unbias_p) + eps);
            REAL step = average[i] * unbias_n * inverse, slope = step < 0 ? -step : step;
            REAL size = unbias_n * unbias_n * N[i] + slope * slope * (unbias_p * unbias_p * V[i]);
            REAL left = size - 2 * slope * (unbias_n * unbias_p * C[i]);
            left = left <= size * rounding ? (REAL)NAN : left; /* as small as rounding leaves it: not known */
            ours[i] = step;
            s2[i] = left * inverse * inverse;
        }
    } else if (t->kinds[0] == HEAVY_BALL) {
        delta = TENSOR(8);
        variance = TENSOR(9);
        NAME(accumulate)(n, TENSOR(9), s2, NUMBER(9), NUMBER(10));
    } else {
        const REAL *restrict g = TENSOR(6);
        const REAL sign = NUMBER(11), decay = NUMBER(12), inverse = 1 / (1 - lr * decay);
        if (t->kinds[0] == NESTEROV) {
            const REAL *restrict b = TENSOR(8), *restrict V = TENSOR(9);
            const REAL mu = NUMBER(13), again = NUMBER(14);
            NAME(accumulate)(n, TENSOR(9), s2, NUMBER(9), NUMBER(10));
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                ours[i] = (sign * g[i] + mu * b[i] + decay * x[i]) * inverse;
                s2[i] = mu * mu * V[i] + again * s2[i];
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) ours[i] = (sign * g[i] + decay * x[i]) * inverse;
        }
    }

    NAME(lambda_block)(n, variance, delta, history, count, square, lambda, 1, (int)t->kinds[1], (int)t->kinds[2], (int)t->kinds[3], NUMBER(3), NUMBER(4),
                       NUMBER(5), NUMBER(6), NUMBER(7));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] += (1 - lambda[i]) * (lr * delta[i]);
#undef TENSOR
#undef NUMBER
}

void NAME(update)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(update_block));
    for (int64_t k = 0; k < tasks; k++) ++*(REAL *)task[k].tensors[7]; /* the number of steps */
}
