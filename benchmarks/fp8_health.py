"""Measure what `model.fp8_health` costs: forward and backward passes with and without its probe.

Times are CPU times of a step that is logged; other steps cost nothing. The fractions printed are of
the time of all steps with `trainer.log_every_n_steps=10`.

    python benchmarks/fp8_health.py --layers 4 --width 256
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import runpy
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.fp8.health import HealthProbe
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.step import forward_backward

LOG_EVERY = 10


def main() -> None:
    """Time steps with each kind of probe, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare_process(torch.device("cpu"), fp32=False)
    overrides = [
        f"model.num_layers={args.layers}",
        f"model.hidden_size={args.width}",
        f"model.ffn_hidden_size={4 * args.width}",
        "model.optim.lr=2e-3",  # of any width
        f"model.encoder_seq_length={args.seq}",
        f"model.micro_batch_size={args.batch}",
        f"model.global_batch_size={args.batch}",
        "model.fp8=True",
        f"model.fp8_recipe={args.recipe}",
    ]
    spec = resolve(load(overrides), lambda: False)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=args.vocab))
    state = build(spec, single_rank())
    assert isinstance(state.scaling, ScalingState)
    rng = np.random.default_rng(0)
    batch = Microbatch(*(rng.integers(0, args.vocab, (args.batch, args.seq)) for _ in range(2)))
    probes = {mode: HealthProbe(state.scaling, mode) for mode in ("scales", "full")}
    seconds: dict[str, list[float]] = {"off": [], "scales": [], "full": []}
    for round_number in range(args.rounds + 2):
        for mode, found in seconds.items():
            began = time.process_time()
            if mode in probes:
                probes[mode].attach()
            forward_backward(state, [batch])
            if mode in probes:
                probes[mode].detach()
            if round_number >= 2:
                found.append(time.process_time() - began)
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    shares = {mode: (medians[mode] / medians["off"] - 1) / LOG_EVERY for mode in ("scales", "full")}
    for mode, median in medians.items():
        extra = f"  {shares[mode]:+.2%} of all steps" if mode in shares else ""
        print(f"{mode:>7}  {1e3 * median:8.1f} ms of CPU for a logged step{extra}")
    today = datetime.date.today().isoformat()
    result = {
        "what": "forward and backward of a step that is logged, medians of CPU time, one thread",
        "date": today,
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "shape": {k: getattr(args, k) for k in ("layers", "width", "batch", "seq", "vocab")},
        "recipe": args.recipe,
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/fp8_health.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "median_cpu_seconds": medians,
        f"share_of_all_steps_at_log_every_{LOG_EVERY}": shares,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    name = f"{today}_fp8-health_{args.layers}x{args.width}_{args.recipe}.json"
    (args.results / name).write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {args.results / name}")


if __name__ == "__main__":
    main()
