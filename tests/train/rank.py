"""Run `pretrain_gpt.py` as a rank with a fault, given as [rank or null, fault, arguments…]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megafp8.cli import pretrain  # noqa: E402
from megafp8.cli.main import run_app  # noqa: E402
from megafp8.parallel.launch import run_process  # noqa: E402
from tests.train import faults  # noqa: E402

rank, name, *arguments = json.loads(os.environ["TEST_FAULT"])
if rank in (None, int(os.environ["RANK"])):
    getattr(faults, name)(*arguments)
run_process(lambda: run_app(sys.argv[1:], pretrain.task))
