"""Describe a whole run: its steps, its checkpoints, and what it records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from megafp8.specs.data import DataSpec
from megafp8.specs.model import GPTSpec, padded_vocab_size
from megafp8.specs.optim import OptimSpec
from megafp8.specs.parallel import ParallelSpec
from megafp8.specs.precision import Fp8Recipe, PrecisionSpec
from megafp8.specs.recipes import traits_of

HealthMode = Literal["off", "scales", "full", "auto"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Say when checkpoints are written and how many are kept.

    Both intervals may be set. The last step of a run is saved if `save_last` is set.
    """

    every_n_train_steps: int | None
    train_time_interval_seconds: float | None
    save_last: bool
    keep: int  # newest checkpoints kept; older ones go after a newer one is verified
    save_top_k: int = 0  # the best checkpoints are kept too: how many; -1 keeps all
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    async_save: bool = False  # whether periodic checkpoints are written while training continues


FULL_EVERY = 100
"""With `auto` FP8 health is full once in so many steps: docs/guide/fp8_health.md has the cost."""


@dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """Say what is measured of FP8 tensors at logged steps, and from which limits on a run warns.

    `scales` measures amaxes and scales, `full` also what each tensor loses in FP8, and `auto` does
    this once in `FULL_EVERY` steps. A warning names the tensor that is beyond a limit.
    """

    mode: HealthMode = "scales"
    max_underflow: float = 0.5  # fraction of non-zero values that became zero
    max_overflow: float = 0.01  # fraction of values that saturated
    min_snr_db: float = 5.0  # signal to noise in a product, in decibel
    accuracy_check: Literal["off", "warn"] = "off"  # whether a run says where FP8 costs accuracy

    def mode_at(self, step: int, last: int, logged_every: int) -> Literal["off", "scales", "full"]:
        """Return what is measured at logged step `step` of `last`.

        With `auto` it is `full` at the first logged step of each `FULL_EVERY` steps and at the last
        step, never twice within so many steps, nor before.
        """
        if self.mode != "auto":
            return self.mode
        is_first = step <= last - FULL_EVERY and step % FULL_EVERY < logged_every
        return "full" if step >= FULL_EVERY and (is_first or step == last) else "scales"

    def reads_tables(self, recipe: Fp8Recipe) -> bool:
        """Whether the tables of delayed scaling have all that is measured, so that no cast is."""
        own, rules = traits_of(recipe.name), (traits_of(r.precision) for r in recipe.modules)
        in_tables = all(traits is None or traits.has_history for traits in rules)
        return self.mode in ("scales", "auto") and own is not None and own.has_history and in_tables


@dataclass(frozen=True, kw_only=True)
class TensorHealth:
    """Hold the measures of one tensor in one step, over its microbatches; None was not measured."""

    amax: float
    quant_scale: float  # the smallest, where there are several
    underflow: float | None = None  # fraction of the non-zero values whose FP8 value is zero
    overflow: float | None = None  # fraction of the values beyond the largest FP8 number
    snr_db: float | None = None  # signal to noise in the worse of its products, in decibel


@dataclass(frozen=True)
class TensorNoise:
    """Hold the squares of a tensor's values and of its cast's errors, each summed, and its rows."""

    values: float
    errors: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class ObserveSpec:
    """Say where a run writes its records."""

    exp_dir: str
    name: str | None
    explicit_log_dir: str | None
    resume_if_exists: bool
    create_tensorboard_logger: bool
    create_wandb_logger: bool
    wandb_project: str | None
    wandb_name: str | None
    wandb_entity: str | None = None
    wandb_group: str | None = None
    wandb_tags: tuple[str, ...] = ()
    wandb_job_type: str | None = None
    wandb_notes: str | None = None
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    wandb_must_start: bool = False
    progress_bar: bool = True
    health: HealthSpec = HealthSpec()


@dataclass(frozen=True, kw_only=True)
class RampupSpec:
    """Describe global batches that grow over the first `samples` samples of a run.

    They grow from `start` by equal increments (Megatron's `--rampup-batch-size`).
    """

    start: int
    increment: int
    samples: int

    def batch_size_at(self, consumed_samples: int, global_batch_size: int) -> int:
        """Return the global batch size, in samples, of the step after `consumed_samples`.

        The arithmetic is Megatron's own floating point, so that every step has the size it has
        there.
        """
        if consumed_samples > self.samples:
            return global_batch_size
        num_increments = (global_batch_size - self.start) // self.increment
        done = int(consumed_samples / (self.samples / num_increments))
        return min(global_batch_size, self.start + done * self.increment)


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Hold the sizes and intervals of training.

    Counts are optimizer steps unless their comment names another unit.
    """

    max_steps: int
    max_time_seconds: float | None = None  # time limit of one process, from its start
    micro_batch_size: int  # samples per forward pass and data-parallel rank
    global_batch_size: int  # samples per optimizer step over all ranks
    log_every_n_steps: int  # the first and the last step are logged besides
    val_check_interval: int
    limit_val_batches: int  # global batches per validation; 0: none
    val_share: float | None = None  # this share of the data's global batches instead
    last_validation_is_whole: bool = False  # the one at the end of a run takes the whole split
    seed: int
    nonfinite_policy: Literal["stop", "skip", "rollback"]
    overfit_batches: int = 0  # train on this many global batches again and again; 0: on all data
    num_sanity_val_steps: int = 0  # global batches validated before the first step
    fast_dev_run: bool = False  # whether the run is a trial, without whole validations
    deterministic: bool = False
    max_restarts: int = 0  # how often our own launcher restarts a run after a rank died
    gc_interval: int = 0  # steps between two garbage collections; 0 leaves them to Python

    rampup: RampupSpec | None = None
    compile: Literal["off", "block"] = (
        "off"  # by torch.compile; `block` compiles a transformer layer
    )

    cuda_graph: bool = False  # capture a microbatch's passes as CUDA graphs

    def logs_at(self, step: int) -> bool:
        """Whether step `step`, counted from 1, has a line of metrics.

        The first step, the last, and each `log_every_n_steps`-th have one.
        """
        return step % self.log_every_n_steps == 0 or step in (1, self.max_steps)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples, over all ranks, of the step that begins after `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size
        return self.rampup.batch_size_at(consumed_samples, self.global_batch_size)

    def num_microbatches(self, dp: int, consumed_samples: int | None = None) -> int:
        """Return how many microbatches each data-parallel rank runs in a step.

        Without `consumed_samples` it is the number after a ramp-up.
        """
        samples = self.global_batch_size
        if consumed_samples is not None:
            samples = self.batch_size_at(consumed_samples)
        return samples // (self.micro_batch_size * dp)


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Say which steps are profiled, counted from 0, and on which ranks."""

    enabled: bool = False
    start_step: int = 10
    end_step: int = 10  # the last profiled step
    ranks: tuple[int, ...] = (0,)
    gen_shape: bool = False
    memory_snapshot_on_oom: bool = False


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Hold the resolved configuration of a run.

    `model.vocab_size` is 0 until the data is prepared, since the tokenizer decides it;
    `train.build` replaces it. `resolved` is the whole configuration under NeMo's names, as plain
    dicts and lists.
    """

    model: GPTSpec
    precision: PrecisionSpec
    parallel: ParallelSpec
    optim: OptimSpec
    data: DataSpec
    train: TrainSpec
    checkpoint: CheckpointSpec
    observe: ObserveSpec
    vocab_divisible_by: int
    vocab_rows: int | None = None  # rows of the embedding; None: what `vocab_divisible_by` gives
    profile: ProfileSpec = ProfileSpec()
    resolved: dict[str, object] = field(repr=False)
    restore_from_path: str | None = None  # the checkpoint whose weights a new run loads
    resume_from_checkpoint: str | None = None  # the checkpoint whose whole state a new run loads

    def with_vocabulary(self, vocab_size: int) -> RunSpec:
        """Return the run with the rows of the embedding for a tokenizer of `vocab_size` tokens."""
        rows = self.vocab_rows or padded_vocab_size(vocab_size, self.vocab_divisible_by)
        return replace(self, model=replace(self.model, vocab_size=rows))

    @property
    def health_stops_graphs(self) -> bool:
        """Whether logged steps run without CUDA graphs, because their casts are measured."""
        recipe, health = self.precision.fp8, self.observe.health
        if not self.train.cuda_graph or recipe is None or health.mode == "off":
            return False
        return not health.reads_tables(recipe)
