"""Fine-tune a GPT on questions and answers.

    python finetune_gpt.py restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl

This is `pretrain_gpt.py` with the job conf/finetune_gpt.yaml: settings, files and the continuation
of runs are the same. docs/finetuning.md explains the data.
"""

from __future__ import annotations

from functools import partial

import megafp8.cli  # noqa: F401  # handles Ctrl-C during the imports that follow
from megafp8.parallel.launch import run_process
from pretrain_gpt import main

if __name__ == "__main__":
    run_process(partial(main, "finetune_gpt"))
