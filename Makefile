# make demo   set up .venv and run the main job: train, grow, train on (about 4 minutes on 2 cores)
# make test   set up .venv and run the tests (under 10 minutes on 2 cores)
# make help   everything else

PYTHON ?= python3
BIN := .venv/bin
# The version of the sdist whose model tests `make test-hf` runs is the installed one.
HF_VERSION = $(shell $(BIN)/python -c "import importlib.metadata as m; print(m.version('transformers'))")
HF_SUITE = .cache/hf/transformers-$(HF_VERSION)

.PHONY: demo test test-slow test-cpu test-versions test-hf test-integrations test-serving docs test-docs bench experiment lint types format help clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-17s %s\n", $$1, $$2}'

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

demo: .venv/installed ## train a small model, grow it twice, train on; a table, a sample of text, a report
	$(BIN)/tokenformer train recipes/demo.yaml
	$(BIN)/tokenformer report runs/demo
	$(BIN)/tokenformer generate runs/demo/stage-3/model "def test_" --temperature 0.6 --max-new-tokens 200 --seed 0

test: .venv/installed ## the tests
	$(BIN)/python -m pytest -n auto

test-slow: .venv/installed ## the tests that do more of the same: kills, streams, processes (about 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n auto -m slow

test-cpu: .venv/installed ## the numeric tests as other makes of CPU would compute them (about 15 minutes on 2 cores)
	$(BIN)/python tests/every_cpu.py

test-versions: ## the tests with the oldest and the newest packages, and the wheel alone (about 40 minutes on 2 cores)
	$(PYTHON) tests/every_version.py

test-hf: .venv/installed ## transformers' own model tests over ours (about 4 minutes on 2 cores)
	@test -d $(HF_SUITE) || { \
		rm -rf .cache/hf/new && \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers \
			-d .cache/hf/new transformers==$(HF_VERSION) && \
		tar -xzf .cache/hf/new/transformers-$(HF_VERSION).tar.gz -C .cache/hf/new transformers-$(HF_VERSION)/tests && \
		touch .cache/hf/new/transformers-$(HF_VERSION)/tests/__init__.py && \
		mv .cache/hf/new/transformers-$(HF_VERSION) $(HF_SUITE) && \
		rm -rf .cache/hf/new; }
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests_hf -q -n 2 --no-fold-skipped

# An environment of its own, so that what these packages bring does not change what `make test` sees.
.cache/integrations/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .cache/integrations
	.cache/integrations/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,integrations]"
	@touch $@

test-integrations: .cache/integrations/installed ## trl, torchao, bitsandbytes, quanto and docs/integrations.md
	.cache/integrations/bin/python -m pytest tests/integrations

test-serving: .venv/installed ## the server under load: 16 clients, 500 requests, two kills (about 3 minutes on 2 cores)
	$(BIN)/python -m pytest tests/load

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: .venv/installed-docs ## the documentation site, in build/docs/site
	$(BIN)/python docs/build.py

test-docs: .venv/installed-docs ## the site and the other pages in a real browser, and the notebook (about three minutes on 2 cores)
	@command -v chromium >/dev/null || { echo "chromium is missing: apt-get install chromium"; exit 1; }
	$(BIN)/python -m pytest -m docs tests/test_docs_site.py tests/test_notebook.py tests/test_serving_page.py tests/test_inspect_page.py

bench: .venv/installed ## speed and memory against their targets (under 30 minutes on 2 cores)
	$(BIN)/python benchmarks/run_all.py

experiment: .venv/installed ## make an experiment again: make experiment NAME=progressive_scaling (hours; resumes)
	$(BIN)/python experiments/run.py $(NAME)

lint: .venv/installed ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed ## mypy on src/
	$(BIN)/mypy

format: .venv/installed ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and every cache
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
