"""Count the packages' files, lines and functions, and the stations of a token and of a setting.

    python -m scripts.house                    counts of this tree
    python -m scripts.house --walk             run two small steps; list stations, count imports
    python -m scripts.house --sample [SEED]    draw 25 functions, to be read for how clear they are
    python -m scripts.house --tree FOLDER      the same for another tree, such as a git worktree

A token's path is every file of the packages with a function that takes or returns an array or a
tensor while two training steps run on a CPU with delayed scaling. The path of the settings is every
function of the packages and of pretrain_gpt.py that receives the command line, the whole tree of
settings or the `RunSpec` and passes it on to another function, from `main` to the first call of
`build`. Functions that only read it, such as rules, do not count.

A constant is late if a function stands before it although its value needs no function of the file.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from scripts import packages

ROOT = Path(__file__).parents[1]
NUM_STEPS = 2
JOB = (
    "trainer.accelerator=cpu", f"trainer.max_steps={NUM_STEPS}", "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1", "model.fp8=True", "model.num_layers=2", "model.hidden_size=64",
    "model.ffn_hidden_size=128", "model.num_attention_heads=4", "model.encoder_seq_length=32",
    "model.micro_batch_size=2", "model.global_batch_size=2", "model.optim.sched.warmup_steps=0",
    "exp_manager.create_tensorboard_logger=False",
)  # fmt: skip
SETTINGS = ("Options", "DictConfig", "RunSpec", "Loaded", "Merged", "Composed")
RULES = ("findings", "unused", "effective", "_contradictions")  # all below them only read settings
OF_TE = ("megafp8.backends.te", "te_cpu")
SAMPLE_SEED, SAMPLE_SIZE, SHORTEST_OF_SAMPLE = 20261123, 25, 8  # of functions, and their lines
MOST_KEYS = 100  # a dict of settings with more keys than this is the whole tree


def main() -> None:
    """Print the counts, or with `--walk` the stations."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--walk", action="store_true")
    parser.add_argument("--sample", metavar="SEED", type=int, nargs="?", const=SAMPLE_SEED)
    args = parser.parse_args()
    if args.sample is not None:
        print(*sample(args.tree, args.sample), sep="\n")
    elif args.walk:
        walk(args.tree.resolve())
    else:
        print_counts(args.tree)


def print_counts(tree: Path) -> None:
    """Print one line for each count of the files of all packages, and one for each package."""
    files = packages.sources(tree)
    sources = [path.read_text("utf-8") for path in files]
    lines = [len(source.splitlines()) for source in sources]
    functions = sorted(length for source in sources for length in function_lengths(source))
    small = sum(count < 60 for count in lines)
    longest = [f"{path.relative_to(tree)} ({n})" for path, n in zip(files, lines, strict=True)
               if n > 500]  # fmt: skip
    print(f"files {len(files)}, of less than 60 lines {small}, of more than 500 {longest or 0}")
    print(f"lines {sum(lines)}, of code {sum(code_lines(source) for source in sources)}")
    print(f"lines of a file: median {statistics.median(lines):.0f}, most {max(lines)}")
    print(
        f"lines of a function: median {statistics.median(functions):.0f}, "
        f"90 % up to {functions[len(functions) * 9 // 10]}, most {functions[-1]}"
    )
    classes = Counter(
        node.name for source in sources for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    print(f"names of classes in several files {sum(num > 1 for num in classes.values())}")
    print(f"late constants {sum(late_constants(source) for source in sources)}")
    for name in packages.packages(tree):
        mine = [s for p, s in zip(files, sources, strict=True) if p.is_relative_to(tree / name)]
        num_lines = sum(len(source.splitlines()) for source in mine)
        code = sum(code_lines(source) for source in mine)
        print(f"{name}: files {len(mine)}, lines {num_lines}, of code {code}")


def function_lengths(source: str) -> Iterable[int]:
    """Yield the lines of each function, its docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def late_constants(source: str) -> int:
    """Return how many constants of a file a function precedes that their values do not need."""
    seen: set[str] = set()  # functions, and constants and classes that need one
    found, is_late = 0, False
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            seen.add(node.name)
            is_late = True
        elif isinstance(node, ast.ClassDef) and seen:
            seen.add(node.name)  # a constant below may have to follow the class
        elif isinstance(node, ast.Assign | ast.AnnAssign) and is_late:
            if seen.isdisjoint(name.id for name in ast.walk(node) if isinstance(name, ast.Name)):
                found += 1
            else:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                seen.update(ast.unparse(target) for target in targets)
    return found


def sample(tree: Path, seed: int = SAMPLE_SEED) -> list[str]:
    """Return where 25 functions are: one of each part, then others.

    A part is a package beside megafp8, a package inside megafp8, or a module beside those.

    They are drawn by `seed` from all functions of at least 8 lines, in the order of the source.
    """
    functions: dict[str, list[str]] = {}
    for path in packages.sources(tree):
        top, *below = path.relative_to(tree).parts
        package = below[0].removesuffix(".py") if top == packages.MAIN else top
        found = [
            node for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno + 1 >= SHORTEST_OF_SAMPLE
        ]  # fmt: skip
        functions.setdefault(package, []).extend(
            f"{path.relative_to(tree)}:{node.lineno} {node.name}"
            for node in sorted(found, key=lambda node: node.lineno)
        )
    draw = random.Random(seed)
    drawn = [draw.choice(names) for _, names in sorted(functions.items()) if names]
    rest = [name for names in functions.values() for name in names if name not in drawn]
    return drawn + draw.sample(rest, SAMPLE_SIZE - len(drawn))


def code_lines(source: str) -> int:
    """Return the number of lines that are no docstring, no comment and not blank."""
    kept: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and token.type != tokenize.ENDMARKER:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                kept.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(kept)


def walk(tree: Path) -> None:
    """Run the job in `tree`, in a process of its own, and print the stations."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.house", "--inside", str(tree), *JOB,
                   f"exp_manager.explicit_log_dir={folder}/run"]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # of this file; the job has `tree`
        subprocess.run(command, cwd=folder, env=environment, check=True)


class Stations:
    """Records, while a job runs, which functions see the settings and which files see tensors."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.settings: dict[str, None] = {}
        self.receivers: dict[int, str] = {}  # active functions that were given the settings
        self.files: dict[str, None] = {}
        self.files_of_steps: set[str] = set()
        self.is_built = self.is_training = False
        self.num_steps = self.num_rules = 0

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Look at one call or return; `sys.setprofile` calls this."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(self.tree)):
            return
        name = Path(code.co_filename).relative_to(self.tree).as_posix()
        if not (packages.is_ours(name.partition("/")[0], self.tree) or name == "pretrain_gpt.py"):
            return
        if event == "call" and name.endswith("train/build.py") and code.co_name == "build":
            self.is_built = True
        if event == "call" and code.co_name == "train_step":
            self.is_training = True
        if event == "return" and code.co_name == "train_step":
            self.num_steps += 1
            if self.num_steps == NUM_STEPS:
                self.print()
                os._exit(0)  # the validation of the whole text would add nothing
        given = arguments(frame, code) if event == "call" else [result]
        if code.co_name in RULES:
            self.num_rules += 1 if event == "call" else -1
        elif self.is_built or self.num_rules:
            pass
        elif event == "call" and any(map(is_settings, given)):
            self.receivers[id(frame)] = f"{name}:{code.co_qualname}"
            if (caller := self.receivers.get(id(frame.f_back))) is not None:
                self.settings.setdefault(caller)
        elif event == "return":
            self.receivers.pop(id(frame), None)
        reads_data = name.startswith("megafp8/data/") and self.is_built
        if (self.is_training or reads_data) and any(map(is_array, given)):
            self.files.setdefault(name)
            if self.is_training and not name.startswith("megafp8/data/"):
                self.files_of_steps.add(name)

    def print(self) -> None:
        """Print what was seen."""
        for what, names in (("functions", self.settings), ("files", self.files)):
            print(f"\n{len(names)} {what}, in the order of their first call:")
            print("\n".join(f"  {name}" for name in names), flush=True)
        ours = [name for name in sys.modules if packages.is_ours(name, self.tree)]
        print(f"\n{len(self.files_of_steps)} of these without data, from train_step on")
        print(f"{len(ours)} modules of the packages imported, "
              f"{sum(name.startswith(OF_TE) for name in ours)} of them Transformer Engine's",
              flush=True)  # fmt: skip


def arguments(frame: FrameType, code: CodeType) -> list[Any]:
    """Return the values of a call's arguments."""
    count = code.co_argcount + code.co_kwonlyargcount
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


def is_settings(value: Any) -> bool:
    """Whether `value` is the command line or all settings."""
    if isinstance(value, list | tuple) and any(isinstance(w, str) and w == JOB[0] for w in value):
        return True
    is_tree = isinstance(value, dict) and len(value) > MOST_KEYS and "trainer.max_steps" in value
    return is_tree or type(value).__name__ in SETTINGS


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an array, or a sequence that begins with one."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return type(value).__name__ in ("Tensor", "ndarray", "memmap", "Parameter", "Microbatch",
                                    "Fp8Tensor", "Operands")  # fmt: skip


def run_inside(tree: Path, overrides: list[str]) -> None:
    """Run the job in this process, and print what its profile function has seen."""
    import threading

    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(tree))
    sys.argv = [str(tree / "pretrain_gpt.py"), *overrides]
    stations = Stations(tree)
    threading.setprofile(stations)
    namespace = runpy.run_path(sys.argv[0], run_name="pretrain_gpt")
    sys.setprofile(stations)
    namespace["main"]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(Path(sys.argv[2]), sys.argv[3:])
    main()
