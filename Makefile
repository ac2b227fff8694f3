# Most targets first create a virtual environment with the versions in constraints.txt.
#   make bench       measure the throughput of a ViT on a real image; writes a table and a plot
#   make test        run the fast tests: two to nine minutes on two idle cores (GPU tests are skipped without a GPU)
#   make test-full   run all tests; make test-changed: only those that the changed folders require
#   make test-oldest test the oldest supported versions: compile, export, launches, public API, a tenth of the rest
#   make test-newest the same with the newest versions that pip finds, and each kernel on the PTX emulator
#   make test PYTHON=python3.12 VENV=.venv-3.12
#                    run the fast tests with another version of Python
#   make gpu-check   check and measure a CUDA machine, offline; OUT=folder for the records

PYTHON  ?= python3
VENV    ?= .venv
PINS    ?= constraints.txt
EXTRAS  ?= export,interop,train,predict,dev
BIN     := $(VENV)/bin
JOBS    ?= auto
# Print only errors of pip.
PIP     := $(BIN)/python -m pip install --disable-pip-version-check -qq -c $(PINS) $(PIP_ARGS)
SOURCES := vit_fast kernels export benchmarks tests
READY   := $(VENV)/.ready

.PHONY: bench test test-full test-changed test-gpu-lines test-execute test-oldest test-newest lint format typecheck docs classes kernels verify gpu-check bench-suite record wheel clean

bench: $(READY)
	@$(BIN)/vit-fast bench $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15 $(ARGS)

test-full: $(READY)
	@$(PIP) --no-build-isolation -e '.[libraries]'
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15 --slow $(ARGS)
	$(MAKE) test-gpu-lines
	$(MAKE) test-execute
	$(MAKE) test-oldest
	$(MAKE) test-newest

# Run after `make test`: the parts of test-full for folders that differ from main; see the table in tests/changed.py.
test-changed: $(READY)
	JOBS=$(JOBS) $(BIN)/python tests/changed.py $(ARGS)

# Lists the lines about GPUs that no test executes; see tests/cuda_lines.py. The slow tests are those that execute
# other lines than the fast tests do.
COVERED := OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal
test-gpu-lines: $(READY)
	$(BIN)/coverage erase
	$(COVERED) $(ARGS)
	$(COVERED) --only-slow tests/test_on_gpus.py tests/test_warm_up.py $(ARGS)
	$(BIN)/python tests/cuda_lines.py

# Runs the kernel tests on the PTX emulator. Each architecture runs the cases of `make test` and a part of the other
# cases; together, the architectures run all. SEED changes the parts and the random schedules.
# ARGS=--slow runs all cases on every architecture.
ARCHS ?= sm_80 sm_86 sm_89 sm_90 sm_120
SEED  ?= 1
test-execute: $(READY)
	set -e; for arch in $(ARCHS); do \
	  $(BIN)/python tests/execute.py $$arch --share -n $(JOBS) --dist worksteal --seed $(SEED) $(ARGS); \
	done

# Tests the oldest versions that pyproject.toml allows, in a separate environment.
test-oldest test-newest: EXTRAS := export,interop,train,predict,test
test-oldest:
	$(MAKE) test VENV=.venv-oldest PINS=constraints-oldest.txt EXTRAS=$(EXTRAS) 'ARGS=--versions $(ARGS)'

# Tests the newest versions that pip finds, in a separate environment, which each run updates.
test-newest:
	rm -f .venv-newest/.ready
	$(MAKE) test test-execute VENV=.venv-newest PINS=constraints-tools.txt EXTRAS=$(EXTRAS) ARCHS=sm_90 \
		'PIP_ARGS=--upgrade --upgrade-strategy eager $(PIP_ARGS)' 'ARGS=--versions $(ARGS)'

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

typecheck: $(READY)
	$(BIN)/mypy -p vit_fast

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

kernels: $(READY)
	$(BIN)/vit-fast kernels $(ARGS)

verify: $(READY)
	$(BIN)/vit-fast verify $(ARGS)

# Measures the README's table on this kind of CPU. Fails and changes nothing if the machine was busy.
NEW := vit-fast-results/new-record
record: $(READY)
	rm -rf $(NEW)
	$(BIN)/vit-fast bench --seconds 6 --out $(NEW) $(ARGS)
	folder=benchmarks/results/$$($(BIN)/python docs/make_tables.py --check $(NEW)) && mkdir -p $$folder && \
		mv $(NEW)/record.json $(NEW)/table.md $(NEW)/plot.png $$folder
	$(BIN)/python docs/make_tables.py --fill README.md

# Uses the system's Python and its packages, and downloads nothing. OUT is the folder for the records.
OUT ?= vit-fast-results/gpu-check
gpu-check:
	$(PYTHON) -m vit_fast.benchmarks.gpu_check --out $(OUT) $(if $(PARTS),--parts $(PARTS)) $(ARGS)

bench-suite: $(READY)
	$(BIN)/python -m pytest benchmarks/suite.py -o addopts=--import-mode=importlib $(ARGS)

classes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python docs/make_classes.py > docs/classes.md

wheel: $(READY)
	$(BIN)/python -m build --wheel --sdist --no-isolation

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Install torch first, so that packages that depend on it do not choose another build.
$(READY): pyproject.toml $(PINS) constraints-tools.txt tests/torchvision_cpu.py
	@echo "set-up: virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up: torch (hundreds of megabytes; pins: $(PINS))"
	@$(PIP) torch setuptools wheel
	@echo "set-up: vit-fast and its peers ($(EXTRAS))"
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@$(BIN)/python tests/torchvision_cpu.py --install
	@touch $@
