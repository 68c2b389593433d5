#!/bin/sh
# The experiments on the noise that docs/evidence does not have yet, the most valuable first: an
# estimated three and a half hours of one core in all, from times of single steps, and more on a machine that
# does something else, too. It has not been run to its end yet.
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

if [ "${1:-}" = keep ]; then
    for name in uneven-text adascale-fashion noise-decay-lenet noise-decay-cnn; do
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

varreg compare $UNEVEN --task uneven-text -s 2 -s 20 --trials 8 --lr 0.03:1 --no-ablations \
    --jobs 1 --out "$OUT/uneven-text"
# Those with SGD have no truth along the steps yet, and those with Adam no error of that truth; the
# ResNet has one optimizer of three.
truth() { $PYTHON -m benchmarks.noise_truth --out "$OUT/truth" --steps "$1" --only "$2"; }
truth 600 "CNN, Fashion-MNIST, SGD"
truth 600 "char-GPT, SGD"
truth 600 "CNN, Fashion-MNIST, Adam"
truth 600 "char-GPT, Adam"
truth 400 "CIFAR-10, Adam"
truth 400 "CIFAR-10, SGD"
truth 400 "CIFAR-10, momentum"
# with 2,000 images, 250 steps of the base do not leave the CNN's plateau, and nothing can be judged
varreg scaling adascale --task fashion-mnist:train=20000,valid=2000 --batch 8 --scales 4,16,64 \
    --epochs 1 --trials 5 --tuning-seeds 1 --lr 0.002:0.1 --jobs 1 --out "$OUT/adascale-fashion"
varreg compare $DECAY --task cifar10-lenet:train=5000,valid=1000 --batch 100 --epochs 20 \
    --trials 3 --lr 0.01:0.3 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-lenet"
varreg compare $DECAY --task fashion-mnist:train=5000,valid=1000 --batch 100 --epochs 15 \
    --trials 3 --lr 0.03:0.3 --tuning-seeds 1 --seeds 5 --no-ablations --jobs 1 \
    --out "$OUT/noise-decay-cnn"
