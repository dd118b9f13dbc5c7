"""Name the groups in which the help and docs/reference/configuration.md show the settings."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["model", "data", "optim", "length", "logging", "layout", "policy"]
"""Whether a setting may change when a run continues follows from its kind (`keys.FREE_KINDS`)."""


class Group(NamedTuple):
    """Describe settings that belong together; a setting names its group at its field.

    Attributes:
        title: The group's heading.
        about: One or two sentences about the group.
        example: Settings of the group, as they are given on the command line.
        kind: The kind of those settings of the group that name no other one.
        script: The command of the example.
    """

    title: str
    about: str
    example: str
    kind: Kind
    script: str = "pretrain_gpt.py"


GROUPS = {
    "length": Group(
        "Length and validation",
        "How long a run is, and when it validates. See [training.md](../guide/training.md).",
        "trainer.max_steps=2000 trainer.val_check_interval=200 trainer.max_time=00:04:00:00",
        "logging",
    ),
    "logs": Group(
        "Run directory and logs",
        "Where a run writes, and what it records ([files of a run](runs.md#what-a-run-leaves)).",
        "exp_manager.name=first trainer.log_every_n_steps=50",
        "logging",
    ),
    "checkpoints": Group(
        "Checkpoints",
        "When checkpoints are written, and which of them are kept.",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=500 "
        "exp_manager.checkpoint_callback_params.keep=2",
        "logging",
    ),
    "start": Group(
        "Starting from other weights",
        "A new run can start from the weights of another run, or from its whole state.",
        "restore_from_path=runs/first exp_manager.name=second",
        "policy",
    ),
    "failures": Group(
        "Failures and reproducibility",
        "What a run does when something goes wrong, and what makes it repeatable.",
        "trainer.nonfinite_policy=skip trainer.max_restarts=3 trainer.step_timeout=600",
        "policy",
    ),
    "batches": Group(
        "Batches",
        "How many samples a step and a forward pass have.",
        "model.global_batch_size=64 model.micro_batch_size=8",
        "optim",
    ),
    "ranks": Group(
        "Ranks and parallelism",
        "How many ranks there are, and what they divide among themselves. "
        "See [parallelism.md](../guide/parallelism.md).",
        "trainer.devices=4 model.tensor_model_parallel_size=2 model.sequence_parallel=True",
        "layout",
    ),
    "fsdp": Group(
        "FSDP",
        "Sharding of parameters, gradients and optimizer states over replicas "
        "([layouts.md](layouts.md#sharded-parameters-fsdp)). ZeRO-1 is "
        "`model.optim.name=distributed_fused_adam`.",
        "trainer.devices=2 model.fsdp=True model.fsdp_sharding_strategy=grad",
        "layout",
    ),
    "model": Group(
        "The model",
        "Sizes and functions of the GPT. See [models.md](models.md).",
        "model.num_layers=8 model.hidden_size=512 model.ffn_hidden_size=2048 "
        "model.num_attention_heads=8",
        "model",
    ),
    "experts": Group(
        "Mixture of experts",
        "MLPs of which a router chooses a few for each token, by the names of Megatron-core.",
        "model=moe_tiny model.num_moe_experts=16 model.moe_router_topk=4 "
        "model.moe_aux_loss_coeff=0.01",
        "model",
    ),
    "memory": Group(
        "Memory and speed",
        "Recomputation of activations, compilation, CUDA graphs and garbage collection.",
        "model.activations_checkpoint_granularity=selective model.compile=block",
        "layout",
    ),
    "precision": Group(
        "Precision without FP8",
        "The dtype of products and weights that are not in FP8, and FP16's loss scale.",
        "trainer.precision=16 model.native_amp_init_scale=65536",
        "model",
    ),
    "fp8": Group(
        "FP8",
        "Which products and weights are in FP8, and in which formats. See "
        "[fp8.md](../guide/fp8.md).",
        "model.fp8=True model.fp8_recipe=tensorwise model.first_last_layers_bf16=True",
        "model",
    ),
    "delayed_scaling": Group(
        "Delayed scaling",
        "How `model.fp8_recipe=delayed` computes scales from earlier amaxes "
        "([the rule](numerics.md#amax-history-scale)).",
        "model.fp8=True model.fp8_margin=1 model.fp8_amax_history_len=256",
        "model",
    ),
    "health": Group(
        "FP8 health",
        "What is recorded about FP8 tensors, and when a warning follows "
        "([health](numerics.md#health)).",
        "model.fp8=True model.fp8_health=full model.fp8_health_max_underflow=0.3",
        "logging",
    ),
    "backends": Group(
        "Backends",
        "The library that runs the layers. See [backends.md](backends.md).",
        "model.fp8=True model.fp8_recipe=tensorwise model.fp8_backend=torchao",
        "layout",
    ),
    "data": Group(
        "Data and tokenizer",
        "What is trained on. See [data.md](../guide/data.md).",
        "'model.data.data_prefix=[0.8,my/corpus,0.2,my/other]' model.data.num_workers=4",
        "data",
    ),
    "finetuning": Group(
        "Fine-tuning",
        "Questions and answers that `finetune_gpt.py` trains on. See "
        "[finetuning.md](../guide/finetuning.md).",
        "restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl "
        "'model.data.train_ds.prompt_template=\"Q: {input} A: {output}\"'",
        "data",
        "finetune_gpt.py",
    ),
    "optimizer": Group(
        "Optimizer",
        "The optimizer and the clipping of gradients.",
        "model.optim.name=distributed_fused_adam model.optim.lr=6e-4 trainer.devices=2",
        "optim",
    ),
    "fp8_lm": Group(
        "States in low precision (FP8-LM)",
        "Gradients, master weights and moments in FP8 and FP16. See [fp8_lm.md](fp8_lm.md).",
        "model.fp8=True model.optim.fp8_opt_level=O2 model.optim.stochastic_rounding=True",
        "layout",
    ),
    "schedule": Group(
        "Learning rate",
        "The schedule of the learning rate over the run, as in NeMo.",
        "model.optim.sched.name=WarmupAnnealing model.optim.sched.warmup_steps=100",
        "optim",
    ),
    "profiles": Group(
        "Profiles",
        "A profile of some steps "
        "([trials and profiles](../guide/training.md#trials-and-profiles)).",
        "model.nsys_profile.enabled=True model.nsys_profile.end_step=12",
        "logging",
    ),
}
"""The groups by the names that fields of the schema give, in the order of the pages."""
