# Everything here sets itself up: a virtual environment in .venv, made once and checked in a moment after that.

PYTHON ?= python3
BIN := .venv/bin
# Options for the command behind a target: make demo ARGS="--format mxfp4", make test ARGS="-k formats"
ARGS ?=
# pytest workers
WORKERS ?= 2
# The example's matrices are small and pytest has workers: more threads would only wait for each other.
export OMP_NUM_THREADS ?= 1

# The set-up leaves byte code to the first import; where nothing may be written, every run would compile it anew.
unexport PYTHONDONTWRITEBYTECODE
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format bench bench-all tables wheel hooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: setup-demo ## write text with the trained model in examples/, through warp decode
	@$(BIN)/warpring generate $(ARGS)

test: lint ## style, types, and every test; GPU tests where a GPU is
	@$(BIN)/python -m pytest -q -n $(WORKERS) --timeout 300 $(ARGS)

test-gpu: setup-test-gpu ## only the tests that need a GPU
	@$(BIN)/python -m pytest -q -m "gpu or multi_gpu" --timeout 300 $(ARGS)

lint: setup-test ## style and types only
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: setup-test ## rewrite the sources to the style
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

bench: setup-test ## measure the rows of README's table on this GPU, into bench/results
	@$(BIN)/python bench/decode.py $(ARGS)

bench-all: setup-test ## measure every figure of docs/ on this GPU, step by step; a second call goes on
	@PYTHON=$(BIN)/python bash bench/gpu_session.sh $(ARGS)

tables: setup-test ## write tables, plots, crossovers and the simulation's constants from bench/results
	@$(BIN)/python -m warpring.bench.ep_calibration
	@$(BIN)/python -m warpring.bench.tables
	@$(BIN)/python -m warpring.bench.crossovers
	@$(BIN)/python bench/plots.py

wheel: setup-test ## build dist/warpring-*.whl
	@$(BIN)/python -m pip wheel . --no-deps --no-build-isolation --quiet -w dist
	@ls dist

hooks: setup-hooks ## run the linters before each commit
	@$(BIN)/python -m pre_commit install

clean: ## remove .venv and everything built
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup-%:
	@$(PYTHON) scripts/setup_env.py $*
