/* S and W of a convolution's kernel, [o, c/parts, kh, kw], and of its bias, from x [images, c, h,
   w] and delta [images, o, oh, ow]; a sample has `per` images. The definition in PyTorch is
   Contribution.sums in engine/contribution.py, which adds up what Convolution.groups in
   engine/rules/convolution.py returns.

   A packed image is a frame of zeros around its pixels, with the channels of a pixel side by side.
   A line of the kernel then reads one run of kw*c numbers for an output pixel. Such a run is a tap;
   with dilation, each column of the kernel has its own tap. If taps do not fill vectors well, those
   of an output pixel are copied side by side. */

typedef struct {
    int64_t frame_h, frame_w, frame; /* lines, columns and numbers of a frame */
    /* the taps of an output pixel, their width, and the width rounded up to whole vectors */
    int64_t taps, width, padded;
    /* the numbers of all taps of an output pixel, if they are copied side by side; else 0 */
    int64_t joined;
    int64_t image;   /* numbers for a packed image: the frame, or its joined taps */
    int64_t r, ld;   /* output pixels; numbers of S for an output feature */
    int64_t at_once; /* groups that are packed at a time */
    /* 1: threads share S and W, and divide tiles; 0: each has its own, and they divide samples */
    int shared;
} NAME(plan);

static NAME(plan) NAME(plan_of)(const Convolution *s, int threads) {
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
    int64_t size = 2 * s->o * p.ld * (int64_t)sizeof(REAL),
            unit = (s->images / s->per + s->groups - 1) / s->groups * s->per;
    int64_t bytes = unit * (p.image + s->o * p.r) * (int64_t)sizeof(REAL);
    p.shared = size > SHARED_KERNEL;
    int64_t most = (p.shared ? SHARED_IMAGES : OWN_IMAGES) / bytes,
            fair = p.shared ? s->groups : (s->groups + threads - 1) / threads;
    p.at_once = most < 1 ? 1 : most < fair ? most : fair;
    return p;
}

/* Pack an image: its frame of zeros, with the channels of each pixel side by side. */
static void NAME(frame)(const Convolution *s, const NAME(plan) * p, const REAL *x, REAL *to) {
    int64_t above = s->py < p->frame_h ? s->py : p->frame_h,
            left = s->px < p->frame_w ? s->px : p->frame_w;
    int64_t lines = s->h < p->frame_h - above ? s->h : p->frame_h - above,
            columns = s->w < p->frame_w - left ? s->w : p->frame_w - left;
    const int whole = columns == p->frame_w && s->w == columns && s->x_row == s->w * s->x_column;
    const int64_t line = p->frame_w * s->c, edge = (p->frame_w - columns) * s->c;
    if (lines <= 0 || columns <= 0) {
        memset(to, 0, p->frame * sizeof(REAL));
        return;
    }
    /* zeros before the first pixel, between two lines, and after the last pixel */
    REAL *first = to + above * line + left * s->c, *last = first + lines * line - edge,
         *end = to + p->frame;
    memset(to, 0, (first - to) * sizeof(REAL));
    for (REAL *gap = first + line - edge; edge && gap < last; gap += line)
        memset(gap, 0, edge * sizeof(REAL));
    memset(last, 0, (end - last) * sizeof(REAL));
    if (s->x_column != 1) { /* channels are side by side already */
        for (int64_t y = 0; y < lines; y++)
            for (int64_t k = 0; k < columns; k++)
                memcpy(first + y * line + k * s->c, x + y * s->x_row + k * s->x_column,
                       s->c * sizeof(REAL));
        return;
    }
    /* Four channels at a time, so that memory is read in order. */
    const int64_t once = whole ? lines : 1;
    for (int64_t c = 0; c < s->c; c += 4)
        for (int64_t y = 0; y < lines; y += once)
            NAME(transpose)(x + c * s->x_channel + y * s->x_row, s->x_channel, first + y * line + c,
                            s->c, AT_MOST(4, s->c - c), once * columns);
}

/* Copy the taps of each output pixel side by side. A tap is copied in fours: the next tap
   overwrites the surplus numbers, or they are padding. */
static void NAME(join)(const Convolution *s, const NAME(plan) * p, const REAL *frame, REAL *to) {
    for (int64_t y = 0; y < s->oh; y++)
        for (int64_t k = 0; k < s->kh; k++)
            for (int64_t v = 0; v < p->width; v += 4) {
                const int64_t column = k * p->width + v, step = s->sx * s->c;
                const REAL *from = frame + (y * s->sy + k * s->dy) * p->frame_w * s->c + v;
                REAL *run = to + y * s->ow * p->joined + column;
                if (column + 4 <= p->joined)
                    for (int64_t x = 0; x < s->ow; x++)
                        QUAD(run + x * p->joined) = QUAD(from + x * step);
                else
                    for (int64_t x = 0; x < s->ow; x++)
                        memcpy(run + x * p->joined, from + x * step,
                               (p->joined - column) * sizeof(REAL));
            }
}

static void NAME(pack)(const Convolution *s, const NAME(plan) *p, int64_t image, const REAL *x,
                       const REAL *delta, REAL *bias, int64_t wide, REAL *frame, REAL *images,
                       REAL *deltas, int64_t index, int64_t count) {
    REAL *to = images + index * p->image;
    NAME(frame)(s, p, x + image * s->x_image, p->joined ? frame : to);
    if (p->joined) NAME(join)(s, p, frame, to);
    const REAL *d = delta + image * s->d_image;
    /* [block][images][pixels][its features] */
    for (int64_t k = 0; k < NAME(blocks_of)(s->o); k++) {
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

/* A panel: some vectors of one tap, for every output pixel. `place` is where they begin in a packed
   image, `in_sums` where they begin in S; `nv` is the number of vectors. */
typedef struct {
    int64_t place, in_sums, nv, valid; /* valid: how many of its numbers belong to the tap */
} NAME(panel);

static inline NAME(panel)
    NAME(panel_of)(const Convolution *s, const NAME(plan) *p, int64_t tap, int64_t number) {
    int64_t column = number * NV * LANES, left = p->padded / LANES - number * NV;
    int64_t ky = s->dx == 1 ? tap : tap / s->kw, kx = s->dx == 1 ? 0 : tap % s->kw;
    NAME(panel) panel = {(p->joined ? 0 : (ky * s->dy * p->frame_w + kx * s->dx) * s->c) + column,
                         tap * p->padded + column, left < NV ? left : NV,
                         (p->joined ? p->taps * p->width : p->width) - column};
    if (panel.valid > panel.nv * LANES) panel.valid = panel.nv * LANES;
    return panel;
}

static inline NAME(lines) NAME(lines_of)(const Convolution *s, const NAME(plan) * p) {
    NAME(lines) at = {p->image, s->oh, s->ow, s->sy * p->frame_w * s->c, s->sx * s->c};
    if (p->joined) at.outer = 1, at.inner = p->r, at.inner_step = p->joined;
    return at;
}

/* Add to S and W: block k of the output features with one panel, for all packed groups. */
static inline void NAME(block)(const Convolution *s, const NAME(plan) *p, const NAME(panel) *panel,
                               int64_t k, int64_t units, int64_t n, const REAL *b,
                               const NAME(lines) *at, const REAL *deltas, REAL *S, REAL *W,
                               double *spread, REAL share, REAL *own) {
    int64_t from = NAME(begin)(k, s->o), mr = NAME(begin)(k + 1, s->o) - from,
            place = from * p->ld + panel->in_sums;
    NAME(tiles)[mr - 1][panel->nv - 1][own ? NORMS : spread ? SUM : PLAIN](
        units, n, deltas + units * n * p->r * from, b, at, S + place,
        spread ? (void *)spread : W + place, p->ld, panel->valid, share, own, 0, 0);
}

/* Compute one part. `again`, if given, gets the same S. Return the size of the scratch memory that
   this needs, in numbers; if `scratch` is NULL, do nothing else. `bias` is [images, wide]. Without
   W, each thread adds its part of the sum of W to `extra`; with W and `extra`, its part of each
   sample's norm: see dense.h. */
static int64_t NAME(part)(const Convolution *s, const REAL *x, const REAL *delta, REAL *S,
                          REAL *again, REAL *W, REAL *bias, REAL *scratch, double *extra,
                          int64_t wide, int threads) {
    const int alone = extra && !W;
    const int64_t both = alone ? 1 : 2; /* sums: S and W, or S */
    const int64_t batch = s->images / s->per;
    const NAME(plan) p = NAME(plan_of)(s, threads);
    const NAME(groups) all = {s->groups, s->images / s->per / s->groups,
                              s->images / s->per % s->groups};
    const int64_t most = (all.size + (all.larger > 0)) * s->per * p.at_once, slack = NV * LANES,
                  kernel = s->o * p.ld;
    const int64_t room = most * (p.image + p.r * s->o) + 2 * slack;
    /* memory of each thread, to join taps and to copy a panel */
    const int64_t frame =
        (p.joined ? p.frame : 0) + (p.shared ? most * p.r * NV * LANES : 0) + slack;
    const int64_t rooms = p.shared ? 1 : threads, each = (p.shared ? both : 2 * both) * kernel,
                  sums = each * rooms;
    const int64_t needs = sums + rooms * room + threads * frame;
    if (!scratch) return needs;
    const int64_t taps = p.joined ? 1 : p.taps, blocks = NAME(blocks_of)(s->o),
                  panels = (p.padded / LANES + NV - 1) / NV;
    NAME(clear)(scratch, sums, threads);
    REAL *frames = scratch + sums + rooms * room;
    if (p.shared)
        for (int64_t first = 0; first < s->groups;) {
            NAME(run) run = NAME(run_from)(first, all, p.at_once);
            const int64_t units = run.end - first, n = run.n * s->per, count = units * n;
            REAL *images = scratch + sums, *deltas = images + count * p.image + slack;
#pragma omp parallel num_threads(threads)
            {
                double squares = 0, *norms = extra && W ? NORMS_OF(extra, batch) : 0;
                REAL *own = norms ? OWN_OF(norms, batch) : 0;
#pragma omp for schedule(static)
                for (int64_t k = 0; k < count; k++)
                    NAME(pack)(s, &p, run.start * s->per + k, x, delta, bias, wide,
                               frames + THREAD * frame, images, deltas, k, count);
                REAL *copy = frames + THREAD * frame;
                const NAME(lines) lines = NAME(lines_of)(s, &p),
                                  copied = {p.r * NV * LANES, 1, p.r, 0, NV * LANES};
                int64_t last = -1;
#pragma omp for schedule(static)
                for (int64_t work = 0; work < taps * panels * blocks; work++) {
                    const NAME(panel) panel =
                        NAME(panel_of)(s, &p, work / blocks / panels, work / blocks % panels);
                    /* every block uses the panel: a copy side by side is read fast */
                    if (last != work / blocks)
                        for (int64_t k = 0; k < count; k++)
                            for (int64_t y = 0; y < lines.outer; y++)
                                NAME(copy)(images + panel.place + k * lines.sample +
                                               y * lines.outer_step,
                                           lines.inner_step,
                                           copy + k * copied.sample + y * lines.inner * NV * LANES,
                                           NV * LANES, lines.inner, panel.nv * LANES);
                    last = work / blocks;
                    NAME(block)(s, &p, &panel, work % blocks, units, n, copy, &copied, deltas,
                                scratch, scratch + kernel, alone ? &squares : 0,
                                (REAL)1 / (REAL)run.n, own);
                    if (norms) NAME(take_own)(norms + run.start, own, units, panel.valid);
                }
                if (alone) extra[THREAD] += squares;
            }
            first = run.end;
        }
    else {
        /* pieces of the larger groups; then pieces of the other groups */
        const int64_t pieces = (all.larger + p.at_once - 1) / p.at_once;
        const int64_t others = (all.count - all.larger + p.at_once - 1) / p.at_once;
#pragma omp parallel num_threads(threads)
        {
            REAL *images = scratch + sums + THREAD * room, *all_sums = scratch + THREAD * each,
                 *some = all_sums + both * kernel;
            double squares = 0, *norms = extra && W ? NORMS_OF(extra, batch) : 0;
            REAL *own = norms ? OWN_OF(norms, batch) : 0;
            int64_t since = 0; /* groups that were added to `some`, and not to `all_sums` yet */
#pragma omp for schedule(dynamic) nowait
            for (int64_t piece = 0; piece < pieces + others; piece++) {
                int64_t first =
                    piece < pieces ? piece * p.at_once : all.larger + (piece - pieces) * p.at_once;
                NAME(run) run = NAME(run_from)(first, all, p.at_once);
                const int64_t units = run.end - first, n = run.n * s->per, count = units * n;
                REAL *deltas = images + count * p.image + slack;
                for (int64_t k = 0; k < count; k++)
                    NAME(pack)(s, &p, run.start * s->per + k, x, delta, bias, wide,
                               frames + THREAD * frame, images, deltas, k, count);
                const NAME(lines) lines = NAME(lines_of)(s, &p);
                for (int64_t work = 0; work < taps * panels; work++) {
                    const NAME(panel) panel = NAME(panel_of)(s, &p, work / panels, work % panels);
                    for (int64_t k = 0; k < blocks; k++)
                        NAME(block)(s, &p, &panel, k, units, n, images + panel.place, &lines,
                                    deltas, some, some + kernel, alone ? &squares : 0,
                                    (REAL)1 / (REAL)run.n, own);
                    if (norms) NAME(take_own)(norms + run.start, own, units, panel.valid);
                }
                since += units;
                if (since >= CHAIN) {
                    NAME(fold)(all_sums, some, both * kernel);
                    since = 0;
                }
            }
            NAME(fold)(all_sums, some, both * kernel);
            if (alone) extra[THREAD] += squares;
        }
    }
    /* from [o, taps, places of a tap, c] to [o, c, kh, kw]; all taps at once, if the places of all
       are equally far apart */
    const int64_t step = p.joined ? p.width : p.padded, places = s->kh * s->kw,
                  of_tap = places / p.taps,
                  at_once = of_tap == 1 || step == p.width ? places : of_tap,
                  apart = of_tap == 1 ? step : s->c;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < s->o; o++)
        for (int k = 0; k < both; k++) {
            REAL *sum = scratch + k * kernel + o * p.ld, *to = (k ? W : S) + o * s->c * places;
            for (int64_t t = 1; t < rooms; t++)
                for (int64_t j = 0; j < p.ld; j++) sum[j] += sum[t * each + j];
            for (int64_t place = 0; place < places; place += at_once)
                NAME(transpose)(sum + place / of_tap * step, apart, to + place, places, at_once,
                                s->c);
            if (again && !k) memcpy(again + (to - S), to, s->c * places * sizeof(REAL));
        }
    return needs;
}

static void NAME(conv_of)(const REAL *x, const REAL *delta, REAL *S, REAL *again, REAL *W,
                          REAL *bias, REAL *scratch, double *extra, Convolution *whole,
                          int threads) {
    Convolution s = *whole;
    s.c /= s.parts;
    s.o /= s.parts;
    const int64_t sums = s.images * whole->o, weights = s.o * s.c * s.kh * s.kw;
    if (!scratch) {
        whole->scratch =
            sums + NAME(part)(&s, x, delta, S, again, W, bias, scratch, 0, whole->o, threads);
        return;
    }
    for (int64_t k = 0; k < s.parts; k++)
        NAME(part)(&s, x + k * s.c * s.x_channel, delta + k * s.o * s.d_channel, S + k * weights,
                   again ? again + k * weights : 0, W ? W + k * weights : 0,
                   bias ? scratch + k * s.o : 0, scratch + sums, extra, whole->o, threads);
    if (bias) NAME(bias)(scratch, bias, s.images / s.per, s.per, s.groups, whole->o);
}
