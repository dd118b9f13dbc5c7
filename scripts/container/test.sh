#!/usr/bin/env bash
# The quick tests and the default job inside the image, with the network off.
#
# Environment: IMAGE, STORE as for build.sh; TESTS (what pytest runs; `tests` for the whole default
# suite), WORKERS (processes that run them, 2), JOB (the default job's arguments: `model.fp8=True` is all
# of it).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tests=${TESTS:-tests/data tests/models tests/observe tests/optim tests/plan tests/precision tests/spec}
job=${JOB:-model.fp8=True}

echo "container: the network inside is off"
"$here/run.sh" --entrypoint python3 -- -c 'import os, sys
found = set(os.listdir("/sys/class/net"))
sys.exit(f"container: error: it has {found}" if found != {"lo"} else 0)'
echo "container: tests"
# shellcheck disable=SC2086  # lists of words
"$here/run.sh" --entrypoint python3 --env HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis \
    --env OMP_NUM_THREADS=1 --env CI=1 -- -m pytest -q -p no:cacheprovider \
    -n "${WORKERS:-2}" --dist loadfile -m "not gpu and not slow and not slurm and not kill and not hosts" $tests
echo "container: the default job ($job)"
# shellcheck disable=SC2086
"$here/run.sh" $job
