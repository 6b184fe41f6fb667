# make bench   install and run the main job: every data-parallel strategy beside torch's
# make test    install, lint, run all tests (gloo ranks and interpreted Triton; GPU tests skip without a GPU)
# make quick   lint, and the tests nearest to what was changed: within a minute
# make tables  redraw the tables of README.md and docs/ from records/
# make costs   the tests again, and their seconds into tests/costs.json, from which make quick chooses
# make nightly hours: 2,000 random models, all mutations, kills, layouts, kernels compiled, commands of pages, site (-k: go on)
# make docs    the documentation site, in site/ (mkdocs: an optional extra)
# make size    lines, tokens per code line, comments and wide lines of each package
.PHONY: docs tables size install bench test costs quick test-gpu test-commands lint clean nightly fuzz mutations kills layouts compiled
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if test -t 1; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python -m pip install $$quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)" && \
	$(BIN)/python -m pip install $$quiet -c constraints.txt -e '.[test]'
	touch $@

bench: install
	$(BIN)/python launch/ddp_bench.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

test: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations 10 -m "not commands" $(ARGS)

costs: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --costs tests/costs.json -m "not commands"

quick: install
	$(BIN)/python -m tests.quick $(ARGS)

test-commands: install
	$(BIN)/python -m pytest -m commands $(ARGS)

test-gpu: install
	$(BIN)/python -m tests.gpu $(ARGS)

nightly: fuzz mutations kills layouts compiled test-commands docs

fuzz: install
	$(BIN)/python -m tests.fuzz --seeds 2000 --ranks 2 3

mutations: install
	$(BIN)/python -m tests.mutations

kills: install
	$(BIN)/python -m pytest tests/checkpoint -k sigkill --kill-points 200
	$(BIN)/python -m tests.kill_runs --moments 50

layouts: install
	$(BIN)/python -m pytest tests/parallel/test_pipeline.py -k all_axes --all-layouts

compiled: install
	$(BIN)/python -m tests.kernels.compiled --check

tables: install
	$(BIN)/distlab tables
	$(BIN)/python docs/drawings.py

docs: install
	$(BIN)/python -c "import mkdocs, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

size:
	$(PYTHON) -m tests.size

clean:
	rm -rf $(VENV) build dist *.egg-info outputs site .pytest_cache .ruff_cache
