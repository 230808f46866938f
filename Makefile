PY := .venv/bin/python
.PHONY: check test demo bench soak clean

# The stamp makes set-up run once, and again when pyproject.toml changes.
.venv/.ready: pyproject.toml
	python3 -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check "torch==2.13.0"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

check: .venv/.ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: .venv/.ready
	$(PY) -m pytest -n 2 --dist worksteal

clean:
	rm -rf .venv
