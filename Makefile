# Commands for developers; `make` lists them.

PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
GPU_PYTHON_VERSION ?= 3.12
# pip accepts only wheels with these tags.
GPU_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 \
	manylinux1_x86_64
GPU_STUB := build/gpu-stub
GPU_STUB_PYTHON ?= $(GPU_STUB)/venv/bin/python
# The oldest supported version. The newest: make gpu-stub GPU_STUB=build/gpu-stub-newest GPU_STUB_TORCH=torch
GPU_STUB_TORCH ?= torch==2.11.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-newest test-oldest check docs format demo bench bench-fit bench-compare \
	bench-first bench-follow bench-g10 bench-generate bench-kernels bench-lengths bench-lora bench-pack bench-peers \
	bench-published bench-resident bench-sharded bench-split bench-plan bench-replay bench-ablate bench-distributed \
	bench-elastic bench-small bench-small-ops bench-state bench-unseen bench-updates bench-will-it-fit databases \
	gpu-predictions gpu-rivals gpu-stub gpu-visit gpu-wheels growth record record-write mutants tsan verify wheel clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' $(MAKEFILE_LIST)

# All versions are pinned, including the build tools; installing the package adds no dependencies.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

setup: $(STAMP)  ## create .venv with pinned versions

PYTEST := -m pytest -q --color=no --numprocesses=auto --maxprocesses=4 --dist=worksteal tests

test: setup  ## run the tests that each change must pass: twenty minutes on two cores
	$(BIN)/python $(PYTEST)

test-all: setup  ## run all tests at full effort, databases, growth, the CUDA stub and the newest packages; a day
	$(BIN)/python $(PYTEST) --exhaustive
	$(MAKE) databases growth gpu-stub test-newest

# Unpinned versions from PyPI, except for the oldest supported PyTorch in one environment. About 6 GB each.
test-in-newest: TORCH := torch
test-in-oldest: TORCH := torch==2.11.*
test-newest: test-in-newest  ## run all tests at full effort with the newest, unpinned versions
test-oldest: test-in-oldest  ## run all tests at full effort with the oldest supported PyTorch
test-in-%:
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --upgrade pip
	build/$*/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable . --group dev "$(TORCH)"
	build/$*/bin/python -m pip list --format=freeze | grep -E '^(torch|highspy|numpy|msgspec|transformers|accelerate)=='
	build/$*/bin/python $(PYTEST) --exhaustive

check: setup  ## check lint, format, types, layers, tests, README and docs, as required for a change
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python $(PYTEST)
	$(BIN)/python tools/readme_blocks.py README.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs: setup  ## build the documentation in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: setup  ## format and fix with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## train a model that does not fit, and compare with plain PyTorch
	$(BIN)/python benchmarks/demo.py

bench: setup  ## step times and peaks, compared with eager PyTorch
	$(BIN)/python benchmarks/bench.py

bench-fit: setup  ## step times without eviction, compared with eager PyTorch
	$(BIN)/python benchmarks/fit.py

bench-will-it-fit: setup  ## plans from model configurations, compared with accelerate's estimates
	$(BIN)/python benchmarks/will_it_fit.py

bench-split: setup  ## smallest budgets with whole and with split ops
	$(BIN)/python benchmarks/split.py

bench-first: setup  ## cost of first calls with a cold and a warm cache, and of the import
	$(BIN)/python benchmarks/first_calls.py

bench-resident: setup  ## process memory beyond tensors, in plain PyTorch and within a budget
	$(BIN)/python benchmarks/resident.py

bench-follow: setup  ## eager loops within a budget, compared with plain PyTorch and compiled steps
	$(BIN)/python benchmarks/follow.py

bench-small-ops: setup  ## overhead of ops on small tensors in an eager loop
	$(BIN)/python benchmarks/small_ops.py

bench-distributed: setup  ## distributed training, compared with eager DistributedDataParallel
	$(BIN)/python benchmarks/distributed.py

bench-sharded: setup  ## sharded training, compared with FSDP2
	$(BIN)/python benchmarks/sharded.py

bench-lengths: setup  ## batches of many lengths within a budget, compared with padding and checkpointing; 20 minutes
	$(BIN)/python benchmarks/lengths.py

bench-elastic: setup  ## logical workers on 1, 2 and 4 processes: switch times and bytes sent
	$(BIN)/python benchmarks/elastic.py

bench-generate: setup  ## text generation from an 8 GB checkpoint in FOLDER=... (written if missing), compared with accelerate; RAM=3GiB limits memory, needs root
	$(BIN)/python benchmarks/generate.py --folder $(FOLDER) $(if $(RAM),--ram $(RAM) --tokens 10)

bench-replay: setup  ## steps of a few milliseconds: native replay, Python replay and plain PyTorch
	$(BIN)/python benchmarks/replay.py

bench-kernels: setup  ## compile times of Inductor's kernels, and losses at three budgets; half an hour
	$(BIN)/python benchmarks/kernels.py

bench-updates: setup  ## joint optimizer updates under small budgets; ten minutes
	$(BIN)/python benchmarks/updates.py

bench-unseen: setup  ## models that no other benchmark uses, at fractions of plain PyTorch's peak
	$(BIN)/python benchmarks/unseen.py

bench-lora: setup  ## LoRA on 1.1 billion frozen parameters in FOLDER=... (7 GB), compared with PEFT in core
	$(BIN)/python benchmarks/lora.py $(FOLDER)

databases: setup  ## train PyTorch's databases of modules and operators within tiny budgets and with split ops; an hour
	$(BIN)/python tests/torch_cpu/databases.py modules operators
	$(BIN)/python tests/torch_cpu/databases_split.py modules operators

record: setup  ## compare variants, plans, times, smallest budgets and bits of some 40 pairs with tests/record; four minutes
	$(BIN)/python tools/record.py --jobs 2

record-write: setup  ## update tests/record
	$(BIN)/python tools/record.py --jobs 2 --write

growth: setup  ## check resident memory of eager loops over 10,000 steps each; hours
	$(BIN)/python tools/growth.py

mutants: setup  ## change the sources in fifty places, one at a time, and check which test fails; ONLY=NAME,NAME selects mutants
	$(BIN)/python tools/mutants.py $(if $(ONLY),--only $(ONLY))

# VERIFY_PYTHON: an interpreter with outofcore and the programs' imports, such as torchvision and monai.
VERIFY_PYTHON ?= $(BIN)/python
verify: setup  ## run other projects' programs in FOLDER=... within budgets, and compare bits with plain Python; ONLY=NAME, ROUNDS=2
	$(VERIFY_PYTHON) tools/verify.py $(FOLDER) $(if $(ONLY),--only "$(ONLY)") $(if $(ROUNDS),--rounds $(ROUNDS))

wheel: setup  ## build sdist and wheel in dist, and train with the wheel in an empty environment without a compiler
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/verify_wheel.py dist

tsan: setup  ## find data races in the native code of eager loops with ThreadSanitizer; ten minutes
	$(BIN)/python tools/tsan.py

bench-pack: setup  ## heights and times of address placement
	$(BIN)/python benchmarks/pack.py

bench-peers: setup  ## step time and peak memory, compared with PyTorch's own tools: table and picture
	$(BIN)/python benchmarks/peers.py

bench-plan: setup  ## planning time, and its growth with the number of ops
	$(BIN)/python benchmarks/plan.py

bench-small: setup  ## plans compared with the proven optimum of small steps
	$(BIN)/python benchmarks/small.py

bench-ablate: setup  ## benefit and cost of each search technique; GRAPHS=folder of compare.py's graph files
	$(BIN)/python benchmarks/ablate.py $(if $(GRAPHS),--graphs $(GRAPHS))

bench-compare: setup  ## comparison of all policies on all zoo models
	$(BIN)/python benchmarks/compare.py

bench-g10: setup  ## plan the published steps of G10; INSTANCES=folder of their graph files
	$(BIN)/python benchmarks/g10.py $(INSTANCES)

bench-published: setup  ## plan published steps from clones in FOLDER=..., and compare with their results; ONLY=checkmate,dtr selects parts
	$(BIN)/python benchmarks/published.py $(FOLDER) $(if $(ONLY),--only $(ONLY))

gpu-visit:  ## run all GPU measurements on a machine with a GPU, without a network; PARTS=9-11, SECONDS=540
	$(GPU_PYTHON) tools/gpu_visit.py $(if $(PARTS),--parts $(PARTS)) $(if $(SECONDS),--seconds $(SECONDS))

# Without PyTorch and numpy, which such a machine has; below 20 MB.
gpu-wheels:  ## download wheels to .gpu-wheels, for gpu-visit on a machine with PyTorch but no network
	rm -rf .gpu-wheels
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --dest .gpu-wheels --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp $(GPU_PLATFORMS:%=--platform %) \
		highspy msgspec typer rich pytest pluggy iniconfig packaging pygments click shellingham markdown-it-py mdurl \
		annotated-doc typing-extensions

# The default wheel for Linux is the CUDA build: 5 GB with the packages that it needs.
$(GPU_STUB)/venv/bin/python:
	$(PYTHON) -m venv $(GPU_STUB)/venv
	$@ -m pip install --quiet --disable-pip-version-check $(GPU_STUB_TORCH) numpy highspy msgspec typer rich pytest

gpu-stub: $(GPU_STUB_PYTHON)  ## test PyTorch's CUDA build on a stub runtime, without a GPU; ONLY=bits,races selects parts
	$(GPU_STUB_PYTHON) tests/cuda/stub/suite.py --stub $(GPU_STUB) $(if $(ONLY),--only $(ONLY)) $(if $(JOBS),--jobs $(JOBS))

gpu-predictions: setup  ## predict caps, batch sizes and times of gpu-visit's rows, without a GPU; ROWS=1,3 selects rows
	$(BIN)/python tools/gpu_rows.py --predict $(ROWS)

gpu-rivals: setup  ## predict published jobs for one card, and compare with their figures; minutes; ROWS=KEY,KEY selects jobs
	$(BIN)/python tools/gpu_rivals.py $(ROWS)

bench-state: setup  ## train a GPT with its state on disk, to a checkpoint and from it
	$(BIN)/python benchmarks/state.py

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
