# `make help` lists what there is. Everything Python lives in .venv; PYTHON chooses the interpreter (3.10 to 3.12).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # apt-get runs once at a time
.PHONY: help demo serve install chart-tools perf-analyzer kenlm test lint gpu gpu-training gpu-inference gpu-serving format clean venv

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.serving  ## Install the server and the client, transcribe demo/clips (or FILES="a.wav b.flac"), stop
	@$(BIN)/python demo/run.py $(FILES)

serve: $(VENV)/.serving  ## Serve model_repository/ on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics) until Ctrl-C
	@$(BIN)/carnelian-serve

install: $(VENV)/.all  ## Install everything, PyTorch too

# Three files at a time on two cores, for many tests wait for a process that starts; the servers of a file's fixtures are its own.
test: $(VENV)/.all $(VENV)/.charts  ## Install everything and run the tests (ARGS="-k name" for some)
	$(BIN)/python -m pytest -n 3 --dist loadfile --max-worker-restart 0 $(ARGS)

lint: $(VENV)/.all  ## Check style, types and shell scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/shellcheck $$(git grep -lE '^#!.*\b(ba)?sh\b')

gpu: $(VENV)/.all
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "PyTorch must see an NVIDIA GPU for this, but sees none")'

# Batches as published; 16.7 s is what a published batch is padded to at most. Each form in a process of its own, so that
# none finds the memory of the one before. Training and inference take some ten minutes of an H100, but for what is compiled.
GPU_TRAINING := --precisions tf32,fp16,bf16 --duration 16.7 --steps 10 --warm-up 3
gpu-training: gpu  ## Measure training on an NVIDIA GPU: throughput, floors, published rows, Hourglass, into perf/results
	$(BIN)/carnelian-perf training training/configs/quartznet_15x5.yaml $(GPU_TRAINING) --batches 72,144 --out perf/results/quartznet_15x5_training_gpu.json
	$(BIN)/carnelian-perf training training/configs/jasper_10x5dr.yaml $(GPU_TRAINING) --batches 32,64 --out perf/results/jasper_10x5dr_training_gpu.json
	$(BIN)/carnelian-perf hourglass training/configs/wav2vec2_base.yaml --factors 2,3,4,5,6 --batch 5 --duration 15.6 --steps 20 --out perf/results/wav2vec2_base_hourglass_gpu.json
	$(BIN)/carnelian-perf infer training/configs/wav2vec2_base_960h.yaml --set model.hourglass={} --device cuda --precision bf16 --engines eager,graphs --durations 2,6.54,16.7 --batches 1,4,8,16 --threads 8 --published-model wav2vec2_base_hourglass --published-precision bf16 --out perf/results/wav2vec2_base_960h_infer_gpu.json
	$(BIN)/carnelian-perf training training/configs/wav2vec2_base_960h.yaml $(GPU_TRAINING) --batches 8,16 --set model.hourglass={} --out perf/results/wav2vec2_base_960h_training_gpu.json
	$(BIN)/carnelian-perf training training/configs/wav2vec2_base.yaml $(GPU_TRAINING) --batches 8,16 --set model.hourglass={} --out perf/results/wav2vec2_base_training_gpu.json
	$(BIN)/carnelian-perf training training/configs/quartznet_15x5.yaml $(GPU_TRAINING) --batches 72 --set loop.depthwise=pytorch --out perf/results/quartznet_15x5_training_gpu_pytorch.json
	$(BIN)/carnelian-perf training training/configs/quartznet_15x5.yaml $(GPU_TRAINING) --batches 72 --set loop.compile=true --out perf/results/quartznet_15x5_training_gpu_compiled.json
	$(BIN)/carnelian-perf training training/configs/jasper_10x5dr.yaml $(GPU_TRAINING) --batches 64 --set loop.compile=true --out perf/results/jasper_10x5dr_training_gpu_compiled.json

# The published grid. Half precision beside TF32, which it must not be slower than.
GPU_INFERENCE := --device cuda --engines eager,graphs,onnx,tensorrt --durations 2,7,16.7 --batches 1,2,4,8,16 --steps 40 --warm-up 5 --threads 8
gpu-inference: gpu  ## Measure inference without a server on an NVIDIA GPU, beside floors and published rows, into perf/results
	$(BIN)/carnelian-perf infer training/configs/quartznet_15x5.yaml $(GPU_INFERENCE) --precision fp16 --published-model quartznet_15x5 --out perf/results/quartznet_15x5_infer_gpu_fp16.json
	$(BIN)/carnelian-perf infer training/configs/quartznet_15x5.yaml $(GPU_INFERENCE) --precision tf32 --published-model quartznet_15x5 --published-precision tf32 --out perf/results/quartznet_15x5_infer_gpu_tf32.json
	$(BIN)/carnelian-perf infer training/configs/jasper_10x5dr.yaml $(GPU_INFERENCE) --precision fp16 --published-model jasper_10x5dr --out perf/results/jasper_10x5dr_infer_gpu_fp16.json
	$(BIN)/carnelian-perf infer training/configs/jasper_10x5dr.yaml $(GPU_INFERENCE) --precision tf32 --published-model jasper_10x5dr --published-precision tf32 --out perf/results/jasper_10x5dr_infer_gpu_tf32.json

gpu-serving: gpu  ## Measure the server on an NVIDIA GPU, beside published rows, into runs/; needs onnxruntime-gpu
	@$(BIN)/python -c 'import sys, onnxruntime as o; sys.exit(None if "CUDAExecutionProvider" in o.get_available_providers() else "the server must find CUDA in ONNX Runtime, but it is built without: see perf/docs/sweeps.md")'
	$(BIN)/carnelian-perf sweep perf/grids/jasper_10x5dr_gpu.yaml --out runs/jasper_10x5dr_gpu_sweep
	$(BIN)/carnelian-perf report runs/jasper_10x5dr_gpu_sweep --published-model jasper_10x5dr
	$(BIN)/carnelian-perf sweep perf/grids/quartznet_15x5_gpu.yaml --out runs/quartznet_15x5_gpu_sweep
	$(BIN)/carnelian-perf report runs/quartznet_15x5_gpu_sweep --published-model quartznet_15x5

format: $(VENV)/.all  ## Reformat the Python files
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the virtual environment
	rm -rf $(VENV)

# Always run, and order-only for what is installed: an interpreter that the system has updated is no reason to install again.
venv:
	@setup/venv $(VENV) $(PYTHON) $(if $(filter command,$(origin PYTHON)),asked)

$(VENV)/.serving: serving/pyproject.toml client/pyproject.toml | venv
	@setup/system-packages $(BIN)/python
	$(PIP) install -e serving -e 'client[audio,cli,live]'
	@touch $@

# A corpus can be made with what is here: WordNet's sentences and two small speech engines. Tests skip voices that are absent.
# pocketsphinx-testdata has recordings of people, on which the server is compared with offline evaluation.
$(VENV)/.all: $(VENV)/.serving $(VENV)/.perf-analyzer setup/requirements-dev.txt $(wildcard */pyproject.toml) | $(VENV)/.kenlm
	@setup/system-packages $(BIN)/python espeak-ng flite wordnet-base pocketsphinx-testdata || echo "without these, some tests are skipped"
	$(PIP) install -r setup/requirements-dev.txt -e serving -e 'client[audio,cli,live]' -e 'training[corpora]' -e 'export[tensorrt]' -e 'perf[locust,memory,sweep,words]'
	@touch $@

chart-tools: $(VENV)/.charts  ## Install Helm and Prometheus, with which the chart is tested

$(VENV)/.charts: setup/chart-tools | venv
	@setup/chart-tools $(BIN)
	@touch $@

perf-analyzer: $(VENV)/.perf-analyzer  ## Install Triton's perf_analyzer, which `carnelian-perf sweep` drives

$(VENV)/.perf-analyzer: setup/perf-analyzer | venv
	@setup/perf-analyzer $(BIN)
	@touch $@

kenlm: $(VENV)/.kenlm  ## Build KenLM's programs, which `carnelian-train ngram` drives

$(VENV)/.kenlm: setup/kenlm | venv
	@setup/kenlm $(BIN) && touch $@ || echo "without KenLM's programs, some tests are skipped"
