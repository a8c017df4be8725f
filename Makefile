# swarm-ft, by hand and in CI. `make` alone lists what there is.
#
#   PYTHON   what makes the virtual environment: make demo PYTHON=python3.12
#   SAMPLE   what CI runs of a long suite, where there is such a part: make test-slow SAMPLE=1
#   ARGS     handed on to what a target runs: make demo ARGS="--stages 2 --epochs 5"
#
# pip heeds its own variables, PIP_EXTRA_INDEX_URL among them: an index of CPU-only torch builds
# spares gigabytes of CUDA where the default index has no such build.

PYTHON ?= python3
ARGS ?=
COMPOSE ?= $(shell command -v docker-compose || echo docker compose)

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What has another hash than it had when it was tried is refused.
PIP_INSTALL_LOCKED := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes
LOCKED_TOOLS := deploy/locked.txt deploy/locked-client.txt deploy/locked-tools.txt
INPUTS := pyproject.toml constraints.txt $(LOCKED_TOOLS)
# Stamps: touched once an installation is complete, and older than INPUTS when it is to be redone.
PACKAGE := $(VENV)/.package-installed
TOOLS := $(VENV)/.tools-installed
DOCS := $(VENV)/.docs-installed

.DELETE_ON_ERROR:
.PHONY: help demo install test test-pure test-rest test-codecs test-benchmarks test-slow homes families faults hostile sim gpu check format proto reference docs compose clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 17

demo: $(PACKAGE) ## train a small model with a whole swarm on this machine
	$(BIN)/swarm-ft demo $(ARGS)

install: $(PACKAGE) ## make .venv with the package in it

# Wherever it is switched off: tests start many processes, and not each should compile everything.
test test-pure test-rest test-codecs test-benchmarks test-slow homes families: export PYTHONDONTWRITEBYTECODE :=

# Twice as many workers as CI has cores: a third of a worker's time is waits for time limits and disks.
PYTEST_PARALLEL := $(BIN)/python -m pytest -q -n 4 --dist each -o console_output_style=classic -p tests.parts --weights
FIRST := not (slow or thorough or codecs or benchmarks)

test: $(TOOLS) ## run the tests of every change
	$(PYTEST_PARALLEL) tests/weights/test.json -m "$(FIRST)" $(ARGS)

test-pure: $(TOOLS) ## run the tests that need no torch, in less than a minute
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -p tests.pure -m "$(FIRST)" $(ARGS)

test-rest: $(TOOLS) ## run more cases of the tests of `make test`, its long tests, and all codecs
	$(PYTEST_PARALLEL) tests/weights/rest.json -m "(thorough or codecs) and not (slow or benchmarks)" $(ARGS)

test-codecs: $(TOOLS) ## run all tests of codecs and their kernels: every spec, and Triton's interpreter
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" tests/unit/codec tests/conformance $(ARGS)

test-benchmarks: $(TOOLS) ## run the tests of benchmarks
	$(BIN)/python -m pytest -q -m "not slow" tests/unit/benchmarks $(ARGS)

test-slow: $(TOOLS) ## run the tests that start whole swarms of processes; SAMPLE=1: without variants
	$(BIN)/python -m pytest -q -m "slow and not families and not homes$(if $(SAMPLE), and not variant)" $(ARGS)

homes: $(TOOLS) ## let swarms of processes train behind home routers and over relays (root, Linux)
	$(BIN)/python -m pytest -q -m homes $(ARGS)

families: $(TOOLS) ## train every family of decoders in stages, beside the whole model
	$(BIN)/python -m pytest -q -m families --timeout 300 $(ARGS)

faults: $(TOOLS) ## kill, freeze and cut off real processes in every phase; half an hour
	$(BIN)/python -m tests.fault_matrix $(ARGS)

hostile: $(TOOLS) ## attack swarms in every way that is known, beside honest runs; 10 minutes
	$(BIN)/python -m tests.hostile $(ARGS)

sim: $(PACKAGE) ## run 2,000 simulated swarms with faults drawn from their seeds
	$(BIN)/python -m tests.simulation --seeds 2000 $(ARGS)

gpu: ## tell all that a GPU can tell, on PYTHON as it is: nothing is installed; ARGS="--part codec", ARGS="--rehearse"
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(ARGS)

check: $(TOOLS) ## check form, prose, types (of documents' Python too), imports and generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m deploy.prose_style
	$(BIN)/mypy
	$(BIN)/python -m deploy.documented_python
	$(BIN)/lint-imports --no-logo
	PYTHON=$(BIN)/python deploy/generate_proto.sh --check

format: $(TOOLS) ## bring the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(TOOLS) ## generate swarm_ft/proto from proto/
	PYTHON=$(BIN)/python deploy/generate_proto.sh

reference: $(PACKAGE) ## write the options' table in docs/reference, and keywords of programs, from the declarations
	$(BIN)/python -m deploy.option_reference
	$(BIN)/python -m deploy.call_keywords

docs: $(DOCS) reference ## build the docs site into build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

compose: ## train with the swarm of docker-compose.yml
	$(COMPOSE) up --build --exit-code-from client

clean: ## remove .venv, caches and build outputs; trained models stay
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find swarm_ft tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer is needed; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv $@

$(PACKAGE): $(INPUTS) | $(VENV)
	$(PIP_INSTALL_LOCKED) -r deploy/locked.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(TOOLS): $(INPUTS) | $(VENV)
	$(PIP_INSTALL_LOCKED) $(addprefix -r ,$(LOCKED_TOOLS))
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(PACKAGE) $@

$(DOCS): deploy/locked-docs.txt $(TOOLS)
	$(PIP_INSTALL_LOCKED) -r deploy/locked-docs.txt
	@touch $@
