# The commands of this repository. They work in an environment of their own, $(VENV), made with
# the first suitable Python; PYTHON=... takes another one.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Processes for the tests that run side by side, and for those that start workers of their own.
WORKERS ?= auto
WORKERS_SLOW ?= 2

.PHONY: help demo test test-fast test-slow mutation lint docs clean

help:
	@echo 'make demo    a run that survives a killed and a paused worker (about a minute)'
	@echo 'make test    all tests; PYTEST_ARGS="-k claim" for some of them'
	@echo 'make mutation  each guard of the SQL taken out: a test must fail (minutes)'
	@echo 'make lint    style, format, types, import layers'
	@echo 'make docs    build the documentation into site/'
	@echo 'make clean   remove everything that these commands made'

# A name on the PATH may be a stub of a version manager that does not run: try each one.
define find_python
for python in python3.14 python3.13 python3.12 python3.11 python3; do \
	if "$$python" -c 'import ensurepip, sqlite3, ssl, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then echo "$$python"; exit 0; fi; \
done; \
echo 'No Python 3.11 or newer with venv was found (Debian: apt install python3-venv).' >&2; exit 1
endef

$(VENV)/pyvenv.cfg:
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$($(find_python))" || exit 1; \
	echo "Creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

# An install is repeated only when pyproject.toml has changed. It is always an editable one, so
# that the demo and the tests share the environment.
$(VENV)/.installed-demo: pyproject.toml $(VENV)/pyvenv.cfg
	@echo 'Installing celery-lease'
	@$(PIP) install --editable '.[testing]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/pyvenv.cfg
	@echo 'Installing celery-lease for development'
	@$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.installed-demo $@

demo: $(VENV)/.installed-demo
	@$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: test-fast test-slow

# pytest's status 5, "no test was selected", is no failure here: PYTEST_ARGS may name tests of
# the other half.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not (integration or acceptance)' $(PYTEST_ARGS) \
		|| [ $$? -eq 5 ]

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS_SLOW) -m 'integration or acceptance' $(PYTEST_ARGS) \
		|| [ $$? -eq 5 ]

mutation: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --timeout 300 tests/mutation

lint: $(VENV)/.installed-dev
	$(BIN)/python -m tox run -e lint,types

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tox run -e docs

clean:
	rm -rf $(VENV) .tox site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find celery_lease examples tests docs -name __pycache__ -prune -exec rm -rf {} +
