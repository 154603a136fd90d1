# The verbs of this project. `make help` lists them. Each sets up .venv first, which is silent when nothing is to do.

PYTHON ?= python3
ARGS ?=
# a worker a core, few of them: each one imports torch
PARALLEL := -n logical --maxprocesses 4 --dist loadfile
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-unit test-model test-e2e test-chaos check lint format-check types imports architecture proto proto-check \
        k8s-check k8s-tools image image-test docs format bench clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Arguments go into ARGS, for example: make serve ARGS="--replicas 1", make test-unit ARGS="-k scheduler"'

setup: ## make .venv and install what pyproject.toml and constraints.txt say
	@$(PYTHON) tools/bootstrap.py

# exec: the server takes the shell's place, so that make hands SIGTERM to it and not to a shell that would orphan it
serve: setup ## start Ray, serve the embedded model on two replicas, stay in the foreground
	@exec $(BIN)/orca-serve up $(ARGS)

test: setup ## run the tests: unit, then the embedded model, then end to end (test-chaos apart)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/e2e -m "not e2e and not model" $(PARALLEL) $(ARGS)
	$(BIN)/python -m pytest -m "model and not e2e" $(ARGS)
	$(BIN)/python -m pytest -m "e2e and not chaos" $(ARGS)

test-unit: setup ## run the tests that start no server and load no real model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/e2e -m "not e2e and not model" $(PARALLEL) $(ARGS)

test-model: setup ## run the tests of the engine on the embedded model
	$(BIN)/python -m pytest -m "model and not e2e" $(ARGS)

test-e2e: setup ## run the tests that start Ray
	$(BIN)/python -m pytest -m "e2e and not chaos" $(ARGS)

test-chaos: setup ## kill, freeze and overload a service of several replicas (ORCA_CHAOS=full: for longer)
	$(BIN)/python -m pytest -m chaos $(ARGS)

check: lint format-check types imports architecture proto-check k8s-check ## everything that reads the code without running it

lint: setup ## ruff: style, docstrings, likely bugs
	$(BIN)/ruff check .

format-check: setup ## fail where `make format` would change a file
	$(BIN)/ruff format --check .

types: setup ## mypy --strict on both packages
	$(BIN)/mypy

imports: setup ## import-linter: the layers, and who may import what
	$(BIN)/lint-imports --no-cache

architecture: setup ## the project's own rules (tests/test_architecture.py, tests/test_packaging.py)
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_packaging.py

proto: setup ## regenerate deployment/pb from proto/
	$(BIN)/python tools/generate_proto.py

proto-check: setup ## fail where deployment/pb is not what proto/ gives
	$(BIN)/python tools/generate_proto.py --check

k8s-check: setup ## render every overlay of k8s/, or ARGS="FOLDER", and say what is wrong and what was skipped; ARGS=--strict
	PYTHONPATH=tools $(BIN)/python -m k8s_check $(ARGS)

k8s-tools: setup ## install what k8s-check is better with: kubectl and Kubernetes' schemas, 40 MB
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r k8s/requirements.txt

docs: setup ## regenerate docs/configuration.md from the configuration's code
	$(BIN)/python -m tools.generate_config_docs

image: setup ## build the container image with buildah, docker or podman; ARGS="--for cuda" for GPUs
	PYTHONPATH=tools $(BIN)/python tools/image.py $(ARGS)

image-test: ## run the built image as head and workers, read-only and not as root; needs root and buildah
	tools/image_test.sh $(ARGS)

format: setup ## let ruff rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## iteration-level against request-level scheduling on this machine
	@exec $(BIN)/orca-serve bench offline $(ARGS)

clean: ## remove what was built or cached, .venv included
	rm -rf .venv .venv.lock build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
