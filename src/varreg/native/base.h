/* The whole step of many parameters, in one pass over memory: torch's own step, then the scaling by
   lambda. Included after step.h, once for each REAL. The base's arithmetic equals torch's to the
   bit, rounding by rounding: optim/whole_step.py tests that once. Where torch fuses a product and a
   sum into one operation, so does this code. Elsewhere product and sum are in separate loops, since
   a compiler may fuse them within one loop. */

#ifndef BASE
#define BASE
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED(a, b, c)                                                                             \
    ((REAL)(sizeof(REAL) == sizeof(float) ? __builtin_fmaf(a, b, c) : __builtin_fma(a, b, c)))
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif
#define EPSILON ((double)(sizeof(REAL) == sizeof(float) ? FLT_EPSILON : DBL_EPSILON))
#endif

/* The gradient as the base uses it: with its sign, and with coupled weight decay. */
static inline const REAL *NAME(used_block)(const Task *t, int64_t at, int64_t n,
                                           REAL *restrict room) {
    const REAL *restrict g = TENSOR(grad), *restrict x = TENSOR(x);
    const REAL sign = NUMBER(sign), decay = NUMBER(decay);
    if (sign == 1 && decay == 0) return g;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room[i] = sign < 0 ? -g[i] : g[i];
    if (decay == 0) return room;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room[i] = FUSED(x[i], decay, room[i]);
    return room;
}

/* x[i] *= by */
static inline void NAME(multiply)(int64_t n, REAL *restrict x, REAL by) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= by;
}

/* The step of torch.optim.SGD. The definition is torch's _single_tensor_sgd. */
static void NAME(sgd_block)(const Task *t, int64_t at, int64_t n) {
    REAL room[BLOCK], ahead[BLOCK];
    const REAL *g = NAME(used_block)(t, at, n, room);
    REAL *restrict x = TENSOR(x);
    const REAL lr = -NUMBER(lr), mu = NUMBER(mu), take = NUMBER(take);
    if (t->increment != INCREMENT_GRADIENT) {
        REAL *restrict b = TENSOR(average);
        NAME(multiply)(n, b, mu);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) b[i] = FUSED(g[i], take, b[i]);
        if (t->increment == INCREMENT_NESTEROV) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) ahead[i] = FUSED(b[i], mu, g[i]);
            g = ahead;
        } else {
            g = b;
        }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = FUSED(g[i], lr, x[i]);
}

/* Write the square roots of a block, rounded as torch rounds them. MKL would divide even one block
   among threads, where it does not see that this is one of several threads. */
static void NAME(roots)(const Task *t, int64_t n, const REAL *in, REAL *out) {
    if (t->root) {
        int (*set_threads)(int) = (int (*)(int))t->root_threads, before = set_threads(1);
        ((void (*)(int, const void *, void *, int64_t))t->root)((int)n, in, out, t->root_mode);
        set_threads(before);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = SQRT(in[i]);
}

/* The step of torch.optim.Adam and AdamW. The definition is torch's _single_tensor_adam. */
static void NAME(adam_block)(const Task *t, int64_t at, int64_t n) {
    REAL room[BLOCK], root[BLOCK];
    REAL *restrict x = TENSOR(x), *restrict m = TENSOR(average), *restrict p = TENSOR(squares);
    const REAL blend = NUMBER(blend), take = NUMBER(take_p), root_c2 = NUMBER(root_c2);
    const REAL eps = NUMBER(eps), size = -NUMBER(step_size);
    if (t->shrink != 1) NAME(multiply)(n, x, NUMBER(shrink));
    const REAL *g = NAME(used_block)(t, at, n, room);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) m[i] = FUSED(blend, g[i] - m[i], m[i]);
    NAME(multiply)(n, p, NUMBER(keep_p));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] = FUSED(take * g[i], g[i], p[i]);
    NAME(roots)(t, n, p, root);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] += size * m[i] / (root[i] / root_c2 + eps);
}

static void NAME(whole_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    if (t->is_left) return;
    if (t->increment == INCREMENT_ADAM)
        NAME(adam_block)(t, at, n);
    else
        NAME(sgd_block)(t, at, n);
    NAME(update_block)(t, at, n, number);
}

/* Return whether the gradient is the measured one, or a multiple of it, and its squares are of an
   ordinary size. The definitions are as_seen in optim/gradient.py and _set_products in
   optim/collect.py. */
static int NAME(is_ready)(Task *t, const double *sums) {
    const double SS = sums[0], gS = sums[1], gg = sums[2], W = sums[3];
    if (!(SS + gg + t->m * W <= t->most)) return 0;
    if (!(SS == 0 && W == 0) && !(SMALLEST_SQUARE <= W && W <= LARGEST_SQUARE)) return 0;
    if (SS == gS && gS == gg) return 1;
    if (SS == 0 || gg == 0) return 0;
    const double kappa = gS / SS, coarse = t->precision * kappa;
    if (!(gg - kappa * gS <= PARALLEL * EPSILON * gg + coarse * coarse * t->m * W)) return 0;
    t->factor *= kappa * kappa;
    return 1;
}

/* Take the whole step of many parameters. Compare the gradients of a few parameters with the
   measured ones, and move these parameters while they are in the cache. A parameter that is not
   ready does not change; its is_left becomes 1. */
void NAME(whole)(int64_t tasks, Task *task, int threads) {
    for (int64_t first = 0, last; first < tasks; first = last) {
        int64_t elements = 0;
        for (last = first; last < tasks && (last == first || elements + task[last].n <= TOGETHER);)
            elements += task[last++].n;
        Task *some = task + first;
        const int n = elements < WORTH_THREADS ? 1 : threads;
        each_block(last - first, some, n, NAME(compare_block));
        add_up(last - first, some);
        for (int64_t k = 0; k < last - first; k++)
            some[k].is_left = !NAME(is_ready)(some + k, (double *)some->products + 4 * k);
        for (int64_t k = 0; k < last - first; k++) {
            /* the same numbers: the step need not read both, and squares have no sign of zero */
            if (!some[k].is_changed) some[k].total = some[k].grad;
        }
        each_block(last - first, some, n, NAME(whole_block));
        for (int64_t k = 0; k < last - first; k++) {
            if (!some[k].is_left) NAME(count)(some + k);
        }
    }
}

#undef TENSOR
#undef NUMBER
