# Orchard's commands. Each sets up `.venv` by itself (Python 3.11 or newer and make are all it needs) and is quick once
# that is done: the stamp files below are redone only when pyproject.toml, constraints.txt or the native kernels change.
#
# Set-up talks on stderr and reads nothing from stdin, so `echo question | make -s chat` prints the answer and only that.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup chat test long check bench docs fuzz

BIN := .venv/bin
# By exactly this version and before anything else: so pip takes the CPU build wherever its configuration offers one,
# and the packages that need torch later find it already there.
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
# Compiles what changed. Without a compiler, or with one that fails, it says so in one line and everything runs on torch.
NATIVE := $(wildcard orchard/ops/kernels/native/*.cpp orchard/ops/kernels/native/*.h)
BUILD_NATIVE := $(BIN)/python setup.py -q build_ext --inplace </dev/null >&2
MODEL := smollm2
# Looks first, without a word and without the network; fetches (with a bar, on a terminal) only what is missing or damaged.
GET_MODEL := { $(BIN)/orchard pull $(MODEL) --offline </dev/null >/dev/null 2>&1 || $(BIN)/orchard pull $(MODEL) </dev/null >&2; }
# A process of one thread for each core, and two at least: many tests wait for processes of their own.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 2 ] && echo $$n || echo 2)
# What the engine is compared with, in an environment of its own: none of it is a dependency of Orchard.
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt
LLAMA := llama-cpp-python==0.3.36
KVPRESS := kvpress==0.5.5
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: .venv/.dev ## set up .venv with everything that tests and checks need, and build the native kernels
	@$(BUILD_NATIVE)
	@touch .venv/.native

chat: .venv/.native ## set up, fetch the default model once, and talk to it
	@$(GET_MODEL)
	@$(BIN)/orchard chat

# A smaller one that makes vectors. Its tests skip without it, so a machine that cannot get it still passes.
GET_VECTORS := { $(BIN)/orchard pull minilm --offline </dev/null >/dev/null 2>&1 || $(BIN)/orchard pull minilm </dev/null >&2 || true; }

test: .venv/.dev .venv/.native ## run the tests, with the network blocked
	@$(GET_MODEL) || { \
		echo "make test: the default model is not here and could not be fetched, so the tests marked 'real' cannot run." >&2; \
		echo "make test: run '$(BIN)/orchard pull $(MODEL)' where there is a network, then try again." >&2; \
		exit 1; }
	@$(GET_VECTORS)
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not network and not long' $(ARGS)

long: .venv/.dev .venv/.native ## run the tests that make test leaves out because they take long
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(ARGS)

check: .venv/.dev ## lint, format, types, import arrows, file sizes, generated pages
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python tools/imports.py
	@$(BIN)/python tools/file_sizes.py
	@$(BIN)/python tools/docs.py --check

bench: .venv/.dev .venv/.native $(PEERS)/.ready ## run every benchmark, beside the peers; each writes results/bench/<name>.json
	@$(GET_MODEL)
	@failed=; for program in $$(ls bench/*.py | grep -v -e draft -e _peer -e ondevice); do echo "$$program" >&2; $(BIN)/python "$$program" || failed="$$failed $$program"; done; \
	$(BIN)/orchard bench engine --model $(MODEL) --save $(ARGS) || failed="$$failed engine"; \
	$(BIN)/orchard bench memory $(MODEL) --save || failed="$$failed memory"; \
	$(MAKE) -s $(PEERS)/kvpress/.ready || echo "make bench: kvpress could not be installed here" >&2; \
	$(BIN)/python bench/memory_peer.py --model $(MODEL) --save || failed="$$failed memory_peer"; \
	[ -z "$$failed" ] || { echo "make bench: claims failed, or it could not run here:$$failed" >&2; exit 1; }

docs: .venv/.dev ## write the generated pages again: technique cards and the command line
	@$(BIN)/python tools/docs.py

fuzz: .venv/.dev .venv/.native ## the long fuzz runs (a short one is part of make test)
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.weights_fuzz --count 200000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.checkpoint_fuzz --count 20000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.compressed_fuzz --count 20000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.template_fuzz --count 20000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.serve_fuzz --count 20000

# A stamp is written last, so an interrupted set-up is taken up again the next time.
.venv/.runtime: pyproject.toml constraints.txt
	@set -e; exec </dev/null >&2; \
	enough='import sys; sys.exit(sys.version_info < (3, 11))'; \
	python=; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
		if "$$candidate" -c "$$enough" 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "Orchard needs Python 3.11 or newer, and none was found; install one, or name it: make PYTHON=/path/to/python"; \
		exit 1; \
	fi; \
	echo "Setting up .venv (once, a few minutes) …"; \
	if ! $(BIN)/python -c "import pip; $$enough" 2>/dev/null; then \
		"$$python" -m venv --clear .venv || { \
			echo "could not create .venv with $$python; on Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
	fi; \
	$(PIP) $(TORCH); \
	$(PIP) -e .; \
	touch $@

# The installation has built them once already, but said nothing of a failure: pip keeps that to itself.
.venv/.native: .venv/.runtime setup.py $(NATIVE)
	@$(BUILD_NATIVE)
	@touch $@

.venv/.dev: .venv/.runtime
	@set -e; exec </dev/null >&2; \
	echo "Adding the tools for tests and checks to .venv …"; \
	$(PIP) -e '.[dev]'; \
	touch $@

# g++ 12 builds a llama.cpp that dies on AMX (it loses the tile configuration); clang builds one that uses it. So clang, where
# there is one, is the fair choice.
$(PEERS)/.ready: constraints.txt | .venv/.runtime
	@set -e; exec </dev/null >&2; \
	echo "Setting up $(PEERS) with llama.cpp and transformers (once, some minutes) …"; \
	$(BIN)/python -m venv $(PEERS); \
	$(PEERS_PIP) $(TORCH); \
	$(PEERS_PIP) transformers accelerate gguf numpy peft; \
	$(PEERS_PIP) fastapi uvicorn sse-starlette starlette-context pydantic-settings PyYAML; \
	clang=; \
	for version in -16 -17 -18 -19 -20 -21 "" -15 -14; do \
		if command -v "clang$$version" >/dev/null && command -v "clang++$$version" >/dev/null; then clang="$$version "; break; fi; \
	done; \
	if [ -n "$$clang" ]; then \
		version="$${clang% }"; \
		CC="clang$$version" CXX="clang++$$version" CMAKE_ARGS=-DGGML_NATIVE=ON \
			$(PEERS_PIP) --no-cache-dir --no-binary llama-cpp-python $(LLAMA); \
	else \
		echo "No clang here: llama.cpp may come without AMX (apt install clang-16 libomp-16-dev, then remove $(PEERS))"; \
		$(PEERS_PIP) $(LLAMA); \
	fi; \
	touch $@

# Asks for an older transformers than the other peers have, so it has an environment inside theirs.
$(PEERS)/kvpress/.ready: | $(PEERS)/.ready
	@set -e; exec </dev/null >&2; \
	echo "Setting up $(PEERS)/kvpress (once, some minutes) …"; \
	$(BIN)/python -m venv $(PEERS)/kvpress; \
	$(PEERS)/kvpress/bin/python -m pip --disable-pip-version-check install -qq $(TORCH); \
	$(PEERS)/kvpress/bin/python -m pip --disable-pip-version-check install -qq $(KVPRESS); \
	touch $@
