# Two commands: `make demo` and `make test`. Everything they need is set up in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# A file's tests stay in one process (tests/support/sharing.py). Fast ones compute, slow ones wait
# for other processes half of the time: three of those keep two cores busy.
BESIDE := --dist loadfile --no-loadscope-reorder
READY  := $(VENV)/.ready

# Hundreds of processes start: each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test fast lint format nccl bench setup clean help

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,examples,hf]'
	touch $@

setup: $(READY) ## make .venv with the pinned versions

demo: $(READY) ## train a byte-level GPT on Python's standard library with 2 workers
	$(BIN)/rayzero run examples/gpt/job.yaml

lint: $(READY) ## formatter, linter, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fast: $(READY) ## the tests that start no cluster
	$(PYTEST) -n 2 $(BESIDE) -m "not slow and not alone"

test: lint fast ## everything: lint, fast tests, slow ones, those that nothing may run beside
	$(PYTEST) -n 3 $(BESIDE) -m "slow and not alone"
	$(PYTEST) -m alone

nccl: $(READY) ## the fault suites once more, on a device and a process group that behave as NCCL's
	$(PYTEST) --nccl-like -n 2 $(BESIDE) tests/workers $(addprefix tests/integration/,test_jobs.py \
		test_job_life.py test_job_commands.py test_jobs_on_nodes.py test_chaos.py) tests/benchmarks/test_soak.py
	$(BIN)/python -m benchmarks.nccl_faults --schedules 100
	$(BIN)/python -m benchmarks.soak --nccl-like --faults 50 --seed 1

bench: $(READY) ## step time against DDP and FSDP2
	$(BIN)/python -m benchmarks.step_time

clean: ## remove what was built and downloaded
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
