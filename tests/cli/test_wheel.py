"""Test the wheel: an install from the file alone trains, without a clone beside it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_layers import ROOT

SMALL = (
    "model.num_layers=1 model.hidden_size=32 model.num_attention_heads=2 "
    "model.encoder_seq_length=32 model.micro_batch_size=2 model.global_batch_size=4 "
    "trainer.limit_val_batches=1 trainer.accelerator=cpu model.tokenizer.vocab_size=512 "
    "model.fp8=True"
).split()
OWN = ROOT / "tests" / "own_recipes" / "blocks_of_32.py"


def what_builds_leave() -> dict[str, int]:
    """Return the paths, with their times, that a build in this tree would write."""
    paths = (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*"), *ROOT.glob("*.egg-info/*"))
    return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built without a network from a copy of what it is made of.

    A build leaves `build/lib` in its tree, and what lies there from an earlier build comes into the
    next wheel, with modules that are gone.
    """
    folder = tmp_path_factory.mktemp("wheel")
    copy, before = folder / "tree", what_builds_leave()
    for name in ("megafp8", "conf", "hydra_plugins"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    words = ["-m", "pip", "wheel", str(copy), "--no-deps", "--no-build-isolation", "-q", "-w"]
    subprocess.run([sys.executable, *words, str(folder)], check=True)
    assert what_builds_leave() == before
    (file,) = folder.glob("megafp8-*.whl")
    return file


def test_the_wheel_has_all_that_trains(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megafp8").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    ours |= {f"megafp8/conf/{path.relative_to(ROOT / 'conf').as_posix()}"
             for path in (ROOT / "conf").rglob("*.yaml")}  # fmt: skip
    ours |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "hydra_plugins").glob("*.py")}
    assert ours <= names, sorted(ours - names)


@pytest.mark.slow
def test_an_install_from_the_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """The libraries of this environment are lent to a new one, and megafp8 is the wheel's."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (packages,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    lent = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "lent.pth").write_text("".join(f"{path}\n" for path in lent))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
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
