/* The kernels of layers, in two versions: one writes W; the other adds up only the sum of its
   elements, and each thread writes its part of the sum to `spread`. And lengths of gradients. The
   definitions in PyTorch are engine/contribution.py and engine/total_squares.py. */
void NAME(outer)(const REAL *delta, const REAL *a, REAL *S, REAL *again, REAL *W, REAL *bias,
                 REAL *scratch, int64_t batch, int64_t groups, int64_t r, int64_t o, int64_t i,
                 int64_t at_once, int threads) {
    NAME(outer_of)(delta, a, S, again, W, bias, scratch, 0, batch, groups, r, o, i, at_once,
                   threads);
}

void NAME(outer_spread)(const REAL *delta, const REAL *a, REAL *S, double *spread, REAL *bias,
                        REAL *scratch, int64_t batch, int64_t groups, int64_t r, int64_t o,
                        int64_t i, int64_t at_once, int threads) {
    NAME(outer_of)(delta, a, S, 0, 0, bias, scratch, spread, batch, groups, r, o, i, at_once,
                   threads);
}

/* Add the norms of all threads to those of the first. */
static void NAME(join_norms)(double *extra, int64_t batch, int threads) {
    for (int t = 1; t < threads; t++)
        for (int64_t u = 0; u < batch; u++) extra[u] += extra[t * batch * (1 + NV * LANES) + u];
}

/* With W, and with the squared norm of each sample's contribution at the beginning of `extra`:
   zeros, threads * batch * (1 + NV * LANES). Each group has one sample. */
void NAME(outer_norms)(const REAL *delta, const REAL *a, REAL *S, REAL *again, REAL *W,
                       double *extra, REAL *bias, REAL *scratch, int64_t batch, int64_t groups,
                       int64_t r, int64_t o, int64_t i, int64_t at_once, int threads) {
    NAME(outer_of)(delta, a, S, again, W, bias, scratch, extra, batch, groups, r, o, i, at_once,
                   threads);
    NAME(join_norms)(extra, batch, threads);
}

void NAME(conv_norms)(const REAL *x, const REAL *delta, REAL *S, REAL *again, REAL *W,
                      double *extra, REAL *bias, REAL *scratch, Convolution *s, int threads) {
    NAME(conv_of)(x, delta, S, again, W, bias, scratch, extra, s, threads);
    NAME(join_norms)(extra, s->images / s->per, threads);
}

void NAME(conv)(const REAL *x, const REAL *delta, REAL *S, REAL *again, REAL *W, REAL *bias,
                REAL *scratch, Convolution *s, int threads) {
    NAME(conv_of)(x, delta, S, again, W, bias, scratch, 0, s, threads);
}

void NAME(conv_spread)(const REAL *x, const REAL *delta, REAL *S, double *spread, REAL *bias,
                       REAL *scratch, Convolution *s, int threads) {
    NAME(conv_of)(x, delta, S, 0, 0, bias, scratch, spread, s, threads);
}

void NAME(depthwise)(const REAL *x, const REAL *delta, REAL *S, REAL *W, REAL *bias, REAL *scratch,
                     Convolution *s, int threads) {
    NAME(depthwise_of)(x, delta, S, W, bias, scratch, 0, s, threads);
}

void NAME(depthwise_spread)(const REAL *x, const REAL *delta, REAL *S, double *spread, REAL *bias,
                            REAL *scratch, Convolution *s, int threads) {
    NAME(depthwise_of)(x, delta, S, 0, bias, scratch, spread, s, threads);
}

/* Write the sums of |x| and of x^2 of `count` tensors, in double precision: [count, 2]. `parts` has
   the same of each thread, [threads, count, 2]. Each thread takes a part of every tensor. */
void NAME(lengths)(const REAL *const *tensors, const int64_t *sizes, double *sums, double *parts,
                   int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++)
        for (int64_t k = 0; k < count; k++) {
            const REAL *x = tensors[k];
            double size = 0, square = 0;
            for (int64_t from = sizes[k] * t / threads, end = sizes[k] * (t + 1) / threads;
                 from < end;) {
                /* add up a few at a time in the precision of x, then in double precision */
                const int64_t stop = end - from < SHORT_SUM ? end : from + SHORT_SUM;
                REAL a = 0, s = 0;
#pragma omp simd reduction(+ : a, s)
                for (int64_t j = from; j < stop; j++) {
                    a += x[j] < 0 ? -x[j] : x[j];
                    s += x[j] * x[j];
                }
                size += a;
                square += s;
                from = stop;
            }
            parts[2 * (t * count + k)] = size;
            parts[2 * (t * count + k) + 1] = square;
        }
    for (int64_t k = 0; k < 2 * count; k++) {
        sums[k] = 0;
        for (int t = 0; t < threads; t++) sums[k] += parts[2 * t * count + k];
    }
}

static inline double NAME(length2)(const REAL *x, int64_t n) {
    double sum = 0;
    for (int64_t from = 0; from < n; from += SHORT_SUM) {
        const int64_t stop = n - from < SHORT_SUM ? n : from + SHORT_SUM;
        REAL s = 0;
#pragma omp simd reduction(+ : s)
        for (int64_t k = from; k < stop; k++) s += x[k] * x[k];
        sum += s;
    }
    return sum;
}

/* For dense layers with one row per sample, delta [b, o] and a [b, i], write the sums of
   |delta_b|^2 |a_b|^2 and of |delta_b|^2: one row per thread, [threads, 2]. */
void NAME(single)(const REAL *delta, const REAL *a, double *sums, int64_t b, int64_t o, int64_t i,
                  int64_t delta_step, int64_t a_step, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        double weight = 0, bias = 0;
        for (int64_t k = b * t / threads; k < b * (t + 1) / threads; k++) {
            const double d = NAME(length2)(delta + k * delta_step, o);
            weight += d * NAME(length2)(a + k * a_step, i);
            bias += d;
        }
        sums[2 * t] = weight;
        sums[2 * t + 1] = bias;
    }
}
