"""The walk of a checkpoint counts what runs inside its passes, and lines that name a recipe."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.walk_checkpoint import Passes, recipe_names


def test_only_functions_inside_a_pass_count(tmp_path: Path) -> None:
    """A function of the package counts once; those before and after the pass do not."""
    package = tmp_path / "megafp8" / "train"
    package.mkdir(parents=True)
    path = package / "saver.py"
    source = (
        "import json\n"
        "def helper():\n    return json.dumps([1])\n"
        "def other():\n    return helper()\n"
        "def changed_updates():\n    return list(map(lambda x: x, [1]))\n"
        "def save():\n    helper()\n    changed_updates()\n    return helper()\n"
        "other()\nsave()\nother()\n"
    )
    path.write_text(source)
    passes = Passes(tmp_path)
    program = compile(source, str(path), "exec")
    sys.setprofile(passes)
    try:
        exec(program, {})
    finally:
        sys.setprofile(None)
    outside = {("train/saver.py", "save"), ("train/saver.py", "helper")}
    assert passes.besides == {"save": outside}
    comparing = ("changed_updates", "changed_updates.<locals>.<lambda>")
    assert passes.seen == {"save": outside | {("train/saver.py", name) for name in comparing}}


def test_lines_that_name_a_recipe(tmp_path: Path) -> None:
    package = tmp_path / "megafp8"
    package.mkdir()
    (package / "one.py").write_text('A = "delayed", "mxfp8"\nB = "delayed"\n# "nvfp4"\n')
    (package / "two.py").write_text('C = "a delayed text"\n')
    assert recipe_names(tmp_path) == (2, 1)
