"""Find what differs first between two runs, and by how much. Comparisons are bit for bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TIMING = {
    "step_seconds",
    "tokens_per_second",
    "tflops_causal",
    "tflops_full",
    "mfu_causal",
    "mfu_full",
    "hfu_causal",
    "hfu_full",
    "peak_memory_bytes",
    "data_wait_fraction",
}
"""Keys of a metrics line that differ between any two runs."""
COUNTED = ("status", "step", "val_loss", "consumed_tokens", "num_skipped_steps", "gemm_flops")
"""Keys of summary.json that must be the same."""


def of_runs(base: Path, head: Path) -> Iterator[str]:
    """Yield the differences of two run directories, the most important first."""
    yield from of_lines(base / "metrics.jsonl", head / "metrics.jsonl")
    yield from of_lines(base / "health.jsonl", head / "health.jsonl")
    steps = checkpoint_steps(base)
    if steps != checkpoint_steps(head):
        yield f"checkpoints of steps {steps} became {checkpoint_steps(head)}"
    for step in steps:
        if step in checkpoint_steps(head):
            yield from of_checkpoints(checkpoint(base, step), checkpoint(head, step))
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (base, head))
    for key in COUNTED:
        if ours.get(key) != theirs.get(key):
            yield f"{key} in summary.json: {ours.get(key)} became {theirs.get(key)}"


def of_continued(base: Path, head: Path, after: int) -> Iterator[str]:
    """Yield the differences of the steps after `after`, where `head` continued the run `base`."""

    def later(line: Mapping[str, Any]) -> bool:
        return int(line["step"]) > after

    yield from of_lines(base / "metrics.jsonl", head / "metrics.jsonl", later)
    yield from of_lines(base / "health.jsonl", head / "health.jsonl", later)
    last = checkpoint_steps(base)[-1]
    if last not in checkpoint_steps(head):
        yield f"no checkpoint of step {last}"
    else:
        yield from of_checkpoints(checkpoint(base, last), checkpoint(head, last))


def of_lines(
    base: Path, head: Path, wanted: Callable[[Mapping[str, Any]], bool] = lambda line: True
) -> Iterator[str]:
    """Yield the differences of two files of JSON lines, digit for digit."""
    if base.exists() != head.exists():
        yield f"only {'the base' if base.exists() else 'the head'} has {base.name}"
    if not (base.exists() and head.exists()):
        return
    ours, theirs = (
        [
            line
            for text in path.read_text().splitlines()
            if wanted(line := json.loads(text, parse_float=str, parse_int=str))
        ]
        for path in (base, head)
    )
    for mine, other in zip(ours, theirs, strict=False):
        yield from of_values(mine, other, f"step {mine['step']} of {base.name}")
    if len(ours) != len(theirs):
        yield f"{len(ours)} lines of {base.name} became {len(theirs)}"


def of_values(base: Any, head: Any, where: str) -> Iterator[str]:
    """Yield the differences of two JSON values, whose numbers are still texts."""
    if isinstance(base, dict) and isinstance(head, dict):
        for key in [key for key in base if key in head and key not in TIMING]:
            yield from of_values(base[key], head[key], f"{key}, {where}")
        for key in sorted((base.keys() ^ head.keys()) - TIMING):
            yield f"{key}, {where}: only in the {'base' if key in base else 'head'}"
    elif base != head:
        yield f"{where}: {base} became {head}{_distance(base, head)}"


def of_checkpoints(base: Path, head: Path) -> Iterator[str]:
    """Yield the differences of the tensors of two checkpoints."""
    ours, theirs = (sorted(path.name for path in c.glob("*.safetensors")) for c in (base, head))
    if ours != theirs:
        yield f"files of {base.name}: {', '.join(ours)} became {', '.join(theirs)}"
    for name in [name for name in ours if name in theirs]:
        yield from of_tensors(base / name, head / name)


def of_tensors(base: Path, head: Path) -> Iterator[str]:
    """Yield the differences of two safetensors files."""
    ours, theirs = tensors(base), tensors(head)
    where = f"{base.parent.name}/{base.name}"
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{name}, {where}: only in the {'base' if name in ours else 'head'}"
    for name in [name for name in ours if name in theirs]:
        mine, other = ours[name], theirs[name]
        if mine[:2] != other[:2]:
            yield f"{name}, {where}: {mine[0]} {mine[1]} became {other[0]} {other[1]}"
        elif mine[2] != other[2]:
            yield f"{name}, {where}: {_amount(mine[0], mine[2], other[2])}"


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of each tensor of a safetensors file."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = raw[8 + size + begin : 8 + size + end]
        found[name] = (entry["dtype"], entry["shape"], data)
    return found


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints in order."""
    names = (path.name.removeprefix("step_") for path in run.glob("checkpoints/step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def checkpoint(run: Path, step: int) -> Path:
    """Return the directory of a run's checkpoint."""
    return run / "checkpoints" / f"step_{step:08d}"


_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


def _amount(dtype: str, base: bytes, head: bytes) -> str:
    """Return how many elements differ, and the largest absolute difference."""
    if dtype == "BF16":
        ours, theirs = (
            (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            for raw in (base, head)
        )
    elif dtype in _NUMPY:
        ours, theirs = (np.frombuffer(raw, _NUMPY[dtype]) for raw in (base, head))
    else:  # FP8 and other bytes
        ours, theirs = (np.frombuffer(raw, np.uint8) for raw in (base, head))
        return f"{np.count_nonzero(ours != theirs)} of {ours.size} bytes"
    bits = f"u{ours.itemsize}"
    number = np.count_nonzero(ours.view(bits) != theirs.view(bits))
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.max(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)))
    return f"{number} of {ours.size} elements, by at most {largest:.2g}"


def _distance(base: Any, head: Any) -> str:
    """Return the relative difference of two numbers as text, or "" if there is none."""
    try:
        ours, theirs = float(base), float(head)
    except (TypeError, ValueError):
        return ""
    if not (math.isfinite(ours) and math.isfinite(theirs)) or ours == 0:
        return ""
    return f" ({abs(theirs - ours) / abs(ours):.1e} of it)"
