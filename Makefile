# Everything here works on a fresh clone with Python 3.11+ and make; PIP_ARGS goes through to pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
PIP_ARGS ?=
# Three processes of tests, as some tests wait; each takes over tests of the others when it has no more of its own.
PYTEST_ARGS ?= --numprocesses 3 --dist worksteal
CAN_BUILD = $(shell test "$$(id -u)" = 0 && which buildah debootstrap > /dev/null && echo yes)
# The tests start hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all check protos images clean

install: $(STAMP)
	scripts/link-types

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	touch $@

# Packages that no other target needs, and that bring many others.
$(CLIENTS): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[clients,ray]'
	touch $@

demo: $(STAMP)
	$(BIN)/slipstream demo

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not gpu and not slow' --sampled --slowest 10 $(PYTEST_ARGS)

# Pods of the tests run in the images where these can be built. Where that fails the tests run all the same.
test-all: $(CLIENTS)
	@built=; failed=; \
	if [ -z '$(CAN_BUILD)' ]; then echo 'images: not built, that needs root, buildah and debootstrap'; \
	elif scripts/build-images; then built=1; else failed=1; fi; \
	POD_IMAGES=$$built $(BIN)/python -m pytest -m 'not gpu' --slowest 10 $(PYTEST_ARGS) && [ -z "$$failed" ]

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	scripts/check-stubs $(BIN)/python
	scripts/check-protos $(BIN)/python
	$(BIN)/python scripts/check_imports.py
	$(BIN)/mypy build/types/slipstream/* scripts/*.py
	MYPYPATH=examples/numpy_drafter $(BIN)/mypy examples/numpy_drafter/*.py
	MYPYPATH=examples/cuda_drafter:examples/numpy_drafter $(BIN)/mypy examples/cuda_drafter/*.py
	$(BIN)/mypy examples/adapt_draft.py
	$(BIN)/python scripts/audit_packages.py

protos: $(STAMP)
	scripts/make-stubs $(BIN)/python protos

# As root on Debian, with buildah and debootstrap.
images:
	scripts/build-images

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
