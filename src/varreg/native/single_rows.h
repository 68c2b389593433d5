/* S and W of dense layers with one row for each sample: S = delta' a, and W the same of squares, if
   each group has one sample. Included after dense.h, once for each REAL. The definition in PyTorch
   is Outer.sums_with_bias in engine/contribution.py. The letters are the same. A tile is MR output
   features times NV vectors of input features, as in dense.h, which computes larger groups. Tiles
   follow each other along the rows of S and W, so that memory is written in order. */

#define ALL                                                                                        \
    _Pragma("GCC unroll 12") for (int m = 0; m < MR; m++)                                          \
        _Pragma("GCC unroll 2") for (int v = 0; v < NV; v++)

/* Write to `out` and to `again`, if that is not 0, the product of d [rows, MR] and x [rows, width],
   or of d and the squares of x. */
static inline __attribute__((always_inline)) void
NAME(product)(const int is_squared, int64_t rows, const REAL *d, const REAL *x, REAL *out,
              REAL *again, int64_t ld) {
    /* a few samples at a time: one long chain of additions would drift */
    for (int64_t begin = 0; begin < rows; begin += CHAIN) {
        const int64_t end = AT_MOST(rows, begin + CHAIN);
        NAME(vec) sum[MR][NV];
        ALL sum[m][v] = (NAME(vec)){0};
        for (int64_t k = begin; k < end; k++, d += MR, x += NV * LANES) {
            NAME(vec) row[NV];
            for (int v = 0; v < NV; v++) row[v] = AT(x + v * LANES);
            if (is_squared)
                for (int v = 0; v < NV; v++) row[v] *= row[v];
            ALL sum[m][v] += row[v] * d[m];
        }
        if (begin) ALL sum[m][v] += AT(out + m * ld + v * LANES);
        ALL AT(out + m * ld + v * LANES) = sum[m][v];
        if (again && end == rows) ALL AT(again + m * ld + v * LANES) = sum[m][v];
    }
}

/* The tile's part that is inside of the matrix, [high, wide], to its place. */
static void NAME(put)(const REAL *tile, REAL *out, int64_t high, int64_t wide, int64_t ld) {
    for (int64_t m = 0; m < high; m++)
        memcpy(out + m * ld, tile + m * NV * LANES, wide * sizeof(REAL));
}

/* Write a tile of S, of a second S and of W, `ld` numbers from row to row; d has the rows of delta,
   [b, MR], `squares` their squares, and x those of a. */
static inline void NAME(single_tile)(int64_t b, NAME(groups) all, const REAL *d,
                                     const REAL *squares, const REAL *x, REAL *S, REAL *again,
                                     REAL *W, int64_t ld) {
    if (all.count == b) {
        NAME(product)(0, b, d, x, S, again, ld);
        NAME(product)(1, b, squares, x, W, 0, ld);
        return;
    }
    const int64_t width = NV * LANES;
    for (int64_t first = 0; first < all.count;) {
        const NAME(run) run = NAME(run_from)(first, all, all.count);
        const NAME(lines) at = {run.n * width, 1, run.n, 0, width};
        NAME(tiles)[MR - 1][NV - 1][PLAIN](run.end - first, 1, d + run.start * MR,
                                           x + run.start * width, &at, S, W, ld, width,
                                           (REAL)1 / (REAL)run.n, 0, again, !first);
        first = run.end;
    }
}

/* Compute S, a second S and W, all [o, i], from delta [b, o] and a [b, i]; and S and W of the bias,
   [o], if these are not 0. There are b groups, or at most CHAIN. */
void NAME(single_rows)(const REAL *delta, const REAL *a, REAL *S, REAL *again, REAL *W,
                       REAL *scratch, REAL *bias_S, REAL *bias_W, int64_t b, int64_t groups,
                       int64_t o, int64_t i, int64_t together, int threads) {
    const NAME(groups) all = {groups, b / groups, b % groups};
    const int64_t width = NV * LANES, panels = (i + width - 1) / width, blocks = (o + MR - 1) / MR,
                  parts = (panels + together - 1) / together;
    if (bias_S)
        NAME(sums)(delta, bias_S, bias_W, b, groups, o, o, b * o < WORTH_THREADS ? 1 : threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        REAL *d = scratch + panels * width * b + THREAD * 2 * MR * b, *squares = d + MR * b;
        int64_t packed = -1;
        /* pack a: [panels][b][width], with zeros after the last feature */
#pragma omp for schedule(static)
        for (int64_t k = 0; k < b; k++)
            for (int64_t p = 0; p < panels; p++) {
                const int64_t wide = AT_MOST(width, i - p * width);
                REAL *to = scratch + (p * b + k) * width;
                for (int64_t j = 0; j < wide; j++) to[j] = a[k * i + p * width + j];
                for (int64_t j = wide; j < width; j++) to[j] = 0;
            }
        /* some panels of a stay in the cache for all blocks of delta */
#pragma omp for schedule(static)
        for (int64_t work = 0; work < parts * blocks; work++) {
            const int64_t first = work % blocks * MR, high = AT_MOST(MR, o - first),
                          from = work / blocks * together, to = AT_MOST(panels, from + together);
            for (int64_t k = 0; packed != first && k < b; k++)
                for (int64_t m = 0; m < MR; m++) {
                    const REAL x = m < high ? delta[k * o + first + m] : 0;
                    d[k * MR + m] = x;
                    squares[k * MR + m] = x * x;
                }
            packed = first;
            for (int64_t p = from; p < to; p++) {
                const REAL *x = scratch + p * b * width;
                const int64_t at = first * i + p * width, wide = AT_MOST(width, i - p * width);
                if (high == MR && wide == width) {
                    NAME(single_tile)(b, all, d, squares, x, S + at, again + at, W + at, i);
                    continue;
                }
                REAL tiles[3][MR * NV * VECTOR / sizeof(REAL)];
                NAME(single_tile)(b, all, d, squares, x, tiles[0], tiles[1], tiles[2], width);
                NAME(put)(tiles[0], S + at, high, wide, i);
                NAME(put)(tiles[1], again + at, high, wide, i);
                NAME(put)(tiles[2], W + at, high, wide, i);
            }
        }
    }
}
#undef ALL
