# Every target sets up what it needs: one virtual environment, made again when its inputs change.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS ?= tests
SIZE ?= full
PEERS ?= specdec transformers llama.cpp openvino
PEERS_FLAGS ?=
BENCH_FLAGS ?=
KERNELS ?=
MUTANTS ?=

# PyTorch publishes its CPU build beside PyPI, which has the one for CUDA (several GB). Whoever has
# told pip where to look keeps that; `make TORCH_INDEX= ...` takes PyPI's build, and so does a machine
# from which this cannot be reached.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Nothing here needs a hub; a missing file is then an error at once instead of a time-out.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Tests start many processes: byte code of what they import is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help dev demo test test-rest test-transformers-4 mutants oracles clients pages kernels check fix bench dist clean

help:
	@echo "make demo    a chat model answers, drafted tokens marked, and what drafts gain: three minutes"
	@echo "make test    run the tests (TESTS=tests/core for all of a folder)"
	@echo "make test-rest"
	@echo "             run what make test leaves out: long tests of rare parts, and three quarters"
	@echo "             of the cases of long tables; CI runs both: ten minutes"
	@echo "make test-transformers-4"
	@echo "             the tests that transformers can change, under 4.57: a minute or two"
	@echo "make mutants forty deliberate breaks of specdec, each of which its tests must catch: some"
	@echo "             minutes (MUTANTS='--only kernels' for a part)"
	@echo "make kernels the native kernels by all compilers installed, for ARM, and under the"
	@echo "             sanitizers: half an hour or more (KERNELS='--only sanitizers' for a part)"
	@echo "make oracles real vLLM and llama.cpp, where installed, beside specdec: half an hour"
	@echo "make clients OpenAI's client, agents, evaluations and load generators, each installed by"
	@echo "             pip into .clients, against a server: half an hour, 7 GB of disk"
	@echo "             (CLIENTS='--only openai litellm' for a part)"
	@echo "make pages   the commands on pages that show their output, run again and compared: minutes"
	@echo "make check   lint, format and type checks, as in CI"
	@echo "make fix     fix what the linter and the formatter can"
	@echo "make bench   run the CPU benchmarks, reports in out/bench: hours, 20 GB of memory and"
	@echo "             24 GB of disk at SIZE=full; SIZE=small or pycode for less, PEERS='specdec ...',"
	@echo "             PEERS_FLAGS='--rounds 2 --prompts 2' for fewer turns, BENCH_FLAGS='--only edits'"
	@echo "make dist    build the wheel into dist/"
	@echo "make clean   remove caches and wheels"

dev: $(READY)

# --no-compile and the imports: byte code for the modules in use, instead of for all 15,000 files.
$(READY): pyproject.toml constraints.txt .ci/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	@echo "setting up $(VENV) (once, about half a minute plus the download of torch)" >&2
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo 'error: this Python has no venv and ensurepip modules, so $(VENV) cannot be made' >&2; \
		echo 'hint: on Debian and Ubuntu: apt install python3-venv; or with uv: uv venv --seed $(VENV)' >&2; \
		exit 1; fi
	@$(BIN)/python .ci/install_torch.py '$(TORCH_INDEX)' "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[dev]' setuptools
	@$(BIN)/python -c \
		'import click, hypothesis, pytest, torch, yaml, accelerate; from transformers import LlamaForCausalLM, PreTrainedTokenizerFast'
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

# The same on a machine with a GPU; tests/gpu are for one (docs/cuda.md).
RUN_TESTS = $(BIN)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder
test: export CUDA_VISIBLE_DEVICES =
test: $(READY)
	@$(RUN_TESTS) $(if $(filter tests,$(TESTS)),--brief) $(TESTS)

test-rest: export CUDA_VISIBLE_DEVICES =
test-rest: $(READY)
	@$(RUN_TESTS) --rest $(TESTS)

# Installed beside the environment's own packages, and found before them.
TRANSFORMERS_4 := $(VENV)/transformers-4
TESTS_4 ?= tests/core/test_pretrained.py tests/core/test_tokenizer_json.py \
	tests/parity/test_families.py tests/verify tests/train/test_train_methods.py tests/export/test_tokenizers.py

$(TRANSFORMERS_4)/.ready: constraints-transformers4.txt $(READY)
	@rm -rf $(TRANSFORMERS_4)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--target $(TRANSFORMERS_4) -r constraints-transformers4.txt
	@touch $@

test-transformers-4: export PYTHONPATH := $(abspath $(TRANSFORMERS_4))
test-transformers-4: $(TRANSFORMERS_4)/.ready
	@$(BIN)/python -c 'import transformers; assert transformers.__version__[:5] == "4.57."'
	@$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder $(TESTS_4)

mutants: $(READY)
	@$(BIN)/python -u -m tests.mutants $(MUTANTS)

# Their environments lie in .oracles, or where ORACLES says; docs/export.md tells how they are made.
ORACLES ?= .oracles
oracles: $(READY)
	@SPECDEC_ORACLES=$(ORACLES) $(BIN)/python -m pytest -q -s tests/oracles

# Clients that others wrote; the newest versions, where they are not installed yet.
CLIENTS ?=
clients: $(READY)
	@$(BIN)/python -u -m tests.clients --torch-index '$(TORCH_INDEX)' $(CLIENTS)

# The outputs that pages show, of commands on a model that get.py fetches.
pages: $(READY)
	@$(BIN)/python -u -m tests.pages

kernels: $(READY)
	@$(BIN)/python -u -m tests.engine.matrix $(KERNELS)

check: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@PYTHONPATH=. $(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python .ci/write_structure.py --check
	@$(BIN)/python .ci/measure_code.py --check
	@$(BIN)/mypy

fix: $(READY)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(READY)
	@$(BIN)/python benchmarks/run_all.py --size $(SIZE) --peers $(PEERS) --peers-flags='$(PEERS_FLAGS)' \
		$(BENCH_FLAGS)

# Not `python -m build`: here that would run our folder of that name. It needs no $(VENV): pip puts
# setuptools alone into a folder of its own, and removes it.
dist:
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { \
		echo 'error: $(PYTHON) has no pip, which makes the wheel' >&2; \
		echo 'hint: on Debian and Ubuntu: apt install python3-pip' >&2; exit 1; }
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist

# The folder build/ is source and stays; so does out/, which may hold hours of training.
clean:
	rm -rf .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
