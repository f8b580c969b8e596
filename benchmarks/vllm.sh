#!/bin/sh
# For whoever has a GPU: the plugin's tests with compiled kernels, then benchmarks/vllm.py with a bundle and a pair.
# Needs vllm 0.32 (CUDA) beside `pip install -e '.[dev]'`. Other options go to the benchmark.
#
#   benchmarks/vllm.sh BUNDLE [FILE]               vllm.json by default; the packaged pair
#   benchmarks/vllm.sh BUNDLE FILE --target T --draft D --task gsm8k --tensor_parallel 2
set -eu
cd "$(dirname "$0")/.."
bundle=$1
file=${2:-vllm.json}
shift "$(($# < 2 ? $# : 2))"
PYTHON=${PYTHON:-python3}
status=0
"$PYTHON" -m pytest -p no:cacheprovider -rsP tests/test_vllm.py || status=$?
"$PYTHON" -m diversed bench vllm --bundle "$bundle" --json "$file" "$@"
exit "$status"
