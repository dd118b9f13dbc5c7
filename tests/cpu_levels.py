"""Imitate older x86 CPUs on this machine, and run tests or other commands on them.

The levels are those of the x86-64 psABI, as compilers name them. A CPU that is not x86 has only the
level `native`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import compiled, te_sources

ROOT = Path(__file__).parents[1]

# Linux's names of the instructions that a level adds (psABI, table 3.1).
ADDED = {
    "x86-64": ("sse2",),
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
LEVELS = (*ADDED, "native")


def missing(level: str) -> str:
    """Return why this machine cannot run code of the level, or an empty string if it can."""
    if level == "native":
        return ""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{level}: this is a {platform.machine()}"
    names = list(ADDED)
    needed = [flag for name in names[: names.index(level) + 1] for flag in ADDED[name]]
    text = Path("/proc/cpuinfo").read_text()
    here = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    absent = [flag for flag in needed if flag not in here]
    return f"{level}: this CPU has no {', '.join(absent)}" if absent else ""


def compiler_for(level: str, folder: Path, compiler: str = "cc") -> Path:
    """Make a compiler for $CC that compiles for that level, whatever its options ask for.

    The version that it prints names the level, because compiled libraries are cached by version.
    """
    found = compiled.compiler(compiler, folder)
    path = folder / f"{compiler}-{level}"
    asked = "" if level == "native" else f" -march={level}"  # the kernels ask for `native`
    path.write_text(f'#!/bin/sh\n[ "$1" != --version ] || echo {level}\nexec {found} "$@"{asked}\n')
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Imitation:
    """Describe an imitated CPU: settings that make torch, MKL, oneDNN and compilers treat it so."""

    level: str  # of the compiled C kernels
    torch: str
    mkl: str
    onednn: str
    flags: str  # the CPU flags that megafp8 then sees

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the CPU; `folder` gets a compiler and a cache of kernels.

        Transformer Engine's sources are those that this machine has already.
        """
        own = {
            "ATEN_CPU_CAPABILITY": self.torch,
            "MKL_CBWR": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MEGAFP8_CPU_FLAGS": self.flags,
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        if te_sources.IS_HERE:
            from te_cpu.wheel import te_folder

            own["MEGAFP8_TE_SOURCES"] = str(te_folder())
        if shutil.which("cc"):
            own["CC"] = str(compiler_for(self.level, folder))
        return own


IMITATIONS = {
    "SSE2": Imitation("x86-64", "default", "COMPATIBLE", "SSE41", "sse2"),
    "AVX2": Imitation("x86-64-v3", "avx2", "AVX2", "AVX2", "avx2"),
    "AVX-512": Imitation("x86-64-v4", "avx512", "AVX512", "AVX512_CORE", "avx512f"),
    "AVX-512, BF16 products": Imitation(
        "x86-64-v4", "avx512", "AVX512", "AVX512_CORE", "avx512f avx512_bf16"
    ),
}
"""The last CPU multiplies in BF16, as torch does without BF16 instructions, which is slow."""
REAL_ALONE = ("AVX512-BF16", "AMX", "Arm")

NUMERIC = (
    *(name for name in ("tests/fp8_numerics", "tests/te_cpu") if (ROOT / name).is_dir()),
    "tests/backends",
    "tests/fp8",
    "tests/models",
    "tests/optim/test_scaled_adam.py",
    "tests/parallel/test_fsdp.py",
    "tests/parallel/test_muon.py",
    "tests/parallel/test_sums.py",
    "tests/parallel/test_tensor_parallel.py",
    "tests/train/test_step.py",
    "tests/train/test_together.py",
    "tests/train/test_dryrun.py",
)
QUICK = (
    "tests/fp8_numerics/test_cast.py::test_special_values",
    "tests/fp8_numerics/test_cast.py::test_ties_and_their_neighbours",
    "tests/fp8_numerics/test_cast.py::test_decoding_of_every_code",
    "tests/fp8/test_linear.py::test_output_and_gradients_follow_the_specification",
    "tests/optim/test_scaled_adam.py::test_c_has_torchs_bits_at_every_size",
    "tests/train/test_step.py::test_training_learns",
    "tests/parallel/test_vocab.py::test_loss_and_gradient_equal_the_plain_ones",
)


def run_tests(name: str, tests: Sequence[str], *options: str, **settings: Any) -> Any:
    """Run pytest in a process of its own on an imitated CPU; `settings` go to subprocess.run."""
    with tempfile.TemporaryDirectory() as folder:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        environment = (
            {"OMP_NUM_THREADS": "1"} | inherited | IMITATIONS[name].environment(Path(folder))
        )
        command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", *options]
        return subprocess.run(command, env=environment, cwd=ROOT, check=False, **settings)


def run_command(name: str, command: Sequence[str]) -> int:
    """Run any command on an imitated CPU with an empty cache; return its exit code."""
    if name not in IMITATIONS:
        known = ", ".join(map(repr, IMITATIONS))
        print(f"unknown CPU {name!r}: choose one of {known}", file=sys.stderr)
        return 2
    if reason := missing(IMITATIONS[name].level):
        print(f"this machine cannot imitate {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | IMITATIONS[name].environment(Path(folder))
        return subprocess.run(command, env=environment, check=False).returncode


def main(options: Sequence[str]) -> int:
    """Run the numeric tests on each CPU that this machine can imitate.

    `options` go to pytest. `NAME -- COMMAND` instead runs one command on one imitated CPU, for
    example `python -m tests.cpu_levels AVX2 -- make pretrain`.
    """
    if len(options) > 2 and options[1] == "--":
        return run_command(options[0], options[2:])
    failed, left_out = [], [f"{name}: only the real CPU" for name in REAL_ALONE]
    for name, imitation in IMITATIONS.items():
        if reason := missing(imitation.level):
            left_out.append(f"{name}: {reason}")
            continue
        print(f"== {name}", flush=True)
        marks = "not slow and not gpu and not slurm and not hosts"
        if run_tests(name, NUMERIC, "-m", marks, *options).returncode:
            failed.append(name)
    for line in left_out:
        print(f"not run: {line}")
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
