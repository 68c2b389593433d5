/* The structs that Python fills, by the names of their fields (contract.py). When this is compiled,
   contract.py writes contract.h: enums, thresholds such as BLOCK (thresholds.py says what each was
   measured on), and checks that both sides agree. */
#include <stddef.h>

#include "contract.h"

/* One tensor's part of a call for many tensors. A kernel reads the fields that it needs. */
typedef struct {
    int64_t n;                                    /* elements */
    int64_t increment, history, form, scale_free; /* INCREMENT_..., HISTORY_..., FORM_..., 0 or 1 */
    int64_t counts;      /* COUNTS_...: what rho_count points to */
    int64_t is_outgrown; /* out: 1 if the next step needs counts of another form */

    void *total, *square; /* S and W; without W, every element has a rho */
    void *grad;           /* the gradient as the base sees it */
    void *products;       /* out: four sums in double precision for each block; or two, of lambda */

    void *variance, *delta;    /* the increment and its variance, if they are given */
    void *rho_sum, *rho_count; /* the history of rho */
    void *lam;                 /* out: lambda; 0 if lambda is not kept */
    void *absent;              /* out: a bit for each element, 1 if W has no gradient there; or 0 */
    void *x, *steps;           /* out: the parameter; the number of steps */

    void *average, *squares; /* the base's averages of gradients (or momentum), and of squares */
    void *N, *C, *V;         /* sums for the variance of the increment, as in optim/increments.py */

    /* if lambda is calibrated: its recent mean, the sum of its means, and their number */
    void *recent, *spent, *times;
    double scale; /* the factor that calibrates lambda */

    double m, factor, rounding;        /* v^2 = factor (m W - S^2); 0 if below rounding m W */
    double s, half, limit, low, high;  /* s; lambda_0/2; the largest rho; bounds of lambda */
    double lr;                         /* the base's learning rate */
    double keep_N, keep_C, keep_V;     /* N <- keep_N N + take_N sigma^2, and so on */
    double take_N, take_C, take_V;
    double sign, decay;                /* sign of the gradient: -1 to maximize; coupled decay */
    double mu, again;                  /* Nesterov: variance = mu^2 V + again sigma^2 */
    double unbias_n, unbias_p, eps;    /* Adam's bias corrections, and its eps */
    double known;                      /* Adam: a bracket up to known times its size is nan */

    /* for a whole step, including the base's */
    int64_t is_left;                   /* out: 1 if the step was not taken */
    int64_t is_changed;                /* out: 1 if some element of the gradient differs from S */
    double most, precision;            /* largest allowed sum; rounding error of the gradient */
    double take;                       /* weight of a new gradient: 1 - dampening */

    /* for Adam's whole step */
    void *root;                        /* torch's function for square roots; 0 if it rounds to */
    void *root_threads;                /*   the nearest number; what sets its number of threads; */
    int64_t root_mode;                 /*   its last argument */
    double shrink;                     /* factor of x: decoupled weight decay */
    double blend, keep_p, take_p;      /* m <- m + blend (g - m), p <- keep_p p + take_p g^2 */
    double root_c2, step_size;         /* root of the bias correction of p; lr/c1 */
} Task;
CHECK_TASK

/* A convolution: x [images, c, h, w], delta [images, o, oh, ow], a kernel [kh, kw]. */
typedef struct {
    int64_t images, per, groups; /* images; images per sample; groups of samples */
    int64_t c, h, w, o, oh, ow, kh, kw;
    int64_t sy, sx, py, px, dy, dx; /* stride, padding, dilation */
    /* strides in memory; either the channel's is 1, or the column's (of delta: the pixel's) */
    int64_t x_image, x_channel, x_row, x_column, d_image, d_channel, d_pixel;
    int64_t parts;   /* torch's groups: independent parts of channels and features */
    int64_t scratch; /* out: the scratch memory that it needs, in numbers */
} Convolution;
CHECK_CONVOLUTION

/* A layer whose sums are computed with those of others: contributions of `batch` samples in
   `groups`, from delta [batch, r, o] and, for a dense layer, its input [batch, r, i]. */
typedef struct {
    int64_t kind, uses_threads; /* LAYER_...; 0 or 1 */
    int64_t batch, groups, r, o, i;
    int64_t at_once;      /* groups that a dense layer packs at a time */
    int64_t weight, bias; /* where their sums begin in S and in W; -1 without a bias */
    int64_t centre;       /* a normalization: 1 if it subtracts the mean */
    double eps;           /* of a normalization */
} LayerTask;
CHECK_LAYERTASK
