#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked `gpu`, then the benchmarks, then one
# short table. Meant for ten minutes of one H100 or H200; each part has a limit of its own.
#   PYTHON=.venv/bin/python bash scripts/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export PYTHONPATH=.
status=0

part() { # name, seconds, command: one failing part does not keep the others from running
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout "$limit" "$@" || { echo "== $name: failed ($?)"; status=1; }
    echo "== $name: $((SECONDS - began)) s"
}

part tests 240 "$python" -m pytest -q -m gpu tests
part gemm 30 "$python" benchmarks/gpu_gemm.py --size 8192
part layer 120 "$python" benchmarks/gpu_layer.py
part step 150 "$python" benchmarks/gpu_step.py --presets 1.3b --variants bf16 fp8 "fp8 compiled"
if [ -f benchmarks/gpu_trace.py ]; then
    part traces 60 "$python" benchmarks/gpu_trace.py --engine "${TRACE_ENGINE:-te}" --out "${TRACE_OUT:-benchmarks/results/trace}"
fi
"$python" benchmarks/gpu_table.py || status=1
exit "$status"
