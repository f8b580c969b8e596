#!/bin/sh
# For whoever has a GPU: the plugin's tests with compiled kernels, then benchmarks/bench_vllm.py with a bundle and a pair.
# Needs vllm 0.32 (CUDA) beside `pip install -e '.[dev]'`. Other options go to the benchmark.
#
#   benchmarks/vllm.sh BUNDLE [FILE]               vllm.json by default; the packaged pair
#   benchmarks/vllm.sh BUNDLE FILE --target T --draft D --task gsm8k --tensor_parallel 2
set -eu
bundle=${1:?usage: benchmarks/vllm.sh BUNDLE [FILE] [--option value ...]}
shift
file=vllm.json
case ${1:---} in
  --*) ;;
  *) file=$1; shift ;;
esac
root=$(dirname "$0")/..
PYTHON=${PYTHON:-python3}
status=0
"$PYTHON" -m pytest -p no:cacheprovider -rsP "$root/tests/test_vllm.py" || status=$?
"$PYTHON" -m diversed bench vllm --bundle "$bundle" --json "$file" "$@"
exit "$status"
