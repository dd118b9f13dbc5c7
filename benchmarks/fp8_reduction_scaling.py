"""Compare three ways to scale FP8 sums of gradients over ranks: before, after, automatic.

It is the experiment of FP8-LM's figure 7 (arXiv 2310.18313).

A small GPT is trained for some steps. Then each of up to 128 simulated ranks computes the gradient
of a microbatch of its own, and the gradients are averaged in E4M3, in one process:

    pre     each rank casts s * g / N, and the sum is the mean
    post    each rank casts s * g, and the sum is divided by N
    auto    each rank casts s * mu * g, and the sum is divided by mu * N
    fp32    each rank casts with a scale of its own; the values are summed in FP32 and cast once

s is the power of two that brings the largest amax of all ranks to at most 448, mu the paper's
factor: it starts at 1 and is halved while more than 1e-5 of the sum's values have the largest
magnitude. Sums in FP8 are rounded after each rank and saturate. Against the exact mean are measured

    underflow   the fraction of the non-zero gradients that a rank casts to zero
    overflow    the fraction of the sum's values that saturate
    SNR         10 log10(sum of squared means / sum of squared errors), in decibel

    python benchmarks/fp8_reduction_scaling.py --steps 200
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cpu_step import cpu_name

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import microbatch
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import linears_of
from megafp8.runs.run_data import open_data
from megafp8.train.build import build
from megafp8.train.step import forward_backward, train_step

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 448.0  # of E4M3
SATURATED = 1e-5  # the paper's limit
RULES = ("pre", "post", "auto", "fp32")
RANKS = (8, 16, 32, 64, 128)
JOB = (
    "trainer.accelerator=cpu",
    "model.num_layers=4",
    "model.hidden_size=128",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.encoder_seq_length=64",
    "model.micro_batch_size=4",
    "model.global_batch_size=16",
    "model.tokenizer.vocab_size=512",
    "model.optim.lr=2e-3",
)


@dataclass(frozen=True)
class Measured:
    """Hold what one rule does to one tensor."""

    underflow: float
    overflow: float
    snr_db: float
    mu: float = 1.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return FP32 values rounded to E4M3, beyond its largest number to that number."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def scale_of(amax: float) -> float:
    """Return the largest power of two that brings `amax` to at most 448; 1 for 0."""
    return 2.0 ** math.floor(math.log2(LARGEST / amax)) if amax > 0 else 1.0


def sum_in_fp8(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of E4M3 values, rounded to E4M3 after each rank; it saturates."""
    total = payloads[0]
    for payload in payloads[1:]:
        total = to_e4m3(total + payload)
    return total


def measure(grads_N: Sequence[torch.Tensor], rule: str) -> Measured:
    """Return what a rule does to one tensor's gradients, of which each rank has one (FP32)."""
    ranks = len(grads_N)
    scale = scale_of(max(float(grad.abs().max()) for grad in grads_N))
    mu = 1.0
    if rule == "fp32":
        scales = [scale_of(float(grad.abs().max())) for grad in grads_N]
        payloads = [to_e4m3(grad * own) for grad, own in zip(grads_N, scales, strict=True)]
        parts = [q / own for q, own in zip(payloads, scales, strict=True)]
        summed = torch.stack(parts).sum(0)
        last = scale_of(float(summed.abs().max()))
        mean = to_e4m3(summed * last) / last / ranks
        return _compared(grads_N, payloads, mean, 0.0, mu)
    if rule == "pre":
        mu = 1.0 / ranks
    while True:
        payloads = [to_e4m3(grad * (scale * mu)) for grad in grads_N]
        summed = sum_in_fp8(payloads)
        overflow = float((summed.abs() == LARGEST).double().mean())
        if rule != "auto" or overflow <= SATURATED or mu < 2.0**-20:
            break
        mu /= 2
    return _compared(grads_N, payloads, summed / (scale * mu * ranks), overflow, mu)


def _compared(
    grads_N: Sequence[torch.Tensor],
    payloads: Sequence[torch.Tensor],
    mean: torch.Tensor,
    overflow: float,
    mu: float,
) -> Measured:
    exact = torch.stack([grad.double() for grad in grads_N]).mean(0)
    nonzero = sum(int((grad != 0).sum()) for grad in grads_N)
    pairs = zip(grads_N, payloads, strict=True)
    lost = sum(int(((grad != 0) & (payload == 0)).sum()) for grad, payload in pairs)
    error = float((exact - mean.double()).square().sum())
    signal = float(exact.square().sum())
    snr = 10 * math.log10(signal / error) if error and signal else math.inf
    return Measured(lost / max(1, nonzero), overflow, snr, mu)


def gradients(steps: int, ranks: int, seed: int) -> dict[str, list[torch.Tensor]]:
    """Return each rank's gradients of the linears' weights, after some steps of training."""
    spec = resolve(load([*JOB, f"trainer.max_steps={max(steps, 1)}", f"model.seed={seed}"]), bool)
    data = open_data(spec.data, print)
    spec = spec.with_vocabulary(data.vocab_size)
    state = build(spec, single_rank())
    size, samples = spec.train.micro_batch_size, 0

    def next_batch() -> object:
        nonlocal samples
        batch = microbatch([data.train[samples + n] for n in range(size)])
        samples += size
        return batch

    for step in range(steps):
        batches = [next_batch() for _ in range(spec.train.num_microbatches(1))]
        result = train_step(state, batches)  # type: ignore[arg-type]
        state.step += 1
        if step % 50 == 49:
            print(f"step {step + 1}: loss {result.loss:.3f}", flush=True)
    weights = [linear.weight for linear in linears_of(state.model)]
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(ranks):
        batch = next_batch()
        forward_backward(state, [batch])  # type: ignore[list-item]
        grads = dict(zip(state.masters.params, state.masters.param_grads, strict=True))
        for weight in weights:
            name = pieces_of(weight)[0].name.removesuffix(".weight")
            grad = grads[weight].detach().float() / (size * spec.data.seq_length)
            found.setdefault(name, []).append(grad.clone())
    return found


def summary(rows: Sequence[Measured]) -> dict[str, float]:
    """Return the means over tensors."""
    return {
        "underflow": statistics.fmean(row.underflow for row in rows),
        "overflow": statistics.fmean(row.overflow for row in rows),
        "snr_db": statistics.fmean(row.snr_db for row in rows),
        "mu": statistics.geometric_mean([row.mu for row in rows]),
    }


def verdict(by_rule: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return whether the paper's statements about its figure 7 hold for these means."""
    pre, post, auto = (by_rule[rule] for rule in ("pre", "post", "auto"))
    return {
        "pre-scaling underflows most": pre["underflow"] >= max(
            post["underflow"], auto["underflow"]
        ),
        "post-scaling overflows most": post["overflow"] >= max(pre["overflow"], auto["overflow"]),
        "auto-scaling underflows less than pre-scaling": auto["underflow"] < pre["underflow"],
        "auto-scaling overflows less than post-scaling": auto["overflow"] < post["overflow"],
        "auto-scaling has a better SNR than post-scaling, by 0.1 dB or more": (
            auto["snr_db"] - post["snr_db"] >= 0.1
        ),
        "auto-scaling has a better SNR than pre-scaling, by 0.1 dB or more": (
            auto["snr_db"] - pre["snr_db"] >= 0.1
        ),
    }  # fmt: skip


def plot(means: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw the three measures over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    titles = {"underflow": "underflow of the casts, %", "overflow": "overflow of the sum, %"}
    titles["snr_db"] = "SNR of the mean, dB"
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for rule in RULES:
            factor = 1 if key == "snr_db" else 100
            values = [factor * means[ranks][rule][key] for ranks in means]
            axes.plot(list(means), values, marker="o", markersize=4, label=rule)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("simulated ranks")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, measure all rules at all numbers of ranks, and write the result and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of training before (200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--image", type=Path, default=ROOT / "docs/images/fp8_reduction_scaling.png"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = gradients(args.steps, max(args.ranks), args.seed)
    tensors: dict[int, dict[str, dict[str, Measured]]] = {}
    for ranks in args.ranks:
        tensors[ranks] = {
            rule: {name: measure(grads[:ranks], rule) for name, grads in found.items()}
            for rule in RULES
        }
    means = {
        ranks: {rule: summary(list(rows.values())) for rule, rows in by_rule.items()}
        for ranks, by_rule in tensors.items()
    }
    verdicts = {ranks: verdict(by_rule) for ranks, by_rule in means.items()}
    today = datetime.date.today().isoformat()
    result = {
        "what": "FP8 sums of real gradients over simulated ranks, means over the linears' weights",
        "date": today,
        "cpu": cpu_name(),
        "command": " ".join(["python", "benchmarks/fp8_reduction_scaling.py", *sys.argv[1:]]),
        "job": JOB,
        "means": means,
        "verdicts": verdicts,
        "tensors": {
            ranks: {
                rule: {name: asdict(row) for name, row in rows.items()}
                for rule, rows in by_rule.items()
            }
            for ranks, by_rule in tensors.items()
        },
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_fp8-reduction-scaling.json"
    path.write_text(json.dumps(result) + "\n")
    print(f"{'ranks':>6} {'rule':>5} {'underflow':>10} {'overflow':>10} {'SNR dB':>7} {'mu':>8}")
    for ranks, by_rule in means.items():
        for rule, row in by_rule.items():
            print(
                f"{ranks:>6} {rule:>5} {row['underflow']:>10.4%} {row['overflow']:>10.4%} "
                f"{row['snr_db']:>7.2f} {row['mu']:>8.4f}"
            )
    print(json.dumps(verdicts, indent=1))
    plot(means, args.image)
    print(f"written to {path} and {args.image}")


if __name__ == "__main__":
    main()
