# make bench   measure the GNN models: eager, full and regional, ours and torch-geometric's
# make test    run the tests that take no longer than a few seconds each
# make test-all    run all tests
# make lint    run ruff and mypy
# make docs    build the documentation; a warning is an error
# make clean   remove what the commands above created
#
# Each command but clean first creates .venv and installs the packages, if needed.
#
#   make bench ARGS="--model gcn --input cora"    options of benchmarks.run
#   make test-all ARGS="-k regions"               options of pytest; "-m gpu" for the tests that need a GPU
#   make test PYTHON=python3.12                   the interpreter for .venv
#   make test VERSIONS=oldest                     the oldest releases that pyproject.toml allows, in .venv-oldest
#   ZOO_FUZZ_EXAMPLES=300 make test-all ARGS="-k fuzz --timeout 0"    new random models, that many a test

PYTHON ?= python3
VERSIONS ?= newest
VENV ?= $(if $(filter oldest,$(VERSIONS)),.venv-oldest,.venv)
ARGS ?=
$(if $(filter newest oldest,$(VERSIONS)),,$(error VERSIONS is "$(VERSIONS)"; say newest or oldest))

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help bench test test-all versions lint format docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# The stamp is older than pyproject.toml when the dependencies may have changed. All packages are named in one call, so
# that the installer picks torch and torchvision wheels that belong together. It would compile them file by file: that is
# done on all cores instead. Some files are for other Pythons and do not compile.
$(INSTALLED): pyproject.toml
	@test -x $(RUN) || $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; run make PYTHON=python3.12")'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --no-compile --editable ".[dev]" $(if $(filter oldest,$(VERSIONS)),--constraint tests/oldest.txt)
	@$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

bench: $(INSTALLED)
	$(RUN) -m benchmarks.run --family gnn --quick $(ARGS)

# A thread a worker: more only makes them wait for each other.
test test-all: export OMP_NUM_THREADS ?= 1
test test-all: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
test: $(INSTALLED)
	$(RUN) -m pytest --numprocesses 2 --dist worksteal -m "not slow" $(ARGS)

test-all: $(INSTALLED)
	$(RUN) -m pytest --numprocesses 2 --dist worksteal $(ARGS)

versions: $(INSTALLED)
	@$(RUN) -c 'import platform; from importlib.metadata import version; print("python", platform.python_version()); \
		[print(name, version(name)) for name in "torch triton numpy transformers torch-geometric diffusers".split()]'

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(RUN) -m mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest site build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find zoo benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
