"""`python -m te_cpu run` and `python -m te_cpu doctor`, beside what plain Python does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_cpu import doctor, run
from te_cpu.versions import DEFAULT_VERSION
from tests.te_sources import need_sources

PROGRAM = '''
import json, multiprocessing, os, sys

def facts():
    return [sys.argv, __file__, sys.path[0], __name__, __package__, __spec__ and __spec__.name]

def use_a_gpu(kind):
    import torch, transformer_engine.pytorch as te
    assert torch.cuda.is_available() and torch.cuda.get_device_properties(0).major == 9
    assert kind is Kind and te.Linear(16, 16)(torch.ones(16, 16, device="cuda")).is_cuda

class Kind: ...

def fail():
    raise ValueError("mine")

if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
    if os.environ.get("ON_A_GPU"):
        use_a_gpu(Kind)
        child = multiprocessing.get_context("spawn").Process(target=use_a_gpu, args=(Kind,))
        child.start()
        child.join()
        assert child.exitcode == 0
    fail() if sys.argv[-1] == "fail" else sys.exit(7)
'''  # fmt: skip


def python(folder: Path, *words: str, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"ON_A_GPU": "1"} if gpu else {})
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "package" / "script.py").write_text(PROGRAM)
    (tmp_path / "package" / "wrong.py").write_text("x = (\n")
    (tmp_path / "link.py").symlink_to("package/script.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("link.py", "-m", "--te-version", "x"),
        ("-m", "package.script", "--help"),
        ("-m", "package", "fail"),
        ("package/script.py", "fail"),
        ("package/wrong.py",),
    ],
    ids=" ".join,
)
def test_a_program_runs_as_by_python(words: tuple[str, ...], folder: Path) -> None:
    """Arguments, names, paths, exit code and the text of an error are the same. A program that ends
    by itself is answered as on a GPU, and so is a process that it spawns."""
    need_sources(DEFAULT_VERSION)
    plain = python(folder, *words)
    found = python(folder, "-m", "te_cpu", "run", *words, gpu=words[-1] != "fail")
    assert found.stdout == plain.stdout and found.returncode == plain.returncode, found.stderr
    assert plain.returncode == (1 if words[-1] in ("fail", "package/wrong.py") else 7)
    own = [line for line in plain.stderr.splitlines() if "<frozen runpy>" not in line]
    assert found.stderr.splitlines() == own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py: No such file or directory. Name a file of Python code"),
        (["."], ".: Is a directory. Name a file"),
        (["-m", "nowhere.at.all"], "No module named nowhere.at.all can be run. -m takes the name"),
        (["-m", "nowhere.py"], "No module named nowhere.py can be run"),
        (["--te-version", "2.1.0", "SCRIPT"], "2.1.0 is too old"),
        (["--te-version", "nowhere/transformer_engine-2.12.0-py3-none-any.whl", "SCRIPT"],
         "there is no such file. Get it with `pip download"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    if "--te-version" not in words:
        monkeypatch.setattr(run, "load", lambda version: None)
    monkeypatch.setattr(run.cuda, "answer_everyone", lambda: None)
    given = [word.replace("SCRIPT", str(tmp_path / "script.py")) for word in words]
    assert run.main(given) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("te_cpu run: ") and said in lines[0]


def test_a_command_without_a_program_shows_how_it_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], ["-m"], ["--te-version", DEFAULT_VERSION]):
        with pytest.raises(SystemExit, match="^2$"):
            run.main(words)
        assert "name a SCRIPT, or a MODULE after -m" in capsys.readouterr().err


def test_the_doctor_says_that_a_version_runs_and_what_is_missing(tmp_path: Path) -> None:
    need_sources(DEFAULT_VERSION)
    done = python(tmp_path, "-m", "te_cpu", "doctor")
    assert done.returncode == 0 and not done.stderr, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == (
        f"Transformer Engine {DEFAULT_VERSION} runs here: a linear in FP8 was computed on the CPU"
    )
    text = " ".join(" ".join(lines).split())
    missing = text.partition("refused by its name: ")[2].split(", ")
    assert "fused_attn_fwd" in missing and not {"generic_gemm", "quantize", "as"} & {*missing}
    assert f"{DEFAULT_VERSION}-py3-none-any.whl (has the SHA-256 of PyPI's)" in text
    assert "einops " in text and "triton " in text and "2.20.2" in text


def test_the_doctor_says_why_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is fetched. What an optional package would add is named."""
    monkeypatch.setenv("MEGAFP8_TE_SOURCES", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_is_there", lambda package: package not in ("onnxscript",))
    for version, why in ((DEFAULT_VERSION, "downloads are off here"), ("2.1.0", "too old")):
        assert doctor.main(["--te-version", version]) == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert last.startswith(f"Transformer Engine {version} does not run here: ") and why in last
        assert lines[2].startswith("optional: triton ")
        absent = "onnxscript is not installed (export to ONNX is refused by name)"
        assert lines[2].endswith(f", {absent}")
