# Every target sets up what it needs in .venv first, once: the stamp file says that the installation is current.
# Other interpreter: make PYTHON=python3.12 test. A CUDA build of torch brings its own Triton; the CPU build brings none.

PYTHON ?= python3
WORKERS ?= 2
TORCH := torch==2.13.0
TRITON := triton==3.6.0

PY := .venv/bin/python
STAMP := .venv/.openkda-installed
NEWEST := .venv-newest
RECORDING := examples/data/kda_layer.safetensors
SOURCES := $(shell find openkda -name '*.py')
PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test coverage lint format test-newest-triton clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "openkda needs Python 3.10 or newer: make PYTHON=...")'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "Installing $(TORCH), Triton and the packages of constraints.txt into .venv"
	@$(PY) $(PIP) "$(TORCH)"
	@$(PY) -c 'import triton' 2>/dev/null || $(PY) $(PIP) "$(TRITON)"
	@$(PY) $(PIP) --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	.venv/bin/openkda run $(RECORDING) --out out/kda_layer_out.safetensors --plot out

# One torch thread per worker, so that two workers share two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -q

# Apart from test: tracing doubles the time that Triton's interpreter takes. So --thin runs some of a file's interpreted tests, and files are
# left out that run the same lines on other inputs or compile in other processes: the total is a lower bound of what `make test` covers.
# A target per test file: `make -j2 coverage` runs two at a time, and a run that was cut goes on where it stood.
UNTRACED := $(patsubst %,tests/test_%.py,faults faults_of_calls properties gradients offline_compile decode_compile)
COVERED := $(patsubst tests/%.py,out/coverage/%.data,$(filter-out $(UNTRACED),$(wildcard tests/test_*.py)))

coverage: $(COVERED)
	$(PY) -m coverage combine --quiet --keep --data-file=.coverage $^
	$(PY) -m coverage xml --quiet
	$(PY) -m coverage report

out/coverage/%.data: tests/%.py $(SOURCES) $(STAMP)
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 COVERAGE_FILE=$@.part $(PY) -m pytest -q -p no:xdist --thin 16 --cov --cov-report= $<
	@mv $@.part $@

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The newest Triton alone, over the packages of .venv: its own directory comes first on the path.
$(NEWEST)/.installed: $(STAMP)
	@test -x $(NEWEST)/bin/python || $(PY) -m venv $(NEWEST)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/openkda_base.pth"
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --ignore-installed --no-deps triton
	@touch $@

test-newest-triton: $(NEWEST)/.installed
	@$(NEWEST)/bin/python -c 'import triton; print("Triton", triton.__version__)'
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) -q tests/test_offline_compile.py

clean:
	rm -rf .venv $(NEWEST) out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage coverage.xml
