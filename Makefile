# Two commands do everything on a machine that has only Python 3 and make:
#   make demo   compare VR-SGD with SGD on embedded data, fairly, and say what came out
#   make test   the whole test suite
# And make graphs judges random models against the definition: two minutes, or SECONDS=3600.
# They set up a virtual environment in .venv once, and again only when the requirements change.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SECONDS ?= 120
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test graphs sanitize lint types docs docs-serve bench clean

demo: $(VENV)/.lab
	$(BIN)/varreg compare SGD VRSGD --task digits --out runs/demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest
	VARREG_NATIVE=0 $(BIN)/python -m pytest tests/test_conformance.py tests/test_update_rules.py  # once more without native code

graphs: $(VENV)/.dev
	$(BIN)/python -m tests.graphs --seconds $(SECONDS)

sanitize: $(VENV)/.dev  # native code under the address and undefined-behaviour sanitizers
	.ci/sanitize $(BIN)/python

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs
	$(BIN)/mkdocs serve

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What an extra needs, installed once per state of the requirements.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[$*]"
	@touch $@

# The peers are installed without their dependencies: one of them asks for torchvision, which would replace torch.
$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[bench]"
	$(PIP) --no-deps backpack-for-pytorch opacus
	@touch $@
