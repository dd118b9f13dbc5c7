#!/usr/bin/env bash
# Builds the project's Dockerfile without Docker (buildah), on a Debian base for CPUs by default.
#
#   scripts/container/build.sh                           localhost/megafp8:cpu on plain Debian 12
#   BASE=docker.io/library/python:3.12-slim scripts/container/build.sh         on another base
#   VOLUMES="/opt/wheels /etc/pip.conf" scripts/container/build.sh    a local package index for pip
#
# Environment: IMAGE (the tag), BASE (the base image; a Debian is made where it is the default),
# STORE (where images are kept), VOLUMES (paths that the build sees read-only, under their own names),
# EXTRAS (dev: with the tests' tools; empty for none).
# A second build takes every unchanged layer from STORE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/container/common.sh
need buildah

if ! image_exists "$BASE"; then
    if [ "$BASE" = localhost/megafp8-base:bookworm ]; then
        need mmdebstrap podman
        say "making the base $BASE (Debian 12 with Python; once)"
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
for path in /etc/ssl/certs/ca-certificates.crt ${VOLUMES:-}; do # pip trusts what this machine trusts
    [ ! -e "$path" ] || volumes+=(--volume "$path:$path:ro")
done
say "building $IMAGE on $BASE"
# Docker's format: OCI's drops SHELL. chroot: needs neither cgroups nor a network of its own.
buildah "${storage[@]}" bud --layers --format docker --isolation chroot --network host --pull=never \
    --build-arg "BASE_IMAGE=$BASE" --build-arg "EXTRAS=${EXTRAS-dev}" "${volumes[@]}" --tag "$IMAGE" --file Dockerfile "$@" .
say "built $IMAGE"
