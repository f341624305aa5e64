# `make demo` and `make test` do all their set-up themselves; both build .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STEPS ?= 200
TESTS ?=
# of `make gpu`: cuda or cpu, minutes, names of slices, the folder for results
DEVICE ?= cuda
MINUTES ?= 29
SLICE ?=
OUT ?=

.PHONY: gpu gpu-pack gpu-land pictures site neighbours page page-tools demo demo-distributed test test-journeys test-wide check lint types fresh docs bench clean setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memfit needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[train,ui,dev]'
	@touch $@

# apart from the rest, whose versions these pins would change; trainers see its torch
NEIGHBOURS := $(VENV)/neighbours
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

neighbours: $(NEIGHBOURS)/.ready  ## the tools whose own code reads exports in the tests

$(NEIGHBOURS)/.ready: $(VENV)/.ready tests/other_trainers/jobs.txt tests/other_trainers/trainers.txt \
    tests/other_trainers/ppo.txt
	rm -rf $(NEIGHBOURS)
	$(PY) -m venv $(NEIGHBOURS)/jobs
	$(NEIGHBOURS)/jobs/bin/python -m pip install --quiet uv
	$(NEIGHBOURS)/jobs/bin/uv pip install --quiet --python $(NEIGHBOURS)/jobs/bin/python \
	  --requirement tests/other_trainers/jobs.txt
	$(PY) -m venv $(NEIGHBOURS)/trainers
	$(PY) $(SITE) > "$$($(NEIGHBOURS)/trainers/bin/python $(SITE))/torch_is_there.pth"
	$(NEIGHBOURS)/trainers/bin/python -c 'import torch, transformers'  # or pip would fetch CUDA's
	DS_BUILD_OPS=0 $(NEIGHBOURS)/trainers/bin/python -m pip install --quiet \
	  --requirement tests/other_trainers/trainers.txt
	$(NEIGHBOURS)/trainers/bin/python -m pip install --quiet --no-deps --target $(NEIGHBOURS)/ppo \
	  --requirement tests/other_trainers/ppo.txt
	@touch $@

demo: setup  ## train a small model from scratch under 1 GiB, then adapt it with LoRA
	$(PY) scripts/demo.py --steps $(STEPS)

demo-distributed: setup  ## the same model from scratch on two processes of this machine
	$(PY) scripts/demo.py --steps $(STEPS) --ranks 2

# with Node and a registry, the page's tests also build it, and judge it with axe-core
ui/node_modules/.package-lock.json: ui/package-lock.json
	@if ! command -v npm > /dev/null; then \
	  echo 'npm is not installed: tests that build the page or judge it with axe-core are skipped'; \
	elif ! npm --prefix ui ci --no-audit --no-fund --loglevel=silent > /dev/null 2>&1; then \
	  echo 'npm could not install what ui/package-lock.json names (`make page-tools` shows why):' \
	    'tests that build the page or judge it with axe-core are skipped'; \
	fi

# without compiled files each of some hundred processes that tests start would compile memfit anew
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest --numprocesses auto --dist worksteal

test: setup  ## what plans, certifies and trains: slow proofs included; of those over all families, some of the settings
	$(PYTEST) -m 'not wide and not journey' $(TESTS)

test-journeys: setup ui/node_modules/.package-lock.json  ## the same of what a user types and reads: commands, screens, the page, documents, exports
	$(PYTEST) -m 'not wide and journey' $(TESTS)

test-wide: setup ui/node_modules/.package-lock.json  ## every test, in all settings of every family, on examples not seen before
	MEMFIT_EXAMPLES=new $(PYTEST)

check: lint types fresh

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) scripts/check_words.py

types: setup
	$(VENV)/bin/mypy

fresh: setup  ## whether what `make docs` writes is what stands there
	$(PY) scripts/generate_docs.py --check

page-tools:  ## what builds the page and what its tests judge it with; needs Node
	npm --prefix ui ci --no-audit --no-fund

page: page-tools  ## build src/memfit/ui/page from ui/
	cd ui && npx tsc --noEmit && node build.mjs

gpu-pack:  ## the wheels that a machine with a GPU and no network may lack, into build/gpu-pack
	$(PYTHON) bench/on_gpu/pack.py

# not after `setup`: where it runs nothing of memfit is installed, and nothing can be
gpu:  ## measure every claim about CUDA on this machine's GPU; DEVICE=cpu rehearses
	@$(PYTHON) bench/on_gpu --device $(DEVICE) --minutes $(MINUTES) $(if $(SLICE),--slice $(SLICE)) \
	  $(if $(OUT),--out $(OUT))

gpu-land: setup  ## FROM=folder: results of `make gpu` to their places; COMMIT=1 commits them
	@test -n '$(FROM)' || { echo 'FROM is not set'; echo 'hint: make gpu-land FROM=results'; exit 2; }
	$(PY) bench/on_gpu/land.py $(FROM) $(if $(COMMIT),--commit)

docs: setup  ## regenerate what is generated
	$(PY) scripts/generate_docs.py

pictures: setup  ## make docs/pictures anew: the page's screens, by the browser tests
	MEMFIT_PICTURES=docs/pictures $(PY) -m pytest tests/ui/test_window.py tests/ui/test_other_screens.py

site: build/site-venv/.ready  ## the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict

build/site-venv/.ready: pyproject.toml
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/pip install --quiet --editable '.[site]'
	@touch $@

clean:
	rm -rf $(VENV) runs/demo
