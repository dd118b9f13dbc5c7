"""Runs short jobs in two versions of this repository and compares them bit for bit.

python -m scripts.compare_trees BASE [--head COMMIT] [--jobs 'tensor/*' …] [--keep FOLDER] [--both]

BASE and COMMIT are commits; without --head it is the working tree, with what is not committed. For
each job: losses, gradient norms, the health of FP8 tensors and all tensors of the checkpoints
(weights, moments, scales, histories) must be the same bits, and for each kind of state the head
must continue the base's checkpoint as the base itself did. With --keep the base's runs stay in
FOLDER and are used again by the next comparison with the same base. A job that both trees refuse
compares nothing and is told. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from scripts.compare_trees import differences
from scripts.compare_trees.jobs import MIDDLE, Job, chosen
from scripts.compare_trees.perform import GENERATED, RUN, hand_over, perform, prepare
from scripts.compare_trees.tree import CannotCompareError, Tree, commit_of, extract, make_text

ROOT = Path(__file__).parents[2]
BAD_SETTING = 2  # pretrain_gpt.py's exit code
REFUSED = "refused by both: "
SHOWN = 3  # differences of a job


def main(argv: list[str]) -> int:
    """0 if all jobs are the same, 1 if not, 2 for a wrong command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", nargs="?", help="a commit")
    parser.add_argument("--head", help="another one (the working tree)")
    parser.add_argument(
        "--jobs", nargs="+", default=[], metavar="PATTERN", help="their names, as in a shell (all)"
    )
    parser.add_argument("--list", action="store_true", help="names the jobs, runs nothing")
    parser.add_argument("--both", action="store_true", help="both trees at once, on two cores")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="all runs stay there (none do)")
    options = parser.parse_args(argv)
    base, head, both = options.base, options.head, options.both
    try:
        jobs = chosen(options.jobs)
        if options.list:
            print("\n".join(job.name for job in jobs))
            return 0
        if base is None:
            parser.error("which commit is the base?")
        if options.keep is not None:
            return compare_commits(options.keep.absolute(), base, head, jobs, both=both)
        with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as folder:
            return compare_commits(Path(folder), base, head, jobs, both=both)
    except CannotCompareError as error:
        parser.error(str(error))


def compare_commits(
    folder: Path, base: str, head: str | None, jobs: list[Job], *, both: bool = False
) -> int:
    """Fetch both trees into `folder` and compare them; the exit code.

    Raises:
        CannotCompareError: There is no such commit, or `folder` holds something else.
    """
    commit = commit_of(ROOT, base)
    makers = sorted(Path(__file__).parent.glob("*.py"))
    made_of = {
        "commit": commit,
        "jobs": hashlib.sha256(b"".join(path.read_bytes() for path in makers)).hexdigest(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    record = folder / "base.json"
    if not record.exists():
        if folder.exists() and any(folder.iterdir()):
            raise CannotCompareError(f"{folder} is not empty, and no comparison made it")
        extract(ROOT, commit, folder / "base" / "tree")
        record.write_text(json.dumps(made_of))
    elif (kept := json.loads(record.read_text())) != made_of:
        changed = [key for key in made_of if kept.get(key) != made_of[key]]
        raise CannotCompareError(f"{folder} holds runs with another {', '.join(changed)}")
    shutil.rmtree(folder / "head", ignore_errors=True)
    extract(ROOT, head and commit_of(ROOT, head), folder / "head" / "tree")
    return compare(folder, jobs, both=both)


def compare(folder: Path, jobs: list[Job], *, both: bool = False) -> int:
    """Run `jobs` in `folder/base/tree` and `folder/head/tree`; print a row for each.

    Args:
        folder: Where the trees are and their runs go.
        jobs: In their order.
        both: Whether a job runs in both trees at the same time.

    Returns:
        The exit code.
    """
    began = time.monotonic()
    make_text(folder / "text.txt")
    num_different = num_refused = 0
    width = max(len(job.name) for job in jobs)
    with Tree(folder / "base") as base, Tree(folder / "head") as head:
        data = [("data", compared_data(base, head))]
        rest = ((job.name, compared(job, base, head, both)) for job in jobs)
        for name, found in itertools.chain(data, rest):
            told = list(itertools.islice(found, SHOWN))
            is_refused = bool(told) and told[0].startswith(REFUSED)
            num_refused += is_refused
            num_different += bool(told) and not is_refused
            print(f"{name:<{width}}  " + f"\n{'':<{width}}  ".join(told or ["same"]), flush=True)
    same = len(jobs) + 1 - num_different - num_refused
    print(
        f"{same} the same, {num_different} different, {num_refused} refused by both "
        f"({time.monotonic() - began:.0f} s)"
    )
    return int(num_different > 0)


def compared_data(base: Tree, head: Tree) -> Iterator[str]:
    """Both trees make the dataset of all jobs; what differs between them."""
    names = ("text.bin", "text.idx", "text.tokenizer.json")
    for tree in (base, head):
        if all((tree.folder / "data" / name).exists() for name in names):
            continue  # a kept base
        done = prepare(tree)
        if done.code:
            raise CannotCompareError(f"{tree.folder.name}: no dataset: {done.last_line}")
    for name in names:
        ours, theirs = (tree.folder / "data" / name for tree in (base, head))
        if ours.read_bytes() != theirs.read_bytes():
            yield f"{name} differs"


def compared(job: Job, base: Tree, head: Tree, both: bool) -> Iterator[str]:
    """Run the job in both; the differences, or that both refuse it."""
    with ThreadPoolExecutor(2 if both else 1) as pool:
        ours, theirs = pool.map(lambda tree: perform(job, tree), (base, head))
    if ours.code or theirs.code:
        if ours == theirs and ours.code == BAD_SETTING:
            yield f"{REFUSED}{ours.last_line}"
            return
        for name, done in (("base", ours), ("head", theirs)):
            yield f"{name}: exit code {done.code}: {done.last_line}"
        return
    mine, other = base.folder / job.folder, head.folder / job.folder
    yield from differences.of_runs(mine / RUN, other / RUN)
    if job.kind == "generate":
        for name in GENERATED:
            said, heard = (folder.joinpath(name).read_text() for folder in (mine, other))
            if said != heard:
                yield f"{name}: {said!r} became {heard!r}"
    elif job.kind == "export":
        yield from differences.of_checkpoints(mine / "exported", other / "exported")
    if job.is_handed_over:
        done, run = hand_over(job, base, head)
        if done.code:
            yield f"the base's checkpoint: exit code {done.code}: {done.last_line}"
            return
        for difference in differences.of_continued(mine / RUN, run, MIDDLE):
            yield f"after the base's checkpoint: {difference}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
