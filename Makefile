# One command each for what a developer does; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test check format demo bench bench-fit bench-pack bench-plan bench-small clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' $(MAKEFILE_LIST)

# All versions are pinned, the build tool's as well: the package itself brings nothing along.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

setup: $(STAMP)  ## make .venv with everything pinned

test: setup  ## run all tests; those for CUDA skip themselves without a GPU
	$(BIN)/python -m pytest -q --color=no tests

check: setup  ## lint, format, types, layers, tests, README: what must pass before a change goes in
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q --color=no tests
	$(BIN)/python tools/readme_blocks.py README.md

format: setup  ## let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## train a model that does not fit, and see what happened
	$(BIN)/python benchmarks/demo.py

bench: setup  ## step times and peaks, beside eager PyTorch
	$(BIN)/python benchmarks/bench.py

bench-fit: setup  ## step time where everything fits
	$(BIN)/python benchmarks/fit.py

bench-pack: setup  ## how low addresses are placed, and how fast
	$(BIN)/python benchmarks/pack.py

bench-small: setup  ## how near plans are to the proved optimum of small steps
	$(BIN)/python benchmarks/small.py

bench-plan: setup  ## how long planning takes, and how that grows
	$(BIN)/python benchmarks/plan.py

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
