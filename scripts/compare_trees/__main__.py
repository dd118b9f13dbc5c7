"""Run short jobs in two versions of this repository, and compare the results bit for bit.

python -m scripts.compare_trees BASE [--head COMMIT] [--jobs 'tensor/*' …] [--keep FOLDER] [--both]

BASE and COMMIT are commits. The version at COMMIT is called the head; without --head, it is the
working tree with its uncommitted changes. For each job, losses, gradient norms, the health of FP8
tensors and all tensors of the checkpoints (weights, moments, scales, histories) must be the same
bits. For each kind of state, the head must also continue the base's checkpoint as the base itself
did. With --keep, the base's runs stay in FOLDER, and the next comparison with the same base uses
them again. A job that both trees refuse is reported, and compares nothing. The exit code is 1 if
anything differs.
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
SHOWN = 3  # differences shown for a job


def main(argv: list[str]) -> int:
    """Return 0 if all jobs are the same and 1 if not; a wrong command exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", nargs="?", help="a commit")
    parser.add_argument("--head", help="another commit (default: the working tree)")
    parser.add_argument(
        "--jobs",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="shell patterns of names (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="list the jobs and run nothing")
    parser.add_argument(
        "--both", action="store_true", help="run both trees at the same time, on two cores"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all runs in this folder")
    options = parser.parse_args(argv)
    base, head, both = options.base, options.head, options.both
    try:
        jobs = chosen(options.jobs)
        if options.list:
            print("\n".join(job.name for job in jobs))
            return 0
        if base is None:
            parser.error("give the commit of the base")
        if options.keep is not None:
            return compare_commits(options.keep.absolute(), base, head, jobs, both=both)
        with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as folder:
            return compare_commits(Path(folder), base, head, jobs, both=both)
    except CannotCompareError as error:
        parser.error(str(error))


def compare_commits(
    folder: Path, base: str, head: str | None, jobs: list[Job], *, both: bool = False
) -> int:
    """Copy both trees to `folder`, compare them, and return the exit code.

    Raises:
        CannotCompareError: There is no such commit, or `folder` has other files.
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
            raise CannotCompareError(f"{folder} is not empty, and has no comparison")
        extract(ROOT, commit, folder / "base" / "tree")
        record.write_text(json.dumps(made_of))
    elif (kept := json.loads(record.read_text())) != made_of:
        changed = [key for key in made_of if kept.get(key) != made_of[key]]
        raise CannotCompareError(f"{folder} has runs with another {', '.join(changed)}")
    shutil.rmtree(folder / "head", ignore_errors=True)
    extract(ROOT, head and commit_of(ROOT, head), folder / "head" / "tree")
    return compare(folder, jobs, both=both)


def compare(folder: Path, jobs: list[Job], *, both: bool = False) -> int:
    """Run `jobs` in `folder/base/tree` and `folder/head/tree`; print a row for each.

    Args:
        folder: The folder of the trees and their runs.
        jobs: The jobs in order.
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
            shown = list(itertools.islice(found, SHOWN))
            is_refused = bool(shown) and shown[0].startswith(REFUSED)
            num_refused += is_refused
            num_different += bool(shown) and not is_refused
            print(f"{name:<{width}}  " + f"\n{'':<{width}}  ".join(shown or ["same"]), flush=True)
    same = len(jobs) + 1 - num_different - num_refused
    print(
        f"{same} the same, {num_different} different, {num_refused} refused by both "
        f"({time.monotonic() - began:.0f} s)"
    )
    return int(num_different > 0)


def compared_data(base: Tree, head: Tree) -> Iterator[str]:
    """Make the dataset of all jobs in both trees, and yield the files that differ."""
    names = ("text.bin", "text.idx", "text.tokenizer.json")
    for tree in (base, head):
        if all((tree.folder / "data" / name).exists() for name in names):
            continue  # a base that was kept has it
        done = prepare(tree)
        if done.code:
            raise CannotCompareError(f"{tree.folder.name}: no dataset: {done.last_line}")
    for name in names:
        ours, theirs = (tree.folder / "data" / name for tree in (base, head))
        if ours.read_bytes() != theirs.read_bytes():
            yield f"{name} differs"


def compared(job: Job, base: Tree, head: Tree, both: bool) -> Iterator[str]:
    """Run the job in both trees; yield the differences, or that both refuse the job."""
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
            ours_text, theirs_text = (folder.joinpath(name).read_text() for folder in (mine, other))
            if ours_text != theirs_text:
                yield f"{name}: {ours_text!r} became {theirs_text!r}"
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
