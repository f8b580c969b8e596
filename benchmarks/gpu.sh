#!/bin/sh
# For whoever has a GPU: the tests that need one, then benchmarks/bench_gpu.py, under 8 minutes together. Writes one JSON file
# with machine, versions and date. Needs torch, triton, transformers, rich, safetensors; no network, no data.
#
#   benchmarks/gpu.sh [FILE]                       gpu.json by default
#   DEVICE=cpu SIZE=tiny benchmarks/gpu.sh FILE    the same without a GPU, to see that it runs
#   PYTHON=/path/to/python                         another interpreter
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
file=$(realpath "${1:-gpu.json}")
export DEVICE="${DEVICE:-cuda}" SIZE="${SIZE:-8b}" HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The repository's root is the package: where it is not installed, a link of that name is enough.
if ! (cd / && "$PYTHON" -c "import diversed") 2>/dev/null; then
    ln -s "$root" "$work/diversed"
    export PYTHONPATH="$work${PYTHONPATH:+:$PYTHONPATH}"
fi
cd "$root"
status=0
if ! "$PYTHON" -c "import pytest, hypothesis" 2>/dev/null; then
    tests="not run: pytest and hypothesis are not installed"
else
    # Only files with such tests are collected: others import packages that may not be there.
    timeout 240 "$PYTHON" -m pytest -m gpu -p no:cacheprovider -rs $(grep -l "mark.gpu" tests/test_*.py) \
        > "$work/tests" 2>&1 || status=$?
    tail -n 40 "$work/tests"
    tests=$(tail -n 1 "$work/tests")
fi
echo "$tests"
"$PYTHON" -m diversed.benchmarks.bench_gpu "$file" "$tests"
exit "$status"
