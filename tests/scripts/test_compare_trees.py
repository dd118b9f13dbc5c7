"""Comparisons of trees find planted differences, and no others (`python -m scripts.compare_trees`).

The fast tests compare trees of a few lines that write the files of a run, so that they start no
training; the slow test plants a difference in the repository itself.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.compare_trees import differences
from scripts.compare_trees.__main__ import compare
from scripts.compare_trees.jobs import HANDED_OVER, JOBS, Job, chosen
from scripts.compare_trees.tree import CannotCompareError, commit_of, extract
from scripts.packages import packages

ROOT = Path(__file__).parents[2]

PREPROCESS = """
from pathlib import Path


def main(argv):
    for name in ("bin", "idx", "tokenizer.json"):
        Path(f"text.{name}").write_text(name)
    return 0
"""
PRETRAIN = """
import json, os, struct, sys
from pathlib import Path

given = dict(word.split("=", 1) for word in sys.argv[1:])
if given["model.hidden_size"] == "1":
    print("error: model.hidden_size: 1 is too small")
    sys.exit(2)
begin = 1
if source := given.get("model.resume_from_checkpoint"):
    assert Path(source, "rank0.safetensors").exists()
    begin = 3
run = Path("runs", given["exp_manager.name"])
if os.environ.get("RANK", "0") == "0":
    run.mkdir(parents=True)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(begin, 5):
            row = {"step": step, "loss": 1 / step, "step_seconds": os.getpid()}
            file.write(json.dumps(row) + "\\n")
    for step in range(begin + 1, 5, 2):
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        text = json.dumps(header).encode()
        data = struct.pack("<2f", 0.0, step)
        (folder / "rank0.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (run / "summary.json").write_text(json.dumps({"step": 4}))
"""
ALONE, RANKS = Job("fp32"), Job("zero/delayed", num_ranks=2)  # jobs that the head continues


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """Make a folder with two equal trees, of a commit and of its working tree."""
    repository = tmp_path / "repository"
    for name, text in {
        "pretrain_gpt.py": PRETRAIN,
        "torch.py": "def manual_seed(seed): pass",  # the true one takes seconds
        "megafp8/cli/preprocess.py": PREPROCESS,
    }.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    (repository / "linked").symlink_to("megafp8")  # a folder, by a link that git records
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], check=True)
    extract(repository, "HEAD", tmp_path / "compared" / "base" / "tree")
    extract(repository, None, tmp_path / "compared" / "head" / "tree")
    for side in ("base", "head"):
        assert (tmp_path / "compared" / side / "tree" / "linked" / "cli").is_dir()
    with pytest.raises(CannotCompareError, match="none-such"):
        commit_of(repository, "none-such")
    return tmp_path / "compared"


def plant(trees: Path, old: str, new: str) -> None:
    path = trees / "head" / "tree" / "pretrain_gpt.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_equal_trees(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Job("refused", ("model.hidden_size=1",))
    assert compare(trees, [ALONE, RANKS, refused], both=True) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(maxsplit=1)[1] for row in rows[:3]] == ["same"] * 3
    assert rows[3].endswith(" refused by both: error: model.hidden_size: 1 is too small")
    assert rows[4].startswith("3 the same, 0 different, 1 refused by both")


def test_a_kept_base_runs_once(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(trees, [ALONE]) == 0
    (trees / "base" / "tree" / "pretrain_gpt.py").write_text("neither read nor run")
    for name in ("fp32", "fp32.json"):
        (trees / "head" / name).rename(trees / "head" / f"old-{name}")
    plant(trees, "1 / step", "2 / step")
    assert compare(trees, [ALONE]) == 1
    assert "step 1 of metrics.jsonl: 1.0 became 2.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("1 / step", "1 / step + (step == 3) * 1e-9", "loss, step 3 of metrics.jsonl: 0.33333"),
        ("0.0, step)", "-0.0, step)", "w, step_00000002/rank0.safetensors: 1 of 2 elements, by at"),
        ('"step": 4', '"step": 5', "step in summary.json: 4 became 5"),
        ("range(begin, 5)", "range(begin, 4)", "4 lines of metrics.jsonl became 3"),
        (
            "begin = 3",
            "begin = 3; given['model.seed']",
            "the base's checkpoint: exit code 1: KeyError",
        ),
        ("begin = 1\n", "begin = 1\nsys.exit(3)\n", "head: exit code 3"),
        ("begin = 1\n", "begin = 1\nos.kill(os.getpid(), 11)\n", "head: exit code -11"),
    ],
)
def test_a_planted_difference(
    trees: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, found: str
) -> None:
    plant(trees, old, new)
    assert compare(trees, [ALONE]) == 1
    output = capsys.readouterr().out
    assert found in output
    assert "1 the same, 1 different" in output  # the data are equal


def test_a_package_of_another_tree_is_noticed(
    trees: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed package would make both trees compute the same, whatever the copies have."""
    (trees / "installed" / "fp8_numerics").mkdir(parents=True)
    (trees / "installed" / "fp8_numerics" / "__init__.py").write_text("")
    line = f"sys.path.append({str(trees / 'installed')!r}); import fp8_numerics\n"
    plant(trees, "begin = 1\n", "begin = 1\n" + line)
    assert compare(trees, [ALONE]) == 1
    assert "head: exit code 70: error: fp8_numerics is imported from" in capsys.readouterr().out
    own = trees / "head" / "tree" / "fp8_numerics"
    own.mkdir()
    (own / "__init__.py").write_text("")
    for path in trees.glob("head/fp32*"):
        path.rename(path.with_name(f"old-{path.name}"))
    assert compare(trees, [ALONE]) == 0


def test_amounts(tmp_path: Path) -> None:
    """Differences of each kind of number are shown in bits and as a distance."""
    one = {
        "nan": np.array([np.nan, 1.0], np.float32),
        "half": np.array([1.0, 2.0], np.float16),
        "count": np.array([7]),
        "bytes": np.array([1, 2, 3], np.uint8),
        "shape": np.zeros(2, np.float32),
        "gone": np.zeros(1, np.float32),
    }
    other: dict[str, Any] = dict(one, count=np.array([9]), shape=np.zeros(3, np.float32))
    other["half"] = np.array([1.0, 2.5], np.float16)
    other["bytes"] = np.array([1, 9, 9], np.uint8)
    del other["gone"]
    save_file(one, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    found = list(differences.of_tensors(tmp_path / "a.safetensors", tmp_path / "b.safetensors"))
    assert sorted(line.replace(f", {tmp_path.name}/a.safetensors", "") for line in found) == [
        "bytes: 2 of 3 bytes",
        "count: 1 of 1 elements, by at most 2",
        "gone: only in the base",
        "half: 1 of 2 elements, by at most 0.5",
        "shape: F32 [2] became F32 [3]",
    ]


def test_jobs_have_names_of_their_own() -> None:
    assert len({job.folder for job in JOBS}) == len(JOBS)
    assert {job.name for job in JOBS} >= HANDED_OVER
    assert [job.name for job in chosen(["bf16", "zero/p*"])] == ["bf16", "zero/params"]
    with pytest.raises(CannotCompareError, match="nothing/like"):
        chosen(["nothing/like*"])


CHANGED_CAST = """


_right = quantize


def quantize(*args, **words):
    payload, grid = _right(*args, **words)
    payload.view(torch.uint8).flatten()[:1].bitwise_xor_(1)
    return Quantized(payload, None if grid is None else payload.to(grid.dtype))
"""


@pytest.mark.slow
def test_one_changed_bit_of_the_copys_cast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy's cast is the one that runs, wherever this repository's packages are installed."""
    for name in ("base", "head"):
        extract(ROOT, None, tmp_path / name / "tree")
    tree = tmp_path / "head" / "tree"
    (cast,) = [
        path
        for folder in packages(tree)
        for path in (tree / folder).rglob("cast.py")
        if "\ndef quantize(" in path.read_text()
    ]
    with open(cast, "a") as file:
        file.write(CHANGED_CAST)
    assert compare(tmp_path, chosen(["bf16/delayed"])) == 1
    rows = capsys.readouterr().out
    assert "1 the same, 1 different" in rows and "loss, step 1 of metrics.jsonl" in rows


@pytest.mark.slow
def test_another_seed_in_this_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = chosen(["bf16/delayed", "tensor/delayed", "resume/delayed", "generate/delayed"])
    same, planted = tmp_path / "same", tmp_path / "planted"
    for name in ("base", "head"):
        for folder in (same, planted):
            extract(ROOT, None, folder / name / "tree")
    assert compare(same, jobs) == 0, capsys.readouterr().out
    conf = planted / "head" / "tree" / "conf" / "pretrain_gpt.yaml"
    with open(conf, "a") as file:
        file.write("  seed: 1235\n")  # the file ends in the section `model`
    assert compare(planted, jobs) == 1
    assert capsys.readouterr().out.count("loss, step 1 of metrics.jsonl") == len(jobs)
