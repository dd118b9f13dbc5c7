"""Print the newest results of each GPU benchmark as one short table.

python benchmarks/gpu_table.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gpu_common import RESULTS

SUBJECTS = ("gemm", "layer", "step")


def newest(folder: Path, subject: str) -> list[dict[str, Any]]:
    """Return the last written GPU result of each shape of a subject."""
    paths = [path for path in folder.glob(f"*_{subject}-*.json") if "_cpu_" not in path.name]
    last = {path.name.rsplit("_", 1)[1]: path for path in sorted(paths, key=_written)}
    return [json.loads(path.read_text()) for path in last.values()]


def _written(path: Path) -> float:
    return path.stat().st_mtime


def line(subject: str, what: str, row: dict[str, Any]) -> str:
    """Return a row as one line of text: TFLOP/s or tokens per second, relative to BF16."""
    if subject == "gemm":
        figures = f"{row['flops_per_second'] / 1e12:9.0f} TFLOP/s"
    elif subject == "layer":
        figures = f"{row['flops_per_second_full'] / 1e12:9.0f} TFLOP/s full"
    else:
        figures = f"{row['tokens_per_second']:9.0f} tokens/s"
    ratio, memory = row.get("times_bf16"), row.get("memory_over_bf16")
    beside = f"{ratio:.2f} x bf16" if ratio else ""
    if control := row.get("bf16_share_of_peak"):
        beside += f" (which reaches {control:.0%} of its peak)"
    if memory:
        beside += f", {memory:.2f} x its memory"
    return f"{subject:<6} {what:<28} {figures:<26} {beside}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for subject in SUBJECTS:
        results = newest(args.results, subject)
        if not results:
            print(f"{subject:<6} {args.results} has no result of a GPU")
        for result in results:
            shape = "".join(f", {key} {size}" for key, size in result.get("shape", {}).items())
            commit = result["commit"][:9]
            print(f"{subject}: {result['hardware']}, {result['date']}, commit {commit}{shape}")
            for what, row in result["rows"].items():
                print(line(subject, what, row))


if __name__ == "__main__":
    main()
