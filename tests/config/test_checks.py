"""Test each rule: what it refuses, under which key, and which values its hint offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.config.load import load, load_all
from megafp8.config.rules import nearest_divisors, nearest_multiples
from tests.config.helpers import check, load_problems, run_spec, the_problem

FP8 = "model.fp8=True"
JOB = ("model.micro_batch_size=8", "model.global_batch_size=32", "model.optim.lr=1e-3")


@pytest.mark.parametrize(
    "override",
    [
        "trainer.devices=0",
        "trainer.num_nodes=0",
        "trainer.max_time=0",
        "trainer.max_time=soon",
        "trainer.accelerator=tpu",
        "trainer.precision=16-true",
        "trainer.gradient_clip_algorithm=both",
        "trainer.precision=fp8",
        "trainer.max_steps=-1",
        "trainer.log_every_n_steps=0",
        "trainer.val_check_interval=0",
        "trainer.limit_val_batches=-1",
        "trainer.gradient_clip_val=-1",
        "trainer.gradient_clip_val=nan",
        "trainer.nonfinite_policy=ignore",
        "exp_manager.name=a/b",
        "exp_manager.name=..",
        "exp_manager.exp_dir=''",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=0",
        "exp_manager.checkpoint_callback_params.train_time_interval=soon",
        "exp_manager.checkpoint_callback_params.train_time_interval=0",
        "exp_manager.checkpoint_callback_params.train_time_interval=00:61:00",
        "exp_manager.checkpoint_callback_params.keep=0",
        "model.num_layers=0",
        "model.init_method_std=0",
        "model.init_method_std=inf",
        "model.hidden_dropout=1.0",
        "model.attention_dropout=-0.1",
        "model.ffn_dropout=nan",
        "model.layernorm_epsilon=0",
        "model.make_vocab_size_divisible_by=0",
        "model.tokenizer.library=nope",
        "model.tokenizer.vocab_size=256",
        "model.seed=-1",
        "model.data.data_prefix=''",
        "model.data.splits_string='900,0,50'",
        "model.data.splits_string='900,50,25,25'",
        "model.data.splits_string=''",
        "model.data.splits_string=[]",
        "model.data.splits_string=-5",
        "model.data.splits_string='0,50,50'",
        "model.data.splits_string='900,50,-1'",
        "model.data.splits_string='a,b,c'",
        "model.data.splits_string='900,nan,50'",
        "model.data.splits_string=5",
        "model.optim.name=sgd",
        "model.optim.name=lion",
        "model.optim.name=megatron_fused_adam",
        "model.optim.lr=0",
        "model.optim.lr=nan",
        "model.optim.weight_decay=-1",
        "model.optim.betas=[0.9]",
        "model.optim.betas=[0.9,1.0]",
        "model.optim.eps=0",
        "model.optim.sched.name=Linear",
        "model.optim.sched.name=T5InverseSquareRootAnnealing",
        "model.optim.sched.name=CyclicLR",
        "model.optim.sched.warmup_steps=-1",
        "model.optim.sched.warmup_ratio=1.5",
        "model.optim.sched.hold_steps=-1",
        "model.optim.sched.power=0",
        "model.optim.sched.d_model=0",
        "model.native_amp_init_scale=0",
        "model.native_amp_growth_interval=0",
        "model.hysteresis=0",
        "model.rampup_batch_size=8",
        "model.rampup_batch_size=[8,8]",
        "model.rampup_batch_size=[8,0,100]",
        "model.rampup_batch_size=[8,8,true]",
        "model.rampup_batch_size=[8,8,1.5]",
        "model.optim.sched.min_lr=-1",
    ],
)
def test_value_out_of_range(override: str) -> None:
    problem = the_problem(override)
    assert problem.key == override.partition("=")[0] and "secret" not in problem.reason


@pytest.mark.parametrize(
    "override",
    [
        "model.fp8_margin=-17",
        "model.fp8_margin=33",
        "model.fp8_interval=0",
        "model.fp8_amax_history_len=0",
        "model.fp8_amax_history_len=65537",
        "model.fp8_amax_compute_algo=min",
        "model.fp8_backend=apex",
    ],
)
def test_fp8_value_out_of_range(override: str) -> None:
    assert the_problem(FP8, override).key == override.partition("=")[0]


TWO_STAGES = ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]
FOUR_STAGES = ["trainer.devices=4", "model.pipeline_model_parallel_size=4"]


@pytest.mark.parametrize(
    ("overrides", "key", "offered"),
    [
        (["model.hidden_size=250"], "model.hidden_size", ["248", "252"]),
        (
            ["model.tensor_model_parallel_size=2", "trainer.devices=3"],
            "model.tensor_model_parallel_size",
            ["Nearest sizes: 1;", "2 or 4"],
        ),
        (
            ["trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.num_attention_heads=1"],
            "model.num_attention_heads",
            ["2", "1"],
        ),
        (
            ["trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.ffn_hidden_size=1023"],
            "model.ffn_hidden_size",
            ["1022 or 1024"],
        ),
        (
            ["trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.make_vocab_size_divisible_by=127"],
            "model.make_vocab_size_divisible_by",
            ["126 or 128"],
        ),
        (
            ["trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.override_vocab_size=601"],
            "model.override_vocab_size",
            ["600 or 602"],
        ),
        (
            ["model.pipeline_model_parallel_size=2", "trainer.devices=3"],
            "model.pipeline_model_parallel_size",
            ["Nearest sizes: 1;", "2 or 4"],
        ),
        (
            [*FOUR_STAGES, "model.tensor_model_parallel_size=2"],
            "model.tensor_model_parallel_size",
            ["Nearest sizes: 1", "8"],
        ),
        (
            ["model.virtual_pipeline_model_parallel_size=2"],
            "model.virtual_pipeline_model_parallel_size",
            ["pipeline_model_parallel_size above 1"],
        ),
        (
            ["model.pipeline_schedule=GPipe"],
            "model.pipeline_schedule",
            ["pipeline_model_parallel_size above 1"],
        ),
        (
            ["model.pipeline_model_parallel_layout='2,2'"],
            "model.pipeline_model_parallel_layout",
            ["pipeline_model_parallel_size above 1"],
        ),
        (
            [*TWO_STAGES, "model.pipeline_schedule=1F1B",
             "model.virtual_pipeline_model_parallel_size=2"],
            "model.virtual_pipeline_model_parallel_size",
            ["Interleaved1F1B"],
        ),
        (
            [*TWO_STAGES, "model.pipeline_schedule=ZBVZeroBubble"],
            "model.virtual_pipeline_model_parallel_size",
            ["=2"],
        ),
        (
            [*TWO_STAGES, "model.pipeline_schedule=Interleaved1F1B"],
            "model.virtual_pipeline_model_parallel_size",
            ["2 or more", "1F1B"],
        ),
        ([*TWO_STAGES, "model.num_layers=5"], "model.num_layers", ["4 or 6", "layout"]),
        (
            [*TWO_STAGES, "model.pipeline_model_parallel_layout='1,2'"],
            "model.pipeline_model_parallel_layout",
            ["2 numbers that add up to 4"],
        ),
        (
            [*TWO_STAGES, "model.pipeline_model_parallel_layout='1,2,1'"],
            "model.pipeline_model_parallel_layout",
            ["2 numbers that add up to 4"],
        ),
        ([*FOUR_STAGES, "model.global_batch_size=24"], "model.global_batch_size", ["32", "GPipe"]),
        (
            [*TWO_STAGES, "model.global_batch_size=40",
             "model.virtual_pipeline_model_parallel_size=2"],
            "model.global_batch_size",
            ["32 or 48"],
        ),
        (
            [*TWO_STAGES, "model.rampup_batch_size=[8,8,100]"],
            "model.rampup_batch_size",
            ["at least 16", "GPipe"],
        ),
        (
            [FP8, *TWO_STAGES, "model.fp8_backend=te",
             "model.pipeline_schedule=InterleavedZeroBubble"],
            "model.pipeline_schedule",
            ["native", "1F1B"],
        ),
        (
            [FP8, *TWO_STAGES, "model.fp8_backend=torchao", "model.fp8_recipe=tensorwise",
             "model.pipeline_schedule=InterleavedZeroBubble"],
            "model.fp8_backend",
            ["1F1B"],
        ),
        (
            [FP8, "trainer.devices=2", "model.reduce_amax=False", "model.tp_only_amax_red=True"],
            "model.tp_only_amax_red",
            ["Set model.reduce_amax=True"],
        ),
        (
            [FP8, "trainer.devices=2", "model.fp8_params=True", "model.tp_only_amax_red=True"],
            "model.tp_only_amax_red",
            ["leave model.fp8_params out"],
        ),
        (["model.global_batch_size=30"], "model.global_batch_size", ["24 or 32", "6 or 10"]),
        (["trainer.devices=3"], "model.global_batch_size", ["24 or 48"]),
        (["model.data.seq_length=512"], "model.data.seq_length", ["at most 256"]),
        (["model.max_position_embeddings=128"], "model.max_position_embeddings",
         ["256", "model.encoder_seq_length=128 at most"]),
        (["model.optim.sched.min_lr=1"], "model.optim.sched.min_lr", ["at most 0.001"]),
        ([FP8, "model.transformer_engine=False"], "model.fp8", ["transformer_engine=True"]),
        ([FP8, "model.fp8_hybrid=False"], "model.fp8_hybrid", ["model.fp8_e4m3=True"]),
        ([FP8, "model.hidden_size=264"], "model.hidden_size", ["256 or 272"]),
        (
            [FP8, "trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.hidden_size=272"],
            "model.hidden_size",
            ["256 or 288"],
        ),
        (
            [FP8, "trainer.devices=2", "model.tensor_model_parallel_size=2",
             "model.ffn_hidden_size=1040"],
            "model.ffn_hidden_size",
            ["1024 or 1056"],
        ),
        (
            [FP8, "model.micro_batch_size=2", "model.encoder_seq_length=20"],
            "model.micro_batch_size",
            ["4", "16 or 24"],
        ),
        (
            [FP8, "model.fp8_hybrid=True", "model.fp8_e4m3=True"],
            "model.fp8_hybrid",
            ["False"],
        ),
        (
            ["exp_manager.explicit_log_dir=x", "exp_manager.exp_dir=y"],
            "exp_manager.exp_dir",
            ["Leave one"],
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(overrides: list[str], key: str, offered: list[str]) -> None:
    problem = the_problem(*JOB, *overrides)
    assert problem.key == key
    for text in offered:
        assert text in problem.hint


@pytest.mark.parametrize(
    "overrides",
    [
        [FP8, "model.fp8_e4m3=True"],
        [FP8, "model.fp8_e4m3=True", "model.fp8_hybrid=False"],
        [FP8, "model.fp8_margin=-16", "model.fp8_amax_history_len=1"],
        [FP8, "model.micro_batch_size=4", "model.encoder_seq_length=20"],
        ["trainer.devices=2", "model.tensor_model_parallel_size=2", "model.reduce_amax=True"],
        [FP8, "trainer.devices=2", "model.tensor_model_parallel_size=2", "model.reduce_amax=False"],
        ["model.transformer_engine=False"],
        ["trainer.gradient_clip_val=null"],
        ["trainer.gradient_clip_val=0"],
        ["model.data.splits_string=[98,2,0]"],
        ["model.data.splits_string='98,2,0'"],
        ["model.data.splits_string='900,50'"],
        ["model.data.splits_string=[99,1]"],
        ["model.data.splits_string='949/50/1'"],
        ["model.data.splits_string='100,0,0'", "trainer.limit_val_batches=0"],
        ["model.data.splits_string=100", "trainer.limit_val_batches=0.0"],
        ["model.data.splits_string='9,0'", "trainer.limit_val_batches=0", "trainer.fast_dev_run=2"],
        ["model.data.data_prefix={train:[/a]}", "trainer.limit_val_batches=0"],
        ["exp_manager.checkpoint_callback_params.every_n_train_steps=null"],
        ["exp_manager.explicit_log_dir=x"],
        ["model.max_position_embeddings=512"],
        ["model.hidden_size=252", "model.num_attention_heads=3"],
    ],
)
def test_what_fits_together(overrides: list[str]) -> None:
    run_spec(*overrides)


@pytest.mark.parametrize(
    "detail",
    [
        "model.fp8_e4m3=True",
        "model.fp8_hybrid=False",
        "model.fp8_margin=1",
        "model.fp8_interval=2",
        "model.fp8_amax_history_len=16",
        "model.fp8_amax_compute_algo=most_recent",
        "model.reduce_amax=False",
    ],
)
def test_fp8_detail_without_fp8(detail: str) -> None:
    problem = the_problem(detail)
    assert problem.key == detail.partition("=")[0]
    assert "model.fp8=True" in problem.hint
    if detail != "model.fp8_hybrid=False":  # which leaves FP8 without a format
        load([detail, FP8, "trainer.devices=2"])


def test_fp8_recipe_of_a_yaml_may_be_switched_off(tmp_path: Path) -> None:
    recipe = "  fp8_margin: 1\n  fp8_e4m3: true\n  fp8_hybrid: true\n"
    start = "defaults: [pretrain_gpt, _self_]\nmodel:\n"
    (tmp_path / "on.yaml").write_text(start + recipe + "  fp8: true\n")
    (tmp_path / "off.yaml").write_text(start + recipe + "  fp8: false\n")
    on = run_spec(config_dir=tmp_path, config_name="on")
    assert on.precision.fp8 is not None and on.precision.fp8.backward_format == "e4m3"
    notes = load_all([], tmp_path, "on").notes
    assert [n for n in notes if "model.fp8_hybrid=True (on.yaml): model.fp8_e4m3=True" in n]
    off = run_spec("model.fp8=False", config_dir=tmp_path, config_name="on")
    assert off.resolved == run_spec().resolved
    found = load_problems(config_dir=tmp_path, config_name="off")
    assert {problem.key for problem in found} == {"model.fp8_margin", "model.fp8_e4m3"}


def test_log_dir_of_the_command_line_wins_over_exp_dir_of_a_yaml(tmp_path: Path) -> None:
    start = "defaults: [pretrain_gpt, _self_]\nexp_manager:\n  exp_dir: y\n"
    (tmp_path / "mine.yaml").write_text(start)
    spec = run_spec("exp_manager.explicit_log_dir=x", config_dir=tmp_path, config_name="mine")
    assert spec.observe.explicit_log_dir == "x"


def test_validate_takes_settings_as_they_are() -> None:
    values = load([])
    check(values)
    with pytest.raises(Exception, match="248 or 252"):
        check(values | {"model.hidden_size": 250})


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        # 13 divides neither 96 heads nor 96 layers, and 8 * 8 / gcd(8 * 8, 8) = 8
        (["trainer.num_nodes=13", "model.tensor_model_parallel_size=8",
          "model.pipeline_model_parallel_size=8"],
         "model.tensor_model_parallel_size", "Nearest trainer.num_nodes: 8 or 16"),
        # 1024 / 8 = 128, of which 4 and 8 divide 96 layers
        (["trainer.num_nodes=128", "model.tensor_model_parallel_size=8",
          "model.pipeline_model_parallel_size=7"],
         "model.pipeline_model_parallel_size",
         "Nearest sizes: 4 or 8; or trainer.num_nodes: 126 or 133"),
        (["model.tensor_model_parallel_size=8", "model.pipeline_model_parallel_size=8"],
         "model.tensor_model_parallel_size",
         "Nearest trainer.devices: 64; or trainer.num_nodes: 8"),
        (["model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=4"],
         "model.tensor_model_parallel_size",
         "Nearest sizes: 2; or model.pipeline_model_parallel_size: 2; or trainer.devices: 16; "
         "or trainer.num_nodes: 2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_the_ranks_name_sizes_that_do(
    settings: list[str], key: str, hint: str
) -> None:
    job = ["model=gpt3_175b", "trainer.devices=8", *settings]
    problem = load_problems(*job)[0]
    assert (problem.key, problem.hint) == (key, hint)


def test_a_hint_of_huge_numbers_is_quick() -> None:
    huge = "trainer.devices=1000000", "model.context_parallel_size=300007"
    assert "trainer.devices: 900021" in load_problems(*huge)[0].hint


def test_nearest_values() -> None:
    assert nearest_multiples(250, 16) == "240 or 256"
    assert nearest_multiples(3, 16) == "16"
    assert nearest_divisors(12, 5) == "4 or 6"
    assert nearest_divisors(12, 20) == "12"
    assert nearest_divisors(7, 2) == "1 or 7"


def test_async_save_needs_periodic_saves() -> None:
    params = "exp_manager.checkpoint_callback_params"
    problem = the_problem(f"{params}.async_save=True", f"{params}.every_n_train_steps=null")
    assert problem.key == f"{params}.async_save" and "periodic" in problem.reason
