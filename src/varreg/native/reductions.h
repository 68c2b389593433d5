/* Sums over samples, rows, pixels and looked-up rows. Included once for each REAL, float and
   double. The letters are those of engine/contribution.py: b samples, u groups, r rows, f features;
   S is `total`, W is `square`. The definitions in PyTorch are Dense in engine/contribution.py, and
   engine/rules.

   No sum is split among threads, so results do not depend on the number of threads. */

/* Return the sum of a vector's numbers. */
static inline double NAME(lanes)(NAME(vec) a) {
    REAL part[VECTOR / sizeof(REAL)];
    AT(part) = a;
    if (LANES < 4) return part[0] + part[1];
    NAME(quad) sum = QUAD(part);
    for (int64_t k = 4; k < LANES; k += 4) sum += QUAD(part + k);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Return sum x. Four registers hide the latency of additions. */
static inline double NAME(plain)(const REAL *x, int64_t n) {
    NAME(vec) a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a += AT(x + i);
        b += AT(x + i + LANES);
        c += AT(x + i + 2 * LANES);
        d += AT(x + i + 3 * LANES);
    }
    for (; i + LANES <= n; i += LANES) a += AT(x + i);
    double sum = i ? NAME(lanes)((a + b) + (c + d)) : 0;
    for (; i < n; i++) sum += x[i];
    return sum;
}

/* Write sum (x - m) y, and sum y. */
static inline void NAME(centred)(const REAL *x, const REAL *y, REAL m, int64_t n, double *product,
                                 double *sum) {
    NAME(vec) a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a += (AT(x + i) - m) * AT(y + i);
        b += AT(y + i);
        c += (AT(x + i + LANES) - m) * AT(y + i + LANES);
        d += AT(y + i + LANES);
    }
    for (; i + LANES <= n; i += LANES) {
        a += (AT(x + i) - m) * AT(y + i);
        b += AT(y + i);
    }
    double p = i ? NAME(lanes)(a + c) : 0, s = i ? NAME(lanes)(b + d) : 0;
    for (; i < n; i++) {
        p += (double)(REAL)(x[i] - m) * y[i];
        s += y[i];
    }
    *product = p;
    *sum = s;
}

/* Write the mean and 1/sqrt(variance + eps). The mean has two parts: m, and `rest`, the rounding
   error of m. Without centring, the mean is 0, and the variance is the mean square. */
static inline void NAME(statistics)(const REAL *x, int64_t n, int centre, double eps, REAL *m,
                                    double *rest, double *rstd) {
    NAME(vec) a = {0}, b = {0}, c = {0}, d = {0};
    *m = centre ? (REAL)(NAME(plain)(x, n) / n) : 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        NAME(vec) p = AT(x + i) - *m, q = AT(x + i + LANES) - *m;
        a += p;
        b += p * p;
        c += q;
        d += q * q;
    }
    for (; i + LANES <= n; i += LANES) {
        NAME(vec) p = AT(x + i) - *m;
        a += p;
        b += p * p;
    }
    double first = i ? NAME(lanes)(a + c) : 0, second = i ? NAME(lanes)(b + d) : 0;
    for (; i < n; i++) {
        REAL p = x[i] - *m;
        first += p;
        second += (double)p * p;
    }
    *rest = centre ? first / n : 0;
    *rstd = 1 / sqrt(second / n - *rest * *rest + eps);
}

/* Write S and W of contributions in memory, [b, n] with rows `stride` apart. Sums over samples are
   in double precision, and over at most CHAIN groups at a time: one long chain of additions would
   drift, but where all samples are equal, S^2 and m W must be equal, too. */
void NAME(sums)(const REAL *values, REAL *total, REAL *square, int64_t batch, int64_t groups,
                int64_t n, int64_t stride, int threads) {
    enum { WIDTH = SUMS_AT_ONCE };
    int64_t size = batch / groups, larger = batch % groups;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t first = 0; first < n; first += WIDTH) {
        int64_t width = n - first < WIDTH ? n - first : WIDTH;
        double all_s[WIDTH] = {0}, all_w[WIDTH] = {0}, s[WIDTH] = {0}, w[WIDTH] = {0}, c[WIDTH];
        const REAL *v = values + first;
        for (int64_t u = 0, full = CHAIN; u < groups; u++) {
            if (u >= full) {
                for (int64_t j = 0; j < width; j++) {
                    all_s[j] += s[j];
                    all_w[j] += w[j];
                    s[j] = w[j] = 0;
                }
                full = u + CHAIN;
            }
            int64_t members = size + (u < larger);
            if (members == 1 && u + 4 <= groups) { /* later groups are no larger */
                for (int64_t j = 0; j < width; j++) {
                    double p = v[j], q = v[j + stride], x = v[j + 2 * stride],
                           y = v[j + 3 * stride];
                    s[j] += (p + q) + (x + y);
                    w[j] += (p * p + q * q) + (x * x + y * y);
                }
                v += 4 * stride;
                u += 3;
                continue;
            }
            if (members == 1) {
                for (int64_t j = 0; j < width; j++) {
                    double one = v[j];
                    s[j] += one;
                    w[j] += one * one;
                }
                v += stride;
                continue;
            }
            for (int64_t j = 0; j < width; j++) c[j] = v[j];
            v += stride;
            for (int64_t i = 1; i < members; i++, v += stride)
                for (int64_t j = 0; j < width; j++) c[j] += v[j];
            for (int64_t j = 0; j < width; j++) {
                s[j] += c[j];
                w[j] += c[j] * c[j] / members;
            }
        }
        for (int64_t j = 0; j < width; j++) total[first + j] = (REAL)(all_s[j] + s[j]);
        if (square)
            for (int64_t j = 0; j < width; j++) square[first + j] = (REAL)(all_w[j] + w[j]);
    }
}

/* Sum [b, r, f] over rows: [b, f]. Samples and rows may be any distance apart. */
void NAME(rows)(const REAL *values, REAL *out, int64_t batch, int64_t rows, int64_t n,
                int64_t by_sample, int64_t by_row, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < batch; b++) {
        const REAL *v = values + b * by_sample;
        REAL *restrict c = out + b * n;
        for (int64_t j = 0; j < n; j++) c[j] = 0;
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4, v += 4 * by_row)
            for (int64_t j = 0; j < n; j++)
                c[j] += (v[j] + v[j + by_row]) + (v[j + 2 * by_row] + v[j + 3 * by_row]);
        for (; i < rows; i++, v += by_row)
            for (int64_t j = 0; j < n; j++) c[j] += v[j];
    }
}

/* Sum [n, pixels] over pixels: [n]. */
void NAME(pixels)(const REAL *values, REAL *out, int64_t n, int64_t pixels, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t k = 0; k < n; k++) out[k] = (REAL)NAME(plain)(values + k * pixels, pixels);
}

/* Write sum dy xhat and sum dy of each image and channel, from x and dy [images, channels, pixels].
   xhat is x normalized over each of `groups` groups of channels; or, if `mean` and `scale` are
   given, by each channel's mean and 1/sqrt(variance + eps). */
void NAME(norm_channels)(const REAL *x, const REAL *dy, const REAL *mean, const REAL *scale,
                         REAL *weight, REAL *bias, int64_t images, int64_t channels, int64_t pixels,
                         int64_t groups, double eps, int threads) {
    int64_t each = channels / groups;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t k = 0; k < images * groups; k++) {
        REAL m;
        double rest = 0, rstd, product, sum;
        if (mean) {
            m = mean[k % groups];
            rstd = scale[k % groups];
        } else {
            NAME(statistics)(x + k * each * pixels, each * pixels, 1, eps, &m, &rest, &rstd);
        }
        for (int64_t c = k * each; c < (k + 1) * each; c++) {
            NAME(centred)(x + c * pixels, dy + c * pixels, m, pixels, &product, &sum);
            weight[c] = (REAL)((product - rest * sum) * rstd);
            bias[c] = (REAL)sum;
        }
    }
}

/* Write sum dy xhat and sum dy of each sample and feature, from x and dy [b, r, f]. xhat is x
   normalized over features. Samples and rows may be any distance apart. */
void NAME(norm_rows)(const REAL *x, const REAL *dy, REAL *weight, REAL *bias, int64_t batch,
                     int64_t rows, int64_t n, int64_t x_by_sample, int64_t x_by_row,
                     int64_t dy_by_sample, int64_t dy_by_row, int64_t centre, double eps,
                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < batch; b++) {
        REAL *restrict w = weight + b * n, *restrict s = bias + b * n;
        for (int64_t j = 0; j < n; j++) w[j] = s[j] = 0;
        for (int64_t i = 0; i < rows; i++) {
            const REAL *a = x + b * x_by_sample + i * x_by_row,
                       *d = dy + b * dy_by_sample + i * dy_by_row;
            REAL m;
            double rest, rstd;
            NAME(statistics)(a, n, centre, eps, &m, &rest, &rstd);
            REAL scale = (REAL)rstd, left = (REAL)(rest * rstd);
            for (int64_t j = 0; j < n; j++) {
                w[j] += d[j] * ((a[j] - m) * scale - left);
                s[j] += d[j];
            }
        }
    }
}

/* Add up S and W of a table. Its rows `ids` [b, r] were looked up and receive dy [b, r, f]. The
   rows of one group are first added up in `compact`, [lookups of the largest group, f]; the sums
   are then added to S and, if `square` is given, to W. `slots` is memory for one number per row of
   the table, two per id, and one per group. */
void NAME(lookup)(const REAL *dy, const int64_t *ids, REAL *total, REAL *square, REAL *compact,
                  int32_t *slots, int64_t vocabulary, int64_t batch, int64_t groups, int64_t rows,
                  int64_t n, int64_t by_sample, int64_t by_row, int64_t skip, int threads) {
    int64_t size = batch / groups, larger = batch % groups;
    int32_t *slot = slots, *place = slot + vocabulary, *touched = place + batch * rows,
            *count = touched + batch * rows;
    for (int64_t k = 0; k < vocabulary; k++) slot[k] = -1;
    for (int64_t u = 0, t = 0; u < groups; u++) {
        int64_t begin = t, end = t + (size + (u < larger)) * rows;
        int32_t found = 0;
        for (; t < end; t++) {
            int64_t id = ids[t];
            if (id == skip) {
                place[t] = -1;
                continue;
            }
            if (slot[id] < 0) {
                touched[begin + found] = (int32_t)id;
                slot[id] = found++;
            }
            place[t] = slot[id];
        }
        for (int32_t k = 0; k < found; k++) slot[touched[begin + k]] = -1;
        count[u] = found;
    }
    /* each thread works on its own features, in whole cache lines */
    int64_t width = (n + threads - 1) / threads;
    width = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t first = 0; first < n; first += width) {
        int64_t w = n - first < width ? n - first : width;
        for (int64_t u = 0, b = 0, begin = 0; u < groups; u++) {
            int64_t members = size + (u < larger), stop = b + members;
            REAL share = 1 / (REAL)members;
            for (int64_t k = 0; k < count[u]; k++)
                for (int64_t j = 0; j < w; j++) compact[k * n + first + j] = 0;
            for (int64_t t = begin; b < stop; b++)
                for (int64_t i = 0; i < rows; i++, t++) {
                    if (place[t] < 0) continue;
                    REAL *restrict c = compact + place[t] * n + first;
                    const REAL *d = dy + b * by_sample + i * by_row + first;
                    for (int64_t j = 0; j < w; j++) c[j] += d[j];
                }
            for (int64_t k = 0; k < count[u]; k++) {
                const REAL *c = compact + k * n + first;
                REAL *restrict s = total + touched[begin + k] * n + first;
                for (int64_t j = 0; j < w; j++) s[j] += c[j];
                if (!square) continue;
                REAL *restrict q = square + touched[begin + k] * n + first;
                for (int64_t j = 0; j < w; j++) q[j] += c[j] * c[j] * share;
            }
            begin += members * rows;
        }
    }
}
