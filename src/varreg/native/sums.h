/* S = sum of C_u and W = sum of C_u^2/n over groups u of n samples, where C_u is a matrix product: of a dense layer, or of a convolution.
   C_u exists a tile at a time, in registers, and nowhere else. Twins, and definitions: Outer in engine/contribution.py, and
   rules/convolution.py. The letters are theirs: b samples of r rows (time steps, pixels), o output and i input features.

   A tile is MR output features times NV vectors of input features. delta comes packed, so that the MR numbers of a row lie side by side. */

/* Where the rows of one sample's input features are: `outer` times `inner` of them (a convolution's output lines, and the pixels of a line). */
typedef struct {
    int64_t sample, outer, inner, outer_step, inner_step;
} NAME(lines);

#define UNROLL _Pragma("GCC unroll 12")
static inline __attribute__((always_inline)) void NAME(tile)(const int mr, const int nv, int64_t units, int64_t n, const REAL *a, const REAL *b,
                                                             const NAME(lines) * at, REAL *restrict S, REAL *restrict W, int64_t ld, REAL share) {
    for (int64_t first = 0; first < units; first += FEW) { /* of a few at a time: one addition after the other would drift */
        NAME(vec) total[MR][NV], square[MR][NV];
        UNROLL for (int m = 0; m < mr; m++)
            UNROLL for (int v = 0; v < nv; v++) total[m][v] = square[m][v] = (NAME(vec)){0};
        for (int64_t u = first; u < units && u < first + FEW; u++) {
            NAME(vec) c[MR][NV];
            UNROLL for (int m = 0; m < mr; m++)
                UNROLL for (int v = 0; v < nv; v++) c[m][v] = (NAME(vec)){0};
            for (int64_t s = 0; s < n; s++, b += at->sample)
                for (int64_t j = 0; j < at->outer; j++) {
                    const REAL *row = b + j * at->outer_step;
                    for (int64_t i = 0; i < at->inner; i++, row += at->inner_step, a += mr) {
                        NAME(vec) x[NV];
                        UNROLL for (int v = 0; v < nv; v++) x[v] = AT(row + v * LANES);
                        UNROLL for (int m = 0; m < mr; m++)
                            UNROLL for (int v = 0; v < nv; v++) c[m][v] += x[v] * a[m];
                    }
                }
            UNROLL for (int m = 0; m < mr; m++)
                UNROLL for (int v = 0; v < nv; v++) {
                    total[m][v] += c[m][v];
                    square[m][v] += c[m][v] * c[m][v];
                }
        }
        UNROLL for (int m = 0; m < mr; m++)
            UNROLL for (int v = 0; v < nv; v++) {
                AT(S + m * ld + v * LANES) += total[m][v];
                AT(W + m * ld + v * LANES) += square[m][v] * share;
            }
    }
}

#define TILE(M, V)                                                                                                                              \
    static __attribute__((noinline)) void NAME(tile##M##x##V)(int64_t units, int64_t n, const REAL *a, const REAL *b, const NAME(lines) * at, REAL *S, REAL *W, \
                                                              int64_t ld, REAL share) {                                                         \
        NAME(tile)(M, V, units, n, a, b, at, S, W, ld, share);                                                                                  \
    }
#define TILES(M) TILE(M, 1) TILE(M, 2)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if MR == 12
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#endif
typedef void (*NAME(tile_of))(int64_t, int64_t, const REAL *, const REAL *, const NAME(lines) *, REAL *, REAL *, int64_t, REAL);
#define BOTH(M) {NAME(tile##M##x1), NAME(tile##M##x2)}
static const NAME(tile_of) NAME(tiles)[MR][NV] = {BOTH(1), BOTH(2), BOTH(3), BOTH(4), BOTH(5), BOTH(6),
#if MR == 12
                                                  BOTH(7), BOTH(8), BOTH(9), BOTH(10), BOTH(11), BOTH(12)
#endif
};
#undef TILE
#undef TILES
#undef BOTH

/* Output features in blocks of one tile's height at most, of fours (twos, where tiles are low) but for the last, and about equal: how many, and where block k begins. */
static inline int64_t NAME(blocks_of)(int64_t features) { return (features + MR - 1) / MR; }
static inline int64_t NAME(begin)(int64_t k, int64_t features) {
    const int64_t some = MR / 3, blocks = NAME(blocks_of)(features), all = (features + some - 1) / some;
    return k < blocks ? k * all / blocks * some : features;
}

typedef REAL NAME(quad) __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

/* to[j*step + i] = from[i*stride + j] */
static inline void NAME(transpose)(const REAL *restrict from, int64_t stride, REAL *restrict to, int64_t step, int64_t rows, int64_t columns) {
    int64_t i = 0;
    if (rows == 1 && step == 1) {
        memcpy(to, from, columns * sizeof(REAL));
        return;
    }
    for (; i + 4 <= rows; i += 4) {
        const REAL *f = from + i * stride;
        REAL *t = to + i;
        int64_t j = 0;
        for (; j + 4 <= columns; j += 4) {
            NAME(quad) a = *(const NAME(quad) *)(f + j), b = *(const NAME(quad) *)(f + stride + j);
            NAME(quad) c = *(const NAME(quad) *)(f + 2 * stride + j), d = *(const NAME(quad) *)(f + 3 * stride + j);
            NAME(quad) ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            NAME(quad) ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(NAME(quad) *)(t + j * step) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            *(NAME(quad) *)(t + (j + 1) * step) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            *(NAME(quad) *)(t + (j + 2) * step) = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5);
            *(NAME(quad) *)(t + (j + 3) * step) = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
        }
        for (; j < columns; j++)
            for (int64_t k = 0; k < 4; k++) t[j * step + k] = f[k * stride + j];
    }
    for (; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) to[j * step + i] = from[i * stride + j];
}

/* to[j*step + k] = from[j*stride + k] for rows of a few numbers: a vector at a time, of which the next row overwrites what is too much. */
static inline void NAME(copy)(const REAL *restrict from, int64_t stride, REAL *restrict to, int64_t step, int64_t rows, int64_t columns) {
    int64_t j = 0, vectors = (columns + LANES - 1) / LANES;
    int64_t over = vectors * LANES, whole = rows - (over - columns + (step < stride ? step : stride) - 1) / (step < stride ? step : stride);
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

/* The groups of a batch: `larger` of `size` + 1 samples, then the others. */
typedef struct {
    int64_t count, size, larger;
} NAME(groups);

/* The groups `first` to `end` have n samples each, the first of them being `start`: as many as are alike, and `at_once` at most. */
typedef struct {
    int64_t end, n, start;
} NAME(run);

static inline NAME(run) NAME(run_from)(int64_t first, NAME(groups) g, int64_t at_once) {
    int more = first < g.larger;
    int64_t end = more ? g.larger : g.count;
    NAME(run) run = {end - first < at_once ? end : first + at_once, g.size + more, more ? first * (g.size + 1) : g.larger + first * g.size};
    return run;
}

static inline void NAME(clear)(REAL *x, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++) memset(x + n * t / threads, 0, (n * (t + 1) / threads - n * t / threads) * sizeof(REAL));
}

/* to += from, which is then 0 */
static inline void NAME(fold)(REAL *restrict to, REAL *restrict from, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        to[k] += from[k];
        from[k] = 0;
    }
}

/* What a bias gets: S and W, side by side, of the sums of delta over rows, `of` [batch * per, o]. */
static void NAME(bias)(const REAL *of, REAL *sums, int64_t batch, int64_t per, int64_t groups, int64_t o) {
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

/* ---- dense layers: delta [b, r, o], a [b, r, i]; S and W [o, i], and, if it is wanted, both of the bias [2, o] ---- */

void NAME(outer)(const REAL *delta, const REAL *a, REAL *S, REAL *W, REAL *bias, REAL *scratch, int64_t batch, int64_t groups, int64_t r, int64_t o, int64_t i,
                 int64_t at_once, int threads) {
    REAL *sums = scratch; /* of delta over the rows of each sample */
    scratch += bias ? batch * o : 0;
    NAME(clear)(S, o * i, threads);
    NAME(clear)(W, o * i, threads);
    const int64_t width = NV * LANES, panels = (i + width - 1) / width, blocks = NAME(blocks_of)(o);
    const NAME(groups) all = {groups, batch / groups, batch % groups};
    for (int64_t first = 0; first < groups;) {
        NAME(run) run = NAME(run_from)(first, all, at_once);
        const int64_t units = run.end - first, n = run.n, rows = units * n * r;
        const int64_t split = panels % threads && panels < 8 * threads ? threads : 1; /* of the blocks, where panels cannot be shared out evenly */
        const REAL *d = delta + run.start * r * o, *x = a + run.start * r * i, share = (REAL)1 / (REAL)n;
        const NAME(lines) at = {n * r * width, 1, n * r, 0, width}; /* a group's rows lie one after the other */
#pragma omp parallel num_threads(threads)
        {
            REAL *panel = scratch + rows * o + LANES + THREAD * (rows * width + LANES);
            int64_t packed = -1;
#pragma omp for schedule(static)
            for (int64_t sample = 0; sample < units * n; sample++) { /* pack delta: [block][rows][its features] */
                const REAL *source = d + sample * r * o;
                for (int64_t k = 0; k < blocks; k++) {
                    int64_t from = NAME(begin)(k, o), mr = NAME(begin)(k + 1, o) - from;
                    NAME(copy)(source + from, o, scratch + rows * from + sample * r * mr, mr, r, mr);
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
                int64_t from = p * width, wide = i - from < width ? i - from : width, nv = (wide + LANES - 1) / LANES;
                if (packed != p) NAME(copy)(x + from, i, panel, width, rows, wide);
                packed = p;
                for (int64_t k = part * blocks / split; k < (part + 1) * blocks / split; k++) {
                    int64_t feature = NAME(begin)(k, o), mr = NAME(begin)(k + 1, o) - feature;
                    const REAL *deltas = scratch + rows * feature;
                    REAL *total = S + feature * i + from, *square = W + feature * i + from;
                    if (wide == nv * LANES)
                        NAME(tiles)[mr - 1][nv - 1](units, 1, deltas, panel, &at, total, square, i, share);
                    else { /* the last, narrow one */
                        REAL t[MR * NV * VECTOR / sizeof(REAL)] = {0}, q[MR * NV * VECTOR / sizeof(REAL)] = {0};
                        NAME(tiles)[mr - 1][nv - 1](units, 1, deltas, panel, &at, t, q, width, share);
                        for (int64_t m = 0; m < mr; m++)
                            for (int64_t v = 0; v < wide; v++) {
                                total[m * i + v] += t[m * width + v];
                                square[m * i + v] += q[m * width + v];
                            }
                    }
                }
            }
        }
        first = run.end;
    }
    if (bias) NAME(bias)(sums, bias, batch, 1, groups, o);
}

/* ---- convolutions: x [images, c, h, w], delta [images, o, oh, ow], `per` images a sample; S and W [o, c/parts, kh, kw], and both of the bias ----

   Packed, an image's pixels lie one after the other with their channels side by side, within a frame of zeros. Then what a line of the kernel sees
   at an output pixel is one run of kw*c numbers (a tap; with dilation each column is one). Where such a run fills vectors badly,
   the taps of an output pixel are copied side by side. */

typedef struct {
    int64_t images, per, groups, c, h, w, o, oh, ow, kh, kw, sy, sx, py, px, dy, dx;
    int64_t x_image, x_channel, x_row, x_column, d_image, d_channel, d_pixel; /* strides; one of channel and column, or pixel, is 1 */
    int64_t parts;   /* into which channels and features are divided, each on its own */
    int64_t scratch; /* numbers of memory, found out */
} NAME(shape);

typedef struct {
    int64_t frame_h, frame_w, frame; /* of an image: its lines, columns, numbers */
    int64_t taps, width, padded;     /* what a pixel of the output sees: runs, their width, and that in whole vectors */
    int64_t joined;                  /* numbers of an output pixel's taps side by side; 0 if they stay where they are */
    int64_t image;                   /* numbers for a packed image: the frame, or its joined taps */
    int64_t r, ld;                   /* output pixels; numbers of S for an output feature */
    int64_t at_once;                 /* groups that are packed at a time */
    int shared;                      /* do threads share S and W, and divide tiles? Or has each its own, and they divide samples? */
} NAME(plan);

static NAME(plan) NAME(plan_of)(const NAME(shape) * s, int threads) {
    NAME(plan) p;
    int together = s->dx == 1;
    p.frame_h = (s->oh - 1) * s->sy + (s->kh - 1) * s->dy + 1;
    p.frame_w = (s->ow - 1) * s->sx + (s->kw - 1) * s->dx + 1;
    p.frame = p.frame_h * p.frame_w * s->c;
    p.r = s->oh * s->ow;
    p.taps = together ? s->kh : s->kh * s->kw;
    p.width = together ? s->kw * s->c : s->c;
    p.padded = (p.width + LANES - 1) / LANES * LANES;
    int64_t all = p.taps * p.width, joined = (all + LANES - 1) / LANES * LANES;
    p.joined = together && 4 * joined < 3 * p.taps * p.padded ? joined : 0;
    if (p.joined) p.padded = p.joined;
    p.image = p.joined ? p.r * p.joined : p.frame;
    p.ld = p.joined ? p.joined : p.taps * p.padded;
    int64_t size = 2 * s->o * p.ld * (int64_t)sizeof(REAL), unit = (s->images / s->per + s->groups - 1) / s->groups * s->per;
    int64_t bytes = unit * (p.image + s->o * p.r) * (int64_t)sizeof(REAL);
    p.shared = size > (1 << 19);
    int64_t most = (p.shared ? 1 << 22 : 1 << 17) / bytes, fair = p.shared ? s->groups : (s->groups + threads - 1) / threads;
    p.at_once = most < 1 ? 1 : most < fair ? most : fair;
    return p;
}

/* An image with its channels side by side, in its frame of zeros. */
static void NAME(frame)(const NAME(shape) * s, const NAME(plan) * p, const REAL *x, REAL *to) {
    int64_t above = s->py < p->frame_h ? s->py : p->frame_h, left = s->px < p->frame_w ? s->px : p->frame_w;
    int64_t lines = s->h < p->frame_h - above ? s->h : p->frame_h - above, columns = s->w < p->frame_w - left ? s->w : p->frame_w - left;
    if (lines < p->frame_h || columns < p->frame_w) memset(to, 0, p->frame * sizeof(REAL));
    int whole = columns == p->frame_w && s->w == columns && s->x_row == s->w * s->x_column;
    int64_t pieces = whole ? 1 : lines, run = whole ? lines * columns : columns;
    REAL *first = to + (above * p->frame_w + left) * s->c;
    if (s->x_column != 1) { /* channels are side by side already */
        for (int64_t y = 0; y < pieces; y++)
            for (int64_t k = 0; k < run; k++)
                memcpy(first + (y * p->frame_w + k) * s->c, x + y * s->x_row + k * s->x_column, s->c * sizeof(REAL));
        return;
    }
    for (int64_t c = 0; c < s->c; c += 4) /* four channels, whole, and then the next four: memory is read as it lies */
        for (int64_t y = 0; y < pieces; y++)
            NAME(transpose)(x + c * s->x_channel + y * s->x_row, s->x_channel, first + y * p->frame_w * s->c + c, s->c, s->c - c < 4 ? s->c - c : 4, run);
}

/* What each output pixel sees, side by side. A run is copied in fours; what is too much is overwritten by the next, or is nothing that counts. */
static void NAME(join)(const NAME(shape) * s, const NAME(plan) * p, const REAL *frame, REAL *to) {
    for (int64_t y = 0; y < s->oh; y++)
        for (int64_t k = 0; k < s->kh; k++)
            for (int64_t v = 0; v < p->width; v += 4) {
                const int64_t column = k * p->width + v, step = s->sx * s->c;
                const REAL *from = frame + (y * s->sy + k * s->dy) * p->frame_w * s->c + v;
                REAL *run = to + y * s->ow * p->joined + column;
                if (column + 4 <= p->joined)
                    for (int64_t x = 0; x < s->ow; x++) *(NAME(quad) *)(run + x * p->joined) = *(const NAME(quad) *)(from + x * step);
                else
                    for (int64_t x = 0; x < s->ow; x++) memcpy(run + x * p->joined, from + x * step, (p->joined - column) * sizeof(REAL));
            }
}

static void NAME(pack)(const NAME(shape) * s, const NAME(plan) * p, int64_t image, const REAL *x, const REAL *delta, REAL *bias, int64_t wide, REAL *frame,
                       REAL *images, REAL *deltas, int64_t index, int64_t count) {
    REAL *to = images + index * p->image;
    NAME(frame)(s, p, x + image * s->x_image, p->joined ? frame : to);
    if (p->joined) NAME(join)(s, p, frame, to);
    const REAL *d = delta + image * s->d_image;
    for (int64_t k = 0; k < NAME(blocks_of)(s->o); k++) { /* [block][images][pixels][its features] */
        int64_t from = NAME(begin)(k, s->o), mr = NAME(begin)(k + 1, s->o) - from;
        REAL *block = deltas + count * p->r * from + index * p->r * mr;
        if (s->d_pixel == 1)
            NAME(transpose)(d + from * s->d_channel, s->d_channel, block, mr, mr, p->r);
        else
            NAME(copy)(d + from, s->d_pixel, block, mr, p->r, mr);
        if (bias)
            for (int64_t m = 0; m < mr; m++) {
                REAL total = 0;
                const REAL *line = d + (from + m) * s->d_channel;
                if (s->d_pixel == 1)
                    total = (REAL)NAME(plain)(line, p->r);
                else
                    for (int64_t j = 0; j < p->r; j++) total += line[j * s->d_pixel];
                bias[image * wide + from + m] = total;
            }
    }
}

/* A panel: some vectors of one tap, at every output pixel. Where they are in a packed image, and in S. */
typedef struct {
    int64_t place, in_sums, nv;
} NAME(panel);

static inline NAME(panel) NAME(panel_of)(const NAME(shape) * s, const NAME(plan) * p, int64_t tap, int64_t number) {
    int64_t column = number * NV * LANES, left = p->padded / LANES - number * NV;
    int64_t ky = s->dx == 1 ? tap : tap / s->kw, kx = s->dx == 1 ? 0 : tap % s->kw;
    NAME(panel) panel = {(p->joined ? 0 : (ky * s->dy * p->frame_w + kx * s->dx) * s->c) + column, tap * p->padded + column, left < NV ? left : NV};
    return panel;
}

static inline NAME(lines) NAME(lines_of)(const NAME(shape) * s, const NAME(plan) * p) {
    NAME(lines) at = {p->image, s->oh, s->ow, s->sy * p->frame_w * s->c, s->sx * s->c};
    if (p->joined) at.outer = 1, at.inner = p->r, at.inner_step = p->joined;
    return at;
}

/* Block k of the output features with one panel, for all groups that are packed. */
static inline void NAME(block)(const NAME(shape) * s, const NAME(plan) * p, const NAME(panel) * panel, int64_t k, int64_t units, int64_t n, const REAL *b,
                               const NAME(lines) * at, const REAL *deltas, REAL *S, REAL *W, REAL share) {
    int64_t from = NAME(begin)(k, s->o), mr = NAME(begin)(k + 1, s->o) - from, place = from * p->ld + panel->in_sums;
    NAME(tiles)[mr - 1][panel->nv - 1](units, n, deltas + units * n * p->r * from, b, at, S + place, W + place, p->ld, share);
}

/* One part. Returns how much scratch memory it needs, in numbers; without any, it does nothing else. `bias` is [images, wide]. */
static int64_t NAME(part)(const NAME(shape) * s, const REAL *x, const REAL *delta, REAL *S, REAL *W, REAL *bias, REAL *scratch, int64_t wide, int threads) {
    const NAME(plan) p = NAME(plan_of)(s, threads);
    const NAME(groups) all = {s->groups, s->images / s->per / s->groups, s->images / s->per % s->groups};
    const int64_t most = (all.size + (all.larger > 0)) * s->per * p.at_once, slack = NV * LANES, own = s->o * p.ld;
    const int64_t room = most * (p.image + p.r * s->o) + 2 * slack;
    const int64_t frame = (p.joined ? p.frame : 0) + (p.shared ? most * p.r * NV * LANES : 0) + slack; /* of each thread: to join taps, to copy a panel */
    const int64_t rooms = p.shared ? 1 : threads, each = (p.shared ? 2 : 4) * own, sums = each * rooms;
    const int64_t needs = sums + rooms * room + threads * frame;
    if (!scratch) return needs;
    const int64_t taps = p.joined ? 1 : p.taps, blocks = NAME(blocks_of)(s->o), panels = (p.padded / LANES + NV - 1) / NV;
    NAME(clear)(scratch, sums, threads);
    REAL *frames = scratch + sums + rooms * room;
    if (p.shared)
        for (int64_t first = 0; first < s->groups;) {
            NAME(run) run = NAME(run_from)(first, all, p.at_once);
            const int64_t units = run.end - first, n = run.n * s->per, count = units * n;
            REAL *images = scratch + sums, *deltas = images + count * p.image + slack;
#pragma omp parallel num_threads(threads)
            {
#pragma omp for schedule(static)
                for (int64_t k = 0; k < count; k++)
                    NAME(pack)(s, &p, run.start * s->per + k, x, delta, bias, wide, frames + THREAD * frame, images, deltas, k, count);
                REAL *copy = frames + THREAD * frame;
                const NAME(lines) lines = NAME(lines_of)(s, &p), copied = {p.r * NV * LANES, 1, p.r, 0, NV * LANES};
                int64_t last = -1;
#pragma omp for schedule(static)
                for (int64_t work = 0; work < taps * panels * blocks; work++) {
                    const NAME(panel) panel = NAME(panel_of)(s, &p, work / blocks / panels, work / blocks % panels);
                    if (last != work / blocks) /* a panel is used for every block: side by side, it is read fast */
                        for (int64_t k = 0; k < count; k++)
                            for (int64_t y = 0; y < lines.outer; y++)
                                NAME(copy)(images + panel.place + k * lines.sample + y * lines.outer_step, lines.inner_step, copy + k * copied.sample + y * lines.inner * NV * LANES,
                                           NV * LANES, lines.inner, panel.nv * LANES);
                    last = work / blocks;
                    NAME(block)(s, &p, &panel, work % blocks, units, n, copy, &copied, deltas, scratch, scratch + own, (REAL)1 / (REAL)run.n);
                }
            }
            first = run.end;
        }
    else {
        const int64_t pieces = (all.larger + p.at_once - 1) / p.at_once; /* of larger groups; then those of the others */
        const int64_t others = (all.count - all.larger + p.at_once - 1) / p.at_once;
#pragma omp parallel num_threads(threads)
        {
            REAL *images = scratch + sums + THREAD * room, *all_sums = scratch + THREAD * 4 * own, *some = all_sums + 2 * own;
            int64_t since = 0; /* groups that are in `some`, and not in `all_sums` yet */
#pragma omp for schedule(dynamic) nowait
            for (int64_t piece = 0; piece < pieces + others; piece++) {
                int64_t first = piece < pieces ? piece * p.at_once : all.larger + (piece - pieces) * p.at_once;
                NAME(run) run = NAME(run_from)(first, all, p.at_once);
                const int64_t units = run.end - first, n = run.n * s->per, count = units * n;
                REAL *deltas = images + count * p.image + slack;
                for (int64_t k = 0; k < count; k++)
                    NAME(pack)(s, &p, run.start * s->per + k, x, delta, bias, wide, frames + THREAD * frame, images, deltas, k, count);
                const NAME(lines) lines = NAME(lines_of)(s, &p);
                for (int64_t work = 0; work < taps * panels; work++) {
                    const NAME(panel) panel = NAME(panel_of)(s, &p, work / panels, work % panels);
                    for (int64_t k = 0; k < blocks; k++)
                        NAME(block)(s, &p, &panel, k, units, n, images + panel.place, &lines, deltas, some, some + own, (REAL)1 / (REAL)run.n);
                }
                since += units;
                if (since >= FEW) {
                    NAME(fold)(all_sums, some, 2 * own);
                    since = 0;
                }
            }
            NAME(fold)(all_sums, some, 2 * own);
        }
    }
    const int64_t step = p.joined ? p.width : p.padded, places = s->kh * s->kw; /* from [o, taps, places of a tap, c] to [o, c, kh, kw] */
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < s->o; o++)
        for (int both = 0; both < 2; both++) {
            REAL *sum = scratch + both * own + o * p.ld, *to = (both ? W : S) + o * s->c * places;
            for (int64_t t = 1; t < rooms; t++)
                for (int64_t k = 0; k < p.ld; k++) sum[k] += sum[t * each + k];
            for (int64_t tap = 0; tap < p.taps; tap++)
                NAME(transpose)(sum + tap * step, s->c, to + tap * (places / p.taps), places, places / p.taps, s->c);
        }
    return needs;
}

void NAME(conv)(const REAL *x, const REAL *delta, REAL *S, REAL *W, REAL *bias, REAL *scratch, NAME(shape) * whole, int threads) {
    NAME(shape) s = *whole;
    s.c /= s.parts;
    s.o /= s.parts;
    const int64_t sums = s.images * whole->o, weights = s.o * s.c * s.kh * s.kw;
    if (!scratch) {
        whole->scratch = sums + NAME(part)(&s, x, delta, S, W, bias, scratch, whole->o, threads);
        return;
    }
    for (int64_t k = 0; k < s.parts; k++)
        NAME(part)(&s, x + k * s.c * s.x_channel, delta + k * s.o * s.d_channel, S + k * weights, W + k * weights, bias ? scratch + k * s.o : 0, scratch + sums,
                   whole->o, threads);
    if (bias) NAME(bias)(scratch, bias, s.images / s.per, s.per, s.groups, whole->o);
}

/* Each output feature sees one input channel alone: S and W [o, 1, kh, kw], o a multiple of c. Nothing is packed. */
static inline REAL NAME(seen)(const NAME(shape) * s, const REAL *x, const REAL *delta, int64_t ky, int64_t kx) {
    const int64_t before = s->px - kx * s->dx, left = before > 0 ? (before + s->sx - 1) / s->sx : 0; /* of the pixels that see no padding */
    const int64_t last = s->w - 1 + before, right = last < 0 ? 0 : last / s->sx + 1 < s->ow ? last / s->sx + 1 : s->ow;
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

void NAME(depthwise)(const REAL *x, const REAL *delta, REAL *S, REAL *W, REAL *bias, REAL *sums, const NAME(shape) * s, int threads) {
    const NAME(groups) all = {s->groups, s->images / s->per / s->groups, s->images / s->per % s->groups};
    const int64_t taps = s->kh * s->kw, each = s->o / s->c;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < s->o; o++) {
        const REAL *plane = x + o / each * s->x_channel, *deltas = delta + o * s->d_channel;
        for (int64_t t = 0; t < taps; t++) {
            double total = 0, square = 0;
            for (int64_t u = 0, k = 0; u < all.count; u++) {
                const int64_t n = all.size + (u < all.larger), end = k + n * s->per;
                double c = 0;
                for (; k < end; k++) c += NAME(seen)(s, plane + k * s->x_image, deltas + k * s->d_image, t / s->kw, t % s->kw);
                total += c;
                square += c * c / (double)n;
            }
            S[o * taps + t] = (REAL)total;
            W[o * taps + t] = (REAL)square;
        }
        if (bias)
            for (int64_t k = 0; k < s->images; k++) sums[k * s->o + o] = (REAL)NAME(plain)(deltas + k * s->d_image, s->oh * s->ow);
    }
    if (bias) NAME(bias)(sums, bias, s->images / s->per, s->per, s->groups, s->o);
}
#undef UNROLL
