"""Take out each application and option of this repository in turn, and see what still works.

python -m scripts.removals [NAME …] [--whole] [--table FILE]

For each name, a copy of the last commit loses the files of that part by one `rm`, and at most one
line elsewhere. Then every module that is left is imported, the default job runs 20 steps in FP8,
and the neighbours' tests run. With --whole, the whole fast suite runs in place of these. The tests
that cannot be imported without it are taken out with it. A part that cannot be taken out so has
grown into the others; the table counts the places that name it. The exit code is 1 if a part fails
that has to be separable, because it is a package of its own.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.compare_trees.tree import commit_of, extract
from scripts.packages import ROOT, packages, sources

TABLE = ROOT / "docs/evidence/removals.md"
SECONDS = 180.0  # for the imports, the job and the tests each
WHOLE_SECONDS = 7200.0
NOT_FAST = "not gpu and not slow and not slurm and not hosts"
STEPS = 20
EXPLANATION = """\
# What can be taken out

`python -m scripts.removals` takes out each application and option in turn: one `rm`, and at most
one line elsewhere. Then every module that is left is imported, the default job runs 20 steps in
FP8, and the neighbours' tests run (with `--whole`, the whole fast suite but for `tests/test_*.py`,
which hold the documents and lists that name the part). Tests that cannot be imported without what
was taken out, and cases of tests with its name, go with it; other tests that need it are skipped.
A part that stays has grown into others: the column "first failure" names the first thing that
fails, and "places" is the number of other files that name the part.
"""
COLUMNS = (
    "part",
    "lines",
    "besides the `rm`",
    "imports",
    "job",
    "tests",
    "places",
    "first failure",
    "commit",
)
JOB = (
    "model.fp8=True",
    f"trainer.max_steps={STEPS}",
    "trainer.accelerator=cpu",
    "trainer.limit_val_batches=0",
    "exp_manager.explicit_log_dir=run",
)


@dataclass(frozen=True)
class Part:
    """Describe a part that may be taken out.

    Attributes:
        name: The name in the table and on the command line.
        paths: Files and folders, as patterns relative to the repository.
        neighbours: Folders and files of tests that run afterwards.
        change: A file, and the text in one line of it that is deleted too.
        is_package: Whether it is a package of its own, which has to be separable.
        case: A word in the names of the tests' cases that try it, which are left out.
    """

    name: str
    paths: tuple[str, ...]
    neighbours: tuple[str, ...]
    change: tuple[str, str] | None = None
    is_package: bool = False
    case: str = ""


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
PARTS = (
    Part(
        "te_cpu",
        ("te_cpu", "tests/te_cpu", "megafp8/backends/te/on_cpu.py", "scripts/te_*.py",
                   "examples/*_transformer_engine_*.py"),
        ("tests/backends", "tests/fp8/test_linear.py"), is_package=True,
    ),
    Part(
        "fp8_coverage", ("fp8_coverage",),  # megafp8.fp8 counts products by it, so that it stays
        ("tests/fp8_numerics/test_gemm.py", "tests/fp8/test_linear.py"),
    ),
    Part(
        "megafp8_migrate", ("megafp8_migrate", "tests/megafp8_migrate"),
        ("tests/cli/test_commands.py", "tests/config/test_load.py"), is_package=True,
    ),
    Part(
        "sweeps and comparison",
        ("megafp8/jobs", "megafp8/cli/sweep.py", "megafp8/cli/compare.py", "hydra_plugins"),
        ("tests/cli/test_commands.py", "tests/train/test_command_line.py"),
    ),
    Part(
        "pages", ("megafp8/report",), ("tests/cli/test_commands.py", "tests/train/test_summary.py"),
    ),
    Part(
        "plan and dry run",
        ("megafp8/plan", "megafp8/cli/plan*.py", "megafp8/cli/dryrun.py"),
        ("tests/cli/test_commands.py", "tests/train/test_header.py"),
    ),
    Part(
        "fine-tuning", ("megafp8/cli/finetune.py", "finetune_gpt.py", "conf/finetune_gpt.yaml"),
        ("tests/cli/test_commands.py", "tests/config/test_load.py"), case="fine_tuning",
    ),
    Part(
        "Hugging Face import and export",
        ("megafp8/*/huggingface.py", "megafp8/*/serv*.py", "megafp8/cli/import_hf.py",
         "megafp8/cli/export*.py"),
        ("tests/checkpoint", "tests/cli/test_commands.py"),
    ),
    Part(
        "serve-diff", ("megafp8/*/serve_*.py", "benchmarks/serve_diff.py"),
        ("tests/checkpoint/test_serving.py",),
    ),
    Part("torchao", ("megafp8/backends/torchao.py",), ("tests/backends/test_protocol.py",)),
    *(
        Part(
            f"recipe {name}", (f"megafp8/fp8/recipes/{name}.py",),
            ("tests/fp8/test_recipes.py", "tests/config/test_own_recipes.py"),
            change=("megafp8/specs/recipes.py", f', "{name}"'), case=name,
        )
        for name in RECIPES
    ),
    Part(
        "Muon", ("megafp8/optim/muon.py",), ("tests/optim", "tests/train/test_step.py"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Hold what is known of one part after it was taken out."""

    part: Part
    num_lines: int
    imports: str
    job: str
    tests: str
    num_places: int
    failure: str = ""

    @property
    def is_out(self) -> bool:
        """Whether everything else works without the part."""
        return not self.failure

    def text(self) -> str:
        """Return the row of the table, without its last column."""
        change = f"a line of `{self.part.change[0]}`" if self.part.change else "nothing"
        cells = (self.part.name, self.num_lines, change, self.imports, self.job, self.tests)
        return f"| {' | '.join(map(str, cells))} | {self.num_places} | {self.failure or '–'} |"


def take_out(part: Part, tree: Path) -> Row:
    """Take `part` out of the copy of the repository in `tree`, which is changed; try the rest."""
    paths = [path for pattern in part.paths for path in sorted(tree.glob(pattern))]
    if not paths:
        raise SystemExit(f"removals: {part.name}: no file is at {', '.join(part.paths)}")
    gone = [file for path in paths for file in _files(path)]
    modules = {_module(file.relative_to(tree)) for file in gone if file.suffix == ".py"}
    code = [file for file in gone if file.suffix == ".py" and tree / "tests" not in file.parents]
    num_lines = sum(len(file.read_text().splitlines()) for file in code)
    for path in paths:
        subprocess.run(["rm", "-r", str(path)], check=True)
    if part.change is not None:
        _delete(tree / part.change[0], part.change[1])
    (tree / "sitecustomize.py").write_text(_WITHOUT_INSTALLED)
    outside = (path for path in tree.rglob("*.py") if not path.is_relative_to(tree / "tests"))
    num_places = sum(bool(modules & {*_named(path)}) for path in outside)
    while modules:  # tests that import tests which went go, too
        tests = [path for path in (tree / "tests").rglob("*.py") if modules & {*_imported(path)}]
        modules = {_module(path.relative_to(tree)) for path in tests}
        for path in tests:
            path.unlink()
    return Row(part, num_lines, "", "", "", num_places)


def tried(row: Row, tree: Path, *, whole: bool) -> Row:
    """Try what is left in `tree`, and return the row with what was seen."""
    results = {"imports": "–", "job": "–", "tests": "–"}
    for name, (command, seconds) in _trials(row.part, tree, whole=whole).items():
        results[name], failure = _outcome(name, command, tree, seconds)
        if failure:
            return Row(
                row.part, row.num_lines, **results, num_places=row.num_places, failure=failure
            )
    return Row(row.part, row.num_lines, **results, num_places=row.num_places)


def _trials(part: Part, tree: Path, *, whole: bool) -> dict[str, tuple[list[str], float]]:
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", NOT_FAST]
    pytest += ["-p", "no:fp8_coverage"]  # its installed fixture, which a copy may have lost
    chosen = [name for name in part.neighbours if (tree / name).exists()]
    left = [_module(p.relative_to(tree)) for p in sources(tree) if p.stem != "__main__"]
    ours = ",".join({*packages(), *(name.partition(".")[0] for name in left)})
    pytest += ["-k", f"not {part.case}"] if part.case else []
    limits = WHOLE_SECONDS if whole else SECONDS
    spread = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    lists = [*tree.glob("tests/test_*.py"), tree / "tests/scripts/test_removals.py"]
    spread += [f"--ignore={path}" for path in lists]
    return {
        "imports": ([sys.executable, "-c", _IMPORT_ALL, ours, *left], SECONDS),
        "job": ([sys.executable, "pretrain_gpt.py", *JOB], SECONDS),
        "tests": ([*pytest, *(spread if whole else chosen)], limits),
    }


_WITHOUT_INSTALLED = """
import importlib.machinery, importlib.util, pathlib, sys
sys.meta_path[:] = [
    finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")
]
others = [path for path in sys.path if path != str(pathlib.Path(__file__).parent)]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""What each Python of a copy runs first: an editable install of this repository would stand in for
the package that was taken out. A test's own file of this name runs after it."""
_IMPORT_ALL = """
import importlib, sys
ours = set(sys.argv[1].split(","))
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:  # one of an optional package of others is no fault
        if not isinstance(error, ModuleNotFoundError) or error.name.partition(".")[0] in ours:
            sys.exit(f"{name}: {error}")
"""


def _outcome(name: str, command: list[str], tree: Path, seconds: float) -> tuple[str, str]:
    """Return how a command ended, and its last error, which is empty if all went well."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "not in time", f"takes more than {seconds:g} s"
    took = time.monotonic() - began
    print(f"   {name}: exit code {done.returncode}, {took:.0f} s", flush=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == 0:
        return (lines[-1].partition(" in ")[0].strip("= ") if name == "tests" else "yes"), ""
    errors = [line for line in lines if line.startswith(("FAILED", "ERROR", "error:", "E  "))]
    print(*(f"   {line}" for line in errors), sep="\n", flush=True)
    return "no", (errors or lines or ["no output"])[-1].replace("|", "/")[:160]


def _delete(path: Path, text: str) -> None:
    content = path.read_text()
    if content.count(text) != 1:
        raise SystemExit(f"removals: {path}: {text!r} is not there once")
    path.write_text(content.replace(text, ""))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules, and the names in modules, without which a file cannot be imported."""
    for node in ast.parse(path.read_text()).body:
        yield from _of_import(node)


def _named(path: Path) -> Iterator[str]:
    """Yield the modules, and the names in modules, that a file imports or names as a text."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from _of_import(node)
        match node:
            case ast.Constant(value=str(text)) if "." in text and text.isprintable():
                yield text
                yield text.rpartition(".")[0]


def _of_import(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts (default: all)")
    parser.add_argument("--whole", action="store_true", help="run the whole fast suite")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args(argv)
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no part is called {', '.join(unknown)}: use {', '.join(known)}")
    rows = []
    for name in args.names or known:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="removals-") as folder:
            tree = Path(folder)
            extract(ROOT, "HEAD", tree)
            row = tried(take_out(known[name], tree), tree, whole=args.whole)
        print(row.text(), flush=True)
        rows.append(row)
    write_table(rows, args.table)
    return int(any(row.part.is_package and not row.is_out for row in rows))


def write_table(rows: list[Row], table: Path) -> None:
    """Put the rows into the table, in place of the older rows of the same parts."""
    old = {}
    if table.exists():
        lines = table.read_text().splitlines()
        old = {line.split(" | ")[0].removeprefix("| "): line for line in lines if " | " in line}
    commit = commit_of(ROOT, "HEAD")[:10]
    new = {row.part.name: f"{row.text()} {commit} |" for row in rows}
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    body = [new.get(part.name) or old.get(part.name) for part in PARTS]
    table.write_text("\n".join([EXPLANATION, *head, *filter(None, body)]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
