# Every target creates the environment it needs: .venv, or .venv-oldest for the oldest supported transformers.

# 3.11 or newer, for the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
INSTALL := -m pip install -q --disable-pip-version-check
# Two pytest processes with one thread each: small tensors gain nothing from more threads a process.
PYTEST_OPTIONS ?= -n 2
# What depends on transformers; the operators do not.
OLDEST_TESTS ?= tests/modeling tests/test_training.py tests/test_cli.py tests/test_bad_input.py tests/test_packaging.py tests/test_export.py tests/test_health.py tests/test_hub.py tests/test_peft.py tests/test_serve.py tests/test_trainer.py tests/test_upcycle.py

.PHONY: setup quickstart test test-oldest conformance conformance-oldest bundles test-gpu lint typecheck bench clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -vE '^(transformers|huggingface-hub)==' constraints.txt > $(OLDEST)/constraints.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(INSTALL) -c $(OLDEST)/constraints.txt -e '.[dev]'
	touch $@

# Threads that wait give their core away: spinning ones slow training many times when anything else runs.
quickstart: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/fwzoo quickstart

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-oldest: $(OLDEST)/installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(PYTEST_OPTIONS) $(OLDEST_TESTS)

# transformers' own model tests on the zoo; fetches its source distribution into ~/.cache/fwzoo.
conformance: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/conformance/run.py $(PYTEST_OPTIONS)

conformance-oldest: $(OLDEST)/installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python tests/conformance/run.py $(PYTEST_OPTIONS)

# The bundle of every architecture in new environments with nothing but torch and transformers, oldest and newest.
bundles: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/fresh_environments.py $(OLDEST_TRANSFORMERS)

test-gpu: setup
	$(BIN)/python -m pytest -v -m "gpu or triton"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/falcon_cpu.py
	$(BIN)/python benchmarks/memory_cpu.py
	$(BIN)/python benchmarks/memory_peak.py

clean:
	rm -rf .venv $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
