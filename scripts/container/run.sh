#!/usr/bin/env bash
# Runs the image that build.sh made, without Docker and with the network off.
#
#   scripts/container/run.sh model.fp8=True trainer.max_steps=20
#   scripts/container/run.sh --entrypoint python3 -- -m pytest …     options of podman run before --
#
# Environment: IMAGE, STORE as for build.sh; NETWORK (none).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/container/common.sh
need podman runc
image_exists "$IMAGE" || die "$IMAGE is not there: run scripts/container/build.sh"

options=()
for argument in "$@"; do
    if [ "$argument" = -- ]; then # what comes before it is podman's
        while [ "$1" != -- ]; do options+=("$1"); shift; done
        shift
        break
    fi
done
# runc and cgroupfs: no systemd. The limits: a root without CAP_SYS_RESOURCE cannot raise them.
podman "${storage[@]}" --cgroup-manager cgroupfs --runtime runc run --rm \
    --network "${NETWORK:-none}" --ulimit nofile=1024:4096 --ulimit nproc=4096:4096 \
    --shm-size 1g "${options[@]}" "$IMAGE" "$@"
