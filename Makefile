# Every target makes the environment it needs. PYTHON chooses the interpreter, TORCH the version `make compat` runs on.
PYTHON ?= python3
TORCH ?= 2.11.0
DEV_TORCH := 2.13.0
COMPAT := .venv-torch-$(TORCH)
BUILD_INPUTS := pyproject.toml CMakeLists.txt scripts/make_venv.sh $(wildcard csrc/*)

# Tests run several processes on a machine's cores, and one thread each keeps their bits and their time steady.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q
export PYTHON

.PHONY: help demo test test-all lint format docs compat cross bench gate gate-mutants gate-page clean

help:
	@echo "make demo      train on 2 ranks, save, resume on 2, 4 and 1; prints a table, writes demo/loss.png"
	@echo "make test      linters and type checker, the site, unit tests, multi-rank tests"
	@echo "make test-all  these, and the tests that wait for lost ranks or repeat much (minutes more)"
	@echo "make lint      linters and type checker alone"
	@echo "make format    let ruff and clang-format rewrite the sources"
	@echo "make docs      the documentation's site, in build/site; fails on broken links and missing docstrings"
	@echo "make compat    the tests on another torch, TORCH=$(TORCH)"
	@echo "make cross     state written by torch $(DEV_TORCH) and by TORCH=$(TORCH), read by the other"
	@echo "make bench     all benchmarks but the catalogue, with pictures; fails if a bar is missed"
	@echo "make gate      release gates from the installed wheel, 2 and 4 ranks; ONLY=R01,R02, GPUS=1|2|4, ALLOW_DIRTY=1"
	@echo "make gate-mutants  breaks each gate's feature on purpose; every gate has to fail"
	@echo "make gate-page writes RELEASE_GATES.md's table anew from the newest evidence"
	@echo "make clean     remove environments and build folders"

.venv/.installed: $(BUILD_INPUTS)
	@scripts/make_venv.sh .venv $(DEV_TORCH) dev

$(COMPAT)/.installed: $(BUILD_INPUTS)
	@scripts/make_venv.sh $(COMPAT) $(TORCH) test

lint: .venv/.installed
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --check --quiet
	@.venv/bin/pyrefly check --summary=none
	@.venv/bin/lint-imports --no-logo --no-cache
	@.venv/bin/python scripts/known_faults.py
	@.venv/bin/python scripts/numbers_have_commands.py
	@.venv/bin/python scripts/draw_pictures.py --check
	@.venv/bin/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp

format: .venv/.installed
	@.venv/bin/ruff check --fix --quiet
	@.venv/bin/ruff format --quiet
	@.venv/bin/clang-format -i csrc/*.h csrc/*.cpp

# The theme's advertisement is no warning of the build's.
docs: .venv/.installed
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -f .ci/mkdocs.yml

# Multi-rank tests own their worker processes, so they run in one pytest process.
test: lint docs
	$(call PYTEST,.venv) -n 2 -m "not slow" tests/unit
	$(call PYTEST,.venv) -m "not slow" tests --ignore=tests/unit

test-all: lint docs
	$(call PYTEST,.venv) -n 2 tests/unit
	$(call PYTEST,.venv) tests --ignore=tests/unit

compat: $(COMPAT)/.installed
	$(call PYTEST,$(COMPAT)) -n 2 tests/unit
	$(call PYTEST,$(COMPAT)) tests --ignore=tests/unit

demo: .venv/.installed
	@.venv/bin/python scripts/demo.py

# About 10 minutes on two cores that nobody else uses. A missed bar stops nothing, and fails the whole at its end.
BENCHMARKS := step memory consensus checkpoint quantised host_kernel swap curves scale
bench: .venv/.installed
	@failed=; for name in $(BENCHMARKS); do \
		echo "== benchmarks/$$name.py"; .venv/bin/python benchmarks/$$name.py || failed="$$failed $$name"; \
	done; \
	.venv/bin/python benchmarks/pictures.py --pictures benchmarks/results/local || failed="$$failed pictures"; \
	.venv/bin/python benchmarks/soak.py --minutes 2 || failed="$$failed soak"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# State written by either torch is read by the other.
cross: .venv/.installed $(COMPAT)/.installed
	@scripts/cross_torch.sh .venv/bin/python $(COMPAT)/bin/python

GATES = .venv/bin/python -m scripts.gates
only = $(if $(ONLY),--only $(ONLY))

gate: .venv/.installed
	@$(GATES) run $(only) $(if $(GPUS),--gpus $(GPUS)) $(if $(filter 1,$(ALLOW_DIRTY)),--allow-dirty)

gate-mutants: .venv/.installed
	@$(GATES) mutants $(only)

gate-page: .venv/.installed
	@$(GATES) page

clean:
	rm -rf .venv .venv-torch-* build dist demo
