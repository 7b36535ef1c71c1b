# Everything runs in .venv, which is made on first use and renewed when the requirements change.
# Needs Python 3.11 or later and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BENCH_ARGS ?= --workloads a,c --rounds 5

# Several ranks share the cores of one machine: more threads than cores only get in each other's way.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

install: $(INSTALLED) ## make .venv

demo: $(INSTALLED) ## train a small model on two local ranks
	$(BIN)/shardwright train --config examples/demo.toml

test: $(INSTALLED) ## run the tests; PYTEST_ARGS='-k pool -x' narrows them
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## measure a training step against FSDP2 and DDP; BENCH_ARGS chooses what
	$(BIN)/python -m benchmarks.step.ab $(BENCH_ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed; found " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf]'
	@touch $(INSTALLED)
