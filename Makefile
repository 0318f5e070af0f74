# Set-up, training, tests and checks from one place. Needs Python 3.11 or newer and make, and installs the rest.

TORCH  ?= 2.13.0
PYTHON ?= python3
VENV   ?= .venv
NPROC  ?= 2
ARGS   ?=

CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

# Many tests keep one core busy. Four workers at most: each has ranks of its own, up to four of 0.5 GB.
WORKERS ?= $(shell n=$(CORES); echo $$(( n > 4 ? 4 : n )))

# The first import of torch writes its bytecode, also where the environment forbids it: each of the many processes that
# tests start would compile 2,000 files for itself, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

# One thread for each process, of which there are many already; more can be given: make quick OMP_NUM_THREADS=2
OMP_NUM_THREADS ?= 1
THREADS := OMP_NUM_THREADS=$(OMP_NUM_THREADS)

BIN   := $(VENV)/bin
READY := $(VENV)/.ready-torch-$(TORCH)
TRAIN := $(VENV)/.ready-to-train-torch-$(TORCH)

.PHONY: help train ready quick test test-all interplay models bench gate picture check format compat clean

help:
	@echo 'make train     train a small GPT on $(NPROC) ranks (NPROC=4, ARGS="--steps 100 --mode fully_shard", ARGS=--help)'
	@echo 'make quick     the tests that need no second process, in 2 to 3 minutes (ARGS="-k name")'
	@echo 'make test      the whole test suite on torch $(TORCH) (TORCH=2.15.0, ARGS="-k name")'
	@echo 'make test-all  the same, and what the default run thins: every value of every parameter, all real models'
	@echo 'make interplay every pair of features in one step, beside the plain step (resumable, ARGS=--help)'
	@echo 'make models    train real models on two ranks and print the table (ARGS="GPT2 Llama", ARGS=--help)'
	@echo 'make bench     race DDP, FSDP2 and this on loopback and on two hosts (ARGS="--models width64x12", ARGS=--help)'
	@echo 'make gate      is this checkout slower than a commit? BASE=main, or A="--style ddp" B="--style fsdp"; QUICK=1 in a minute'
	@echo 'make picture   take the picture in docs/report.md anew, with an installed Chromium'
	@echo 'make compat    the same suite on the oldest and the newest torch supported'
	@echo 'make check     lint, format and types'
	@echo 'make format    write the format, and fix what lint can fix'
	@echo 'make clean     remove the environments and all that was generated'

train: $(TRAIN)
	@$(BIN)/spmd run -n $(NPROC) examples/train_gpt.py $(ARGS)

ready: $(READY)

quick: $(READY)
	$(THREADS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m quick $(ARGS)

test: $(READY)
	$(THREADS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-all: $(READY)
	$(THREADS) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --exhaustive $(ARGS)

interplay: $(READY)
	$(THREADS) $(BIN)/python -m tests.interplay $(ARGS)

models: $(READY)
	@$(THREADS) $(BIN)/python -m tests.models $(ARGS)

bench: $(READY)
	@$(THREADS) $(BIN)/python -m benchmarks.peers $(ARGS)

gate: $(READY)
	@$(THREADS) $(BIN)/python -m benchmarks.gate $(if $(BASE),--base '$(BASE)') $(if $(A),--a "$(A)") $(if $(B),--b "$(B)") \
		$(if $(QUICK),--seconds 60) $(ARGS)

picture: $(READY)
	$(THREADS) $(BIN)/python -m benchmarks.page --layers 4 --picture docs/report.png

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compat:
	$(MAKE) --no-print-directory test TORCH=2.11.0 VENV=.venv-2.11.0
	$(MAKE) --no-print-directory test TORCH=2.15.0 VENV=.venv-2.15.0

clean:
	rm -rf .venv .venv-* build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find spmd passes tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Done again when pyproject.toml or TORCH changes. One command, so that nothing replaces the torch asked for. Python
# compiles what is imported: to compile all of it, 7,000 files of which most never are, took half of the time.
$(READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile 'torch==$(TORCH)' --editable '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@ $(TRAIN)

# Training needs no tools.
$(TRAIN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile 'torch==$(TORCH)' --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		found=$$($(PYTHON) --version 2>/dev/null); \
		echo "spmd needs Python 3.11 or newer, but $(PYTHON) is $${found:-not there}." \
		"Name another one, as in: make train PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
