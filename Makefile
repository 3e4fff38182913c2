# Two commands for everybody: `make demo` and `make test`. Both make .venv themselves.
export OMP_NUM_THREADS ?= 1
PYTHON_VENV := .venv/bin/python
PYTEST := $(PYTHON_VENV) -m pytest

.PHONY: demo test test-all bench check clean help

help:
	@echo "make demo      train under faults, see them repaired, compare with an unbroken run (TEXT=file for your own text)"
	@echo "make test      all tests, with seeded samples of the fault matrices (TFT_MATRIX_SEED=n, TFT_MATRIX_SIZE=n, TFT_IN_PLACE_SIZE=n)"
	@echo "make test-all  all tests, with every combination of the fault matrices: a night's work"
	@echo "make bench     benchmark; prints ratios and writes build/bench.json (TFT_BENCH_PEERS=python: compare others too)"
	@echo "make check     lint, types, import contracts"

.venv/.installed: pyproject.toml .ci/venv
	.ci/venv
	@touch $@

demo: .venv/.installed
	@$(PYTHON_VENV) -m mindio_tft_patch.launch.demo $(if $(TEXT),--text "$(TEXT)")

test: .venv/.installed
	$(PYTEST)

test-all: .venv/.installed
	TFT_MATRIX=all $(PYTEST)

bench: .venv/.installed
	$(PYTHON_VENV) tests/bench/run.py

check: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@rm -rf build/check
	@$(PYTHON_VENV) -m pip install -q --no-deps --no-build-isolation --target build/check . && rm -rf build/lib build/bdist.*
	cd build/check && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p mindio_tft_patch
	cd build/check && PYTHONPATH=. ../../.venv/bin/lint-imports --config ../../pyproject.toml --no-cache

clean:
	rm -rf .venv build demo_run
