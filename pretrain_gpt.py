"""Pretrain a GPT: `python pretrain_gpt.py model.fp8=True trainer.max_steps=600 …`.

`--help` lists every key, `--cfg job` shows the composed configuration, and `-m` runs a sweep.
`megafp8 pretrain` is the same command; its code is in megafp8/cli/pretrain.py.
"""

from __future__ import annotations

import sys

from megafp8.cli import pretrain
from megafp8.parallel.launch import run_process


def main() -> int:
    """Run the command line of this process, and return the exit code."""
    return pretrain.main(sys.argv[1:])


if __name__ == "__main__":
    run_process(main)
