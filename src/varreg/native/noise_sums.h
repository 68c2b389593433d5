/* Sums for the noise scale and its l1 version, in one pass over S and W. Included after lambda.h,
   once for each REAL. The definitions in PyTorch are products in optim/gradient.py, and l1_sums in
   noise/measure.py. */

#ifndef NOISE_SUMS
#define NOISE_SUMS 5 /* S.S, the sum of W, and those of s, |mean| and e exp(-4 z^2) */
#endif

/* Return 2^x for x <= 0, without libm and without branches: x = k + r, |r| <= 1/2, and 2^r is the
   sum of (r ln 2)^j/j!. x + magic has k in its lowest bits. Shifted into the exponent, they
   multiply by 2^k. */
static inline REAL NAME(power_of_two)(REAL x) {
    const int single = sizeof(REAL) == sizeof(float);
    const REAL magic = single ? (REAL)12582912.0 : (REAL)6755399441055744.0; /* 3/2 2^23, 2^52 */
    const REAL lowest = single ? (REAL)-126.0 : (REAL)-1022.0; /* below, it is no normal number */
    union {
        REAL real;
        UINT bits;
    } sum, result;
    REAL at = x < lowest ? lowest : x;
    sum.real = at + magic;
    REAL r = at - (sum.real - magic), p = (REAL)1.5252733804059838e-05;
    if (!single) {
        p = (REAL)1.3691488853904124e-12;
        p = p * r + (REAL)2.5678435993488196e-11;
        p = p * r + (REAL)4.4455382718708101e-10;
        p = p * r + (REAL)7.0549116208011209e-09;
        p = p * r + (REAL)1.0178086009239696e-07;
        p = p * r + (REAL)1.3215486790144305e-06;
        p = p * r + (REAL)1.5252733804059838e-05;
    }
    p = p * r + (REAL)0.00015403530393381606;
    p = p * r + (REAL)0.0013333558146428441;
    p = p * r + (REAL)0.0096181291076284769;
    p = p * r + (REAL)0.055504108664821576;
    p = p * r + (REAL)0.24022650695910069;
    p = p * r + (REAL)0.69314718055994529;
    result.real = p * r + 1;
    result.bits += sum.bits << (single ? 23 : 52);
    return x < lowest ? 0 : result.real;
}

/* Return 1/sqrt(x) for a normal x, and a finite number for 0. Half of the exponent is a first
   guess; three steps of Newton's method give all digits of a float. A division and a square root
   would take longer than the rest of the loop that calls this. */
static inline REAL NAME(inverse_root)(REAL x) {
    if (sizeof(REAL) != sizeof(float)) return 1 / SQRT(x > 0 ? x : 1);
    union {
        REAL real;
        UINT bits;
    } guess;
    guess.real = x;
    guess.bits = (UINT)0x5f3759df - (guess.bits >> 1);
    REAL y = guess.real, half = x * (REAL)0.5;
    y *= (REAL)1.5 - half * y * y;
    y *= (REAL)1.5 - half * y * y;
    return y * ((REAL)1.5 - half * y * y);
}

/* Write the sums of s, |mean| and e exp(-4 z^2) of a block, where e = s/sqrt(m), z = mean/e, and
   s^2 is the unbiased variance of one sample. `numbers` are m, factor, rounding and scale. */
static void NAME(l1_block)(int64_t n, const REAL *restrict S, const REAL *restrict W,
                           const double *numbers, double *out) {
    const REAL m = (REAL)numbers[0], scale = (REAL)numbers[3], root = SQRT(m);
    REAL variance[BLOCK], inverse[BLOCK], each[BLOCK], spread = 0, size = 0, excess = 0;
    NAME(variance_block)(n, S, W, variance, m, (REAL)numbers[1], (REAL)numbers[2]);
    /* in short loops, whose chains of operations a processor works on side by side */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) inverse[i] = NAME(inverse_root)(variance[i]);
#pragma omp simd reduction(+ : spread, size)
    for (int64_t i = 0; i < n; i++) {
        REAL s = variance[i] * inverse[i], mean = (S[i] < 0 ? -S[i] : S[i]) * scale;
        REAL z = mean * root * inverse[i];
        spread += s;
        size += mean;
        variance[i] = s;
        each[i] = z * z * (REAL)-5.770780163555854; /* -4/ln 2 */
    }
#pragma omp simd reduction(+ : excess)
    for (int64_t i = 0; i < n; i++) excess += variance[i] * NAME(power_of_two)(each[i]);
    out[0] = spread;
    out[1] = size;
    out[2] = excess / root;
}

/* Write the five sums of each tensor to `out`; the last three are 0 unless `with_l1`. `table` has
   the number of elements and the addresses of S and W of each tensor, `numbers` has m, factor,
   rounding and scale. `room` is memory for the sums of each block. The order of additions does not
   depend on the number of threads. */
void NAME(noise_sums)(const int64_t *table, const double *numbers, double *out, double *room,
                 int64_t tensors, int64_t with_l1, int threads) {
    int64_t blocks = 0;
    for (int64_t k = 0; k < tensors; k++) blocks += BLOCKS(table[3 * k]);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int share = 0; share < threads; share++) {
        int64_t from = blocks * share / threads, to = blocks * (share + 1) / threads, before = 0;
        for (int64_t k = 0; k < tensors && before < to; k++) {
            const int64_t n = table[3 * k], end = AT_MOST(to - before, BLOCKS(n));
            for (int64_t b = AT_LEAST(from - before, 0); b < end; b++) {
                const int64_t at = b * BLOCK, some = AT_MOST(BLOCK, n - at);
                const REAL *restrict S = (const REAL *)(intptr_t)table[3 * k + 1] + at;
                const REAL *restrict W = (const REAL *)(intptr_t)table[3 * k + 2] + at;
                double *sums = room + NOISE_SUMS * (before + b), SS = 0, sum = 0;
#pragma omp simd reduction(+ : SS, sum)
                for (int64_t i = 0; i < some; i++) {
                    SS += (double)S[i] * (double)S[i];
                    sum += W[i];
                }
                sums[0] = SS;
                sums[1] = sum;
                sums[2] = sums[3] = sums[4] = 0;
                if (with_l1) NAME(l1_block)(some, S, W, numbers + 4 * k, sums + 2);
            }
            before += BLOCKS(n);
        }
    }
    for (int64_t k = 0; k < tensors; k++, out += NOISE_SUMS) {
        for (int j = 0; j < NOISE_SUMS; j++) out[j] = 0;
        for (int64_t b = 0; b < BLOCKS(table[3 * k]); b++, room += NOISE_SUMS)
            for (int j = 0; j < NOISE_SUMS; j++) out[j] += room[j];
    }
}
