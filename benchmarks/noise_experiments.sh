#!/bin/sh
# Experiments on the noise, the most valuable first: those that docs/evidence has since 19 November
# 2026, and after them those that it does not have yet. An estimated four hours of one core in all.
#
#     sh benchmarks/noise_experiments.sh          # in a clone, with .venv; data in $VARREG_DATA
#     sh benchmarks/noise_experiments.sh keep     # keep what has ended in docs/results
#
# What is interrupted goes on where it was, and what has ended is not run again. Each is one thread;
# sizes are reduced, so that each ends in 5 to 40 minutes of one core.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-runs}
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

UNEVEN="SGD SGD:clip=0.5 LossSGD:power=1 LossSGD:power=2
    VRSGD:per=model,scale_free=False,history=harmonic"
DECAY="SGD:momentum=0.9 SGD:momentum=0.9,schedule=linear SGD:momentum=0.9,schedule=cosine
    SGD:momentum=0.9,schedule=cosine,horizon=3
    SGD:momentum=0.9,noise_decay=0.5 SGD:momentum=0.9,noise_decay=1 SGD:momentum=0.9,noise_decay=2
    AveragedSGD:momentum=0.9 ScheduleFreeSGD SGD:momentum=0.9,keep=best"
FEW="SGD:momentum=0.9 SGD:momentum=0.9,schedule=cosine SGD:momentum=0.9,noise_decay=1
    SGD:momentum=0.9,noise_decay=2 AveragedSGD:momentum=0.9 SGD:momentum=0.9,keep=best"

if [ "${1:-}" = keep ]; then
    for name in adascale-cnn noise-decay-gpt noise-decay-lenet uneven-text noise-decay-cnn; do
        if [ -f "$OUT/$name/results.json" ]; then
            $PYTHON -m benchmarks.keep "$OUT/$name" "docs/results/$name"
        fi
    done
    if [ -f "$OUT/truth/results.json" ]; then
        $PYTHON -m benchmarks.noise_truth --merge "$OUT/truth/results.json"
    fi
    exit
fi

varreg() { $PYTHON -m varreg "$@"; }

varreg scaling adascale --task fashion-mnist:train=20000,valid=2000 --batch 8 --scales 4,16 \
    --epochs 1 --trials 5 --tuning-seeds 1 --seeds 5 --lr 0.002:0.1 --jobs 1 \
    --out "$OUT/adascale-cnn"
varreg compare $DECAY --task char-gpt:context=32,layers=1,width=32 --batch 32 --epochs 3 \
    --trials 3 --lr 0.03:0.5 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-gpt"
# on the paper's images, LeNet does not leave its plateau in 1,000 steps
varreg compare $FEW --task cifar10-lenet:train=5000,valid=1000,scale=55 --batch 100 --epochs 12 \
    --trials 3 --lr 0.005:0.1 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-lenet"
varreg compare $UNEVEN --task uneven-text -s 2 -s 20 --trials 6 --lr 0.3:10 --tuning-seeds 1 \
    --seeds 8 --no-ablations --jobs 1 --out "$OUT/uneven-text"
truth() { $PYTHON -m benchmarks.noise_truth --out "$OUT/truth" --steps "$1" --only "$2"; }
truth 600 "CNN, Fashion-MNIST, SGD"
truth 600 "char-GPT, SGD"
# Not run yet. Those with Adam have no error of the truth along the steps; the ResNet has one
# optimizer of three.
truth 600 "CNN, Fashion-MNIST, Adam"
truth 600 "char-GPT, Adam"
truth 400 "CIFAR-10, Adam"
truth 400 "CIFAR-10, SGD"
truth 400 "CIFAR-10, momentum"
varreg compare $DECAY --task fashion-mnist:train=5000,valid=1000 --batch 100 --epochs 15 \
    --trials 3 --lr 0.03:0.3 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-cnn"
