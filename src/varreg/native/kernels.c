/* Every kernel, for float and for double. One header for each part of the work; its twin in PyTorch is named there. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define HUGE_SUM ((REAL)1e37)

enum { SUM, MEAN, HARMONIC };
enum { RATIONAL, AFFINE };

/* Vectors, in bytes, and a tile of products that fits the processor's registers: MR features times NV vectors. */
#if defined(__AVX512F__)
#define VECTOR 64
#define MR 12
#elif defined(__AVX__)
#define VECTOR 32
#define MR 6
#else
#define VECTOR 16
#define MR 6
#endif
#define NV 2
#define FEW 64 /* groups that are added up one after the other */

#define LANES ((int64_t)(VECTOR / sizeof(REAL)))
#define AT(p) (*(NAME(vec) *)(p)) /* a vector, at any address */

#define REAL float
#define NAME(x) x##_float32
typedef REAL NAME(vec) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));
#include "step.h"
#include "reduce.h"
#include "sums.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_float64
typedef REAL NAME(vec) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));
#include "step.h"
#include "reduce.h"
#include "sums.h"
