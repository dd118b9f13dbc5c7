#!/usr/bin/env bash
# Run the fast tests, the packages of the image together and the default job in the image, without a
# network.
#
# Environment: IMAGE and STORE as for build.sh; TESTS (paths for pytest; `tests` for all default tests),
# WORKERS (processes for the tests, default 2), JOB (arguments of the default job; `model.fp8=True` runs
# the whole job).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tests=${TESTS:-tests/data tests/models tests/observe tests/optim tests/plan tests/fp8 tests/spec}
job=${JOB:-model.fp8=True}

echo "container: checking that there is no network"
"$here/run.sh" --entrypoint python3 -- -c 'import os, sys
found = set(os.listdir("/sys/class/net"))
sys.exit(f"container: error: there are network interfaces: {found}" if found != {"lo"} else 0)'
echo "container: tests"
# shellcheck disable=SC2086  # lists of words
"$here/run.sh" --entrypoint python3 --env HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis \
    --env OMP_NUM_THREADS=1 --env CI=1 --env MEGAFP8_TESTS_OFFLINE=1 -- -m pytest -q -p no:cacheprovider \
    -n "${WORKERS:-2}" --dist loadfile -m "not gpu and not slow and not slurm and not kill and not hosts" $tests
echo "container: a corpus of one's own, Weights & Biases offline, a sweep"
"$here/run.sh" --entrypoint bash -- scripts/container/inside.sh
echo "container: the default job ($job)"
# shellcheck disable=SC2086
"$here/run.sh" $job
