"""Fine-tune a GPT on questions and answers, which is pretraining with the job `finetune_gpt`."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.cli import pretrain
from megafp8.cli.job import FINETUNE_JOB


def main(argv: Sequence[str]) -> int:
    """Run the command line with the job `finetune_gpt`, and return the exit code."""
    return pretrain.main(argv, FINETUNE_JOB)
