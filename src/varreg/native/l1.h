/* Sums for the l1 version of the noise scale. Included after lambda.h, once for each REAL. The
   definition in PyTorch is l1_sums in noise/measure.py. */

/* Return exp(x) for x <= 0, without libm and without branches: x = k ln 2 + r, |r| <= ln 2/2. The
   sum x/ln 2 + magic has k in its lowest bits. Shifted into the exponent, they multiply by 2^k. */
static inline REAL NAME(exponential)(REAL x) {
    const int single = sizeof(REAL) == sizeof(float);
    const REAL magic = single ? (REAL)12582912.0 : (REAL)6755399441055744.0; /* 3/2 2^23, 2^52 */
    const REAL lowest = single ? (REAL)-87.0 : (REAL)-708.0; /* below, it is not a normal number */
    const REAL high = single ? (REAL)0.693359375 : (REAL)6.93147180369123816490e-01;
    const REAL low = single ? (REAL)-2.12194440e-4 : (REAL)1.90821492927058770002e-10;
    union {
        REAL real;
        UINT bits;
    } sum, result;
    REAL at = x < lowest ? lowest : x;
    sum.real = at * (REAL)1.44269504088896340736 + magic;
    REAL k = sum.real - magic, r = at - k * high - k * low, p = 1;
    if (!single) {
        p = 1 + p * r * (REAL)(1.0 / 13);
        p = 1 + p * r * (REAL)(1.0 / 12);
        p = 1 + p * r * (REAL)(1.0 / 11);
        p = 1 + p * r * (REAL)(1.0 / 10);
        p = 1 + p * r * (REAL)(1.0 / 9);
        p = 1 + p * r * (REAL)(1.0 / 8);
    }
    p = 1 + p * r * (REAL)(1.0 / 7);
    p = 1 + p * r * (REAL)(1.0 / 6);
    p = 1 + p * r * (REAL)(1.0 / 5);
    p = 1 + p * r * (REAL)(1.0 / 4);
    p = 1 + p * r * (REAL)(1.0 / 3);
    p = 1 + p * r * (REAL)(1.0 / 2);
    p = 1 + p * r;
    result.real = p;
    result.bits += sum.bits << (single ? 23 : 52);
    return x < lowest ? 0 : result.real;
}

/* Write the sums of s, |mean| and e exp(-4 z^2) of a block, where e = s/sqrt(m), z = mean/e, and
   s^2 is the unbiased variance of one sample. */
static void NAME(l1_block)(const Task *t, int64_t at, int64_t n, int64_t number) {
    const REAL *S = TENSOR(total), scale = NUMBER(scale), part = 1 / SQRT(NUMBER(m));
    double *out = (double *)t->products + 4 * number, spread = 0, size = 0, excess = 0;
    REAL variance[BLOCK];
    NAME(variance_block)(n, S, TENSOR(square), variance, NUMBER(m), NUMBER(factor),
                         NUMBER(rounding));
#pragma omp simd reduction(+ : spread, size, excess)
    for (int64_t i = 0; i < n; i++) {
        REAL s = SQRT(variance[i]), mean = (S[i] < 0 ? -S[i] : S[i]) * scale, e = s * part;
        REAL z = mean / (e > 0 ? e : 1); /* without noise there is no excess */
        spread += s;
        size += mean;
        excess += e * NAME(exponential)(-4 * z * z);
    }
    out[0] = spread;
    out[1] = size;
    out[2] = excess;
    out[3] = 0;
}

void NAME(l1)(int64_t tasks, const Task *task, int threads) {
    each_block(tasks, task, threads, NAME(l1_block));
    add_up(tasks, task);
}
