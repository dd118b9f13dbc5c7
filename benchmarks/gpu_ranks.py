"""Train in ten layouts of 2, 4 and 8 GPUs, and compare losses and gradient norms with one rank.

reference   the jobs on one rank, which all layouts are compared with; it comes first
NAME        one layout, such as "tp 2, sp", in its precisions

In FP32 losses and norms of all steps agree within 1e-5, relatively. In FP8 the losses must be
within three times the spread of one rank's own losses, with the same samples in microbatches of 8,
4, 2 and 1: sums are grouped otherwise and scales follow other microbatches, as in a layout.

python benchmarks/gpu_ranks.py reference --results DIR
python benchmarks/gpu_ranks.py "tp 2, sp" --results DIR
python benchmarks/gpu_ranks.py "tp 2, sp" --tiny --results DIR    # on gloo, without a GPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_common import RESULTS, Results, device_and_name

from megafp8.cli import pretrain
from megafp8.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAMPLES = 5, 8
FP32_BOUND = 1e-5
SPREADS = 3  # an FP8 layout may be this many times as far from one rank as its own runs are apart
MICROBATCHES = (8, 4, 2, 1)
FP8 = ("trainer.precision=bf16", "model.fp8=True")
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": ("trainer.precision=32",),
    "delayed": FP8,
    "mxfp8": (*FP8, "model.fp8_recipe=mxfp8"),
    "nvfp4": (*FP8, "model.fp8_recipe=nvfp4"),
    "O2": (*FP8, "model.optim.fp8_opt_level=O2"),
}
ZERO = "model.optim.name=distributed_fused_adam"
TP, CP, PP = (
    f"model.{kind}_size=2"
    for kind in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")
)
SP, FSDP = "model.sequence_parallel=True", "model.fsdp=True"
ZERO_BUBBLE = (
    "model.virtual_pipeline_model_parallel_size=2",
    "model.pipeline_schedule=ZBVZeroBubble",
)


@dataclass(frozen=True)
class Layout:
    """Describe a layout: its ranks, the samples of a microbatch, its settings and precisions."""

    ranks: int
    samples: int
    settings: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp32", "delayed")


LAYOUTS: dict[str, Layout] = {
    "dp 2, ZeRO-1": Layout(2, 4, (ZERO,), ("fp32", "delayed", "nvfp4")),
    "dp 2, FSDP": Layout(2, 4, (FSDP,)),
    "tp 2, sp": Layout(2, 8, (TP, SP), ("fp32", "delayed", "mxfp8")),
    "cp 2": Layout(2, 8, (CP,)),
    "pp 2, zero bubble V": Layout(2, 2, (PP, *ZERO_BUBBLE)),
    "dp 4, O2": Layout(4, 2, (), ("O2",)),
    "tp 2 x dp 2, sp": Layout(4, 4, (TP, SP)),
    "cp 2 x dp 2, FSDP": Layout(4, 4, (CP, FSDP)),
    "tp 2 x pp 2 x dp 2, sp, ZeRO-1": Layout(8, 2, (TP, PP, SP, ZERO)),
    "tp 2 x cp 2 x dp 2, sp": Layout(8, 4, (TP, CP, SP)),
}
SIZES = {False: (1024, 1024), True: (128, 64)}
"""The width and the length of samples on GPUs, and at tiny shapes."""


def settings_of(precision: str, samples: int, tiny: bool, folder: Path) -> list[str]:
    """Return the settings of a job, but for its layout."""
    width, length = SIZES[tiny]
    return [
        "model.num_layers=4",
        f"model.hidden_size={width}",
        f"model.ffn_hidden_size={4 * width}",
        f"model.num_attention_heads={width // 32 if tiny else width // 128}",
        f"model.encoder_seq_length={length}",
        f"model.max_position_embeddings={length}",
        "model.tokenizer.vocab_size=512",
        f"model.micro_batch_size={samples}",
        f"model.global_batch_size={SAMPLES}",
        "model.fp8_backend=native",  # `auto` may take Transformer Engine on a GPU
        f"trainer.max_steps={STEPS}",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1",
        "exp_manager.create_checkpoint_callback=False",
        "exp_manager.create_tensorboard_logger=False",
        f"exp_manager.explicit_log_dir={folder}",
        *PRECISIONS[precision],
    ]


def found_in(folder: Path) -> dict[str, list[float]]:
    """Return the losses and the gradient norms of a run's steps."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "lr" in line]
    assert len(lines) == STEPS, f"a run of {STEPS} steps logged {len(lines)}"
    return {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}


def apart(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference of two runs' numbers; not finite is infinitely far."""
    pairs = list(zip(one, other, strict=True))
    if not all(math.isfinite(x) for pair in pairs for x in pair):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)


def on_one_rank(precision: str, samples: int, tiny: bool) -> dict[str, list[float]]:
    """Run a job on one rank in this process, and return its losses and norms."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        code = pretrain.main(settings_of(precision, samples, tiny, run))
        if code != 0:
            raise RuntimeError(f"exit code {code}")
        return found_in(run)


def reference(results: Results, tiny: bool) -> None:
    """Run all jobs on one rank; a row has the numbers of one microbatch, and the losses' spread."""
    for precision in PRECISIONS:
        sizes = MICROBATCHES[:1] if precision == "fp32" else MICROBATCHES
        try:
            runs = [on_one_rank(precision, samples, tiny) for samples in sizes]
        except Exception as error:
            results.fail(precision, f"{type(error).__name__}: {error}")
            continue
        pairs = itertools.permutations([run["loss"] for run in runs], 2)
        spread = max((apart(one, other) for one, other in pairs), default=0.0)
        bound = FP32_BOUND if precision == "fp32" else SPREADS * spread
        results.add(precision, {**runs[0], "bound": bound})
    text = json.dumps({"tiny": tiny, "rows": results.rows})
    file_of(results.folder).write_text(text)


def file_of(folder: Path) -> Path:
    """Return the file with the rows of one rank."""
    return folder / "ranks-reference.json"


def compared(name: str, precision: str, tiny: bool, base: dict[str, Any]) -> dict[str, Any]:
    """Run a layout in one precision, and return its row.

    Raises:
        RuntimeError: The run failed.
    """
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *layout.settings]
        command += settings_of(precision, layout.samples, tiny, run)
        command += [f"trainer.devices={layout.ranks}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        found = found_in(run)
    losses, norms = (apart(found[key], base[key]) for key in ("loss", "grad_norm"))
    in_fp32 = precision == "fp32"
    is_right = losses <= base["bound"] and (norms <= base["bound"] or not in_fp32)
    return {"losses_apart": losses, "norms_apart": norms, "bound": base["bound"],
            "is_right": is_right}  # fmt: skip


def measure(name: str, results: Results, tiny: bool) -> None:
    """Run a layout in its precisions, one row each."""
    layout, gpus = LAYOUTS[name], torch.cuda.device_count()
    if gpus and gpus < layout.ranks:
        results.skip(name, f"it needs {layout.ranks} GPUs, and this machine has {gpus}")
        return
    base = json.loads(file_of(results.folder).read_text())
    assert base["tiny"] == tiny, "one rank ran another model"
    for precision in layout.precisions:
        key = f"{name} {precision}"
        try:
            row = compared(name, precision, tiny, base["rows"][precision])
        except Exception as error:
            results.fail(key, f"{type(error).__name__}: {error}")
            continue
        if not row["is_right"]:
            results.fail(key, f"wrong: {row}")
            continue
        results.add(key, row)
        print(f"{key:>44}  {row}", flush=True)


def main() -> None:
    """Run one layout, or the jobs on one rank, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["reference", *LAYOUTS])
    parser.add_argument("--tiny", action="store_true", help="check on any device: a small model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, device_name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to check (--tiny checks that this program runs)")
    subject = "ranks-" + args.part.replace(", ", "-").replace(" ", "-")
    results = Results(args.results, subject, device_name, __doc__.splitlines()[0])
    if args.part == "reference":
        reference(results, args.tiny)
    else:
        measure(args.part, results, args.tiny)
    sys.exit(int(bool(results.failed)))


if __name__ == "__main__":
    main()
