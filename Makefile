PY := .venv/bin/python
.PHONY: check test tools packages slurm conformance integrations docs demo bench soak clean

# $(call install,LOCK,ENVIRONMENT): versions that passed, in builds too; with `LOCK=` the newest that
# are allowed, which `python -m tools.lock` keeps when they have passed. Nothing is compiled that is
# never imported: of torch alone that is ten seconds; so whatever runs here keeps what it compiles.
LOCK := tools/locks
install = $(if $(LOCK),PIP_CONSTRAINT=$(LOCK)/$(1).txt PIP_BUILD_CONSTRAINT=$(LOCK)/$(1).txt) \
	$(2)/bin/python -m pip install -q --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

# A stamp makes a set-up run once, and again when what it installs changes: `.base` has what a user
# installs, `.ready` what tests need beside it. torch comes first, as exactly this version: anything
# that asks for a range would fetch gigabytes of CUDA.
TORCH := "torch==2.13.0"
.venv/.base: pyproject.toml tools/locks/dev.txt
	python3 -m venv .venv
	$(call install,dev,.venv) $(TORCH)
	$(call install,dev,.venv) -e ".[torch]"
	touch $@

# All workers of the tests would compile the same at once: all cores do it before, once. Templates of
# some package are no Python, which does not matter.
.venv/.ready: .venv/.base
	$(call install,dev,.venv) -e ".[dev]"
	$(PY) -m compileall -qq -j 0 .venv/lib || true
	touch $@

# The dashboard's own scripts and styles; `.oxfmtrc.json` leaves out the library among them.
PAGES := src/atoll/server/ui/static
check: .venv/.ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/oxfmt --check $(PAGES)
	.venv/bin/oxlint --deny-warnings $(PAGES)
	.venv/bin/mypy
	.venv/bin/lint-imports

# More workers than cores: tests wait more than they compute.
test: .venv/.ready tools
	$(PY) -m pytest -n 4 --dist worksteal -m "not soak and not slurm"

# What rows of the tests need beside Python: installed as root on Debian, else named.
tools:
	@tools/install-for-tests

# Wheel and sdist, built and installed into empty environments. Needs PyPI.
packages: .venv/.ready
	ATOLL_LOCK=$(LOCK) $(PY) -m pytest -m soak tests/packaging

# With real daemons of Slurm (Debian's packages, as root); skipped with the reason without them.
slurm: .venv/.ready
	$(PY) -m pytest -n 2 --dist loadfile -m "slurm and not soak" tests/slurm tests/conformance

# The fault table on every backend that this machine has, its outcomes kept, and the page of them.
conformance: .venv/.ready
	-ATOLL_RECORD=1 $(PY) -m pytest -n 2 --dist loadfile tests/conformance
	$(PY) -m tests.conformance.results --write

# Trainers of other libraries, with the real ones, in an environment of its own: they are large.
INTEGRATIONS := .venv-integrations/bin/python
.venv-integrations/.ready: pyproject.toml tests/integrations/requirements.txt \
		tools/locks/integrations.txt
	python3 -m venv .venv-integrations
	$(call install,integrations,.venv-integrations) $(TORCH)
	$(call install,integrations,.venv-integrations) -e ".[store]" \
		-r tests/integrations/requirements.txt
	touch $@

integrations: .venv-integrations/.ready
	ATOLL_INTEGRATIONS=1 $(INTEGRATIONS) -m pytest tests/integrations --timeout 600

# The pages as a site in dist/docs, to be opened from disk; every link is checked.
.venv-docs/.ready: tools/requirements-docs.txt tools/locks/docs.txt
	python3 -m venv .venv-docs
	$(call install,docs,.venv-docs) -r $<
	touch $@

docs: .venv-docs/.ready .venv/.base
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. .venv-docs/bin/mkdocs build --strict
	@echo "open dist/docs/index.html"

# A training that loses a rank, gets it back, and grows while it runs.
demo: .venv/.base
	$(PY) examples/demo.py

# Figures beside their peers, into bench/results/. One after another: they must not disturb
# each other.
bench: .venv/.ready
	set -e; for script in bench/*.py; do echo "== $$script"; $(PY) $$script; done

soak: .venv/.ready
	$(PY) -m pytest -n 2 -m soak --timeout 3600
	ATOLL_SIM_COUNT=100000 $(PY) -m pytest -n 2 tests/sim --timeout 3600

clean:
	rm -rf .venv .venv-docs .venv-integrations
