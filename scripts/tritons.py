"""Compile the GPU kernels with the Triton that each supported PyTorch brings for GPUs.

python -m scripts.tritons [VERSION …] [--folder FOLDER] [--all]

A CPU build of PyTorch brings no Triton, so that the developers' environment has the newest one.
Each version is installed into a folder of its own below FOLDER, and `test_ahead_of_time.py` runs
with it: registers, spills, shared memory and roundings of every kernel, for GPUs that are not
there. With `--all` its slow tests run too. The exit code is 1 if a version fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/fp8/kernels/test_ahead_of_time.py"
TRITONS = {"2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
"""The version that PyTorch's wheel for CUDA requires, by the version of PyTorch."""


def main(argv: Sequence[str]) -> int:
    """Try versions one after the other; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(TRITONS.values()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build/tritons")
    parser.add_argument("--all", action="store_true", help="all presets and more GPUs: long")
    options = parser.parse_args(argv)
    failed = []
    for version in options.versions or TRITONS.values():
        print(f"== triton {version}", flush=True)
        if tried(version, options.folder / version, all_tests=options.all) != 0:
            failed.append(version)
    if failed:
        print(f"failed with triton {', '.join(failed)}")
    return int(bool(failed))


def tried(version: str, folder: Path, *, all_tests: bool) -> int:
    """Return the exit code of the tests with one version, which is installed if it is not there."""
    if not (folder / f"triton-{version}.dist-info").is_dir():
        words = ("install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version}")
        code = subprocess.run([sys.executable, "-m", "pip", *words], check=False).returncode
        if code != 0:
            return code
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)),
                                "MEGAFP8_TESTS_TRITON": version}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    if not all_tests:
        command += ["-m", "not slow"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
