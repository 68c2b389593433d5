"""Thresholds and tolerances, each with the measurement or the reason behind its value.

There are three kinds: bounds on memory, which ordinary training must not reach; margins of safety,
with the rounding or chance that they allow for; and thresholds of speed. "Not measured" marks a
threshold of speed that was not compared with other values yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# ---- caches --------------------------------------------------------------------------------------

MOST_PLANS = 1 << 12
"""The largest number of plans; above it, all are dropped. A model whose shapes change all the time
must not fill the memory. A ResNet-18 has 68 plans, a GPT-2 about 200; the bound is twenty times as
high.
"""

SITES_TOGETHER = 1 << 21
"""Elements of gradients and parameters that a compiled graph measures together, by one call of our
operator: 8 MiB in float32, which stay in memory until then. Not measured further.
"""

MOST_CERTIFICATES = 1 << 8
"""The largest number of certificates of a compiled graph, one for each set of input shapes; above
it, all are dropped. torch.compile itself stops compiling after eight sets of shapes, or makes the
sizes symbolic.
"""

MOST_VERDICTS = 1 << 12
"""The largest number of verdicts of trials that are kept; above it, all are dropped."""

ENOUGH_SIZES = 8
"""After a trial has passed for this many different sizes, the size is assumed to make no
difference. A margin of safety: a function that treats only a later size differently would not be
noticed. The tests have no such function.
"""

SMALL_BATCH = 4
"""Batches of up to this number of samples are tried for every size, however many sizes have passed:
`torch.cross` without a dimension takes the first one of size 3, and so mixes three samples, and no
others."""

EARLY = 4
"""A function whose behaviour may change from forward to forward is tried in each of its first
calls, up to this number, then in the 8th, 16th, 32nd … call. Random graphs had branches that only
the second or third forward took.
"""

GEOMETRIES = 1 << 10
"""The largest number of cached geometries of convolutions (torch's options have many spellings). A
bound on memory: a model has some tens.
"""

SHAPES = 1 << 12
"""The largest number of cached sizes of convolutions for native code, one for each set of shapes. A
bound on memory, as for plans.
"""

OWNERS = 1 << 5
"""The largest number of cached tensors of sample numbers. Trials ask for the same few again and
again. A bound on memory.
"""

LAYOUTS = 1 << 8
"""The largest number of cached places. A batch of one size has a few. A bound on memory."""

REGULARIZERS = 1 << 8
"""The largest number of cached native tasks, one for each set of options. A param group has one
set; a scheduler of s makes a new set at each step. A bound on memory.
"""

# ---- memory for sums -----------------------------------------------------------------------------

WORKSPACE = 1 << 23
"""Elements that a workspace keeps from call to call: 32 MiB in float32. The system provides new
memory of this size page by page, which takes as long as the work itself. Larger requests are rare
and are not kept. Not measured.
"""

LARGE_PAGES = 1 << 23
"""Elements of new sums from which on the system is asked for large pages: 32 MiB in float32. glibc
keeps no freed memory of this size, so each step would get it again, page by page. Measured for a
weight of 1,024 × 25,088 on two cores: a copy in new memory took five times as long in small pages.
"""

CHUNK, CHUNK_GROUPS = 1 << 21, 8
"""Elements of contributions in one chunk, and the least number of groups in one chunk. 8 MiB in
float32 fit into a cache, and 8 matrices are enough for an efficient batched product. Not measured.
"""

OUTER_CHUNK, OUTER_GROUPS = 1 << 18, 4
"""The same for outer products, which are squared while they are in the second-level cache (1 MiB in
float32). On one thread of a busy Xeon (torch 2.13; CPU time, interleaved), with weights of 64²,
256² and 512²: 2¹⁸ took 1.2, 1.7 and 1.1 times as long as the best, 2²⁰ 1.0, 1.0 and 1.1 times, 2¹⁴
5.3, 1.4 and 1.1 times. It is used where native code does not serve. To be measured again on an idle
machine.
"""

GROUP_BY_GROUP = 1 << 15
"""From this number of elements on, the groups of a contribution are added up one after the other,
since a reduction over the first dimension would read memory with large strides. On one thread of a
busy Xeon (torch 2.13; CPU time, interleaved), one after the other took 2.0 times as long for 2¹²
elements, 1.1 to 1.3 times for 2¹⁴ and 2¹⁵, and as long to 10 % for 2¹⁶ and 2¹⁸.
"""


# ---- native code ---------------------------------------------------------------------------------

BLOCK = 512
"""Elements of one block of a kernel: the dozen arrays of a step, 512 doubles each, fit into the
first-level cache (48 KiB) together. A power of two. Not measured further.
"""

WORTH_THREADS = 1 << 15
"""From this number of elements on, a kernel that reads each element once uses threads. For fewer
elements, starting the threads takes longer than the work. Not measured.
"""

TOGETHER = 1 << 16
"""The number of elements whose gradients a whole step compares with the measured ones before it
moves them: they are read twice, the second time from the cache."""

WORTH_THREADS_PRODUCTS = 1 << 18
"""From this number of products on, a kernel of a layer uses threads, for the same reason."""

PACKED = 1 << 20
"""Numbers that the product of a layer packs at a time, unless a single group has more: 4 MiB in
float32. Not measured.
"""

SHARED_ROWS = 1 << 16
"""Numbers of the inputs of a dense layer with one row per sample that stay in the cache while they
meet all output features: 256 KiB in float32, a quarter of a second-level cache of 1 MiB.
"""

PANEL = 32
"""Numbers of a panel that are packed side by side: two vectors of the widest kind (AVX-512), in
float32. `kernels.c` has the tiles."""

CHAIN = 64
"""Groups that native code adds up one by one; the sums of such chains are added up afterwards,
since one long chain drifts. Equal samples then have a variance of 0: tested for 100, 1000 and 3000
of them. Other lengths were not measured.
"""

SUMS_AT_ONCE = 1 << 9
"""Elements whose sums over samples a thread adds up together, in double precision: five arrays,
20 KiB, which stay in the first-level cache (32 KiB or more). Not measured.
"""

SHORT_SUM = 1 << 9
"""Squares that are added up in the precision of a tensor, before they are added to a sum in double
precision. Not measured.
"""

SHARED_KERNEL = 1 << 19
"""Bytes of S and W of a convolution's kernel from which on threads share them and divide its tiles;
below, each thread has its own and takes a part of the samples. Half of a second-level cache of
1 MiB. Not measured.
"""

SHARED_IMAGES, OWN_IMAGES = 1 << 22, 1 << 17
"""Bytes of packed images that threads share, or that each thread has, at a time: 4 MiB in the
third-level cache, and 128 KiB in the second-level cache. Not measured.
"""

WORKERS, PATIENCE = 255, 10_000
"""For threads without an OpenMP library: the largest number of threads of the pool, a bound on
memory; and the checks for new work before a thread sleeps, some microseconds. Not measured.
"""

# ---- the step ------------------------------------------------------------------------------------

LARGE_PARAMETER = 1 << 19
"""From this number of elements on, a parameter's λ is computed in slices. The dozen tensors of a
slice take 24 MiB in float32, and stay in the cache for PyTorch's passes over them. Not measured.
"""

SMALL_PARAMETER = 1 << 16
"""Parameters of up to this number of elements are joined and computed together, since the calls
take longer than the work. Not measured.
"""

# ---- the range of numbers ------------------------------------------------------------------------

SMALLEST_SQUARE, LARGEST_SQUARE = 2.0**-80, 2.0**100
"""If the largest W is outside of these bounds, squares in float32 are near underflow (2⁻¹²⁶) or
overflow (2¹²⁸), and sums are computed in float64. The lower bound leaves a factor of 2⁴⁶, so that
elements of 2⁻²³ times the largest keep their squares. The upper bound leaves 2²⁸ for sums over
samples and steps.
"""

BACK_FROM, BACK_TO = 2.0**-66, 2.0**86
"""Sums in float64 return to float32 when the largest W is between these bounds, which are 2¹⁴
inside of the range above, so that the type does not change at each step.
"""

STATISTICS = 1e-30, 1e38
"""Statistics in float64 return to float32 when their largest value is between these bounds, just
inside of the range of float32.
"""

ROOM = 2.0**-20
"""The share of a type's range that squares of gradients may use, since increments add them up over
steps.
"""

LARGEST_HISTORY = 1e37
"""The largest value of a history: the next value must not make float32 overflow, at 3.4e38."""

TINY_DIVISOR = 1e-30
"""The lower bound of a divisor that is made of two sums, since both may be 0."""

# ---- rounding ------------------------------------------------------------------------------------

VARIANCE = 4.0, 2.0
"""m·W − S² counts as 0 if it is at most (a + b√m) units of rounding of m·W, the error that sums
over m samples may have. A margin of safety: the error of a sum of m numbers grows as √m if
roundings are independent, and S² and m·W have a few more.
"""

BRACKET = 32.0, 1e-9
"""The variance of a quotient is unknown if its bracket is at most the first number, in units of
rounding. The bound is at least the second number, since states in float64 may have been computed in
lower precision. Margins of safety.
"""

PARALLEL = 10.0
"""A gradient counts as a multiple of the measured one if its part orthogonal to the measured one is
at most this many units of rounding. A margin of safety: a clip rounds each element once, and the
three products, in float64, add little.
"""

SAME_LENGTH = 1e-5
"""Two squared lengths of a gradient count as equal within this relative tolerance: another number
of threads sums them up in another order. A margin of safety over the rounding of sums in float32.
"""

COARSE = 1e-4
"""If the unit of rounding is above this (half precision), sums of several uses are not checked: how
much they cancel in each sample is not known.
"""

UNSEEN_AT_MOST = 0.01
"""The share of a gradient that may come from outside of the forward without an error; the root of
the unit of rounding, if that is less. A margin of safety: rounding is far below it.
"""

UNSEEN_ROUNDING = 2.0, 2.0
"""Factors on the allowed rounding of a gradient, and on the sizes of the uses that cancel. Margins
of safety over a bound on the error of sums.
"""

PEEK = 256
"""The number of elements at the beginning of a gradient that are searched for one that is not 0.
Usually one is found. Searching so few takes as long as one call of torch. On one thread of a busy
Xeon (CPU time, interleaved) it took 1/13 of the time of a search of all of 2¹⁶ elements, and 1/166
for 2²⁰; for 2¹² the second call costs a third more.
"""

# ---- λ -------------------------------------------------------------------------------------------

RECENT = 0.1
"""The weight of the last step in the recent mean of λ that `calibrate` divides by: about ten
steps."""

# ---- messages ------------------------------------------------------------------------------------

LARGE_LAMBDA = 2.0
"""If the effective λ stays above this, users are warned. With the default history it reaches 2.8 on
the digits, where training with the best learning rate of SGD then diverges.
"""

LAMBDA_EVERY, LAMBDA_LOOKS = 25, 4
"""Steps between two checks of the effective λ, and the number of large values in a row that lead to
a warning: 100 steps. The cost of a check was not measured.
"""

SIMILAR = 0.8
"""The similarity (`difflib`) from which on the name of an option counts as a typing error. It only
decides whether a warning is given. Of all options of our optimizers, only `lambda_min` and
`lambda_max` are so similar; the next pair has 0.74.
"""

# ---- trials --------------------------------------------------------------------------------------

SAME = 64.0
"""Two results of a trial count as equal if they differ by at most this many units of rounding,
relative to each value. A matrix product with other rows in the same matrix may add in another
order, which changes it by some 10 units. Not measured further.
"""

ROUNDING_OF_RANDOM = 1e4
"""The factor on `SAME` for random samples in another order. A solution of random equations may be
ill-conditioned, and rounds differently at another place in memory.
"""

SAME_TO_LARGEST = 1 / 16
"""The same relative to the largest value, as a share of `SAME`: four units of rounding. If larger
values cancel, the rest changes by their rounding. With less than one unit, an LSTM with a
projection was refused on a processor whose products add in another order.
"""

SAME_AT_MOST = 0.05
"""The same for bfloat16, in which 64 units of rounding would be half of the value."""

SUM = 256.0
"""The allowed error of a sum over samples in units of rounding, relative to the largest of its four
results. Four results are added up, each with the rounding of a sum over the batch. A margin of
safety: a sum that mixes samples is off by a part of its size, and this is 3e-5 of it in float32.
"""

AFFINE = 1e-6
"""A function counts as affine if four values fit a plane within this, relative to the largest: in
float64, where rounding is 1e-16, and in float32 for functions that accept nothing else. A margin of
safety between rounding and a nonlinear function, which is off by a share of its size.
"""

AFFINE_SIZES = (0.01, 0.3, 1.0, 10.0, 1e3)
"""Sizes of values in the trial for `AFFINE`, twice each: a clip or a threshold shows at one of
them.
"""

LARGE_VALUES = 1e4
"""Values and gradients of this size are tried, too: a function or its backward may clip large
values.
"""

SIZES_TRIED = LARGE_VALUES, 10.0, 1.0
"""Random values of these sizes, relative to the spread of the given values, are tried for each
function: a threshold shows at one of them.
"""

SIZE_OF_BATCH = 1e-12
"""The relative tolerance within which a number counts as made from the number of samples: the
rounding of a root in float64. Not measured.
"""

EXCHANGES, ROUNDS = 24, 3
"""The least number of exchanges of samples in a trial of a function, and the largest number of
rounds of random values. Two samples can be exchanged in two ways only, so that a function that
sorts them shows in half of the exchanges: 24 exchanges miss it with a probability of 1e-7. Measured
on 19 functions that sort, count and compare, 60 times each.
"""

USUAL_SIZES = 1e-3, 1e3
"""Random values have the spread of the given values, if it is between these bounds; otherwise 1."""

COPIES = 8, 2
"""The number of samples of which a trial of a whole forward makes batches of copies: the first
time, and later. Each costs a forward: a bound on the time of the first steps.
"""

RECORDS = 16
"""Numbers that leave torch are tried when they are larger or smaller than all earlier ones: the
first so many times. Among n independent numbers, 2 ln n are such numbers: 23 in 100,000 steps.
"""

MOST_OBJECTS = 2000
"""The largest number of objects that are searched for tensors that a forward left in attributes: a
bound on the time, not measured.
"""

MOST_COPIES = 16
"""The largest batch of which copies of each sample are tried: each costs a forward."""

SPLITS = 2, 1
"""Pairs of splits of the batch in a trial of a whole forward: the first time, and later. Each costs
a forward.
"""

CHANGE = 0.1
"""The change of parameters, relative to their spread, in trials that must see behind gates that are
still zero.
"""

# ---- repetition ----------------------------------------------------------------------------------

PARTS_ADD_UP = 1e3, 0.05
"""Contributions of a repeated call must add up to the gradient within this many units of rounding,
and within the second number, relative to the sum of their sizes. A margin of safety: a call that
behaves differently when it is repeated is off by a sample's share.
"""

# ---- verify --------------------------------------------------------------------------------------

RTOL = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The gaps that `varreg.verify` allows by default. In float64 all 120 models of the tests are below
1e-9. In float32, gradients that cancel are off by some 1e-4."""

RTOL_COARSE = 5e-2
"""The same for half precision, and under autocast."""

FLOOR = 1e-4
"""The size, relative to the model's largest gradient, below which numbers are rounding. Gradients
that are zero up to rounding (a bias before a softmax) have no scale of their own.
"""

NOISE = 10.0
"""A gap counts as rounding if it is at most this many times as large as torch's own gaps without
varreg: between single samples and float64, or between the batch and single samples.
"""

MOST_WEIGHED = 1 << 27
"""Elements of gradients that are kept to find out how a loss weighs samples: 1 GiB in float64."""

ALIKE = 1e-6, 1e-11
"""If the smallest eigenvalue of the gradients' products, relative to the largest, is below this,
samples are so similar that many factors would explain a loss; in float32, and in float64. Not
measured.
"""

ALIKE_PRECISE = 1e-5
"""The tolerance of `varreg.verify` up to which gradients are taken to be in float64."""

SAME_LOSS = 1e-2
"""The tolerance within which factors that explain a gradient must explain the loss."""

SAME_FACTOR = 1e-3
"""Factors that differ by less count as one factor for all samples."""

# ---- devices -------------------------------------------------------------------------------------

MOST_CHECKS = 1 << 10
"""The largest number of checks that wait on a device until moments are read or a step is taken. A
bound on memory: each is one number, and a step asks for all.
"""

CONSTANTS = 1 << 8
"""Numbers that are kept on devices: a param group has one or two, and a scheduler of s a new one at
each step. Not measured."""

FILLED = 1 << 6
"""Tensors of equal numbers that are kept on devices: one for each number of rows of a layer, and
one for each layer with one row per sample, of the size of its output and of up to `DEVICE_CACHED`
elements. A bound on memory, if batches have many sizes.
"""

DEVICE_CHUNK = 1 << 25
"""Elements of per-sample gradients that exist at once on an accelerator: 128 MiB in float32. Each
chunk is several kernel launches; on the CPU, chunks are as small as its caches. Not measured."""

DEVICE_CACHED = 1 << 20
"""Elements of per-sample gradients that an accelerator's cache holds: 4 MiB in float32. A layer
with one row per sample needs none, at the price of one more launch for its bias. Not measured."""

DEVICE_SMALL, DEVICE_JOINED, DEVICE_LARGE = 1 << 22, 1 << 24, 1 << 26
"""On an accelerator: the largest size of a parameter whose step is joined with the steps of others,
the largest size of all joined parameters, and the size from which on a parameter is sliced; in
elements. A joined step of any number of parameters takes some 25 to 40 launches, and memory for
about ten more numbers per element. Not measured."""

# ---- noise ---------------------------------------------------------------------------------------

WINDOW = 200
"""Updates over which `NoiseScale` averages. At fixed parameters, a batch of 128 far below the noise
scale had a relative standard deviation of |Ĝ|² of 3: 200 of them leave 20 %."""

LOSS_ROUNDING = 1e4, 0.05, 1e2
"""Two losses of the same samples, summed up in another order, count as equal if their relative
difference is at most the first number of units of rounding, and at most the second number. The
third number, in units of rounding, is added to the bound."""

SAME_PARAMETERS = 1e-9
"""If no parameter has changed, the sum of all squared parameters, in float64, differs by at most
this.
"""

CHECKPOINT_SECONDS = 60.0
"""Seconds between two checkpoints of `fisher`: a killed process loses at most these. Chosen for
people, not for speed.
"""

STANDARD_ERRORS = 2.0
"""Half of the width of an interval, in standard errors: 95 % of such intervals contain the true
value, if errors are normal.
"""

MOST_ALIKE = 0.97
"""The upper bound of the autocorrelation in standard errors: above it, no window is long enough for
an estimate.
"""

SMOOTHING = 0.9
"""The weight of the old averages of `AdaScale` at each step. Enough in runs of an MLP at 8 and 64
times the batch; not measured further.
"""

# ---- the monitor, and summaries of λ -------------------------------------------------------------

LAMBDA_SAMPLE = 1 << 16
"""Elements of which λ's quantiles are taken for the whole model. With this number, the 10 %
quantile is between the true 9.8 % and 10.2 % quantiles.
"""

MONITOR_SHARE = 0.01
"""The part of the time that a monitor may take."""

PAGE_SHARE = 0.003
"""The part of the time that a monitor may take to write its page."""

PAGE_SECONDS = 3.0
"""The least number of seconds between two versions of a monitor's page. A browser reads it again as
often.
"""

PAGE_STALE = 1800.0
"""Seconds without news after which a page treats a run as dead, and is not read again."""

PAGE_LINES, PAGE_BYTES = 1000, 1 << 20
"""The largest number of records on a page, and their largest size in bytes. If there are more,
every second one is left out. A figure is about 600 pixels wide."""

NUMBER_DIGITS = 7
"""Digits of a recorded number: as many as float32 has."""

# ---- kernels in Triton ---------------------------------------------------------------------------


class Tile(NamedTuple):
    """The part of a dense layer or of a convolution that one program computes."""

    o: int
    """Output features."""
    i: int
    """Input features."""
    rows: int
    """Rows that are loaded at a time."""
    warps: int


TRITON_TILES = {"ieee": Tile(32, 32, 16, 4), "tf32": Tile(32, 32, 16, 4)}
"""By the precision of products. Small, since a program keeps several tiles in registers, of S, of W
and of a group's product. With 32 rows, convolutions spill on sm_80 and sm_90. Compiled by `make
kernels`; the speed was not measured."""

TRITON_STAGES = 2, 1
"""Loads of dense layers, and of convolutions, that run at a time. With 3, Triton's default, dense
layers with one row spill on sm_90; with 2, convolutions do in "tf32".
"""

TRITON_CHAIN = 16
"""Groups that are added up one by one; the sums of such chains are added up afterwards. Of random
values that were added up 100 times in a row, 3 % drifted by more than the rounding that a variance
of 0 may have: samples that agree would differ. In chains of 16, none did, up to 300."""

TRITON_PROGRAMS = 256
"""If a kernel has fewer programs than this, the samples are divided among more programs. An A100
has 108 multiprocessors, an H100 132, an MI300X 304. Not measured.
"""

TRITON_BLOCK = 1024
"""Elements of one program of the step. Not measured."""

TRITON_SUMS = 32, 128
"""Groups and elements of one program that adds up contributions in memory. Not measured."""

TRITON_LONGEST_ROW = 1 << 13
"""Elements of the longest row that is normalized by a kernel: a program keeps it in registers.
Twice as many spill, on sm_80 and sm_90."""

TRITON_ROW_OF_A_WARP = 256
"""Elements of such a row that one warp has, up to 16 warps. Not measured."""
