"""Build all distributions of this repository, check them, and use each as a stranger would.

    make release            into dist/, from the last commit; nothing is uploaded

Each package becomes a source archive, and its wheel is built from that archive. The wheel must
have every file of its package, the licence and the version of the file VERSION. Then each is
installed in a new environment: megafp8 trains a few steps in FP8 in an empty folder, and each other
package runs the program of its README. `.github/workflows/release.yml` does the same for a tag.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from scripts.packages import MAIN, ROOT, packages, projects

FOR_THE_BUILD = ("pyproject.toml", "setup.py", "LICENSE")
"""Files of a package's folder that are no files of the package."""
TRAINING = (
    "model.fp8=True trainer.max_steps=5 trainer.accelerator=cpu trainer.limit_val_batches=1 "
    "model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 "
    "model.encoder_seq_length=32 model.micro_batch_size=2 model.global_batch_size=4 "
    "model.tokenizer.vocab_size=512 exp_manager.name=tried"
).split()


def files_of(package: str, tree: Path = ROOT) -> set[str]:
    """Return the paths that the wheel of a package must have, by the files in its folder."""
    folders = {package: tree / package}
    if package == MAIN:
        folders |= {"hydra_plugins": tree / "hydra_plugins", f"{MAIN}/conf": tree / "conf"}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and ".egg-info" not in str(path)
        and not (package != MAIN and path.name in FOR_THE_BUILD)
    }  # fmt: skip


def needed(package: str) -> list[str]:
    """Return the packages of this repository that one needs, itself last."""
    names = {project["name"]: name for name, project in projects().items()}
    lines = map(Requirement, projects()[package]["dependencies"])
    below = [each for line in lines if line.name in names for each in needed(names[line.name])]
    return list(dict.fromkeys([*below, package]))


def build(tree: Path, out: Path) -> dict[str, Path]:
    """Build the source archive of each package, and its wheel from that; return the wheels."""
    wheels = {}
    for name, project in projects().items():
        folder = str(tree if name == MAIN else tree / name)
        run(sys.executable, "-m", "build", "-q", "--outdir", str(out), folder)
        (wheels[name],) = out.glob(f"{project['name'].replace('-', '_')}-*.whl")
    return wheels


def complaints(package: str, wheel: Path, tree: Path = ROOT) -> list[str]:
    """Return what is wrong with the contents of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(record).decode()
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    wanted = files_of(package, tree)
    version = (tree / "VERSION").read_text("utf-8").strip()
    found = [f"it lacks {name}" for name in sorted(wanted - names)]
    found += [f"{name} is not of this package" for name in sorted(names - wanted)]
    found += [f"its version is not {version}"] * (f"\nVersion: {version}\n" not in metadata)
    found += ["it has no licence"] * (len(licences) != 1)
    found += ["its types are not marked"] * (f"{package}/py.typed" not in names)
    return found


def try_out(package: str, wheels: dict[str, Path], torch: str) -> None:
    """Install a wheel, with those that it needs, in a new environment, and use it there."""
    print(f"release: {package}: a new environment with torch {torch}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder, elsewhere = Path(place) / "venv", Path(place) / "elsewhere"
        elsewhere.mkdir()
        venv.create(folder, with_pip=True, symlinks=True)
        python = str(folder / "bin" / "python")
        own = [str(wheels[name]) for name in needed(package)]
        run(python, "-m", "pip", "install", "-q", f"torch=={torch}", "numpy")
        began = time.monotonic()
        run(python, "-m", "pip", "install", "-q", *own)
        seconds = time.monotonic() - began
        if package == MAIN:
            run(python, "-P", "-m", MAIN, "pretrain", *TRAINING, cwd=elsewhere)
            if not (elsewhere / "runs" / "tried" / "summary.json").is_file():
                sys.exit(f"release: {package}: its run left no summary")
        else:
            text = (ROOT / package / "README.md").read_text("utf-8")
            (program,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
            where = f"import {package}; assert {package}.__file__.startswith({str(folder)!r})"
            run(python, "-P", "-c", f"{program}\n{where}\n", cwd=elsewhere)
    size = f"{wheels[package].stat().st_size / 1e6:.2f} MB"
    name = wheels[package].name
    print(f"release: {name}: {size}, installed beside torch in {seconds:.0f} s, works", flush=True)


def run(*words: str, cwd: Path = ROOT) -> str:
    """Run a command and return what it prints; on failure end with that and exit code 1."""
    unwanted = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release: {' '.join(words)[:300]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main(argv: list[str] | None = None) -> None:
    """Make dist/, or end with exit code 1 and the reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder (dist)")
    out: Path = parser.parse_args(argv).out.resolve()
    changed = run("git", "status", "--porcelain", "--untracked-files=no")
    if changed:
        sys.exit(
            f"release: commit first what is changed, since the last commit is built:\n{changed}"
        )
    out.mkdir(parents=True, exist_ok=True)
    left = sorted(path.name for path in out.iterdir())
    if left:
        sys.exit(f"release: {out} has files of another build ({left[0]}): remove the folder")
    print("release: building", *packages(), flush=True)
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        run("git", "clone", "-q", "--depth", "1", ROOT.as_uri(), str(tree))
        wheels = build(tree, out)
        wrong = [
            f"{wheels[p].name}: {c}" for p in packages() for c in complaints(p, wheels[p], tree)
        ]
    if wrong:
        sys.exit("release: " + "\nrelease: ".join(wrong))
    print(run(sys.executable, "-m", "twine", "check", "--strict", *map(str, out.iterdir())), end="")
    for package in packages():
        try_out(package, wheels, importlib.metadata.version("torch"))
    print(f"release: {len(packages())} wheels and source archives are in {out}")


if __name__ == "__main__":
    main()
