"""Time the computation of where every sample starts: ours in NumPy, and Megatron's in C++.

Both get the same document lengths and the same shuffled order. Rounds alternate, and the ratio is
that of the medians. The benchmark needs the package megatron-core, whose compiled helper it calls.

    python benchmarks/data_index.py --documents 10000000 --tokens 1000000000
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from megafp8.data.index_maps import sample_index, shuffled


def main() -> None:
    """Time both in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from importlib.metadata import version

    from megatron.core.datasets import helpers

    rng = np.random.default_rng(0)
    # Lengths have a long tail, as those of real texts do, and the requested mean.
    lengths = rng.lognormal(0.0, 1.0, args.documents)
    lengths = np.maximum(1, np.rint(lengths * (args.tokens / lengths.sum()))).astype(np.int32)
    total = int(lengths.sum())
    order = shuffled(args.documents, 1, 2).astype(np.int32)
    ours, theirs = [], []
    for _ in range(args.rounds):
        began = time.perf_counter()
        index = helpers.build_sample_idx(lengths, order, args.seq_length, 1, total, True, True)
        theirs.append(time.perf_counter() - began)
        began = time.perf_counter()
        first, offset = sample_index(lengths, order, args.seq_length, total // args.seq_length)
        ours.append(time.perf_counter() - began)
    assert abs(len(index) - len(first)) <= 2 and len(offset) == len(first)
    result = {
        "what": "sample index: NumPy and Megatron's C++",
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "documents": args.documents,
        "tokens": total,
        "seq_length": args.seq_length,
        "rounds": args.rounds,
        "megatron_seconds": {"median": statistics.median(theirs), "all": theirs},
        "numpy_seconds": {"median": statistics.median(ours), "all": ours},
        "ratio_of_medians": statistics.median(ours) / statistics.median(theirs),
        "ratio_of_fastest": min(ours) / min(theirs),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "megatron-core": version("megatron-core"),
        },
        "load_average": os.getloadavg(),
    }
    name = f"{result['date']}_data-index_seq{args.seq_length}.json"
    (args.out / name).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, dict)}, indent=2))


if __name__ == "__main__":
    main()
