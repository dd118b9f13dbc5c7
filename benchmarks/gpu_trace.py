"""Record a trace of delayed scaling, Transformer Engine's or our own, and replay it.

    python benchmarks/gpu_trace.py --engine te --steps 200 --out tests/fp8/traces/te_h100

A small GPT is trained on random tokens. benchmarks/traces.py describes the file. Without
`--engine te`, the trace is of our own engine on the same model.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

import megafp8
from fp8_numerics.formats import FORMATS
from megafp8.backends import choose
from megafp8.backends.te.state import TeScaling
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.errors import ConfigError
from megafp8.parallel.mesh import single_rank
from megafp8.specs import RunSpec
from megafp8.train.build import build
from megafp8.train.step import train_step

sys.path.insert(0, str(Path(__file__).parents[1]))  # the two files beside this one
from benchmarks.te_trace import RecordedTeScaling, cast_sample
from benchmarks.traces import RecordedScaling, Trace, replay


def spec_of(args: argparse.Namespace) -> RunSpec:
    """Return a run of a small model with delayed scaling and the GELU that both engines have."""
    cfg = load(
        [
            "model.fp8=True",
            *([f"model.fp8_amax_history_len={args.history}"] if args.algo == "max" else []),
            f"model.fp8_amax_compute_algo={args.algo}",
            f"model.num_layers={args.layers}",
            f"model.hidden_size={args.width}",
            f"model.ffn_hidden_size={4 * args.width}",
            "model.optim.lr=2e-3",  # of any width
            f"model.num_attention_heads={args.width // 64}",
            f"model.encoder_seq_length={args.seq}",
            f"trainer.max_steps={args.steps}",
        ]
    )
    spec = resolve(cfg, torch.cuda.is_available)
    model = dataclasses.replace(
        spec.model, vocab_size=512, activation="gelu-tanh", hidden_dropout=0.0,
        attention_dropout=0.0, ffn_dropout=0.0,
    )  # fmt: skip
    precision = dataclasses.replace(spec.precision, backend=args.engine)
    return dataclasses.replace(spec, model=model, precision=precision)


def microbatch(rng: np.random.Generator, seq: int) -> Microbatch:
    """Return two random sequences whose next tokens are partly predictable."""
    text = np.cumsum(rng.integers(0, 3, (2, seq + 1)), axis=1) % 512
    return Microbatch(np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:]))


def samples(trace: Trace, names: list[str], device: torch.device) -> None:
    """Add casts by Transformer Engine with the newest scales to the trace.

    The tensors have values of all magnitudes, both zeros included.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name in names:
        is_grad = name.endswith(".grad_output")
        direction = "backward" if is_grad else "forward"
        kind = trace.recipe.backward_format if is_grad else trace.recipe.forward_format
        newest = trace.amax[direction][-1][trace.names[direction].index(name)].item() or 1.0
        x = torch.randn(128, 128, device=device, generator=generator) * newest / 3
        x[0] = torch.logspace(-12, 2, 128, device=device) * newest
        x[1, :2] = torch.tensor([0.0, -0.0])
        sample = cast_sample(trace, name, x.bfloat16(), FORMATS[kind])
        sample.input, sample.payload = sample.input.cpu(), sample.payload.cpu()
        trace.samples.append(sample)


def main() -> None:
    """Train, record, write the trace and replay it; exit with 1 if the replay differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("te", "native"), default="native")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--history", type=int, default=16)
    parser.add_argument("--algo", choices=("max", "most_recent"), default="max")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    spec = spec_of(args)
    try:
        choose.check_backend(spec, device)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    state = build(spec, single_rank(device))
    recorded: RecordedScaling | RecordedTeScaling
    if isinstance(state.scaling, TeScaling):
        recorded = RecordedTeScaling(state.scaling)
    else:
        recorded = RecordedScaling(
            state.scaling, version=megafp8.__version__, sample_updates=frozenset({0, args.steps})
        )
    state.scaling = recorded
    rng = np.random.default_rng(0)
    for _ in range(args.steps):
        train_step(state, [microbatch(rng, args.seq), microbatch(rng, args.seq)])
        state.step += 1
    trace = recorded.trace
    if isinstance(recorded, RecordedTeScaling):
        roles = ("input", "weight", "grad_output")
        samples(trace, [f"layers.0.mlp.fc1.{role}" for role in roles], device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    trace.save(args.out)
    found = replay(Trace.load(args.out))
    print(f"{args.out}: {trace.engine} {trace.version}, {2 * args.steps} updates in each direction")
    print("\n".join(found[:20]) if found else "replays bit for bit")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
