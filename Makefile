# The project's commands. Needs Python 3.11 or later with venv and headers, gcc, g++ and make
# (Debian: python3-venv python3-dev gcc g++ make). Everything is installed into .venv.
#
#   make demo     train under a budget and print the comparison (ARGS="--help" for its options);
#                 installs only what this needs
#   make test     the library's tests but the slow ones, on every core (ARGS="tests/unit -x" for some)
#   make test-beside  suites of documents, packages, C, other libraries and more (tests/support/tiers.py: BESIDE)
#   make test-fast  the quick files of the folders FAST
#   make test-slow  the slow ones
#   make check    format, lint, types, floors, static analysis, sanitisers
#   make check-quick  of these format, lint, types, floors and clang-tidy
#   make format   rewrite the sources in the house format
#   make docs     the documentation site, in build/docs; a warning is an error
#   make docs-links  look up the links that leave the site; needs the network
#   make bench    every benchmark, one after the other
#   make gpu      prove and measure on an NVIDIA GPU, without .venv: benchmarks/gpu/README.md
#   make virtual  ways to train, compared on a virtual GPU: benchmarks/virtual/README.md
#   make npu      tests of the real torch_npu on a simulated Ascend NPU, in .venv-npu: tests/npu/README.md
#   make integrations  tests of swapkit/integrations/ with the oldest and the newest versions of each
#                 framework, in .venv-oldest and .venv-newest
#   make newest   the quick tests with the newest release of every dependency, torch included, in
#                 .venv-newest-all (NEWEST_PYTHON=python3.13 for another interpreter)
#   make releases what depends most on torch's private names, with each supported release of torch
#                 (RELEASES="2.10 2.15" for some), in .venv-torch-2.10 and so on
#   make setup    what the others do first: .venv, dependencies, native core
#   make clean    remove everything that was built, and every .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt
# Made when the project runs, demo included; when tests and checks run, too.
READY_DEMO := $(VENV)/.ready-demo
READY := $(VENV)/.ready
READY_DOCS := $(VENV)/.ready-docs
ARGS ?=
# Of `make test-fast`: what needs neither long training nor a compiler.
FAST := tests/unit tests/contract tests/fault tests/golden tests/property
# Of the test targets: how many processes share the tests out, file by file.
WORKERS ?= $(shell nproc)
# Of `make gpu`: the interpreter, the folder of results, the parts (none: all), a folder of wheels.
GPU_PYTHON ?= python3
OUT ?= build/gpu
PARTS ?=
WHEELS ?=

# Of `make npu`: torch_npu needs CANN as soon as torch is imported, so it is not in .venv.
NPU_VENV := .venv-npu
READY_NPU := $(NPU_VENV)/.ready

# Of `make integrations`: the lists of tests/integrations/, and the packages of constraints.txt there.
INTEGRATIONS ?= oldest newest
# Of `make newest`.
NEWEST_VENV := .venv-newest-all
NEWEST_PYTHON ?= $(PYTHON)
# Of `make releases`.
RELEASES ?= 2.10 2.11 2.13 2.14 2.15
PRIVATE := tests/integration/test_compiled_graphs.py tests/integration/test_compiled_sharing.py \
	tests/unit/_runtime/compiled tests/unit/_runtime/torch_compat
empty :=
COMMON = $(subst $(empty) ,|,$(strip $(shell sed '/^\#/d' tests/integrations/common.txt)))

NATIVE := swapkit/_native
C_SOURCES := $(sort $(shell find $(NATIVE)/src -name '*.c'))
C_HEADERS := $(sort $(shell find $(NATIVE) -name '*.h' -o -name '*.hpp'))
# Of tests: a library of its own beside the core.
INSTRUMENTS := $(sort $(wildcard tests/c/instruments/*.[ch]))
# What the sanitisers see of the shim.
SHIM_TESTS := $(sort $(wildcard tests/unit/_runtime/shim/test_*.py)) \
	$(patsubst %,tests/unit/_runtime/%.py,user_choices/test_operators execution/test_plan_executor \
		execution/test_plan_deviations execution/test_plan_memory \
		execution/test_plan_recompute execution/test_planned_recomputation \
		model/test_hook_bypass model/test_listeners process/test_captures saved/test_emptied_storages saved/test_eviction \
		saved/test_existing_graphs saved/test_hooks saved/test_swapper saved/test_swapper_storages saved/test_taken_apart) \
	tests/integration/test_scarce_host.py tests/integration/test_threads.py tests/integration/test_thread_scenes.py \
	$(patsubst %,tests/integration/test_weights%.py,_built _inside _of_parts _order) tests/integration/test_weights.py
SHIM_SOURCES := $(sort $(wildcard swapkit/_runtime/shim/cpp/*/*.cpp))
FORMATTED := $(C_SOURCES) $(C_HEADERS) $(SHIM_SOURCES) $(INSTRUMENTS) \
	$(sort $(wildcard examples/operators/*.[ch] examples/operators/*.[ch]pp examples/operators/*.cu \
		tests/operators/*.[ch]pp tests/c/*.[ch] tests/cuda/*/*.[ch] tests/cuda/*/*.[ch]pp tests/npu/*/*.[ch] \
		tests/npu/*/*.[ch]pp tests/simulated/*/*.hpp swapkit/_runtime/shim/cpp/*/*.hpp))
C_FLAGS := -std=c11 -D_GNU_SOURCE -I$(NATIVE)/include -I$(NATIVE)/src
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=loadscope --no-loadscope-reorder
SHIM_FLAGS = -std=c++20 -I$(NATIVE)/include -Iswapkit/_runtime/shim/cpp $$($(BIN)/python -m tools.shim_includes)
# Run a command for every source, as many at a time as there are cores; {} is the source.
EACH_C_SOURCE := printf '%s\n' $(C_SOURCES) | xargs -P $$(nproc) -I {}
EACH_SHIM_SOURCE := printf '%s\n' $(SHIM_SOURCES) | xargs -P $$(nproc) -I {}
comma := ,
# The shim with assertions and a sanitiser; the compiler itself is run without one.
SANITISED = SWAPKIT_DEBUG=1 XDG_CACHE_HOME=$(CURDIR)/build/$(1)
BUILD_SANITISED = CXX="g++ -g -fsanitize=$(2)" $(SANITISED) \
	$(BIN)/python -c "from swapkit._runtime.shim import build; build.build_shim()"
# An extra's packages, without the project.
INSTALL_EXTRA = $(BIN)/python -c 'import pathlib, tomllib; project = tomllib.loads(pathlib.Path("pyproject.toml") \
	.read_text())["project"]; print(*project["optional-dependencies"]["$(1)"], sep="\n")' >$(VENV)/$(1).txt \
	&& $(PIP_INSTALL) -r $(VENV)/$(1).txt
# The site's sources are laid out anew each time; Sphinx reads those that changed.
SPHINX = $(BIN)/python -m tools.stage_docs build/docs-source && $(BIN)/python -m sphinx -q -W --keep-going \
	-d build/docs-trees/$(1) -b $(1) $(2) build/docs-source build/$(3) \
	|| { rm -rf build/docs-trees/$(1); exit 1; }
TEST_SANITISED = $(SANITISED) LD_PRELOAD="$$(for name in $(2); do gcc -print-file-name=lib$$name.so; done \
	| xargs)" $(BIN)/python -m pytest -q -p no:cacheprovider $(SHIM_TESTS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
MAKEFLAGS += --no-print-directory

.PHONY: setup demo test test-beside test-fast test-slow check check-quick check-python check-style \
	check-c check-sanitisers check-shim format docs docs-links bench gpu virtual npu integrations \
	newest releases clean

setup: $(READY)
	@:

$(READY_DEMO): pyproject.toml setup.py build_native.py constraints.txt $(C_SOURCES) $(C_HEADERS) $(INSTRUMENTS)
	@echo "setup: $(VENV)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) setuptools cffi
	@$(PIP_INSTALL) --no-build-isolation -e '.[demo]'
	@$(BIN)/python -m swapkit build >/dev/null
	@touch $@

# The extra's packages alone: with the project it would compile the native core once more.
$(READY): $(READY_DEMO)
	@echo "setup: what tests and checks need"
	@$(call INSTALL_EXTRA,dev)
	@touch $@

# `make docs` needs the packages that tutorials use, and those are in dev.
$(READY_DOCS): $(READY)
	@echo "setup: what the documentation needs"
	@$(call INSTALL_EXTRA,docs)
	@touch $@

demo: $(READY_DEMO)
	@$(BIN)/python examples/demo.py $(ARGS)

test: setup
	@$(PYTEST) $(ARGS)

test-fast: setup
	@$(PYTEST) --fast $(FAST) $(ARGS)

test-beside: setup
	@$(PYTEST) --beside $(ARGS)

test-slow: setup
	@$(PYTEST) -m slow $(ARGS)

check: check-quick check-c check-sanitisers check-shim

check-quick: check-python check-style

check-python: setup
	@echo "check: format, lint, types, floors, sizes, stub"
	@$(BIN)/ruff format -q --check
	@$(BIN)/ruff check -q
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >$(VENV)/floors.log || { cat $(VENV)/floors.log; exit 1; }
	@$(BIN)/python -m tools.check_includes
	@$(BIN)/python -m tools.reachable
	@$(BIN)/python -m tools.package_size >$(VENV)/sizes.log || { cat $(VENV)/sizes.log; exit 1; }
	@$(BIN)/python -m tools.generate_stub --check

check-style: setup
	@echo "check: clang-format, clang-tidy"
	@$(BIN)/clang-format --dry-run -Werror --ferror-limit=1 $(FORMATTED)
	@$(EACH_C_SOURCE) $(BIN)/clang-tidy --quiet {} -- $(C_FLAGS)
	@$(EACH_SHIM_SOURCE) $(BIN)/clang-tidy --quiet {} -- $(SHIM_FLAGS)

check-c: setup
	@echo "check: gcc's warnings, with and without assertions, and gcc -fanalyzer"
	@$(EACH_C_SOURCE) gcc $(C_FLAGS) -O2 -Wall -Wextra -Werror -fanalyzer -c {} -o /dev/null
	@$(EACH_C_SOURCE) gcc $(C_FLAGS) -O1 -DSK_DEBUG -Wall -Wextra -Werror -c {} -o /dev/null
	@for debug in "" -DSK_DEBUG; do $(EACH_SHIM_SOURCE) g++ $(SHIM_FLAGS) -O2 $$debug -Wall -Wextra \
		-Wno-missing-field-initializers -Werror -fPIC -c {} -o /dev/null || exit 1; done

check-sanitisers: setup
	@echo "check: C tests on the CPU, on simulated CUDA and NPUs, plain and under three sanitisers"
	@set -e; for device in cpu cuda ascend; do for variant in test asan tsan; do \
		$(MAKE) -s -C tests/c DEVICE=$$device $$variant; done; done
	@echo "check: the simulated CUDA driver and ACL runtime, likewise"
	@$(MAKE) -s -C tests/cuda all-tests
	@$(MAKE) -s -C tests/npu all-tests

# The thread sanitiser sees what the shim does: torch and Python are not built with it, but the locks
# that they take are seen.
check-shim: setup
	@echo "check: the shim with assertions, under address and undefined behaviour sanitisers"
	@$(call BUILD_SANITISED,asan,address$(comma)undefined)
	@ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 PYTHONMALLOC=malloc \
		$(call TEST_SANITISED,asan,asan ubsan)
	@echo "check: the shim with assertions, under the thread sanitiser"
	@$(call BUILD_SANITISED,tsan,thread)
	@TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 suppressions=$(CURDIR)/tests/support/thread_sanitiser.txt" \
		$(call TEST_SANITISED,tsan,tsan)

format: setup
	@$(BIN)/ruff format -q
	@$(BIN)/clang-format -i $(FORMATTED)

docs: $(READY_DOCS)
	@$(call SPHINX,html,,docs)
	@$(BIN)/python -m tools.check_site build/docs

docs-links: $(READY_DOCS)
	@$(call SPHINX,linkcheck,-D plot_gallery=0,docs-links)

bench: setup
	@set -e; for file in benchmarks/[!_]*.py; do echo "== $$file"; $(BIN)/python $$file; done

gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --output "$(OUT)" --parts "$(PARTS)" --wheels "$(WHEELS)" $(ARGS)

# SWAPKIT_CUDA_PYTHON names an interpreter with a torch for CUDA; no GPU is needed.
virtual: setup
	@$(BIN)/python -m benchmarks.virtual $(ARGS)

$(READY_NPU): constraints.txt tests/npu/constraints.txt tests/npu/requirements.txt
	@echo "setup: $(NPU_VENV)"
	@test -x $(NPU_VENV)/bin/pip || $(PYTHON) -m venv --clear $(NPU_VENV)
	@$(NPU_VENV)/bin/python -m pip install -qq -c constraints.txt -c tests/npu/constraints.txt \
		-r tests/npu/requirements.txt
	@touch $@

# The native core is the one of .venv, which was made with the same Python.
npu: setup $(READY_NPU)
	@SWAPKIT_NPU_PYTHON=$(CURDIR)/$(NPU_VENV)/bin/python $(BIN)/python -m pytest -q -n $(WORKERS) \
		--maxprocesses=8 tests/npu $(ARGS)

# The frameworks' versions are those of the list; torch and pytest are those of all tests.
.venv-%/.ready: constraints.txt tests/integrations/%.txt tests/integrations/common.txt
	@echo "setup: .venv-$*"
	@test -x .venv-$*/bin/pip || $(PYTHON) -m venv --clear .venv-$*
	@grep -Ei '^($(COMMON))==' constraints.txt >.venv-$*/constraints.txt
	@.venv-$*/bin/python -m pip install -qq -c .venv-$*/constraints.txt -r tests/integrations/$*.txt
	@touch $@

# The native core is the one of .venv, as for `make npu`.
integrations: setup $(INTEGRATIONS:%=.venv-%/.ready)
	@for list in $(INTEGRATIONS); do echo "integrations: $$list"; .venv-$$list/bin/python -m pytest \
		-q -rfEs -n $(WORKERS) --maxprocesses=8 --dist=loadscope tests/integrations $(ARGS) || exit 1; done

# Upgraded each time. The native core is the one of .venv, which any later Python loads.
newest: setup
	@test -x $(NEWEST_VENV)/bin/pip || $(NEWEST_PYTHON) -m venv --clear $(NEWEST_VENV)
	@$(BIN)/python -c 'import pathlib, tomllib; project = tomllib.loads(pathlib.Path("pyproject.toml") \
		.read_text())["project"]; print(*project["dependencies"], *(each for extra in ("demo", "dev") \
		for each in project["optional-dependencies"][extra]), sep="\n")' >$(NEWEST_VENV)/requirements.txt
	@$(NEWEST_VENV)/bin/python -m pip install -qq --upgrade --upgrade-strategy eager \
		-r $(NEWEST_VENV)/requirements.txt
	@$(NEWEST_VENV)/bin/python -m pip list 2>/dev/null | grep -E '^(torch|numpy|highspy|cffi|click) '
	@$(NEWEST_VENV)/bin/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=loadscope --fast $(FAST) $(ARGS)

releases: setup
	@set -e; for release in $(RELEASES); do folder=.venv-torch-$$release; \
		test -x $$folder/bin/pip || $(PYTHON) -m venv --clear $$folder; \
		grep -Ev '^(torch|setuptools)==' constraints.txt >$$folder/constraints.txt; \
		$$folder/bin/python -m pip install -qq -c $$folder/constraints.txt "torch==$$release.*" \
		$$(sed -En '/^dependencies/,/^\]/s/^ *"([a-z]+)>.*/\1/p' pyproject.toml | grep -v torch) \
		hypothesis expecttest pytest pytest-xdist; \
		$$folder/bin/python -c 'import torch; print("releases: torch", torch.__version__)'; \
		$$folder/bin/python -m pytest -q $(PRIVATE) $(ARGS); done

clean:
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find swapkit tests tools benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	@rm -rf $(NATIVE)/_lib*.so $(NATIVE)/libswapkit.so $(NATIVE)/libswapkit_test.so $(VENV) $(NPU_VENV) .venv-oldest .venv-newest \
		$(NEWEST_VENV) .venv-torch-*
