"""The plan against FP8-LM's tables 5 and 7 (arXiv 2310.18313) in docs/reference/fp8_lm.md."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.observe.flops import flops_per_token, gemm_flops_per_token
from megafp8.plan.dryrun import rank_share
from megafp8.plan.memory import all_ranks, rank_memory
from megafp8.plan.traffic import rank_traffic
from megafp8.specs import Fp8Recipe, ParallelSpec, RunSpec, StorageSpec
from tests.tiny import gpt_spec, optim_spec, run_spec

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fp8_lm.md"
O3 = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")
SHAPES = {  # layers, width, heads, tensor-parallel, pipeline, GPUs, samples of a step
    "7B": (32, 4096, 32, 1, 1, 32, 2048),
    "13B": (40, 5120, 40, 2, 1, 32, 2048),
    "175B": (96, 12288, 96, 8, 4, 128, 512),
}
SEQ, VOCAB = 2048, 100_352
GIB, GB = 2**30, 1e9


def job(size: str, precision: str, micro: int = 2) -> RunSpec:
    """Return the run of one row: precision is BF16, TE (FP8 products alone) or O3."""
    layers, width, heads, tp, pp, gpus, samples = SHAPES[size]
    model = gpt_spec(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        num_attention_heads=heads,
        max_position_embeddings=SEQ,
        position_embedding_type="rope",
        vocab_size=VOCAB,
    )
    fp8 = None if precision == "BF16" else Fp8Recipe(params_in_fp8=precision == "O3")
    storage = O3 if precision == "O3" else StorageSpec()
    spec = run_spec(
        compute="bf16",
        model=model,
        fp8=fp8,
        optim=optim_spec(name="distributed_fused_adam", storage=storage),
        parallel=ParallelSpec(
            num_nodes=gpus // 8,
            devices_per_node=8,
            tp=tp,
            pp=pp,
            sequence_parallel=tp > 1,
            accelerator="gpu",
        ),
    )
    spec = replace(
        spec,
        data=replace(spec.data, seq_length=SEQ),
        precision=replace(spec.precision, half_weights=True),
    )
    train = replace(spec.train, micro_batch_size=micro, global_batch_size=samples)
    return replace(spec, train=train)


def weights_sent(spec: RunSpec) -> float:
    """Return GiB of weights and their gradients that one GPU sends in a step (table 5)."""
    return sum(m.on_wire for m in rank_traffic(spec, 0) if m.axis == "data") / GIB


def activations_sent(spec: RunSpec) -> float:
    """Return GiB that one GPU sends for the inputs of column-parallel linears in a microbatch.

    Table 7 counts these: the gathers before QKV and FC1, once more in the backward pass, and the
    reduce-scatter of their gradients.
    """
    counted = ("inputs of linears", "gradients of activations")
    sent = sum(m.on_wire for m in rank_traffic(spec, 0) if m.axis == "tp" and m.what in counted)
    return sent / spec.train.num_microbatches(spec.parallel.dp) / GIB


def memory(spec: RunSpec) -> float:
    """Return GB of the fullest rank (10^9 bytes): every tensor that the plan counts."""
    return max(rank.total for rank in all_ranks(spec)) / GB


def memory_with_their_buffers(spec: RunSpec) -> float:
    """Return GB of the fullest rank with the buffers of Megatron and MS-AMP in place of ours.

    At the end of the forward pass Megatron's loss holds the logits of all tokens in BF16, in FP32,
    and their softmax in FP32. It holds no gradient of the head by then, no layer's workspace, and
    nothing that other ranks send of gradients.
    Its sequences lie beside each other in memory, so that with sequence parallelism the projection
    reads attention's output itself, of which we keep a copy in BF16.
    MS-AMP's modules of Transformer Engine keep the transposed FP8 weights (`weight1_t_fp8`).
    """
    model, tp, tokens = spec.model, spec.parallel.tp, spec.train.micro_batch_size * SEQ
    head_gradients = tokens * model.hidden_size * 2 + VOCAB // tp * model.hidden_size * 4
    logits = tokens * VOCAB // tp * (2 + 4 + 4)
    in_fp8 = spec.precision.fp8 is not None and spec.precision.fp8.params_in_fp8
    is_copied = tp > 1 and spec.train.micro_batch_size > 1 and spec.precision.fp8 is None
    copies = is_copied * tokens * model.hidden_size // tp * 2
    assert not copies or spec.parallel.pp == 1  # one microbatch at a time
    found = []
    for rank in all_ranks(spec):
        has_head = rank.pipeline_rank == spec.parallel.pp - 1
        transposed = 12 * rank.num_layers * model.hidden_size**2 // tp if in_fp8 else 0
        ours = rank.step.workspace + rank.step.arriving + has_head * head_gradients
        ours += copies * rank.num_layers
        found.append(rank.total - ours + has_head * logits + transposed)
    return max(found) / GB


def tflops(spec: RunSpec, samples_per_second: float) -> float:
    """Return the TFLOP/s of a GPU at a throughput, as the paper counts them.

    Attention counts in full, and of the head's products three quarters: the formula of its
    Megatron patch has V / 16 L h for a step with recomputation and is used for one without.
    """
    flops = gemm_flops_per_token(spec.model, "full", seq_length=SEQ)
    per_sample = (flops.total - flops.head / 4) * SEQ
    return per_sample * samples_per_second / spec.parallel.world_size / 1e12


Row = tuple[str, str, int, float | None, float | None, float | None, float | None]
TABLE_5: list[Row] = [  # size, precision, micro batch, memory, samples/s, TFLOP/s, weights sent
    ("7B", "BF16", 2, 69.6, 159.2, 445, 37.2),
    ("7B", "TE", 2, 77.3, 224.5, 627, 37.2),
    ("7B", "O3", 2, 49.4, 219.8, 615, 13.9),
    ("7B", "O3", 4, 69.3, 230.5, 645, 13.9),
    ("13B", "BF16", 2, 68.2, 79.3, 420, 34.3),
    ("13B", "TE", 2, 76.4, 111.7, 592, 34.3),
    ("13B", "O3", 2, 48.9, 109.5, 575, 12.4),
    ("13B", "O3", 4, 67.8, 121.5, 644, 12.4),
]


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: " ".join(map(str, row[:3])))
def test_table_5(row: Row) -> None:
    size, precision, micro, _, samples, printed_tflops, printed_sent = row
    spec = job(size, precision, micro)
    assert samples is not None
    assert weights_sent(spec) == pytest.approx(printed_sent, rel=0.01)
    # The printed cell of 13B at micro batch 2 is 1 % from its own samples a second.
    assert tflops(spec, samples) == pytest.approx(printed_tflops, rel=0.0101)
    in_all = flops_per_token(spec.model, "full", seq_length=SEQ)
    per_token = tflops(spec, 1.0) * 1e12 * spec.parallel.world_size / SEQ
    assert per_token == pytest.approx(in_all, rel=0.015)


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: " ".join(map(str, row[:3])))
def test_memory_of_table_5(row: Row) -> None:
    """With the buffers of their software all are within 10 %, but for 13B at O3.

    Those two rows need more memory than is known. The plan itself, which is for our engine, is
    within 10 % of the rows of BF16 and of FP8 products alone.
    """
    size, precision, micro, printed, *_ = row
    assert printed is not None
    spec = job(size, precision, micro)
    ratio, theirs = memory(spec) / printed, memory_with_their_buffers(spec) / printed
    assert 0.9 < ratio < 1.1 if precision != "O3" else 0.65 < ratio < 0.9
    assert 0.9 < theirs < 1.1 if (size, precision) != ("13B", "O3") else 0.8 < theirs < 0.9


TABLE_5_OF_175B = [("BF16", 1, 66.1), ("TE", 1, 69.6), ("O3", 1, 40.3), ("O3", 4, 57.7)]


def test_memory_that_samples_add_to_175b() -> None:
    """The first of four stages keeps four microbatches, so that its memory grows by 4 a sample.

    Printed is a growth like that of the mean of the four stages, (4 + 3 + 2 + 1) / 4.
    """
    one, four = (all_ranks(job("175B", "O3", micro)) for micro in (1, 4))
    added = [(b.total - a.total) / 3 / GB for a, b in zip(one, four, strict=True)]
    sample = one[0].step.microbatch / GB
    assert added[:3] == pytest.approx([4 * sample, 3 * sample, 2 * sample], rel=0.03)
    printed = (57.7 - 40.3) / 3
    assert statistics.fmean(added) == pytest.approx(printed, rel=0.05)
    assert added[0] > 1.5 * printed


SAVED = [("7B", 2, 69.6, 49.4), ("13B", 2, 68.2, 48.9), ("175B", 1, 66.1, 40.3)]


@pytest.mark.parametrize("row", SAVED, ids=lambda row: str(row[0]))
def test_what_o3_saves_is_what_is_printed(row: tuple[str, int, float, float]) -> None:
    """Most of what 175B lacks at O3 is missing in BF16 too, so that it is not of O3's tensors."""
    size, micro, in_bf16, at_o3 = row
    ours = [memory_with_their_buffers(job(size, name, micro)) for name in ("BF16", "O3")]
    ratio = (ours[0] - ours[1]) / (in_bf16 - at_o3)
    assert ratio == pytest.approx(1, rel=0.16 if size == "13B" else 0.04)
    if size == "175B":
        assert at_o3 - ours[1] == pytest.approx(5.8, abs=0.05)
        assert in_bf16 - ours[0] == pytest.approx(4.9, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "rank"), [(1, 0), (4, 0), (1, 127)])
@pytest.mark.filterwarnings("ignore")
def test_a_dry_run_of_175b_has_the_memory_of_the_plan(micro: int, rank: int) -> None:
    """So what the printed 40.3 GB have beyond the plan is not a tensor of this engine.

    What is held and kept is equal; of the working memory the plan estimates a part.
    """
    spec = job("175B", "O3", micro)
    plan, real = rank_memory(spec, rank // 32), rank_share(spec, rank)
    assert plan.step.in_flight == pytest.approx(real.step.in_flight, rel=2e-3)
    assert plan.held.weights == real.held.weights
    assert plan.held.total == pytest.approx(real.held.total, rel=1e-3 if rank == 0 else 0.07)
    total = real.held.total + real.step.peak
    assert plan.total == pytest.approx(total, rel=0.03 if rank == 0 else 0.08)


def test_memory_that_samples_add() -> None:
    added = memory(job("7B", "O3", 4)) - memory(job("7B", "O3", 2))
    assert added == pytest.approx(69.3 - 49.4, rel=0.11)


def test_activations_of_table_7() -> None:
    """A sample's activation of one layer is U: 6 U in BF16, 4 U in FP8, a third less.

    The paper prints 34 %.
    """
    in_bf16, in_fp8 = (activations_sent(job("13B", precision)) for precision in ("BF16", "O3"))
    unit = SEQ * 2 * 5120 * 2 / 2 * 40 / GIB
    assert in_bf16 == pytest.approx(6 * unit) and in_fp8 == pytest.approx(4 * unit)
    assert 1 - in_fp8 / in_bf16 == pytest.approx(0.34, abs=0.01)


def rows() -> list[str]:
    """Return the rows of the page's tables."""
    found = []
    for size, precision, micro, mem, samples, printed, sent in TABLE_5:
        spec = job(size, precision, micro)
        cells = [
            (memory(spec), mem),
            (memory_with_their_buffers(spec), mem),
            (weights_sent(spec), sent),
            (tflops(spec, samples), printed),  # type: ignore[arg-type]
        ]
        shown = [f"{ours:.1f} / {theirs} = {ours / theirs:.2f}" for ours, theirs in cells]  # type: ignore[operator]
        found.append(f"| {size}, {precision}, {micro} | {' | '.join(shown)} |")
    for precision in ("BF16", "O3"):
        spec = job("175B", precision, 1)
        per_token = flops_per_token(spec.model, "full", seq_length=SEQ) / 1e9
        found.append(
            f"| 175B, {precision}, 1 | {memory(spec):.1f} | {weights_sent(spec):.1f} | "
            f"{activations_sent(spec):.2f} | {per_token:.0f} |"
        )
    for precision, micro, printed in TABLE_5_OF_175B:
        spec = job("175B", precision, micro)
        cells = [memory(spec), memory_with_their_buffers(spec)]
        shown = [f"{ours:.1f} / {printed} = {ours / printed:.2f}" for ours in cells]
        mean = statistics.fmean(rank.total for rank in all_ranks(spec)) / GB
        found.append(f"| 175B, {precision}, {micro} | {' | '.join(shown)} | {mean:.1f} |")
    for size, micro, in_bf16, at_o3 in SAVED:
        a, b = (memory_with_their_buffers(job(size, name, micro)) for name in ("BF16", "O3"))
        saved, printed = a - b, in_bf16 - at_o3
        found.append(
            f"| {size}, {micro} | {saved:.1f} / {printed:.1f} = {saved / printed:.2f} | "
            f"{in_bf16 - a:.1f} | {at_o3 - b:.1f} |"
        )
    for precision in ("BF16", "O3"):
        found.append(f"| 13B, {precision} | {activations_sent(job('13B', precision)):.2f} |")
    return found


def test_the_page_prints_these_figures() -> None:
    missing = [row for row in rows() if row not in PAGE.read_text()]
    assert not missing, "\n".join(missing)


def test_the_plan_s_page_prints_the_memory_of_o3() -> None:
    page = (PAGE.parents[1] / "evidence" / "published.md").read_text("utf-8")
    for size, more, micro, printed in (
        ("7B", "", 2, 49.4),
        ("13B", "", 2, 48.9),
        ("175B", ", micro batch 1", 1, 40.3),
    ):
        ours = memory(job(size, "O3", micro))
        figures = f"{ours:.1f} GB | {printed} GB | {ours / printed:.2f}"
        assert f"| {size}, FP8-LM's `O3`{more} | memory of one GPU | {figures} |" in page
