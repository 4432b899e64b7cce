# One command each for what a developer does; `make` alone lists them.

PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
GPU_PYTHON_VERSION ?= 3.12
# pip takes a wheel of these tags alone.
GPU_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 \
	manylinux1_x86_64
GPU_STUB := build/gpu-stub
GPU_STUB_PYTHON ?= $(GPU_STUB)/venv/bin/python
# The oldest that is supported. The newest: make gpu-stub GPU_STUB=build/gpu-stub-newest GPU_STUB_TORCH=torch
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

# All versions are pinned, the build tool's as well: the package itself brings nothing along.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

setup: $(STAMP)  ## make .venv with everything pinned

PYTEST := -m pytest -q --color=no --numprocesses=auto --maxprocesses=4 --dist=worksteal tests

test: setup  ## run the tests that each change waits for: twenty minutes on two cores
	$(BIN)/python $(PYTEST)

test-all: setup  ## run everything: all tests at full effort, databases, growth, the CUDA stub, the newest packages; a day
	$(BIN)/python $(PYTEST) --exhaustive
	$(MAKE) databases growth gpu-stub test-newest

# What pip installs today: nothing is pinned, but the oldest supported PyTorch in one of them. Each takes some 6 GB.
test-in-newest: TORCH := torch
test-in-oldest: TORCH := torch==2.11.*
test-newest: test-in-newest  ## run all tests at full effort with what pip installs today, nothing pinned
test-oldest: test-in-oldest  ## the same with the oldest supported PyTorch
test-in-%:
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --upgrade pip
	build/$*/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable . --group dev "$(TORCH)"
	build/$*/bin/python -m pip list --format=freeze | grep -E '^(torch|highspy|numpy|msgspec|transformers|accelerate)=='
	build/$*/bin/python $(PYTEST) --exhaustive

check: setup  ## lint, format, types, layers, tests, README: what must pass before a change goes in
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python $(PYTEST)
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

bench-will-it-fit: setup  ## what is said of known models by their configurations, beside accelerate's estimate
	$(BIN)/python benchmarks/will_it_fit.py

bench-split: setup  ## smallest budgets with ops as a whole and in parts
	$(BIN)/python benchmarks/split.py

bench-first: setup  ## what first calls cost beyond training, with an empty cache and a full one, and importing
	$(BIN)/python benchmarks/first_calls.py

bench-resident: setup  ## memory of a process beyond its tensors, in plain PyTorch and within a budget
	$(BIN)/python benchmarks/resident.py

bench-follow: setup  ## loops that are followed, beside plain PyTorch and compiled steps
	$(BIN)/python benchmarks/follow.py

bench-small-ops: setup  ## what an op that touches nothing large costs in a loop
	$(BIN)/python benchmarks/small_ops.py

bench-distributed: setup  ## processes that train together, beside eager DistributedDataParallel
	$(BIN)/python benchmarks/distributed.py

bench-sharded: setup  ## processes that share a model, beside FSDP2
	$(BIN)/python benchmarks/sharded.py

bench-lengths: setup  ## batches of many lengths within a budget, beside padding and checkpointing; 20 minutes
	$(BIN)/python benchmarks/lengths.py

bench-elastic: setup  ## logical workers on 1, 2 and 4 processes: switching, bytes sent
	$(BIN)/python benchmarks/elastic.py

bench-generate: setup  ## text from a checkpoint of 8 GB in FOLDER=... (made there), beside accelerate; RAM=3GiB: from the disk, as root
	$(BIN)/python benchmarks/generate.py --folder $(FOLDER) $(if $(RAM),--ram $(RAM) --tokens 10)

bench-replay: setup  ## steps of a few milliseconds: ops called by native code, by Python, and plain PyTorch
	$(BIN)/python benchmarks/replay.py

bench-kernels: setup  ## what compiling kernels takes, and their losses at three budgets; half an hour
	$(BIN)/python benchmarks/kernels.py

bench-updates: setup  ## what joining optimizer updates gives where memory is short; ten minutes
	$(BIN)/python benchmarks/updates.py

bench-unseen: setup  ## models that no other benchmark uses, at parts of plain PyTorch's peak
	$(BIN)/python benchmarks/unseen.py

bench-lora: setup  ## adapters on 1.1 billion frozen parameters, in FOLDER=... (7 GB), beside PEFT in core
	$(BIN)/python benchmarks/lora.py $(FOLDER)

databases: setup  ## PyTorch's databases of modules and operators, trained within tiny budgets and in parts; an hour
	$(BIN)/python tests/torch_cpu/databases.py modules operators
	$(BIN)/python tests/torch_cpu/databases_in_parts.py modules operators

record: setup  ## compare variants, plans, times, smallest budgets and bits of some 40 pairs with tests/record; four minutes
	$(BIN)/python tools/record.py --jobs 2

record-write: setup  ## renew tests/record
	$(BIN)/python tools/record.py --jobs 2 --write

growth: setup  ## followed loops for 10,000 steps each: resident memory against the budget; hours
	$(BIN)/python tools/growth.py

mutants: setup  ## break the sources in fifty places, one at a time, and see which test notices; ONLY=NAME,NAME does a part
	$(BIN)/python tools/mutants.py $(if $(ONLY),--only $(ONLY))

# VERIFY_PYTHON: an interpreter with outofcore and what those programs import, such as torchvision and monai.
VERIFY_PYTHON ?= $(BIN)/python
verify: setup  ## run other people's programs in FOLDER=... within budgets, and compare bits with plain Python; ONLY=NAME, ROUNDS=2
	$(VERIFY_PYTHON) tools/verify.py $(FOLDER) $(if $(ONLY),--only "$(ONLY)") $(if $(ROUNDS),--rounds $(ROUNDS))

wheel: setup  ## build sdist and wheel into dist, and train with the wheel in an empty environment without a compiler
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/verify_wheel.py dist

tsan: setup  ## look for data races in the native code of followed loops, with ThreadSanitizer; ten minutes
	$(BIN)/python tools/tsan.py

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

bench-published: setup  ## plan steps that others publish, from clones in FOLDER=..., beside their results; ONLY=checkmate,dtr does a part
	$(BIN)/python benchmarks/published.py $(FOLDER) $(if $(ONLY),--only $(ONLY))

gpu-visit:  ## on a machine with a GPU, no network needed: all that wants one; PARTS=9-11 or SECONDS=540
	$(GPU_PYTHON) tools/gpu_visit.py $(if $(PARTS),--parts $(PARTS)) $(if $(SECONDS),--seconds $(SECONDS))

# Without what such a machine has, PyTorch and numpy; below 20 MB.
gpu-wheels:  ## wheels for gpu-visit on a machine that has PyTorch and no network, in the folder .gpu-wheels
	rm -rf .gpu-wheels
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --dest .gpu-wheels --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp $(GPU_PLATFORMS:%=--platform %) \
		highspy msgspec typer rich pytest pluggy iniconfig packaging pygments click shellingham markdown-it-py mdurl \
		annotated-doc typing-extensions

# The default wheel for Linux is the CUDA build: 5 GB with the packages that it needs.
$(GPU_STUB)/venv/bin/python:
	$(PYTHON) -m venv $(GPU_STUB)/venv
	$@ -m pip install --quiet --disable-pip-version-check $(GPU_STUB_TORCH) numpy highspy msgspec typer rich pytest

gpu-stub: $(GPU_STUB_PYTHON)  ## the CUDA build of PyTorch on a runtime without a device, no GPU needed; ONLY=bits,races does a part
	$(GPU_STUB_PYTHON) tests/cuda/stub/suite.py --stub $(GPU_STUB) $(if $(ONLY),--only $(ONLY)) $(if $(JOBS),--jobs $(JOBS))

gpu-predictions: setup  ## caps, batches and times of gpu-visit's rows as the planner predicts them, without a GPU; ROWS=1,3 does a part
	$(BIN)/python tools/gpu_rows.py --predict $(ROWS)

gpu-rivals: setup  ## jobs that others publish for one card, with our predicted step beside their figures; minutes; ROWS=KEY,KEY does a part
	$(BIN)/python tools/gpu_rivals.py $(ROWS)

bench-state: setup  ## train a GPT born on disk, from birth to a checkpoint and on from it
	$(BIN)/python benchmarks/state.py

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
