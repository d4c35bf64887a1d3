# Everything runs from .venv, which the first target that needs it makes.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
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
IN_GROUPS := --numprocesses=$(AT_ONCE) --dist=loadgroup --no-loadscope-reorder
# Tests without workers wait for files and small processes a third of the time.
SPREAD := --numprocesses=$(shell echo $$(($$(nproc) + 1))) --dist=worksteal
# Which CI has run before, in make check.
CHECKS := tests/test_architecture.py tests/test_docs.py
CHECKED := $(if $(CI),$(CHECKS))
# Packages that people have beside ours, and commands with them.
NEIGHBOURS := .venv-neighbours
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
PIP := -m pip install --quiet --disable-pip-version-check --constraint
# make test-python: the environment of another Python (VERSION=3.12), or of another torch (TORCH=2.6).
VERSION ?= 3.11
OTHER := .venv-py$(VERSION)$(if $(TORCH),-torch$(TORCH))
# make bench: what is measured, by the file tests/benchmarks/bench_NAME.py.
NAME ?= start others ort

.PHONY: help run test test-nightly test-quick test-serve test-ort test-faults test-attack test-drawn test-numbers test-python
.PHONY: test-slurm test-wheel test-neighbours gpu-bundle check check-style check-types check-layers docs bench install

## help: this list
help:
	@sed -n 's/^## \([a-z-]*\): \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

## install: .venv with the tested versions, and ORTModule's extension compiled for them
install: $(INSTALLED)

## run: train GPT-2 for ten steps under ORTModule and DeepSpeed, then show the run
run: $(INSTALLED)
	$(BIN)/ortlaunch model=gpt2 trainer=deepspeed train.steps=10 device=cpu
	$(BIN)/ortlaunch compare

## check: lint, format, types, who imports what, and the pages, whose links must lead somewhere; faster with -j2
check: check-style check-types check-layers

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

## test: one test of each kind, without clusters: test-quick, test-serve, test-ort, then whole runs and faults
test: test-quick test-serve test-ort
	@echo "test: whole runs and faults, with real workers: some 14 minutes on 2 cores"
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(IN_GROUPS) $(WHOLE_RUNS)

## test-quick: what starts no workers and no service, and compares no models; COVERAGE=1 says which lines it runs
test-quick: $(INSTALLED)
	@echo "test-quick: rules, files and messages, without workers: some 6 minutes on 2 cores"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) $(if $(COVERAGE),--cov=ortlaunch --cov-report=term --cov-report=html) \
		$(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%) $(ORT_PARITY:%=--ignore=%) $(SERVICE:%=--ignore=%) $(CHECKED:%=--ignore=%)

## test-serve: the service with real servers and Chromium: accounts, API, queue, streams, pages
test-serve: $(INSTALLED)
	@echo "test-serve: the service, with real servers and Chromium: some 3 minutes on 2 cores"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) $(SERVICE)

## test-ort: models under ONNX Runtime compared with PyTorch: operators, families, the export cache, some drawn models
test-ort: $(INSTALLED)
	@echo "test-ort: models under ONNX Runtime beside PyTorch: some 7 minutes on 2 cores"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) $(ORT_PARITY)

## test-nightly: test, and the cases that it leaves out: all pages, several machines, further fault trials
test-nightly: export ORTLAUNCH_NIGHTLY = 1
test-nightly: test test-neighbours test-faults

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

## test-python: the tests on another Python, without ONNX Runtime (VERSION=3.12 or 3.13), or on another torch (TORCH=2.6)
test-python: $(OTHER)/.installed
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest --numprocesses=auto --dist=worksteal \
		$(WHOLE_RUNS:%=--ignore=%) $(CLUSTER_RUNS:%=--ignore=%) $(if $(TORCH),,$(ORT_PARITY:%=--ignore=%))
	OMP_WAIT_POLICY=passive $(OTHER)/bin/python -m pytest $(IN_GROUPS) $(if $(TORCH),$(WHOLE_RUNS),$(RUNS_WITHOUT_ORT))

## test-slurm: runs on a real SLURM cluster of two nodes on this machine (slurm/lab/README.md); QUICK=1 what CI has time for
test-slurm: $(INSTALLED)
	$(if $(QUICK),,ORTLAUNCH_NIGHTLY=1) $(BIN)/python -m pytest \
		$(if $(QUICK),tests/slurm/test_survival.py -k "end_to_end or warning or scancel",$(CLUSTER_RUNS))

## test-wheel: the wheel installed from nothing, every package anew (2 GB, some minutes), and runs from there
test-wheel: $(INSTALLED)
	ORTLAUNCH_TEST_INSTALL=1 ORTLAUNCH_NIGHTLY=1 $(BIN)/python -m pytest --timeout 1800 tests/wheel

## test-neighbours: commands beside accelerate, torchvision, timm, peft, diffusers, lightning, wandb and xformers
test-neighbours: $(INSTALLED) $(NEIGHBOURS)/.installed
	ORTLAUNCH_NEIGHBOURS=$(CURDIR)/$(NEIGHBOURS) OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=2 tests/neighbours

## bench: measures NAME, of start others ort exchange limit estimate tune checkpoint tracking serve; ARGS go on
bench: $(INSTALLED)
	$(if $(filter others,$(NAME)),$(BIN)/python $(PIP) constraints.txt --editable '.[cpu,dev,bench]')
	for name in $(NAME); do $(BIN)/python -m tests.benchmarks.bench_$$name $(ARGS) || exit; done

## gpu-bundle: one file for a CUDA machine without a network: the committed tree, and the wheels that it lacks (docs/gpu.md)
gpu-bundle: $(INSTALLED)
	$(BIN)/python -m tests.gpu.bundle $(if $(MACHINE),--machine=$(MACHINE))

CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else f"the tests of backend=ort need Python 3.11, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11, or make test-python VERSION=3.12")'

# torch comes first: what is installed after it then finds the pinned build and brings no other.
$(PACKAGES): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) constraints.txt torch
	$(BIN)/python $(PIP) constraints.txt --editable '.[cpu,dev]'
	@touch $@

$(INSTALLED): $(PACKAGES)
	$(BIN)/python -m ortlaunch.ort.extension
	@touch $@

$(NEIGHBOURS)/.installed: tests/neighbours/packages.txt constraints.txt
	rm -rf $(NEIGHBOURS)
	$(BIN)/python $(PIP) constraints.txt --no-deps --target $(NEIGHBOURS) --requirement tests/neighbours/packages.txt
	# Its operators are of another build of torch; nothing here calls them.
	: > $(NEIGHBOURS)/torchvision/_meta_registrations.py
	@touch $@

# What constraints-torch26.txt names takes the place of the same packages. OTHER_PYTHON=/path/to/python3.12 names the Python.
$(OTHER)/.installed: pyproject.toml constraints.txt constraints-torch26.txt
	$(if $(filter 3.11,$(VERSION)),$(PYTHON),$(or $(OTHER_PYTHON),python$(VERSION))) -m venv $(OTHER)
	$(if $(TORCH),{ grep -v $$(sed -n 's/^\([a-z]*\)==.*/-e ^\1==/p' constraints-torch26.txt) constraints.txt; cat constraints-torch26.txt; },cat constraints.txt) > $(OTHER)/constraints.txt
	$(OTHER)/bin/python $(PIP) $(OTHER)/constraints.txt torch
	$(OTHER)/bin/python $(PIP) $(OTHER)/constraints.txt --editable '.[cpu,dev]'
	$(if $(TORCH),$(OTHER)/bin/python -m ortlaunch.ort.extension)
	@touch $@
