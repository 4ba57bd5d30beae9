# Everything runs in .venv-X.Y, made on demand from PYTHON and PyPI. `make help` lists the targets.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
RUN := $(VENV)/bin/python -m
PYTEST = $(RUN) pytest -n $(WORKERS) --dist loadfile

.PHONY: help serve test test-slow test-all test-tpu-aot tpu-aot lint clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve      runs the HTTP server; ARGS="--help" lists its options'
	@echo 'make test       runs the tests not marked slow; ARGS="-k NAME" picks some'
	@echo 'make test-slow  runs the tests marked slow'
	@echo 'make test-all   runs both'
	@echo 'make test-tpu-aot  compiles for TPU topologies by the real compiler; needs no TPU'
	@echo 'make lint       runs ruff'
	@echo 'make clean      removes the virtual environments and the caches'
	@echo 'PYTHON=python3.12 picks the interpreter, WORKERS=1 the number of test processes.'

serve: $(VENV)/.installed-serve
	$(RUN) dspark_jax.serve $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) --timeout 300 -m 'not slow' $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) --timeout 1800 -m slow $(ARGS)

test-all: $(VENV)/.installed-dev
	$(PYTEST) --timeout 1800 $(ARGS)

# In an environment of its own: with libtpu installed, JAX looks for a TPU unless it is told not to.
test-tpu-aot:
	@$(MAKE) --no-print-directory VENV=$(subst .venv-,.venv-tpu-,$(VENV)) tpu-aot

# The compiler is the libtpu that this JAX asks for; where it cannot be had, nothing is tested.
tpu-aot: $(VENV)/.installed-dev
	@if $(RUN) pip --disable-pip-version-check install -qq \
		"jax[tpu]==$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"; then \
		JAX_PLATFORMS=cpu $(RUN) pytest -n $(WORKERS) --timeout 840 -m tpu_aot $(ARGS) tests/kernels; \
	else \
		echo 'test-tpu-aot skipped: no libtpu for this JAX, Python and machine could be installed.'; \
	fi

lint: $(VENV)/.installed-dev
	$(RUN) ruff check .

clean:
	rm -rf .venv-[0-9]* .venv-tpu-[0-9]* .cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An install is redone when pyproject.toml is newer than its stamp. dev includes serve.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	@echo 'Installing dspark-jax[$*] into $(VENV); the first time takes a minute or more.'
	@$(RUN) pip --disable-pip-version-check install -qq -e '.[$*]'
	@touch $(if $(filter dev,$*),$(VENV)/.installed-serve) $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'dspark-jax needs Python 3.11 or newer; set PYTHON, as in PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
