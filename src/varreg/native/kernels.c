/* Every kernel, for float and for double. One header for each part of the work; its twin in PyTorch is named there. */
#include <math.h>
#include <stdint.h>

#define HUGE_SUM ((REAL)1e37)

enum { SUM, MEAN, HARMONIC };
enum { RATIONAL, AFFINE };

#define REAL float
#define NAME(x) x##_float32
#include "reduce.h"
#include "step.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_float64
#include "reduce.h"
#include "step.h"
