# The two commands of the README are `make demo` and `make test`; both set up .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Only what a user has not set; BLAS threads would fight with the ranks for the cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: setup demo test test-services test-faults test-long check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Suika needs Python 3.11 or newer, this is %d.%d; run: make PYTHON=python3.11 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[train,server,dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/suika demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -m 'not service and not fault and not long' $(ARGS)

# PostgreSQL comes from the distribution; the tests start a private server of their own.
test-services: setup
	sh tests/services/install.sh
	$(BIN)/python -m pytest -m 'service and not long' $(ARGS)

test-faults: setup
	$(BIN)/python -m pytest -m 'fault and not long' $(ARGS)

# Hundreds of kills, thousands of odd inputs: hours on two cores; name parts with ARGS="-k ...".
test-long: setup
	$(BIN)/python -m pytest -m long $(ARGS)

check: setup
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs bench examples README.md CHANGELOG.md CONTRIBUTING.md

format: setup
	$(BIN)/ruff check --fix src tests bench examples
	$(BIN)/ruff format src tests bench examples

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
