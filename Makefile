# Each target sets up its requirements in .venv. You need only Python 3.11 or newer and make, and
# Java 17 for the Spark tests.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := .venv/bin
LOCK   := .ci/requirements.lock
DEMO   := .ci/demo.lock
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCKED := install --require-hashes --no-deps --no-compile --requirement
COMPILE = $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-header --no-annotate
DEBIAN := /usr/lib/postgresql/15/bin

MKDOCS := NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

BENCH  ?= --quick

# The folders of tests of the core (docs/internals/core.md).
CORE   := event codec auth graph state visibility database streams persist queries sending sliding

# Each of hundreds of processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-spark homeserver test test-core soak lint docs pictures screenshots mutants bench sbom lock format

help: ## show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.runtime ## generate, store, sync and page rooms in an embedded Postgres
	$(BIN)/room-storage demo

demo-spark: .venv/.dev ## import, export, verify and stream on Spark, in an embedded Postgres
	$(BIN)/room-storage spark demo

homeserver: .venv/.dev ## run examples/homeserver on an embedded Postgres
	$(BIN)/python -m examples.homeserver --folder build/homeserver

test: .venv/.dev ## run all tests on the embedded Postgres, and some on Debian's 15
	$(BIN)/python -m pytest -n 3 --dist loadgroup
	@if [ -x $(DEBIAN)/postgres ]; \
	then STORAGE_TEST_POSTGRES=debian $(BIN)/python -m pytest -q -n 3 -m every_postgres; \
	else echo "Postgres 15 is not installed: skipped the tests for the oldest version"; fi
	@command -v chromium chromedriver > /dev/null || \
	echo "chromium and chromium-driver are not installed: skipped the tests of the inspector in a browser"

test-core: .venv/.dev ## run the tests of the core alone, but those that are marked slow
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" $(CORE:%=tests/%)

soak: .venv/.dev ## run the long tests, too, then MINUTES= of kills and restarts; takes hours
	STORAGE_EXAMPLES=200 STORAGE_FUZZ=100000 $(BIN)/python -m pytest -n 2 --timeout 0 tests/oracle tests/persist/test_fuzz.py tests/queries/test_sharing.py tests/homeserver/test_client_events.py
	STORAGE_EXAMPLES=3 STORAGE_OUTAGE_S=60 $(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 0
	STORAGE_EXAMPLES=500 $(BIN)/python -m pytest -n 2 tests/federation/test_partial_random.py tests/federation/test_partial_kills.py
	STORAGE_PLAN_EVENTS=1000000 STORAGE_PLAN_STATES=all $(BIN)/python -m pytest --timeout 0 tests/plans tests/queries/test_large_plans.py
	STORAGE_DAMAGES=5000 $(BIN)/python -m pytest -s --timeout 0 tests/maintenance/test_random_damage.py
	STORAGE_DAMAGES=1000 $(BIN)/python -m pytest -s --timeout 0 tests/maintenance/test_random_repair.py
	STORAGE_EXAMPLES=50 $(BIN)/python -m pytest tests/federation/test_busy_kills.py
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),30)

lint: .venv/.dev ## check formatting, ruff, mypy strict, layers, links of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MKDOCS)

pictures: .venv/.dev ## draw the pictures of the documentation again
	$(BIN)/python -m docs.pictures

screenshots: .venv/.dev ## take the pictures of the inspector again, at three widths
	$(BIN)/python -m docs.pictures.screenshots

docs: .venv/.dev ## build the documentation site in build/site
	$(MKDOCS)

mutants: .venv/.dev ## mutate the pure layers and run the tests; takes hours, resumes
	$(BIN)/python .ci/mutants.py $(MUTANTS)

bench: .venv/.dev ## run the quick benchmarks; BENCH= for the full ones
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python -m benchmarks report

format: .venv/.dev ## format the source
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sbom: .venv/.dev ## list what the wheel installs, with licences, as CycloneDX in build/
	$(BIN)/python .ci/sbom.py build/room-storage.cdx.json

lock: .venv/.dev ## update the locks, with hashes; the demo's is a part of the other
	$(COMPILE) --extra dev --extra mutants --output-file $(LOCK) pyproject.toml
	printf 'hatchling\neditables\n' | $(COMPILE) --extra embedded --constraint $(LOCK) \
		--output-file $(DEMO) pyproject.toml -

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Two steps: pip cannot check a hash of an editable project. The locks have what builds it.
.venv/.runtime: pyproject.toml $(DEMO) | .venv/bin/python
	$(PIP) $(LOCKED) $(DEMO)
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

.venv/.dev: pyproject.toml $(LOCK) | .venv/bin/python
	$(PIP) $(LOCKED) $(LOCK)
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch .venv/.runtime $@
