"""Fine-tune a GPT on questions and answers.

    python finetune_gpt.py restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl

This is `pretrain_gpt.py` with the job conf/finetune_gpt.yaml: settings, files and the continuation
of runs are the same. docs/guide/finetuning.md explains the data. `megafp8 finetune` is the
same command.
"""

from __future__ import annotations

import sys

from megafp8.cli import finetune
from megafp8.parallel.launch import run_process


def main() -> int:
    """Run the command line of this process, and return the exit code."""
    return finetune.main(sys.argv[1:])


if __name__ == "__main__":
    run_process(main)
