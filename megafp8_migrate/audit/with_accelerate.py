"""Train a small model by Accelerate: its launcher's settings, its `Accelerator`, its conversion.

Accelerate's launcher reads the file and says what it would put into the environment of a job. The
ranks get these variables; no script is started.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafp8_migrate.audit.recording import StepRecorder, described, digest, state_of
from megafp8_migrate.audit.with_megatron import MICROBATCHES, STEPS, finish

WIDTH, SAMPLES = 64, 32
PREFIXES = ("ACCELERATE_", "FP8_")


def prepare(job: Mapping[str, Any], recorder: StepRecorder) -> Callable[..., None]:
    """Import Accelerate; return the function that trains one rank."""
    launch = importlib.import_module("accelerate.commands.launch")
    environment = importlib.import_module("accelerate.utils.launch")
    accelerate: Any = importlib.import_module("accelerate")

    def train(run: Mapping[str, Any], rank: int, record: dict[str, Any]) -> None:
        """Train with the settings of the file's text, as a rank that Accelerate's launcher starts.

        The results are put into `record`.
        """
        record["reads"] = {}  # reads are traced in Megatron's configuration alone
        with tempfile.TemporaryDirectory(prefix="megafp8-audit-") as folder:
            file = Path(folder, "accelerate.yaml")
            file.write_text(run["text"], encoding="utf-8")
            parser = launch.launch_command_parser()
            parsed = parser.parse_args(["--config_file", str(file), "script.py"])
            validated = launch._validate_launch_command(parsed)
        # Some versions return the arguments alone, others a tuple that begins with them.
        args = validated[0] if isinstance(validated, tuple) else validated
        _, variables = environment.prepare_simple_launcher_cmd_env(args)
        os.environ.update({k: v for k, v in variables.items() if k.startswith(PREFIXES)})
        accelerator = accelerate.Accelerator(cpu=True)
        handler = accelerator.te_recipe_handler or accelerator.fp8_recipe_handler
        record["settings"] = described({} if handler is None else vars(handler))
        record["configuration"] = record["settings"]
        train_small(accelerator, recorder, record)

    return train


class SmallModel(nn.Module):
    """Two layers, each of a norm and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.second = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for `x`, both [samples, WIDTH]."""
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def train_small(accelerator: Any, recorder: StepRecorder, record: dict[str, Any]) -> None:
    """Train two steps of two microbatches, and validate; put everything that was seen on record."""
    torch.manual_seed(1234)
    model = SmallModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = record["step"]
    draw = torch.Generator().manual_seed(7 + accelerator.process_index)
    for number in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = model(torch.randn(SAMPLES, WIDTH, generator=draw)).float().square().mean()
            accelerator.backward(loss)
            step[f"output {number}.{microbatch}"] = digest(loss)
        step.update({f"{name} {number}": said for name, said in state_of(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        step["validation"] = digest(model(torch.randn(SAMPLES, WIDTH, generator=draw)))
    step.update({f"{name} at the end": said for name, said in state_of(model).items()})
    first = next(iter(recorder.recipes), None)
    record["recipe"] = first
    finish(recorder, record)
