#!/usr/bin/env bash
# Make the virtual environment that `make` uses; if it is ready, return at once.
#
#   scripts/setup_env.sh [--dev]      make .venv (with the developers' tools); `make` calls this
#   scripts/setup_env.sh --in-place [--extras "NAME …"]   make no .venv: install into PYTHON itself, with
#                                     these extras of pyproject.toml, and keep its torch (for containers)
# All distributions of this repository are installed: that of pyproject.toml here and those of */pyproject.toml.
#
# Environment: PYTHON (the interpreter), VENV (default .venv), TORCH_PIN (version of torch; without it a
# CUDA build is the newest that the project is tested with), TORCH_BUILD (cuda, cpu, or auto, the default:
# CUDA where an NVIDIA GPU is present, and a build that is already installed is kept).
# The script may be interrupted at any point and run again: complete packages are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CUDA_TORCH=${TORCH_PIN:+torch==$TORCH_PIN}
CUDA_TORCH=${CUDA_TORCH:-'torch>=2.11,<2.16'} # the newest is the last that was tried whole
TORCH_PIN=${TORCH_PIN:-2.13.0}
TORCH_BUILD=${TORCH_BUILD:-auto}
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=${VENV:-.venv}
ASKED_PYTHON=${PYTHON:-}
extras=""
in_place=false
while [ $# -gt 0 ]; do
    case $1 in
        --dev) extras=dev ;;
        --in-place) in_place=true ;;
        --extras) shift; extras=${1-} ;;
        *) echo "setup: unknown argument $1 (known: --dev, --in-place, --extras NAMES)" >&2; exit 2 ;;
    esac
    shift
done

editable=()
for file in */pyproject.toml; do editable+=(--editable "./${file%/*}"); done

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

case $TORCH_BUILD in
    auto | cpu | cuda) ;;
    *) echo "setup: error: TORCH_BUILD=$TORCH_BUILD: it is auto, cpu or cuda" >&2; exit 2 ;;
esac

# ---- the interpreter ------------------------------------------------------------------------

# Print why `$1` cannot be used; print nothing if it can.
why_not_usable() {
    command -v "$1" >/dev/null 2>&1 || { echo "not found"; return; }
    "$1" - 2>/dev/null <<'PY' || echo "does not run"
import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d; 3.11 or newer is needed" % sys.version_info[:2])
else:
    try:
        import venv, ensurepip
    except ImportError:
        print("has no venv module (Debian and Ubuntu: apt install python3-venv)")
PY
}

find_python() {
    local candidate reason seen=""
    if [ -n "$ASKED_PYTHON" ]; then
        reason=$(why_not_usable "$ASKED_PYTHON")
        [ -z "$reason" ] || die "PYTHON=$ASKED_PYTHON $reason"
        echo "$ASKED_PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13; do
        reason=$(why_not_usable "$candidate")
        if [ -z "$reason" ]; then
            echo "$candidate"
            return
        fi
        seen="$seen; $candidate $reason"
    done
    die "no usable Python: ${seen#; }. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# ---- pip prints one line for each phase; all its output is in the log -----------------------

run_logged() {
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1
}

give_up() {
    say "the last lines of $log:" >&2
    tail -n 15 "$log" | sed 's/^/    /' >&2
    die "$1"
}

has_nvidia_gpu() {
    [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1
}

# Succeed if a torch of a supported version and of the build that was asked for is installed.
has_torch() {
    "$py" - <<'PY' >/dev/null 2>&1 && build_is_as_asked
import importlib.metadata, re, sys
major, minor = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch")).groups()
sys.exit(not (int(major) == 2 and int(minor) >= 11))
PY
}

# Print for which device the installed torch was built (torch is not imported); print nothing without one.
torch_build() {
    "$py" - <<'PY' 2>/dev/null
import importlib.util, pathlib, runpy
found = importlib.util.find_spec("torch")
if found is not None:
    version = runpy.run_path(str(pathlib.Path(found.origin).with_name("version.py")))
    print("cpu" if version["cuda"] is None else "cuda")
PY
}

build_is_as_asked() { [ "$TORCH_BUILD" = auto ] || [ "$(torch_build)" = "$TORCH_BUILD" ]; }

wants_cuda() {
    case $TORCH_BUILD in
        cuda) why="TORCH_BUILD=cuda" ;;
        cpu) why="TORCH_BUILD=cpu"; return 1 ;;
        *) why="an NVIDIA GPU is present"; has_nvidia_gpu && return
            why="no NVIDIA GPU found; TORCH_BUILD=cuda installs a CUDA build"; return 1 ;;
    esac
}

install_torch() {
    local advice why
    advice="torch could not be installed for Python $(python_version "$py"). Is the package index reachable? \
Another version: make TORCH_PIN=2.11.0; another interpreter: make PYTHON=python3.12"
    if wants_cuda; then
        # pip would keep a CPU build of the same version.
        [ "$(torch_build)" != cpu ] || run_logged "$py" -m pip uninstall --yes torch || give_up "$advice"
        say "installing torch (CUDA build: $why; a few GB)"
        run_logged "$py" -m pip install "$CUDA_TORCH" || give_up "$advice"
        build_is_as_asked || die "TORCH_BUILD=cuda: the package index gave a CPU build. Name an index with CUDA \
builds: PIP_EXTRA_INDEX_URL, with a folder of https://download.pytorch.org/whl that fits the driver"
        return
    fi
    if [ "$(uname -s)" = Linux ]; then
        say "installing torch $TORCH_PIN (CPU build: $why; about 200 MB)"
        run_logged "$py" -m pip install "torch==$TORCH_PIN+cpu" && return
        say "  the configured package index does not have it; trying PyTorch's own"
        run_logged "$py" -m pip install --timeout 10 --retries 0 \
            --extra-index-url "$CPU_INDEX" "torch==$TORCH_PIN+cpu" && return
        say "  PyTorch's index is not reachable; installing the standard build, which may be the large CUDA one (a few GB)"
    else
        say "installing torch $TORCH_PIN"
    fi
    run_logged "$py" -m pip install "torch==$TORCH_PIN" || give_up "$advice"
}

# ---- containers: the image's interpreter and its torch --------------------------------------

if $in_place; then
    py=${ASKED_PYTHON:-python3}
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$py is older than Python 3.11"
    if "$py" -c 'import torch' >/dev/null 2>&1; then
        say "keeping the torch that is installed: $("$py" -c 'import torch; print(torch.__version__)')"
    else
        install_torch
    fi
    case " $extras " in
        *" te "*)
            "$py" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
                || die "the extra te needs a base with CUDA; on a CPU model.fp8_backend=te needs no package" ;;
    esac
    if [ -n "${PIP_CONSTRAINT:-}" ]; then # NVIDIA's images pin their packages so; pip keeps those that fit
        say "ignoring PIP_CONSTRAINT=$PIP_CONSTRAINT, which may exclude versions that are needed"
        unset PIP_CONSTRAINT
    fi
    say "installing the other dependencies${extras:+, with the extras $extras}"
    # Torch is left out of the list: pip might replace an image's own build because of its version.
    # shellcheck disable=SC2086  # a list of words
    mapfile -t wanted < <("$py" -c '
import glob, re, sys, tomllib
projects = [tomllib.load(open(file, "rb"))["project"] for file in ["pyproject.toml", *glob.glob("*/pyproject.toml")]]
extras = {key: lines for one in projects for key, lines in one.get("optional-dependencies", {}).items()}
unknown = [name for name in sys.argv[1:] if name not in extras]
if unknown:
    sys.exit(f"setup: error: no extra {unknown[0]} (there are {chr(44).join(extras)})")
lines = [line for one in projects for line in one["dependencies"]]
lines += [line for name in sys.argv[1:] for line in extras[name]]
installed_otherwise = {"torch", *(one["name"] for one in projects)}
for line in dict.fromkeys(lines):
    if re.match(r"[A-Za-z0-9_-]+", line).group() not in installed_otherwise:
        print(line)' $extras)
    [ ${#wanted[@]} -gt 0 ] || exit 2
    # A build of Transformer Engine that the base has is kept.
    mapfile -t engine < <(printf '%s\n' "${wanted[@]}" | grep '^transformer-engine')
    mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | grep -v '^transformer-engine')
    if "$py" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; then
        engine=()
    fi
    run_logged "$py" -m pip install --no-cache-dir "${wanted[@]}" || give_up "the dependencies could not be installed"
    if [ ${#engine[@]} -gt 0 ]; then # without the flag pip builds it against the newest torch of the index
        core=core_cu$("$py" -c 'import torch; print(torch.version.cuda.split(".")[0])')
        run_logged "$py" -m pip install --no-cache-dir wheel packaging pybind11 ninja cmake \
            && run_logged "$py" -m pip install --no-cache-dir --no-build-isolation "${engine[0]/pytorch]/pytorch,$core]}" \
            || give_up "Transformer Engine could not be built (docs/reference/backends.md says what it needs)"
    fi
    run_logged "$py" -m pip install --no-cache-dir --no-deps "${editable[@]}" --editable . || give_up "megafp8 could not be installed"
    say "ready"
    exit
fi

# ---- the virtual environment ----------------------------------------------------------------

# Of two `make` at the same time, the second waits for the first and then finds everything ready.
if command -v flock >/dev/null 2>&1; then
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock"
    flock 9
fi

py=$VENV/bin/python
log=$VENV/setup.log
stamp_hash() { cat VERSION setup.py pyproject.toml */pyproject.toml scripts/setup_env.sh <(echo "$TORCH_PIN" "$PWD") | cksum | tr -c '0-9\n' -; }
stamp=.stamp-$(stamp_hash)

# Succeed if all packages are complete: pip writes RECORD last, so that a package without it is not.
venv_is_sound() {
    "$py" - <<'PY' >/dev/null 2>&1
import importlib.metadata as metadata, sys, sysconfig
import pip
site = sysconfig.get_path("purelib")
sys.exit(any(dist.files is None for dist in metadata.distributions(path=[site])))
PY
}

venv_is_as_asked() {
    [ -z "$ASKED_PYTHON" ] || [ "$(python_version "$ASKED_PYTHON" 2>/dev/null)" = "$(python_version "$py")" ]
}

# Exit if .venv is ready. (`--dev` includes everything of a plain set-up.)
if [ -x "$py" ] && venv_is_as_asked \
    && { [ -e "$VENV/$stamp-dev" ] || { [ -z "$extras" ] && [ -e "$VENV/$stamp" ]; }; } \
    && "$py" -c '' 2>/dev/null && build_is_as_asked; then
    exit 0
fi

if [ -e "$VENV" ] && venv_is_sound && venv_is_as_asked; then
    say "updating $VENV (Python $(python_version "$py"))"
else
    python=$(find_python)
    [ ! -e "$VENV" ] || say "$VENV is incomplete or was made by another Python; it is made again"
    say "making $VENV with $python (Python $(python_version "$python"))"
    "$python" -m venv --clear "$VENV" || die "$python -m venv failed (Debian and Ubuntu: apt install python3-venv)"
fi
: >"$log"
has_torch || install_torch
say "installing megafp8 and its dependencies${extras:+, tools for tests included}"
# In two calls: pip 23 does not take ".[dev]" for the megafp8 that another package of ours needs.
run_logged "$py" -m pip install --editable ./fp8_numerics --editable ./fp8_coverage --editable ".${extras:+[$extras]}" || give_up "the dependencies could not be installed"
run_logged "$py" -m pip install "${editable[@]}" || give_up "the packages of this repository could not be installed"
if [ -n "$extras" ]; then # tests need it, and download it themselves if this fails
    run_logged "$py" -m te_cpu \
        || say "  Transformer Engine's Python could not be fetched: $(tail -n 1 "$log")"
fi
rm -f "$VENV"/.stamp-*
touch "$VENV/$stamp${extras:+-$extras}"
if why=$("$py" -c 'from megafp8.ops.torch_build import why_no_gpu
why = why_no_gpu()
print("" if why is None else f"{why.reason}. {why.hint}")') && [ -n "$why" ] && has_nvidia_gpu; then
    say "warning: no GPU will be used: $why"
fi
say "ready: $py, torch $("$py" -c 'import importlib.metadata as m; print(m.version("torch"))')"
say "source $VENV/bin/activate puts this Python and the command megafp8 on the PATH"
