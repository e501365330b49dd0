# Everything runs in .venv and sets itself up: a Debian machine with python3.11, g++ and make is enough.
#   make demo    rewrite a real model, run it, compare          make bench   compare with TensorFlow and XLA
#   make test    the test suite                                 make lint    ruff, mypy, clang-format
#   make results the GPU results' text and plots, from JSON      make clean   remove all that was built
#   make wheel   a wheel in dist/
#   make host    a server without Python, build/host/           make load    100,000 requests to it, answers checked
#   make sanitize the op's runtime under sanitizers             make fuzz    libFuzzer on damaged programs (30 minutes)
#   make serving-sources DEST=CHECKOUT    puts the op into a TensorFlow Serving checkout
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
PYTEST_ARGS ?=
TEST_JOBS ?= 2

BIN := .venv/bin
STAMPS := .venv/stamps
CXX_FILES := $(wildcard custom_ops/*.cc custom_ops/*.h custom_ops/*/*.cc custom_ops/*/*.h tests/*/*.cc tests/*/*.h)  # the headers of codegen/include are tables
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# In the install too: with other flags everything would be compiled again.
export TF_STITCH_WERROR := 1

.PHONY: demo test lint format bench results wheel build clean host load serving-sources sanitize fuzz

demo: $(STAMPS)/models build
	$(BIN)/python -m models.demo

test: $(STAMPS)/test $(STAMPS)/models build host
	$(BIN)/python -m pytest -n $(TEST_JOBS) $(PYTEST_ARGS)

bench: $(STAMPS)/models build
	$(BIN)/python -m models.bench

results: $(STAMPS)/models build
	$(BIN)/python -m models.report models/results/h200.json

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(STAMPS)/lint
	$(BIN)/clang-format -i $(CXX_FILES)

# The op library: setup.py compiles only what changed.
build: $(STAMPS)/base
	@$(BIN)/python setup.py -q build_ext --inplace

# The op as a static archive, linked into a server that loads any rewritten SavedModel.
host: $(STAMPS)/base
	@$(BIN)/python setup.py -q build_host

load: $(STAMPS)/models build host
	$(BIN)/python -m models.load

# The op's own runtime (parser, planner, CPU and GPU runtimes) under address, undefined and thread sanitizers.
sanitize: $(STAMPS)/test build
	$(BIN)/python -m pytest tests/op/test_fuzz.py tests/op/test_sanitize.py tests/op/test_replay.py \
	  tests/op/test_scheduler.py $(PYTEST_ARGS)

fuzz: $(STAMPS)/test build
	$(BIN)/python -m tests.op.fuzz

serving-sources:
	@$(PYTHON) custom_ops/serving_sources.py "$(DEST)"

wheel: $(STAMPS)/base
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

# Stamps: each set of requirements is installed once, and again when pyproject.toml changed.
$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "No Python found: install python3.11 (and python3.11-venv)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: tf_stitch needs Python 3.11 or later."; exit 1; }
	@$(PYTHON) -m venv .venv 2>/dev/null \
	  || { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip -q --python .venv/bin/python install pip; } \
	  || { echo "Making .venv failed: on Debian, apt-get install python3.11-venv."; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# The editable install builds the op library too.
$(STAMPS)/base: $(STAMPS)/venv pyproject.toml setup.py
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install -q "tensorflow~=2.21.0"
	$(BIN)/python -m pip install -q --no-build-isolation -e .
	@touch $@

$(STAMPS)/%: $(STAMPS)/base
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[$*]"
	@touch $@

clean:
	rm -rf build dist tf_stitch.egg-info tf_stitch/_ops.so tf_stitch/_ops.json .pytest_cache .mypy_cache .ruff_cache
	find tf_stitch tests models -name __pycache__ -type d -prune -exec rm -rf {} +
