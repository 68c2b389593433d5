/* The structs that Python fills, field by field and by name (contract.py). contract.h is written
   by contract.py when this is compiled: its enums, BLOCK, LARGEST_HISTORY,
   and the checks that both sides agree. */
#include <stddef.h>

#include "contract.h"

/* One tensor's part of a call that works on many. A kernel reads what it needs of it. */
typedef struct {
    int64_t n;                                    /* elements */
    int64_t increment, history, form, scale_free; /* INCREMENT_..., HISTORY_..., FORM_..., 0 or 1 */
    int64_t is_shared;  /* 1: rho_count is one number, that of every element */
    int64_t is_partial; /* out, if it is: 1 if some elements had a finite rho, and others not */

    void *total, *square; /* S and W; without W, every element has a rho */
    void *grad;           /* the gradient as the base sees it */
    void *products;       /* out: four sums in double precision for each block; or two, of lambda */

    void *variance, *delta;    /* of the increment, where they are computed elsewhere */
    void *rho_sum, *rho_count; /* the history of rho */
    void *lam;                 /* out: lambda; where nobody keeps it, 0 */
    void *x, *steps;           /* out: the parameter; how many steps there were */

    void *average, *squares; /* the base's averages of gradients (or momentum), and of squares */
    void *N, *C, *V;         /* sums for the variance of the increment, as in optim/increments.py */

    /* if lambda is calibrated: its recent mean, the sum of its means, and how many there were */
    void *recent, *spent, *times;
    double scale; /* what it is then multiplied by */

    double m, factor, rounding;        /* v^2 = factor (m W - S^2); less than rounding m W is 0 */
    double s, half, limit, low, high;  /* s; lambda_0/2; the largest rho; bounds of lambda */
    double lr;                         /* the base's learning rate */
    double keep_N, keep_C, keep_V;     /* N <- keep_N N + take_N sigma^2, and so on */
    double take_N, take_C, take_V;
    double sign, decay;                /* of the gradient: -1 to maximize; coupled weight decay */
    double mu, again;                  /* Nesterov's momentum; what sigma^2 comes in with again */
    double unbias_n, unbias_p, eps;    /* Adam's bias corrections, and its eps */
    double known;                      /* a bracket that is smaller, relative to its size, is not */

    /* of a whole step, the base's included */
    int64_t is_left;                   /* out: 1 if the step was not taken */
    double most, precision;            /* the largest sum; the rounding error of the gradient */
    double take;                       /* of a new gradient: 1 - dampening */
} Task;
CHECK_TASK

/* A convolution: x [images, c, h, w], delta [images, o, oh, ow], a kernel [kh, kw]. */
typedef struct {
    int64_t images, per, groups; /* images of a sample: `per`; groups of samples */
    int64_t c, h, w, o, oh, ow, kh, kw;
    int64_t sy, sx, py, px, dy, dx; /* stride, padding, dilation */
    /* strides in memory; one of channel and column, or of channel and pixel, is 1 */
    int64_t x_image, x_channel, x_row, x_column, d_image, d_channel, d_pixel;
    int64_t parts;   /* into which channels and features are divided, each on its own */
    int64_t scratch; /* out: numbers of scratch memory that it takes */
} Convolution;
CHECK_CONVOLUTION
