/* All kernels, for float and for double. Each header names the definition of its kernels: slower
   code in PyTorch that computes the same. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
extern int omp_get_thread_num(void); /* clang has no omp.h of its own; see threads.c */
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#include "tasks.h"

/* Vectors, in bytes, and a tile of products: MR features times NV vectors. With AVX-512, a tile and
   its sum over units fit the processor's registers together; with a higher tile, short units would
   wait for the memory of that sum. */
#if defined(__AVX512F__)
#define VECTOR 64
#define MR 7
#elif defined(__AVX__)
#define VECTOR 32
#define MR 6
#else
#define VECTOR 16
#define MR 6
#endif
#define NV 2

#define LANES ((int64_t)(VECTOR / sizeof(REAL)))
#define AT(p) (*(NAME(vec) *)(p)) /* a vector, at any address */
#define QUAD(p) (*(NAME(quad) *)(p)) /* four numbers */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (NAME(places)){__VA_ARGS__})
#endif

#define REAL float
#define INT int32_t
#define UINT uint32_t
#define NAME(x) x##_float32
typedef REAL NAME(vec) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));
typedef REAL NAME(quad)
    __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#include "lambda.h"
#include "noise_sums.h"
#include "step.h"
#include "base.h"
#include "reductions.h"
#include "dense.h"
#include "single_rows.h"
#include "convolution.h"
#include "depthwise.h"
#include "spread.h"
#include "many_layers.h"
#undef REAL
#undef INT
#undef UINT
#undef NAME

#define REAL double
#define INT int64_t
#define UINT uint64_t
#define NAME(x) x##_float64
typedef REAL NAME(vec) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));
typedef REAL NAME(quad)
    __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#include "lambda.h"
#include "noise_sums.h"
#include "step.h"
#include "base.h"
#include "reductions.h"
#include "dense.h"
#include "single_rows.h"
#include "convolution.h"
#include "depthwise.h"
#include "spread.h"
#include "many_layers.h"
