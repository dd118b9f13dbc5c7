#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked `gpu`, then the benchmarks.
#   PYTHON=.venv/bin/python bash scripts/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export PYTHONPATH=.
status=0
"$python" -m pytest -q -m gpu tests || status=1
"$python" benchmarks/gpu_gemm.py --size 8192 || status=1
exit "$status"
