/* The element-wise work in one pass over memory. Twins, and definitions: Moments in varreg/engine/ledger.py, and varreg/regularizer.py. */
#include <math.h>
#include <stdint.h>

#define HUGE_SUM ((REAL)1e37)

enum { SUM, MEAN, HARMONIC };
enum { RATIONAL, AFFINE };

#define REAL float
#define NAME(x) x##_float32
#include "kernels.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_float64
#include "kernels.h"
