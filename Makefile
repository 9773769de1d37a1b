# Every target sets up what it needs in .venv, from a bare clone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: install test test-slow lint format bench mutants clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 3600

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
