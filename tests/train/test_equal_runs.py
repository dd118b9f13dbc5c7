"""Two equal runs write equal checkpoints, byte for byte, in all their tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.train.runs import Place


def test_the_tensors_of_equal_runs_are_equal(place: Place, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        here = replace(place, cwd=tmp_path / name)
        done = here.run("trainer.max_steps=2")
        assert done.code == 0, done.output
        files.append((here.checkpoint(2) / "rank0.safetensors").read_bytes())
    assert files[0] == files[1]
