# shellcheck shell=bash
# The container scripts source this file: it says where images are and how to call buildah and podman.
# It works as root on a machine without Docker, systemd and cgroup delegation, as in most CI systems.
IMAGE=${IMAGE:-localhost/megafp8:cpu}
BASE=${BASE:-localhost/megafp8-base:bookworm}
STORE=${STORE:-${XDG_CACHE_HOME:-$HOME/.cache}/megafp8/containers}

say() { printf 'container: %s\n' "$*"; }
die() { printf 'container: error: %s\n' "$*" >&2; exit 1; }

need() {
    local missing=() name
    for name in "$@"; do
        command -v "$name" >/dev/null 2>&1 || missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] || die "${missing[*]} not found (Debian: apt-get install -y --no-install-recommends \
buildah podman runc mmdebstrap)"
}

mkdir -p "$STORE"
storage=(--root "$STORE/images" --runroot "$STORE/run" --storage-driver "${STORAGE_DRIVER:-overlay}")
image_exists() { buildah "${storage[@]}" inspect --type image "$1" >/dev/null 2>&1; }
