"""Test the wheels: each package works from its files, without a clone beside it."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megafp8.specs.te_versions import DEFAULT_VERSION
from scripts.packages import MAIN, ROOT, packages, projects
from scripts.release import complaints, needed
from tests import te_sources

SMALL = (
    "model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 "
    "model.encoder_seq_length=32 model.micro_batch_size=2 model.global_batch_size=4 "
    "trainer.limit_val_batches=1 trainer.accelerator=cpu model.tokenizer.vocab_size=512 "
    "model.fp8=True"
).split()
OWN = ROOT / "tests" / "own_recipes" / "blocks_of_32.py"


NEEDED = {
    "fp8_coverage": (),
    "fp8_numerics": (),
    "te_cpu": ("fp8_numerics",),
    "megafp8": ("fp8_numerics", "fp8_coverage"),
    "megafp8_migrate": ("fp8_numerics", "fp8_coverage", "te_cpu", "megafp8"),
}
"""The wheels of this repository that each of them needs."""
if not te_sources.IS_HERE:  # `scripts.removals` took it out
    NEEDED = {name: tuple({*needed} - {"te_cpu"}) for name, needed in NEEDED.items()}


def what_builds_leave() -> dict[str, int]:
    """Return the paths, with their times, that a build in this tree would write."""
    patterns = ("build/lib*", "build/bdist*", "build/*/lib*", "*.egg-info/*", "*/*.egg-info/*")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheel of each package, built without a network from its source archive.

    The archive is made from a copy of what the package consists of. A build leaves `build/lib` in
    its tree, and what lies there from an earlier build comes into the next wheel, with modules that
    are gone.
    """
    folder = tmp_path_factory.mktemp("wheel")
    copy, before = folder / "tree", what_builds_leave()
    for name in (*packages(), "conf", "hydra_plugins"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    for name in packages():
        tree = str(copy if name == MAIN else copy / name)
        words = ["-m", "build", "--no-isolation", "-q", "--outdir", str(folder), tree]
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
    assert what_builds_leave() == before
    made = {}
    for name, project in projects().items():
        (made[name],) = folder.glob(f"{project['name'].replace('-', '_')}-*.whl")
    assert len(list(folder.glob("*.whl"))) == len(made)
    return made


@pytest.mark.parametrize("package", packages())
def test_a_wheel_has_all_files_of_its_package(wheels: dict[str, Path], package: str) -> None:
    assert complaints(package, wheels[package]) == []
    assert {*needed(package)} == {*NEEDED[package], package}
    other = next(name for name in packages() if name != package)
    found = complaints(other, wheels[package])
    assert f"it lacks {other}/py.typed" in found
    assert f"{package}/py.typed is not of this package" in found


@pytest.mark.parametrize("package", packages())
def test_a_wheel_needs_the_others_in_its_own_version(wheels: dict[str, Path], package: str) -> None:
    """pip then names a mixture of versions, whose modules do not fit."""
    with zipfile.ZipFile(wheels[package]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    version = (ROOT / "VERSION").read_text("utf-8").strip()
    ours = {project["name"] for project in projects().values()}
    needed = {Requirement(line.partition(": ")[2]) for line in lines
              if line.startswith("Requires-Dist: ")}  # fmt: skip
    found = {each.name: str(each.specifier) for each in needed if each.name in ours}
    assert bool(found) == bool(NEEDED[package]) and set(found.values()) <= {f"=={version}"}


def clean(place: Path) -> dict[str, str]:
    """Return variables of the environment with which nothing of this repository is found."""
    unwanted = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"XDG_CACHE_HOME": str(place / "cache"), "HOME": str(place)}


def new_environment(place: Path, wheels: dict[str, Path], package: str) -> Path:
    """Install a package with only the wheels that it needs; return the new environment's Python.

    The libraries of this environment are lent to the new one, without our packages. No index is
    asked, so that a library or a wheel which is missing ends the install.
    """
    venv.create(place, with_pip=False, symlinks=True)
    python, lent = place / "bin" / "python", place / "lent"
    (target,) = place.glob("lib/python*/site-packages")
    (target / "lent.pth").write_text(f"{lent}\n")
    lent.mkdir()
    ours = {*packages(), *(project["name"].replace("-", "_") for project in projects().values())}
    for folder in map(Path, site.getsitepackages()):
        for path in folder.iterdir() if folder.is_dir() else ():
            is_ours = path.name.partition("-")[0] in ours or path.name.startswith("__editable__")
            if not is_ours:
                (lent / path.name).symlink_to(path)
    needed = [str(wheels[name]) for name in (*NEEDED[package], package)]
    began = time.monotonic()
    words = ["--python", str(python), "install", "-q", "--no-index", "--no-warn-script-location"]
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", *words]
    subprocess.run([*pip, *needed], cwd=place, env=clean(place), check=True)
    seconds, mine = time.monotonic() - began, set(NEEDED[package]) | {package}
    assert {path.name for path in target.iterdir() if path.name in packages()} == mine
    size = sum(path.stat().st_size for name in mine for path in (target / name).rglob("*")
               if path.is_file())  # fmt: skip
    print(f"{package}: {len(needed)} wheels installed in {seconds:.1f} s, {size / 1e6:.2f} MB")
    return python


def use_of(package: str) -> str:
    """Return the lines of Python in a package's README, and a check of where they came from."""
    text = (ROOT / package / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert 5 <= len([line for line in code.splitlines() if line]) <= 12, "about ten lines of use"
    names = [name for name in packages() if name not in (*NEEDED[package], package)]
    return (
        code
        + f"""
import sys
assert sys.modules[{package!r}].__file__.startswith(sys.prefix)
assert not [name for name in {names!r} if name in sys.modules]
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", packages()[1:])
def test_each_other_wheel_works_with_only_those_that_it_needs(
    wheels: dict[str, Path], package: str, tmp_path: Path
) -> None:
    """The README's lines run in a new environment, and load no other package of ours."""
    if package == "te_cpu":
        te_sources.need_sources(DEFAULT_VERSION)
    python = new_environment(tmp_path / "venv", wheels, package)
    environment = clean(tmp_path)
    if te_sources.IS_HERE:
        from te_cpu.wheel import te_folder

        environment["MEGAFP8_TE_SOURCES"] = str(te_folder())
    command = [str(python), "-P", "-c", use_of(package)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.slow
def test_an_install_from_the_wheel_trains(wheels: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "venv"
    python = new_environment(place, wheels, MAIN)
    environment = clean(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def megafp8(*argv: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(python), "-P", "-m", "megafp8", *argv], cwd=elsewhere, env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stdout[-2000:] + done.stderr
        return done.stdout + done.stderr

    found = subprocess.run(
        [str(python), "-P", "-c", "import megafp8; print(megafp8.__file__)"],
        capture_output=True, text=True, check=True, cwd=elsewhere, env=environment,
    )  # fmt: skip
    assert found.stdout.startswith(str(place))

    first = megafp8("pretrain", "trainer.max_steps=20", "model.fp8=True", "trainer.accelerator=cpu",
                    "exp_manager.name=first", "trainer.limit_val_batches=1")  # fmt: skip
    assert "casts in C" in first and "continue with  megafp8 pretrain model.fp8=True" in first
    assert (elsewhere / "runs" / "first" / "summary.json").is_file()

    (elsewhere / "mine").mkdir()
    lines = "defaults: [pretrain_gpt, _self_]\ntrainer: {max_steps: 2}\n"
    (elsewhere / "mine" / "small.yaml").write_text(lines)
    megafp8("pretrain", "--config-dir", "mine", "--config-name", "small", *SMALL,
            "exp_manager.name=small", "trainer.devices=2",
            "model.tensor_model_parallel_size=2")  # fmt: skip
    megafp8("pretrain", "-m", *SMALL, "trainer.max_steps=2", "model.fp8_margin=0,1")
    (sweep,) = (elsewhere / "multirun").iterdir()
    assert (sweep / "sweep.json").is_file()

    (elsewhere / "lab.py").write_bytes(OWN.read_bytes())
    own = megafp8("pretrain", *SMALL, "trainer.max_steps=2", "model.fp8_recipe=lab.py:BlocksOf32",
                  "exp_manager.name=own")  # fmt: skip
    assert "BlocksOf32" in own
