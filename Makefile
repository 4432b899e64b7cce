# One command each for what a developer does; `make` alone lists them.

PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test check docs format demo bench bench-fit bench-compare bench-follow bench-g10 bench-gpu bench-lengths bench-pack bench-peers \
	bench-plan bench-ablate bench-small bench-state databases gpu-check gpu-site growth clean

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
	$(BIN)/python -m pytest -q --color=no --numprocesses=auto --maxprocesses=4 --dist=worksteal tests

check: setup  ## lint, format, types, layers, tests, README: what must pass before a change goes in
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q --color=no --numprocesses=auto --maxprocesses=4 --dist=worksteal tests
	$(BIN)/python tools/readme_blocks.py README.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs: setup  ## build the documentation into build/site, without warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: setup  ## let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## train a model that does not fit, and see what happened
	$(BIN)/python benchmarks/demo.py

bench: setup  ## step times and peaks, beside eager PyTorch
	$(BIN)/python benchmarks/bench.py

bench-fit: setup  ## step time where everything fits
	$(BIN)/python benchmarks/fit.py

bench-follow: setup  ## loops that are followed, beside plain PyTorch and compiled steps
	$(BIN)/python benchmarks/follow.py

bench-lengths: setup  ## batches of many lengths within a budget, beside padding and checkpointing; 20 minutes
	$(BIN)/python benchmarks/lengths.py

databases: setup  ## PyTorch's databases of modules and operators, trained within tiny budgets; half an hour
	$(BIN)/python tests/torch_cpu/databases.py modules operators

growth: setup  ## followed loops for 10,000 steps each: resident memory against the budget; hours
	$(BIN)/python tools/growth.py

bench-pack: setup  ## how low addresses are placed, and how fast
	$(BIN)/python benchmarks/pack.py

bench-peers: setup  ## step time against peak memory, beside what PyTorch itself offers: table and picture
	$(BIN)/python benchmarks/peers.py

bench-plan: setup  ## how long planning takes, and how that grows
	$(BIN)/python benchmarks/plan.py

bench-small: setup  ## how near plans are to the proved optimum of small steps
	$(BIN)/python benchmarks/small.py

bench-ablate: setup  ## what each technique of the search gives, and what it costs; GRAPHS=folder of compare.py's graph files
	$(BIN)/python benchmarks/ablate.py $(if $(GRAPHS),--graphs $(GRAPHS))

bench-compare: setup  ## every policy on every model of the zoo, side by side
	$(BIN)/python benchmarks/compare.py

bench-g10: setup  ## plan the published steps of G10; INSTANCES=folder of their graph files
	$(BIN)/python benchmarks/g10.py $(INSTANCES)

gpu-check:  ## on a machine with a GPU, no network needed: the tests on it, then bench-gpu; 9 minutes
	$(GPU_PYTHON) tools/gpu_check.py

gpu-site:  ## packages for gpu-check on a machine that has PyTorch and no network, in the folder .gpu-site
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --target .gpu-site --upgrade --only-binary=:all: \
		--python-version 3.12 --implementation cp numpy highspy msgspec typer rich pytest

bench-gpu: setup  ## throughput under one memory cap, beside what else trains large models on one GPU
	$(BIN)/python benchmarks/gpu.py

bench-state: setup  ## train a GPT born on disk, from birth to a checkpoint and on from it
	$(BIN)/python benchmarks/state.py

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
