# Everything runs in .venv/, which the first target makes. On the machine: make, and Python 3.11 or newer with pip and venv.
#   make demo   the main job on the embedded pair: gather, train, export, evaluate into runs/quickstart/
#   make test   the style check and every test, the built wheel's among them
#   make lint   the style check alone
#   make wheel  dist/diversed-*.whl
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin

# Threads that spin at barriers make small models 10 to 50 times slower on a busy machine; must be set before Python starts.
export OMP_WAIT_POLICY = passive
export GOMP_SPINCOUNT = 0

.PHONY: demo test lint wheel clean

demo: .venv/.stamp
	$(BIN)/diversed run --config quickstart --out runs/quickstart

test: lint
	$(BIN)/python -m pytest --numprocesses auto

lint: .venv/.stamp
	$(BIN)/ruff check .

wheel: .venv/.stamp
	$(BIN)/python -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist
	rm -rf build

clean:
	rm -rf .venv build dist diversed.egg-info

.venv/.stamp: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "diversed needs Python 3.11 or newer, and there is no $(PYTHON); name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "diversed needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,gguf]'
	@touch $@
