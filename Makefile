# make bench   race the GNN models here: eager, full and regional, ours against torch-geometric's
# make test    the test suite
# make lint    ruff and mypy
# make docs    the documentation, strictly
# make clean   what the commands above left behind
#
# Each creates .venv and installs into it where that has not happened yet.
#
#   make bench ARGS="--model gcn --input cora"    options of benchmarks.run
#   make test ARGS="-k regions"                   options of pytest; "-m gpu" for the tests that need a GPU
#   ZOO_FUZZ_EXAMPLES=300 make test ARGS="-k fuzz --timeout 0"    that many random cases a test, not the same 20
#   make test PYTHON=python3.12                   the interpreter that .venv is made of

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help bench test lint format docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# The stamp is older than pyproject.toml when the dependencies may have changed. All packages are named in one call, so
# that the installer picks torch and torchvision wheels that belong together. It would compile them file by file: that is
# done on all cores instead. Some files are for other Pythons and do not compile.
$(INSTALLED): pyproject.toml
	@test -x $(RUN) || $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; say make PYTHON=python3.12")'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --no-compile --editable ".[dev]"
	@$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

bench: $(INSTALLED)
	$(RUN) -m benchmarks.run --family gnn $(ARGS)

# A thread a worker: more only makes them wait for each other.
test: export OMP_NUM_THREADS ?= 1
test: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
test: $(INSTALLED)
	$(RUN) -m pytest --numprocesses 2 --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(RUN) -m mkdocs build --strict --quiet

clean:
	rm -rf .venv site build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find zoo benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
