/* S = sum of C_u and W = sum of C_u^2/n over groups u of n samples, where C_u is a matrix product:
   of a dense layer, or of a convolution. C_u is computed tile by tile in registers, and never
   written to memory. The definition in PyTorch is Outer in engine/contribution.py. The letters are
   the same: b samples of r rows (time steps, pixels), o output and i input features.

   A tile is MR output features times NV vectors of input features. delta is packed, so that the MR
   numbers of a row are adjacent in memory.

   If only the sum of all elements of W is wanted (SUM), a tile adds its part to one number in
   double precision, and W is not written. With NORMS, it also adds up C_u^2 over the tile's output
   features, for each unit u by itself, in `own`. Only the first `valid` numbers of a row count.

   A tile adds to S and W; if they are `fresh`, it overwrites what they hold. `again`, if given,
   gets the same S. */
#ifndef DENSE
#define DENSE
enum { PLAIN, SUM, NORMS, MODES };
#endif

/* The places of the rows of one sample's input features. There are `outer` times `inner` rows; for
   a convolution, these are its output lines, and the pixels of a line. */
typedef struct {
    int64_t sample, outer, inner, outer_step, inner_step;
} NAME(lines);

#define UNROLL _Pragma("GCC unroll 12")
static inline __attribute__((always_inline)) void
NAME(tile)(const int mr, const int nv, const int mode, int64_t units, int64_t n, const REAL *a,
           const REAL *b, const NAME(lines) *at, REAL *restrict S, void *restrict W, int64_t ld,
           int64_t valid, REAL share, REAL *restrict own, REAL *restrict again, int fresh) {
    const int alone = mode == SUM;
    /* one loop over all lines: each further loop would hold registers */
    const int64_t inner = at->inner, inner_step = at->inner_step, outer_step = at->outer_step,
                  lines = n * at->outer, rest = at->sample - at->outer * outer_step;
    /* a few groups at a time: one long chain of additions would drift */
    for (int64_t first = 0; first < units; first += CHAIN) {
        NAME(vec) total[MR][NV], square[MR][NV], all[NV] = {{0}};
        UNROLL for (int m = 0; m < mr; m++)
            UNROLL for (int v = 0; v < nv; v++) total[m][v] = square[m][v] = (NAME(vec)){0};
        for (int64_t u = first; u < units && u < first + CHAIN; u++) {
            NAME(vec) c[MR][NV];
            UNROLL for (int m = 0; m < mr; m++)
                UNROLL for (int v = 0; v < nv; v++) c[m][v] = (NAME(vec)){0};
            for (int64_t j = 0, left = at->outer; j < lines; j++) {
                const REAL *row = b;
                for (int64_t i = 0; i < inner; i++, row += inner_step, a += mr) {
                    NAME(vec) x[NV];
                    UNROLL for (int v = 0; v < nv; v++) x[v] = AT(row + v * LANES);
                    UNROLL for (int m = 0; m < mr; m++)
                        UNROLL for (int v = 0; v < nv; v++) c[m][v] += x[v] * a[m];
                }
                b += outer_step;
                if (!--left) {
                    left = at->outer;
                    b += rest;
                }
            }
            UNROLL for (int m = 0; m < mr; m++)
                UNROLL for (int v = 0; v < nv; v++) {
                    total[m][v] += c[m][v];
                    if (alone)
                        all[v] += c[m][v] * c[m][v];
                    else
                        square[m][v] += c[m][v] * c[m][v];
                }
            if (mode == NORMS) {
                UNROLL for (int v = 0; v < nv; v++) {
                    NAME(vec) sum = AT(own + (u * NV + v) * LANES);
                    UNROLL for (int m = 0; m < mr; m++) sum += c[m][v] * c[m][v];
                    AT(own + (u * NV + v) * LANES) = sum;
                }
            }
        }
        UNROLL for (int m = 0; m < mr; m++)
            UNROLL for (int v = 0; v < nv; v++) {
                const int64_t place = m * ld + v * LANES;
                square[m][v] *= share;
                if (!fresh || first) {
                    total[m][v] += AT(S + place);
                    if (!alone) square[m][v] += AT((REAL *)W + place);
                }
                AT(S + place) = total[m][v];
                if (!alone) AT((REAL *)W + place) = square[m][v];
                if (again) AT(again + place) = total[m][v];
            }
        if (alone)
            for (int v = 0; v < valid; v++)
                *(double *)W += (double)all[v / LANES][v % LANES] * share;
    }
}

#define TILE(M, V, MODE)                                                                           \
    static __attribute__((noinline)) void NAME(tile##M##x##V##MODE)(                               \
        int64_t units, int64_t n, const REAL *a, const REAL *b, const NAME(lines) *at, REAL *S,    \
        void *W, int64_t ld, int64_t valid, REAL share, REAL *own, REAL *again, int fresh) {       \
        NAME(tile)(M, V, MODE, units, n, a, b, at, S, W, ld, valid, share, own, again, fresh);     \
    }
#define TILES(M)                                                                                   \
    TILE(M, 1, PLAIN) TILE(M, 2, PLAIN) TILE(M, 1, SUM) TILE(M, 2, SUM)                            \
    TILE(M, 1, NORMS) TILE(M, 2, NORMS)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if MR == 7
TILES(7)
#endif
typedef void (*NAME(tile_of))(int64_t, int64_t, const REAL *, const REAL *, const NAME(lines) *,
                              REAL *, void *, int64_t, int64_t, REAL, REAL *, REAL *, int);
#define EACH(M, V)                                                                                 \
    {NAME(tile##M##x##V##PLAIN), NAME(tile##M##x##V##SUM), NAME(tile##M##x##V##NORMS)}
#define BOTH(M) {EACH(M, 1), EACH(M, 2)}
static const NAME(tile_of) NAME(tiles)[MR][NV][MODES] = {BOTH(1), BOTH(2), BOTH(3),
                                                         BOTH(4), BOTH(5), BOTH(6),
#if MR == 7
                                                         BOTH(7)
#endif
};
#undef TILE
#undef TILES
#undef EACH
#undef BOTH

/* Output features are divided into blocks of about equal size, at most one tile high. These are the
   number of blocks, and the first feature of block k. */
static inline int64_t NAME(blocks_of)(int64_t features) { return (features + MR - 1) / MR; }
static inline int64_t NAME(begin)(int64_t k, int64_t features) {
    return k * features / NAME(blocks_of)(features);
}

typedef INT NAME(places) __attribute__((vector_size(4 * sizeof(REAL)))); /* for SHUFFLE */

/* to[j*step + i] = from[i*stride + j] for four rows; if `rows` is less than 4, the last row stands
   for those that are missing. Return the number of columns that were copied: a multiple of 4. */
static inline int64_t NAME(four)(const REAL *from, int64_t stride, REAL *to, int64_t step,
                                 int64_t rows, int64_t columns) {
    const REAL *second = from + (rows > 1 ? stride : 0), *third = second + (rows > 2 ? stride : 0),
               *fourth = third + (rows > 3 ? stride : 0);
    int64_t j = 0;
    for (; j + 4 <= columns; j += 4) {
        NAME(quad) a = QUAD(from + j), b = QUAD(second + j);
        NAME(quad) c = QUAD(third + j), d = QUAD(fourth + j);
        NAME(quad) ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
        NAME(quad) ab2 = SHUFFLE(a, b, 2, 6, 3, 7), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
        QUAD(to + j * step) = SHUFFLE(ab, cd, 0, 1, 4, 5);
        QUAD(to + (j + 1) * step) = SHUFFLE(ab, cd, 2, 3, 6, 7);
        QUAD(to + (j + 2) * step) = SHUFFLE(ab2, cd2, 0, 1, 4, 5);
        QUAD(to + (j + 3) * step) = SHUFFLE(ab2, cd2, 2, 3, 6, 7);
    }
    return j;
}

/* to[j*step + i] = from[i*stride + j] */
static inline void NAME(transpose)(const REAL *restrict from, int64_t stride, REAL *restrict to,
                                   int64_t step, int64_t rows, int64_t columns) {
    if (rows == 1 && step == 1) {
        memcpy(to, from, columns * sizeof(REAL));
        return;
    }
    const int64_t whole = rows / 4 * 4, left = rows - whole;
    int64_t done = 0;
    /* Four rows in place of the last one to three: what is too much lies at the beginning of the
       next column, which is written afterwards. So the last column is copied by itself. */
    if (left && step == rows)
        done = NAME(four)(from + whole * stride, stride, to + whole, step, left, columns - 1);
    for (int64_t i = whole; i < rows; i++)
        for (int64_t j = done; j < columns; j++) to[j * step + i] = from[i * stride + j];
    for (int64_t i = 0; i < whole; i += 4) {
        done = NAME(four)(from + i * stride, stride, to + i, step, 4, columns);
        for (int64_t j = done; j < columns; j++)
            for (int64_t k = i; k < i + 4; k++) to[j * step + k] = from[k * stride + j];
    }
}

/* to[j*step + k] = from[j*stride + k], for rows of a few numbers. Whole vectors are copied: the
   next row overwrites the surplus numbers. */
static inline void NAME(copy)(const REAL *restrict from, int64_t stride, REAL *restrict to,
                              int64_t step, int64_t rows, int64_t columns) {
    int64_t j = 0, vectors = (columns + LANES - 1) / LANES;
    int64_t over = vectors * LANES,
            whole = rows - (over - columns + (step < stride ? step : stride) - 1) /
                               (step < stride ? step : stride);
    if (vectors == 1)
        for (; j < whole; j++) AT(to + j * step) = AT(from + j * stride);
    else if (vectors == 2)
        for (; j < whole; j++) {
            NAME(vec) one = AT(from + j * stride), two = AT(from + j * stride + LANES);
            AT(to + j * step) = one;
            AT(to + j * step + LANES) = two;
        }
    for (; j < rows; j++)
        for (int64_t k = 0; k < columns; k++) to[j * step + k] = from[j * stride + k];
}

/* The groups of a batch: first `larger` groups of `size` + 1 samples, then groups of `size`. */
typedef struct {
    int64_t count, size, larger;
} NAME(groups);

/* A run of groups, from `first` to `end`, at most `at_once`, all of n samples. `start` is the first
   sample of the run. */
typedef struct {
    int64_t end, n, start;
} NAME(run);

static inline NAME(run) NAME(run_from)(int64_t first, NAME(groups) g, int64_t at_once) {
    int more = first < g.larger;
    int64_t end = more ? g.larger : g.count;
    NAME(run) run = {end - first < at_once ? end : first + at_once, g.size + more,
                     more ? first * (g.size + 1) : g.larger + first * g.size};
    return run;
}

static inline void NAME(clear)(REAL *x, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++)
        memset(x + n * t / threads, 0, (n * (t + 1) / threads - n * t / threads) * sizeof(REAL));
}

/* Add `from` to `to`, and set `from` to 0. */
static inline void NAME(fold)(REAL *restrict to, REAL *restrict from, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        to[k] += from[k];
        from[k] = 0;
    }
}

/* Write S and W of a bias, [2, o], from the sums of delta over rows, `of` [batch * per, o]. */
static void NAME(bias)(const REAL *of, REAL *sums, int64_t batch, int64_t per, int64_t groups,
                       int64_t o) {
    for (int64_t f = 0; f < o; f++) {
        double total = 0, square = 0;
        const REAL *c = of + f;
        for (int64_t u = 0; u < groups; u++) {
            const int64_t n = batch / groups + (u < batch % groups);
            double sum = 0;
            for (int64_t k = 0; k < n * per; k++, c += o) sum += *c;
            total += sum;
            square += sum * sum / (double)n;
        }
        sums[f] = (REAL)total;
        sums[o + f] = (REAL)square;
    }
}

/* Where a thread adds up C_u^2 of each unit: `norms` has one number for each unit, and after them
   is `own` of the tiles, NV vectors for each unit. `extra` has the memory of all threads. */
#define NORMS_OF(extra, batch) ((extra) + THREAD * (batch) * (1 + NV * LANES))
#define OWN_OF(norms, batch) ((REAL *)((norms) + (batch)))

/* Add the valid numbers of `own` to the norms, and set `own` to 0. */
static void NAME(take_own)(double *restrict norms, REAL *restrict own, int64_t units,
                           int64_t valid) {
    for (int64_t u = 0; u < units; u++, own += NV * LANES) {
        REAL sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < valid; v++) sum += own[v];
        norms[u] += sum;
        memset(own, 0, NV * LANES * sizeof(REAL));
    }
}

/* Compute S and W, [o, i], of dense layers from delta [b, r, o] and a [b, r, i]; `again`, if given,
   gets the same S. With `bias`, also compute both sums of the bias, [2, o]. Without W, each thread
   adds its part of the sum of W to `extra`. With W and `extra`, each thread adds its part of each
   sample's norm to `extra`: see NORMS_OF. */
static void NAME(outer_of)(const REAL *delta, const REAL *a, REAL *S, REAL *again, REAL *W,
                           REAL *bias, REAL *scratch, double *extra, int64_t batch, int64_t groups,
                           int64_t r, int64_t o, int64_t i, int64_t at_once, int threads) {
    const int mode = !extra ? PLAIN : W ? NORMS : SUM, alone = mode == SUM;
    REAL *sums = scratch; /* sums of delta over the rows of each sample */
    scratch += bias ? batch * o : 0;
    const int64_t width = NV * LANES, panels = (i + width - 1) / width, blocks = NAME(blocks_of)(o);
    const NAME(groups) all = {groups, batch / groups, batch % groups};
    for (int64_t first = 0; first < groups;) {
        NAME(run) run = NAME(run_from)(first, all, at_once);
        const int64_t units = run.end - first, n = run.n, rows = units * n * r;
        /* divide the blocks, too, if the threads cannot share the panels evenly */
        const int64_t split = panels % threads && panels < 8 * threads ? threads : 1;
        const REAL *d = delta + run.start * r * o, *x = a + run.start * r * i,
                   share = (REAL)1 / (REAL)n;
        /* the rows of a group are adjacent in memory */
        const NAME(lines) at = {n * r * width, 1, n * r, 0, width};
#pragma omp parallel num_threads(threads)
        {
            REAL *panel = scratch + rows * o + LANES + THREAD * (rows * width + LANES);
            int64_t packed = -1;
            double squares = 0, *norms = mode == NORMS ? NORMS_OF(extra, batch) : 0;
            REAL *own = norms ? OWN_OF(norms, batch) : 0;
            /* pack delta: [block][rows][its features] */
#pragma omp for schedule(static)
            for (int64_t sample = 0; sample < units * n; sample++) {
                const REAL *source = d + sample * r * o;
                for (int64_t k = 0; k < blocks; k++) {
                    int64_t from = NAME(begin)(k, o), mr = NAME(begin)(k + 1, o) - from;
                    NAME(copy)(source + from, o, scratch + rows * from + sample * r * mr, mr, r,
                               mr);
                }
                if (bias) {
                    REAL *total = sums + (run.start + sample) * o;
                    for (int64_t f = 0; f < o; f++) total[f] = 0;
                    for (int64_t j = 0; j < r; j++)
                        for (int64_t f = 0; f < o; f++) total[f] += source[j * o + f];
                }
            }
#pragma omp for schedule(static)
            for (int64_t work = 0; work < panels * split; work++) {
                int64_t p = work / split, part = work % split;
                int64_t from = p * width, wide = i - from < width ? i - from : width,
                        nv = (wide + LANES - 1) / LANES;
                if (packed != p) NAME(copy)(x + from, i, panel, width, rows, wide);
                packed = p;
                for (int64_t k = part * blocks / split; k < (part + 1) * blocks / split; k++) {
                    int64_t feature = NAME(begin)(k, o), mr = NAME(begin)(k + 1, o) - feature;
                    const REAL *deltas = scratch + rows * feature;
                    const int64_t place = feature * i + from;
                    REAL *total = S + place, *square = alone ? 0 : W + place;
                    if (wide == nv * LANES)
                        NAME(tiles)[mr - 1][nv - 1][mode](units, 1, deltas, panel, &at, total,
                                                          alone ? (void *)&squares : square, i,
                                                          wide, share, own,
                                                          again ? again + place : 0, !first);
                    else { /* the last panel is narrower than its vectors */
                        REAL t[MR * NV * VECTOR / sizeof(REAL)], q[MR * NV * VECTOR / sizeof(REAL)];
                        NAME(tiles)[mr - 1][nv - 1][alone ? PLAIN : mode](
                            units, 1, deltas, panel, &at, t, q, width, wide, share, own, 0, 1);
                        for (int64_t m = 0; m < mr; m++)
                            for (int64_t v = 0; v < wide; v++) {
                                const int64_t from_tile = m * width + v, to = m * i + v;
                                total[to] = t[from_tile] + (first ? total[to] : 0);
                                if (again) again[place + to] = total[to];
                                if (alone)
                                    squares += q[from_tile];
                                else
                                    square[to] = q[from_tile] + (first ? square[to] : 0);
                            }
                    }
                }
                if (norms) NAME(take_own)(norms + run.start, own, units, wide);
            }
            if (alone) extra[THREAD] += squares;
        }
        first = run.end;
    }
    if (bias) NAME(bias)(sums, bias, batch, 1, groups, o);
}
#undef UNROLL
