/* Included once for each REAL, float and double, with NAME(x) giving its functions their names. The letters are those of regularizer.py. */

/* One element: rho enters its history, and lambda comes out. kind, form and scale_free are constants where this is inlined. */
static inline __attribute__((always_inline)) void NAME(element)(REAL variance, REAL delta, REAL *history, REAL *count, REAL present, REAL *lambda,
                                                                int some, int kind, int form, int scale_free, REAL s, REAL half, REAL limit, REAL low, REAL high) {
    REAL rho = scale_free ? variance / (delta * delta) : variance;
    rho = rho > limit ? limit : rho;
    rho = (some != 0) & (present == 0) ? (REAL)NAN : rho; /* no sample had a gradient */
    REAL value = kind == HARMONIC ? 1 / rho : rho;
    int valid = (rho - rho == 0) & (value - value == 0);
    REAL sum = *history + (valid ? value : 0);
    sum = sum > HUGE_SUM ? HUGE_SUM : sum;
    REAL number = *count + (valid ? (REAL)1 : (REAL)0);
    *history = sum;
    *count = number;
    REAL average = kind == SUM ? sum : kind == MEAN ? sum / number : number / sum;
    REAL result = form == RATIONAL ? (1 + s) / (1 + s * (rho / average)) : (1 + half) * (average / rho) - half;
    result = result < low ? low : result;
    result = result > high ? high : result;
    *lambda = result == result ? result : 1;
}

#define LOOP(KIND, FORM, SCALE_FREE)                                                                                                \
    if (kind == KIND && form == FORM && scale_free == SCALE_FREE) {                                                                 \
        _Pragma("omp parallel for simd num_threads(threads) schedule(static)") for (int64_t i = 0; i < n; i++)                      \
            NAME(element)(variance[i], delta[i], history + i, count + i, present[i], lambda + i, some, KIND, FORM, SCALE_FREE, s, half, limit, low, high); \
        return;                                                                                                                     \
    }

void NAME(lambda)(int64_t n, const REAL *restrict variance, const REAL *restrict delta, REAL *restrict history, REAL *restrict count,
                  const REAL *present, REAL *restrict lambda, int some, int kind, int form, int scale_free, REAL s, REAL half, REAL limit, REAL low, REAL high, int threads) {
    LOOP(SUM, RATIONAL, 1) LOOP(MEAN, RATIONAL, 1) LOOP(HARMONIC, RATIONAL, 1) LOOP(SUM, AFFINE, 1) LOOP(MEAN, AFFINE, 1) LOOP(HARMONIC, AFFINE, 1)
    LOOP(SUM, RATIONAL, 0) LOOP(MEAN, RATIONAL, 0) LOOP(HARMONIC, RATIONAL, 0) LOOP(SUM, AFFINE, 0) LOOP(MEAN, AFFINE, 0) LOOP(HARMONIC, AFFINE, 0)
}

#undef LOOP

/* out = (m * square - total^2) * factor, and 0 where that is no more than rounding */
void NAME(variance)(int64_t n, const REAL *restrict total, const REAL *restrict square, REAL *restrict out, REAL m, REAL factor, REAL rounding,
                    int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        REAL size = m * square[i];
        REAL left = size - total[i] * total[i];
        out[i] = left <= size * rounding ? 0 : left * factor; /* nan stays nan */
    }
}
