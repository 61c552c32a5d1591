# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# Where there is no CUDA device the CPU build of torch goes in first, so that nobody downloads a CUDA build by accident.
# Without its dependencies, which come with kitfox's: only one package is asked of the extra index, which may be away.
TORCH_CPU := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup serve test check format clean

setup: $(VENV)/.ready
serve: setup
	$(BIN)/kitfox serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.ready-dev check
	$(BIN)/kitfox pull $(MODEL)
	$(BIN)/pytest

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then \
	  $(BIN)/pip install -q 'torch>=2.9,<3'; \
	else \
	  $(BIN)/pip install -q --no-deps --retries 1 --timeout 10 --extra-index-url $(TORCH_CPU_INDEX) $(TORCH_CPU)+cpu \
	  || $(BIN)/pip install -q $(TORCH_CPU); \
	fi
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e '.[fast-http]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready pyproject.toml
	$(BIN)/pip install -q -e '.[fast-http,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
