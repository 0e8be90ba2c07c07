PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-gpu check bench chaos clean

$(VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.venv: $(VENV)/.made

demo: $(VENV)/.made
	$(BIN)/python -m examples.demo

test: $(VENV)/.made
	$(BIN)/python -m pytest --cov=producer --cov=workers --cov-report=term:skip-covered --cov-fail-under=90

test-gpu: $(VENV)/.made
	$(BIN)/python -m pytest -v tests/gpu

check: $(VENV)/.made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.made
	$(BIN)/python -m benchmarks.overhead --json benchmarks-overhead.json
	$(BIN)/python -m benchmarks.efficiency --json benchmarks-efficiency.json

chaos: $(VENV)/.made
	$(BIN)/python -m benchmarks.chaos --json chaos.json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* demo-output
