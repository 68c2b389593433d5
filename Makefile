# Two commands do everything on a machine that has only Python 3 and make:
#   make demo   measure the noise of a small training, plan its batch, compare VR-SGD with SGD fairly: two minutes
#   make test   the tests, with samples of the large tables: six minutes on two cores
# And make test-all runs every test, as CI does; make graphs judges random models against the definition: two minutes, or SECONDS=3600.
# They set up a virtual environment in .venv once, and again only when the requirements change.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SECONDS ?= 120
# Tests start many processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-versions graphs known-graphs fresh-graphs kernels house sanitize lint types docs docs-serve picture bench wheels release-check clean

demo: $(VENV)/.lab
	$(BIN)/varreg noise --task digits --optimizer SGD:momentum=0.9 --lr 0.02 --steps 400 --plan 16,64,256 --out runs/demo-noise
	$(BIN)/python examples/monitor_digits.py --folder runs/demo-monitor --steps 300 --every 10
	$(BIN)/varreg compare SGD VRSGD --task digits -s 2 --trials 6 --lr 0.03:1 --seeds 6 --out runs/demo
	@echo "Open runs/demo/report.html (the comparison), runs/demo-monitor/monitor.html (a training) and runs/demo-noise/noise.svg."

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.dev  # everything; and the tables of layers and optimizers again, without native code
	$(BIN)/python -m pytest
	VARREG_NATIVE=0 $(BIN)/python -m pytest tests/properties/test_conformance.py tests/properties/test_update_rules.py

test-versions:  # the oldest, the pinned and the newest torch; downloads gigabytes
	.ci/versions $(TESTS)

graphs: $(VENV)/.dev
	$(BIN)/python -m tests.properties.graphs --seconds $(SECONDS)

fresh-graphs:  # the same, where a find is only told
	$(MAKE) graphs || echo "RANDOM GRAPHS FOUND A FAILURE: see above for the command that repeats it"

known-graphs: $(VENV)/.dev  # the same ones each time
	$(BIN)/python -m tests.properties.graphs --seed 100000000 --count 600 --seconds 600

kernels: $(VENV)/.dev  # Triton's: run in the interpreter, and compiled for GPUs that need not be here
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/triton
	$(BIN)/python -m tools.kernels --check

house: $(VENV)/.dev  # files, calls and sizes may not grow over what was reached
	$(BIN)/python -m tools.house --check
	$(BIN)/python -m tools.picture --check

sanitize: $(VENV)/.dev  # native code under the address and undefined-behaviour sanitizers
	.ci/sanitize $(BIN)/python

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.docs $(VENV)/.dev  # its tables are those of the saved results, its links lead somewhere, its pages fit
	$(BIN)/python -m tools.tables --check
	$(BIN)/python -m tools.prose --check
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -m pytest tests/test_site.py -n 0

docs-serve: $(VENV)/.docs
	$(BIN)/zensical serve

picture: $(VENV)/.lab  # README's picture, from a real small training
	$(BIN)/python -m tools.readme_picture

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.peers

release-check: $(VENV)/.wheels  # build what is published, install it in a new environment, run README's example there
	$(BIN)/python -m tools.release_check

wheels: $(VENV)/.wheels  # the sdist, and a wheel with prebuilt kernels for each system, into dist/
	$(BIN)/python -m tools.wheels

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What an extra needs, installed once per state of the requirements.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[$*]"
	@touch $@

# The peers are installed without their dependencies: one of them asks for torchvision, which would replace torch.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps backpack-for-pytorch
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[bench]"
	$(PIP) --no-deps backpack-for-pytorch opacus
	@touch $@
