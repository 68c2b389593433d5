"""Thresholds and tolerances, each with what it was measured on, or why it is what it is.

Three kinds: bounds on memory, which only must not be met in ordinary training; margins of safety,
which say how much rounding or chance they leave room for; and thresholds of speed. "Not measured"
stands beside those of speed that nobody has compared with others yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# ---- what is remembered --------------------------------------------------------------------------

MOST_PLANS = 1 << 12
"""Forms of calls that are remembered; then all are forgotten. A model whose shapes change all the
time must not fill the memory. A ResNet-18 has 68 forms, a GPT-2 some 200: a bound twenty times as
high is met by neither."""

MOST_CERTIFICATES = 1 << 8
"""Shapes of inputs of a compiled graph with remembered certificates; as above. torch.compile
itself gives up after eight shapes, or takes sizes for symbols."""

MOST_VERDICTS = 1 << 12
"""Verdicts of trials that are remembered; as above."""

ENOUGH_SIZES = 8
"""Different sizes for which a trial has passed: from then on, sizes are taken to make no
difference. A margin of safety: a function that treats the ninth size otherwise would not be
noticed, and the tests have none."""

EARLY = 4
"""What may change from forward to forward is tried each of the first so many times that it is met,
and then the 8th, 16th, 32nd … time. Random graphs had branches that only the second or third
forward took."""

GEOMETRIES = 1 << 10
"""Convolutions whose geometry is remembered, since torch's options are spelled in many ways. A
bound on memory: a model has some tens."""

SHAPES = 1 << 12
"""Convolutions whose sizes native code has been told, each by its shapes. As for plans."""

OWNERS = 1 << 5
"""Places whose rows are numbered by samples, which is kept for trials: they ask for the same few
again and again. A bound on memory."""

LAYOUTS = 1 << 8
"""Places in a tensor, which are made once each: a batch of one size has a few. A bound on
memory."""

REGULARIZERS = 1 << 8
"""Sets of options for which native code has a task at hand: a param group has one, and a scheduler
of s a new one at each step. A bound on memory."""

# ---- what sums are made in -----------------------------------------------------------------------

WORKSPACE = 1 << 23
"""Elements that a workspace keeps from call to call, 32 MiB in float32. Fresh memory of this size
comes from the system page by page, at the price of the work itself; more would be held for the sake
of few calls. Not measured."""

CHUNK, CHUNK_GROUPS = 1 << 21, 8
"""Elements of contributions that are made at a time, and groups that are made together at least.
8 MiB in float32, about what a cache holds; and 8 matrices keep a batched product busy. Not
measured."""

OUTER_CHUNK, OUTER_GROUPS = 1 << 18, 4
"""The same for outer products, which are squared while they are in the second-level cache (1 MiB in
float32). On one thread of a busy Xeon (torch 2.13; CPU time, interleaved), with weights of 64²,
256² and 512²: 2¹⁸ took 1.2, 1.7 and 1.1 times as long as the best, 2²⁰ 1.0, 1.0 and 1.1 times, 2¹⁴
5.3, 1.4 and 1.1 times. This is where native code does not serve; to be measured again on an idle
machine."""

GROUP_BY_GROUP = 1 << 15
"""Elements of a contribution from which on groups are added up one after the other: a reduction
over the first dimension then reads memory in leaps. On one thread of a busy Xeon (torch 2.13; CPU
time, interleaved), one after the other took 2.0 times as long for 2¹² elements, 1.1 to 1.3 times
for 2¹⁴ and 2¹⁵, and as long to 10 % for 2¹⁶ and 2¹⁸."""

# ---- native code ---------------------------------------------------------------------------------

BLOCK = 512
"""Elements that a kernel works on at a time: the dozen arrays of a step, 512 doubles each, are in
the first-level cache (48 KiB) together. A power of two. Not measured further."""

WORTH_THREADS = 1 << 15
"""Elements from which on a kernel that reads each once uses threads: below, to start
them takes longer than the work. Not measured."""

WORTH_THREADS_PRODUCTS = 1 << 18
"""Products from which on a kernel of layers uses threads; as above."""

PACKED = 1 << 20
"""Numbers that a product of layers packs at a time, unless a single group has more: 4 MiB in
float32. Not measured."""

PANEL = 32
"""Numbers of a panel that are packed side by side: two vectors of the widest kind (AVX-512), in
float32. `kernels.c` has the tiles."""

# ---- the step ------------------------------------------------------------------------------------

LARGE_PARAMETER = 1 << 19
"""Elements from which on a parameter's λ is worked out in slices: the dozen tensors of a slice take
24 MiB in float32, so that PyTorch's passes over them find them in the cache. Not measured."""

SMALL_PARAMETER = 1 << 16
"""Elements up to which parameters are joined and worked on together: for these, the calls
themselves take longer than the work. Not measured."""

# ---- the range of numbers ------------------------------------------------------------------------

SMALLEST_SQUARE, LARGEST_SQUARE = 2.0**-80, 2.0**100
"""Where the largest W is beyond these, squares in float32 are near underflow (2⁻¹²⁶) or overflow
(2¹²⁸), and sums are in float64. A factor of 2⁴⁶ is left below, so that elements of 2⁻²³ times the
largest keep their squares; 2²⁸ above, for sums over samples and steps."""

BACK_FROM, BACK_TO = 2.0**-66, 2.0**86
"""Sums in float64 are in float32 again when the largest W is between these: 2¹⁴ inside of the range
above, so that they do not change in each step."""

STATISTICS = 1e-30, 1e38
"""Statistics in float64 go back to float32 when their largest is between these, which are just
inside of its range."""

ROOM = 2.0**-20
"""The part of a type's range that squares of gradients may take up: increments add them up over
steps."""

LARGEST_HISTORY = 1e37
"""A history stops here: one more value must not make a float32 overflow, at 3.4e38."""

TINY_DIVISOR = 1e-30
"""A divisor that is made of two sums is at least this, since both may be 0."""

# ---- rounding ------------------------------------------------------------------------------------

VARIANCE = 4.0, 2.0
"""m·W − S² is 0 if it is at most (a + b√m) units of rounding of m·W: what sums over m samples may
leave. A margin of safety: the error of a sum of m numbers grows as √m if roundings are
independent, and S² and m·W have a few more."""

BRACKET = 32.0, 1e-9
"""The variance of a quotient is not known where its bracket is at most so many units of rounding;
and at least this, where states are kept in float64 but were computed in less. Margins of
safety."""

PARALLEL = 10.0
"""A gradient is a multiple of what was measured if what is left of it across is at most so many
units of rounding. A margin of safety: a clip rounds each element once, and the three products, in
float64, add little."""

COARSE = 1e-4
"""A unit of rounding above this (half precision) says nothing about sums of several uses: what they
cancel in each sample is not known."""

UNSEEN_AT_MOST = 0.01
"""The part of a gradient, or the root of the unit of rounding if that is less, that may come from
outside of the forward unnoticed. A margin of safety: rounding is far below, and what is less than
this is not reported."""

UNSEEN_ROUNDING = 2.0, 2.0
"""How many times the rounding of a gradient is allowed beside that, and how many times the sizes
that uses cancelled count in it. Margins of safety over a bound on the error of sums."""

PEEK = 256
"""Elements of a gradient that are looked at first for one that is not 0: mostly there is one. A
look at so few takes as long as a call of torch. On one thread of a busy Xeon (CPU time,
interleaved) it took 1/13 of a look at all of 2¹⁶ elements, and 1/166 for 2²⁰; for 2¹² the second
call costs a third more."""

# ---- λ -------------------------------------------------------------------------------------------

RECENT = 0.1
"""The weight of the last step in the recent mean of λ that `calibrate` divides by: about ten
steps."""

# ---- messages ------------------------------------------------------------------------------------

LARGE_LAMBDA = 2.0
"""Users are warned of an effective λ that stays above this. The default history's goes to 2.8 on
the digits, where the learning rate that is best for SGD then breaks."""

LAMBDA_EVERY, LAMBDA_LOOKS = 25, 4
"""Steps after which the effective λ is looked at, and how many such looks in a row must find it
large: 100 steps. What a look costs was not measured."""

SIMILAR = 0.8
"""Names of options that are so similar (`difflib`) are taken for typing errors. It only decides
whether a warning is given. Of all options of our optimizers, `lambda_min` and `lambda_max` alone
are so alike; the next pair has 0.74."""

# ---- trials --------------------------------------------------------------------------------------

SAME = 64.0
"""Two results of a trial are the same to within so many units of rounding, relative to each value.
A matrix product that is given other rows beside may sum up in another order, and moves by some 10
units. Not measured further."""

ROUNDING_OF_RANDOM = 1e4
"""The same for random samples in another order: times of that. A solve of random equations may be
ill-conditioned, and rounds otherwise at another place in memory."""

SAME_TO_LARGEST = 1 / 16
"""The same relative to the largest value, as a part of `SAME`: four units of rounding. A value that
is left of larger ones that cancel moves by their rounding; with less than one unit, an LSTM with a
projection was refused on a processor whose products sum up in another order."""

SAME_AT_MOST = 0.05
"""The same for bfloat16, where 64 units of rounding would be half of the value."""

SUM = 256.0
"""A sum over samples may be off by so many units of rounding, relative to its largest end. Four
results are added up, each with the rounding of a sum over the batch. A margin of safety: a sum that
mixes samples is off by a part of its size, and this is 3e-5 of it in float32."""

AFFINE = 1e-6
"""A function is affine if four values fit a plane to this, relative to the largest; in float64,
where rounding is 1e-16, and in float32 if it takes no other. A margin of safety
between rounding and a function that is bent, which is off by a part of its size."""

AFFINE_SIZES = (0.01, 0.3, 1.0, 10.0, 1e3)
"""Sizes of values at which that is tried, twice each: a clip or a threshold shows at one."""

LARGE_VALUES = 1e4
"""Values and gradients of this size are tried, too: a function or its backward may clip what is
large."""

SIZES_TRIED = LARGE_VALUES, 10.0, 1.0
"""Random values of these sizes, times the spread of those at hand, are tried for each function: a
threshold shows at one of them."""

SIZE_OF_BATCH = 1e-12
"""A number is taken for one made of the number of samples if it is that to this, relative: rounding
of a root in float64 and no more. Not measured."""

EXCHANGES, ROUNDS = 24, 3
"""Exchanges of samples that a trial of a function makes at least, in so many rounds of random
values at most. Two samples can be exchanged in two ways only, so that a sort of them shows in half
of the exchanges: 24 of them leave it a chance of 1e-7. Measured on 19 functions that sort, count
and compare, 60 times each."""

USUAL_SIZES = 1e-3, 1e3
"""Random values have the spread of the values at hand, if it is between these; else 1."""

COPIES = 8, 2
"""Samples of whose copies a whole batch is made in a trial of a whole forward: the first time, and
later. Each is a forward: a bound on the time of the first steps."""

RECORDS = 16
"""Numbers that leave torch are tried the first so many times that they are larger or smaller than
all before. Of n independent numbers, 2 ln n are: 23 in 100,000 steps."""

MOST_OBJECTS = 2000
"""Objects that are looked into in search of tensors that a forward left somewhere: a bound on the
time, not measured."""

MOST_COPIES = 16
"""The largest batch of which each sample's copies are tried: each of them is a forward."""

SPLITS = 2, 1
"""Pairs of splits of the batch that such a trial makes: the first time, and later. Each of them is
a forward."""

CHANGE = 0.1
"""Parameters are changed by this, relative to their spread, where a trial is to look behind gates
that are still zero."""

# ---- repetition ----------------------------------------------------------------------------------

PARTS_ADD_UP = 1e3, 0.05
"""Contributions of a repeated call must add up to the gradient to so many units of rounding; and to
this, where units are coarse. Relative to the sum of their sizes. A margin of safety: a
call that does something else when it is repeated is off by a sample's share."""

# ---- verify --------------------------------------------------------------------------------------

RTOL = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The gaps that `varreg.verify` allows by default. In float64 all 120 models of the tests are below
1e-9. In float32, gradients that cancel are off by some 1e-4."""

RTOL_COARSE = 5e-2
"""The same for half precision, and under autocast."""

FLOOR = 1e-4
"""The size, relative to the model's largest gradient, below which numbers are rounding. Gradients
that are zero but for rounding (a bias before a softmax) have no size of their own."""

NOISE = 10.0
"""A gap is rounding if it is at most so many times what torch itself does without varreg: how far
single samples are from float64, or the batch is from single samples."""

MOST_WEIGHED = 1 << 27
"""Elements of gradients that are kept to find out how a loss weighs samples: 1 GiB in float64."""

ALIKE = 1e-6, 1e-11
"""The smallest eigenvalue of the gradients' products, relative to the largest, below which samples
are so alike that many factors would explain a loss; in float32, and in float64. Not measured."""

ALIKE_PRECISE = 1e-5
"""The tolerance of `varreg.verify` up to which gradients are taken to be in float64."""

SAME_LOSS = 1e-2
"""Factors that explain a gradient must explain the loss to this."""

SAME_FACTOR = 1e-3
"""Factors that differ by less are one factor for all samples."""

# ---- devices -------------------------------------------------------------------------------------

MOST_CHECKS = 1 << 10
"""Checks that may wait on a device until somebody reads moments or steps. A bound on
memory: each is one number, and a step asks for all."""

CONSTANTS = 1 << 8
"""Numbers that are kept on devices: a param group has one or two, and a scheduler of s a new one at
each step. Not measured."""

DEVICE_CHUNK = 1 << 25
"""Elements of per-sample gradients that exist at once on an accelerator: 128 MiB in float32. Each
chunk is several kernel launches; on the CPU, chunks are as small as its caches. Not measured."""

DEVICE_CACHED = 1 << 20
"""Elements of per-sample gradients that an accelerator's cache holds: 4 MiB in float32. A layer
with one row per sample needs none, at the price of one more launch for its bias. Not measured."""

DEVICE_SMALL, DEVICE_JOINED, DEVICE_LARGE = 1 << 22, 1 << 24, 1 << 26
"""Elements of a parameter up to which its step is joined with those of others on an accelerator, of
all that are joined, and from which it is sliced. Joined, a step of any number of parameters takes
some 40 launches; it needs about ten times as many numbers more. Not measured."""

# ---- noise ---------------------------------------------------------------------------------------

WINDOW = 200
"""Updates over which `NoiseScale` averages. At fixed parameters, a batch of 128 far below the noise
scale had a relative standard deviation of |Ĝ|² of 3: 200 of them leave 20 %."""

LOSS_ROUNDING = 1e4, 0.05, 1e2
"""Two losses of the same samples, summed up in another order, differ by this many units of rounding
relative to their size, or by the second number at most; or by so many units in all."""

SAME_PARAMETERS = 1e-9
"""The sum of all squared parameters, in float64, differs by so much where none has changed."""

CHECKPOINT_SECONDS = 60.0
"""Seconds of `fisher` that a killed process loses at most. A choice for people, not for
speed."""

STANDARD_ERRORS = 2.0
"""Half of an interval, in standard errors: 95 % of them hold the truth, if errors are normal."""

MOST_ALIKE = 0.97
"""The largest autocorrelation that is believed when standard errors are worked out: above it, no
window is long enough to tell."""

SMOOTHING = 0.9
"""How much `AdaScale` keeps of its averages from step to step. Enough in runs of an MLP at 8 and 64
times the batch; not measured further."""

# ---- what is shown of training -------------------------------------------------------------------

LAMBDA_SAMPLE = 1 << 16
"""Elements of which λ's quantiles are taken for the whole model. Of so many, the 10 % quantile is
one between 9.8 % and 10.2 %."""

MONITOR_SHARE = 0.01
"""The part of the time that a monitor may take."""

PAGE_SHARE = 0.003
"""The part of the time that writing its page may take, of that."""

PAGE_SECONDS = 3.0
"""Seconds between two states of a monitor's page, at least. It is read again as often."""

PAGE_STALE = 1800.0
"""Seconds without news after which a page takes a run for dead, and is not read again."""

PAGE_LINES, PAGE_BYTES = 1000, 1 << 20
"""Records on a page, and their size, at most: of more, every second one is left out. A figure is
about 600 pixels wide."""

NUMBER_DIGITS = 7
"""Digits of a recorded number: as many as float32 has."""

# ---- kernels in Triton ---------------------------------------------------------------------------


class Tile(NamedTuple):
    """What one program works on, of a dense layer or a convolution."""

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
"""Loads of dense layers, and of convolutions, that are under way at a time. With 3, Triton's
default, dense layers with one row spill on sm_90; with 2, convolutions do in "tf32"."""

TRITON_CHAIN = 16
"""Groups that are added up one by one; then their sums are. Of random values that were added
up 100 times in a row, 3 % drifted by more than the rounding that a variance of 0 may have: samples
that agree would differ. In chains of 16, none did, up to 300."""

TRITON_PROGRAMS = 256
"""Where a kernel has fewer programs, the samples are divided among more. An A100 has 108
multiprocessors, an H100 132, an MI300X 304. Not measured."""

TRITON_BLOCK = 1024
"""Elements of one program of the step. Not measured."""

TRITON_SUMS = 32, 128
"""Groups and elements of one program that adds up contributions at hand. Not measured."""

TRITON_LONGEST_ROW = 1 << 13
"""Elements of the longest row that is normalized by a kernel: a program keeps it in registers.
Twice as many spill, on sm_80 and sm_90."""

TRITON_ROW_OF_A_WARP = 256
"""Elements of such a row that one warp has, up to 16 warps. Not measured."""
