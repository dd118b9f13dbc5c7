#!/usr/bin/env bash
# Unpack the image that build.sh made into a folder, which bubblewrap runs without root or a daemon.
#
#   scripts/container/unpack.sh DIR
#   CONTAINER_IMAGE=DIR CONTAINER_MOUNTS=$PWD/runs sbatch examples/slurm/pretrain.sbatch …
#
# Environment: IMAGE and STORE as for build.sh. DIR must not exist yet, or be empty.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/container/common.sh
need buildah
[ $# = 1 ] || die "usage: unpack.sh DIR"
image_exists "$IMAGE" || die "there is no image $IMAGE: run scripts/container/build.sh"
mkdir -p "$1"
[ -z "$(ls -A "$1")" ] || die "$1 is not empty"
working=$(buildah "${storage[@]}" from --pull=never "$IMAGE")
trap 'buildah "${storage[@]}" rm "$working" >/dev/null' EXIT
files=$(buildah "${storage[@]}" mount "$working")
cp -a "$files/." "$1/"
for file in hosts resolv.conf; do # the host's files are bound over these
    [ -e "$1/etc/$file" ] || : >"$1/etc/$file"
done
buildah "${storage[@]}" umount "$working" >/dev/null
say "unpacked $IMAGE into $1"
