# make train   sets up and trains configs/quickstart.py into runs/quickstart
# make test    sets up and runs the quick tests
# make test-all  adds those marked slow, and lets XLA optimise what it compiles (see tests/conftest.py)
# Variables: PYTHON (makes the environment), VENV (where it lies), WORKDIR (where training goes),
# JOBS (tests at a time), JAX_PLATFORMS (what tests run on), EXTRAS (of setup.py).
# make extra-NAME adds an extra of setup.py to the environment: with cuda13-local (and ptxas) the
# tests compile the kernels for a GPU, with tpu for TPUs, without having one.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart
JOBS ?= 2
JAX_PLATFORMS ?= cpu
EXTRAS ?= test

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Compiled programs are kept between test runs: a second run takes an eighth of the time.
TEST_ENV := JAX_PLATFORMS=$(JAX_PLATFORMS) JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

# Tests of a file share what they compile: they stay in one process.
TEST_OPTIONS := -q -rs -n $(JOBS) --dist loadfile

.PHONY: setup train test test-all lint clean

setup: $(READY)

$(READY): setup.py
	@echo "Setting up $(VENV) (a minute or two, about 1 GB)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

extra-%: $(READY)
	@$(RUN) -m pip install -qq --disable-pip-version-check -e '.[$*]'

train: $(READY)
	@$(RUN) -m train.main --config=configs/quickstart.py --workdir=$(WORKDIR)

test: $(READY)
	@$(TEST_ENV) $(RUN) -m pytest $(TEST_OPTIONS)

test-all: $(READY)
	@$(TEST_ENV) XLA_FLAGS="$(XLA_FLAGS)" $(RUN) -m pytest $(TEST_OPTIONS) -m "slow or not slow"

lint: $(READY)
	@$(RUN) -m ruff check .

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
