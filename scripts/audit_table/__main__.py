"""Write docs/evidence/audit.md: what flags of published versions do, by `megafp8 audit`.

python -m scripts.audit_table --source FOLDER_OF_WHEELS --clone MEGATRON_LM [--table FILE]

The wheels are those of `VERSIONS`, from PyPI, and the clone is of NVIDIA/Megatron-LM at `COMMIT`,
whose own example scripts are audited, too. Each case of the page is one command; the page has what
the command prints. The exit code is 1 if a wheel or a file is missing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs/evidence/audit.md"
VERSIONS = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "accelerate": "1.15.0"}
FOLDER = "scripts/audit_table"
CASES = {
    "Megatron-core, delayed": f"{FOLDER}/delayed.sh",
    "Megatron-core, tensorwise": f"{FOLDER}/tensorwise.sh",
    "Megatron-core, blockwise": f"{FOLDER}/blockwise.sh",
    "Megatron-core, mxfp8": f"{FOLDER}/mxfp8.sh",
    "Megatron-core, NVFP4": f"{FOLDER}/nvfp4.sh",
    "Megatron-core, first and last layers in BF16": f"{FOLDER}/edges.sh",
    "Megatron-core, two tensor-parallel ranks": f"{FOLDER}/tensor_parallel.sh",
    "Megatron-core, a flag that its parser does not have": f"{FOLDER}/unknown_flag.sh",
    "Megatron Bridge": f"{FOLDER}/bridge.yaml",
    "Megatron Bridge, a file that a run has saved": "tests/megafp8_migrate/bridge_run_config.yaml",
    "Accelerate": f"{FOLDER}/accelerate.yaml",
    "Accelerate, by the names that its questionnaire writes": f"{FOLDER}/accelerate_config.yaml",
}
"""The files that are audited, by the titles of their parts of the page."""
COMMIT = "d98e8a64"
PUBLISHED = {
    "NVIDIA's example of Llama 3 8B": "my/Megatron-LM/examples/llama/train_llama3_8b_h100_fp8.sh",
    "NVIDIA's example of Llama 3 8B with FSDP": (
        "my/Megatron-LM/examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh"
    ),
}
"""The scripts of Megatron-LM with flags about FP8 or FP4 for GPT, with its folder."""
WHEELS = "MEGAFP8_AUDIT_WHEELS"
"""The variable that names the folder of wheels for the slow tests that repeat the page."""
TEXT = """\
# Which flags do nothing

`python -m scripts.audit_table --source wheels --clone Megatron-LM` has written this page:
what [`megafp8 audit`](../guide/migrate.md#which-of-your-flags-do-nothing) says of {versions}, over
Transformer Engine's own Python on a CPU. The command above each table repeats it; `wheels` is a
folder that these commands fill:

```console
{downloads}
```

The last parts are of example scripts of Megatron-LM at {commit}; `my` is the folder of its clone.
"No effect" says that the recipe and two training steps on two ranks are the same to the byte
without the flag, and that no condition on an environment variable stands around the lines that read
it. The kernels on the CPU answer as those of an H100; what happens inside of a GPU's kernels is not
seen. `{variable}=wheels pytest -m slow tests/megafp8_migrate/test_audit_table.py` repeats all
parts but the last ones.
"""


def main(argv: Sequence[str]) -> int:
    """Run each case and write the page; return 1 if one could not be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, type=Path, metavar="FOLDER_OF_WHEELS")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--clone", required=True, type=Path, metavar="MEGATRON_LM")
    options = parser.parse_args(argv)
    parts = [opening()]
    for title, file in {**CASES, **PUBLISHED}.items():
        folder = options.clone if title in PUBLISHED else ROOT
        said = audited(file.removeprefix("my/Megatron-LM/"), options.source, folder)
        if said is None:
            return 1
        parts.append(section(title, file, said))
        options.table.write_text("\n".join(parts))  # after each case: it may be cut short
    return 0


def opening() -> str:
    """Return the beginning of the page."""
    names = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    command = "$ pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels"
    downloads = "\n".join(f"{command} {name}=={v}" for name, v in VERSIONS.items())
    return TEXT.format(versions=names, downloads=downloads, variable=WHEELS, commit=COMMIT)


def audited(file: str, source: Path, folder: Path = ROOT) -> str | None:
    """Return what `megafp8 audit` prints, or None, with its error on stderr, if it fails."""
    command = [sys.executable, "-m", "megafp8", "audit", file, "--source", str(source.absolute())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return None
    return done.stdout


def answers(said: str) -> dict[str, tuple[str, str, str]]:
    """Return answer, reason and place of each flag in what `megafp8 audit` printed."""
    found: dict[str, tuple[str, str, str]] = {}
    lines = said.splitlines()
    for line, place in zip(lines, lines[1:], strict=False):
        if place.startswith("    ") and not line.startswith("    "):
            flag, _, rest = line.partition("  ")
            answer, _, why = rest.strip().partition(": ")
            found[flag] = (answer, why, place.strip())
    return found


def section(title: str, file: str, said: str) -> str:
    """Return the part of the page about one case."""
    shown = f"megafp8 audit {file} --source wheels"
    rows = [
        f"| `{flag}` | {answer} | {_cell(why)} | {_cell(place)} |"
        for flag, (answer, why, place) in answers(said).items()
    ]
    top = ["| flag | answer | what was seen | their code |", "|---|---|---|---|"]
    lines = [f"## {title}", "", f"{said.splitlines()[0]}.", "", "```console", f"$ {shown}", "```"]
    last = said.splitlines()[-1]
    lacks = ["", f"{_cell(last)}."] if last.startswith("The small model") else []
    return "\n".join([*lines, "", *top, *rows, *lacks, ""])


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_])", r"\\\1", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
