"""Compare the plan's predictions with published tables; docs/evidence/published.md prints the rows.

    python -m benchmarks.plan_published

Each job is asked from `megafp8.cli.plan` with the layout that its table prints. No device is used.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from megafp8.cli.plan import main as plan_main

A100 = (
    "hardware=A100",
    "hardware.bf16_tflops=312",
    "hardware.fp8_tflops=312",
    "hardware.memory_gib=79.1",
    "hardware.memory_gb_s=2039",
    "hardware.node_gb_s=300",
    "hardware.network_gb_s=25",
)
VOCAB = 51_200  # of Megatron's jobs
ZERO = "model.optim.name=distributed_fused_adam"
TENSORWISE = "model.fp8_recipe=tensorwise"
GPT3_175B = (
    "model=gpt3_175b",
    "model.tensor_model_parallel_size=4",
    "model.sequence_parallel=True",
    "model.pipeline_model_parallel_size=8",
    "model.virtual_pipeline_model_parallel_size=6",
    ZERO,
)
LLAMA = ("model=llama3_8b", "--vocab-size", "128256", "model.global_batch_size=128")

# name, (layers, width, heads), (tensor, pipeline), GPUs, batch, micro batch, published
MEGATRON: list[tuple[str, tuple[int, int, int], tuple[int, int], int, int, int, int]] = [
    ("1.7B", (24, 2304, 24), (1, 1), 32, 512, 16, 137),
    ("3.6B", (30, 3072, 32), (2, 1), 64, 512, 16, 138),
    ("7.5B", (36, 4096, 32), (4, 1), 128, 512, 16, 142),
    ("18.4B", (40, 6144, 48), (8, 1), 256, 1024, 16, 135),
    ("174.6B", (96, 12288, 96), (8, 12), 384, 1536, 1, 153),
    ("174.6B", (96, 12288, 96), (8, 12), 768, 1536, 1, 149),
    ("174.6B", (96, 12288, 96), (8, 12), 1536, 1536, 1, 141),
]
# name, GPUs, settings, published
NEMO: list[tuple[str, int, tuple[str, ...], int]] = [
    (
        "GPT3-5B",
        64,
        ("model=gpt3_5b", ZERO, "model.micro_batch_size=4", "model.global_batch_size=2048"),
        22_521,
    ),
    ("GPT3-175B", 128, (*GPT3_175B, "model.global_batch_size=256"), 726),
    (
        "GPT3-175B",
        512,
        (*GPT3_175B, "model.micro_batch_size=2", "model.global_batch_size=2048"),
        782,
    ),
    ("LLAMA3-8B, context 2", 8, (*LLAMA, ZERO, "model.context_parallel_size=2"), 12_036),
    ("LLAMA3-8B, FSDP", 8, (*LLAMA, TENSORWISE, "model.fsdp=True"), 14_451),
    (
        "LLAMA3-8B, B200",
        8,
        (*LLAMA, TENSORWISE, ZERO, "model.micro_batch_size=2", "hardware=b200"),
        30_624,
    ),
]


SHAPE_7B = (
    "model.num_layers=32",
    "model.hidden_size=4096",
    "model.ffn_hidden_size=16384",
    "model.num_attention_heads=32",
)
SHAPE_13B = (
    "model.num_layers=40",
    "model.hidden_size=5120",
    "model.ffn_hidden_size=20480",
    "model.num_attention_heads=40",
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=True",
)
FP8_LM = (
    "model.encoder_seq_length=2048",
    "model.max_position_embeddings=2048",
    "model.position_embedding_type=rope",
    "model.micro_batch_size=2",
    "model.global_batch_size=2048",
    "--vocab-size",
    "100352",
    ZERO,
)
NANOCHAT = (
    "model.num_layers=26",
    "model.hidden_size=1664",
    "model.ffn_hidden_size=6656",
    "model.num_attention_heads=13",
    "model.encoder_seq_length=2048",
    "model.max_position_embeddings=2048",
    "model.position_embedding_type=rope",
    "model.normalization=rmsnorm",
    "model.bias=False",
    "model.share_embeddings_and_output_weights=False",
    "model.activation=squared-relu",
    "model.micro_batch_size=32",
    "model.global_batch_size=256",
    "--vocab-size",
    "32768",
    ZERO,
)
ROWWISE = "model.fp8_recipe=rowwise"
# name, GPUs, settings, published speeds in FP8 and in BF16, all on H100
PAIRS: list[tuple[str, int, tuple[str, ...], float, float]] = [
    ("GPT-7B, delayed", 32, (*SHAPE_7B, *FP8_LM), 224.5, 159.2),
    ("GPT-13B, delayed", 32, (*SHAPE_13B, *FP8_LM), 111.7, 79.3),
    ("LLAMA3-8B, tensorwise", 8, (*LLAMA, TENSORWISE, "model.fsdp=True"), 7689.5, 6150),
    ("LLAMA3-8B, rowwise", 8, (*LLAMA, ROWWISE, "model.fsdp=True"), 6768, 6150),
    ("26 x 1664, tensorwise", 8, (*NANOCHAT, TENSORWISE), 740, 630),
    ("26 x 1664, rowwise", 8, (*NANOCHAT, ROWWISE), 564, 630),
]


def plan(*words: str, gpus: int) -> dict[str, Any]:
    """Return the plan of a job as `--json` prints it."""
    nodes = (f"trainer.num_nodes={gpus // 8}", "trainer.devices=8")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        plan_main([*words, *nodes, "--json"])
    found: dict[str, Any] = json.loads(text.getvalue())
    return found


def megatron_rows() -> list[str]:
    """Return TFLOP/s of an A100, counted as 96 B s l h² (1 + s/6h + V/16lh) a step."""
    rows = []
    for name, (layers, hidden, heads), (tp, pp), gpus, batch, micro, published in MEGATRON:
        found = plan(
            *A100,
            *shape_words(layers, hidden, heads, tp),
            f"model.pipeline_model_parallel_size={pp}",
            f"model.micro_batch_size={micro}",
            f"model.global_batch_size={batch}",
            *recomputed("full"),
            gpus=gpus,
        )
        parts = 1 + 2048 / (6 * hidden) + VOCAB / (16 * layers * hidden)
        flops = 96 * batch * 2048 * layers * hidden**2 * parts
        rate = flops / found["step_seconds"]["total"] / gpus / 1e12
        rows.append(f"{name}, {gpus} GPUs: {rate:.0f} {published} {rate / published:.2f}")
    return rows


def nemo_rows() -> list[str]:
    """Return tokens a second of one GPU in FP8."""
    rows = []
    for name, gpus, words, published in NEMO:
        speed = plan(*words, "model.fp8=True", gpus=gpus)["tokens_per_second"] / gpus
        rows.append(f"{name}, {gpus} GPUs: {speed:.0f} {published} {speed / published:.2f}")
    return rows


def pair_ratios() -> dict[str, tuple[float, float]]:
    """Return FP8's speed over BF16's by the name of a pair: as predicted, and as published."""
    return {
        name: (plan(*words, "model.fp8=True", gpus=gpus)["fp8_over_bf16"], fp8 / bf16)
        for name, gpus, words, fp8, bf16 in PAIRS
    }


def pair_rows() -> list[str]:
    """Return FP8's speed over BF16's in published pairs of runs."""
    return [
        f"{name}: {predicted:.2f} {published:.2f} {predicted / published:.2f}"
        for name, (predicted, published) in pair_ratios().items()
    ]


def activation_rows() -> list[str]:
    """Return a layer's bytes over tokens times width, for 48 x 6144 on 8 tensor-parallel ranks."""
    rows = []
    for granularity, sequence in (("selective", False), ("selective", True), ("full", False)):
        kept = []
        for layers in (24, 48):
            found = plan(
                *shape_words(layers, 6144, 64, 8),
                "model.micro_batch_size=4",
                "model.global_batch_size=4",
                f"model.sequence_parallel={sequence}",
                "model.hidden_dropout=0.1",
                *recomputed(granularity),
                gpus=8,
            )
            kept.append(found["ranks"][0]["step"]["microbatch"])
        each = (kept[1] - kept[0]) / 24 / (4 * 2048 * 6144)
        rows.append(f"{granularity}, sequence parallelism {sequence}: {each:.3f} sbh")
    return rows


def shape_words(layers: int, hidden: int, heads: int, tp: int) -> tuple[str, ...]:
    """Return the settings of a GPT of Megatron's kind in BF16."""
    return (
        f"model.num_layers={layers}",
        f"model.hidden_size={hidden}",
        f"model.ffn_hidden_size={4 * hidden}",
        f"model.num_attention_heads={heads}",
        f"model.tensor_model_parallel_size={tp}",
        "model.encoder_seq_length=2048",
        "model.max_position_embeddings=2048",
        "trainer.precision=bf16",
        "--vocab-size",
        str(VOCAB),
    )


def recomputed(granularity: str) -> tuple[str, ...]:
    """Return the settings of recomputation in all layers."""
    name = "model.activations_checkpoint"
    whole = (f"{name}_method=uniform", f"{name}_num_layers=1") if granularity == "full" else ()
    return (f"{name}_granularity={granularity}", *whole)


if __name__ == "__main__":
    print("predicted, published, ratio")
    print(*megatron_rows(), *nemo_rows(), *pair_rows(), *activation_rows(), sep="\n")
