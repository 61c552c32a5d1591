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

KERNEL_SOURCES := CMakeLists.txt $(wildcard csrc/*)

.PHONY: setup serve test check clients sanitize format clean

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

# Compiles the kernels, and says which of them will run.
$(VENV)/.ready: $(VENV)/.torch pyproject.toml $(KERNEL_SOURCES)
	$(BIN)/pip install -q -e '.[fast-http,bench,vision,xgrammar]'
	$(BIN)/python -c 'from kitfox.kernels import library; print("kitfox kernels:", library.describe())'
	touch $@

# Asks for the extra of the kitfox that is installed: to install it once more would be to compile it once more.
$(VENV)/.ready-dev: pyproject.toml | $(VENV)/.ready
	$(BIN)/pip install -q 'kitfox[dev]'
	touch $@

# Other people's clients against the default model: their packages come from PyPI and npm, so it is not part of `make test`.
clients: $(VENV)/.ready-dev
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install -q openai anthropic litellm instructor 'pydantic-ai-slim[openai]' langchain-openai llm
	build/clients/bin/pip install -q aiohttp requests numpy msgspec tqdm pydantic pybase64 ipython
	build/clients/bin/pip install -q 'lm-eval[api]'
	build/clients/bin/pip install -q --no-deps sglang==0.5.23
	mkdir -p build/clients/node
	npm install --silent --prefix build/clients/node openai ai @ai-sdk/openai-compatible zod
	$(BIN)/kitfox pull $(MODEL)
	$(BIN)/pytest -m clients tests/clients

# The kernels' tests over kernels that stop at the first bad address or undefined operation. Python was not built that
# way, so the sanitizer has to be loaded before it; what Python leaks at its end is not ours.
sanitize: $(VENV)/.ready-dev
	rm -rf build/sanitize
	$(BIN)/pip install -q --no-deps --target build/sanitize -C cmake.define.KITFOX_SANITIZE=ON .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -c 'import sys, pytest, kitfox.kernels; \
	  kitfox.kernels.__path__.insert(0, "build/sanitize/kitfox/kernels"); sys.exit(pytest.main(["tests/kernels"]))'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
