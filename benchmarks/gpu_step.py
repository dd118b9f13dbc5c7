"""Time training steps on a GPU: presets in BF16 and FP8, as `pretrain_gpt.py` runs them.

Each row is a run of its own with real data, loss, clipping and optimizer. Its figures are medians
of the steps after the warm-up, from the run's own metrics. Activations are not recomputed. The
vocabulary is padded to GPT-2's 50304, so that the head is as large as published ones. The floor is
that of the products: FLOPs over peak, with causal attention. A row also has the most memory that
was allocated beside what the plan says of the same settings; a job that needs more than the device
has is skipped with both numbers.

    python benchmarks/gpu_step.py --presets 1.3b 5b
    python benchmarks/gpu_step.py --tiny             # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_common import RESULTS, Results, device_and_name, peak_flops

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.errors import ExitCode
from megafp8.fp8.engine import unsupported
from megafp8.observe.metrics import read_metrics
from megafp8.plan.memory import rank_memory
from megafp8.specs import GPTSpec
from megafp8.specs.layer import model_linears
from megafp8.specs.recipes import find_recipe

ROOT = Path(__file__).resolve().parents[1]
LLAMA_8B = (  # 8 of its 32 layers, so that it fits
    "model.num_layers=8",
    "model.hidden_size=4096",
    "model.ffn_hidden_size=14336",
    "model.num_attention_heads=32",
    "model.num_query_groups=8",
    "model.normalization=rmsnorm",
    "model.activation=swiglu",
    "model.position_embedding_type=rope",
    "model.bias=False",
    "model.share_embeddings_and_output_weights=False",
    "model.encoder_seq_length=8192",
    "model.max_position_embeddings=8192",
    "model.optim.lr=3e-4",
)
VOCABULARY = 50304
ONE = argparse.Namespace(accumulation=1)
PRESETS: dict[str, tuple[str, ...]] = {
    "125m": ("model=gpt3_125m", "model.micro_batch_size=16"),
    "1.3b": ("model=gpt3_1.3b", "model.micro_batch_size=4"),  # with graphs it fits 80 GB too
    "5b": ("model=gpt3_5b", "model.micro_batch_size=4"),
    "5b-half": (  # 12 of its 24 layers, which fit 80 GB
        "model=gpt3_5b",
        "model.num_layers=12",
        "model.micro_batch_size=4",
    ),
    "llama-8b-shape": (*LLAMA_8B, "model.micro_batch_size=1"),
    "tiny": (
        "model.num_layers=1",
        "model.hidden_size=64",
        "model.ffn_hidden_size=256",
        "model.num_attention_heads=2",
        "model.encoder_seq_length=32",
        "model.max_position_embeddings=32",
        "model.micro_batch_size=2",
        "model.tokenizer.vocab_size=512",
    ),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "bf16 compiled": ("model.compile=block",),
    "fp8": ("model.fp8=True",),
    "fp8 graphs": (
        "model.fp8=True",
        "model.enable_cuda_graph=True",
        "model.hidden_dropout=0",  # graphs repeat random numbers, so that settings refuse dropout
        "model.attention_dropout=0",
    ),
    "fp8 O2": ("model.fp8=True", "model.optim.fp8_opt_level=O2"),
    "fp8 compiled": ("model.fp8=True", "model.compile=block"),
    "fp8 params": ("model.fp8=True", "model.fp8_params=True"),
    "fp8 tensorwise": ("model.fp8=True", "model.fp8_recipe=tensorwise"),
    "fp8 mxfp8": ("model.fp8=True", "model.fp8_recipe=mxfp8"),
    "fp4 nvfp4": ("model.fp8=True", "model.fp8_recipe=nvfp4"),
    "te bf16": ("model.fp8_backend=te",),
    "te fp8": ("model.fp8=True", "model.fp8_backend=te"),
    "te fp8 params": ("model.fp8=True", "model.fp8_backend=te", "model.fp8_params=True"),
    "torchao fp8": (
        "model.fp8=True",
        "model.fp8_backend=torchao",
        "model.fp8_recipe=tensorwise",
    ),
}


def settings_of(preset: str, variant: str, args: argparse.Namespace) -> list[str]:
    """Return the settings of a run, except those for its length, logs and directory."""
    chosen = [*PRESETS[preset], *VARIANTS[variant], "trainer.precision=bf16"]
    if not any(setting.startswith("model.activation=") for setting in chosen):
        chosen.append("model.openai_gelu=True")  # Transformer Engine's GELU: all compute the same
    if not any(setting.startswith("model.fp8_backend=") for setting in chosen):
        chosen.append("model.fp8_backend=native")  # `auto` may take Transformer Engine on a GPU
    if preset != "tiny":
        chosen.append(f"model.make_vocab_size_divisible_by={VOCABULARY}")
    micro = next(int(s.split("=")[1]) for s in chosen if s.startswith("model.micro_batch_size"))
    return [*chosen, f"model.global_batch_size={micro * args.accumulation}"]


def run(preset: str, variant: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one job in a process of its own, and return its row.

    Raises:
        subprocess.CalledProcessError: The job failed.
        subprocess.TimeoutExpired: It took longer than `--seconds`.
    """
    steps = args.warm_up + args.steps
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *settings_of(preset, variant, args),
        f"trainer.max_steps={steps}",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1",
        "exp_manager.create_checkpoint_callback=False",
        "exp_manager.create_tensorboard_logger=False",
        f"exp_manager.explicit_log_dir={folder}",
    ]
    subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=args.seconds
    )
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "step_seconds" in line]
    lines = lines[args.warm_up :]
    assert len(lines) >= args.steps, "a run logs every step"
    summary = json.loads((folder / "summary.json").read_text())
    row = row_of(lines, summary, spec_of(preset, variant, args))
    planned = planned_bytes(preset, variant, args)
    # On a CPU the most memory is the process's.
    share = row["peak_memory_bytes"] / planned if torch.cuda.is_available() else None
    return row | {"planned_bytes": planned, "memory_over_plan": share}


def planned_bytes(preset: str, variant: str, args: argparse.Namespace) -> int:
    """Return the bytes that a run on a GPU needs by the plan."""
    settings = [*settings_of(preset, variant, args), "trainer.accelerator=gpu"]
    spec = resolve(load(settings), lambda: True)
    vocab_size = 512 if preset == "tiny" else VOCABULARY
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=vocab_size))
    return rank_memory(spec, 0).total


def why_too_large(preset: str, variant: str, args: argparse.Namespace, memory: int) -> str | None:
    """Return why a device with so many bytes cannot run a job, or None if it can."""
    planned = planned_bytes(preset, variant, args)
    if planned <= memory:
        return None
    has = f"the device has {memory / 2**30:.1f} GiB"
    return f"it needs {planned / 2**30:.1f} GiB by the plan, and {has}"


def why_emulated(variant: str, device: torch.device) -> str | None:
    """Return why a variant's speed would say nothing of FP8 on this device, or None."""
    recipe = resolve(load(settings_of("tiny", variant, ONE)), lambda: True).precision.fp8
    if recipe is None:
        return None
    layouts = find_recipe(recipe.name).traits.layouts
    reasons = (unsupported(device, layout or "other") for layout in layouts)
    why = next((reason for reason in reasons if reason is not None), None)
    return None if why is None else f"its products are emulated here ({why})"


def spec_of(preset: str, variant: str, args: argparse.Namespace) -> GPTSpec:
    """Return the architecture of a run's model."""
    return resolve(load(settings_of(preset, variant, args)), lambda: False).model


def linear_flops_per_token(spec: GPTSpec) -> float:
    """Return the FLOPs of one token, forward and backward, of products that may run in FP8."""
    return 6.0 * sum(linear.macs for linear in model_linears(spec))


def row_of(lines: list[dict[str, Any]], summary: dict[str, Any], spec: GPTSpec) -> dict[str, Any]:
    """Return the row of a run, given its metrics after the warm-up and its summary."""
    seconds = statistics.median(line["step_seconds"] for line in lines)
    tokens = round(lines[-1]["tokens_per_second"] * lines[-1]["step_seconds"])
    # The FLOPs of a token are the same in every step.
    per_token = {
        count: 1e12 * lines[-1][f"tflops_{count}"] / lines[-1]["tokens_per_second"]
        for count in ("causal", "full")
    }
    tokens_per_second = tokens / seconds
    in_fp8 = summary["precision"].startswith("FP8")
    linear = linear_flops_per_token(spec)
    name = device_and_name()[1]
    floor = linear / peak_flops(name, "fp8" if in_fp8 else "bf16")
    floor += (per_token["causal"] - linear) / peak_flops(name, "bf16")
    return {
        "step_seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "tflops_causal": tokens_per_second * per_token["causal"] / 1e12,
        "tflops_full": tokens_per_second * per_token["full"] / 1e12,
        "share_of_bf16_peak_causal": tokens_per_second
        * per_token["causal"]
        / peak_flops(name, "bf16"),
        "floor_tokens_per_second": 1 / floor,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "last_loss": lines[-1]["loss"],
        "precision": summary["precision"],
        "fp8_flops_by_backend": summary["fp8_flops_by_backend"],
        "fp8_share_by_kernel": summary["fp8_share_by_kernel"],
        "compiled": summary["compiled"],
        "layers": spec.num_layers,
        "steps": len(lines),
    }


def beside_bf16(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, float | None]:
    """Return speed and memory relative to BF16's row, and BF16's own fraction of its peak.

    The fraction shows whether BF16 itself is fast: a ratio over a slow control would mean little.
    """
    if base is None:
        return {"times_bf16": None, "memory_over_bf16": None, "bf16_share_of_peak": None}
    return {
        "times_bf16": row["tokens_per_second"] / base["tokens_per_second"],
        "memory_over_bf16": row["peak_memory_bytes"] / base["peak_memory_bytes"],
        "bf16_share_of_peak": base["share_of_bf16_peak_causal"],
    }


def main() -> None:
    """Run all jobs, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["1.3b"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="time limit of each job")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches in a step")
    parser.add_argument(
        "--tiny", action="store_true", help="check on any device: a small model, few steps"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to measure (--tiny checks that the benchmark runs)")
    if args.tiny:
        args.presets, args.steps, args.warm_up = ["tiny"], 2, 1
        args.seconds = None  # a trial checks that jobs run, on however busy a machine
    what = "training steps of real runs; medians of the steps after the warm-up"
    subject = f"step-{'-'.join(args.presets)}"
    results = Results(args.results, subject, name, what, accumulation=args.accumulation)
    for preset in args.presets:
        for variant in args.variants:
            measure(preset, variant, args, results)
    sys.exit(results.exit_code())


def measure(preset: str, variant: str, args: argparse.Namespace, results: Results) -> None:
    """Run one job and add its row, or the reason why there is none; other jobs still run."""
    key = f"{preset} {variant}"
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        memory = torch.cuda.get_device_properties(device).total_memory
        reason = why_too_large(preset, variant, args, memory) or why_emulated(variant, device)
        if reason is not None:
            results.skip(key, reason)
            return
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = run(preset, variant, args, Path(folder) / "run")
        except subprocess.CalledProcessError as error:
            message = error.stderr.strip()[-500:]
            is_refused = error.returncode == ExitCode.USER_ERROR
            (results.skip if is_refused else results.fail)(key, message)
            return
        except Exception as error:
            results.fail(key, f"{type(error).__name__}: {error}")
            return
    row |= beside_bf16(row, row if variant == "bf16" else results.rows.get(f"{preset} bf16"))
    results.add(key, row)
    ratio = "" if row["times_bf16"] is None else f"{row['times_bf16']:.2f} x bf16"
    if row["memory_over_plan"] is not None:
        ratio += f"  {row['memory_over_plan']:.3f} x planned memory"
    print(
        f"{preset:>14} {variant:<14} {row['tokens_per_second']:9.0f} tokens/s  "
        f"{row['tflops_full']:6.1f} TFLOP/s full {row['tflops_causal']:6.1f} causal  "
        f"{row['share_of_bf16_peak_causal']:.1%} of BF16's peak  "
        f"{row['peak_memory_bytes'] / 2**30:6.1f} GiB  {ratio}",
        flush=True,
    )


if __name__ == "__main__":
    main()
