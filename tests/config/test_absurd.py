"""Test settings that would end in a traceback or never end: each is refused by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli.main import run_app
from megafp8.config.errors import SettingError
from megafp8.config.load import load
from tests.config.helpers import load_problems

ROOT = Path(__file__).resolve().parents[2]
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
YAML = {
    "unclosed bracket": ("model: {seed: [1, 2\n", "expected ',' or ']'"),
    "unclosed brace": ("model: {seed: 1\n", "expected ',' or '}'"),
    "tab": ("model:\n\tseed: 1\n", "found character"),
    "duplicate key": ("model: {seed: 1, seed: 2}\n", "duplicate key seed"),
    "duplicate key in a list": (
        "model: {precision_schedule: [{from: 3, recipe: bf16, recipe: mxfp8}]}\n",
        "duplicate key recipe",
    ),
    "unknown tag": ("name: !!foo x\n", "tag:yaml.org,2002:foo"),
    "deep nesting": (f"name: {'[' * 500}{']' * 500}\n", "deeper than 64 levels"),
    "recursion": ("model: &m {seed: *m}\n", "the alias *m is inside"),
    "alias bomb": (BOMB, "it stands for over 200000 values"),
    "hexadecimal": (f"model: {{seed: 0x{'f' * 5000}}}\n", "a number of 5002 digits"),
    "pairs": ("model: {nsys_profile: {ranks: !!pairs [a: 1]}}\n", "the tag !!pairs"),
    "omap": ("model: {nsys_profile: {ranks: !!omap [a: 1]}}\n", "the tag !!omap"),
    "half a pair": ('name: "\\ud800"\n', "half of a pair of surrogates"),
}


@pytest.mark.parametrize("more", [["--cfg", "job"], ["-m", "model.seed=1,2"]], ids=["one", "sweep"])
@pytest.mark.parametrize("name", YAML)
def test_a_bad_yaml_is_one_message(
    name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = YAML[name]
    (tmp_path / "bad.yaml").write_text("defaults: [pretrain_gpt, _self_]\n" + text)
    argv = ["--config-dir", str(tmp_path), "--config-name", "bad", *more]
    assert run_app(argv, lambda cfg, info: pytest.fail("the job started")) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "bad.yaml" in error


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.step_timeout=1e10", "trainer.step_timeout"),
        ("model.num_layers=10000000", "model.num_layers"),
        ("model.num_attention_heads=9007199254740992", "model.num_attention_heads"),
        ("model.hidden_size=9007199254740992", "model.hidden_size"),
        (f"model.hidden_size={'9' * 400}", "model.hidden_size"),
        ("model.encoder_seq_length=9007199254740992", "model.encoder_seq_length"),
        ("model.global_batch_size=1099511627776", "model.global_batch_size"),
        ("model.tokenizer.vocab_size=9007199254740992", "model.tokenizer.vocab_size"),
        ("trainer.num_nodes=9007199254740992", "trainer.num_nodes"),
        (f"model.pipeline_model_parallel_layout={'9' * 4000}", "pipeline_model_parallel_layout"),
        (f"model.pipeline_model_parallel_layout='1,{'9' * 5000}'", "parallel_layout"),
        (f"model.data.splits_string={'[' * 300}{']' * 300}", "model.data.splits_string"),
        (f"model.fsdp_grad_reduce_dtype={'[' * 300}{']' * 300}", "fsdp_grad_reduce_dtype"),
    ],
)
def test_a_size_beyond_every_machine_is_refused_by_its_key(override: str, key: str) -> None:
    assert any(key in problem.key for problem in load_problems(override))


@pytest.mark.parametrize("name", ["team/gpt", "''", "a#b", "x" * 129])
def test_a_project_that_weights_and_biases_refuses_is_refused_at_once(name: str) -> None:
    found = load_problems(
        "exp_manager.create_wandb_logger=True", f"exp_manager.wandb_logger_kwargs.project={name}"
    )
    assert any(problem.key.endswith("wandb_logger_kwargs.project") for problem in found)


@pytest.mark.parametrize("value", ["[1.0,nan]", "[inf,1]", "[1,inf]", "[1,-inf]", "[1,1e300]"])
def test_shares_of_files_are_finite(value: str) -> None:
    files = ["model.data.train_ds.file_names=[a.jsonl,b.jsonl]"]
    shares = f"model.data.train_ds.concat_sampling_probabilities={value}"
    found = load_problems(*files, shares)
    assert any(problem.key.endswith("concat_sampling_probabilities") for problem in found)


@pytest.mark.parametrize("value", ["2", "-7", "0.5", "1e30", str(10**30)])
def test_a_number_is_no_truth(value: str) -> None:
    found = load_problems(f"model.fp8={value}", f"model.fp8_power_2_scale={value}")
    assert {problem.key for problem in found} >= {"model.fp8", "model.fp8_power_2_scale"}
    assert load(["model.fp8=1"])["model.fp8"] is True
    assert load(["model.fp8=0"])["model.fp8"] is False


@pytest.mark.parametrize(
    "setting",
    [
        "model.optim.lr=1e30",
        "model.optim.lr=inf",
        "model.optim.weight_decay=1e17",
        "model.init_method_std=1e30",
        "trainer.gradient_clip_val=1e30",
        f"trainer.max_steps={10**19}",
        "model.rampup_batch_size=[8,8,1000000000000000000000]",
    ],
)
def test_a_number_that_is_too_large_is_told_the_largest(setting: str) -> None:
    """`lr=1e30` was told that it must be above 0."""
    (found,) = load_problems(setting)
    assert str(found).startswith(setting.partition("=")[0]) and "default" in found.hint
    assert "no number may be above 9007199254740992 (2**53)" in found.reason


def test_a_decay_that_overflows_is_refused() -> None:
    schedule = ["model.optim.sched.name=NoamHoldAnnealing", "model.optim.sched.decay_rate=1e15"]
    assert any(p.key == "model.optim.sched.decay_rate" for p in load_problems(*schedule))


def test_a_growing_batch_of_too_many_sizes_is_refused() -> None:
    ranks = ["trainer.devices=2", "model.pipeline_model_parallel_size=2"]
    batch = ["model.rampup_batch_size=[2,1,1]", "model.global_batch_size=16777216"]
    found = load_problems(*ranks, *batch, "model.micro_batch_size=1")
    assert any(p.key == "model.rampup_batch_size" and "sizes" in p.reason for p in found)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("hydra.sweeper=null", "names no sweeper"),
        ("hydra.launcher=null", "names no launcher"),
        ("hydra.sweeper.max_batch_size=0", "is not a number of jobs above 0"),
        ("hydra.sweeper.max_batch_size=-1", "is not a number of jobs above 0"),
        ("model.seed=range(0,1000000000)", "more than 10000 jobs"),
        ("model.seed=shuffle(range(0,1000000000))", "more than 10000 jobs"),
        ("model=range(0,1000000000)", "more than 10000 jobs"),
        ("model.seed=glob(*)", "names files by a pattern"),
        ("precision=glob(fp8*)", "names files by a pattern"),
    ],
)
def test_a_sweep_that_cannot_end_or_start_is_refused(
    argument: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["-m", argument, "trainer.max_steps=1,2"]
    assert run_app(argv, lambda cfg, info: pytest.fail("a job started")) == 2
    assert reason in capsys.readouterr().err


def test_a_sweep_of_a_yaml_that_cannot_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "hydra: {sweeper: {params: {model.seed: 'range(0,1000000000)'}}}\n"
    (tmp_path / "wide.yaml").write_text("defaults: [pretrain_gpt, _self_]\n" + text)
    argv = ["--config-dir", str(tmp_path), "--config-name", "wide", "-m"]
    assert run_app(argv, lambda cfg, info: pytest.fail("a job started")) == 2
    assert "more than 10000 jobs" in capsys.readouterr().err


def test_a_list_that_a_shell_has_split_gets_a_hint_that_works() -> None:
    with pytest.raises(SettingError, match=r"Quote the whole setting.*'model.optim.betas=\[…\]'"):
        load(["model.optim.betas=[0.9,"])
    assert load(["model.optim.betas=[0.9, 0.95]"])["model.optim.betas"] == [0.9, 0.95]


@pytest.mark.parametrize("argument", ["--cfg job", "--help", "--version"])
@pytest.mark.parametrize("stream", ["| head -c 1", "> /dev/full", ">&-"])
def test_a_stream_that_is_closed_or_full_is_no_traceback(argument: str, stream: str) -> None:
    command = f"{sys.executable} pretrain_gpt.py {argument} {stream}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
