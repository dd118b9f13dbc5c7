"""Run the commands of a job in one tree, and continue the base's run in the head."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

from scripts.compare_trees.differences import checkpoint
from scripts.compare_trees.jobs import MIDDLE, Job
from scripts.compare_trees.tree import Done, Tree

SCRIPT = "pretrain_gpt.py"
PREPROCESS = "--output text --tokenizer bpe --vocab-size 300 --document paragraph --workers 0"
RUN = "runs/job"
KILLED = "killed"  # RUN as a kill left it
HANDED = "runs/handed"  # RUN of the base, which the head continues
GENERATED = {"generated.txt": ["--temperature", "0"], "drawn.txt": ["--temperature", "0.9"]}


def prepare(tree: Tree) -> Done:
    """Make the dataset that jobs train on, of the text in the folder of both trees."""
    argv = ["../../text.txt", *PREPROCESS.split()]
    return tree.run("-m megafp8.cli.preprocess", argv, "data")


def perform(job: Job, tree: Tree) -> Done:
    """Run the job's commands up to the first failure; return how the last one ended.

    A job that a kept tree has run already is not run again.
    """
    record = tree.folder / f"{job.folder}.json"
    if record.exists():
        return Done(**json.loads(record.read_text()))
    shutil.rmtree(tree.folder / job.folder, ignore_errors=True)  # a stopped comparison left it
    done = _train(job, tree)
    if done.code == 0 and job.kind == "generate":
        for log, how in GENERATED.items():
            argv = ["runs/job", "--prompt", "def f", "--tokens", "20", *how]
            done = tree.run("-m megafp8.cli.generate", argv, job.folder, log=log)
    elif done.code == 0 and job.kind == "export":
        done = tree.run("-m megafp8.cli.export", ["runs/job", "exported"], job.folder, log="e.txt")
    record.write_text(json.dumps(dataclasses.asdict(done)))
    return done


def _train(job: Job, tree: Tree) -> Done:
    if job.kind == "launch":
        return tree.launch(SCRIPT, job.argv(), job.folder)
    if job.kind == "kill":
        saved = f"{checkpoint(Path(RUN), MIDDLE)}/manifest.json"
        done = tree.run(SCRIPT, job.argv(), job.folder, num_ranks=job.num_ranks, kill_at=saved)
        if done.code != -signal.SIGKILL:
            return done
        folder = tree.folder / job.folder
        shutil.copytree(folder / RUN, folder / KILLED)
    return tree.run(SCRIPT, job.argv(), job.folder, num_ranks=job.num_ranks)


def hand_over(job: Job, base: Tree, head: Tree) -> tuple[Done, Path]:
    """Let the head continue the base's run from its middle; return the result and directory."""
    run = head.folder / job.folder / HANDED
    there = base.folder / job.folder
    more = [f"exp_manager.name={run.name}"]
    if (there / KILLED).exists():
        shutil.copytree(there / KILLED, run)
    else:
        source = checkpoint(there / RUN, MIDDLE)
        more.append(f"model.resume_from_checkpoint={os.path.relpath(source, run.parents[1])}")
    argv, log = job.argv(*more), "handed.txt"
    return head.run(SCRIPT, argv, job.folder, num_ranks=job.num_ranks, log=log), run
