"""Time one transformer layer on a GPU, forward and backward, in BF16 and FP8, eager and compiled.

The layer runs as in a real run: scales are updated, weights are quantized in each run (as with one
microbatch in a step), weight gradients are added in FP32. The input is random normal numbers. Times
are medians of CUDA events, of one process, so that ratios are of one clock. TFLOP/s are given
twice, counting attention in full and by its causal half. The floor is the sum over all products of
the larger of operations over peak and bytes over bandwidth. Operations between products are not
part of the floor, since they could be fused.

    python benchmarks/gpu_layer.py
    python benchmarks/gpu_layer.py --tiny            # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_common import (
    RESULTS,
    Results,
    bytes_per_second,
    device_and_name,
    peak_flops,
    spread,
    timed,
)

from megafp8.backends import choose
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.errors import UserError
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.state import TrainState

FP8 = ("model.fp8=True",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "bf16 compiled": ("model.compile=block",),
    "fp8 delayed": FP8,
    "fp8 delayed compiled": (*FP8, "model.compile=block"),
    "fp8 tensorwise": (*FP8, "model.fp8_recipe=tensorwise"),
    "fp8 tensorwise compiled": (*FP8, "model.fp8_recipe=tensorwise", "model.compile=block"),
    "fp8 params": (*FP8, "model.fp8_params=True"),
    "fp8 rowwise": (*FP8, "model.fp8_recipe=rowwise"),
    "fp8 blockwise": (*FP8, "model.fp8_recipe=blockwise"),
    "fp8 mxfp8": (*FP8, "model.fp8_recipe=mxfp8"),
    "fp4 nvfp4": (*FP8, "model.fp8_recipe=nvfp4"),
    "te bf16": ("model.fp8_backend=te",),
    "te fp8 delayed": (*FP8, "model.fp8_backend=te"),
    "torchao fp8 tensorwise": (*FP8, "model.fp8_recipe=tensorwise", "model.fp8_backend=torchao"),
}


def state_of(
    args: argparse.Namespace, device: torch.device, settings: tuple[str, ...]
) -> TrainState:
    """Return a GPT of one layer, as a user's settings build it; only its layer is run."""
    cfg = load(
        [
            "model.num_layers=1",
            f"model.hidden_size={args.hidden}",
            f"model.ffn_hidden_size={4 * args.hidden}",
            "model.optim.lr=2e-3",  # of any width
            f"model.num_attention_heads={args.heads}",
            f"model.encoder_seq_length={args.seq}",
            f"model.max_position_embeddings={args.seq}",
            f"model.micro_batch_size={args.batch}",
            f"model.global_batch_size={args.batch}",
            "model.openai_gelu=True",  # Transformer Engine's GELU, so that all compute the same
            "trainer.precision=bf16",
            *settings,
        ]
    )
    spec = resolve(cfg, torch.cuda.is_available)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=128))
    # `auto` is native here: only a run chooses Transformer Engine for it, where it begins.
    choose.check_backend(spec, device)
    return build(spec, single_rank(device))


def one_run(
    state: TrainState, args: argparse.Namespace, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that runs one microbatch and returns the gradient of the layer's input."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (args.batch, args.seq, args.hidden)
    x = torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_()
    grad = (1e-3 * torch.randn(shape, device=device, generator=generator)).bfloat16()

    def run() -> torch.Tensor:
        x.grad = None
        state.sink.begin_step()
        state.scaling.begin_microbatch(0)
        output = state.model.forward_layers(x)
        state.scaling.end_forward()
        output.backward(grad)
        state.scaling.end_backward()
        assert x.grad is not None
        return x.grad

    return run


def linear_shapes(hidden: int) -> list[tuple[int, int]]:
    """Return the (out, in) features of QKV, projection, FC1 and FC2."""
    return [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]


def floor_seconds(args: argparse.Namespace, name: str, in_fp8: bool) -> float:
    """Return the floor of the linears' three products each and of attention's, in seconds.

    Results are in BF16, and so are operands that are not in FP8.
    """
    tokens, bandwidth, total = args.batch * args.seq, bytes_per_second(name), 0.0
    precision, size = ("fp8", 1) if in_fp8 else ("bf16", 2)
    for outs, ins in linear_shapes(args.hidden):
        for m, n, k in [(tokens, outs, ins), (tokens, ins, outs), (outs, ins, tokens)]:
            num_bytes = size * k * (m + n) + 2 * m * n
            total += max(2 * m * n * k / peak_flops(name, precision), num_bytes / bandwidth)
    return total + causal_attention_flops(args) / peak_flops(name, "bf16")


def causal_attention_flops(args: argparse.Namespace) -> int:
    """Return the FLOPs of attention: half of two products forward and of four backward."""
    return 6 * args.batch * args.seq**2 * args.hidden


def measure(
    args: argparse.Namespace, device: torch.device, name: str, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Return the row of one variant: times, rates, memory and the kernels that ran."""
    state = state_of(args, device, settings)
    run = one_run(state, args, device)
    run()
    backends = fp8_flops_of(state)
    run()
    macs = sum(outs * ins for outs, ins in linear_shapes(args.hidden))
    causal = 6 * args.batch * args.seq * macs + causal_attention_flops(args)
    full = causal + causal_attention_flops(args)
    ran = {k: n for k, n in fp8_flops_of(state).items() if n > backends.get(k, 0)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = spread(timed(run, device, args.warm_up, args.runs))
    median = row["median_seconds"]
    return {
        **row,
        "tokens_per_second": args.batch * args.seq / median,
        "flops_per_second_full": full / median,
        "flops_per_second_causal": causal / median,
        "share_of_bf16_peak_causal": causal / median / peak_flops(name, "bf16"),
        "floor_seconds": floor_seconds(args, name, "model.fp8=True" in settings),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "fp8_ran_by": sorted(ran),
        "compiled": None if state.compiled is None else dataclasses.asdict(state.compiled),
    }


def fp8_flops_of(state: TrainState) -> dict[str, int]:
    """Return the FLOPs of FP8 products so far, by what ran them.

    Other backends' products are counted, but not by kernel: they are under `another backend`.
    """
    of_ours: dict[str, int] = {str(kind): n for kind, n in state.counter.fp8_backends.items()}
    others = state.counter.by_precision().get("fp8", 0) - sum(of_ours.values())
    return of_ours | ({"another backend": others} if others else {})


def main() -> None:
    """Time each variant, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--tiny", action="store_true", help="check on any device: a small layer, few runs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to measure (--tiny checks that the benchmark runs)")
    if args.tiny:
        args.hidden, args.heads, args.batch, args.seq, args.runs, args.warm_up = 128, 2, 2, 64, 2, 1
    shape = {key: getattr(args, key) for key in ("hidden", "heads", "batch", "seq", "runs")}
    title = "one layer, forward and backward; medians; ratios of medians of one process"
    subject = f"layer-{args.hidden}-{args.batch * args.seq}"
    results = Results(args.results, subject, name, title, shape=shape)
    for what in args.variants:
        try:
            row = measure(args, device, name, VARIANTS[what])
        except UserError as error:  # this backend is not installed, or refuses the layer
            results.skip(what, str(error))
        except Exception as error:  # the other variants still run
            results.fail(what, f"{type(error).__name__}: {error}")
        else:
            row |= beside_bf16(row, results.rows.get("bf16", row if what == "bf16" else None))
            results.add(what, row)
            print(shown(what, row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sys.exit(results.exit_code())


def beside_bf16(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, float | None]:
    """Return speed and memory relative to BF16's row, if there is one."""
    if base is None:
        return {"times_bf16": None, "bf16_share_of_peak": None, "memory_over_bf16": None}
    has_memory = base["peak_memory_bytes"]
    return {
        "times_bf16": base["median_seconds"] / row["median_seconds"],
        "bf16_share_of_peak": base["share_of_bf16_peak_causal"],
        "memory_over_bf16": (
            row["peak_memory_bytes"] / base["peak_memory_bytes"] if has_memory else None
        ),
    }


def shown(what: str, row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    ratio = row["times_bf16"]
    return (
        f"{what:>24}  {1e3 * row['median_seconds']:9.3f} ms  "
        f"{row['flops_per_second_full'] / 1e12:7.1f} TFLOP/s full  "
        f"{row['flops_per_second_causal'] / 1e12:7.1f} causal  "
        f"floor {1e3 * row['floor_seconds']:8.3f} ms  "
        f"{'' if ratio is None else f'{ratio:.2f} x bf16'}"
    )


if __name__ == "__main__":
    main()
