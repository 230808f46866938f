PY := .venv/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check
.PHONY: check test demo bench soak clean

# The stamp makes set-up run once, and again when pyproject.toml changes. torch comes first, as
# exactly this version: anything that asks for a range would fetch gigabytes of CUDA.
.venv/.ready: pyproject.toml
	python3 -m venv .venv
	$(PIP) "torch==2.13.0"
	$(PIP) -e ".[dev]"
	touch $@

check: .venv/.ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: .venv/.ready
	$(PY) -m pytest -n 4 --dist worksteal -m "not soak"

# A training that loses a rank, gets it back, and grows while it runs.
demo: .venv/.ready
	$(PY) examples/demo.py

# Figures beside their peers, into bench/results/. One after another: they must not disturb
# each other.
bench: .venv/.ready
	set -e; for script in bench/*.py; do echo "== $$script"; $(PY) $$script; done

soak: .venv/.ready
	$(PY) -m pytest -n 2 -m soak --timeout 3600
	ATOLL_SIM_COUNT=100000 $(PY) -m pytest -n 2 tests/sim --timeout 3600

clean:
	rm -rf .venv
