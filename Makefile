# Each target works by itself from a fresh clone with Python 3.11; the first one to run installs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CUDA build of torch brings the Triton it was built for; the CPU build brings none, and then the
# oldest supported Triton is taken, since kernels must compile with it.
CONSTRAINTS := -c constraints.txt $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
STAMP := $(VENV)/.installed
RESULTS ?= results
# For `make gate`: what action.yml calls its inputs.
MODEL ?= vk-tiny
BASELINE ?=
MARGIN ?= 0.05
ARGUMENTS ?=

.DEFAULT_GOAL := help
.PHONY: help
help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml engine/pyproject.toml constraints.txt constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]' -e ./engine
	@touch $@

.PHONY: demo
demo: $(STAMP)  ## Run the main job on this CPU: VK against stock on the small model, and print the leaderboard
	$(BIN)/finalbench run --model vk-tiny --results-dir $(RESULTS)

.PHONY: test
test: $(STAMP)  ## Run the fast tests (under 2 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: test-slow
test-slow: $(STAMP)  ## Run the slow tests: containers, browser, whole runs
	$(BIN)/python -m pytest -m '(slow or container or browser) and not gpu and not nightly'

.PHONY: lint
lint: $(STAMP)  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check --quiet finalbench engine/vkengine

.PHONY: gpu-test
gpu-test: $(STAMP)  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu

.PHONY: nightly
nightly: $(STAMP)  ## Run mutation tests and long simulations
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python tests/mutation.py

.PHONY: report
report: $(STAMP)  ## Generate reports/ from results/reference/
	rm -rf reports/cards
	$(BIN)/finalbench report results/reference/* --out reports --claims results/claims.yaml

.PHONY: gate
gate: $(STAMP)  ## Run MODEL and judge it against BASELINE (a run folder or a pin), as action.yml does
	@test -n "$(BASELINE)" || { echo "name a run folder or a pin: make gate BASELINE=..." >&2; exit 2; }
	@mkdir -p $(RESULTS)
	$(BIN)/finalbench run --model $(MODEL) --results-dir $(RESULTS) --no-progress --json $(ARGUMENTS) > $(RESULTS)/summary.json || test $$? -eq 4
	$(BIN)/finalbench gate --baseline $(BASELINE) --candidate "$(RESULTS)/$$($(BIN)/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["run"])' $(RESULTS)/summary.json)" --margin $(MARGIN) --junit $(RESULTS)/junit.xml --markdown $(RESULTS)/verdict.md

.PHONY: images
images: $(STAMP)  ## Build the container images
	$(BIN)/python containers/build.py

.PHONY: clean
clean:  ## Remove caches, builds and the virtual environment (never results)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info engine/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
