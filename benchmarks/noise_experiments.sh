#!/bin/sh
# The experiments on the noise that docs/evidence does not have yet, the most valuable first: an
# estimated two hours of one core in all. It has not been run to its end yet.
#
#     sh benchmarks/noise_experiments.sh          # in a clone, with .venv; data in $VARREG_DATA
#     sh benchmarks/noise_experiments.sh keep     # keep what has ended in docs/results
#
# What is interrupted goes on where it was, and what has ended is not run again. Each is one thread;
# sizes are reduced, so that each ends in 5 to 25 minutes of one core.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-runs}
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

UNEVEN="SGD SGD:clip=0.5 LossSGD:power=1 LossSGD:power=2
    VRSGD:per=model,scale_free=False,history=harmonic"
DECAY="SGD:momentum=0.9 SGD:momentum=0.9,schedule=cosine SGD:momentum=0.9,schedule=cosine,horizon=3
    SGD:momentum=0.9,noise_decay=0.5 SGD:momentum=0.9,noise_decay=1 SGD:momentum=0.9,noise_decay=2
    AveragedSGD:momentum=0.9 ScheduleFreeSGD SGD:momentum=0.9,keep=best"

if [ "${1:-}" = keep ]; then
    for name in uneven-text adascale-fashion noise-decay-lenet noise-decay-cnn adascale-gpt; do
        if [ -f "$OUT/$name/results.json" ]; then
            $PYTHON -m benchmarks.keep "$OUT/$name" "docs/results/$name"
        fi
    done
    if [ -f "$OUT/ewc.json" ]; then
        mkdir -p docs/results/ewc
        $PYTHON -m benchmarks.keep "$OUT/ewc.json" docs/results/ewc/results.json
    fi
    exit
fi

varreg() { $PYTHON -m varreg "$@"; }

$PYTHON examples/ewc_split_fashion_mnist.py --tuning-seeds 5 --seeds 10 --out "$OUT/ewc.json"
varreg compare $UNEVEN --task uneven-text -s 2 -s 20 --trials 8 --lr 0.03:1 --no-ablations \
    --jobs 1 --out "$OUT/uneven-text"
varreg scaling adascale --task fashion-mnist:train=4000,valid=1000 --batch 16 --scales 4,16 \
    --epochs 1 --trials 5 --tuning-seeds 1 --lr 0.003:0.1 --jobs 1 --out "$OUT/adascale-fashion"
varreg compare $DECAY --task cifar10-lenet:train=5000,valid=1000 --batch 100 --epochs 20 \
    --trials 3 --lr 0.01:0.3 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-lenet"
$PYTHON -m benchmarks.noise_truth --steps 600 --only "ResNet-18, GroupNorm, CIFAR-10, Adam"
varreg compare $DECAY --task fashion-mnist:train=5000,valid=1000 --batch 100 --epochs 15 \
    --trials 3 --lr 0.03:0.3 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-cnn"
varreg scaling adascale --task char-gpt:context=32,layers=1,width=32 --batch 8 --scales 4,16 \
    --epochs 1 --trials 5 --tuning-seeds 1 --lr 0.02:1 --jobs 1 --out "$OUT/adascale-gpt"
