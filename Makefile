# One virtual environment for everything; it is rebuilt when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
TP ?= 2

.PHONY: demo test serve check bench gpu-check clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[dev]'
	touch $@

demo: $(VENV)/ready  ## serve the miniature over two ranks, ask it, compare with one rank
	$(BIN)/python -m shardwise demo

test: $(VENV)/ready  ## every test that needs no GPU
	$(BIN)/python -m pytest

serve: $(VENV)/ready  ## serve MODEL (default: the miniature) over TP ranks
	$(BIN)/shardwise serve $(MODEL) --tp $(TP)

check: $(VENV)/ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/ready  ## tokens a second of MODEL at one rank and at TP ranks
	$(BIN)/shardwise bench $(MODEL) --tp 1
	$(BIN)/shardwise bench $(MODEL) --tp $(TP)

clean:
	rm -rf $(VENV) build dist
