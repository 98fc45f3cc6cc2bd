# `make bench` measures this machine, and `make test` tests the project.
# Both first install the pinned versions into .venv, with the GPU extra if there is a GPU.

PYTHON ?= python3
BIN := .venv/bin
EXTRAS := dev,cluster,models$(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo ,gpu)
# A process for each core, four at most; on a GPU machine six processes share the GPU.
WORKERS ?= $(if $(findstring gpu,$(EXTRAS)),6,auto)
PYTEST := $(BIN)/pytest --numprocesses=$(WORKERS) --maxprocesses=$(if $(findstring gpu,$(EXTRAS)),6,4) --dist=worksteal

# Without this, Python would take our folders for installed packages of the same names.
export PYTHONSAFEPATH := 1
# Images of containers often set this; tests start many processes, and each would compile every file.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench test test-all browser compiled site api picture lint types clean
.DEFAULT_GOAL := bench

bench: .venv/installed
	$(BIN)/sparsebench run quick

test: .venv/installed
	@echo "$$(date +%H:%M): about 7 minutes on two idle cores"
	$(PYTEST) -m "not exhaustive and not browser"

# Also run the exhaustive tests, of which `make test` has a sample, and those in a browser, if there is one.
test-all: .venv/installed
	@echo "$$(date +%H:%M): about 13 minutes on two idle cores"
	$(PYTEST)

# Compile every kernel that tests/compiling/record.txt does not know, and write that record.
compiled: .venv/installed
	@echo "$$(date +%H:%M): about 30 minutes on two idle cores if every kernel changed"
	$(BIN)/pytest --numprocesses=auto --dist=worksteal -m compiles --record

# Write the site of the published runs: minutes at first, then only what changed. BASE_URL is its address.
SITE := site
site: .venv/installed
	@echo "$$(date +%H:%M): writing $(SITE)/; about 3 minutes at first"
	@$(BIN)/sparsebench publish $(dir $(wildcard results/published/*/*/run.json results/published/*/earlier/*/*/run.json)) --out $(SITE) $(addprefix --files ,$(wildcard results/published/training/*.json results/published/whole/*.json)) $(if $(BASE_URL),--base-url $(BASE_URL))

# Write the API reference from the docstrings, beside the site.
INSIDE := harness reports results kernels suites vllm
api: .venv/installed
	$(BIN)/python -m pdoc --no-show-source --output-directory $(SITE)/api sparsebench $(foreach name,$(INSIDE),'!sparsebench.$(name)')

# Take the picture of the site's first page, results/published/site.png.
picture: site
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,640 --screenshot=results/published/site.png file://$(abspath $(SITE))/index.html

# Test reports and a site in Chromium; fails without Chromium.
browser: .venv/browser
	$(PYTEST) tests/browser --browser-required

.venv/browser: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[browser]'
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy -p sparsebench -p sparsebench_authors

.venv/installed: pyproject.toml authors/pyproject.toml constraints.txt
	@echo "$$(date +%H:%M): installing into .venv; the download of torch takes minutes"
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	# Python compiles what it imports; pip would compile 17,000 files for 40 s.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]' --editable ./authors
	touch $@

clean:
	rm -rf .venv build
