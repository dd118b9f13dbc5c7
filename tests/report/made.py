"""Make the directory of a run without training: the files that a run of known figures leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

NAMES = [
    f"layers.{layer}.{linear}.{role}"
    for layer in range(2)
    for linear in ("attention.qkv", "mlp.fc1")
    for role in ("input", "weight", "grad_output")
]


def loss_at(step: int) -> float:
    return 2.0 + 6.0 * math.exp(-step / 30)


def make_run(path: Path, *, steps: int = 100, every: int = 10, **changes: Any) -> Path:
    """Write what a finished run leaves. `changes` are settings, `a__b=1` for `a.b`."""
    path.mkdir(parents=True)
    config: dict[str, Any] = {
        "trainer": {"max_steps": steps, "precision": "bf16"},
        "model": {"fp8": True, "seed": 1},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "run.json").write_text(
        json.dumps({"status": "finished", "created": f"2026-01-01T00:00:{steps % 60:02}"})
    )
    logged = [1, *range(every, steps + 1, every)]
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "consumed_samples": 8 * step,
            "loss": loss_at(step),
            "grad_norm": 1.0 / step,
            "lr": 1e-3,
            "step_seconds": 0.5,
            "tokens_per_second": 4321.0,
            "tflops_causal": 0.5,
            "peak_memory_bytes": 2**30,
            "mfu_causal": 0.375,
        }
        for step in logged
    ]
    lines.append({"step": steps, "val_loss": 2.2345, "consumed_samples": 8 * steps})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    health = [
        {
            "step": step,
            "num_nonfinite": {},
            "tensors": {
                name: {
                    "amax": 1.5,
                    "quant_scale": 64.0,
                    "underflow": 0.001 * step,
                    "overflow": 0.0,
                    "snr_db": 25.0,
                }
                for name in NAMES
            },
        }
        for step in logged
    ]
    (path / "health.jsonl").write_text("".join(json.dumps(line) + "\n" for line in health))
    settings = {
        "non_default": [
            {"key": "model.fp8", "value": True, "origin": "command line", "default": False}
        ]
    }
    events = [
        {"time": "2026-01-01T00:00:00+00:00", "step": 0, "kind": "start", "text": "new run",
         "command": "python pretrain_gpt.py model.fp8=True", "settings": settings},
        {"time": "2026-01-01T00:01:00+00:00", "step": 50, "kind": "warning",
         "text": "a </script> b"},
        {"time": "2026-01-01T00:02:00+00:00", "step": steps, "kind": "end",
         "text": "finished"},
    ]  # fmt: skip
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    sample = {"time": "", "step": steps, "prompt": "once upon", "text": " a <time>"}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    summary = {
        "status": "finished",
        "step": steps,
        "total_steps": steps,
        "val_loss": 2.2345,
        "val_bits_per_byte": 1.011,
        "unigram_bits_per_byte": 2.685,
        "xz_bits_per_byte": 1.635,
        "train_loss": 2.2789,
        "train_loss_steps": 10,
        "wall_seconds": 61.0,
        "peak_memory_bytes": 2**30,
        "fp8_share_of_gemm_flops": 0.75,
        "precision": "FP8 delayed",
    }
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "console.log").write_text("first line\nlast line\n")
    return path
