# SPDX-License-Identifier: Apache-2.0
# Everything a developer runs on a box without a GPU. On a GPU box: pip install ".[cuda]".

PYTHON ?= python3
# Used only where pip's own configuration does not find a CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready

# A server that starts leaves a core idle half of the time. Each file stays in one process, which starts
# its servers once.
PARALLEL := -n 2 --dist loadfile

# The releases of Triton that the tensor-core lowering is made for.
TRITON := $(patsubst %,build/triton/%/triton/__init__.py,3.6.0 3.7.1 3.8.0 3.9.0)

.PHONY: help setup demo test test-all lint counter-checks preflight preflight-all triton-matrix clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(READY) ## make .venv with upstream's CPU build and this project, editable

$(READY): pyproject.toml tools/setup_cpu.sh $(wildcard tools/*_cpu_*/*.*)
	@PYTHON=$(PYTHON) TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) bash tools/setup_cpu.sh $(VENV)
	@touch $@

demo: setup ## serve the small model as a Turing box would, without and with speculation
	@$(BIN)/python tools/demo.py

test: setup ## the whole test suite, and the counter-checks
	$(BIN)/python -m pytest -q $(PARALLEL)
	$(BIN)/python tools/counter_checks.py

test-all: setup ## the suite with everything that is marked slow
	$(BIN)/python -m pytest -q $(PARALLEL) -m 'not gpu and not triton_matrix'

lint: setup ## every check of .pre-commit-config.yaml
	@PATH=$(BIN):$$PATH $(BIN)/pre-commit run --all-files

counter-checks: setup ## revert each fix alone: exactly the tests that hold it must fail
	$(BIN)/python tools/counter_checks.py

preflight: setup ## compile the launched kernels for sm_70 and sm_75 and compare with the table
	$(BIN)/vllm-pre-ampere preflight --check

preflight-all: setup ## the same for every model and every configuration
	$(BIN)/vllm-pre-ampere preflight --check --all

triton-matrix: setup $(TRITON) ## the tests of the Triton lowering, with each release that it is made for
	$(BIN)/python -m pytest -q -m triton_matrix

build/triton/%/triton/__init__.py: | setup
	$(BIN)/python -m pip install --quiet --no-deps --target build/triton/$* triton==$*

clean: ## remove what setup and the demo made
	rm -rf $(VENV) build *.egg-info tools/*/*.egg-info
