# One-line targets; everything that needs more is in .ci/ or in the packages. `make` alone lists them.
BIN := .venv/bin
OPENBLAS = $(shell ls /usr/lib/*/openblas-pthread/libopenblas.so.0 2>/dev/null | head -n 1)
MODEL ?=
ARGS ?=

.PHONY: help up test test-slow test-netns lint types contracts check format lock bench setup setup-dev clean
help:  ## list these targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */\1|/' | awk -F'|' '{ printf "make %-10s %s\n", $$1, $$2 }'

up: setup  ## set up on first use and serve the demo model (MODEL=... for another, ARGS=... for flags)
	@$(BIN)/cluster up $(MODEL) $(ARGS)

test: setup-dev  ## set up on first use and run the default test suite (ARGS=... for pytest)
	@LD_PRELOAD=$(OPENBLAS) $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: setup-dev  ## the tests that take many minutes
	@LD_PRELOAD=$(OPENBLAS) $(BIN)/python -m pytest -m slow $(ARGS)

test-netns: setup-dev  ## drills: whole clusters on machines in network namespaces (Linux, as root)
	@LD_PRELOAD=$(OPENBLAS) $(BIN)/python -m pytest -m netns $(ARGS)

lint: setup-dev  ## style and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup-dev  ## static types
	@$(BIN)/mypy

contracts: setup-dev  ## which package may import which
	@$(BIN)/lint-imports

check: lint types contracts test  ## lint, types, contracts and the default tests

format: setup-dev  ## rewrite files in the project's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

lock: setup  ## resolve the dependencies anew into both locks
	@.ci/lock

bench: setup  ## time the engine on the demo model (docs/benchmarks.md)
	@$(BIN)/cluster bench $(ARGS)

setup:
	@.ci/setup run

setup-dev:
	@.ci/setup dev

clean:  ## remove the virtual environment and all caches of this folder
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
