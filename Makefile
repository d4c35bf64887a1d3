# Everything runs from .venv, which the first target that needs it makes.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
VENV26 := .venv-torch26
WHOLE_RUNS := tests/integration tests/numbers tests/faults tests/wheel
CLUSTER_RUNS := tests/slurm
# The service: real servers, and Chromium.
SERVICE := tests/serve
# Models exported to ONNX Runtime and compared with PyTorch, without workers.
ORT_PARITY := tests/ort tests/drawn
# Whole runs of each trainer, checkpoint, stop and record without ONNX Runtime.
RUNS_WITHOUT_ORT := $(addprefix tests/integration/test_,default_backend.py engines.py resume.py weights.py stop.py profile.py)
# Whole runs side by side: starting up is one core wide and most of a short run. Their threads must not spin for each other.
AT_ONCE := $(shell cores=$$(nproc); echo $$((cores > 3 ? 3 : 2)))
# Tests without workers wait for files and small processes a third of the time.
ONE_MORE := $(shell echo $$(($$(nproc) + 1)))
# In CI also what took longest.
SLOWEST := $(if $(CI),--durations=30 --durations-min=1)
# Which CI has run before, in make check.
CHECKS := tests/test_architecture.py tests/test_docs.py
CHECKED := $(if $(CI),$(CHECKS))
# Packages that people have beside ours, and commands with them.
NEIGHBOURS := .venv-neighbours
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP26 := $(VENV26)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV26)/constraints.txt

.PHONY: bench bench-estimate bench-jobs bench-serve bench-tune coverage docs docs-pictures docs-reference run test test-drawn test-numbers test-quick test-serve test-ort test-nightly test-wheel test-faults test-slurm test-slurm-quick test-torch26 test-py312 test-py313 test-attack check bench-ort bench-exchange bench-limit bench-checkpoint bench-tracking docs-families docs-precision install clean check-layers check-style check-types gpu-bundle test-neighbours

## run: train GPT-2 for ten steps under ORTModule and DeepSpeed, then show the run
run: $(INSTALLED)
	$(BIN)/ortlaunch model=gpt2 trainer=deepspeed train.steps=10 device=cpu
	$(BIN)/ortlaunch compare

## test: one test of each kind, without clusters: those that start no workers on all cores, then faults and whole runs
test: test-quick test-serve test-ort
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=$(AT_ONCE) --dist=loadgroup --no-loadscope-reorder $(SLOWEST) $(WHOLE_RUNS)

## test-nightly: test, and the cases that it leaves out: all documentation, several machines, further fault trials
test-nightly: export ORTLAUNCH_NIGHTLY = 1
test-nightly: test test-neighbours test-faults

## test-quick: the tests that start no workers and no service, and compare no models under ONNX Runtime
test-quick: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(ONE_MORE) --dist=worksteal $(SLOWEST) \
		$(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%) $(ORT_PARITY:%=--ignore=%) $(SERVICE:%=--ignore=%) $(CHECKED:%=--ignore=%)

## test-serve: the service with real servers and Chromium: accounts, API, queue, streams, pages
test-serve: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(ONE_MORE) --dist=worksteal $(SLOWEST) $(SERVICE)

## test-ort: models under ONNX Runtime compared with PyTorch: operators, families, the export cache, some drawn models
test-ort: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(ONE_MORE) --dist=worksteal $(SLOWEST) $(ORT_PARITY)

## test-faults: ten of each kind of fault, at moments drawn with fixed seeds; prints how many the runs survived
test-faults: $(INSTALLED)
	ORTLAUNCH_NIGHTLY=1 ORTLAUNCH_FAULT_TRIALS=10 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=2 tests/faults

## test-attack: 400 bad requests over every verb and key; prints how many got one clear message, and each that did not
test-attack: $(INSTALLED)
	$(BIN)/python -m tests.attack

## test-drawn: 500 drawn models trained under ORT and in eager; prints the outcomes, and each bad model reduced to a small one
test-drawn: $(INSTALLED)
	$(BIN)/python -m tests.drawn

## test-numbers: 240 drawn runs under eager PyTorch and 60 under ONNX Runtime, held against fp64 in one process
test-numbers: $(INSTALLED)
	$(BIN)/python -m tests.numbers
	$(BIN)/python -m tests.numbers --backends ort --seeds 0 60

## test-torch26: the same tests on torch 2.6.0, in an environment of its own
test-torch26: $(VENV26)/.installed
	OMP_NUM_THREADS=1 $(VENV26)/bin/python -m pytest --numprocesses=auto $(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%)
	OMP_WAIT_POLICY=passive $(VENV26)/bin/python -m pytest --numprocesses=$(AT_ONCE) --dist=loadgroup --no-loadscope-reorder $(WHOLE_RUNS)

# An installation in a Python that onnxruntime-training has no wheels for; tests that need it are skipped with the reason.
define test-other-python
OMP_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses=auto --dist=worksteal \
	$(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%) $(ORT_PARITY:%=--ignore=%)
OMP_WAIT_POLICY=passive $(1)/bin/python -m pytest --numprocesses=$(AT_ONCE) --dist=loadgroup --no-loadscope-reorder $(RUNS_WITHOUT_ORT)
endef

## test-py312: the tests that need no ONNX Runtime, and a selection of whole runs, on Python 3.12 in an environment of its own
test-py312: .venv-py312/.installed
	$(call test-other-python,.venv-py312)

## test-py313: the same on Python 3.13
test-py313: .venv-py313/.installed
	$(call test-other-python,.venv-py313)

## test-slurm: runs on a real SLURM cluster of two nodes on this machine (root and Debian's packages: slurm/lab/README.md)
test-slurm: $(INSTALLED)
	ORTLAUNCH_NIGHTLY=1 $(BIN)/python -m pytest $(CLUSTER_RUNS)

## test-slurm-quick: some of these, what CI has time for
test-slurm-quick: $(INSTALLED)
	$(BIN)/python -m pytest tests/slurm/test_survival.py -k "end_to_end or warning or scancel"

## test-wheel: the wheel installed from nothing, every package anew (2 GB, some minutes), and runs from there
test-wheel: $(INSTALLED)
	ORTLAUNCH_TEST_INSTALL=1 ORTLAUNCH_NIGHTLY=1 $(BIN)/python -m pytest --timeout 1800 tests/wheel

## test-neighbours: commands beside accelerate, torchvision, timm, peft, diffusers, lightning, wandb and xformers, in a folder of their own
.PHONY: test-neighbours
test-neighbours: $(INSTALLED) $(NEIGHBOURS)/.installed
	ORTLAUNCH_NEIGHBOURS=$(CURDIR)/$(NEIGHBOURS) OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=2 $(SLOWEST) tests/neighbours

## gpu-bundle: one file for a CUDA machine without a network: the committed tree, and the wheels that it lacks (docs/gpu.md)
.PHONY: gpu-bundle
gpu-bundle: $(INSTALLED)
	$(BIN)/python -m tests.gpu.bundle $(if $(MACHINE),--machine=$(MACHINE))

## coverage: which lines the tests that start no workers run, by file; what only workers run is counted as not run
coverage: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --cov=ortlaunch --cov-report=term --cov-report=html \
		$(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%)

## check: lint, format, types, who imports what, and the documentation, whose links must lead somewhere; faster with -j2
check: check-style check-types check-layers

.PHONY: check-style check-types check-layers
check-style: $(PACKAGES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types: $(PACKAGES)
	$(BIN)/mypy

check-layers: $(PACKAGES)
	$(BIN)/python -m pytest --quiet $(CHECKS)

## docs: the pages of docs/ as a site in site/, made and read without a network
# Not --quiet, which would hide the warnings from --strict.
docs: $(PACKAGES)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

## docs-pictures: take the pictures of a comparison and of the service's pages in docs/images again, with Debian's chromium
docs-pictures: $(INSTALLED)
	$(BIN)/python -m tests.serve.pages.pictures

## bench-ort: step time of ORT over eager's, interleaved in one run
bench-ort: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_ort

## bench-limit: share of this machine's matrix-product rate that eager, compile and ort use; ARGS="--families gpt2_nano --rounds 1"
bench-limit: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_limit $(ARGS)

## bench-exchange: gradients through shared memory over gloo on the CPU: single sums, then whole runs
bench-exchange: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_exchange $(ARGS)

## bench-estimate: memory that ortlaunch estimate predicts beside what training takes, of 200 drawn configurations, as kept; ARGS=measure goes on
bench-estimate: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_estimate $(ARGS)

## bench-tune: ortlaunch tune replayed on the measured grids of models, and on simulated machines of 210 cells
bench-tune: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_tune

## bench-checkpoint: how long training waits for a checkpoint, asynchronous over synchronous
bench-checkpoint: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_checkpoint

## bench-jobs: how long ortlaunch jobs takes with 10,000 finished runs
bench-jobs: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_jobs

## bench-tracking: what a run's record costs: step time with a relay over that without, and compare over what MLflow alone takes
bench-tracking: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_tracking
	$(BIN)/python -m tests.benchmarks.bench_compare

## bench-serve: the service over 10,000 runs: list, curves, log lines to 200 followers, submissions, and what it costs a training
bench-serve: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_serve

## bench: ortlaunch against what people use instead (a script by hand, transformers' Trainer, Lightning, Accelerate), then bench-ort
bench: $(INSTALLED)
	$(PIP) --editable '.[cpu,dev,bench]'
	$(BIN)/python -m tests.benchmarks.bench_start
	$(BIN)/python -m tests.benchmarks.bench_others
	$(BIN)/python -m tests.benchmarks.bench_others --model=gpt2 --rounds=2
	$(BIN)/python -m tests.benchmarks.bench_ort

## docs-families: measure the model families under ORT with this torch, and write them into docs/ort-families.md
docs-families: $(INSTALLED)
	$(BIN)/python -m tests.ort.families_table
	$(BIN)/python -m tests.ort.foreign_table

## docs-reference: write docs/reference.md as the schema has it
docs-reference: $(INSTALLED)
	$(BIN)/python -m tests.config.reference

## docs-precision: write the tables of docs/precision.md as the rules have them
docs-precision: $(INSTALLED)
	$(BIN)/python -m tests.config.precision_table

## install: .venv with the tested versions, and ORTModule's extension compiled for them
install: $(INSTALLED)

CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else f"the tests of backend=ort need Python 3.11, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11, or make test-py312")'

# torch comes first: what is installed after it then finds the pinned build and brings no other.
$(PACKAGES): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[cpu,dev]'
	@touch $@

$(INSTALLED): $(PACKAGES)
	$(BIN)/python -m ortlaunch.ort.extension
	@touch $@

$(NEIGHBOURS)/.installed: tests/neighbours/packages.txt constraints.txt
	rm -rf $(NEIGHBOURS)
	$(PIP) --no-deps --target $(NEIGHBOURS) --requirement tests/neighbours/packages.txt
	# Its operators are of another build of torch; nothing here calls them.
	: > $(NEIGHBOURS)/torchvision/_meta_registrations.py
	@touch $@

$(VENV26)/.installed: pyproject.toml constraints.txt constraints-torch26.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV26)
	{ grep -v $$(sed -n 's/^\([a-z]*\)==.*/-e ^\1==/p' constraints-torch26.txt) constraints.txt; cat constraints-torch26.txt; } > $(VENV26)/constraints.txt
	$(PIP26) torch
	$(PIP26) --editable '.[cpu,dev]'
	$(VENV26)/bin/python -m ortlaunch.ort.extension
	@touch $@

# make PYTHON312=/path/to/python3.12 test-py312
.venv-py%/.installed: pyproject.toml constraints.txt
	$(or $(PYTHON$*),python3.$(*:3%=%)) -m venv .venv-py$*
	.venv-py$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-py$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV26) $(NEIGHBOURS) .venv-py312 .venv-py313
