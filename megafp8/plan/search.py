"""Search the layouts of a job for those that fit into memory and are predicted to be fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megafp8.plan.hardware import Hardware
from megafp8.plan.phases import bytes_of_largest_rank, largest_phase, mean_step_seconds
from megafp8.plan.time import Achieved
from megafp8.specs import FsdpSpec, OptimSpec, PipelineSpec, RunSpec
from megafp8.specs.model import RecomputeSpec

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTE = "model.activations_checkpoint"
LAYOUT_KEYS = (
    "model.tensor_model_parallel_size",
    "model.sequence_parallel",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_schedule",
    "model.pipeline_model_parallel_layout",
    "model.micro_batch_size",
    "model.optim.name",
    "model.fsdp",
    "model.fsdp_sharding_strategy",
    f"{RECOMPUTE}_granularity",
    f"{RECOMPUTE}_method",
    f"{RECOMPUTE}_num_layers",
)
"""The settings that a layout decides."""
STAGE_KEYS = LAYOUT_KEYS[3:6]
"""Those that say which stages a pipeline rank has, and in which order it runs them."""
FULL = RecomputeSpec(granularity="full", method="uniform", num_layers=1)


@dataclass(frozen=True)
class Found:
    """Hold a layout that fits, its predicted step and the bytes of its largest rank."""

    asked: RunSpec  # the job for which layouts were searched
    spec: RunSpec
    step_seconds: float  # the mean of all steps, where the precision changes within the run
    num_bytes: int

    def settings(self) -> dict[str, object]:
        """Return the settings of the layout; keys of `LAYOUT_KEYS` that are not in it can stay.

        A schedule or a recomputation of the job as it was asked for is taken back with None.
        """
        parallel, recompute = self.spec.parallel, self.spec.model.recompute
        settings: dict[str, object] = {
            "model.tensor_model_parallel_size": parallel.tp,
            "model.sequence_parallel": parallel.sequence_parallel,
            "model.pipeline_model_parallel_size": parallel.pp,
            "model.micro_batch_size": self.spec.train.micro_batch_size,
            "model.optim.name": self.spec.optim.name,
            "model.fsdp": parallel.fsdp is not None,
        }
        if parallel.fsdp is not None or self.asked.parallel.fsdp is not None:
            settings["model.fsdp_sharding_strategy"] = "full"
        if parallel.pipeline != PipelineSpec() or self.asked.parallel.pipeline != PipelineSpec():
            settings |= dict.fromkeys(STAGE_KEYS)
        if parallel.pipeline.stages_per_rank > 1:
            settings[STAGE_KEYS[0]] = parallel.pipeline.stages_per_rank
        if recompute is not None:
            settings[f"{RECOMPUTE}_granularity"] = recompute.granularity
            settings[f"{RECOMPUTE}_method"] = recompute.method
            settings[f"{RECOMPUTE}_num_layers"] = recompute.num_layers
        elif self.asked.model.recompute is not None:
            settings |= dict.fromkeys(LAYOUT_KEYS[10:])
        return settings

    def overrides(self) -> list[str]:
        """Return `settings` as overrides of a command line."""
        found = self.settings().items()
        return [f"{key}={'null' if value is None else value}" for key, value in found]


def search(
    spec: RunSpec, hardware: Hardware, achieved: Achieved | None = None, *, usable: float = 0.9
) -> list[Found]:
    """Return the layouts of `spec`'s job that fit, the fastest first.

    Varied are tensor and sequence parallelism within a node, pipelines with one stage a rank under
    1F1B or several under interleaved 1F1B, the micro batch, recomputation of all layers, and FSDP
    in place of ZeRO-1. The number of ranks, the global batch and context parallelism
    stay. Zero-bubble schedules, stages of unequal sizes, selective recomputation and other
    strategies of FSDP are not tried. A layout fits if its largest rank needs at most the fraction
    `usable` of the memory, in the phase that needs most where the precision changes within the run;
    its speed is that of the whole run.
    """
    found, usable_bytes = [], usable * hardware.memory_bytes
    for layout in layouts(spec):
        num_bytes = bytes_of_largest_rank(largest_phase(layout), usable_bytes)
        if num_bytes <= usable_bytes:
            seconds = mean_step_seconds(layout, hardware, achieved)
            found.append(Found(spec, layout, seconds, num_bytes))
    return sorted(found, key=lambda layout: (layout.step_seconds, layout.num_bytes))


def layouts(spec: RunSpec) -> Iterator[RunSpec]:
    """Return the job of `spec` in every layout that divides its model, ranks and batch."""
    model, parallel, world = spec.model, spec.parallel, spec.parallel.world_size
    for tp in _divisors(min(parallel.devices_per_node, world)):
        if model.num_attention_heads % tp or model.num_kv_heads % tp or model.vocab_size % tp:
            continue
        if (model.ffn_hidden_size % tp) or (tp > 1 and spec.data.seq_length % tp):
            continue
        for pp in _divisors(model.num_layers):
            if world % (tp * pp * parallel.cp):
                continue
            dp = world // (tp * pp * parallel.cp)
            layout = replace(
                parallel,
                tp=tp,
                sequence_parallel=tp > 1,
                pp=pp,
                pipeline=PipelineSpec(),
                fsdp=None,
            )
            for micro in MICRO_BATCHES:
                num_microbatches, rest = divmod(spec.train.global_batch_size, micro * dp)
                if rest:
                    continue
                train = replace(spec.train, micro_batch_size=micro)
                shared = dp * parallel.cp > 1
                plain = _optimizer(spec, shards=False)
                zero = _optimizer(spec, shards=True) if shared else plain
                pipelines = list(_pipelines(model.num_layers, pp, num_microbatches))
                for recompute in (None, FULL):
                    made = replace(model, recompute=recompute)
                    for pipeline in pipelines:
                        chosen = replace(layout, pipeline=pipeline)
                        yield replace(spec, parallel=chosen, train=train, model=made, optim=zero)
                    fsdp = replace(parallel.fsdp or FsdpSpec(), strategy="full")
                    for pipeline in pipelines if shared and model.moe is None else ():
                        sharded = replace(layout, pipeline=pipeline, fsdp=fsdp)
                        yield replace(spec, parallel=sharded, train=train, model=made, optim=plain)


def _pipelines(num_layers: int, pp: int, num_microbatches: int) -> Iterator[PipelineSpec]:
    """Return 1F1B, and interleaved 1F1B with each number of stages that divides a rank's layers.

    The latter runs in equal rounds, each of at least as many microbatches as there are ranks.
    """
    yield PipelineSpec()
    rounds = num_microbatches // pp
    if pp == 1 or rounds == 0 or num_microbatches % rounds:
        return
    for stages in _divisors(num_layers // pp)[1:]:
        yield PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=stages)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _optimizer(spec: RunSpec, *, shards: bool) -> OptimSpec:
    """Return the optimizer that shards its states, or that shards nothing, if there is one.

    Replicas that own whole tensors may not send weights kept in FP8.
    """
    optim, fp8 = spec.optim, spec.precision.fp8
    if shards and optim.needs_whole and fp8 is not None and fp8.params_in_fp8:
        shards = False
    named = optim.named
    if named.shards_states == shards:
        return optim
    if optim.given is not None:
        return replace(optim, given=replace(named, shards_states=shards))
    return replace(optim, name=(named.sharded if shards else named.unsharded) or optim.name)
