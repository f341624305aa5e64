# `make demo` and `make test` do all their set-up themselves; both build .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STEPS ?= 200

.PHONY: page page-tools demo demo-distributed test test-wide check lint types docs bench clean setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memfit needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[train,ui,dev]'
	@touch $@

demo: setup  ## train a small model from scratch under 1 GiB, then adapt it with LoRA
	$(PY) scripts/demo.py --steps $(STEPS)

demo-distributed: setup  ## the same model from scratch on two processes of this machine
	$(PY) scripts/demo.py --steps $(STEPS) --ranks 2

# with Node, the page's tests also build it, and judge it with axe-core
ui/node_modules/.package-lock.json: ui/package-lock.json
	@command -v npm > /dev/null && $(MAKE) page-tools || \
	  echo 'no npm, or no registry: the page is not built anew, nor judged with axe-core'

test: setup ui/node_modules/.package-lock.json  ## every test, slow proofs included; of those over all families, some of the settings
	$(PY) -m pytest --numprocesses auto --dist worksteal -m 'not wide'

test-wide: setup  ## every test, in all settings of every family
	$(PY) -m pytest --numprocesses auto --dist worksteal

check: lint types

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

page-tools:  ## what builds the page and what its tests judge it with; needs Node
	npm --prefix ui ci --no-audit --no-fund

page: page-tools  ## build src/memfit/ui/page from ui/
	cd ui && npx tsc --noEmit && node build.mjs

docs: setup  ## regenerate what is generated
	$(PY) scripts/generate_docs.py

clean:
	rm -rf $(VENV) runs/demo
