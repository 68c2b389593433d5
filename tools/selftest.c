/* Load a library of the kernels, and compare S and W of a dense layer, with one thread and with
   several, with their definition. For systems that have no Python here: tools/wheels.py. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef _WIN32
#include <windows.h>
#define OPEN(path) ((void *)LoadLibraryA(path))
#define FIND(library, name) ((void *)GetProcAddress((HMODULE)library, name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND dlsym
#endif

enum { B = 12, R = 17, O = 37, I = 53 };
typedef void (*Outer)(const double *, const double *, double *, double *, double *, double *,
                      double *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int);

static double delta[B][R][O], a[B][R][I], S[O][I], again[O][I], W[O][I], bias[2][O];
static double scratch[1 << 20];

int main(int count, char **arguments) {
    void *library = OPEN(arguments[count - 1]);
    Outer outer = library ? (Outer)FIND(library, "outer_float64") : NULL;
    if (!outer) return puts("cannot be loaded"), 2;
    for (int k = 0; k < B * R * O; k++) (&delta[0][0][0])[k] = (k * 37 % 101) / 50.0 - 1;
    for (int k = 0; k < B * R * I; k++) (&a[0][0][0])[k] = (k * 53 % 103) / 51.0 - 1;
    double worst = 0;
    for (int threads = 1, turn = 0; turn < 40; turn++, threads = 1 + turn % 5) {
        outer(&delta[0][0][0], &a[0][0][0], &S[0][0], &again[0][0], &W[0][0], &bias[0][0], scratch,
              B, B, R, O, I, 5, threads);
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i++) {
                double total = 0, square = 0;
                for (int b = 0; b < B; b++) {
                    double c = 0;
                    for (int r = 0; r < R; r++) c += delta[b][r][o] * a[b][r][i];
                    total += c;
                    square += c * c;
                }
                worst = fmax(worst, fmax(fabs(S[o][i] - total), fabs(W[o][i] - square)));
                worst = fmax(worst, fabs(again[o][i] - total));
            }
    }
    printf("1 to 5 threads, 40 calls: off by %.1e at most\n", worst);
    return !(worst < 1e-11);
}
