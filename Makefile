PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-gpu ops-test check bench chaos overload soak flower secrets stack fuzz clean

FLOWER_ADDRESS ?= 127.0.0.1
FLOWER_PORT ?= 5555

$(VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.venv: $(VENV)/.made

# Less than the tests need, so that a first look does not wait for all of that.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m examples.demo

test: $(VENV)/.made
	$(BIN)/python -m pytest -n 4 --dist loadfile --cov=producer --cov=workers --cov-report=term:skip-covered --cov-fail-under=90

test-gpu: $(VENV)/.made
	$(BIN)/python -m pytest -v tests/gpu

ops-test: $(VENV)/.made
	$(BIN)/python -m pytest -v tests/ops tests/test_deployment.py

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
overload: $(VENV)/.made
	$(BIN)/python -m benchmarks.overload --json benchmarks-overload.json

SOAK_SECONDS ?= 600
soak: $(VENV)/.made
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS) --json benchmarks-soak.json

# Guided by coverage where atheris (the extra `fuzz`) is installed; FUZZ_SECONDS=3600 for longer.
FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.made
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --json fuzz.json

flower: $(VENV)/.made
	$(BIN)/celery -A workers.app flower --conf=configs/flowerconfig.py \
		--address=$(FLOWER_ADDRESS) --port=$(FLOWER_PORT)

secrets: $(VENV)/.made
	$(BIN)/python -m examples.make_secrets

stack: $(VENV)/.made
	$(BIN)/python -m examples.stack

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* demo-output
