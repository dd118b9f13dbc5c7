#!/usr/bin/env bash
# Run the image that build.sh made, without Docker and without a network.
#
#   scripts/container/run.sh model.fp8=True trainer.max_steps=20
#   scripts/container/run.sh --entrypoint python3 -- -m pytest …     options of podman run before --
#
# Environment: IMAGE and STORE as for build.sh; NETWORK (default none).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/container/common.sh
need podman runc
image_exists "$IMAGE" || die "there is no image $IMAGE: run scripts/container/build.sh"

options=()
for argument in "$@"; do
    if [ "$argument" = -- ]; then # arguments before it go to podman
        while [ "$1" != -- ]; do options+=("$1"); shift; done
        shift
        break
    fi
done
# runc and cgroupfs need no systemd. The limits are given because root without CAP_SYS_RESOURCE cannot
# raise them.
podman "${storage[@]}" --cgroup-manager cgroupfs --runtime runc run --rm \
    --network "${NETWORK:-none}" --ulimit nofile=1024:4096 --ulimit nproc=4096:4096 \
    --shm-size 1g "${options[@]}" "$IMAGE" "$@"
