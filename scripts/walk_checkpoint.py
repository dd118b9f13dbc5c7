"""Count what a checkpoint passes through when it is saved and loaded, and who names a recipe.

    python -m scripts.walk_checkpoint                   the counts of this tree
    python -m scripts.walk_checkpoint --tree FOLDER     of another tree, such as a git worktree

A job of two steps saves its last step, and a second job continues it for one step, on one rank of a
CPU with delayed scaling. Counted are the files and functions of megafp8 that run while
`Saver.save` and `load_newest` are active, and of these those that run outside of `COMPARISONS`:
there the settings of the checkpoint are compared with those of the run that continues. A recipe is
named where a text of the source is its name.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.house import JOB
from scripts.packages import packages, sources

ROOT = Path(__file__).parents[1]
PASSES = {("saver.py", "save"): "save", ("load.py", "load_newest"): "load"}
COMPARISONS = ("changed_updates", "last_in_effect")


class Passes:
    """Records the functions that run inside the named passes; `sys.setprofile` calls it."""

    def __init__(self, tree: Path) -> None:
        self._packages = tuple(f"{tree / name}/" for name in packages(tree))
        self._active: tuple[str, FrameType] | None = None
        self._comparing: FrameType | None = None
        self.seen: dict[str, set[tuple[str, str]]] = {}
        self.besides: dict[str, set[tuple[str, str]]] = {}  # outside of comparisons of settings

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Look at one call or return."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._packages):
            return
        if event == "return":
            if self._active is not None and self._active[1] is frame:
                self._active = None
            if self._comparing is frame:
                self._comparing = None
            return
        name = PASSES.get((Path(code.co_filename).name, code.co_name))
        if self._active is None and name is not None:
            self._active = name, frame
        if self._active is not None:
            function = self._name(code.co_filename), code.co_qualname
            self.seen.setdefault(self._active[0], set()).add(function)
            if self._comparing is None and code.co_name in COMPARISONS:
                self._comparing = frame
            if self._comparing is None:
                self.besides.setdefault(self._active[0], set()).add(function)

    def _name(self, file: str) -> str:
        package = next(name for name in self._packages if file.startswith(name))
        return file.removeprefix(package)


def run_inside(tree: Path, arguments: list[str]) -> None:
    """Run a job of `tree` in this process and print the counts."""
    sys.path.insert(0, str(tree))
    sys.argv = [str(tree / "pretrain_gpt.py"), *arguments]
    passes = Passes(tree)
    sys.setprofile(passes)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"the job ended with {end.code}"
    finally:
        sys.setprofile(None)
    for name, functions in passes.seen.items():
        counts = [(len({file for file, _ in each}), len(each))
                  for each in (functions, passes.besides[name])]  # fmt: skip
        text = "{} files, {} functions".format(*counts[0])
        if counts[1] != counts[0]:
            text += "; {} and {} without comparing settings".format(*counts[1])
        print(f"{name}: {text}", flush=True)


def walk(tree: Path) -> None:
    """Run both jobs, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        job = [word for word in JOB if not word.startswith("trainer.max_steps=")]
        job.append(f"exp_manager.explicit_log_dir={folder}/run")
        for steps, wanted in ((2, "save: "), (3, "load: ")):
            command = [sys.executable, "-m", "scripts.walk_checkpoint", "--inside", str(tree)]
            ended = subprocess.run(
                [*command, *job, f"trainer.max_steps={steps}"],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
            )
            print(*(line for line in ended.stdout.splitlines() if line.startswith(wanted)))


def recipe_names(tree: Path) -> tuple[int, int]:
    """Return in how many lines and files of the packages a text is the name of a recipe.

    The names are those of this tree.
    """
    from megafp8.specs.recipes import RECIPES

    lines = set()
    for path in sources(tree):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in RECIPES:
                lines.add((path, node.lineno))
    return len(lines), len({path for path, _ in lines})


def main() -> None:
    """Print the counts."""
    if sys.argv[1:2] == ["--inside"]:
        run_inside(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT)
    tree = parser.parse_args().tree.resolve()
    print("{} lines of {} files name a recipe".format(*recipe_names(tree)))
    walk(tree)


if __name__ == "__main__":
    main()
