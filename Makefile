# Two commands for a newcomer: `make bench` measures this machine, `make test` tests it.
# Both make .venv with the pinned versions first, and take the GPU extra where there is a GPU.

PYTHON ?= python3
BIN := .venv/bin
EXTRAS := dev,cluster,models,parquet$(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo ,gpu)
# Tests share out the cores, four at most; on a GPU machine four processes share the GPU, too.
WORKERS ?= $(if $(findstring gpu,$(EXTRAS)),4,auto)
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --maxprocesses=4 --dist=worksteal

# Python started here must not take our folders for installed packages of the same name.
export PYTHONSAFEPATH := 1

.PHONY: bench test test-all browser compiled site picture lint types clean
.DEFAULT_GOAL := bench

bench: .venv/installed
	$(BIN)/sparsebench run quick

test: .venv/installed
	$(PYTEST) -m "not exhaustive"

# With every configuration of every kernel, which `make test` has a sample of.
test-all: .venv/installed
	$(PYTEST)

# Write tests/compiling/record.txt, the record of what is known to compile; what is in it stays uncompiled.
compiled: .venv/installed
	$(BIN)/pytest --numprocesses=auto --dist=worksteal -m compiles --record

# The site of the published runs: minutes at first, then only what changed. BASE_URL is its address.
SITE := site
site: .venv/installed
	$(BIN)/sparsebench publish $(dir $(wildcard results/published/*/*/run.json)) --out $(SITE) $(addprefix --files ,$(wildcard results/published/training/*.json results/published/whole/*.json)) $(if $(BASE_URL),--base-url $(BASE_URL))

# The picture of the site in README.md.
picture: site
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,640 --screenshot=results/published/site.png file://$(CURDIR)/$(SITE)/index.html

# Reports and a site in a real browser; it fails where there is no Chromium.
browser: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[browser]'
	$(BIN)/pytest tests/browser --browser-required

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy -p sparsebench

.venv/installed: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv build
