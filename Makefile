# Every target does its own set-up: a virtual environment in .venv, with the versions of constraints.txt.
# VENV=folder uses another environment, PYTHON=python3.x another interpreter (3.11 or newer).

VENV ?= .venv
PYTHON ?= $(firstword $(foreach v,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(v)),$(v))))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.plimsoll-ready
BENCH_READY := $(VENV)/.plimsoll-bench-ready
TORCH := $(shell grep '^torch==' constraints.txt)

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

.PHONY: help demo quick test fuzz test-portable gpu lint house format bench lab trust docs package clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    a small CLIP in FP16 meets hard batches: found, explained, repaired; under two minutes'
	@echo 'make quick   the tests that are quick; FOLDER=watch for those of one package'
	@echo 'make test    all tests; PYTEST_ARGS="-k name" for some'
	@echo 'make fuzz    damaged and hostile input, 5,000 cases of each kind; PLIMSOLL_FUZZ=500 for fewer'
	@echo 'make test-portable  all tests as on other machines; PORTABLE="generic --sensitive" for some'
	@echo 'make gpu     on a machine with a GPU: its tests, then its benchmarks; nine minutes'
	@echo 'make lint    format, lint, types, order of the packages, spelling'
	@echo 'make house   how large the source is, how deep its folders, what imports what'
	@echo 'make format  rewrite the code as the linter wants it'
	@echo 'make bench   the benchmarks, with their tables, and docs/benchmarks.md'
	@echo 'make lab     every experiment; what comes of it is recorded; 40 minutes'
	@echo 'make trust   sound trainings and planted faults, judged by the rules; docs/trust.md; half an hour'
	@echo 'make package the wheel, tried in clean environments'
	@echo 'make docs    the documentation, into site/'
	@echo 'make clean   remove what the targets above have made'

# torch first, by itself: a build for this machine that the package index offers is taken, and what follows keeps it.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Plimsoll needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo 'Setting up $(VENV) (once; a few minutes)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet -c constraints.txt $(TORCH)
	@$(PIP) install --quiet -c constraints.txt --editable '.[dev]' --editable ./lab
	@touch $@

$(BENCH_READY): $(READY)
	@$(PIP) install --quiet -c constraints.txt --editable '.[bench]'
	@touch $@

# Idle threads sleep and do not spin: on a machine that is busy with other work this is ten times as fast.
demo: $(READY)
	@OMP_WAIT_POLICY=passive $(BIN)/plimsoll lab demo -o demo

quick: $(READY)
	$(PYTEST) -m "not slow" tests/$(FOLDER) $(PYTEST_ARGS)

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

fuzz: $(READY)
	PLIMSOLL_FUZZ=$${PLIMSOLL_FUZZ:-5000} $(PYTEST) tests/hostile $(PYTEST_ARGS)

test-portable: $(READY)
	$(BIN)/python tests/portable.py $(PORTABLE)

gpu: $(READY)
	$(BIN)/python tests/gpu.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python

house: $(READY)
	$(BIN)/python tests/house.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_READY)
	@set -e; for script in $(filter-out benchmarks/render.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$script"; $(BIN)/python $$script; done
	$(BIN)/python benchmarks/render.py

# Exit code 1 is a claim that does not hold: that is recorded too.
lab: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/plimsoll lab --all -o lab-all || [ $$? = 1 ]
	cp lab-all/outcomes.json lab/src/plimsoll_lab/recorded.json
	$(BIN)/python docs/evidence.py

trust: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trust --jobs 2

package:
	PYTHON=$(PYTHON) .ci/package

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) demo lab-all site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
