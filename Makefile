# Everything below runs on a fresh machine with Python >= 3.11 and make; nothing needs root, a GPU, or a network beyond
# the package index, but for the targets that say so.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

XLA_VENV := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed

# On real clusters: processes by the dozen and minutes of waiting for what a scheduler does when it likes.
CLUSTERS := contract or slurm or ray

.PHONY: demo test test-rooms test-local-launches test-launches test-devices test-packages test-clusters test-xla fuzz lint bench bench-cuda docs clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py

# In parallel, because tests of launches mostly wait for processes.
test: $(STAMP)
	$(MAKE) --jobs=3 --output-sync=target test-rooms test-local-launches test-launches test-devices

LOCAL_LAUNCHES := $(wildcard tests/launch/test_local_*.py)

test-local-launches: $(STAMP)
	$(BIN)/python -m pytest $(LOCAL_LAUNCHES) -m 'not ($(CLUSTERS))'

test-launches: $(STAMP)
	$(BIN)/python -m pytest tests/launch $(LOCAL_LAUNCHES:%=--ignore=%) -m 'not ($(CLUSTERS))'

test-rooms: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/launch -m 'not ($(CLUSTERS))'

# In a process of their own: a simulated accelerator becomes torch's accelerator for the whole process.
test-devices: $(STAMP)
	$(BIN)/python -m pytest tests/simdevice tests/devices

# With the packages of other projects whose values parawrap cuts and joins; they skip without these.
test-packages: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,packages]'
	$(BIN)/python -m pytest tests/shards/test_packages.py tests/faces/test_packages.py

# Apart from `make test`, which is to be over within minutes and runs where nothing but Python is installed. These tests want
# root and Debian's slurmctld, slurmd, slurm-client, munge and iproute2, and skip what they cannot have. The contract suite is
# among them, whole: the page that it writes is of all launchers.
test-clusters: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,slurm,ray]'
	$(BIN)/python -m pytest tests -m '$(CLUSTERS)'

# In an environment of its own: torch_xla goes with one release of torch, which is not the one of the other tests.
test-xla: $(XLA_STAMP)
	PARAWRAP_TEST_REQUIRE=xla $(XLA_VENV)/bin/python -m pytest tests/xla

# Random models, calls, and changes, compared with the plain call. `make test` runs 300 of these cases.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --cases 10000
	$(BIN)/python -m tests.fuzz --cases 10000 --devices sim

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	$(BIN)/python -m benchmarks

# The Python that sees the GPU: $(PYTHON) itself where it has a CUDA torch and what parawrap requires, else the venv's.
bench-cuda:
	@if $(PYTHON) -m benchmarks.cuda_python; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(STAMP) && python=$(BIN)/python; fi \
	&& echo "bench-cuda runs under $$python" && $$python -m benchmarks cuda

docs: $(STAMP)
	$(BIN)/towncrier build --draft --version next
	$(BIN)/python -m pytest docs README.md

clean:
	rm -rf $(VENV) $(XLA_VENV) build dist *.egg-info

$(STAMP): setup.cfg constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "parawrap needs Python 3.11 or later; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint,docs]'
	touch $@

$(XLA_STAMP): setup.cfg constraints.txt
	$(PYTHON) -m venv $(XLA_VENV)
	sed '/^torch==/d' constraints.txt > $(XLA_VENV)/constraints.txt
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(XLA_VENV)/constraints.txt -e . \
		torch==2.9.0 torch_xla==2.9.0 numpy pytest pytest-timeout
	touch $@
