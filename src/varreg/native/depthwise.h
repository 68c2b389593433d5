/* Depthwise convolutions: each output feature sees only one input channel. S and W are [o, 1, kh,
   kw], and o is a multiple of c. Nothing is packed. */

/* Return the contribution of one image to one element (ky, kx) of the kernel. */
static inline REAL NAME(seen)(const Convolution *s, const REAL *x, const REAL *delta, int64_t ky,
                              int64_t kx) {
    /* output pixels `left` to `right` of a line do not see padding */
    const int64_t before = s->px - kx * s->dx, left = before > 0 ? (before + s->sx - 1) / s->sx : 0;
    const int64_t last = s->w - 1 + before, end = last < 0 ? 0 : last / s->sx + 1;
    const int64_t right = end < s->ow ? end : s->ow;
    REAL total = 0;
    for (int64_t y = 0; y < s->oh; y++) {
        int64_t line = y * s->sy + ky * s->dy - s->py;
        if (line < 0 || line >= s->h) continue;
        const REAL *from = x + line * s->x_row - before, *d = delta + y * s->ow;
        REAL sum = 0;
        if (s->sx == 1) {
#pragma omp simd reduction(+ : sum)
            for (int64_t k = left; k < right; k++) sum += from[k] * d[k];
        } else
            for (int64_t k = left; k < right; k++) sum += from[k * s->sx] * d[k];
        total += sum;
    }
    return total;
}

static void NAME(depthwise_of)(const REAL *x, const REAL *delta, REAL *S, REAL *W, REAL *bias,
                               REAL *sums, double *spread, const Convolution *s, int threads) {
    const NAME(groups) all = {s->groups, s->images / s->per / s->groups,
                              s->images / s->per % s->groups};
    const int64_t taps = s->kh * s->kw, each = s->o / s->c;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < s->o; o++) {
        const REAL *plane = x + o / each * s->x_channel, *deltas = delta + o * s->d_channel;
        for (int64_t t = 0; t < taps; t++) {
            double total = 0, square = 0;
            for (int64_t u = 0, k = 0; u < all.count; u++) {
                const int64_t n = all.size + (u < all.larger), end = k + n * s->per;
                double c = 0;
                for (; k < end; k++)
                    c += NAME(seen)(s, plane + k * s->x_image, deltas + k * s->d_image, t / s->kw,
                                    t % s->kw);
                total += c;
                square += c * c / (double)n;
            }
            S[o * taps + t] = (REAL)total;
            if (W)
                W[o * taps + t] = (REAL)square;
            else
                spread[THREAD] += square;
        }
        if (bias)
            for (int64_t k = 0; k < s->images; k++)
                sums[k * s->o + o] = (REAL)NAME(plain)(deltas + k * s->d_image, s->oh * s->ow);
    }
    if (bias) NAME(bias)(sums, bias, s->images / s->per, s->per, s->groups, s->o);
}
