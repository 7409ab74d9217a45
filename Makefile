# make demo    set up, fetch a small model, answer one prompt with and without a memory budget
# make test    set up, run every test
# make check   format, lint, types, import floors (the pre-commit hook runs this)

PYTHON      ?= python3
VENV        ?= .venv
DEMO_TOKENS ?= 48

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet

.PHONY: demo test check bench format clean
.NOTPARALLEL:

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py --tokens $(DEMO_TOKENS)

test: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest -m "not bench"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest -m bench -s

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) models .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# A stamp for each thing that is installed: a second call does nothing.

$(VENV)/.pip: .ci/venv
	.ci/venv $(VENV) $(PYTHON)
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml
	$(PIP) --editable ".[server,ray,vulkan]" --group dev
	@touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml
	$(PIP) --editable ".[demo]"
	@touch $@
