/* The step that lambda scales. Included after lambda.h, once for each REAL. The definitions in
   PyTorch are torch_step in optim/step.py, and calibration.py. The letters are the same. */

#ifndef STEP
#define STEP
/* Return x^k for an integer k. pow would need libm. */
static double power(double x, int64_t k) {
    double result = 1;
    for (; k; k >>= 1, x *= x)
        if (k & 1) result *= x;
    return result;
}
#endif

/* V <- keep V + take s2 */
static inline void NAME(accumulate)(int64_t n, REAL *restrict V, const REAL *restrict s2, REAL keep,
                                    REAL take) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) V[i] = keep * V[i] + take * s2[i];
}

/* Write Adam's increment n/D to `step`, and its variance to `s2`, from the sums N, C and V. It is
   not inlined: a repeated lambda must come from the same roundings as the step's own. */
static __attribute__((noinline)) void NAME(adam)(const Task *t, int64_t at, int64_t n,
                                                 REAL *restrict s2, REAL *restrict step) {
    const REAL *restrict average = TENSOR(average), *restrict squares = TENSOR(squares);
    const REAL *restrict N = TENSOR(N), *restrict C = TENSOR(C), *restrict V = TENSOR(V);
    const REAL unbias_n = NUMBER(unbias_n), unbias_p = NUMBER(unbias_p), eps = NUMBER(eps);
    const REAL known = NUMBER(known);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL inverse = 1 / (SQRT(squares[i] * unbias_p) + eps);
        REAL delta = average[i] * unbias_n * inverse, slope = delta < 0 ? -delta : delta;
        REAL size = unbias_n * unbias_n * N[i] + slope * slope * (unbias_p * unbias_p * V[i]);
        REAL left = size - 2 * slope * (unbias_n * unbias_p * C[i]);
        left = left <= size * known ? (REAL)NAN : left; /* no more than rounding errors */
        step[i] = delta;
        s2[i] = left * inverse * inverse;
    }
}

/* Return the increment delta of a block; `step` is memory for it. The base went to
   x' = x - lr * delta, and only x' is known. With weight decay, delta = d + decay * x, where d is
   the rest. With x = x' + lr * delta it follows that delta = (d + decay * x')/(1 - lr * decay). */
static const REAL *NAME(delta_block)(const Task *t, int64_t at, int64_t n, REAL *restrict step) {
    if (t->increment == INCREMENT_HEAVY_BALL) return TENSOR(average);
    if (t->increment == INCREMENT_ADAM) {
        const REAL *restrict average = TENSOR(average), *restrict squares = TENSOR(squares);
        const REAL unbias_n = NUMBER(unbias_n), unbias_p = NUMBER(unbias_p), eps = NUMBER(eps);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            step[i] = average[i] * unbias_n * (1 / (SQRT(squares[i] * unbias_p) + eps));
        return step;
    }
    const REAL *restrict g = TENSOR(grad), *restrict x = TENSOR(x);
    const REAL sign = NUMBER(sign), decay = NUMBER(decay), inverse = 1 / (1 - NUMBER(lr) * decay);
    if (t->increment == INCREMENT_NESTEROV) {
        const REAL *restrict b = TENSOR(average), mu = NUMBER(mu);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            step[i] = (sign * g[i] + mu * b[i] + decay * x[i]) * inverse;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) step[i] = (sign * g[i] + decay * x[i]) * inverse;
    }
    return step;
}

/* Go to x + lambda (x' - x) = x' + (1 - lambda) lr delta. This formula does not need x. */
static inline void NAME(move_block)(const Task *t, int64_t at, int64_t n, const REAL *delta,
                                    const REAL *restrict lambda) {
    REAL *restrict x = TENSOR(x);
    const REAL lr = NUMBER(lr);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] += (1 - lambda[i]) * (lr * delta[i]);
}

/* Write the sum of lambda over the elements of a block that have a gradient, and their number. */
static inline void NAME(mean_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    const REAL *restrict lambda = TENSOR(lam), *restrict W = TENSOR(square);
    double *out = (double *)t->products + 2 * number, sum = 0, known = 0;
#pragma omp simd reduction(+ : sum, known)
    for (int64_t i = 0; i < n; i++) {
        sum += W[i] > TINY ? (double)lambda[i] : 0;
        known += W[i] > TINY ? 1 : 0;
    }
    out[0] = sum;
    out[1] = known;
}

/* Finish the step after the base's, for a block of one tensor: compute variance, increment, lambda
   and x. If lambda is calibrated, x must wait for the mean of lambda over the whole tensor. */
static void NAME(update_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    REAL s2[BLOCK], step[BLOCK], room[BLOCK], *lambda = t->lam ? TENSOR(lam) : room;
    const REAL *variance = s2, *delta = step;
    NAME(variance_block)(n, TENSOR(total), TENSOR(square), s2, NUMBER(m), NUMBER(factor),
                         NUMBER(rounding));

    if (t->increment == INCREMENT_ADAM) {
        NAME(accumulate)(n, TENSOR(N), s2, NUMBER(keep_N), NUMBER(take_N));
        NAME(accumulate)(n, TENSOR(C), s2, NUMBER(keep_C), NUMBER(take_C));
        NAME(accumulate)(n, TENSOR(V), s2, NUMBER(keep_V), NUMBER(take_V));
        NAME(adam)(t, at, n, s2, step);
    } else {
        delta = NAME(delta_block)(t, at, n, step);
    }
    if (t->increment == INCREMENT_HEAVY_BALL) {
        variance = TENSOR(V);
        NAME(accumulate)(n, TENSOR(V), s2, NUMBER(keep_V), NUMBER(take_V));
    } else if (t->increment == INCREMENT_NESTEROV) {
        const REAL *restrict V = TENSOR(V), mu = NUMBER(mu), again = NUMBER(again);
        NAME(accumulate)(n, TENSOR(V), s2, NUMBER(keep_V), NUMBER(take_V));
#pragma omp simd
        for (int64_t i = 0; i < n; i++) s2[i] = mu * mu * V[i] + again * s2[i];
    }

    NAME(regularize)(t, at, n, variance, delta, lambda);
    if (t->recent)
        NAME(mean_block)(t, at, n, number);
    else
        NAME(move_block)(t, at, n, delta, lambda);
}

/* Compute lambda of the last step again from the state; the history contains rho already. If `lam`
   is 0, only add 1 to the count of each element whose rho was finite. */
static void NAME(repeat_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    REAL s2[BLOCK], step[BLOCK];
    const REAL *V = TENSOR(V), *delta = TENSOR(average);
    REAL *wide = t->rho_count;
    int16_t *narrow = t->rho_count;
    const NAME(bounds) b = {NUMBER(s), NUMBER(half), NUMBER(limit), NUMBER(low), NUMBER(high)};
    const int enter = !t->lam;
    (void)number;
    if (t->increment == INCREMENT_ADAM) {
        NAME(adam)(t, at, n, s2, step);
        V = s2, delta = step;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t k = at + i;
        const int is_absent = ((uint8_t *)t->absent)[k / 8] >> k % 8 & 1;
        /* enter rho into an empty history: its count is then 1 if rho is finite */
        REAL sum = 0, count = 0, lambda;
        if (!enter) {
            sum = TENSOR(rho_sum)[i];
            count = t->counts == COUNTS_NARROW ? (REAL)narrow[k]
                    : wide[t->counts == COUNTS_SHARED ? 0 : k];
        }
        NAME(element)(V[i], delta[i], &sum, &count, (REAL)!is_absent, &lambda, 1, t->history,
                      t->form, t->scale_free, enter, b);
        if (enter) {
            if (t->counts == COUNTS_NARROW)
                narrow[k] += (int16_t)count;
            else
                wide[k] += count;
            continue;
        }
        if (t->recent && !is_absent) {
            lambda *= NUMBER(scale);
            lambda = lambda < b.low ? b.low : lambda > b.high ? b.high : lambda;
        }
        TENSOR(lam)[i] = lambda;
    }
}

/* Compute lambda again. PyTorch has no such function, since torch_step keeps lambda. */
void NAME(repeat)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(repeat_block));
}

/* Scale lambda within its bounds, for elements that have a gradient; then set x. */
static void NAME(calibrate_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    REAL *restrict lambda = TENSOR(lam), step[BLOCK];
    const REAL *restrict W = TENSOR(square);
    const REAL scale = NUMBER(scale), low = NUMBER(low), high = NUMBER(high);
    if (!t->recent) return;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL result = lambda[i] * scale;
        result = result < low ? low : result;
        result = result > high ? high : result;
        lambda[i] = W[i] > TINY ? result : lambda[i];
    }
    NAME(mean_block)(t, at, n, number);
    NAME(move_block)(t, at, n, NAME(delta_block)(t, at, n, step), lambda);
}

/* Return the mean of lambda over a tensor, from the sums of its blocks; nan without a gradient. */
static double NAME(mean)(const Task *t, const double *sums) {
    double sum = 0, known = 0;
    for (int64_t b = 0; b < BLOCKS(t->n); b++, sums += 2) {
        sum += sums[0];
        known += sums[1];
    }
    return sum / known;
}

/* Scale lambda so that its mean stays at 1, and set x. The definition is calibration.py. */
static void NAME(calibrate)(int64_t tasks, Task *task, int threads) {
    int64_t block = 0, any = 0;
    for (int64_t k = 0; k < tasks; block += BLOCKS(task[k].n), k++) {
        Task *t = task + k;
        if (!t->recent) continue;
        REAL *recent = t->recent, *spent = t->spent, *times = t->times;
        double mean = NAME(mean)(t, (double *)t->products + 2 * block);
        if (mean == mean) {
            *recent += (REAL)(RECENT * (mean - *recent));
            *times += 1;
        }
        t->scale = *times / (*spent + 1) / (*recent / (1 - power(1 - RECENT, (int64_t)*times)));
        if (!(t->scale - t->scale == 0)) t->scale = 1; /* nothing is known, or lambda is 0 */
        any = 1;
    }
    if (!any) return;
    each_block(tasks, task, threads, NAME(calibrate_block));
    block = 0;
    for (int64_t k = 0; k < tasks; block += BLOCKS(task[k].n), k++) {
        if (!task[k].recent) continue;
        double mean = NAME(mean)(task + k, (double *)task[k].products + 2 * block);
        if (mean == mean) *(REAL *)task[k].spent += (REAL)mean;
    }
}

/* Count a step; count its rho, too, if all elements share one count. Report whether the next step
   needs counts of another form: shared ones differ now, or a narrow one can count no further. */
static void NAME(count)(Task *t) {
    ++*(REAL *)t->steps;
    if (t->is_outgrown == 2) ++*(REAL *)t->rho_count;
    t->is_outgrown = t->is_outgrown >= 3;
}

/* Finish the step of many parameters after the base's step. The definition is torch_step. */
void NAME(update)(int64_t tasks, Task *task, int threads) {
    each_block(tasks, task, threads, NAME(update_block));
    NAME(calibrate)(tasks, task, threads);
    for (int64_t k = 0; k < tasks; k++) NAME(count)(task + k);
}
