# Every target sets up what it needs in .venv, from a bare clone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# What serving needs and no more: a first `make serve` downloads no test tools.
RUNTIME := .venv/.runtime
# Ray and NIXL, for the tests of several engines only: half a minute, 600 MB on the disk.
WITH_CLUSTER := .venv/.cluster
# Tests start hundreds of processes: without cached bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install serve wheel test test-pages test-cluster test-slow test-flaky lint format bench mutants clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[dev]'
	touch $@ $(RUNTIME)

$(RUNTIME): pyproject.toml constraints.txt
	@echo "Setting up .venv: a minute or two, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -e .
	@touch $@

# Of NIXL one build is enough: the extra takes those of all versions of CUDA.
$(WITH_CLUSTER): $(READY)
	$(PIP) -e '.[dev,ray]'
	$(PIP) --no-deps nixl nixl-cu12
	touch $@

# Options: make serve ARGS="--port 9000"
serve: $(RUNTIME)
	@$(BIN)/paceline serve $(ARGS)

# The sdist and the wheel, in dist/. `pip install dist/*.whl` works without a clone.
wheel:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) hatchling
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# One file after the other in each of several processes. Options: make test ARGS="tests/server -n 0"
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PYTEST) --ignore tests/pages $(ARGS)

# The pages in a browser, which is downloaded if there is none.
test-pages: $(READY)
	$(PYTEST) tests/pages $(ARGS)

# Engines of several processes: replicas with the default model, and behind Ray Serve. No other file is read: each
# process would import all tests for a few of them. One of them: make test-cluster FILES=tests/parallel
test-cluster: FILES ?= $(shell grep -rl --include='test_*.py' 'mark\.cluster' tests)
test-cluster: $(WITH_CLUSTER)
	$(PYTEST) -m cluster $(FILES) $(ARGS)

# On several cores: make test-slow ARGS="-n auto"
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

# The tests with processes, threads and browsers, several times beside a CPU load: none may depend on being scheduled
# in time. RUNS=1 for a first look.
RUNS ?= 10
test-flaky: $(READY)
	$(BIN)/python -m tests.under_load $(RUNS) tests/server tests/engine tests/pages -n auto --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/paceline bench scheduler

mutants: $(READY)
	$(BIN)/python tests/mutants.py

clean:
	rm -rf .venv build dist *.egg-info
