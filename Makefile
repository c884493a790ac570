# Orchard's commands. Each sets up `.venv` by itself (Python 3.11 or newer and make are all it needs) and is quick once
# that is done: the two stamp files below are redone only when pyproject.toml or constraints.txt change.
#
# Set-up talks on stderr and reads nothing from stdin, so `echo question | make -s chat` prints the answer and only that.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup chat test check bench docs fuzz

BIN := .venv/bin
# By exactly this version and before anything else: so pip takes the CPU build wherever its configuration offers one,
# and the packages that need torch later find it already there.
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
MODEL := smollm2
# Looks first, without a word and without the network; fetches (with a bar, on a terminal) only what is missing or damaged.
GET_MODEL := { $(BIN)/orchard pull $(MODEL) --offline </dev/null >/dev/null 2>&1 || $(BIN)/orchard pull $(MODEL) </dev/null >&2; }
# Two processes of one thread each: the simplest choice for small models on two cores, not a measured one.
WORKERS := 2
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: .venv/.dev ## set up .venv with everything that tests and checks need

chat: .venv/.runtime ## set up, fetch the default model once, and talk to it
	@$(GET_MODEL)
	@$(BIN)/orchard chat

test: .venv/.dev ## run the tests, with the network blocked
	@$(GET_MODEL) || { \
		echo "make test: the default model is not here and could not be fetched, so the tests marked 'real' cannot run." >&2; \
		echo "make test: run '$(BIN)/orchard pull $(MODEL)' where there is a network, then try again." >&2; \
		exit 1; }
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m 'not network' $(ARGS)

check: .venv/.dev ## lint, format, types, import arrows, file sizes, generated pages
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python tools/imports.py
	@$(BIN)/python tools/file_sizes.py
	@$(BIN)/python tools/docs.py --check

bench: .venv/.dev ## run every benchmark; each writes results/bench/<name>.json
	@set -e; for program in bench/*.py; do echo "$$program" >&2; $(BIN)/python "$$program"; done

docs: .venv/.dev ## write the generated pages again: technique cards and the command line
	@$(BIN)/python tools/docs.py

fuzz: .venv/.dev ## the long fuzz runs (a short one is part of make test)
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.weights_fuzz --count 200000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.checkpoint_fuzz --count 20000
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.template_fuzz --count 20000

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

.venv/.dev: .venv/.runtime
	@set -e; exec </dev/null >&2; \
	echo "Adding the tools for tests and checks to .venv …"; \
	$(PIP) -e '.[dev]'; \
	touch $@
