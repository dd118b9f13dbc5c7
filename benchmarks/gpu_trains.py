"""Check that training works on this GPU, with whole runs of `pretrain_gpt.py`.

losses     the default job in BF16, `delayed` and `blockwise`: the loss falls, FP8's like BF16's
continues  a run that is killed after a checkpoint, and continued by the same command
repeats    the same run twice with `trainer.deterministic=True`: equal losses, bit for bit
command    `pretrain_gpt.py model.fp8=True` as users type it: `auto`, health, validation, checkpoint
own        a job of a YAML file (`--config`), for some of its steps

python benchmarks/gpu_trains.py losses --results DIR
python benchmarks/gpu_trains.py continues --tiny --results DIR    # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_common import RESULTS, Results, device_and_name

from megafp8.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "model.num_layers=1",
    "model.hidden_size=128",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=2",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "model.global_batch_size=2",
    "model.tokenizer.vocab_size=512",
    "trainer.precision=bf16",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": ("trainer.precision=bf16",),
    "fp8 delayed": ("trainer.precision=bf16", "model.fp8=True"),
    "fp8 blockwise": ("trainer.precision=bf16", "model.fp8=True", "model.fp8_recipe=blockwise"),
    "fp8 mxfp8": ("trainer.precision=bf16", "model.fp8=True", "model.fp8_recipe=mxfp8"),
}
CLOSE = 0.05  # largest relative difference of the last tenth's mean loss, FP8 from BF16


def start(args: argparse.Namespace, folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start a run in `folder`."""
    chosen = (
        *(TINY if args.tiny else ()),
        *settings,
        "model.fp8_backend=native",  # `auto` may take Transformer Engine on a GPU
        "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=0",
        "exp_manager.create_tensorboard_logger=False",
        f"exp_manager.explicit_log_dir={folder}",
    )
    return typed(*chosen, stdout=subprocess.DEVNULL)


def typed(*words: str, stdout: int) -> subprocess.Popen[str]:
    """Start `pretrain_gpt.py` with the words of a command line."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for a run; return its standard output, if that was kept.

    Raises:
        RuntimeError: The run failed; the text has the end of its errors.
    """
    output, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {errors.strip()[-500:]}")
    return output or ""


def losses(folder: Path) -> list[float]:
    """Return the training losses that a run has logged."""
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "lr" in line]


def measure_losses(args: argparse.Namespace, results: Results) -> None:
    """Train each variant; the loss must fall, and FP8's must be close to BF16's."""
    steps = 6 if args.tiny else 600
    names = list(VARIANTS)[:2] if args.tiny else list(VARIANTS)
    for name in names:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run = Path(folder) / "run"
                ended(start(args, run, *VARIANTS[name], f"trainer.max_steps={steps}", *unsaved()))
                summary = json.loads((run / "summary.json").read_text())
                found = losses(run)
            except Exception as error:
                results.fail(name, f"{type(error).__name__}: {error}")
                continue
        row: dict[str, Any] = {
            "seconds": time.perf_counter() - began,
            "steps": len(found),
            "losses": found,
            "last_tenth": statistics.mean(found[-max(1, steps // 10) :]),
            "precision": summary["precision"],
            "fp8_flops_by_backend": summary["fp8_flops_by_backend"],
        }
        base = results.rows.get("bf16", row)
        row["over_bf16"] = row["last_tenth"] / base["last_tenth"]
        is_right = all(map(math.isfinite, found)) and len(found) == steps
        is_right &= args.tiny or (found[-1] < found[0] - 1 and abs(row["over_bf16"] - 1) < CLOSE)
        show(results, name, row, is_right)


def unsaved() -> tuple[str, ...]:
    """Return the settings of a run without checkpoints."""
    return ("exp_manager.create_checkpoint_callback=False",)


def show(results: Results, name: str, row: dict[str, Any], is_right: bool) -> None:
    """Add and print a row, as a failure unless it is right."""
    if not is_right:
        results.fail(name, f"wrong: {row}")
        return
    results.add(name, row)
    short = {key: value for key, value in row.items() if key != "losses"}
    print(f"{name:>24}  {short}", flush=True)


def measure_continues(args: argparse.Namespace, results: Results) -> None:
    """Kill a run after its first checkpoint and continue it; every step must be logged."""
    steps, every = (8, 2) if args.tiny else (200, 50)
    settings = (*VARIANTS["fp8 delayed"], f"trainer.max_steps={steps}")
    settings += (f"exp_manager.checkpoint_callback_params.every_n_train_steps={every}",)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        process = start(args, run, *settings)
        while process.poll() is None and not list(run.glob("checkpoints/step_*")):
            time.sleep(0.01)
        process.kill()
        process.communicate()
        saved = sorted(path.name for path in run.glob("checkpoints/step_*"))
        began = time.perf_counter()
        ended(start(args, run, *settings))
        found = losses(run)
    row = {"saved": saved, "losses": found, "seconds_to_the_end": time.perf_counter() - began}
    is_right = bool(saved) and len(found) >= steps and all(map(math.isfinite, found))
    show(results, "killed and continued", row, is_right)


def measure_repeats(args: argparse.Namespace, results: Results) -> None:
    """Run the same deterministic job twice; the losses must be the same bits."""
    steps = 4 if args.tiny else args.steps
    settings = (*VARIANTS["fp8 delayed"], f"trainer.max_steps={steps}", *unsaved())
    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            ended(start(args, run, *settings, "trainer.deterministic=True"))
            found.append(losses(run))
    is_right = found[0] == found[1] and len(found[0]) == steps
    show(results, "twice, deterministic", {"losses": found}, is_right)


def measure_command(args: argparse.Namespace, results: Results) -> None:
    """Run the command of the README for some steps, with all that is on by default.

    The run must have validated, have written FP8's health and a checkpoint, and its losses fall.
    """
    words = ["model.fp8=True", f"trainer.max_steps={6 if args.tiny else 60}"]
    words += [*(TINY if args.tiny else ()), "trainer.log_every_n_steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        output = ended(typed(*words, f"exp_manager.explicit_log_dir={run}", stdout=subprocess.PIPE))
        row = ran(run, output, time.perf_counter() - began)
        lines = list(read_metrics(run / "metrics.jsonl"))
        row["validated"] = any("val_loss" in line for line in lines)
        row["saved"] = sorted(path.name for path in run.glob("checkpoints/step_*"))
        row["has_health"] = (run / "health.jsonl").is_file()
    found = row["losses"]
    is_right = row["is_finite"] and row["validated"] and row["saved"] and row["has_health"]
    show(results, "command", row, bool(is_right) and (args.tiny or found[-1] < found[0] - 1))


def measure_own(args: argparse.Namespace, results: Results) -> None:
    """Run the job of the user's own YAML file for some steps; all losses must be finite."""
    words = [f"--config-path={args.config.resolve().parent}", f"--config-name={args.config.stem}"]
    words += [f"trainer.max_steps={args.steps}", "trainer.log_every_n_steps=1", *unsaved()]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        output = ended(typed(*words, f"exp_manager.explicit_log_dir={run}", stdout=subprocess.PIPE))
        row = ran(run, output, time.perf_counter() - began)
    show(results, args.config.name, row, row["is_finite"] and len(row["losses"]) == args.steps)


def ran(run: Path, output: str, seconds: float) -> dict[str, Any]:
    """Return what a run's files and its header say of it."""
    summary = json.loads((run / "summary.json").read_text())
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "step_seconds" in line]
    found = losses(run)
    return {
        "seconds": seconds,
        "losses": found,
        "is_finite": bool(found) and all(map(math.isfinite, found)),
        "step_seconds": statistics.median(line["step_seconds"] for line in lines),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "precision": summary["precision"],
        "header": [line for line in output.splitlines() if line.startswith(HEADER)],
    }


HEADER = ("model:", "precision:", "batch:", "optimizer:")
PARTS: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "losses": measure_losses,
    "continues": measure_continues,
    "repeats": measure_repeats,
    "command": measure_command,
    "own": measure_own,
}


def main() -> None:
    """Run the checks of one part, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--tiny", action="store_true", help="check on any device: a small model, few steps"
    )
    parser.add_argument("--steps", type=int, default=50, help="of `repeats` and `own`")
    parser.add_argument("--config", type=Path, help="the YAML file of `own`")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if (args.config is None) == (args.part == "own"):
        parser.error("--config names the file of the part `own`, which needs it")
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to check (--tiny checks that this program runs)")
    results = Results(args.results, f"trains-{args.part}", name, __doc__.splitlines()[0])
    try:
        PARTS[args.part](args, results)
    except Exception as error:
        results.fail(args.part, f"{type(error).__name__}: {error}")
    sys.exit(results.exit_code())


if __name__ == "__main__":
    main()
