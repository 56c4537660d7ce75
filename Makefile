# One command for each thing a person wants to do here. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test explore test-apiserver test-engines e2e e2e-programs e2e-cluster e2e-cluster-stop bench-acceptance bench-policies bench-router bench-index bench-reconcile bench-sim evaluation check fix crds lock clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv with everything the project needs

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: install it, then run make with PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "Python's venv module is missing: install the package python3-venv, then run make again"; exit 1; }
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## run the quickstart on this machine, replay a workload through it, print the SLO table
	$(BIN)/mooncakectl demo -f examples/quickstart.yaml

test: $(STAMP) ## run every test that needs no GPU, no vLLM and no Kubernetes
	$(BIN)/pytest -n 2 --dist loadfile -m "not engines" --ignore tests/engines --ignore tests/integration/operator

explore: $(STAMP) ## property tests with other examples in each run, and more of them
	$(BIN)/pytest -n 2 --hypothesis-profile explore tests/property

test-apiserver: e2e-programs ## run the operator against a real API server, with played nodes (8 minutes)
	$(BIN)/pytest tests/integration/operator

test-engines: $(STAMP) ## run the gateway before real vLLM on CPU (first time: a minute and 2.5 GB in the cache)
	$(BIN)/pytest -m engines tests/engines

e2e: e2e-programs ## run the end-to-end tests on two Kubernetes clusters of their own, or on E2E_KUBECONFIG's
	$(BIN)/python -m pytest e2e $(if $(E2E_KUBECONFIG),,-n 2 --dist loadfile)

e2e-programs: $(STAMP) ## find Kubernetes' programs, or build them into a cache (first time: 20 minutes)
	$(BIN)/python -m e2e.cluster build

e2e-cluster: $(STAMP) ## start that cluster, keep it up, and print what to type
	$(BIN)/python -m e2e.cluster up

e2e-cluster-stop: $(STAMP) ## take it down again
	$(BIN)/python -m e2e.cluster stop

bench-acceptance: $(STAMP) ## 1 000 requests of the paper's trace through the quickstart, six times (15 minutes)
	$(BIN)/python -P benchmarks/acceptance

bench-policies: $(STAMP) ## four policies through the quickstart and through the simulator: the same order (12 minutes)
	$(BIN)/python -P benchmarks/acceptance/policies.py --json benchmarks/simulator/live.json

bench-router: $(STAMP) ## CPU per request beside vllm-router
	$(BIN)/python benchmarks/router

bench-index: $(STAMP) ## measure the prefix index, and Dynamo's indexer beside it
	$(BIN)/python benchmarks/index

bench-reconcile: $(STAMP) ## 1 000 Pods of 50 pools to Ready, beside 50 Deployments (root; a cluster of its own)
	$(BIN)/python benchmarks/reconcile

bench-sim: $(STAMP) ## the simulator against the papers' figures and the goals (needs the published traces; 20 minutes)
	$(BIN)/python -P benchmarks/simulator

evaluation: $(STAMP) ## run bench-sim whole and write docs/evaluation.md from its rows
	-$(BIN)/python -P benchmarks/simulator --only '*' --json benchmarks/simulator/found.json
	$(BIN)/python -P benchmarks/simulator/page.py

check: $(STAMP) ## static checks: lint, format, types, imports, spelling, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell .
	$(BIN)/python -m mooncake_core.api.crds --check crds

fix: $(STAMP) ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

crds: $(STAMP) ## write crds/*.yaml, which the chart brings too, from the pydantic models
	$(BIN)/python -m mooncake_core.api.crds --write crds

lock: $(STAMP) ## resolve requirements.lock again from pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
	  --all-extras --group dev pyproject.toml -o requirements.lock

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
