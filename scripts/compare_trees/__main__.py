"""Runs short jobs in two versions of this repository and compares them bit for bit.

python -m scripts.compare_trees BASE [--head COMMIT] [--jobs 'tensor/*' …]

BASE and COMMIT are commits; without --head it is the working tree, with what is not committed. For
each job: losses, gradient norms, the health of FP8 tensors and all tensors of the checkpoints
(weights, moments, scales, histories) must be the same bits, and the head must continue the base's
checkpoint as the base itself did. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.compare_trees import differences
from scripts.compare_trees.jobs import MIDDLE, Job, chosen
from scripts.compare_trees.tree import CannotCompareError, Done, Tree, extract, make_text

ROOT = Path(__file__).parents[2]
SCRIPT = "pretrain_gpt.py"
BAD_SETTING = 2  # its exit code
KILLED = "killed"  # the run as a kill left it, within a job's folder
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
    parser.add_argument("--keep", type=Path, help="a new folder for trees and runs (none stay)")
    options = parser.parse_args(argv)
    try:
        jobs = chosen(options.jobs)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    if options.base is None:
        parser.error("which commit is the base?")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="compare-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return compare(folder.absolute(), options.base, options.head, jobs)
    except CannotCompareError as error:
        parser.error(str(error))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def compare(folder: Path, base_commit: str, head_commit: str | None, jobs: list[Job]) -> int:
    """Run `jobs` in both trees and print a row for each; the exit code."""
    began = time.monotonic()
    make_text(folder / "text.txt")
    extract(ROOT, base_commit, folder / "base" / "tree")
    extract(ROOT, head_commit, folder / "head" / "tree")
    num_different = num_refused = 0
    width = max(len(job.name) for job in jobs)
    with Tree(folder / "base") as base, Tree(folder / "head") as head:
        data = prepared(base, head)
        rows = itertools.chain([("data", data)], ((j.name, compared(j, base, head)) for j in jobs))
        for name, found in rows:
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


def prepared(base: Tree, head: Tree) -> list[str]:
    """Each tree makes its dataset of the text; what differs between them."""
    words = "--output text --tokenizer bpe --vocab-size 300 --document paragraph --workers 0"
    for tree in (base, head):
        argv = ["../../text.txt", *words.split()]
        done = tree.run("-m megafp8.cli.preprocess", argv, "data")
        if done.code:
            raise CannotCompareError(f"{tree.folder.name}: no dataset: {done.last_line}")
    ours, theirs = base.folder / "data", head.folder / "data"
    names = ("text.bin", "text.idx", "text.tokenizer.json")
    return [f"{n} differs" for n in names if (ours / n).read_bytes() != (theirs / n).read_bytes()]


def compared(job: Job, base: Tree, head: Tree) -> Iterator[str]:
    """Runs the job in both; the differences, or that both refuse it."""
    ours = trained(job, base)
    if job.kind == "kill" and ours.code == 0:
        shutil.copytree(
            base.folder / job.folder / KILLED, head.folder / job.folder / "runs" / "handed"
        )
    theirs = trained(job, head)
    if ours.code or theirs.code:
        same = ours.code == theirs.code
        if same and ours.code == BAD_SETTING and ours.last_line == theirs.last_line:
            yield f"{REFUSED}{ours.last_line}"
        else:
            yield from (
                f"{n}: exit code {d.code}: {d.last_line}"
                for n, d in (("base", ours), ("head", theirs))
            )
        return
    mine, other = (tree.folder / job.folder / "runs" / "job" for tree in (base, head))
    yield from differences.of_runs(mine, other)
    if job.kind == "generate":
        yield from said(job, base, head)
    elif job.kind == "export":
        yield from exported(job, base, head)
    elif job.kind != "launch":
        yield from continued(job, base, head)


def trained(job: Job, tree: Tree) -> Done:
    """The job's run, in runs/job."""
    if job.kind == "launch":
        return tree.launch(SCRIPT, job.argv(), job.folder)
    if job.kind == "kill":
        middle = f"runs/job/checkpoints/step_{MIDDLE:08d}/manifest.json"
        done = tree.run(SCRIPT, job.argv(), job.folder, num_ranks=job.num_ranks, kill_at=middle)
        if done.code != -signal.SIGKILL:
            return done
        shutil.copytree(
            tree.folder / job.folder / "runs" / "job", tree.folder / job.folder / KILLED
        )
    return tree.run(SCRIPT, job.argv(), job.folder, num_ranks=job.num_ranks)


def continued(job: Job, base: Tree, head: Tree) -> Iterator[str]:
    """The head goes on where the base was in the middle of its run, and gets where it got."""
    there = base.folder / job.folder / "runs" / "job"
    if job.kind == "kill":
        name, more = "handed", []
    else:
        name = "continued"
        path = os.path.relpath(differences.checkpoint(there, MIDDLE), head.folder / job.folder)
        more = [f"model.resume_from_checkpoint={path}"]
    argv = job.argv(f"exp_manager.name={name}", *more)
    done = head.run(SCRIPT, argv, job.folder, num_ranks=job.num_ranks, log="continued.txt")
    if done.code:
        yield f"the base's checkpoint does not go on: exit code {done.code}: {done.last_line}"
        return
    here = head.folder / job.folder / "runs" / name
    for difference in differences.of_continued(there, here, MIDDLE):
        yield f"after the base's checkpoint: {difference}"


def said(job: Job, base: Tree, head: Tree) -> Iterator[str]:
    """Text that the models generate."""
    for how in (["--temperature", "0"], ["--temperature", "0.9", "--top-k", "40"]):
        argv = ["runs/job", "--prompt", "def f", "--tokens", "20", *how]
        log = f"generated{how[1]}.txt"
        ours, theirs = (
            tree.run("-m megafp8.cli.generate", argv, job.folder, log=log) for tree in (base, head)
        )
        if ours.code or theirs.code or ours.log.read_bytes() != theirs.log.read_bytes():
            yield f"generated: {ours.last_line!r} became {theirs.last_line!r}"


def exported(job: Job, base: Tree, head: Tree) -> Iterator[str]:
    """Weights in the form of transformers."""
    for tree in (base, head):
        done = tree.run(
            "-m megafp8.cli.export", ["runs/job", "exported"], job.folder, log="export.txt"
        )
        if done.code:
            yield f"{tree.folder.name}: export: exit code {done.code}: {done.last_line}"
            return
    yield from differences.of_checkpoints(
        *(t.folder / job.folder / "exported" for t in (base, head))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
