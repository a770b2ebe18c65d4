# make setup | demo | test | conformance | chaos | kills | lint | types | bench | bench-demo | exact | clean
.PHONY: setup demo test conformance chaos kills lint types bench bench-demo bench-combinations exact clean
PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
# Two processes at a time, whole files each: what a file's tests share is made once.
TEST_WORKERS ?= 2
ENDS ?= oldest newest
BIN := .venv/bin
# Written last by scripts/setup.sh; named after what it installed, so that new pins set up again.
STAMP := .venv/.setup-$(shell cat constraints.txt pyproject.toml scripts/setup.sh | cksum | cut -d' ' -f1)

setup: $(STAMP)

$(STAMP):
	PYTHON="$(PYTHON)" STAMP="$@" bash scripts/setup.sh

demo: $(STAMP)
	$(BIN)/spangrad demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 $(TEST_ARGS)

conformance: $(STAMP)
	bash scripts/conformance.sh $(ENDS)

chaos: $(STAMP)
	SPANGRAD_CHAOS_S=$${SPANGRAD_CHAOS_S:-120} $(BIN)/python -m pytest tests/chaos $(TEST_ARGS)

kills: $(STAMP)
	SPANGRAD_KILLS=$${SPANGRAD_KILLS:-200} $(BIN)/python -m pytest tests/store/test_store_killed.py $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy
	for agent in examples/*/agent.py; do $(BIN)/mypy "$$(dirname "$$agent")" || exit 1; done
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python -m tests.bench.run

bench-demo: $(STAMP)
	$(BIN)/python -m tests.bench.demo_seeds

bench-combinations: $(STAMP)
	$(BIN)/python -m tests.bench.combinations --write

exact: $(STAMP)
	$(BIN)/python -m tests.bench.exact --write

clean:
	rm -rf .venv .spangrad build dist
