"""Define the jobs that both trees run: a name, and overrides of `pretrain_gpt.py`.

A job is a few steps of a tiny model that cover one path through the code. A job consists of
overrides only, so that it runs in any tree, whatever the modules of that tree are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from scripts.compare_trees.tree import CannotCompareError

MIDDLE, LAST = 2, 4
"""Steps whose checkpoints are kept. The head continues the base's run from the first of them."""

TEXT = "../data/text"  # from a job's working directory
COMMON = {
    "trainer.accelerator": "cpu",
    "trainer.precision": "bf16",
    "trainer.max_steps": str(LAST),
    "trainer.log_every_n_steps": "1",
    "trainer.val_check_interval": "2",
    "trainer.limit_val_batches": "1",
    "exp_manager.name": "job",
    "exp_manager.create_tensorboard_logger": "False",
    "exp_manager.checkpoint_callback_params.every_n_train_steps": "2",
    "model.micro_batch_size": "2",
    "model.global_batch_size": "8",
    "model.encoder_seq_length": "32",
    "model.num_layers": "2",
    "model.hidden_size": "64",
    "model.ffn_hidden_size": "128",
    "model.num_attention_heads": "4",
    "model.hidden_dropout": "0.1",
    "model.attention_dropout": "0.1",
    "model.ffn_dropout": "0.1",
    "model.optim.sched.warmup_steps": "2",
    "model.data.data_prefix": TEXT,
}


@dataclass(frozen=True)
class Job:
    """Describe a few steps of training, and what follows them.

    `kind` "kill" kills the run in the middle and continues it. "launch" uses the real command line,
    which starts the ranks itself. "generate" and "export" use the model that the job has trained.
    """

    name: str
    overrides: tuple[str, ...] = ()
    num_ranks: int = 1
    kind: Literal["train", "kill", "launch", "generate", "export"] = "train"

    @property
    def is_handed_over(self) -> bool:
        """Whether the head also continues the base's run, as in one job for each kind of state."""
        return self.kind == "kill" or self.name in HANDED_OVER

    @property
    def folder(self) -> str:
        """Working directory of the job, within the folder of a tree."""
        return self.name.replace("/", "-")

    def argv(self, *more: str) -> list[str]:
        """Return the arguments of `pretrain_gpt.py`. Later overrides replace earlier ones."""
        values = dict(COMMON)
        if self.num_ranks > 1:
            values["trainer.devices"] = str(self.num_ranks)
        for override in (*self.overrides, *more):
            key, _, value = override.partition("=")
            values[key] = value
        return [f"{key}={value}" for key, value in values.items()]


RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
WHOLE_BLOCKS = (
    "model.hidden_size=128",
    "model.ffn_hidden_size=128",
    "model.encoder_seq_length=64",
)
WHOLE_BLOCKS_OF_2_RANKS = (
    "model.hidden_size=256",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=2",
    "model.encoder_seq_length=64",
)
LONG = "model.encoder_seq_length=128"  # so that each rank's part has whole blocks
LLAMA = (
    "model.normalization=rmsnorm",
    "model.activation=swiglu",
    "model.bias=False",
    "model.position_embedding_type=rope",
    "model.share_embeddings_and_output_weights=False",
    "model.num_query_groups=2",
)
FP8_PARAMS = "model.fp8_params=True"
TE = ("model.fp8_backend=te", "model.ffn_dropout=0")
UNDROPPED = tuple(f"model.{name}_dropout=0" for name in ("hidden", "attention", "ffn"))
RECOMPUTE = {
    "selective": ("model.activations_checkpoint_granularity=selective",),
    "full": (
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=uniform",
        "model.activations_checkpoint_num_layers=1",
    ),
    "block": (
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=block",
        "model.activations_checkpoint_num_layers=1",
    ),
}


def fp8(recipe: str, *more: str, num_ranks: int = 1) -> tuple[str, ...]:
    """Return the overrides of a recipe, with sizes that it can take on `num_ranks` ranks."""
    words = ["model.fp8=True", f"model.fp8_recipe={recipe}"]
    if recipe == "delayed":
        words.append("model.fp8_amax_history_len=3")
    if recipe == "blockwise":
        words += WHOLE_BLOCKS if num_ranks == 1 else WHOLE_BLOCKS_OF_2_RANKS
    return (*words, *more)


def _alone() -> list[Job]:
    precisions = {
        "fp32": ("trainer.precision=32",),
        "bf16": (),
        "fp16": ("trainer.precision=16", "model.native_amp_init_scale=65536"),
    }
    jobs = [Job(name, words) for name, words in precisions.items()]
    jobs += [Job(f"bf16/{recipe}", fp8(recipe)) for recipe in RECIPES]
    jobs += [
        Job(f"{precision}/{recipe}", (*precisions[precision], *fp8(recipe)))
        for precision in ("fp32", "fp16")
        for recipe in ("delayed", "rowwise_with_gw_hp", "blockwise")
    ]
    jobs += [Job(f"params/{r}", fp8(r, FP8_PARAMS)) for r in ("delayed", "tensorwise", "blockwise")]
    jobs += [
        Job(f"torchao/{recipe}", fp8(recipe, "model.fp8_backend=torchao"))
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ]
    te = (*TE, *fp8("delayed"))
    jobs += [Job("te/bf16", TE), Job("te/delayed", te), Job("te/params", (*te, FP8_PARAMS))]
    jobs.append(Job("te/stored", (*TE, *fp8("tensorwise", "model.optim.fp8_opt_level=O2"))))
    jobs += [
        Job(f"recompute/{how}", fp8(recipe, *RECOMPUTE[how]))
        for how, recipe in (("full", "delayed"), ("selective", "delayed"), ("block", "rowwise"))
    ]
    return jobs


def _settings() -> list[Job]:
    callback = "exp_manager.checkpoint_callback_params"
    delayed = {
        "llama": LLAMA,
        "alibi": ("model.position_embedding_type=alibi", "model.transformer_block_type=post_ln"),
        "documents": (
            "model.data.reset_position_ids=True",
            "model.data.reset_attention_mask=True",
        ),
        "without_o2": ("model.megatron_amp_O2=False",),
        "most_recent": (
            "model.fp8_amax_compute_algo=most_recent",
            "model.fp8_amax_history_len=1024",
            "model.fp8_margin=1",
        ),
        "interval": ("model.fp8_interval=2", "model.fp8_e4m3=True"),
        "wgrad": ("model.fp8_wgrad=False",),
        "products": ("model.override_linear_precision=[True,False,False]",),
        "modules": ('model.fp8_modules=["*.mlp.fc2:high_precision"]',),
        "first_last": ("model.first_last_layers_bf16=True", "model.num_layers=3"),
        "health": ("model.fp8_health=full",),
        "zero_alone": ("model.optim.name=distributed_fused_adam",),
        "saving": (f"{callback}.async_save=True", f"{callback}.save_top_k=1"),
        "rampup": ("model.rampup_batch_size=[2,2,8]",),
        "overfit": ("trainer.overfit_batches=2", "trainer.gradient_clip_algorithm=value"),
    }
    return [Job(f"settings/{name}", fp8("delayed", *words)) for name, words in delayed.items()]


def _ranks() -> list[Job]:
    tensor = "model.tensor_model_parallel_size=2"
    sequence = "model.sequence_parallel=True"
    context = "model.context_parallel_size=2"
    zero = "model.optim.name=distributed_fused_adam"
    fsdp = "model.fsdp=True"
    torchao, gathered = "model.fp8_backend=torchao", "model.enable_fsdp_float8_all_gather=True"
    layouts = {
        "tensor": (tensor,),
        "context": (context, *UNDROPPED, LONG),
        "pipeline": _pipeline("ZBVZeroBubble"),
        "data": (),
        "zero": (zero,),
        "fsdp": (fsdp,),
    }
    jobs = [
        Job(f"{layout}/{recipe}", (*fp8(recipe, num_ranks=2), *words), 2)
        for layout, words in layouts.items()
        for recipe in RECIPES
    ]
    jobs += [
        Job("tensor/fp32", (tensor, "trainer.precision=32"), 2),
        Job("tensor/llama", (tensor, *fp8("delayed", *LLAMA)), 2),
        Job("tensor/params", (tensor, *fp8("delayed", FP8_PARAMS)), 2),
        Job("tensor/recompute", (tensor, *fp8("delayed", *RECOMPUTE["full"])), 2),
        Job("tensor/zero", (tensor, zero, *fp8("delayed")), 2),
        Job("sequence/bf16", (tensor, sequence), 2),
        Job("sequence/delayed", (tensor, sequence, *fp8("delayed")), 2),
        Job("sequence/tensorwise", (tensor, sequence, *fp8("tensorwise")), 2),
        Job("context/bf16", (context, *UNDROPPED), 2),
    ]
    jobs += [
        Job(f"pipeline/{name}", (*_pipeline(name), *fp8("delayed")), 2)
        for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    ]
    jobs += [
        Job("data/fp32", ("trainer.precision=32",), 2),
        Job("data/fp16", ("trainer.precision=16", "model.native_amp_init_scale=65536"), 2),
        Job("zero/params", (zero, *fp8("delayed", FP8_PARAMS)), 2),
        Job("te/zero", (zero, *TE, *fp8("delayed", FP8_PARAMS)), 2),
        Job("fsdp/bf16", (fsdp,), 2),
        Job("fsdp/grad", (fsdp, "model.fsdp_sharding_strategy=grad", *fp8("delayed")), 2),
        Job("fsdp/params", (fsdp, *fp8("delayed", FP8_PARAMS)), 2),
        Job("fsdp/torchao", (fsdp, *fp8("tensorwise", torchao, gathered)), 2),
        Job("mixed/tensor_data_zero", (tensor, sequence, zero, *fp8("delayed")), 4),
        Job("mixed/tensor_pipeline", (tensor, *_pipeline("1F1B"), *fp8("delayed")), 4),
    ]
    return jobs


def _levels() -> list[Job]:
    """Return jobs of FP8-LM's levels, with each division of their states."""
    optim = "model.optim"
    zero = f"{optim}.name=distributed_fused_adam"
    stage_2 = f"{optim}.data_parallel_sharding_strategy=optim_grads"
    jobs = {
        "O1": fp8("delayed", f"{optim}.fp8_opt_level=O1"),
        "O2": fp8("tensorwise", f"{optim}.fp8_opt_level=O2", f"{optim}.fp8_grad_reduction=auto"),
        "O3": fp8("delayed", f"{optim}.fp8_opt_level=O3"),
        "tensors": fp8("delayed", f"{optim}.fp8_opt_level=O2", zero),
        "stage_2": fp8("delayed", f"{optim}.fp8_opt_level=O3", zero, stage_2),
        "elements": fp8(
            "delayed",
            *(f"{optim}.fp8_opt_level=O2", zero, f"{optim}.shard_by=elements"),
            f"{optim}.stochastic_rounding=True",
        ),
    }
    return [Job(f"levels/{name}", words, 2) for name, words in jobs.items()]


def _muon() -> list[Job]:
    """Return jobs of Muon, alone and in each way to share matrices."""
    name = "model.optim.name"
    tensor = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=True")
    jobs = {
        "zero": (f"{name}=dist_muon",),
        "fsdp": (f"{name}=muon", "model.fsdp=True"),
        "tensor": (f"{name}=muon", *tensor),
        "blocks": (f"{name}=muon", *tensor, "model.optim.muon_tp_mode=blockwise"),
        "pipeline": (f"{name}=muon", *_pipeline("1F1B")),
    }
    alone = Job("muon/alone", fp8("delayed", f"{name}=muon"))
    return [alone, *(Job(f"muon/{way}", fp8("delayed", *words), 2) for way, words in jobs.items())]


def _pipeline(schedule: str) -> tuple[str, ...]:
    words = [
        "model.pipeline_model_parallel_size=2",
        f"model.pipeline_schedule={schedule}",
        "model.num_layers=4",
    ]
    if schedule not in ("GPipe", "1F1B"):
        words.append("model.virtual_pipeline_model_parallel_size=2")
    return tuple(words)


def _ways() -> list[Job]:
    tensor = "model.tensor_model_parallel_size=2"
    return [
        Job("resume/delayed", fp8("delayed"), kind="kill"),
        Job("resume/fp16", ("trainer.precision=16",), kind="kill"),
        Job("resume/tensor", (tensor, *fp8("delayed")), 2, kind="kill"),
        Job(
            "resume/schedule",
            fp8("delayed", f"model.precision_schedule=[{{from: {MIDDLE}, recipe: mxfp8}}]"),
            kind="kill",
        ),
        Job("launch/tensor", (tensor, *fp8("delayed")), 2, kind="launch"),
        Job("generate/delayed", fp8("delayed"), kind="generate"),
        Job("generate/llama", LLAMA, kind="generate"),
        Job("export/llama", LLAMA, kind="export"),
    ]


HANDED_OVER = {
    "fp32",
    "fp16",
    "bf16/delayed",
    "bf16/blockwise",
    "params/delayed",
    "params/tensorwise",
    "params/blockwise",
    "torchao/rowwise",
    "te/params",
    "settings/llama",
    "settings/without_o2",
    "settings/rampup",
    "sequence/tensorwise",
    "pipeline/delayed",
    "context/delayed",
    "data/rowwise",
    "zero/delayed",
    "zero/params",
    "fsdp/grad",
    "fsdp/params",
    "muon/zero",
}
JOBS = [*_alone(), *_settings(), *_ranks(), *_levels(), *_muon(), *_ways()]


def chosen(patterns: list[str]) -> list[Job]:
    """Return the jobs whose name matches one of the shell patterns; without patterns all jobs.

    Raises:
        CannotCompareError: A pattern matches no job.
    """
    for pattern in patterns:
        if not any(fnmatchcase(job.name, pattern) for job in JOBS):
            raise CannotCompareError(f"no job is called {pattern!r}; --list shows all names")
    return [j for j in JOBS if not patterns or any(fnmatchcase(j.name, p) for p in patterns)]
