# `make help` lists the targets. The environment in .venv is made on demand and
# made again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
STUDIES := $(sort $(filter-out common __init__,$(basename $(notdir $(wildcard src/coterie_lab/studies/*.py)))))

# Several processes with several threads each are slower than one thread each.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench studies docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	# Tests compare robust means with ByzFL's. It wants torchvision, whose build for GPUs cannot be
	# imported beside torch for CPUs and would break the export to ONNX.
	$(BIN)/pip install --quiet --no-deps byzfl
	@touch $@

demo: $(STAMP)  ## Find the groups of a small federation and train a model for each
	$(BIN)/coterie run quickstart

test: $(STAMP)  ## Run the tests and the examples in the docstrings
	$(BIN)/python -m pytest -q -n $(WORKERS)

lint: $(STAMP)  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/coterie src/coterie_lab

bench: $(STAMP)  ## Measure speed beside the plain loop and other packages (about an hour, idle)
	$(BIN)/coterie bench --peers --growth --json benchmarks/results/bench.json \
		--docs docs/performance.md

studies: $(STAMP)  ## Run every study of the laboratory (about an hour)
	@set -e; for name in $(STUDIES); do echo "== $$name"; $(BIN)/python -m coterie_lab.studies.$$name; done

docs: $(DOCS_STAMP)  ## Build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

clean:  ## Remove the environment and everything that was built
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
