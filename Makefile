# The project's commands. Needs Python 3.11 or later with venv and headers, gcc, g++ and make
# (Debian: python3-venv python3-dev gcc g++ make). Everything is installed into .venv.
#
#   make demo     train under a budget and print the comparison (ARGS="--help" for its options);
#                 installs only what this needs
#   make test     all tests but the slow ones, on every core (ARGS="tests/unit -x" for some)
#   make test-fast  those of the files that cost little
#   make test-slow  the slow ones
#   make check    format, lint, types, floors, static analysis, C tests under sanitisers
#   make format   rewrite the sources in the house format
#   make bench    every benchmark, one after the other
#   make gpu      prove and measure on an NVIDIA GPU, without .venv: benchmarks/gpu/README.md
#   make setup    what the others do first: .venv, dependencies, native core
#   make clean    remove everything that was built; .venv too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt
# Made when the project runs, demo included; when tests and checks run, too.
READY_DEMO := $(VENV)/.ready-demo
READY := $(VENV)/.ready
ARGS ?=
# Of the test targets: how many processes share the tests out, file by file.
WORKERS ?= $(shell nproc)
# Of `make gpu`: the interpreter, the folder of results, the parts (none: all), a folder of wheels.
GPU_PYTHON ?= python3
OUT ?= build/gpu
PARTS ?=
WHEELS ?=

NATIVE := swapkit/_native
C_SOURCES := $(sort $(shell find $(NATIVE)/src -name '*.c'))
C_HEADERS := $(sort $(shell find $(NATIVE) -name '*.h'))
SHIM_TESTS := $(patsubst %,tests/unit/_runtime/test_%.py,adoption following following_deviations following_memory following_recompute groups hooks marking mover packer repeating swapper swapper_storages) \
	tests/unit/_runtime/recompute/test_recipes.py
SHIM_SOURCES := $(sort $(wildcard swapkit/_runtime/cpp/*.cpp))
FORMATTED := $(C_SOURCES) $(C_HEADERS) $(SHIM_SOURCES) \
	$(sort $(wildcard tests/c/*.[ch] tests/cuda/*/*.[ch] tests/cuda/*/*.[ch]pp swapkit/_runtime/cpp/*.hpp))
C_FLAGS := -std=c11 -D_GNU_SOURCE -I$(NATIVE)/include -I$(NATIVE)/src
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=loadscope --no-loadscope-reorder
# Runs a command for every C source, as many at a time as there are cores; {} is the source.
EACH_C_SOURCE := printf '%s\n' $(C_SOURCES) | xargs -P $$(nproc) -I {}

export PIP_DISABLE_PIP_VERSION_CHECK := 1
MAKEFLAGS += --no-print-directory

.PHONY: setup demo test test-fast test-slow check check-python check-c check-sanitisers format bench gpu clean

setup: $(READY)
	@:

$(READY_DEMO): pyproject.toml setup.py build_native.py constraints.txt $(C_SOURCES) $(C_HEADERS)
	@echo "setup: $(VENV)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) setuptools cffi
	@$(PIP_INSTALL) --no-build-isolation -e '.[demo]'
	@$(BIN)/python -m swapkit build >/dev/null
	@touch $@

# The extra's packages alone: with the project it would compile the native core once more.
$(READY): $(READY_DEMO)
	@echo "setup: what tests and checks need"
	@$(BIN)/python -c 'import pathlib, tomllib; project = tomllib.loads(pathlib.Path("pyproject.toml") \
		.read_text())["project"]; print(*project["optional-dependencies"]["dev"], sep="\n")' >$(VENV)/dev.txt
	@$(PIP_INSTALL) -r $(VENV)/dev.txt
	@touch $@

demo: $(READY_DEMO)
	@$(BIN)/python -m swapkit demo $(ARGS)

test: setup
	@$(PYTEST) $(ARGS)

test-fast: setup
	@$(PYTEST) --fast $(ARGS)

test-slow: setup
	@$(PYTEST) -m slow $(ARGS)

check: check-python check-c check-sanitisers

check-python: setup
	@echo "check: format, lint, types, floors, stub"
	@$(BIN)/ruff format -q --check
	@$(BIN)/ruff check -q
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >$(VENV)/floors.log || { cat $(VENV)/floors.log; exit 1; }
	@$(BIN)/python -m tools.check_includes
	@$(BIN)/python -m tools.generate_stub --check

check-c: setup
	@echo "check: clang-format, gcc -fanalyzer, clang-tidy"
	@$(BIN)/clang-format --dry-run -Werror --ferror-limit=1 $(FORMATTED)
	@$(EACH_C_SOURCE) gcc $(C_FLAGS) -O2 -Wall -Wextra -Werror -fanalyzer -c {} -o /dev/null
	@$(EACH_C_SOURCE) gcc $(C_FLAGS) -O1 -DSK_DEBUG -Wall -Wextra -Werror -c {} -o /dev/null
	@g++ -std=c++20 -O2 -Wall -Wextra -Wno-missing-field-initializers -Werror -shared -fPIC -o /dev/null \
		-I$(NATIVE)/include $$($(BIN)/python -m tools.shim_includes) $(SHIM_SOURCES)
	@$(EACH_C_SOURCE) $(BIN)/clang-tidy --quiet {} -- $(C_FLAGS)

check-sanitisers: setup
	@echo "check: C tests on the CPU and on simulated CUDA, plain and under three sanitisers"
	@set -e; for device in cpu cuda; do for variant in test asan tsan; do \
		$(MAKE) -s -C tests/c DEVICE=$$device $$variant; done; done
	@echo "check: the simulated CUDA driver, likewise"
	@$(MAKE) -s -C tests/cuda all-tests
	@echo "check: the shim under address and undefined behaviour sanitisers"
	@CXX="g++ -g -fsanitize=address,undefined" XDG_CACHE_HOME=$(CURDIR)/build/asan \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 PYTHONMALLOC=malloc \
		$(BIN)/python -m pytest -q -p no:cacheprovider $(SHIM_TESTS)

format: setup
	@$(BIN)/ruff format -q
	@$(BIN)/clang-format -i $(FORMATTED)

bench: setup
	@set -e; for file in benchmarks/[!_]*.py; do echo "== $$file"; $(BIN)/python $$file; done

gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --output "$(OUT)" --parts "$(PARTS)" --wheels "$(WHEELS)" $(ARGS)

clean:
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find swapkit tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	@rm -rf $(NATIVE)/_lib*.so $(VENV)
