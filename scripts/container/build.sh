#!/usr/bin/env bash
# Build the project's Dockerfile without Docker (with buildah), by default on a Debian base for CPUs.
#
#   scripts/container/build.sh                           localhost/megafp8:cpu on plain Debian 12
#   BASE=docker.io/library/python:3.12-slim scripts/container/build.sh         on another base
#   VOLUMES="/srv/wheels /etc/pip.conf" scripts/container/build.sh    a local package index for pip
#
# Environment: IMAGE (the tag), BASE (the base image; the default is a Debian that this script makes),
# STORE (the folder of images), VOLUMES (paths that the build can read under their own names),
# EXTRAS (the extras of pyproject.toml to install; the default has those of the tests).
# A second build uses every unchanged layer of STORE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/container/common.sh
need buildah

if ! image_exists "$BASE"; then
    if [ "$BASE" = localhost/megafp8-base:bookworm ]; then
        need mmdebstrap podman
        say "making the base $BASE (Debian 12 with Python; this is done once)"
        tar=$STORE/base.tar
        mmdebstrap --quiet --variant=minbase \
            --include=python3,python3-pip,python3-venv,gcc,libc6-dev,ca-certificates,make \
            bookworm "$tar"
        podman "${storage[@]}" import --quiet "$tar" "$BASE" >/dev/null
        rm -f "$tar"
    else
        buildah "${storage[@]}" pull "$BASE"
    fi
fi

volumes=()
for path in /etc/ssl/certs/ca-certificates.crt ${VOLUMES:-}; do # pip uses this machine's certificates
    [ ! -e "$path" ] || volumes+=(--volume "$path:$path:ro")
done
say "building $IMAGE on $BASE"
# The format is Docker's, since OCI's has no SHELL. The isolation chroot needs no cgroups and no
# network of its own.
buildah "${storage[@]}" bud --layers --format docker --isolation chroot --network host --pull=never \
    --build-arg "BASE_IMAGE=$BASE" --build-arg "EXTRAS=${EXTRAS-data wandb sweep torchao dev}" "${volumes[@]}" --tag "$IMAGE" --file Dockerfile "$@" .
say "built $IMAGE"
