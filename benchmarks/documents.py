"""Measure attention within documents in blocks against a mask of all scores, on a CPU.

Each row is one sample of S tokens with equal documents. Both ways run the attention core alone,
forward and backward, with the same queries, keys and values in FP32. Rounds alternate between the
ways, so that other load on the machine falls on both; times are processor times of the process,
their medians. Bytes are the most that live at a time beside the inputs, counted in one more round.
The result is one JSON line for each row. With `--train` a small model trains for two steps on
samples of one such length and number of documents; its line has the most bytes that live at a time,
the weights included, and the bytes that the plan predicts.

    OMP_NUM_THREADS=1 python benchmarks/documents.py --seq 2048 4096 --documents 1 2 4 16 64 256
    OMP_NUM_THREADS=1 python benchmarks/documents.py --train --seq 32768 --documents 16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.models.attention import AttentionContext, AttentionCore, attention_context
from megafp8.models.documents import document_ids
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import single_rank
from megafp8.plan.memory import rank_memory
from megafp8.specs import GPTSpec
from megafp8.train.build import build
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.step import train_step

VOCAB = 4096
MODEL = (
    "trainer.precision=bf16",
    "model.micro_batch_size=1",
    "model.global_batch_size=1",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
    "model.position_embedding_type=rope",
    "model.data.reset_position_ids=True",
    "model.data.reset_attention_mask=True",
)
"""The settings of the model that trains, other than the length."""

CPU = torch.device("cpu")


def contexts(spec: GPTSpec, seq: int, count: int) -> dict[str, Callable[[], AttentionContext]]:
    """Return a function for each way that makes attention's context of one microbatch."""
    borders = torch.arange(count + 1, dtype=torch.int32) * seq // count
    ids_BS = document_ids(borders.int(), seq)
    heads = slice(0, spec.num_attention_heads)

    def by_blocks() -> AttentionContext:
        return attention_context(spec, heads, torch.float32, seq, CPU, cu_seqlens_N1=borders.int())

    def by_mask() -> AttentionContext:
        return attention_context(spec, heads, torch.float32, (1, seq), CPU, document_ids_BS=ids_BS)

    return {"blocks": by_blocks, "mask": by_mask}


def measure(spec: GPTSpec, seq: int, count: int, rounds: int, masked: bool) -> dict[str, object]:
    """Return the figures of one row; without `masked` those of the blocks alone."""
    core = AttentionCore(spec.head_size, 0.0, "attention", RandomStreams(0), lambda flops: None)
    qkv = torch.randn(1, seq, 3 * spec.hidden_size, requires_grad=True)
    grad = torch.randn(1, seq, spec.hidden_size)
    ways = contexts(spec, seq, count)
    if not masked:
        del ways["mask"]

    def run(way: str) -> None:
        qkv.grad = None
        core(qkv, ways[way]()).backward(grad)

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            begin = time.process_time()
            run(way)
            if number:  # the first round warms up
                seconds[way].append(time.process_time() - begin)
    result: dict[str, object] = {"seq": seq, "documents": count}
    for way in ways:
        with LiveBytes() as live:
            live.begin()
            run(way)
        result[f"{way}_ms"] = round(1e3 * statistics.median(seconds[way]), 2)
        result[f"{way}_bytes"] = live.most
    if masked:
        ratios = (a / b for a, b in zip(seconds["mask"], seconds["blocks"], strict=True))
        result["mask_over_blocks"] = round(statistics.median(ratios), 2)
    return result


def train(seq: int, count: int) -> dict[str, object]:
    """Return the bytes and the losses of two steps of a model of two layers."""
    settings = ["trainer.accelerator=cpu", f"model.encoder_seq_length={seq}", *MODEL]
    spec = resolve(load(settings), lambda: False)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=VOCAB))
    borders = (np.arange(count + 1) * seq // count).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, seq + 1))
    places = np.arange(seq) - np.repeat(borders[:-1], np.diff(borders))
    batch = Microbatch(
        tokens[:, :-1].copy(),
        tokens[:, 1:].copy(),
        position_ids_BS=places[None].copy(),
        cu_seqlens_N1=borders,
    )
    with LiveBytes() as live:
        live.begin()
        state = build(spec, single_rank())
        losses = [train_step(state, [batch]).loss for _ in range(2)]
    planned = rank_memory(spec, 0).total
    return {
        "seq": seq,
        "documents": count,
        "most_live_bytes": live.most,
        "planned_bytes": planned,
        "losses": [round(loss, 4) for loss in losses],
    }


def main() -> None:
    """Print a line for each length and number of documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, nargs="+", default=[2048])
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 2, 4, 16, 64, 256])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--masked-up-to", type=int, default=8192, help="longest sample with a mask")
    args = parser.parse_args()
    if args.train:
        for seq in args.seq:
            for count in args.documents:
                print(json.dumps(train(seq, count)), flush=True)
        return
    spec = GPTSpec(
        vocab_size=1,
        num_layers=1,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        max_position_embeddings=max(args.seq),
        position_embedding_type="none",
        init_method_std=0.02,
        use_scaled_init_method=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
        layernorm_epsilon=1e-5,
    )
    for seq in args.seq:
        for count in args.documents:
            row = measure(spec, seq, count, args.rounds, seq <= args.masked_up_to)
            print(json.dumps({**row, "threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()
