"""Test that Megatron's scripts and Bridge's files become ours, and that no setting is lost."""

from __future__ import annotations

import copy
import math
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.errors import SettingError
from megafp8.config.megatron_flags import NONE, Refused, megatron_flags
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import all_keys
from megafp8.optim.schedules import learning_rate
from megafp8.secrets import is_secret_name
from megafp8.specs import MoESpec, RunSpec
from megafp8_migrate import main, migrate
from megafp8_migrate.audit import request
from megafp8_migrate.next_steps import next_steps
from megafp8_migrate.report import Migration
from tests.config.helpers import run_spec
from tests.config.test_megatron_names import TABLE as PRECISION_NAMES

pytest.importorskip("tree_sitter_bash", reason="needs tree-sitter-bash, which reads scripts")

SCRIPT = """\
#!/bin/bash
GPUS=2
MODEL=(
    --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
)
torchrun --nproc_per_node $GPUS --nnodes 1 pretrain_gpt.py ${MODEL[@]} \\
    --micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --bf16 \\
    --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --eval-interval 50 """

PARSER_DEFAULTS = {
    "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1, "model.layernorm_epsilon": 1e-5,
    "model.bias": True, "model.init_method_std": 0.02, "model.make_vocab_size_divisible_by": 128,
    "model.share_embeddings_and_output_weights": True, "model.normalization": "layernorm",
    "model.position_embedding_type": "learned_absolute", "model.seed": 1234,
    "model.optim.eps": 1e-8, "model.optim.weight_decay": 0.01, "model.optim.betas": [0.9, 0.999],
    "model.optim.sched.min_lr": 0.0, "trainer.gradient_clip_val": 1.0,
    "trainer.log_every_n_steps": 100, "trainer.limit_val_batches": 100,
    "model.ffn_hidden_size": 256, "model.data.num_workers": 2,
}  # fmt: skip
"""What `add_megatron_arguments` of Megatron-core 0.20 gives what a script leaves out."""
FP8_DEFAULTS = {
    "model.fp8_recipe": "delayed", "model.fp8_margin": 0,
    "model.fp8_amax_compute_algo": "most_recent", "model.fp8_wgrad": True,
}  # fmt: skip


def script(more: str = "", *arguments: str, **environment: str) -> Migration:
    return migrate(SCRIPT + more + "\n", "train.sh", arguments, environment)


def spec_of(m: Migration, tmp_path: Path) -> RunSpec:
    assert not m.undecided, m.undecided
    (tmp_path / "new.yaml").write_text(m.text("train.sh"))
    return run_spec(config_dir=tmp_path, config_name="new")


@pytest.mark.parametrize(
    ("split", "want", "validates"),
    [("100,0,0", (100, 0, 0), False), ("100", (100, 0, 0), False), ("99,1", (99, 1, 0), True),
     ("949,50,1", (949, 50, 1), True)],
)  # fmt: skip
@pytest.mark.parametrize("more", ["", " --eval-iters 5"])
def test_sizes_of_splits(
    split: str, want: tuple[float, ...], validates: bool, more: str, tmp_path: Path
) -> None:
    """Without documents to validate on, Megatron validates nothing, whatever `--eval-iters` is."""
    own = "--data-path a --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2"
    text = SCRIPT.replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 511", own)
    spec = spec_of(migrate(f"{text} --split {split}{more}\n", "train.sh", (), {}), tmp_path)
    assert spec.data.splits == want
    assert spec.train.limit_val_batches == ((5 if more else 100) if validates else 0)


def value(m: Migration, path: str) -> Any:
    tree: Any = m.out
    for part in path.split("."):
        tree = tree.get(part, {})
    return tree


def decided(m: Migration) -> list[str]:
    return [line.partition(":")[0] for line in m.undecided]


def test_a_script_becomes_a_run(tmp_path: Path) -> None:
    spec = spec_of(script("--swiglu --normalization RMSNorm --disable-bias-linear"), tmp_path)
    model = spec.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 64, 4)
    assert (model.normalization, model.bias, model.ffn_hidden_size) == ("rmsnorm", False, 128)
    assert spec.precision.compute == "bf16" and spec.precision.fp8 is None
    assert (spec.train.max_steps, spec.train.global_batch_size) == (100, 8)
    assert spec.optim.lr == 1e-3
    assert value(script(), "trainer.devices") == 2


@pytest.mark.parametrize(
    ("more", "defaults"),
    [
        ("", PARSER_DEFAULTS),
        ("--fp8-format hybrid", FP8_DEFAULTS),
        ("--fp8-format hybrid --fp8-amax-compute-algo max", {"model.fp8_amax_history_len": 1}),
    ],
)
def test_what_is_left_out_has_the_parsers_default(more: str, defaults: dict[str, Any]) -> None:
    m = script(more)
    for path, default in defaults.items():
        assert value(m, path) == default, path
        assert m.assumed[path].endswith("(a default of Megatron-core 0.20)"), path
    assert "assumed: " in m.report()


def test_no_setting_is_lost_silently() -> None:
    m = script("--no-position-embedding --position-embedding-type rope --quick-geglu")
    assert any(line.startswith("--no-position-embedding: ") for line in m.inert)
    bridge = migrate(yaml.safe_dump(RUN_CONFIG), "run_config.yaml")
    lines = "\n".join([*bridge.translated, *bridge.inert, *bridge.undecided])
    for section, fields in RUN_CONFIG.items():
        for name in fields if isinstance(fields, dict) else ():
            assert name == "_target_" or f"{section}.{name}" in lines, (section, name)


def test_a_script_without_fp8_says_nothing_of_it() -> None:
    m = script("--fp8-margin 1")
    assert not any("fp8" in path for path in m.assumed)
    assert any(line.startswith("--fp8-margin: 1: FP8 is off") for line in m.inert)


@pytest.mark.parametrize(
    ("more", "path", "ours"),
    [
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "model.fp8_e4m3", True),
        ("--fp8-format hybrid --fp8-param-gather", "model.fp8_params", True),
        ("--fp4-format e2m1", "model.fp8_recipe", "nvfp4"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "model.fp8_recipe", "mxfp8"),
        ("--use-distributed-optimizer", "model.optim.name", "distributed_fused_adam"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
         "model.fsdp_sharding_strategy", "grad"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "model.sequence_parallel", True),
        ("--grad-reduce-in-bf16", "model.optim.grad_sync_dtype", "bf16"),
        ("--group-query-attention --num-query-groups 2", "model.num_query_groups", 2),
        ("--no-bias-gelu-fusion", "model.openai_gelu", False),
        ("", "model.openai_gelu", True),
        ("--squared-relu", "model.activation", "squared-relu"),
        ("--untie-embeddings-and-output-weights", "model.share_embeddings_and_output_weights",
         False),
        ("--position-embedding-type rope --rotary-base 500000", "model.rotary_base", 500000),
        ("--dataloader-inter-document-masking", "model.data.reset_position_ids", True),
        ("--qk-layernorm", "model.qk_layernorm", True),
        ("--add-qkv-bias --disable-bias-linear", "model.add_qkv_bias", True),
        ("--position-embedding-type rope --use-rope-scaling", "model.rope_scaling_factor", 8.0),
        ("--window-size 128,0", "model.window_size", [128, 0]),
        ("--window-size '(128,0)' --window-attn-skip-freq '([1]+[0])*1'",
         "model.window_attn_skip_freq", [1, 0]),
        ("--window-size 128,0 --window-attn-skip-freq 2", "model.window_attn_skip_freq", 2),
        ("--recompute-activations", "model.activations_checkpoint_granularity", "selective"),
        ("--exit-duration-in-mins 1501", "trainer.max_time", "01:01:01:00"),
        ("--adam-beta2 0.95", "model.optim.betas", [0.9, 0.95]),
        ("--save /tmp/ck --load /tmp/ck", "exp_manager.explicit_log_dir", "/tmp/ck"),
        ("--norm-epsilon=1e-6", "model.layernorm_epsilon", 1e-6),
        ("--hidden-dropout 0.0 --hidden-dropout 0.2", "model.hidden_dropout", 0.2),
        ("--wandb-project p --wandb-entity team",
         "exp_manager.wandb_logger_kwargs.entity", "team"),
    ],
)  # fmt: skip
def test_flags(more: str, path: str, ours: Any, tmp_path: Path) -> None:
    m = script(more)
    assert value(m, path) == ours
    spec_of(m, tmp_path)


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ("--qk-clip", "--qk-clip"),
        ("--fp8-output-proj", "--fp8-output-proj"),
        ("--te-precision-config-file a.yaml", "--te-precision-config-file"),
        ("--never-heard-of 3", "--never-heard-of"),
        ("--step-batch-size-schedule 0:16", "--step-batch-size-schedule"),
        ("--load /elsewhere", "--load"),
        ("--weight-decay $WD", "--weight-decay"),
        ("$EXTRA", "--eval-interval"),
        ("--hidden-dropout much", "model.hidden_dropout"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", "--fp8-format"),
        ("--window-size 128,128", "--window-size"),
        ("--window-size 128,0 --window-attn-skip-freq '[len(0)]'", "--window-attn-skip-freq"),
        ("--window-size 128,0 --window-attn-skip-freq [1]*10**9", "--window-attn-skip-freq"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_must_be_decided(more: str, flag: str) -> None:
    assert decided(script(more)) == [flag]


def test_flags_that_begin_to_act_are_told() -> None:
    m = script("--fp8-format hybrid --no-fp8-wgrad --fp8-interval 4")
    for flag in ("--no-fp8-wgrad", "--fp8-interval"):
        (line,) = [line for line in m.changes if line.startswith(f"{flag}:")]
        assert "the numbers change if the old run used Transformer Engine 2.0 or later" in line


def test_arguments_and_variables_of_the_script() -> None:
    more = "--weight-decay ${WD} --seed $1"
    assert decided(script(more)) == ["--weight-decay", "--seed"]
    m = script(more, "7", WD="0.3")
    assert not m.undecided
    assert (value(m, "model.seed"), value(m, "model.optim.weight_decay")) == (7, 0.3)


@pytest.mark.parametrize(
    ("style", "steps", "decay", "warmup"),
    [("cosine", 100, 80, 10), ("cosine", 60, 50, 0), ("cosine", 60, 90, 0), ("linear", 60, 50, 0),
     ("linear", 60, 90, 0)],
)  # fmt: skip
def test_a_decay_that_ends_before_or_after_the_run_is_megatrons_step_by_step(
    style: str, steps: int, decay: int, warmup: int, tmp_path: Path
) -> None:
    m = script(f"--lr-decay-style {style} --train-iters {steps} --lr-decay-iters {decay} "
               f"--lr-warmup-iters {warmup} --min-lr 1e-4")  # fmt: skip
    spec = spec_of(m, tmp_path).optim
    for step in range(steps):  # as OptimizerParamScheduler counts, with one sample a step
        if warmup and step <= warmup:
            rate = 1e-3 * step / warmup
        elif step > decay:
            rate = 1e-4
        else:
            share = (step - warmup) / (decay - warmup)
            left = 1 - share if style == "linear" else 0.5 * (math.cos(math.pi * share) + 1)
            rate = 1e-4 + (1e-3 - 1e-4) * left
        assert learning_rate(spec, step + 1) == pytest.approx(rate, rel=1e-12), step


def test_samples_are_steps_of_the_batch() -> None:
    text = SCRIPT.replace("--train-iters 100", "--train-samples 803 --lr-warmup-samples 80")
    m = migrate(text, "train.sh")
    assert value(m, "trainer.max_steps") == 100
    assert value(m, "model.optim.sched.warmup_steps") == 10


def test_renamed_settings_are_told_from_those_that_keep_name_and_value() -> None:
    m = script("--seed 5 --clip-grad 0.5 --swiglu")
    assert "--seed: 5 -> model.seed=5" in m.kept
    assert "--clip-grad: 0.5 -> trainer.gradient_clip_val=0.5" in m.renamed
    assert any(line.startswith("--swiglu: ") for line in m.changes)
    assert "renamed: " in m.report() and "kept as they are: " in m.report()


SLURM = """\
#!/bin/bash
#SBATCH -N 3 --account=lab   # who pays
#SBATCH --gres=gpu:a100:4
#SBATCH --time 01:00:00
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
srun python {launcher} pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \\
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 12 \\
    --train-iters 100 --lr 1e-3 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 511
#SBATCH --partition=ignored
"""
BY_TORCHRUN = "-m torch.distributed.run --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE"


@pytest.mark.parametrize("launcher", ["", BY_TORCHRUN])
def test_what_a_script_asks_of_slurm_is_kept_or_named(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a job" / "train.sh"
    file.parent.mkdir()
    file.write_text(SLURM.format(launcher=launcher))
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    options = "--nodes=3 --ntasks-per-node=4 --gpus-per-node=4 --account=lab --time=01:00:00"
    where = f"--config-dir '{file.parent}' --config-name train.megafp8"
    assert last.endswith(f"&& sbatch {options} examples/slurm/pretrain.sbatch {where}")
    assert (Path(last.split()[1]) / "examples/slurm/pretrain.sbatch").is_file()
    for named in ("--account=lab", "--gres: gpu:a100:4", "--cpus-per-task: 12", "--exclusive"):
        assert f"  #SBATCH {named}" in out
    assert "ignored" not in out, "Slurm reads no option below the first command"
    parallel = run_spec(config_dir=file.parent, config_name="train.megafp8", gpu=True).parallel
    assert parallel.world_size == 12


def test_tasks_and_gpus_of_slurm_that_differ_must_be_decided() -> None:
    text = SLURM.format(launcher="").replace("--exclusive", "--ntasks-per-node=8")
    assert decided(migrate(text, "train.sh")) == ["trainer.devices"]
    one = migrate(text.replace("node=8", "node=1"), "train.sh")  # torchrun in one task
    assert value(one, "trainer.devices") == 4


@pytest.mark.parametrize("shell", ["$(touch x)", "`touch x`", "a b; touch x", "'"])
def test_a_value_for_slurm_is_quoted(shell: str, tmp_path: Path) -> None:
    text = SLURM.format(launcher="").replace("lab ", f"'{shell}' ")
    m = migrate(text, "train.sh")
    (said,) = [line for line in next_steps(tmp_path / "n.yaml", m) if "sbatch" in line]
    words = shlex.split(said)
    assert shell == "'" or f"--account={shell}" in words
    assert words[words.index("sbatch") + 1] == "--nodes=3"


@pytest.mark.parametrize(
    "name", sorted({name for part in PRECISION_NAMES.values() for name in part})
)
def test_every_name_of_precisions_is_known(name: str) -> None:
    assert megatron_flags().is_known(name)


def test_no_setting_of_megatrons_is_named_like_a_secret() -> None:
    flags = megatron_flags()
    groups = (word for pattern, _ in flags.groups for word in pattern.split("*"))
    known = {*flags.passed, *flags.together, *flags.names_of_flags, *groups}
    assert len(known) > 500
    names = {*known, *(name.replace("_", "-") for name in known)}
    assert [name for name in sorted(names) if is_secret_name(name)] == []


MIXTRAL = (
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-permute-fusion --disable-bias-linear --swiglu --ffn-hidden-size 224 "
    "--expert-model-parallel-size 1 --overlap-moe-expert-parallel-comm"
)
ONE_RANK = SCRIPT.replace("GPUS=2", "GPUS=1")


def experts_script(more: str) -> Migration:
    return migrate(f"{ONE_RANK}--disable-bias-linear {more}\n", "train.sh", (), {})


def test_a_script_of_mixtral(tmp_path: Path) -> None:
    m = migrate(ONE_RANK + MIXTRAL + "\n", "train.sh", (), {})
    assert spec_of(m, tmp_path).model.moe == MoESpec(
        num_experts=8, top_k=2, ffn_hidden_size=224, layers=(True, True), router_loss="aux_loss",
        router_loss_coeff=0.01,
    )  # fmt: skip
    dropped = "\n".join(m.inert)
    for flag in ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-token-dispatcher-type",
                 "--overlap-moe-expert-parallel-comm"):  # fmt: skip
        assert f"{flag}: " in dropped, flag


@pytest.mark.parametrize(
    ("more", "field", "ours"),
    [
        ("--moe-ffn-hidden-size 96", "ffn_hidden_size", 96),
        ("--moe-layer-freq ([0]*1+[1]*1)", "layers", (False, True)),
        ("--moe-layer-freq 2", "layers", (True, False)),
        ("--moe-router-topk 1 --moe-router-pre-softmax", "pre_softmax", True),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
         "--moe-router-bias-update-rate 1e-4", "bias_update_rate", 1e-4),
        ("--moe-router-topk-scaling-factor 2.5", "scaling_factor", 2.5),
        ("--moe-z-loss-coeff 1e-3", "z_loss_coeff", 1e-3),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4", "router_loss",
         "seq_aux_loss"),
        ("--moe-shared-expert-intermediate-size 48", "shared_ffn_hidden_size", 48),
        ("--moe-router-load-balancing-type none", "router_loss", "none"),
        ("--moe-router-dtype fp32 --moe-expert-capacity-factor -1", "num_experts", 4),
    ],
)  # fmt: skip
def test_flags_of_experts(more: str, field: str, ours: Any, tmp_path: Path) -> None:
    quoted = " ".join(shlex.quote(word) for word in more.split())
    m = experts_script(f"--num-experts 4 {quoted}")
    assert getattr(spec_of(m, tmp_path).model.moe, field) == ours


@pytest.mark.parametrize(
    "more",
    ["--moe-router-bias-update-rate 1e-3", "--moe-router-load-balancing-type seq_aux_loss",
     "--moe-router-score-function sigmoid --moe-router-pre-softmax"],
)  # fmt: skip
def test_a_flag_of_experts_that_megatron_does_not_read_is_dropped(
    more: str, tmp_path: Path
) -> None:
    m = experts_script(f"--num-experts 4 {more}")
    assert spec_of(m, tmp_path).model.moe is not None
    flag = next(word for word in reversed(more.split()) if word.startswith("--"))
    assert any(line.startswith(f"{flag}: ") and "no effect without" in line for line in m.inert)


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ("--moe-router-topk 5", "model.moe_router_topk"),
        ("--moe-router-topk 1", "model.moe_router_topk"),
        ("--moe-layer-freq '[len(0)]'", "model.moe_layer_freq"),
        ("--moe-layer-freq 0", "model.moe_layer_freq"),
        ("--moe-layer-freq [1,0,1]", "model.moe_layer_freq"),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1e-2",
         "model.moe_router_load_balancing_type"),
        ("--moe-router-enable-expert-bias", "model.moe_router_enable_expert_bias"),
        ("--moe-expert-capacity-factor 1.25", "--moe-expert-capacity-factor"),
        ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type"),
        ("--moe-router-dtype fp64", "--moe-router-dtype"),
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate"),
        ("--expert-model-parallel-size 4", "model.expert_model_parallel_size"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size"),
        ("--moe-router-num-groups 2", "--moe-router-num-groups"),
        ("--moe-use-upcycling", "--moe-use-upcycling"),
        ("--moe-never-heard-of 3", "--moe-never-heard-of"),
        ("--moe-aux-loss-coeff 0.1 0.2", "model.moe_aux_loss_coeff"),
    ],
)  # fmt: skip
def test_flags_of_experts_that_cannot_be_kept_must_be_decided(more: str, flag: str) -> None:
    assert decided(experts_script(f"--num-experts 4 {more}")) == [flag]


def test_a_script_of_experts_with_biases_or_an_unknown_number_must_be_decided() -> None:
    assert decided(script("--num-experts 4 --disable-bias-linear")) == []
    assert decided(migrate(f"{ONE_RANK} --num-experts 4\n", "train.sh", (), {})) == ["model.bias"]
    (line,) = migrate(f"{ONE_RANK}--disable-bias-linear --num-experts $E --moe-router-topk 1\n",
                      "train.sh", (), {}).undecided  # fmt: skip
    assert line.startswith("--num-experts: $E: ") and "model.num_moe_experts" in line


def test_without_experts_no_flag_of_theirs_is_kept(tmp_path: Path) -> None:
    more = "--moe-router-topk 1 --moe-expert-capacity-factor 1.0 --moe-layer-freq 2"
    m = script(more)
    assert spec_of(m, tmp_path).model.moe is None
    assert "moe" not in str(m.out)
    for flag in ("--moe-router-topk", "--moe-expert-capacity-factor", "--moe-layer-freq"):
        assert any(line.startswith(f"{flag}: ") and "no experts" in line for line in m.inert)


ONLY_FLAGS = {
    "decoder_seq_length", "enable_mhc_connections", "encoder_num_layers",
    "init_method_xavier_uniform", "quick_geglu", "spec", "yaml_cfg",
}  # fmt: skip
"""Names of the command line that Megatron's configuration of a model does not have."""


def test_models_that_are_refused_in_a_script_are_known_below_model() -> None:
    known = {path.rpartition(".")[2] for path in [*nemo_keys(), *all_keys()]}
    refused = {
        name
        for name, about in megatron_flags().groups
        if isinstance(about, Refused) and about.changes_model and "*" not in name
    }
    assert len(refused) > 20 and refused - known - ONLY_FLAGS == {"transformer_layer_spec"}


def test_the_table_names_keys_that_exist() -> None:
    table = megatron_flags()
    for name, row in table.passed.items():
        assert row.key in all_keys(), name
        known = all_keys()[row.key]
        if row.default is not NONE and known.valid is not None:
            assert known.valid.accepts(row.ours(row.default)), name
    for _, about in table.groups:
        text = about.reason if isinstance(about, Refused) else about.note
        assert text and not text.endswith(".")


@pytest.mark.parametrize(
    ("flag", "name", "means"),
    [
        ("num-layers", "num_layers", True), ("norm-epsilon", "layernorm_epsilon", True),
        ("disable-bias-linear", "add_bias_linear", False), ("fp8-format", "fp8", True),
        ("no-bias-gelu-fusion", "bias_gelu_fusion", False), ("no-fp8-wgrad", "fp8_wgrad", False),
        ("no-rope-fusion", "apply_rope_fusion", False),
        ("no-position-embedding", "add_position_embedding", False),
        ("disable-fp8-wgrad", "fp8_wgrad", False), ("no-load-rng", "no_load_rng", True),
    ],
)  # fmt: skip
def test_names_of_flags(flag: str, name: str, means: bool) -> None:
    assert megatron_flags().of_flag(flag) == (name, means)


@pytest.mark.parametrize("has_slurm", [False, True])
def test_the_command_line(
    has_slurm: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/sbatch" if has_slurm else None)
    out = tmp_path / "out.yaml"
    line = "torchrun --nproc-per-node=2 " + SCRIPT.partition("--nnodes 1 ")[2]
    line = line.replace("${MODEL[@]}", "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "
                        "--seq-length 32 --max-position-embeddings 32")  # fmt: skip
    assert main(["--line", line, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    where = f"--config-dir {tmp_path} --config-name out"
    assert f"megafp8 plan {where}\n" in said and (f"pretrain {where}\n" in said) is not has_slurm
    assert (" sbatch --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 exam" in said) is has_slurm
    assert f"megafp8 dryrun {where} trainer.accelerator=gpu\n" in said
    assert run_spec(config_dir=tmp_path, config_name="out").model.num_layers == 2
    file = tmp_path / "train"
    file.write_text(SCRIPT + "--weight-decay $WD $1\n")
    assert main([str(file), "--env", "WD=0.2"]) == 2
    shown = capsys.readouterr().out
    assert "words after" not in shown and "--weight-decay: 0.2 ->" not in shown
    assert main([str(file), "--env", "WD"]) == 2 and main(["--line", "x", str(file)]) == 2


@pytest.mark.parametrize("text", ["#!/bin/bash\necho hello\n", "python pretrain_gpt.py\n"])
def test_a_script_without_training_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="starts no program"):
        migrate(text, "train.sh")


# --- Megatron Bridge ------------------------------------------------------------------------------

RUN_CONFIG = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.llama.Llama3ModelProvider", "num_layers": 4,
        "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
        "seq_length": 32, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "add_bias_linear": False, "hidden_dropout": 0.0, "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False, "fp8": None, "bf16": True, "mup_x": False,
        "tensor_model_parallel_size": 1, "fp8_margin": 0, "mtp_loss_scaling_factor": 0.1,
    },
    "train": {"train_iters": 50, "global_batch_size": 4, "micro_batch_size": 2},
    "optimizer": {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.1,
                  "adam_beta1": 0.9, "adam_beta2": 0.95, "use_distributed_optimizer": False},
    "scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 5, "start_weight_decay": 0.1,
                  "end_weight_decay": 0.1, "lr_decay_iters": None},
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "own_thing": 3},
    "dataset": {"_target_": "megatron.bridge.training.config.MockGPTDatasetConfig",
                "seq_length": 32, "random_seed": 1234},
    "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 511},
    "checkpoint": {"save": "/tmp/ck", "load": "/tmp/ck", "save_interval": 10},
    "logger": {"log_interval": 5, "wandb_project": None}, "rng": {"seed": 7},
    "mixed_precision": {
        "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", "bf16": True,
        "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1, "fp8_param": True,
        "grad_reduce_in_fp32": True, "fp8_wgrad": True, "fp8_margin": 0,
    },
}  # fmt: skip


def test_a_saved_run_of_bridge(tmp_path: Path) -> None:
    m = migrate(yaml.safe_dump(RUN_CONFIG), "run_config.yaml")
    assert decided(m) == ["trainer.devices"]
    m.undecided.clear()
    spec = spec_of(m, tmp_path)
    fp8 = spec.precision.fp8
    assert fp8 is not None and fp8.name == "tensorwise" and fp8.params_in_fp8
    assert [fp8.precision_of(f"layers.{n}.mlp.fc1") == "tensorwise" for n in range(4)] == [
        False, True, True, False]  # fmt: skip
    assert spec.model.num_kv_heads == 2 and spec.model.normalization == "rmsnorm"
    assert not spec.model.share_embeddings_and_output_weights
    assert spec.optim.betas == (0.9, 0.95) and spec.train.max_steps == 50
    assert value(m, "model.optim.name") == "distributed_fused_adam"
    assert not m.assumed, "a saved run leaves nothing out"


@pytest.mark.parametrize(
    ("section", "field", "given", "shown"),
    [
        ("model", "unknown_thing", 3, "model.unknown_thing"),
        ("model", "qk_clip", True, "model.qk_clip"),
        ("model", "softmax_type", "off-by-one", "model.softmax_type"),
        ("peft", "dim", 16, "peft.dim"),
        ("checkpoint", "finetune", True, "checkpoint.finetune"),
    ],
)
def test_fields_of_bridge_that_must_be_decided(
    section: str, field: str, given: Any, shown: str
) -> None:
    tree = RUN_CONFIG | {section: {**RUN_CONFIG.get(section, {}), field: given}}  # type: ignore[dict-item]
    assert set(decided(migrate(yaml.safe_dump(tree), "run_config.yaml"))) == {
        "trainer.devices", shown}  # fmt: skip


def test_a_saved_run_of_bridge_with_experts(tmp_path: Path) -> None:
    """Such a file has every field of Megatron's, most of them with their defaults."""
    fields = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1, 1],
              "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001,
              "moe_router_pre_softmax": False, "moe_router_score_function": "softmax",
              "moe_router_dtype": None, "moe_router_bias_update_rate": 0.001,
              "moe_ffn_hidden_size": 96, "moe_z_loss_coeff": None, "moe_grouped_gemm": True,
              "moe_flex_dispatcher_backend": "deepep", "moe_token_drop_policy": "probs",
              "moe_hybridep_num_sms_preprocessing": 108, "moe_paged_stash_page_size": 64,
              "moe_permute_fusion": True, "moe_token_dispatcher_type": "alltoall",
              "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1}  # fmt: skip
    tree = RUN_CONFIG | {"model": {**RUN_CONFIG["model"], **fields, "add_bias_linear": False}}
    m = migrate(yaml.safe_dump(tree), "run_config.yaml")
    assert decided(m) == ["trainer.devices"]
    m.undecided.clear()
    found = spec_of(m, tmp_path).model.moe
    assert found == MoESpec(
        num_experts=4, top_k=2, ffn_hidden_size=96, layers=(False, True, True, True),
        router_loss="aux_loss", router_loss_coeff=0.001,
    )  # fmt: skip
    tree["model"]["moe_shared_expert_gate"] = True
    assert decided(migrate(yaml.safe_dump(tree), "run_config.yaml")) == [
        "trainer.devices", "model.moe_shared_expert_gate"]  # fmt: skip


def test_overrides_of_a_recipe_and_a_named_precision(tmp_path: Path) -> None:
    text = """
model: {tensor_model_parallel_size: 1}
train: {train_iters: 20, global_batch_size: 8}
scheduler: {lr_warmup_iters: 10}
mixed_precision: bf16-with-fp8-current-scaling-mixed
"""
    m = migrate(text, "llama.yaml")
    assert decided(m)[0] == "recipe" and "model.num_layers" in decided(m)
    preset = {"precision": "bf16_with_fp8_current_scaling_mixed"}
    assert m.out["defaults"] == ["pretrain_gpt", preset, "_self_"]
    refused = migrate(text.replace("current", "subchannel"), "llama.yaml")
    assert any(line.startswith("mixed_precision:") and "E5M2" in line for line in refused.undecided)


def test_files_of_others_are_not_taken_for_bridges() -> None:
    accelerate = migrate("mixed_precision: fp8\nnum_processes: 2\n", "a.yaml")
    assert any("trainer.devices=2" in line for line in accelerate.renamed)


SAVED: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "bridge_run_config.yaml").read_text()
)
"""What Bridge's own classes have saved."""

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**20), st.floats(allow_nan=False),
    st.text(max_size=9),
    st.lists(st.one_of(st.integers(), st.text(max_size=4)), max_size=3),
    st.sampled_from(["???", "${model.x}", "hybrid", "cosine", {"_target_": "torch.bfloat16"}, {}]),
)  # fmt: skip
SECTIONS = ["model", "train", "mixed_precision"]
NAMES = sorted({*megatron_flags().passed, *megatron_flags().together})


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), ODD, max_size=6), st.sampled_from(["model", "train"])
)
def test_odd_values_of_bridge_give_no_traceback(fields: dict[str, Any], section: str) -> None:
    tree = RUN_CONFIG | {section: {**RUN_CONFIG[section], **fields}}  # type: ignore[dict-item]
    assert migrate(yaml.safe_dump(tree), "run_config.yaml").report()


ODD_OBJECTS: list[Any] = [
    {"_target_": "y", "_args_": arguments}
    for arguments in ([], {"a": 1}, None, 3, "a", [[]], [{}], [None], ["a", "b"])
]
ODD_OBJECTS += [{"_target_": name} for name in (None, 3, [], {}, ["a"])]
ODD_OBJECTS += [{"_args_": [1]}, {"_target_": "y", "a": {"_target_": "z", "_args_": {}}}]


@pytest.mark.parametrize("thing", ODD_OBJECTS, ids=str)
def test_odd_objects_of_bridge_give_no_traceback(thing: Any) -> None:
    """Wherever one stands: as a section, as a field, or in one of a section that is not known."""
    for section in ("model", "logger", "mixed_precision", "dataset", "optimizer", "nothing"):
        field = "lr" if section == "optimizer" else "fp8" if section == "mixed_precision" else "x"
        inside = {"num_layers": 2, "activation_func": thing, "init_method": thing, field: thing}
        for value in (thing, inside):
            text = yaml.safe_dump(RUN_CONFIG | {section: value})
            assert migrate(text, "run_config.yaml").text("run_config.yaml")
            with suppress(SettingError):
                request.read(text, "run_config.yaml", [], {})


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        tree.items() if isinstance(tree, dict) else enumerate(tree if type(tree) is list else ())
    )
    for name, item in items:
        yield (*path, name)
        yield from _places(item, (*path, name))


ACCELERATE = """\
{mixed_precision: fp8, distributed_type: DEEPSPEED, num_processes: 8, num_machines: 2,
 deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2, offload_param_device: none},
 fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}, dynamo_config: {dynamo_backend: INDUCTOR},
 parallelism_config: {parallelism_config_tp_size: 2},
 megatron_lm_config: {megatron_lm_tp_degree: 2},
 fp8_config: {backend: TE, margin: 2, interval: 4, amax_history_len: 16, fp8_format: E4M3,
              use_autocast_during_eval: true, override_linear_precision: [false, false, true]}}
"""
GOOD = [RUN_CONFIG, SAVED, yaml.safe_load(ACCELERATE), yaml.safe_load(ACCELERATE) | {
    "distributed_type": "FSDP"}]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_good_file_with_odd_values_gives_no_traceback(data: st.DataObject) -> None:
    tree = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 3))):
        *above, name = data.draw(st.sampled_from(list(_places(tree))))
        part = tree
        for step in above:
            part = part[step]
        part[name] = copy.deepcopy(data.draw(st.one_of(ODD, st.sampled_from(ODD_OBJECTS))))
    with suppress(SettingError):
        text = yaml.safe_dump(tree)
        assert migrate(text, "a.yaml").text("a.yaml")
        request.read(text, "a.yaml", [], {})


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.text("a1.-'$\"{} ,", max_size=6)), max_size=4))
def test_odd_values_of_flags_give_no_traceback(pairs: list[tuple[str, str]]) -> None:
    more = " ".join(f"--{name.replace('_', '-')} {text}" for name, text in pairs)
    try:
        assert script(more).report()
    except SettingError as error:
        assert "starts no program" in error.reason  # a quote has taken the command


def test_here_documents_that_are_submitted_are_read() -> None:
    text = "N=2\nsbatch <<EOF\n#!/bin/bash\n" + SCRIPT.replace("GPUS=2", "GPUS=$N").replace(
        "${MODEL[@]}", "--num-layers 2").replace("$GPUS", "$N") + "\nEOF\n"  # fmt: skip
    assert value(migrate(text, "train.sh"), "trainer.devices") == 2


# --- what today's files add -----------------------------------------------------------------------


def saved(**sections: dict[str, Any]) -> Migration:
    tree = SAVED | {name: {**(SAVED[name] or {}), **more} for name, more in sections.items()}
    return migrate(yaml.safe_dump(tree), "run_config.yaml")


def test_a_file_that_bridge_has_saved_needs_the_number_of_ranks_alone(tmp_path: Path) -> None:
    m = saved()
    assert decided(m) == ["trainer.devices"]
    lines = "\n".join([*m.translated, *m.inert])
    for section, fields in SAVED.items():
        for name in fields if isinstance(fields, dict) else ():
            assert name == "_target_" or f"{section}.{name}" in lines, (section, name)
    m.undecided.clear()
    spec = spec_of(m, tmp_path)
    assert spec.precision.fp8 is not None and spec.precision.fp8.name == "tensorwise"
    assert spec.model.activation == "swiglu" and spec.model.num_kv_heads == 2


def test_the_schedulers_weight_decay_is_bridges() -> None:
    assert SAVED["optimizer"]["weight_decay"] == 0.1
    assert value(saved(), "model.optim.weight_decay") == 0.033
    same = saved(scheduler={"start_weight_decay": None, "end_weight_decay": None})
    assert value(same, "model.optim.weight_decay") == 0.1
    grows = saved(scheduler={"start_weight_decay": 0.0, "weight_decay_incr_style": "linear"})
    assert "scheduler.weight_decay_incr_style" in decided(grows)


INIT = SAVED["model"]["output_layer_init_method"]


@pytest.mark.parametrize(
    ("section", "fields", "shown"),
    [
        ("model", {"output_layer_init_method": INIT | {"std": 0.02}},
         "model.output_layer_init_method"),
        ("model", {"init_method": {"_target_": "torch.nn.init.zeros_"}}, "model.init_method"),
        ("model", {"transformer_layer_spec": {"_target_": "mine.spec", "_call_": False}},
         "model.transformer_layer_spec"),
        ("model", {"activation_func": None}, "model.activation_func"),
        ("model", {"parallel_output": False}, "model.parallel_output"),
        ("model", {"embedding_init_method_std": 0.5}, "model.embedding_init_method_std"),
        ("dataset", {"add_extra_token_to_sequence": False}, "dataset.add_extra_token_to_sequence"),
        ("validation", {"eval_micro_batch_size": 1}, "validation.eval_micro_batch_size"),
        ("optimizer", {"grad_norm_skip_threshold": 5.0}, "optimizer.grad_norm_skip_threshold"),
        ("optimizer_config_override_provider", {"_target_": "mine.Provider"},
         "optimizer_config_override_provider"),
        ("peft", {"_target_": "megatron.bridge.peft.lora.LoRA"}, "peft"),
    ],
)  # fmt: skip
def test_saved_fields_that_ask_for_something_else(
    section: str, fields: dict[str, Any], shown: str
) -> None:
    assert sorted(decided(saved(**{section: fields}))) == sorted(["trainer.devices", shown])


def test_a_model_with_a_section_of_its_transformer() -> None:
    own = {"seq_length", "position_embedding_type", "_target_", "parallel_output"}
    inner = {k: v for k, v in SAVED["model"].items() if k not in own}
    outer = {k: v for k, v in SAVED["model"].items() if k in own}
    tree = SAVED | {"model": {**outer, "_builder_": "x", "transformer": inner}}
    assert migrate(yaml.safe_dump(tree), "run_config.yaml").out == saved().out


def test_the_vocabulary_is_padded_as_in_bridge() -> None:
    key = "model.make_vocab_size_divisible_by"
    assert value(saved(), key) == SAVED["model"]["make_vocab_size_divisible_by"] == 128
    assert value(saved(model={"should_pad_vocab": False}), key) == 1


YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 "


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (YARN, {"yarn_rotary_scaling_factor": 4, "original_max_position_embeddings": 4096,
                "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}),
        (YARN + "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 16",
         {"original_max_position_embeddings": 16, "yarn_beta_fast": 16}),
        (YARN + "--mscale 1.0 --mscale-all-dim 1.0", {"yarn_attention_factor": 1.0}),
        (YARN + "--mscale 0.5", {"yarn_attention_factor": 0.05 * math.log(4) + 1}),
        (YARN + "--mscale 1.0", {"yarn_attention_factor": None}),
    ],
)  # fmt: skip
def test_yarn(more: str, expected: dict[str, Any], tmp_path: Path) -> None:
    m = script(more)
    for name, number in expected.items():
        assert value(m, f"model.{name}") == number, name
    assert spec_of(m, tmp_path).model.position_embedding_type == "rope"


MUON = "--optimizer muon --muon-coefficient-type simple "


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (MUON, {"name": "muon", "muon_momentum": 0.9, "muon_use_nesterov": False,
                "muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0}),
        (MUON + "--use-distributed-optimizer", {"name": "dist_muon"}),
        (MUON + "--optimizer dist_muon", {"name": "dist_muon"}),
        (MUON + "--muon-nesterov --muon-momentum 0.95 --muon-num-ns-steps 6",
         {"muon_use_nesterov": True, "muon_momentum": 0.95, "muon_num_ns_steps": 6}),
        (MUON + "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2",
         {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2}),
        (MUON + "--tensor-model-parallel-size 2 --muon-tp-mode distributed",
         {"muon_tp_mode": "duplicated"}),
        (MUON + "--tensor-model-parallel-size 2 --muon-tp-mode blockwise",
         {"muon_tp_mode": "blockwise"}),
    ],
)  # fmt: skip
def test_muon(more: str, expected: dict[str, Any], tmp_path: Path) -> None:
    m = script(more)
    for name, said in expected.items():
        assert value(m, f"model.optim.{name}") == said, name
    assert spec_of(m, tmp_path).optim.name == value(m, "model.optim.name")


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ("--optimizer muon", "muon_coefficient_type (a default of Megatron-core 0.20)"),
        (MUON + "--muon-no-split-qkv", "--muon-no-split-qkv"),
        (MUON + "--muon-scalar-optimizer lion", "--muon-scalar-optimizer"),
        (YARN + "--no-yarn-correction-range-round-to-int",
         "--no-yarn-correction-range-round-to-int"),
        ("--optimizer soap", "--optimizer"),
        ("--init-method-std 0.01 --embedding-init-method-std 0.02", "--embedding-init-method-std"),
        ("--lr-decay-style WSD", "lr_wsd_decay_iters"),
    ],
)  # fmt: skip
def test_what_muon_and_yarn_cannot_keep(more: str, flag: str) -> None:
    assert decided(script(more)) == [flag]


def test_what_is_without_effect_beside_the_others_is_told() -> None:
    m = script("--muon-momentum 0.9 --yarn-beta-fast 3 --embedding-init-method-std 0.02")
    assert not m.undecided and "model.optim.muon_momentum" not in str(m.out)
    for flag in ("--muon-momentum", "--yarn-beta-fast", "--embedding-init-method-std"):
        assert any(flag in line or "muon_momentum" in line for line in m.inert), flag
    assert value(m, "model.optim.muon_momentum") == {} and value(m, "model.yarn_beta_fast") == {}


@pytest.mark.parametrize("style", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_wsd_has_megatrons_styles(style: str, tmp_path: Path) -> None:
    m = script(f"--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style {style}")
    schedule = spec_of(m, tmp_path).optim.schedule
    assert (schedule.name, schedule.wsd_decay_steps, schedule.wsd_decay_style) == ("WSD", 20, style)


def test_a_script_that_reads_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "common.sh").write_text("WD=0.3\n")
    (tmp_path / "train.sh").write_text(
        'source "$(dirname "$0")/common.sh"\nsource more.sh\n' + SCRIPT + "--weight-decay $WD\n"
    )
    assert main([str(tmp_path / "train.sh")]) == 2
    said = capsys.readouterr().out
    assert "source common.sh (line 1) is the file beside the script" in said
    assert "--weight-decay: 0.3 -> model.optim.weight_decay=0.3" in said
    assert "must be decided: 1\n" in said and "line 2, which reads another script (more.sh)" in said


@pytest.mark.parametrize("above", ["..", "in/../..", ""])
def test_files_of_other_folders_are_not_read(above: str, tmp_path: Path) -> None:
    (tmp_path / "below/in").mkdir(parents=True)
    (tmp_path / "common.sh").write_text("WD=0.3\n")
    (tmp_path / "precision.yaml").write_text(PRECISIONS)
    place = above or tmp_path
    text = (
        f"source {place}/common.sh\n{SCRIPT} --fp8-format e4m3 --weight-decay $WD "
        f"--te-precision-config-file {place}/precision.yaml\n"
    )
    left = decided(migrate(text, "train.sh", folder=tmp_path / "below"))
    assert sorted(left) == ["--te-precision-config-file", "--weight-decay", "script"]


@pytest.mark.parametrize(
    "kind", ["link", "relative link", "link of a link", "folder", "nested", "FIFO"]
)
def test_a_link_out_of_the_folder_of_a_script_is_not_followed(kind: str, tmp_path: Path) -> None:
    """A private file beside which no script lies would stand in the report and the new file."""
    home, private = tmp_path / "scripts", tmp_path / "private"
    (home / "sub").mkdir(parents=True)
    private.mkdir()
    (private / "x.sh").write_text("WD=0.25\n")
    (private / "p.yaml").write_text(PRECISIONS)
    name, place = "sub/", home / "sub"
    if kind == "folder":
        (home / "far").symlink_to(private)
        name = "far/"
    for file in ("x.sh", "p.yaml"):
        if kind == "link":
            (place / file).symlink_to(private / file)
        elif kind == "relative link":
            (place / file).symlink_to(f"../../private/{file}")
        elif kind == "link of a link":
            (home / file).symlink_to(private / file)
            (place / file).symlink_to(f"../{file}")
        elif kind == "FIFO":
            os.mkfifo(place / file)
        elif kind == "nested":  # a file in the folder reads the link
            (place / file).symlink_to(private / file)
            (home / "first.sh").write_text("source sub/x.sh\n")
    first = "first.sh" if kind == "nested" else f"{name}x.sh"
    text = (
        f"source {first}\n{SCRIPT} --fp8-format e4m3 --weight-decay $WD "
        f"--te-precision-config-file {name}p.yaml\n"
    )
    m = migrate(text, "train.sh", folder=home)
    assert "0.25" not in m.report() + m.text("train.sh")
    assert sorted(decided(m)) == ["--te-precision-config-file", "--weight-decay", "script"]


def test_a_link_within_the_folder_of_a_script_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("WD=0.25\n")
    (tmp_path / "b.sh").symlink_to("a.sh")
    m = migrate(f"source b.sh\n{SCRIPT} --weight-decay $WD\n", "train.sh", folder=tmp_path)
    assert value(m, "model.optim.weight_decay") == 0.25


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pretrain_bert.py", "other models than GPT are not trained here"),
        ("/m/pretrain_t5.py", "other models than GPT are not trained here"),
        ("train.py", "is not pretrain_gpt.py"),
        ("my_pretrain_gpt2.py", ""),
    ],
)
def test_another_program_is_not_taken_for_gpts(program: str, reason: str) -> None:
    m = migrate(SCRIPT.replace("pretrain_gpt.py", program) + "\n", "train.sh")
    assert [reason in line for line in m.undecided] == ([True] if reason else [])


PRECISIONS = """\
configs:
  nvfp4: {transformer_engine_config_type: TEQuantizationParams,
          training_recipe: {fp4_quantization_recipe: nvfp4}}
  mxfp8: {training_recipe: {fp8_quantization_recipe: mxfp8}}
  bf16: {training_recipe: {}}
matchers:
  off: {config: bf16, type: glob, pattern: "*", enabled: false}
  first: {config: bf16, type: glob, pattern: "*layers.0.mlp*", enabled: true}
  fc1: {config: nvfp4, type: glob, pattern: "*fc1*", enabled: true}
  attention: {config: mxfp8, type: glob, pattern: "*.linear_qkv", enabled: true}
"""


def with_precisions(text: str, tmp_path: Path, more: str = "--fp8-format e4m3") -> Migration:
    (tmp_path / "precision.yaml").write_text(text)
    line = f"{SCRIPT} {more} --te-precision-config-file precision.yaml\n"
    return migrate(line, "train.sh", folder=tmp_path)


def test_precisions_by_patterns_become_rules(tmp_path: Path) -> None:
    spec = spec_of(with_precisions(PRECISIONS, tmp_path), tmp_path)
    fp8 = spec.precision.fp8
    assert fp8 is not None
    found = {
        f"{layer}.{linear}": fp8.precision_of(f"layers.{layer}.{linear}")
        for layer in range(2)
        for linear in ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")
    }
    assert found == {
        "0.attention.qkv": "mxfp8", "0.attention.projection": "delayed",
        "0.mlp.fc1": "high_precision", "0.mlp.fc2": "high_precision",
        "1.attention.qkv": "mxfp8", "1.attention.projection": "delayed",
        "1.mlp.fc1": "nvfp4", "1.mlp.fc2": "delayed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "more", "reason"),
    [
        ("mxfp8}}", "delayed}}", "", "the recipe delayed"),
        ("mxfp8}}", "mxfp8, fp8_param: true}}", "", "fp8_param=True"),
        ("mxfp8}}", "tensorwise}}", "--fp8-format hybrid", "the format e4m3"),
        ("mxfp8}}", "mxfp8}, evaluation_recipe: {}}", "", "in validation"),
        ("glob, pattern: \"*fc1*\"", "regex, pattern: x", "", "the type regex"),
        ("config: mxfp8", "config: none", "", "no training_recipe for none"),
        ("configs:", "configs: [", "", ""),
        ("matchers:", "others:", "", "no matchers"),
        ("", "", "--fp8-format e4m3 --first-last-layers-bf16", "first and last layers"),
        ("", "", "--bf16", "without FP8"),
        ("", "", "--fp8-format e4m3 --pipeline-model-parallel-size 2", "other numbers in stages"),
    ],
)  # fmt: skip
def test_precisions_by_patterns_that_cannot_be_kept(
    old: str, new: str, more: str, reason: str, tmp_path: Path
) -> None:
    m = with_precisions(PRECISIONS.replace(old, new), tmp_path, more or "--fp8-format e4m3")
    lines = [line for line in m.undecided if line.startswith("--te-precision-config-file")]
    assert len(lines) == 1 and reason in lines[0] and "model.fp8_modules" in lines[0]
