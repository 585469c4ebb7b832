# `make help` lists what there is. Everything Python lives in .venv; PYTHON chooses the interpreter (3.10 to 3.12).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help demo serve perf-analyzer test lint format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.serving  ## Install the server and the client, transcribe demo/clips (or FILES="a.wav b.flac"), stop
	@$(BIN)/python demo/run.py $(FILES)

serve: $(VENV)/.serving  ## Serve model_repository/ on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics) until Ctrl-C
	@$(BIN)/carnelian-serve

test: $(VENV)/.all  ## Install everything and run the tests (ARGS="-k name" for some)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.all  ## Check style, types and shell scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/shellcheck setup/system-packages setup/chart-tools setup/perf-analyzer .ci/run tests/native/run

format: $(VENV)/.all  ## Reformat the Python files
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the virtual environment
	rm -rf $(VENV)

$(BIN)/python:
	@setup/system-packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -U pip

$(VENV)/.serving: $(BIN)/python serving/pyproject.toml client/pyproject.toml
	@setup/system-packages $(BIN)/python
	$(PIP) install -e serving -e 'client[audio,cli]'
	@touch $@

# The engines that the corpus tests speak with are small; the other voices are skipped where they are absent.
# pocketsphinx-testdata has recordings of people, on which the server is compared with offline evaluation.
$(VENV)/.all: $(VENV)/.serving $(VENV)/.charts $(VENV)/.perf-analyzer setup/requirements-dev.txt $(wildcard */pyproject.toml)
	@setup/system-packages $(BIN)/python espeak-ng flite pocketsphinx-testdata || echo "without these, some tests are skipped"
	$(PIP) install -r setup/requirements-dev.txt -e serving -e 'client[audio,cli]' -e 'training[corpora]' -e export -e 'perf[sweep]'
	@touch $@

$(VENV)/.charts: $(BIN)/python setup/chart-tools
	@setup/chart-tools $(BIN)
	@touch $@

perf-analyzer: $(VENV)/.perf-analyzer  ## Install Triton's perf_analyzer, which `carnelian-perf sweep` drives

$(VENV)/.perf-analyzer: $(BIN)/python setup/perf-analyzer
	@setup/perf-analyzer $(BIN)
	@touch $@
