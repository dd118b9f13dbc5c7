"""Compute the bytes that one rank of a job holds, from the run's spec alone.

The formulas count the tensors that the native backend keeps. A dry run (`dryrun.py`) counts
the same tensors from a model that is built on torch's meta device, and tests hold the two together.
No constant is fitted to a measurement. A plan is always for GPUs, whatever the spec's accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megafp8.plan.fsdp import StageBytes, passes_of_stage, start_bytes
from megafp8.plan.gradients import arriving_bytes, passing_gradients
from megafp8.plan.layer import (
    backward_instants,
    experts_forward_work,
    layer_bytes,
    layer_input_bytes,
    norm_bytes,
)
from megafp8.plan.pipeline import (
    StagePasses,
    Work,
    kept_by,
    most_held,
    short_order,
    worst_pass,
)
from megafp8.specs import RunSpec
from megafp8.specs.held import HeldBytes, bytes_kept, fullest
from megafp8.specs.model import BLOCK_QUERIES, head_chunk
from megafp8.specs.rank_shape import (
    FP32,
    LinearShape,
    compute_itemsize,
    copies_weights,
    groups_of,
    kinds_of_layers,
    layers_of_stage,
    microbatch_tokens,
    num_microbatches,
    num_stages,
    rank_shape,
    recomputes,
    sequence_shards,
)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Hold the bytes that a step adds to `HeldBytes`; a plan and a dry run fill this in."""

    microbatch: int  # kept between forward and backward of one microbatch, on its largest stage
    in_flight: int  # kept by all microbatches that the schedule has begun, at its worst moment
    weight_copies: int  # FP8 copies of weights, in two orientations for tensor cores
    workspace: int  # alive only while one layer or the head runs
    gathered: int = 0  # whole weights that FSDP holds: two layers', and those outside layers
    gradients: int = 0  # those that stay no longer than a step: FP32 sums, other ranks' (ZeRO-2)
    arriving: int = 0  # with FP8-LM: what `workspace` grows by while a bucket's gradients arrive
    arriving_last: int = 0  # the same after the backward passes, when what they keep is free
    late: int = 0  # with FSDP: what is in flight, or of sums, but not at the worst moment
    graphs: int = 0  # the memory of CUDA graphs, beside that of steps that run without them

    @property
    def computing(self) -> int:
        """Return the activations, what computes, and what arrives, at their worst moment."""
        return max(self.in_flight + self.workspace + self.arriving, self.arriving_last)

    @property
    def peak(self) -> int:
        """Return what a step adds at its worst moment."""
        held = self.computing + self.weight_copies
        return max(0, held + self.gathered + self.gradients - self.late) + self.graphs

    @classmethod
    def of_passes(cls, order: Sequence[Work], stages: Mapping[int, StagePasses]) -> StepBytes:
        """Return what a rank holds while it runs the passes of its stages in order."""
        in_flight = most_held(order, {index: kept_by(index, stages) for index in stages})
        held, (more, gathered, sums) = worst_pass(order, stages)
        late = in_flight - held + sum(each.sums for each in stages.values()) - sums
        return cls(
            microbatch=max(each.kept for each in stages.values()),
            in_flight=in_flight,
            weight_copies=0,
            workspace=max(0, more),
            gathered=gathered,
            late=late - min(0, more),
        )

    @classmethod
    def without_fsdp(cls, order: Sequence[Work], stages: Mapping[int, StagePasses]) -> StepBytes:
        """Return what `of_passes` does, with what is in flight at the worst moment alone."""
        step = cls.of_passes(order, stages)
        return replace(step, in_flight=step.in_flight - step.late, late=0)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Hold the bytes of one rank, as a plan computes or a dry run counts them."""

    pipeline_rank: int
    num_layers: int
    num_params: int  # elements of the rank's parameters, before FSDP shards them
    held: HeldBytes
    step: StepBytes
    start: int = 0  # with FSDP, before the first step: its shards and whole weights beside them

    @property
    def in_step(self) -> int:
        """Return the bytes at the worst moment of a step."""
        return self.held.total + self.step.peak

    @property
    def total(self) -> int:
        """Return the bytes at the worst moment of a run."""
        return max(self.in_step, self.start)


def rank_memory(spec: RunSpec, pipeline_rank: int, replica: int | None = None) -> RankMemory:
    """Return the bytes of a rank on the pipeline stage(s) of `pipeline_rank`.

    Tensor-parallel ranks of a stage hold the same bytes. Context- and data-parallel ones are
    replicas, which own different tensors or ranges under ZeRO: without `replica` it is the one that
    owns most, but for padding. FSDP's is its largest shard. `spec.model.vocab_size` must be known.
    """
    shape = rank_shape(spec, pipeline_rank)
    kept = {stage: _kept_bytes(spec, stage) for stage in shape.stages}
    count = num_microbatches(spec)
    order = short_order(spec.parallel.pipeline, spec.parallel.pp, pipeline_rank, count)
    copies = _weight_copies(spec, shape.linears)
    if spec.parallel.fsdp is not None:
        stages = {index: _stage_bytes(spec, index, kept[index]) for index in shape.stages}
        passes = {index: passes_of_stage(spec, shape, stage) for index, stage in stages.items()}
        step = StepBytes.of_passes(order, passes)
        step = replace(step, weight_copies=copies)
    else:
        dense = groups_of(spec, shape.params)[0]
        division = dense.division
        replica = fullest(spec, dense) if replica is None else replica
        early, late = arriving_bytes(spec, division)
        step = with_arriving = StepBytes.without_fsdp(order, _passes(spec, kept, 0))
        if early:
            with_arriving = StepBytes.without_fsdp(order, _passes(spec, kept, early))
        step = replace(
            step,
            weight_copies=copies,
            gradients=passing_gradients(spec, division, replica, step.in_flight),
            arriving=with_arriving.computing - step.computing,
            arriving_last=late,
            # One pool has all of a microbatch, its casts of weights too. Steps without graphs and
            # validations allocate all of it beside the pool.
            graphs=spec.train.cuda_graph * (step.in_flight + copies + step.workspace),
        )
    return RankMemory(
        pipeline_rank=pipeline_rank,
        num_layers=len(shape.layers),
        num_params=sum(param.elements for param in shape.params),
        held=bytes_kept(spec, shape, replica),
        step=step,
        start=start_bytes(spec, shape),
    )


def all_ranks(spec: RunSpec) -> list[RankMemory]:
    """Return the memory of one rank of each pipeline rank, in order."""
    return [rank_memory(spec, rank) for rank in range(spec.parallel.pp)]


def _kept_bytes(spec: RunSpec, stage: int) -> int:
    """Return what a stage keeps of one microbatch between forward and backward."""
    model, tp, tokens = spec.model, spec.parallel.tp, microbatch_tokens(spec)
    layers = layers_of_stage(spec, stage)
    kept = 0
    if stage == 0:
        kept += 8 * tokens + (tokens if tp > 1 else 0)  # token numbers; which are another rank's
        if model.hidden_dropout:
            kept += tokens // sequence_shards(spec) * model.hidden_size
    if model.position_embedding_type == "rope":
        kept += 2 * FP32 * spec.data.seq_length // spec.parallel.cp * model.rotary_size
    window = _window(spec, layers)
    if window is not None:
        kept += BLOCK_QUERIES * (window + BLOCK_QUERIES)  # the mask of all bands
    has_plain = window is None or model.window_attn_skip_freq is not None
    has_plain = has_plain and model.position_embedding_type == "alibi"
    if has_plain and not spec.data.reset_attention_mask:
        heads = model.num_attention_heads // tp
        kept += heads * spec.data.seq_length**2 * compute_itemsize(spec)
    kept += sum(_recomputed_or_kept(spec, layers))
    if stage == num_stages(spec) - 1:
        if model.transformer_block_type != "post_ln":
            kept += norm_bytes(spec)
        kept += _head_gradient_bytes(spec)
    else:
        kept += layer_input_bytes(spec)  # the stage's output, until the next stage has it
    return kept


def _recomputed_or_kept(spec: RunSpec, layers: range) -> Iterator[int]:
    """Yield the bytes that layers keep of a microbatch: of a recomputed group its first alone."""
    recompute = spec.model.recompute
    is_uniform = recompute is not None and recompute.method == "uniform"
    group = recompute.num_layers if recompute is not None and is_uniform else 1
    kinds, known = kinds_of_layers(spec), dict[tuple[int, bool], int]()
    for place, layer in enumerate(layers):
        if recomputes(spec, "full", place):
            yield 0 if place % group else layer_input_bytes(spec)
            continue
        keeps_core = not recomputes(spec, "selective", place)
        kind = kinds[layer], keeps_core
        if kind not in known:
            known[kind] = layer_bytes(spec, layer, keeps_core=keeps_core)
        yield known[kind]


def _head_chunk(spec: RunSpec) -> int:
    """Return the tokens of one chunk of the head."""
    vocab = spec.model.vocab_size // spec.parallel.tp
    return min(microbatch_tokens(spec), head_chunk(vocab, on_gpu=True))


def _head_gradient_bytes(spec: RunSpec) -> int:
    """Return the gradients of the head's input and weight, which its forward pass computes."""
    tokens, vocab = microbatch_tokens(spec), spec.model.vocab_size // spec.parallel.tp
    size, hidden = compute_itemsize(spec), spec.model.hidden_size
    return tokens * hidden * size + vocab * hidden * FP32


def _passes(spec: RunSpec, kept: Mapping[int, int], arriving: int) -> dict[int, StagePasses]:
    """Return the passes of a rank's stages without FSDP, while `arriving` bytes arrive."""
    last, crossing = num_stages(spec) - 1, layer_input_bytes(spec)
    return {
        stage: StagePasses.alike(
            kept=kept[stage],
            received=crossing * (stage > 0),
            returned=crossing * (stage < last),
            more=_workspace_bytes(spec, stage, arriving),
        )
        for stage in kept
    }


def _workspace_bytes(spec: RunSpec, stage: int, arriving: int = 0) -> int:
    """Return what a stage needs beyond what it keeps, at the worst moment of one microbatch.

    The moments are: the last chunk of the head's forward pass, the head's backward pass, where its
    gradients are multiplied by the loss's, the backward pass of a layer, and a block of attention
    within documents. What the head and its norm have kept is free again while layers run.
    """
    layers = layers_of_stage(spec, stage)
    of_layers = max(_layer_workspace(spec, layers, arriving), _scores_workspace(spec, layers))
    if stage < num_stages(spec) - 1:
        return of_layers
    is_post = spec.model.transformer_block_type == "post_ln"
    freed = _head_gradient_bytes(spec) + (0 if is_post else norm_bytes(spec))
    return max(of_layers - freed, _head_workspace(spec))


def _head_workspace(spec: RunSpec) -> int:
    vocab, hidden = spec.model.vocab_size // spec.parallel.tp, spec.model.hidden_size
    part = vocab * hidden * FP32 if microbatch_tokens(spec) > _head_chunk(spec) else 0
    return max(_head_forward(spec) + part, _head_gradient_bytes(spec))


def _head_forward(spec: RunSpec) -> int:
    """Return the head's input, and of a chunk the logits and the gradient of the input.

    A GPU's kernel writes the gradient of the logits over them.
    """
    chunk, tokens, shards = _head_chunk(spec), microbatch_tokens(spec), sequence_shards(spec)
    vocab, hidden = spec.model.vocab_size // spec.parallel.tp, spec.model.hidden_size
    rows = tokens + (tokens // shards if shards > 1 else 0)  # of all ranks beside the own ones
    return (rows * hidden + chunk * (vocab + hidden)) * compute_itemsize(spec)


def _stage_bytes(spec: RunSpec, stage: int, kept: int) -> StageBytes:
    """Return what a stage needs without FSDP, beside what its layers do."""
    layers, has_head = layers_of_stage(spec, stage), stage == num_stages(spec) - 1
    return StageBytes(
        layers=layers,
        kept=kept,
        has_embedding=stage == 0,
        head=_head_forward(spec) if has_head else None,
        head_kept=_head_gradient_bytes(spec) if has_head else 0,
        scores=_scores_workspace(spec, layers),
    )


def _window(spec: RunSpec, layers: range) -> int | None:
    """Return the earlier tokens that a query of these layers sees, if that hides any from it."""
    windows = (spec.model.window_of(layer) for layer in layers)
    return next((w for w in windows if w is not None and w < spec.data.seq_length - 1), None)


def _scores_workspace(spec: RunSpec, layers: range) -> int:
    """Return the scores, their bias and their gradient, in FP32, of one block of attention.

    Without ALiBi, and on GPUs without dropout, no tensor of scores is made; in a window a CPU has a
    bias, and the gradients of keys and values are sums in FP32.
    """
    model, seq, window = spec.model, spec.data.seq_length, _window(spec, layers)
    has_scores = model.position_embedding_type == "alibi" or model.attention_dropout > 0
    if not has_scores and window is not None:
        bias = BLOCK_QUERIES * (window + BLOCK_QUERIES) * FP32
        return bias + microbatch_tokens(spec) * 2 * model.kv_size // spec.parallel.tp * FP32
    if not has_scores or not (spec.data.reset_attention_mask or window is not None):
        return 0
    heads = model.num_attention_heads // spec.parallel.tp
    return 3 * FP32 * heads * min(BLOCK_QUERIES, seq) * seq


def _layer_workspace(spec: RunSpec, layers: range, arriving: int = 0) -> int:
    """Return what the backward pass of one layer needs beyond what it keeps.

    It may need a recomputed layer whole. The method `block` recomputes the first layers of a stage.
    Their backward passes come last, when the bytes that the other layers kept are free again. A
    bucket of gradients, of which `arriving` bytes arrive, has a weight's at least: those of the
    last linear, whose products are the second moment.
    """
    if not layers:
        return 0
    work, scores = 0, _scores_workspace(spec, layers)
    for keeps_core, layer in _unlike_layers(spec, layers):
        moments = list(backward_instants(spec, layer, keeps_core=keeps_core, scores=scores, held=0))
        work = max(work, *moments[:2], arriving + max(moments[2:]))
    work = max(work + layer_input_bytes(spec), experts_forward_work(spec, layers[-1]))
    recompute = spec.model.recompute
    if recompute is not None and recompute.granularity == "full":
        group = recompute.num_layers if recompute.method == "uniform" else 1
        if recompute.method == "uniform" or len(layers) <= recompute.num_layers:
            kinds = [kinds_of_layers(spec)[layer] for layer in layers]
            whole = {kind: layer_bytes(spec, kind) for kind in set(kinds)}
            groups = (kinds[at : at + group] for at in range(0, len(layers), group))
            work += max(sum(whole[kind] for kind in kinds) for kinds in groups)
    return work


def _unlike_layers(spec: RunSpec, layers: range) -> Iterator[tuple[bool, int]]:
    """Yield one of all layers that hold the same bytes, with whether attention's stay."""
    kinds, unlike = kinds_of_layers(spec), dict[object, tuple[bool, int]]()
    for place, layer in enumerate(layers):
        keeps_core = not recomputes(spec, "selective", place)
        unlike[keeps_core, kinds[layer]] = keeps_core, layer
    yield from unlike.values()


def _weight_copies(spec: RunSpec, linears: Sequence[LinearShape]) -> int:
    """Return the bytes of FP8 copies of weights that last a whole step.

    Tensor cores read a weight along one dimension for the output and along the other for the input
    gradient, so there is a copy for each of the two products that is in FP8; Transformer Engine
    keeps both as well. Blackwell's scales of 32 and 16 elements lie beside them: 16.5 bits a weight
    in `mxfp8`, 9 in `nvfp4`. Weights that are kept in FP8 alone and torchao's are cast or
    transposed for each use, and those that FSDP gathers except by early versions of Transformer
    Engine.
    """
    if not copies_weights(spec):
        return 0
    return sum(linear.weight_copies(linear.fp8_products) for linear in linears)
