"""A run imports the files of its own backend alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.train.runs import ENVIRONMENT, ROOT, Place

PROGRAM = """
import runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("modules:", *sys.modules)
"""


def test_a_native_run_imports_nothing_of_other_backends_and_layouts(place: Place) -> None:
    script = str(Path(ROOT) / "pretrain_gpt.py")
    program = PROGRAM.replace("sys.argv[0]", repr(script))
    argv = place.argv("trainer.max_steps=1", "model.fp8_backend=native")
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        cwd=place.cwd,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.rpartition("modules:")[2].split()
    ours = [name for name in names if name.partition(".")[0] in ("megafp8", "te_cpu")]
    assert "megafp8.backends.native" in ours
    others = [n for n in ours if any(p == "te" or p.startswith("te_") for p in n.split("."))]
    others += [n for n in ours if n.endswith(".torchao")]
    assert others == []
    assert not {"transformer_engine", "transformer_engine_torch", "torchao"}.intersection(names)
    # These take as long to import as all the rest, and serve compiled layers, FSDP and pipelines.
    parts = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp")
    assert not {*parts, "torch.distributed.pipelining", "torch.distributed.tensor"} & {*names}
    # torch imports it for a backward pass that is given its first gradient.
    assert "sympy" not in names
