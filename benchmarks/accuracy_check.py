"""Try `model.fp8_accuracy_check` on planted faults, and on healthy runs where it must stay silent.

Each fault is trained in FP8 with the check and `model.fp8_health=full`, and again in BF16, at one
seed, in a tiny job (2 layers x 64, 100 steps of 8 x 32 tokens, every fifth step logged). The four
faults of `FAULTS` are of kinds that were known when the check was written; those of `OTHERS` were
chosen afterwards. Its thresholds were committed before any of them was run, and no run has moved
them. The healthy runs are 20 seeds, half in `delayed` and half in `nvfp4`. A run that has ended is
not made again. The command then writes a result file and prints its table.

    python benchmarks/accuracy_check.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recipe_gaps import ROOT, write

from megafp8.cli import pretrain
from megafp8.fp8.scaling import ScalingState
from megafp8.models.parts import Norm
from megafp8.train import loop
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step

NAME = "accuracy-check"
STEPS, BEGIN = 100, 30
JOB = (
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=5",
    "trainer.limit_val_batches=32",
    f"trainer.val_check_interval={STEPS}",
    "trainer.enable_progress_bar=False",
    "exp_manager.create_tensorboard_logger=False",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=4",
    "model.encoder_seq_length=32",
    "model.micro_batch_size=8",
    "model.global_batch_size=8",
    "model.tokenizer.vocab_size=512",
    "model.optim.sched.warmup_steps=10",
)
CHECKED = ("model.fp8=True", "model.fp8_accuracy_check=warn", "model.fp8_health=full")
DELAYED, NVFP4 = "model.fp8_recipe=delayed", "model.fp8_recipe=nvfp4"
INT2 = f"model.fp8_recipe={ROOT / 'examples/09_a_recipe_of_your_own.py'}:Int2"
SEEDS = range(1, 21)
TRANSFORMED = "layers.1.mlp.fc2"
Spoil = Callable[[TrainState], None]


def outlier(state: TrainState, *, factor: float, step: int) -> None:
    """Multiply one channel of the norms before linears once, in their masters and weights."""
    if state.step != step:
        return
    named = state.model.named_modules()
    gains = {id(m.weight) for name, m in named if isinstance(m, Norm) and "final" not in name}
    for segment, master in zip(state.masters.segments, state.masters.masters, strict=True):
        if id(segment.param) in gains:
            with torch.no_grad():
                master.view(-1)[7] *= factor
    state.masters.write_back()


def small_gradients(state: TrainState, *, factor: float) -> None:
    """Multiply the gradient that reaches the layers by a small factor, from a step on."""
    if state.step == BEGIN:
        norm = state.model.get_submodule("final_norm")
        norm.register_full_backward_hook(
            lambda _, grads, __: tuple(scaled(grad, factor) for grad in grads)  # type: ignore[attr-defined]
        )


def scaled(grad: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    """Return a gradient times a factor."""
    return None if grad is None else grad * factor


def wrong_scale(state: TrainState, *, factor: float) -> None:
    """Multiply the scale of one linear's input by a factor before each step from one on."""
    if state.step >= BEGIN and isinstance(state.scaling, ScalingState):
        table = state.scaling.tables["forward"]
        table.quant_scale[table.names.index(f"{TRANSFORMED}.input")] *= factor


@dataclass(frozen=True)
class Fault:
    """Say with which settings a fault is trained, and what is done to the state before steps."""

    what: str
    settings: tuple[str, ...]
    spoil: Spoil | None = None
    base: tuple[str, ...] = ()


FAULTS = {
    "learning-rate": Fault("a learning rate of 1", (DELAYED, "model.optim.lr=1"), None,
                           ("model.optim.lr=1",)),
    "outlier-channel": Fault("a channel of all norms is 10,000 times as large", (NVFP4,),
                             partial(outlier, factor=1e4, step=0)),
    "stuck-history": Fault("scales stay those of the first step (fp8_interval=65536)",
                           (DELAYED, "model.fp8_interval=65536")),
    "fp8-alone-fails": Fault("scales are divided by 2^28 (fp8_margin=28)",
                             (DELAYED, "model.fp8_margin=28")),
}  # fmt: skip
OTHERS = {
    "saturation": Fault("scales are multiplied by 2^10 (fp8_margin=-10)",
                        (DELAYED, "model.fp8_margin=-10")),
    "late-outlier": Fault(f"a channel of all norms grows 1,000-fold after step {BEGIN}",
                          (DELAYED, "model.fp8_amax_history_len=16"),
                          partial(outlier, factor=1e3, step=BEGIN)),
    "vanishing-gradients": Fault(
        f"gradients shrink by 2^36 after step {BEGIN}, within the history",
        (DELAYED, "model.optim.eps=1e-18"), partial(small_gradients, factor=2.0**-36),
        ("model.optim.eps=1e-18",)),
    "wrong-scale": Fault(f"the scale of one input is 2^20 too small after step {BEGIN}",
                         (DELAYED,), partial(wrong_scale, factor=2.0**-20)),
    "three-values": Fault("a recipe with three values a row (Int2 of example 9)", (INT2,)),
}  # fmt: skip


def train_one(name: str, folder: str, settings: list[str]) -> int:
    """Train one run in this process, with the fault of this name planted, if any."""
    fault = {**FAULTS, **OTHERS}.get(name)
    if fault is not None and fault.spoil is not None:
        spoil = fault.spoil

        def spoilt(state: TrainState, *args: Any, **kwargs: Any) -> StepResult:
            spoil(state)
            return train_step(state, *args, **kwargs)

        vars(loop)["train_step"] = spoilt
    return pretrain.main([*settings, f"exp_manager.explicit_log_dir={folder}"])


def run(folder: Path, name: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """Make a run in a process of its own unless it has ended, and return what it found."""
    if not (folder / "summary.json").exists():
        command = [sys.executable, __file__, "--one", name, str(folder), *JOB, *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    summary = {}
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    texts = [event["text"] for event in events if event["kind"] in ("warning", "failed")]
    return {
        "val_loss": summary.get("val_loss"),
        "accuracy": [text for text in texts if "costs accuracy" in text],
        "others": [text for text in texts if "costs accuracy" not in text],
    }


def loss_of(found: dict[str, Any]) -> str:
    """Return a validation loss as a cell."""
    return "none" if found["val_loss"] is None else f"{float(found['val_loss']):.3f}"


def main() -> None:
    """Make what is missing, and write the tables and the result file."""
    if sys.argv[1:2] == ["--one"]:
        sys.exit(train_one(sys.argv[2], sys.argv[3], sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs", NAME))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    runs = args.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    faults: dict[str, Any] = {}
    rows = ["| fault | loss in FP8 | loss in BF16 | the check's first words |", "|---|---|---|---|"]
    for name, fault in {**FAULTS, **OTHERS}.items():
        in_fp8 = run(runs / name, name, (*CHECKED, *fault.settings))
        in_bf16 = run(runs / f"{name}-bf16", name, ("model.fp8=False", *fault.base))
        faults[name] = {"what": fault.what, "fp8": in_fp8, "bf16": in_bf16}
        words = in_fp8["accuracy"][0].partition(". The run")[0] if in_fp8["accuracy"] else "silent"
        rows.append(f"| {fault.what} | {loss_of(in_fp8)} | {loss_of(in_bf16)} | {words} |")
        print(rows[-1], flush=True)
    healthy = {}
    for seed in SEEDS:
        recipe = DELAYED if seed % 2 else NVFP4
        found = run(runs / f"healthy-{seed}", "healthy", (*CHECKED, recipe, f"model.seed={seed}"))
        healthy[f"{recipe.rpartition('=')[2]}, seed {seed}"] = found
    silent = sum(not found["accuracy"] for found in healthy.values())
    print(*rows, f"silent in {silent} of {len(healthy)} healthy runs", sep="\n")
    found = {"job": JOB, "table": rows, "faults": faults, "silent": silent, "healthy": healthy}
    write(NAME, "warnings of model.fp8_accuracy_check", args.results, found)


if __name__ == "__main__":
    main()
