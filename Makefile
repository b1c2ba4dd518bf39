# All targets run on a fresh machine with Python >= 3.11 and make. Unless a comment says otherwise,
# they need no root, no GPU, and no network except the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIMITS := $(VENV)/constraints.txt

# The release of torch, if it is not the one in constraints.txt: `make TORCH=2.15.0 test`.
TORCH :=

# pip compiles with one processor, which takes half of its time. Files for other releases of Python
# do not compile.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# The environment is made anew if PYTHON or TORCH is not that of the last command.
CHOICE := $(strip $(shell $(PYTHON) -V) $(TORCH))

comma := ,

# Tests on real clusters start dozens of processes, and wait minutes for schedulers.
CLUSTERS := slurm or ray
SLOW := $(CLUSTERS) or contract or long

.DEFAULT_GOAL := help
.PHONY: help help-all demo test test-main test-devices test-packages test-pages test-distribution \
	test-clusters test-slurm test-ray test-long test-free-threaded test-without-lock matrix fuzz \
	lint bench bench-cuda device docs pictures tally clean

# The first five have `##!`, the others `##`.
help:
	@echo "usage: make [PYTHON=python3.12] TARGET"
	@awk -F ':.*##! ' '/^[a-z-]+:.*##! / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "make help-all lists all targets"

help-all:  ## this list
	@awk -F ':.*##!? ' '/^##@ / {print "\n" substr($$0, 5)} \
		/^[a-z-]+:.*##!? / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use

demo: $(STAMP)  ##! train and evaluate on real data, from one line each
	$(BIN)/python examples/digits.py
	$(BIN)/python examples/stay.py
	$(BIN)/python examples/one_block.py threads processes

##@ Test

# Tests of launches mostly wait for processes, so there are more workers than processors. Each file
# has one worker.
WORKERS := 3
test: $(STAMP)  ##! all tests that need only this machine
	$(MAKE) --jobs=2 --output-sync=target test-main test-devices

# All but the tests that need packages of their own: test-pages and test-distribution run these.
TEST_MAIN = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile \
	--ignore=tests/site --ignore=tests/distribution -m 'not ($(SLOW))'
test-main: $(STAMP)
	$(TEST_MAIN)

# In processes of their own: a simulated accelerator becomes torch's accelerator for the whole
# process, under one name.
test-devices: $(STAMP)
	$(BIN)/python -m pytest tests/simdevice tests/devices
	$(BIN)/python -m pytest tests/neuron_devices

WITH_PACKAGES := tests/engine/test_packages.py docs/transformers.md

# Tests with packages such as transformers, with values that parawrap cuts and joins. The tests skip
# without the packages.
test-packages: $(VENV)/.with-packages  ## models of transformers, tensordict, torch_geometric
	$(BIN)/python -m pytest $(WITH_PACKAGES)

# Open pages in a headless browser. The tests skip without Debian's package chromium.
test-pages: $(VENV)/.with-browser  ## pages in a headless browser (needs chromium)
	$(BIN)/python -m pytest tests/displays tests/site

# Not part of `make test`, which takes minutes and needs only Python. These tests need root and the
# Debian packages slurmctld, slurmd, slurm-client, munge, and iproute2; they skip without them.
# Those of Ray and of Slurm run one after the other: Ray's nodes cannot start while the first jobs of
# Slurm's tests take all processors. Both include the contract suite; `make test-long` runs it for
# the launchers that need no cluster.
test-clusters: $(VENV)/.with-slurm $(VENV)/.with-ray  ## Slurm and Ray clusters (needs root)
	$(MAKE) test-slurm
	$(MAKE) test-ray

test-slurm: $(VENV)/.with-slurm
	$(BIN)/python -m pytest tests -m slurm

test-ray: $(VENV)/.with-ray
	$(BIN)/python -m pytest tests -m ray

# Tests that take a minute each, or much of a processor, and the contract of the launchers that need
# no cluster.
test-long: $(STAMP)  ## tests that take a minute each
	$(BIN)/python -m pytest tests -m '(long or contract) and not ($(CLUSTERS))'

# The tests of one process without the interpreter lock. CI does not run them: torch for this build
# of Python is a CUDA build of 3 GB. tests/free_threaded_python.sh builds such a Python in some
# minutes.
test-free-threaded:  ## tests without the interpreter lock: make PYTHON=FOLDER/bin/python3 ...
	$(MAKE) VENV=.venv-free-threaded test-without-lock

test-without-lock: export PYTHON_GIL := 0
test-without-lock: export PARAWRAP_TEST_REQUIRE := free-threaded
test-without-lock: $(STAMP)
	$(TEST_MAIN)
	$(BIN)/python -m tests.fuzz.races --seconds 60

# Build the wheel and the source distribution, and check what is in them.
test-distribution: $(VENV)/.with-dist  ## the wheel and the source distribution
	$(BIN)/python -m pytest tests/distribution

# Test the wheel with several releases of Python and torch, and enter the results into
# docs/versions.md. PYTHONS and TORCHES name them; by default, all interpreters that are found. Each
# environment takes up to 6 GB, for a few minutes.
PYTHONS :=
TORCHES :=
MATRIX := --page docs/versions.md
matrix: $(STAMP)  ## the wheel with several releases of Python and torch
	$(BIN)/python -m tests.matrix $(MATRIX) \
		$(if $(PYTHONS),--python $(PYTHONS)) $(if $(TORCHES),--torch $(TORCHES))

# Look for flaky tests: run tiers again and again while other processes compute, and add the results
# to .tally/tally.jsonl.
TIERS := test
RUNS := 10
LOAD := 4
tally: $(STAMP)  ## a tier again and again under load, to find flaky tests
	$(BIN)/python -m tests.tally $(TIERS) --runs $(RUNS) --load $(LOAD)

# Compare random models, calls, and changes with the plain call. `make test-long` runs 120 of these
# cases.
fuzz: $(STAMP)  ## 20,000 random models and calls
	$(BIN)/python -m tests.fuzz --cases 10000
	$(BIN)/python -m tests.fuzz --cases 10000 --devices sim

##@ Check, measure, write

lint: $(STAMP)  ##! ruff, codespell, mypy --strict, and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(VENV)/.with-bench  ##! the benchmarks of docs/benchmarks.md
	$(BIN)/python -m benchmarks

# For a machine with a GPU. Uses $(PYTHON) if it has CUDA torch and parawrap's requirements, else
# the Python of the venv.
bench-cuda:  ## the benchmarks of one NVIDIA GPU
	@if $(PYTHON) -m benchmarks.cuda_python; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(STAMP) && python=$(BIN)/python; fi \
	&& echo "bench-cuda runs under $$python" && $$python -m benchmarks cuda

# For a borrowed machine with a GPU: the tests and benchmarks that need it, and those of the CPU
# that need many cores, in at most LIMIT_S seconds. Writes benchmarks/results/device. Installs
# packages before, if $(PYTHON) lacks some.
LIMIT_S := 580
device:  ## tests and benchmarks for a machine with a GPU, in ten minutes
	@if $(PYTHON) -m benchmarks.cuda_python pytest pytest-timeout; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(STAMP) && python=$(BIN)/python; fi \
	&& echo "device runs under $$python" && $$python -m benchmarks.device $(LIMIT_S)

# The site. Its examples run in `make test`.
docs: $(STAMP)  ##! the site, with warnings as errors, and a draft of the changelog
	$(BIN)/towncrier build --draft --version next
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env docs docs/_build
	@echo "wrote docs/_build/index.html"

# Draw the pictures of docs/. Needs Debian's package chromium.
pictures: $(VENV)/.with-browser  ## new pictures for the site (needs chromium)
	$(BIN)/python docs/pictures.py

clean:  ## remove the environments and what was built
	rm -rf $(VENV) build dist *.egg-info

ifneq ($(CHOICE),$(shell cat $(VENV)/.choice 2>/dev/null))
.PHONY: $(STAMP)
endif

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"parawrap needs Python 3.11 or later; name one: make PYTHON=python3.12 ...")'
	[ '$(CHOICE)' = "$$(cat $(VENV)/.choice 2>/dev/null)" ] || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(LIMITS)
	$(PIP) -c $(LIMITS) -e '.[test,lint,docs]'
	$(COMPILE)
	echo '$(CHOICE)' > $(VENV)/.choice
	touch $@

# The packages of one extra, such as .venv/.with-ray, or of several: .venv/.with-slurm,ray.
# Installed once: while pip installs, parawrap cannot be imported.
$(VENV)/.with-%: $(STAMP)
	$(PIP) -c $(LIMITS) -e '.[$*]'
	$(COMPILE)
	touch $(foreach extra,$(subst $(comma), ,$*),$(VENV)/.with-$(extra)) $@
