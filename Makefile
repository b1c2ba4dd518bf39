# All targets run on a fresh machine with Python >= 3.11 and make. Unless a comment says otherwise, they need no root, no GPU,
# and no network except the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

XLA_VENV := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed

# Tests on real clusters start dozens of processes, and wait minutes for schedulers. Long tests run with them.
CLUSTERS := contract or slurm or ray or long

.PHONY: demo test test-faces test-core test-local-launches test-launches test-devices test-packages test-pages test-clusters test-xla fuzz lint bench bench-cuda docs pictures clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py
	$(BIN)/python examples/one_block.py threads processes

# In parallel, because tests of launches mostly wait for processes.
test: $(STAMP)
	$(MAKE) --jobs=3 --output-sync=target test-launches test-local-launches test-faces test-core test-devices

LOCAL_LAUNCHES := $(wildcard tests/launch/test_local_*.py)

test-local-launches: $(STAMP)
	$(BIN)/python -m pytest $(LOCAL_LAUNCHES) -m 'not ($(CLUSTERS))'

test-launches: $(STAMP)
	$(BIN)/python -m pytest tests/launch $(LOCAL_LAUNCHES:%=--ignore=%) -m 'not ($(CLUSTERS))'

FACES := tests/faces tests/functional tests/neuron

test-faces: $(STAMP)
	$(BIN)/python -m pytest $(FACES) -m 'not ($(CLUSTERS))'

test-core: $(STAMP)
	$(BIN)/python -m pytest --ignore=tests/launch $(FACES:%=--ignore=%) -m 'not ($(CLUSTERS))'

# In a process of their own: a simulated accelerator becomes torch's accelerator for the whole process.
test-devices: $(STAMP)
	$(BIN)/python -m pytest tests/simdevice tests/devices

WITH_PACKAGES := tests/shards/test_packages.py tests/faces/test_packages.py tests/faces/test_transformers.py docs/transformers.md

# Tests with packages such as transformers, with values that parawrap cuts and joins. The tests skip without the packages.
test-packages: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,packages]'
	$(BIN)/python -m pytest $(WITH_PACKAGES)

# Open pages in a headless browser. The tests skip without Debian's package chromium.
test-pages: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,browser]'
	$(BIN)/python -m pytest tests/displays tests/site

# Not part of `make test`, which takes minutes and needs only Python. These tests need root and the Debian packages slurmctld,
# slurmd, slurm-client, munge, and iproute2; they skip without them. They include the whole contract suite, because the page
# that it writes covers all launchers.
test-clusters: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,slurm,ray]'
	$(BIN)/python -m pytest tests -m '$(CLUSTERS)'

# In a separate environment: torch_xla needs another release of torch than the other tests.
test-xla: $(XLA_STAMP)
	PARAWRAP_TEST_REQUIRE=xla $(XLA_VENV)/bin/python -m pytest tests/xla

# Compare random models, calls, and changes with the plain call. `make test` runs 300 of these cases.
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

# For a machine with a GPU. Uses $(PYTHON) if it has CUDA torch and parawrap's requirements, else the Python of the venv.
bench-cuda:
	@if $(PYTHON) -m benchmarks.cuda_python; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory $(STAMP) && python=$(BIN)/python; fi \
	&& echo "bench-cuda runs under $$python" && $$python -m benchmarks cuda

# The site. Its examples run in `make test`.
docs: $(STAMP)
	$(BIN)/towncrier build --draft --version next
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env docs docs/_build
	@echo "wrote docs/_build/index.html"

# Draw the pictures of docs/. Needs Debian's package chromium.
pictures: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,browser]'
	$(BIN)/python docs/pictures.py

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
